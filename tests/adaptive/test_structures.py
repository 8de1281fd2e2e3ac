"""One M of all features, penalties by layer, adapted kernels of solutions, and penalties on two sides."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from adaptive_oracles import gradients
from scipy.optimize import minimize, minimize_scalar
from torch import nn

import featlearn as fl
from featlearn.adaptive import AdaptiveTangentRegressor, adapt, effective_joint_penalty, effective_penalty, power
from featlearn.models import mlp

source = torch.Generator().manual_seed(0)
X = torch.randn(14, 5, generator=source, dtype=torch.float64)
Z = torch.randn(6, 5, generator=source, dtype=torch.float64)
Y = torch.stack([X[:, 0] * X[:, 1], X[:, 2].sin()], dim=1)


def draw(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def table_of(model: nn.Module, points: torch.Tensor) -> torch.Tensor:
    """Gradients of all outputs in all parameters, (n c, P)."""
    parts = gradients(model, points)
    return torch.cat([a.flatten(2) for a in parts.values()], dim=2).flatten(0, 1)


# -- one M of all features (theorem 1) ---------------------------------------------------------------------------------


@pytest.mark.parametrize("penalty", ["square", "absolute", "power:3"])
@pytest.mark.parametrize("ridge", [0.0, 1e-2])
def test_theorem_1_of_a_network(penalty: str, ridge: float) -> None:
    """Against a search over s for an explicit M = I + (s - 1) u u^T of all parameters."""
    model, mu = mlp([5, 6, 2], activation="tanh", bias=True, generator=1, dtype=torch.float64), 0.3
    options = {"penalty": penalty, "structure": "whole", "scale": mu, "ridge": ridge}
    result = AdaptiveTangentRegressor(model, **options).fit(X.numpy(), Y.numpy())
    train, test = table_of(model, X), table_of(model, Z)
    with torch.no_grad():
        r, start = (Y - model(X)).reshape(-1), model(Z)
    kernel, shift = train @ train.T, len(X) * ridge
    w = fl.adaptive.PENALTIES.get(penalty) or power(3)

    def solved(s: float) -> torch.Tensor:
        return torch.linalg.solve(s**2 * kernel + shift * torch.eye(len(r), dtype=torch.float64), r)

    def objective(s: float) -> float:
        return float(r @ solved(s)) + mu * float(w(s))

    grid = np.linspace(1, 12, 2001)
    near = grid[np.argmin([objective(s) for s in grid])]
    bounds = (max(1.0, near - 0.01), near + 0.01)
    s = float(minimize_scalar(objective, bounds=bounds, method="bounded", options={"xatol": 1e-10}).x)
    assert result.factors_[""] == pytest.approx([s], rel=1e-5)
    assert result.objective_ == pytest.approx(objective(s), rel=1e-9)
    beta = s**2 * train.T @ solved(s)
    u = beta / beta.norm()
    m = torch.eye(len(u), dtype=torch.float64) + (s - 1) * torch.outer(u, u)
    assert s > 1.05
    theta = (train @ m).T @ torch.linalg.solve(
        train @ m @ m @ train.T + shift * torch.eye(len(r), dtype=torch.float64), r
    )
    assert result.predict(Z.numpy()) == pytest.approx((start + (test @ m @ theta).reshape(-1, 2)).numpy(), abs=1e-5)
    expected = (test @ m @ m @ train.T).reshape(6, 2, 14, 2).permute(0, 2, 1, 3)
    assert result.adapted_kernel(Z.numpy(), X.numpy()) == pytest.approx(expected.numpy(), rel=1e-5, abs=1e-5)
    square = (test @ m @ m @ test.T).reshape(6, 2, 6, 2).permute(0, 2, 1, 3)
    assert result.adapted_kernel(Z.numpy()) == pytest.approx(square.numpy(), rel=1e-5, abs=1e-5)


def test_one_m_predicts_like_lazy_training() -> None:
    model = mlp([5, 6, 1], activation="tanh", bias=True, generator=1, dtype=torch.float64)
    y = Y[:, 0].numpy()
    lazy = fl.LazyRegressor(model).fit(X.numpy(), y).predict(Z.numpy())
    whole = AdaptiveTangentRegressor(model, structure="whole", ridge=0.0).fit(X.numpy(), y)
    assert whole.predict(Z.numpy()) == pytest.approx(lazy, abs=1e-8)
    assert whole.scale_ == 1.0


def test_no_m_of_all_features_is_cheaper() -> None:
    """A search over all symmetric M, from the solution and from random starts, finds nothing better."""
    table, r = draw(3, 4, seed=1), 2 * draw(3, seed=2)
    result = adapt(table, r, structure="whole")

    def objective(entries: np.ndarray) -> float:
        m = torch.from_numpy(entries.reshape(4, 4))
        rows = table @ m
        fit = float(r @ torch.linalg.solve(rows @ rows.T + 1e-13 * torch.eye(3), r))
        return fit + float((torch.linalg.svdvals(m) - 1).square().sum())

    rng = np.random.default_rng(0)
    for start in (np.eye(4), *(np.eye(4) + 0.5 * rng.standard_normal((4, 4)) for _ in range(4))):
        found = minimize(objective, start.ravel(), method="BFGS")
        assert found.fun >= result.objective - 1e-6
    assert minimize(objective, np.eye(4).ravel(), method="BFGS").fun == pytest.approx(result.objective, rel=1e-4)


def test_one_m_needs_one_anchored_penalty() -> None:
    model = mlp([5, 6, 1], generator=1, dtype=torch.float64)
    y = Y[:, 0].numpy()
    with pytest.raises(fl.InputError, match="must be the same for all layers"):
        AdaptiveTangentRegressor(model, structure="whole", penalty={"0": "square", "2": "absolute"}).fit(X.numpy(), y)
    with pytest.raises(fl.InputError, match="must have its minimum at 1"):
        adapt(draw(3, 4), draw(3), structure="whole", penalty="norm", allow_unanchored=True)


# -- penalties by layer ------------------------------------------------------------------------------------------------


def test_penalties_by_layer() -> None:
    model = mlp([5, 6, 4, 1], activation="tanh", bias=True, generator=1, dtype=torch.float64)
    y = 3 * Y[:, 0].numpy()
    options = {"scale": 0.05, "ridge": 1e-4}

    def factors(penalty, **more):
        return AdaptiveTangentRegressor(model, penalty=penalty, **options, **more).fit(X.numpy(), y).factors_

    one = factors({"0": "square"})
    assert set(one) == {"0"}
    sides = factors({"0": ("square", "indicator"), "2": ("indicator", "absolute"), "4": "square"})
    assert (sides["0"][1] == 1).all()
    assert sides["0"][0].max() > 1.05
    assert (sides["2"][0] == 1).all()
    assert sides["2"][1].max() > 1.05
    assert (sides["4"][1] == 1).all()
    assert sides["4"][0].max() > 1.05
    assert set(factors("square")) == {"0", "2"}
    assert set(factors("square", adapt_last=True)) == {"0", "2", "4"}
    assert set(factors({"*": "square"}, adapt_last=False)) == {"0", "2"}
    with pytest.raises(fl.InputError, match="matches no layer"):
        factors({"9": "square"})


def test_fixed_layers_are_those_of_an_explicit_problem() -> None:
    a, b, r = draw(8, 3, 4), draw(8, 2, 5, seed=1), 2 * draw(8, seed=2)
    options = {"ridge": 1e-3, "scale": 0.1, "tolerance": 1e-10}
    result = adapt({"a": a, "b": b}, r, penalty={"a": "square"}, **options)
    fixed = adapt({"a": a, "b": b}, r, penalty={"a": "square", "b": "indicator"}, **options)
    assert result.objective == pytest.approx(fixed.objective)
    assert set(result.transforms) == {"a"}
    c = result.coefficients[:, 0]
    assert result.matrices["b"][0] == pytest.approx(torch.einsum("n,noi->oi", c, b).numpy(), abs=1e-12)
    # No other M of b is part of the objective, and M of a is the best for its B.
    d = np.linalg.svd(result.matrices["a"][0].numpy(), compute_uv=False)
    cost = 0.1 * effective_joint_penalty("square", "square", d / np.sqrt(0.1)).sum()
    values = torch.einsum("noi,oi->n", a, result.matrices["a"][0]) + torch.einsum(
        "noi,oi->n", b, result.matrices["b"][0]
    )
    rest = float(result.matrices["b"].square().sum()) + float((values - r).square().sum()) / (8 * 1e-3)
    assert result.objective == pytest.approx(cost + rest, rel=1e-5)


def test_a_network_without_a_layer_to_adapt() -> None:
    with pytest.warns(UserWarning, match="no layer is adapted"):
        result = AdaptiveTangentRegressor(nn.Linear(5, 1).double(), ridge=1e-2).fit(X.numpy(), Y[:, 0].numpy())
    assert not result.factors_


# -- solutions of arrays -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("structure", ["layers", "diagonal", "whole"])
def test_predictions_and_kernels_of_a_solution(structure: str) -> None:
    train = {"a": draw(6, 2, 3, 4), "b": draw(6, 2, 2, 3, seed=1)}
    test = {"a": draw(4, 2, 3, 4, seed=2), "b": draw(4, 2, 2, 3, seed=3)}
    r = draw(6, 2, seed=4)
    solution = adapt(train, r, structure=structure, scale=0.05, ridge=1e-3)
    predicted = solution.predict(test)
    expected = sum(torch.einsum("ncoi,oi->nc", test[name], solution.matrices[name][0]) for name in test)
    assert predicted == pytest.approx(expected.numpy())
    # The function is kernel ridge regression with the adapted kernel.
    kernel = solution.adapted_kernel(train).permute(0, 2, 1, 3).reshape(12, 12)
    cross = solution.adapted_kernel(test, train).permute(0, 2, 1, 3).reshape(8, 12)
    shifted = kernel + 6 * 1e-3 * torch.eye(12, dtype=torch.float64)
    values = cross @ torch.linalg.solve(shifted, r.reshape(-1))
    assert predicted.reshape(-1) == pytest.approx(values.numpy(), rel=1e-4, abs=1e-5)
    with pytest.raises(fl.InputError, match="features must have matrices of the shapes"):
        solution.predict({"a": train["a"]})
    alone = adapt(draw(5, 7), draw(5, seed=1), ridge=1e-3)
    assert alone.adapted_kernel(draw(3, 7)).shape == (3, 3)


# -- theorem 2 with penalties that are not convex in log z -------------------------------------------------------------


def test_rotated_matrices_can_cost_less_than_theorem_2_says() -> None:
    """FORMULAS: B = diag(3.5, 2.1), |z - 1|^(1/2): 4.37854 with the singular vectors of B, 4.35904 without."""
    d = np.array([3.5, 2.1])
    with pytest.warns(UserWarning, match="theorem 2 does not hold for the penalty 'power:0.5' on both sides"):
        aligned = effective_joint_penalty("power:0.5", "power:0.5", d).sum()
    assert aligned == pytest.approx(4.37854, abs=5e-6)

    def cost(parameters: np.ndarray) -> float:
        s, t, left, right = 1 + np.exp(parameters[:2]), 1 + np.exp(parameters[2:4]), parameters[4], parameters[5]
        rotate = [np.array([[np.cos(a), -np.sin(a)], [np.sin(a), np.cos(a)]]) for a in (left, right)]
        m_out, m_in = (u @ np.diag(f) @ u.T for u, f in zip(rotate, (s, t), strict=True))
        w = np.linalg.solve(m_out, np.diag(d)) @ np.linalg.inv(m_in)
        return float((np.sqrt(s - 1) + np.sqrt(t - 1)).sum() + (w**2).sum())

    rng = np.random.default_rng(0)
    starts = rng.uniform([-9, -9, -9, -9, -2, -2], [1, 1, 1, 1, 2, 2], (200, 6))
    least = min(minimize(cost, start, method="Nelder-Mead", options={"maxiter": 4000}).fun for start in starts[:40])
    assert least < aligned - 0.015  # the aligned value is no minimum


def test_where_penalties_warn() -> None:
    with pytest.warns(UserWarning, match=r"needs p >= 1. Use it on one side"):
        half = power(0.5)
    a, r = draw(5, 3, 4), draw(5)
    with pytest.warns(UserWarning, match="of 'a'"):
        adapt({"a": a}, r, penalty=half)
    model = mlp([5, 6, 1], generator=1, dtype=torch.float64)
    with pytest.warns(UserWarning, match="theorem 2 does not hold"):
        AdaptiveTangentRegressor(model, penalty="power:0.5", scale=0.1, ridge=0.1).fit(X.numpy(), Y[:, 0].numpy())
    # One side, another structure, and functions that are convex in log z, give no warning (warnings are errors).
    adapt({"a": a}, r, penalty=(half, "indicator"))
    adapt({"a": a}, r, penalty=half, structure="diagonal")
    adapt({"a": a}, r, penalty=half, last="a")
    adapt({"a": a}, r, penalty=lambda z: np.log(z) ** 2)
    effective_penalty(half, 2.0)
    with pytest.warns(UserWarning, match="on both sides"):
        effective_joint_penalty(lambda z: np.sqrt(np.abs(np.log(z))), "square", 2.0)


@pytest.mark.parametrize(
    ("first", "second"), [("power:0.5", "power:0.5"), ("power:0.5", "absolute"), ("power:3", "square"), (None, None)]
)
@pytest.mark.filterwarnings("ignore:theorem 2 does not hold")
def test_search_against_brute_force(first, second) -> None:
    log2 = lambda z: np.log(z) ** 2 + 0.1 * np.abs(np.log(z))  # noqa: E731
    w1, w2 = (fl.adaptive.Penalty("f", log2) if w is None else w for w in (first, second))
    v = np.geomspace(1e-3, 300, 40)
    values = effective_joint_penalty(w1, w2, v)
    a = np.log(400) * np.linspace(0, 1, 1500) ** 2
    functions = [fl.adaptive._penalties.as_penalty(w) for w in (w1, w2)]
    costs = functions[0](np.exp(a))[:, None] + functions[1](np.exp(a))[None]
    q = np.exp(-2 * (a[:, None] + a[None]))
    for one, value in zip(v, values, strict=True):
        brute = float((costs + one**2 * q).min())
        assert value <= brute * (1 + 1e-12)
        assert value == pytest.approx(brute, rel=2e-3, abs=1e-9)
