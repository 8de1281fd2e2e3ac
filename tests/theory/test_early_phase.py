from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
import pytest
import torch
from torch import Tensor

from featlearn.errors import InputError
from featlearn.theory import EARLY_EXPONENTS, EarlyPhase, early_phase

Activation = Callable[[Tensor], Tensor]


def network(n: int, seed: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Data and weights of figure 28's ratios: d/n = .6 and h/n = 1.2; |v| at most 1."""
    g = torch.Generator().manual_seed(seed)
    d, h = round(0.6 * n), round(1.2 * n)
    X = torch.randn(n, d, generator=g, dtype=torch.float64)
    direction = torch.randn(d, generator=g, dtype=torch.float64)
    y = torch.tanh(X @ direction / direction.norm()) + 0.2 * torch.randn(n, generator=g, dtype=torch.float64)
    W = torch.randn(h, d, generator=g, dtype=torch.float64)
    return X, y, W, 2 * torch.rand(h, generator=g, dtype=torch.float64) - 1


def measured(
    X: Tensor, y: Tensor, W: Tensor, v: Tensor, activation: Activation, rate: float, steps: int
) -> dict[str, float]:
    """What gradient descent does, by autograd; the tangent kernel from the explicit Jacobian."""
    d, h = X.shape[1], len(W)
    g = torch.Generator().manual_seed(7)
    other = torch.randn(200, d, generator=g, dtype=torch.float64)
    other *= math.sqrt(d) / other.norm(dim=1, keepdim=True)

    def f(w: Tensor, points: Tensor) -> Tensor:
        return activation(points @ w.mT / math.sqrt(d)) @ v / math.sqrt(h)

    def kernels(w: Tensor) -> tuple[Tensor, Tensor]:
        jacobian = torch.autograd.functional.jacobian(lambda u: f(u, X), w).flatten(1)
        features = activation(X @ w.mT / math.sqrt(d))
        return features @ features.mT / h, jacobian @ jacobian.mT

    now = W.clone()
    for _ in range(steps):
        now.requires_grad_()
        (gradient,) = torch.autograd.grad((y - f(now, X)).square().mean() / 2, now)
        now = (now - rate * gradient).detach()
    (ck_0, ntk_0), (ck, ntk) = kernels(W), kernels(now)
    return {
        "weights": float((now - W).norm()),
        "ck": float((ck - ck_0).norm()),
        "ntk": float((ntk - ntk_0).norm()),
        "outputs": float((f(now, other) - f(W, other)).abs().max()),
        "loss": float((y - f(now, X)).norm()),
    }


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize(
    ("activation", "kinks"), [(torch.tanh, ()), (torch.sin, ()), (torch.relu, (0.0,))], ids=["tanh", "sin", "relu"]
)
@pytest.mark.parametrize("rate", [0.5, 20.0])
def test_nothing_moves_further_than_the_bounds(
    activation: Activation, kinks: tuple[float, ...], seed: int, rate: float
) -> None:
    given = network(40, seed)
    bound = early_phase(*given, activation, rate=rate, steps=3, kinks=kinks)
    result = measured(*given, activation, rate, 3)
    for name, value in result.items():
        assert value <= getattr(bound, name) * (1 + 1e-12), name
    assert math.isinf(bound.ntk) == bool(kinks)
    assert [one.holds for one in bound.assumptions if "''" in one.text] == [not kinks]


def test_one_small_step_of_a_linear_network_meets_the_bound_of_the_weights() -> None:
    """With one sample, one unit and sigma = x every inequality of the proof is an equation."""
    X, y, W, v = torch.tensor([[3.0]]), torch.tensor([2.0]), torch.tensor([[0.5]]), torch.tensor([0.8])
    bound = early_phase(X, y, W, v, lambda z: 1.0 * z, rate=0.1, steps=1)
    residual = 2 - 0.8 * 1.5
    assert bound.weights == pytest.approx(0.1 * residual * 0.8 * 3, rel=1e-6)
    assert bound.ntk == 0  # sigma'' = 0


@pytest.mark.slow
def test_the_bounds_fall_with_the_powers_of_the_lemma() -> None:
    """Slopes of log bound against log n, averaged over seeds: two standard errors around the lemma's exponents."""
    sizes, seeds = (100, 200, 400, 800), 6
    logs = np.array([
        [[math.log(getattr(_bound(n, seed), name)) for name in EARLY_EXPONENTS] for n in sizes] for seed in range(seeds)
    ])  # fmt: skip
    x = np.log(sizes) - np.log(sizes).mean()
    slopes = np.einsum("s,rsq->rq", x, logs) / (x @ x)
    for name, values in zip(EARLY_EXPONENTS, slopes.T, strict=True):
        error = values.std(ddof=1) / math.sqrt(seeds)
        # Norms of Gaussian matrices reach their limits like n^(-2/3), which bends the lines by less than .05.
        assert abs(values.mean() - EARLY_EXPONENTS[name]) < 0.05 + 2 * error, name


def _bound(n: int, seed: int) -> EarlyPhase:
    return early_phase(*network(n, seed), torch.tanh, rate=0.1, steps=3)


def test_no_step_changes_nothing() -> None:
    bound = early_phase(*network(20, 0), torch.relu, rate=1.0, steps=0, kinks=(0.0,))
    assert (bound.weights, bound.ck, bound.ntk, bound.outputs) == (0, 0, 0, 0)


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"y": torch.zeros(3)}, "X must have shape"),
        ({"readout": torch.zeros(3)}, "X must have shape"),
        ({"rate": 0.0}, "rate must be a finite number above 0"),
        ({"steps": -1}, "steps must be an integer of at least 0"),
        ({"X": torch.full((20, 12), math.nan)}, "NaN"),
    ],
    ids=["y", "readout", "rate", "steps", "nan"],
)
def test_bad_input(changed: dict[str, object], message: str) -> None:
    X, y, W, v = network(20, 0)
    given = {"X": X, "y": y, "weight": W, "readout": v, "activation": torch.tanh, "rate": 1.0, "steps": 1, **changed}
    with pytest.raises(InputError, match=message):
        early_phase(**given)  # type: ignore[arg-type]
