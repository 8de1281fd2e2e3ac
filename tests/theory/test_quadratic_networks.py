from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from scipy.optimize import minimize

import featlearn as fl
from featlearn.errors import InputError
from featlearn.theory import QuadraticNetwork, least_norm_network, separation, separation_data


def random_form(d: int, seed: int) -> torch.Tensor:
    q = torch.randn(d, d, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    return (q + q.mT) / 2


@pytest.mark.parametrize("seed", range(4))
def test_the_least_norm_is_what_a_minimizer_finds(seed: int) -> None:
    """Against a penalty method on free weights: no network that computes the form costs less."""
    form = random_form(3, seed)
    result = least_norm_network(form, width=5)
    torch.testing.assert_close(result.form, form, rtol=0, atol=1e-12)
    formula = 3 / 2 ** (2 / 3) * float((torch.linalg.eigvalsh(form).abs() ** (2 / 3)).sum())
    assert result.cost == pytest.approx(formula, rel=1e-12)
    rng = np.random.default_rng(seed)

    def lagrangian(theta: np.ndarray, weight: float) -> tuple[float, np.ndarray]:
        t = torch.tensor(theta, requires_grad=True)
        network = QuadraticNetwork(t[:5], t[5:].reshape(5, 3))
        value = t.square().sum() + weight * (network.form - form).square().sum()
        value.backward()
        return float(value.detach()), t.grad.numpy()

    def least(q: torch.Tensor) -> float:
        return 3 / 2 ** (2 / 3) * float((torch.linalg.eigvalsh(q).abs() ** (2 / 3)).sum())

    # A penalty gives way, so that the form is not quite met: the formula is held against the form that is.
    gaps, near = [], []
    for _ in range(6):
        theta = rng.standard_normal(20)
        for weight in (1e1, 1e2, 1e3, 1e4):
            options = {"maxiter": 5000, "ftol": 1e-15, "gtol": 1e-10}
            theta = minimize(lagrangian, theta, args=(weight,), jac=True, method="L-BFGS-B", options=options).x
        alone = QuadraticNetwork(torch.tensor(theta[:5]), torch.tensor(theta[5:].reshape(5, 3)))
        near.append(float((alone.form - form).abs().max()))  # a start may lose a direction for good
        gaps.append(alone.cost / least(alone.form) - 1)
    assert min(near) < 0.05
    assert min(gaps) > -1e-9  # nothing costs less
    assert min(gaps) < 1e-4  # and a minimizer as much
    assert 2 > 1.05 * 3 / 2 ** (2 / 3)  # so that the paper's constant is too large


def test_outputs_and_width() -> None:
    form = random_form(3, 7)
    x = torch.randn(11, 3, dtype=torch.float64)
    torch.testing.assert_close(least_norm_network(form)(x), torch.einsum("ni,ij,nj->n", x, form, x))
    rank_one = torch.outer(torch.ones(3), torch.ones(3))
    assert least_norm_network(rank_one, width=1).cost == pytest.approx(3 / 2 ** (2 / 3) * 3 ** (2 / 3))
    with pytest.raises(InputError, match="width must be at least the rank of form, 3"):
        least_norm_network(form, width=2)
    for wrong in (torch.ones(2, 3), torch.ones(2), torch.full((2, 2), math.nan)):
        with pytest.raises(InputError, match="form"):
            least_norm_network(wrong)


def test_the_distribution() -> None:
    data = separation_data(0.3, 0.1)
    assert data.X.shape == (81, 4)
    assert float(data.weights.sum()) == pytest.approx(1)
    heavy = int(data.weights.argmax())
    assert data.X[heavy].tolist() == [1, 1, 0, 0]
    assert float(data.weights[heavy]) == pytest.approx(0.7 + 0.3 / 81)
    x = data.X[57]
    assert float(data.y[57]) == pytest.approx(float(0.1 * x[0] * x[1] + x[2] * x[3]))
    with pytest.raises(InputError, match="p must be a finite number above 0 and below 1"):
        separation_data(0.0)


@pytest.mark.parametrize(
    ("options", "cosine"),
    [
        ({"weight_decay": 1e-5}, 1.0),  # of rank one: no separation at the published lambda
        ({"weight_decay": 1e-6}, 0.0823),
        ({"weight_decay": 1e-6, "half": True}, 0.0859),
        ({"p": 5e-6, "weight_decay": 1e-7}, 0.0674),
    ],
)
def test_fact_holds_and_the_nfa_fails(options: dict, cosine: float) -> None:
    result = separation(restarts=5, **options)
    assert result.relgrad < 1e-5
    assert result.fact_cosine > 0.99999
    assert result.agop_cosine == pytest.approx(cosine, abs=3e-4)
    torch.testing.assert_close(result.fact, result.nfm, rtol=1e-4, atol=1e-6)


def test_matrices_are_those_of_a_probe() -> None:
    """The same network as a module, measured by the library on the weighted data."""
    result = separation(p=0.5, tau=0.3, weight_decay=1e-2, width=7, restarts=3)

    class Square(torch.nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x.square()

    model = torch.nn.Sequential(torch.nn.Linear(4, 7, bias=False), Square(), torch.nn.Linear(7, 1, bias=False)).double()
    with torch.no_grad():
        model[0].weight.copy_(result.network.W)
        model[2].weight.copy_(result.network.a[None])
    data = separation_data(0.5, 0.3)
    times = (data.weights * 162).round().long()  # probabilities of 1/162 and 82/162
    torch.testing.assert_close(times.double() / 162, data.weights)
    X, y = data.X.repeat_interleave(times, 0), data.y.repeat_interleave(times)[:, None]
    f = fl.probe(model, (X, y), loss=lambda out, t: (out - t).square().sum(1), weight_decay=1e-2)["0"]
    torch.testing.assert_close(f.nfm, result.nfm)
    torch.testing.assert_close(f.agop, result.agop)
    torch.testing.assert_close(f.fact, result.fact)


@pytest.mark.parametrize("options", [{"width": 0}, {"restarts": -1}, {"weight_decay": 0.0}, {"tau": 1.0}])
def test_bad_arguments(options: dict) -> None:
    with pytest.raises(InputError, match="must be"):
        separation(**options)
