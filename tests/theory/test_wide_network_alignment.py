from __future__ import annotations

import math

import pytest
import torch

from featlearn.errors import InputError
from featlearn.linalg.activations import _NAMED, activation_module
from featlearn.theory._dual_kernels import ACTIVATIONS, as_activation, pair_mean
from featlearn.theory._wide_network_alignment import derivative_correlation, predict_depth, sphere_alignment


def normal_integral(x: torch.Tensor) -> torch.Tensor:
    return x * torch.special.ndtr(x) + torch.exp(-x.square() / 2) / math.sqrt(2 * math.pi)


def of_models(name: str):
    """The activation of `featlearn.models` of a name, and its derivative by autograd."""
    module = activation_module(name)

    def slope(x: torch.Tensor) -> torch.Tensor:
        x = x.detach().requires_grad_()
        with torch.enable_grad():
            return torch.autograd.grad(module(x).sum(), x)[0]

    return module, slope


FUNCTIONS = {
    "erf": (torch.erf, lambda x: 2 / math.sqrt(math.pi) * torch.exp(-x.square())),
    "quadratic": (torch.square, lambda x: 2 * x),
    "normal-integral": (normal_integral, torch.special.ndtr),
    "linear": (lambda x: x, torch.ones_like),
    "relu": (torch.relu, lambda x: (x > 0).to(x.dtype)),
    **{name: of_models(name) for name in ("tanh", "gelu", "silu", "softplus", "sigmoid", "identity")},
}
COVARIANCES = torch.tensor([[1.0, 0.3, 1.0], [2.0, -1.1, 0.7], [0.5, 0.0, 3.0], [1.5, 1.5, 1.5]], dtype=torch.float64).T


@pytest.mark.parametrize("name", [name for name in ACTIVATIONS if name != "relu"])
def test_closed_forms_against_quadrature(name: str) -> None:
    phi, slope = FUNCTIONS[name]
    result, wanted = ACTIVATIONS[name], as_activation((phi, slope))
    torch.testing.assert_close(result.kernel(*COVARIANCES), wanted.kernel(*COVARIANCES), rtol=1e-9, atol=1e-11)
    torch.testing.assert_close(
        result.slope_kernel(*COVARIANCES), wanted.slope_kernel(*COVARIANCES), rtol=1e-9, atol=1e-11
    )


@pytest.mark.parametrize("name", FUNCTIONS)
def test_kernels_by_sampling(name: str) -> None:
    phi, slope = FUNCTIONS[name]
    n = 400_000
    z = torch.randn(2, n, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    for q11, q12, q22 in COVARIANCES.T.tolist():
        u = math.sqrt(q11) * z[0]
        v = q12 / math.sqrt(q11) * z[0] + math.sqrt(max(0.0, q22 - q12**2 / q11)) * z[1]
        for function, kernel in ((phi, ACTIVATIONS[name].kernel), (slope, ACTIVATIONS[name].slope_kernel)):
            values = function(u) * function(v)
            error = float(values.std()) / math.sqrt(n)
            wanted = float(kernel(*(torch.tensor(q, dtype=torch.float64) for q in (q11, q12, q22))))
            assert abs(float(values.mean()) - wanted) < 5 * error + 1e-12


def fine_grid(function, q11: float, q12: float, q22: float) -> float:
    """E[f(u) f(v)] by Simpson's rule on a grid of 1201 x 1201 points."""
    z = torch.linspace(-9, 9, 1201, dtype=torch.float64)
    w = torch.full_like(z, 2.0)
    w[1::2], w[0], w[-1] = 4.0, 1.0, 1.0
    w *= torch.exp(-z.square() / 2) * float(z[1] - z[0]) / 3 / math.sqrt(2 * math.pi)
    u = math.sqrt(q11) * z
    v = q12 / math.sqrt(q11) * z[:, None] + math.sqrt(max(0.0, q22 - q12**2 / q11)) * z
    return float((function(u) * w) @ (function(v) @ w))


@pytest.mark.parametrize("name", sorted(set(_NAMED) - {"relu"}))
def test_every_activation_of_the_models_has_its_kernels(name: str) -> None:
    """Small, equal, unequal and large variances, where a Gauss-Hermite rule of 96 nodes is off by a tenth."""
    assert name in ACTIVATIONS
    phi, slope = of_models(name)
    for q in ((0.01, -0.005, 0.02), (1.0, 0.3, 1.0), (2.0, 2.0, 2.0), (30.0, 11.0, 30.0), (0.1, 0.9, 25.0)):
        entries = [torch.tensor(value, dtype=torch.float64) for value in q]
        for function, kernel in ((phi, ACTIVATIONS[name].kernel), (slope, ACTIVATIONS[name].slope_kernel)):
            assert float(kernel(*entries)) == pytest.approx(fine_grid(function, *q), rel=1e-8), q


@pytest.mark.parametrize("name", [*_NAMED, "linear", "normal-integral"])
def test_depth_takes_every_activation_of_the_models(name: str) -> None:
    g = torch.Generator().manual_seed(0)
    X, y = torch.randn(12, 5, generator=g, dtype=torch.float64), torch.randn(12, generator=g, dtype=torch.float64)
    for hidden in (1, 2, 3):
        result = predict_depth(X, y, hidden, name)
        assert 0 < result.rho <= 1 + 1e-12
        assert torch.equal(result.ptk, result.ptk.mT)
    identity, linear = (predict_depth(X, y, 2, n).rho for n in ("identity", "linear"))
    assert identity == linear


@pytest.mark.parametrize("name", ["tanh", "gelu", "silu", "softplus", "sigmoid", "erf", "relu"])
def test_the_kernel_of_two_hidden_layers_is_that_of_wide_networks(name: str) -> None:
    g = torch.Generator().manual_seed(2)
    X = torch.randn(6, 8, generator=g, dtype=torch.float64)
    phi, slope = of_models(name)
    width, kernels = 1000, []
    for _ in range(24):
        w0 = torch.randn(width, 8, generator=g, dtype=torch.float64) / math.sqrt(8)
        w1 = torch.randn(width, width, generator=g, dtype=torch.float64) * math.sqrt((1 + (name == "relu")) / width)
        a = torch.randn(width, generator=g, dtype=torch.float64)
        h0 = X @ w0.mT
        h1 = phi(h0) @ w1.mT
        j = ((a * slope(h1)) @ w1) * slope(h0)
        kernels.append(j @ j.mT / width / (1 + (name == "relu")))
    drawn = torch.stack(kernels)
    wanted = predict_depth(X, torch.ones(6), activation=name).ptk
    error = drawn.std(0) / math.sqrt(len(drawn))
    # The kernel of a finite network has a bias of 1/width.
    assert ((drawn.mean(0) - wanted).abs() < 5 * error + 0.01 * wanted.abs().max()).all()
    assert float((drawn.mean(0) - wanted).norm() / wanted.norm()) < 0.05


def test_points_at_zero() -> None:
    """A pre-activation that is always 0 has the slope of 0: for ReLU 0, for tanh 1."""
    X = torch.tensor([[0.0, 0.0], [1.0, 2.0], [2.0, -1.0]], dtype=torch.float64)
    y = torch.ones(3)
    assert predict_depth(X, y, 2, "relu").ptk[0].tolist() == [0.0, 0.0, 0.0]
    assert float(predict_depth(X, y, 1, "tanh").ptk[0, 0]) == pytest.approx(1)
    assert math.isfinite(predict_depth(X, y, 2, "gelu").rho)


def test_the_sheet_s_closed_forms_at_variance_one() -> None:
    r = torch.linspace(-0.9, 0.9, 7, dtype=torch.float64)
    one = torch.ones_like(r)
    torch.testing.assert_close(
        ACTIVATIONS["normal-integral"].slope_kernel(one, r, one), 0.25 + (r / 2).arcsin() / (2 * math.pi)
    )
    torch.testing.assert_close(ACTIVATIONS["erf"].slope_kernel(one, r, one), 4 / math.pi / (9 - 4 * r.square()).sqrt())


def test_pair_mean_takes_blocks() -> None:
    q = torch.rand(40, 60, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    one = torch.ones((), dtype=torch.float64)
    torch.testing.assert_close(pair_mean(torch.erf, one, q, one), ACTIVATIONS["erf"].kernel(one, q, one))


def test_rho_on_the_sphere_tends_to_one() -> None:
    """For n = d^1.3, 1 - rho falls a hundredfold from d = 10 to 400 (7e-4 to 7e-6 on the sheet)."""
    gaps = {}
    for d in (10, 400):
        n = round(d**1.3)
        gaps[d] = sum(1 - sphere_alignment(d, n, seed=s).rho for s in range(5 if d == 10 else 1)) / (
            5 if d == 10 else 1
        )
    assert 2e-4 < gaps[10] < 3e-3
    assert 3e-6 < gaps[400] < 2e-5
    assert gaps[10] / gaps[400] > 40
    for activation in ("erf", "relu", (torch.tanh, lambda x: 1 - x.tanh().square())):
        assert sphere_alignment(30, 83, activation).rho > 0.99


def observed(X: torch.Tensor, y: torch.Tensor, width: int, name: str, generator: torch.Generator) -> float:
    """rho of a drawn network of two hidden layers, from its own P."""
    phi, slope = FUNCTIONS[name]
    d = X.shape[1]
    w0 = torch.randn(width, d, generator=generator, dtype=torch.float64) / math.sqrt(d)
    w1 = torch.randn(width, width, generator=generator, dtype=torch.float64) / math.sqrt(width)
    a = torch.randn(width, generator=generator, dtype=torch.float64)
    h0 = X @ w0.mT
    h1 = phi(h0) @ w1.mT
    j = ((a * slope(h1)) @ w1) * slope(h0)
    return derivative_correlation(X, y, j @ j.mT)


def test_depth_against_wide_networks() -> None:
    """The quadratic network's error falls with the width; ReLU is only roughly right, as the paper says."""
    g = torch.Generator().manual_seed(0)
    X = torch.randn(48, 48, generator=g, dtype=torch.float64) * (1 / (1 + torch.arange(48.0, dtype=torch.float64)))
    y = X[:, 0] * X[:, 1] + X[:, 2]
    gaps = {}
    for width in (48, 768):
        predicted = predict_depth(X, y, activation="quadratic", width=width).rho
        values = [observed(X, y, width, "quadratic", g) for _ in range(6)]
        gaps[width] = abs(sum(values) / 6 - predicted)
    assert gaps[768] < gaps[48]
    assert gaps[768] < 0.02
    relu = predict_depth(X, y, activation="relu").rho
    values = [observed(X, y, 768, "relu", g) for _ in range(6)]
    assert relu == pytest.approx(sum(values) / 6, abs=0.1)


def test_the_expected_kernel_of_finite_quadratic_networks_by_sampling() -> None:
    g = torch.Generator().manual_seed(1)
    X = torch.randn(4, 3, generator=g, dtype=torch.float64)
    k, n = 3, 200_000
    w0 = torch.randn(n, k, 3, generator=g, dtype=torch.float64)
    w1 = torch.randn(n, k, k, generator=g, dtype=torch.float64)
    a = torch.randn(n, 1, k, generator=g, dtype=torch.float64)
    h0 = X @ w0.mT
    h1 = h0.square() @ w1.mT
    j = ((a * 2 * h1) @ w1) * 2 * h0
    values = j @ j.mT
    q = X @ X.mT
    p = q.diagonal()[:, None] * q.diagonal()
    wanted = 16 * k * (k * (k - 1) * q * (p + 2 * q.square()) + 3 * k * (9 * p * q + 6 * q**3))
    error = values.std(0) / math.sqrt(n)
    assert ((values.mean(0) - wanted).abs() < 5 * error).all()
    ours = predict_depth(X, torch.ones(4), activation="quadratic", width=k).ptk
    torch.testing.assert_close(ours / ours[0, 0], wanted / wanted[0, 0])


def test_the_infinite_width_is_the_limit_of_the_finite() -> None:
    X = torch.randn(5, 4, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
    y = torch.randn(5, generator=torch.Generator().manual_seed(3), dtype=torch.float64)
    limit, wide = (predict_depth(X, y, activation="quadratic", width=w).ptk for w in (None, 10**7))
    torch.testing.assert_close(limit / limit[0, 0], wide / wide[0, 0], rtol=1e-5, atol=1e-8)


def test_bad_arguments() -> None:
    X, y = torch.randn(5, 3), torch.randn(5)
    with pytest.raises(InputError, match=r"one of 'relu'.*got 'swish'") as raised:
        predict_depth(X, y, activation="swish")
    assert all(repr(name) in str(raised.value) for name in _NAMED)
    with pytest.raises(InputError, match="with activation='quadratic' and hidden=2"):
        predict_depth(X, y, width=5)
    with pytest.raises(InputError, match="hidden must be"):
        predict_depth(X, y, hidden=0)
    with pytest.raises(InputError, match="d must be an integer of at least 1"):
        sphere_alignment(0, 5)
    with pytest.raises(InputError, match=r"ptk \(n, n\)"):
        derivative_correlation(X, y, torch.ones(4, 4))
    with pytest.raises(InputError, match="pair"):
        as_activation((1, 2))  # type: ignore[arg-type]
