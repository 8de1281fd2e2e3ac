"""The solver against brute force over M, its limits, and what it must never do."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from adaptive_oracles import explicit_matrix, factor
from scipy.optimize import linprog, minimize
from sklearn.exceptions import ConvergenceWarning
from sklearn.linear_model import Lasso

import featlearn as fl
from featlearn.adaptive import adapt, effective_joint_penalty, effective_penalty
from featlearn.adaptive._linear_solvers import System
from featlearn.adaptive._tangent_features import GivenFeatures, adapted_kernel, derivatives
from featlearn.linalg.leave_one_out import leave_one_out


def draw(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def brute_force(a: torch.Tensor, r: torch.Tensor, mu: float, ridge: float, last: bool, starts: int = 12) -> float:
    """Least of ``r^T (A M M^T A^T + n ridge)^{-1} r + mu Omega(M)`` over all square factors, squares for penalties."""
    n, k_out, k_in = a.shape
    flat = a.reshape(n, -1)

    def cost(v: np.ndarray) -> tuple[float, np.ndarray]:
        t = torch.tensor(v, requires_grad=True)
        m_in = t[: k_in**2].reshape(k_in, k_in)
        m_out = torch.eye(k_out, dtype=torch.float64) if last else t[k_in**2 :].reshape(k_out, k_out)
        features = flat @ torch.kron(m_out, m_in.T.contiguous())
        kernel = features @ features.T + n * ridge * torch.eye(n, dtype=torch.float64)
        value = r @ torch.linalg.solve(kernel, r)
        for m in (m_in,) if last else (m_in, m_out):
            value = value + mu * (torch.linalg.svdvals(m) - 1).square().sum()
        value.backward()
        return float(value.detach()), t.grad.numpy()

    rng = np.random.RandomState(0)
    eye = np.concatenate([np.eye(k_in).ravel()] + ([] if last else [np.eye(k_out).ravel()]))
    result = [
        minimize(
            cost, eye + size * rng.randn(len(eye)), jac=True, method="BFGS", options={"gtol": 1e-9, "maxiter": 3000}
        )
        for size in np.linspace(0.05, 1.5, starts)
    ]
    return min(f.fun for f in result)


@pytest.mark.parametrize("last", [False, True])
@pytest.mark.parametrize(("mu", "ridge"), [(1.0, 0.0), (0.05, 0.0), (0.3, 0.05)])
def test_theorem_2_is_what_brute_force_over_all_m_finds(mu: float, ridge: float, last: bool) -> None:
    a, r = draw(5, 3, 4, seed=1), draw(5, seed=2)
    expected = brute_force(a, r, mu, ridge, last)
    result = adapt({"w": a}, r, scale=mu, ridge=ridge, last=["w"] if last else [], restarts=15, tolerance=1e-13)
    assert result.objective == pytest.approx(expected, rel=1e-6)
    if not ridge:  # the reduction to a problem in B
        d = np.linalg.svd(result.matrices["w"][0].numpy(), compute_uv=False)
        value = mu * effective_joint_penalty("square", "indicator" if last else "square", d / np.sqrt(mu)).sum()
        assert result.objective == pytest.approx(value, rel=1e-5)
        assert torch.einsum("noi,oi->n", a, result.matrices["w"][0]) == pytest.approx(r.numpy(), abs=1e-9)


@pytest.mark.parametrize("penalty", ["square", "absolute", "power:1.5", "power:0.5", ("square", "absolute"), np.log])
@pytest.mark.parametrize("structure", ["layers", "diagonal"])
@pytest.mark.parametrize("ridge", [0.0, 0.1])
@pytest.mark.filterwarnings("ignore:theorem 2 does not hold")
def test_the_objective_never_rises(penalty, structure: str, ridge: float) -> None:
    w = (lambda z: np.log(z) ** 2) if penalty is np.log else penalty
    gradients = {"a": draw(8, 2, 3, 4, seed=3), "b": draw(8, 2, 2, 5, seed=4)}
    result = adapt(
        gradients, draw(8, 2, seed=5), penalty=w, structure=structure, ridge=ridge, scale=0.1, tolerance=1e-8
    )
    steps = np.diff(result.history)
    assert len(steps) > 2
    assert (steps <= 1e-10 * result.history[0]).all()
    assert result.objective < result.history[0]


def test_theorem_1() -> None:
    table, r = draw(6, 20, seed=6), 3 * draw(6, seed=7)
    result = adapt(table, r)
    beta = torch.linalg.lstsq(table, r, driver="gelsd").solution
    assert result.matrices["features"].reshape(-1) == pytest.approx(beta.numpy(), abs=1e-9)
    size = float(beta.norm())
    assert result.objective == pytest.approx(float(effective_penalty("square", size)), rel=1e-9)
    z = np.linspace(1, 10, 2_000_001)
    s = z[np.argmin((z - 1) ** 2 + size**2 / z**2)]
    points = draw(4, 20, seed=8)
    m = torch.eye(20, dtype=torch.float64) + (s - 1) * torch.outer(beta, beta) / size**2
    features = GivenFeatures({"features": points[:, None, None]})
    kernel = adapted_kernel(features, None, result.transforms)
    assert kernel == pytest.approx((points @ m @ m @ points.T).numpy(), rel=1e-4)
    change = points @ beta
    printed = points @ points.T + (s**2 - 1) / size**2 * torch.outer(change, change)
    assert kernel == pytest.approx(printed.numpy(), rel=1e-4)


def test_the_adapted_kernel_sums_over_all_pairs_of_directions() -> None:
    a, r = draw(6, 3, 4, seed=9), 4 * draw(6, seed=10)
    result = adapt({"w": a}, r, scale=0.1)
    m = result.transforms["w"]
    m_out, m_in = factor(m.out_vectors[0], m.out_factors[0]), factor(m.in_vectors[0], m.in_factors[0])
    explicit = explicit_matrix(m_out, m_in)
    flat = a.reshape(6, -1)
    expected = flat @ explicit @ explicit.T @ flat.T
    kernel = adapted_kernel(GivenFeatures({"w": a[:, None]}), None, result.transforms)
    assert (kernel - expected).norm() <= 1e-12 * expected.norm()
    start, double, printed = flat @ flat.T, 0, 0
    full_out, full_in = torch.linalg.eigh(m_out), torch.linalg.eigh(m_in)
    for s1, u in zip(full_out.eigenvalues, full_out.eigenvectors.T, strict=True):
        for s2, v in zip(full_in.eigenvalues, full_in.eigenvectors.T, strict=True):
            p = torch.einsum("noi,o,i->n", a, u, v)
            double = double + ((s1 * s2) ** 2 - 1) * torch.outer(p, p)
    for i in range(m.out_factors.shape[1]):
        p = torch.einsum("noi,o,i->n", a, m.out_vectors[0, :, i], m.in_vectors[0, :, i])
        printed = printed + ((m.out_factors[0, i] * m.in_factors[0, i]) ** 2 - 1) * torch.outer(p, p)
    assert (start + double - expected).norm() <= 1e-12 * expected.norm()
    off = float((start + printed - expected).norm() / expected.norm())
    assert 0.4 < off < 0.8  # the single sum that Theorem 2 prints


def test_a_diagonal_m_with_squares_is_basis_pursuit() -> None:
    table, r = draw(5, 12, seed=11), draw(5, seed=12)
    result = adapt(table, r, penalty="norm", structure="diagonal", allow_unanchored=True, tolerance=1e-12, n_iter=3000)
    both = np.concatenate([table.numpy(), -table.numpy()], axis=1)
    exact = linprog(np.ones(24), A_eq=both, b_eq=r.numpy())
    assert result.objective == pytest.approx(2 * exact.fun, rel=1e-6)
    beta = result.matrices["features"].reshape(-1)
    assert beta == pytest.approx(exact.x[:12] - exact.x[12:], abs=1e-4)
    assert (np.diff(result.history) <= 1e-9).all()


def test_a_diagonal_m_with_squares_and_a_ridge_is_the_lasso() -> None:
    table, r = draw(30, 10, seed=13), draw(30, seed=14)
    result = adapt(
        table, r, penalty="norm", structure="diagonal", allow_unanchored=True, tolerance=1e-13, n_iter=9000, ridge=0.1
    )
    exact = Lasso(alpha=0.1, fit_intercept=False, tol=1e-12, max_iter=100000).fit(table.numpy(), r.numpy())
    assert result.matrices["features"].reshape(-1) == pytest.approx(exact.coef_, abs=1e-4)


def test_a_diagonal_m_minimizes_the_effective_penalty_of_entries() -> None:
    table, r = draw(4, 9, seed=15), 2 * draw(4, seed=16)
    result = adapt(table, r, penalty="square", structure="diagonal", tolerance=1e-14, n_iter=5000)
    null = torch.linalg.svd(table).Vh[4:].numpy()
    start = np.linalg.lstsq(table.numpy(), r.numpy(), rcond=None)[0]
    exact = minimize(lambda t: effective_penalty("square", start + t @ null).sum(), np.zeros(5), options={"gtol": 1e-9})
    # (z-1)^2 has the one effective penalty that is convex, so that there is one minimum
    assert result.objective == pytest.approx(exact.fun, rel=1e-8)


def test_infinite_scale_is_lazy_and_norms_interpolate() -> None:
    gradients, r = {"w": draw(6, 3, 4, seed=17)}, draw(6, seed=18)
    lazy = adapt(gradients, r, scale=float("inf"))
    flat = gradients["w"].reshape(6, -1)
    assert lazy.matrices["w"].reshape(-1) == pytest.approx((torch.linalg.pinv(flat) @ r).numpy(), abs=1e-10)
    assert lazy.history == [pytest.approx(float(r @ torch.linalg.solve(flat @ flat.T, r)))]
    nearly = adapt(gradients, r, scale=1e9)
    assert nearly.matrices["w"] == pytest.approx(lazy.matrices["w"].numpy(), abs=1e-6)


def test_the_parts_of_the_change() -> None:
    gradients, r = {"w": draw(8, 4, 6, seed=19)}, 3 * draw(8, seed=20)
    result = adapt(gradients, r, scale=0.01, tolerance=1e-14, n_iter=20000)
    low, rest = result.decomposition("w")
    d = torch.linalg.svdvals(result.matrices["w"][0])
    s = result.transforms["w"].in_factors[0] * result.transforms["w"].out_factors[0]
    assert torch.linalg.svdvals(low[0]) == pytest.approx((d * (1 - s**-2)).sort(descending=True).values, abs=1e-4)
    assert torch.linalg.svdvals(rest[0]) == pytest.approx((d / s**2).sort(descending=True).values, abs=1e-4)
    values = derivatives(GivenFeatures({"w": gradients["w"][:, None]}, block=3), result.matrices)
    assert values[:, 0] == pytest.approx(r.numpy(), abs=1e-9)


def test_random_starts_never_make_it_worse_and_can_help() -> None:
    options = {"penalty": "power:0.5", "structure": "diagonal", "scale": 0.01, "tolerance": 1e-7}
    gains = []
    for seed in range(4):
        gradients, r = {"w": draw(6, 4, 5, seed=100 + seed)}, draw(6, seed=200 + seed)
        one, more = (adapt(gradients, r, restarts=restarts, **options) for restarts in (0, 5))
        gains.append((one.objective - more.objective) / one.objective)
    assert min(gains) >= 0
    assert max(gains) > 0.01
    again = adapt(gradients, r, restarts=5, **options)
    assert again.objective == more.objective  # the generator is explicit


def test_labels_that_contradict_each_other() -> None:
    a = draw(6, 3, 4, seed=21)
    a[5] = a[0]
    r = draw(6, seed=22)
    with pytest.warns(ConvergenceWarning, match="6 labels depend on 5 independent features"):
        result = adapt({"w": a}, r, scale=0.1)
    values = torch.einsum("noi,oi->n", a, result.matrices["w"][0])
    assert values[0] == pytest.approx(float(r[0] + r[5]) / 2, abs=1e-9)
    assert values[1:5] == pytest.approx(r[1:5].numpy(), abs=1e-9)
    assert (np.diff(result.history) <= 1e-10).all()


def test_more_constraints_than_features_is_least_squares() -> None:
    a, r = draw(20, 2, 3, seed=23), draw(20, seed=24)
    with pytest.warns(ConvergenceWarning, match="20 labels depend on 6 independent features"):
        result = adapt({"w": a}, r, scale=0.1)
    expected = np.linalg.lstsq(a.reshape(20, 6).numpy(), r.numpy(), rcond=None)[0]
    assert result.matrices["w"].reshape(-1) == pytest.approx(expected, abs=1e-9)


@pytest.mark.parametrize("outputs", [1, 2])
def test_leave_one_out_is_what_solving_again_without_a_sample_gives(outputs: int) -> None:
    n, features = 7, 30
    phi, r = draw(n * outputs, features, seed=25), draw(n, outputs, seed=26)
    kernel = phi @ phi.T
    for shift in (0.5, 0.0):
        result = leave_one_out(kernel, r, [shift])[0]
        several = leave_one_out(kernel, r, [shift, 1.0])[0]
        for i in range(n):
            alone = np.arange(i * outputs, (i + 1) * outputs)
            others = np.setdiff1d(np.arange(n * outputs), alone)
            inner = kernel[others][:, others] + shift * torch.eye(len(others), dtype=torch.float64)
            expected = r[i] - kernel[alone][:, others] @ torch.linalg.solve(inner, r.reshape(-1)[others])
            assert result[i] == pytest.approx(expected.numpy(), rel=1e-7)
            assert several[i] == pytest.approx(expected.numpy(), rel=1e-7)


def test_a_kernel_of_zeros() -> None:
    with pytest.raises(fl.InputError, match="must have a nonzero tangent kernel"):
        System.of(torch.zeros(3, 3, dtype=torch.float64), draw(3, 1), 0.0)


def test_what_is_refused() -> None:
    a, r = draw(5, 3, 4), draw(5)
    for options, message in (
        ({"scale": 0.0}, "scale must be"),
        ({"ridge": -1.0}, "ridge must be"),
        ({"ridge": float("nan")}, "ridge must be"),
        ({"tolerance": 2.0}, "tolerance must be"),
        ({"n_iter": 0}, "n_iter must be"),
        ({"restarts": -1}, "restarts must be"),
        ({"structure": "full"}, "structure must be"),
        ({"penalty": "norm"}, "allow_unanchored"),
    ):
        with pytest.raises(fl.InputError, match=message):
            adapt({"w": a}, r, **options)
    for features, residual, message in (
        ({"w": a}, draw(4), r"one row per sample .* \(5, 1\), got \(4, 1\)"),
        ({}, r, "at least one matrix"),
        ({"w": a * float("nan")}, r, "NaN"),
        ({"w": a}, r * float("inf"), "NaN or infinite"),
        ({"w": a}, draw(5, 1, 1), "residual must have shape"),
    ):
        with pytest.raises(fl.InputError, match=message):
            adapt(features, residual)
    with pytest.warns(ConvergenceWarning, match="Raise n_iter"):
        adapt({"w": a}, r, scale=0.01, n_iter=2)
