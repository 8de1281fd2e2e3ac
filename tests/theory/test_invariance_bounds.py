"""Tests of the bounds of corollaries 5.3 and B.3 and of theorem 5.2's equations on trainings by autograd."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from featlearn.errors import InputError
from featlearn.theory import (
    check_convergence,
    convergence_path,
    early_phase,
    eigenvalue_bounds,
    global_convergence,
    invariance_bounds,
)

N, D, H = 8, 12, 4000


def outputs(X: Tensor, W: Tensor, v: Tensor) -> Tensor:
    return torch.tanh(X @ W.mT / math.sqrt(X.shape[1])) @ v / math.sqrt(len(v))


def jacobian(X: Tensor, W: Tensor, v: Tensor) -> Tensor:
    return torch.autograd.functional.jacobian(lambda w: outputs(X, w, v), W).flatten(1)


def near_labels(seed: int, size: float, *, hardest: bool = False) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Draw a wide network and labels close to its outputs, in a random direction or in the one that is learned last."""
    g = torch.Generator().manual_seed(seed)
    X, W = (torch.randn(rows, D, generator=g, dtype=torch.float64) for rows in (N, H))
    v = 2 * torch.rand(H, generator=g, dtype=torch.float64) - 1
    direction = torch.randn(N, generator=g, dtype=torch.float64)
    if hardest:
        J = jacobian(X, W, v)
        direction = torch.linalg.eigh(J @ J.mT)[1][:, 0]
    return X, outputs(X, W, v) + size * direction / direction.norm(), W, v


def train(X: Tensor, y: Tensor, W: Tensor, v: Tensor, rate: float, steps: int) -> list[Tensor]:
    """Return the weights of all steps of gradient descent on half the mean squared error, by autograd."""
    path = [W]
    for _ in range(steps):
        now = path[-1].clone().requires_grad_()
        (gradient,) = torch.autograd.grad((y - outputs(X, now, v)).square().mean() / 2, now)
        path.append((now - rate * gradient).detach())
    return path


def matrices(X: Tensor, W: Tensor, v: Tensor) -> dict[str, Tensor]:
    J, features = jacobian(X, W, v), torch.tanh(X @ W.mT / math.sqrt(X.shape[1]))
    return {"weights": W.mT @ W / len(W), "ck": features @ features.mT / len(W), "ntk": J @ J.mT}


@pytest.mark.parametrize("seed", range(3))
def test_no_change_of_training_exceeds_the_constants_of_the_corollary(seed: int) -> None:
    given = X, y, W, v = near_labels(seed, 0.02)
    rate = invariance_bounds(*given, torch.tanh, rate=1.0).largest_rate
    bound = invariance_bounds(*given, torch.tanh, rate=rate)
    assert bound.holds
    assert bound.constant == max(bound.weights, bound.ck, bound.ntk)
    path = train(*given, rate=rate, steps=400)
    assert float((y - outputs(X, path[-1], v)).norm()) < 0.02 / 2  # it has learned
    before = matrices(X, W, v)
    for now in path[1::40]:
        after = matrices(X, now, v)
        assert float((now - W).norm()) / math.sqrt(D) <= bound.weights
        assert float((after["ck"] - before["ck"]).norm()) <= bound.ck
        assert float((after["ntk"] - before["ntk"]).norm()) <= bound.ntk


def test_constant_of_the_weights_is_of_the_right_size() -> None:
    """A residual in the direction of the least singular value moves W by l / (2 alpha), an eighth of the bound."""
    given = X, _, W, v = near_labels(0, 0.01, hardest=True)
    bound = invariance_bounds(*given, torch.tanh, rate=1.0)
    assert bound.holds
    assert bound.alpha == pytest.approx(float(torch.linalg.svdvals(jacobian(X, W, v))[-1]) / 2)
    moved = float((train(*given, rate=1.0, steps=1500)[-1] - W).norm())
    assert moved == pytest.approx(bound.radius / 8, rel=0.03)
    assert moved > bound.radius / 10


def test_assumptions_decide() -> None:
    X, y, W, v = near_labels(0, 0.02)
    fast = invariance_bounds(X, y, W, v, torch.tanh, rate=1e4)
    assert not fast.holds
    assert [a.holds for a in fast.assumptions] == [None, None, True, False, True]
    assert invariance_bounds(X, y, W, v, torch.tanh, rate=0.99 * fast.largest_rate).holds
    far = invariance_bounds(X, y + 10, W, v, torch.tanh, rate=1.0)
    assert far.assumptions[-1].holds is False
    kinked = invariance_bounds(X, y, W, v, torch.relu, rate=1.0, kinks=[0.0])
    assert math.isinf(kinked.ntk)
    assert math.isfinite(kinked.ck)
    assert not kinked.holds
    twice = invariance_bounds(
        X.repeat(2, 1), y.repeat(2), W, v, torch.tanh, rate=1.0
    )  # duplicates: a singular Jacobian
    assert [math.isinf(bound) for bound in (twice.weights, twice.ck, twice.ntk)] == [True] * 3
    assert not twice.holds


def test_bounds_of_a_linear_network_in_closed_form() -> None:
    """One sample, one unit, sigma = x: the Jacobian is v x, and all constants are products."""
    bound = invariance_bounds([[3.0]], [2.0], [[0.5]], [0.8], lambda z: 1.0 * z, rate=0.05)
    loss, alpha = 2 - 0.8 * 1.5, 0.8 * 3 / 2
    assert bound.holds
    assert (bound.alpha, bound.radius) == pytest.approx((alpha, 4 * loss / alpha))
    assert bound.largest_rate == pytest.approx(1 / (2 * 2.4**2))
    moved = 3 * bound.radius
    assert bound.ck == pytest.approx((2 * 1.5 + moved) * moved)
    assert bound.ntk == 0


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("rate", [0.5, 20.0])
def test_no_eigenvalue_moves_further_than_its_bound(seed: int, rate: float) -> None:
    g = torch.Generator().manual_seed(seed)
    X, W = (torch.randn(rows, 24, generator=g, dtype=torch.float64) for rows in (40, 48))
    y, v = X[:, 0].tanh(), 2 * torch.rand(48, generator=g, dtype=torch.float64) - 1
    bound = eigenvalue_bounds(X, y, W, v, torch.tanh, rate=rate, steps=3)
    early = early_phase(X, y, W, v, torch.tanh, rate=rate, steps=3)
    assert (bound.ck, bound.ntk) == (early.ck, early.ntk)
    before, after = (matrices(X, w, v) for w in (W, train(X, y, W, v, rate, 3)[-1]))
    for name, matrix in before.items():
        change = torch.linalg.eigvalsh(after[name]) - torch.linalg.eigvalsh(matrix)
        assert float(change.abs().max()) <= float(change.norm()) <= getattr(bound, name)


def test_bound_of_the_weights_eigenvalue_is_attained() -> None:
    """One sample, one unit, sigma = x: W^2 changes by (2 W + m) m if the residual pulls W outward."""
    bound = eigenvalue_bounds([[3.0]], [2.0], [[0.5]], [0.8], lambda z: 1.0 * z, rate=0.1, steps=1)
    moved = 0.1 * (2 - 0.8 * 1.5) * 0.8 * 3
    assert bound.weights == pytest.approx((0.5 + moved) ** 2 - 0.25, rel=1e-6)


@pytest.mark.parametrize("seed", range(2))
def test_equations_of_the_theorem_hold_along_a_training(seed: int) -> None:
    given = X, y, W, v = near_labels(seed, 0.02)
    path = check_convergence(*given, torch.tanh, rate=4.0, steps=60)
    assert path.holds == {"12": True, "13": True, "14": True}
    weights = train(*given, rate=4.0, steps=60)
    losses = [float((y - outputs(X, w, v)).norm()) for w in weights]
    torch.testing.assert_close(path.loss, torch.tensor(losses, dtype=torch.float64), rtol=1e-10, atol=0)
    alpha = float(torch.linalg.svdvals(jacobian(X, W, v))[-1]) / 2
    t = 60
    assert float(path.loss_bound[t]) == pytest.approx((1 - 4.0 * alpha**2 / (2 * N)) ** t * losses[0])
    assert float(path.energy[t]) == pytest.approx(alpha / 4 * float((weights[t] - W).norm()) + losses[t])
    length = sum(float((weights[s + 1] - weights[s]).norm()) for s in range(t))
    assert float(path.length[t]) == pytest.approx(length)
    assert float(path.length_bound[t]) == pytest.approx(4 * losses[0] / alpha)
    table = path.table()
    assert len(table) == t + 1
    assert table["(13) holds"].all()
    recorded = convergence_path(losses, weights, n=N, rate=4.0, alpha=alpha)
    torch.testing.assert_close(recorded.energy, path.energy)


def test_equations_fail_with_constants_that_are_too_large() -> None:
    """In the hardest direction the loss falls like 1 - 4 rate alpha^2 / n: with ten times alpha none holds."""
    given = near_labels(0, 0.01, hardest=True)
    start = check_convergence(*given, torch.tanh, rate=10.0, steps=0)
    assert start.holds == {"12": True, "13": True, "14": True}
    path = check_convergence(*given, torch.tanh, rate=10.0, steps=2000, alpha=10 * start.alpha)
    assert path.holds == {"12": False, "13": False, "14": False}
    assert path.table().iloc[0][["(12) holds", "(13) holds", "(14) holds"]].all()


def test_divergence_is_reported() -> None:
    X, y, W, v = near_labels(0, 0.02)
    path = check_convergence(X, y, W, v, torch.tanh, rate=300.0, steps=30, alpha=0.1)
    assert not any(path.holds.values())


def test_alpha_of_the_theory_may_be_passed() -> None:
    X, y, W, v = near_labels(1, 0.02)
    alpha = global_convergence(lambda z: 1 - z.tanh() ** 2, n=N, d=D, width=H).alpha
    assert check_convergence(X, y, W, v, torch.tanh, rate=2.0, steps=20, alpha=alpha).holds["12"]


def test_bad_input_is_refused() -> None:
    X, y, W, v = near_labels(0, 0.02)
    with pytest.raises(InputError, match="one loss per weight matrix, got 2 and 1"):
        convergence_path([1.0, 0.5], [W], n=N, rate=1.0, alpha=1.0)
    with pytest.raises(InputError, match="alpha must be"):
        convergence_path([1.0], [W], n=N, rate=1.0, alpha=0.0)
    with pytest.raises(InputError, match="must not be singular"):
        check_convergence(X.repeat(2, 1), y.repeat(2), W, v, torch.tanh, rate=1.0, steps=1)
    with pytest.raises(InputError, match="X must have shape"):
        invariance_bounds(X, y[1:], W, v, torch.tanh, rate=1.0)
    with pytest.raises(InputError, match="rate must be"):
        invariance_bounds(X, y, W, v, torch.tanh, rate=0.0)
    with pytest.raises(InputError, match="steps must be"):
        eigenvalue_bounds(X, y, W, v, torch.tanh, rate=1.0, steps=-1)
