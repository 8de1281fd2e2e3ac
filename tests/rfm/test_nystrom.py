"""Nystrom centers: the solution against dense algebra, the choice of centers, steps, memory and refusals."""

from __future__ import annotations

import re
import subprocess
import sys
from typing import Any

import pytest
import rfm_oracles as oracles
import torch
from sklearn.exceptions import ConvergenceWarning
from torch import Tensor

from featlearn import InputError
from featlearn.errors import SingularKernelError
from featlearn.rfm import _kernel_blocks as kernel_rows
from featlearn.rfm import _nystrom_solver as centers_module
from featlearn.rfm import _nystrom_solver as nystrom
from featlearn.rfm._nystrom_solver import NystromSolution, choose_centers, solve_nystrom
from featlearn.rfm.kernels import Kernel, make_kernel

LAPLACE = make_kernel("laplace")
BANDWIDTH = 3.0


def problem(n: int, c: int = 3, d: int = 4) -> tuple[Tensor, Tensor, Tensor]:
    """Rows, targets and weights."""
    u = oracles.numbers(n, d, seed=n)
    scales = torch.arange(1, c + 1, dtype=torch.float64)
    targets = (u[:, :1] * scales).sin() * u[:, 1:2] + 0.1 * oracles.numbers(n, c, seed=n + 1)
    return u, targets, oracles.positive(n, seed=n + 2)


def dense_fit(kernel: Kernel, u: Tensor, y: Tensor, w: Tensor, centers: Tensor, ridge: float) -> Tensor:
    """Fitted values by least squares: the rows, and the penalty as further rows; nothing is squared."""
    inside = oracles.matrix(kernel, u, centers, BANDWIDTH)
    root = oracles.power(oracles.matrix(kernel, centers, centers, BANDWIDTH), 0.5)
    left = torch.cat([w.sqrt()[:, None] * inside, (w.sum() * ridge).sqrt() * root])
    right = torch.cat([w.sqrt()[:, None] * y, torch.zeros(len(centers), y.shape[1], dtype=torch.float64)])
    return inside @ torch.linalg.lstsq(left, right, driver="gelsd").solution


def fit(kernel: Kernel, u: Tensor, centers: Tensor, solution: NystromSolution) -> Tensor:
    return kernel.matrix(u.double(), centers.double(), BANDWIDTH) @ solution.coefficients.double()


def with_sample(monkeypatch: pytest.MonkeyPatch, per_center: int) -> None:
    """Let the preconditioner be made of so many rows for each center, whatever they cost."""
    monkeypatch.setattr(nystrom, "_sample_size", lambda n, m, *others: min(n, per_center * m))


@pytest.mark.parametrize("name", ["laplace", "lpq 1.5 1.2", "exp"])
def test_all_rows_as_centers_are_the_direct_solution(name: str) -> None:
    kernel = oracles.KERNELS[name]
    u, targets, weights = problem(200)
    solution = solve_nystrom(kernel, u, targets, weights, u, BANDWIDTH, 1e-3)
    inside = oracles.matrix(kernel, u, u, BANDWIDTH)
    direct = oracles.ridge_coefficients(inside, targets, weights, float(weights.sum()) * 1e-3)
    assert solution.converged
    assert oracles.relative_error(fit(kernel, u, u, solution), inside @ direct) < 1e-6
    if name != "exp":  # whose matrix is singular: only the fit is determined
        assert oracles.relative_error(solution.coefficients, direct) < 1e-6


@pytest.mark.parametrize("way", ["all rows", "all rows, direct", "sample"])
@pytest.mark.parametrize("ridge", [1e-2, 1e-6, 1e-10])
@pytest.mark.parametrize("name", ["laplace", "gaussian", "lpq 1 .7", "polynomial 2"])
def test_centers_are_the_dense_solution(name: str, ridge: float, way: str, monkeypatch: pytest.MonkeyPatch) -> None:
    kernel = oracles.KERNELS[name]
    u, targets, weights = problem(900)
    centers = u[choose_centers(kernel, u, weights, 60, BANDWIDTH, ridge)]
    with_sample(monkeypatch, 5 if way == "sample" else 100)
    monkeypatch.setattr(nystrom, "_ROUNDING_SHARE", 0.1 if way == "all rows, direct" else 0.0)
    given = [part.clone() for part in (u, targets, weights, centers)]
    solution = solve_nystrom(kernel, u, targets, weights, centers, BANDWIDTH, ridge, tolerance=1e-9)
    assert solution.converged
    assert solution.iterations <= (40 if way == "sample" else 5)
    expected = dense_fit(kernel, u, targets, weights, centers, ridge)
    assert oracles.relative_error(fit(kernel, u, centers, solution), expected) < 1e-6
    assert all(torch.equal(*pair) for pair in zip(given, (u, targets, weights, centers), strict=True))


def test_whole_weights_are_repeated_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    u, targets, _ = problem(300, c=2)
    times = torch.randint(0, 4, (300,), generator=torch.Generator().manual_seed(1))
    centers = u[:40]
    repeated = u.repeat_interleave(times, 0), targets.repeat_interleave(times, 0)
    expected = solve_nystrom(LAPLACE, *repeated, torch.ones(int(times.sum())), centers, BANDWIDTH, 1e-4)
    for rows in (4, 100):
        with_sample(monkeypatch, rows)
        result = solve_nystrom(LAPLACE, u, targets, times.double(), centers, BANDWIDTH, 1e-4, tolerance=1e-10)
        assert oracles.relative_error(result.coefficients, expected.coefficients) < 1e-6


@pytest.mark.parametrize("ridge", [1e-4, 1e-7, 1e-10])
def test_few_steps_at_any_ridge(ridge: float, monkeypatch: pytest.MonkeyPatch) -> None:
    with_sample(monkeypatch, 8)
    u, targets, weights = problem(5000, c=1)
    centers = u[choose_centers(LAPLACE, u, weights, 150, BANDWIDTH, ridge)]
    assert solve_nystrom(LAPLACE, u, targets, weights, centers, BANDWIDTH, ridge).iterations < 40
    inside = LAPLACE.matrix(u, centers, BANDWIDTH)
    matrix = inside.mT @ (weights[:, None] * inside)
    matrix += weights.sum() * ridge * LAPLACE.matrix(centers, centers, BANDWIDTH)
    right = (targets * weights[:, None]).mT @ inside
    plain = nystrom._conjugate_gradient(lambda v: v @ matrix, right, 1e-7, 200, lambda: None)
    assert plain[1] == 200  # without a preconditioner


def test_a_cluster_that_the_sample_misses_costs_few_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    with_sample(monkeypatch, 6)
    u, targets, _ = problem(4000, c=1)
    u[-20:] += 40.0
    centers = torch.cat([u[:100], u[-10:]])
    solution = solve_nystrom(LAPLACE, u, targets, torch.ones(4000), centers, BANDWIDTH, 1e-6)
    assert solution.iterations < 45


def test_an_output_stops_when_it_has_converged(monkeypatch: pytest.MonkeyPatch) -> None:
    with_sample(monkeypatch, 5)
    u, targets, weights = problem(900, c=2)
    targets = torch.cat([targets, torch.zeros(900, 1, dtype=torch.float64)], 1)
    centers = u[:60]
    widths: list[int] = []
    whole = kernel_rows.KernelRows.normal_product

    def watched(self: Any, vectors: Tensor, weights: Tensor) -> Tensor:
        widths.append(len(vectors))
        return whole(self, vectors, weights)

    monkeypatch.setattr(kernel_rows.KernelRows, "normal_product", watched)
    solution = solve_nystrom(LAPLACE, u, targets, weights, centers, BANDWIDTH, 1e-4)
    assert max(widths) == 2  # targets of zero need no step
    assert len(widths) == solution.iterations
    assert widths == sorted(widths, reverse=True)
    assert not solution.coefficients[:, 2].any()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_kept_and_recomputed_blocks_agree(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernel_rows, "BLOCK", 60 * 100)
    with_sample(monkeypatch, 4)
    u, targets, weights = (part.to(dtype) for part in problem(1050))
    result = [
        solve_nystrom(LAPLACE, u, targets, weights, u[:60], BANDWIDTH, 1e-5, max_memory=limit)
        for limit in (0, 400 * 60 * u.element_size(), 2**30)
    ]
    assert result[0].iterations > 5
    for other in result[1:]:
        assert torch.equal(other.coefficients, result[0].coefficients)
        assert other.iterations == result[0].iterations


def test_float32_rows_are_solved_to_their_precision() -> None:
    u, targets, weights = problem(2000)
    centers = u[:100]
    solution = solve_nystrom(LAPLACE, u.float(), targets.float(), weights.float(), centers.float(), BANDWIDTH, 1e-5)
    assert solution.coefficients.dtype == torch.float32
    assert solution.converged
    expected = dense_fit(LAPLACE, u, targets, weights, centers, 1e-5)
    assert oracles.relative_error(fit(LAPLACE, u, centers, solution), expected) < 1e-4


def test_centers_without_a_ridge_and_with_copies() -> None:
    u, targets, weights = problem(400)
    centers = torch.cat([u[:50], u[:50]])
    solution = solve_nystrom(LAPLACE, u, targets, weights, centers, BANDWIDTH, 0.0)
    expected = dense_fit(LAPLACE, u, targets, weights, u[:50], 0.0)
    # The least ridge holds the copies together, loosely: their coefficients are large and opposite.
    assert oracles.relative_error(fit(LAPLACE, u, centers, solution), expected) < 1e-4


def test_too_few_steps_are_warned_of(monkeypatch: pytest.MonkeyPatch) -> None:
    with_sample(monkeypatch, 4)
    u, targets, weights = problem(900)
    with pytest.warns(ConvergenceWarning, match=r"residual of .* after 2 steps.*max_iter"):
        solution = solve_nystrom(LAPLACE, u, targets, weights, u[:60], BANDWIDTH, 1e-6, max_iter=2)
    assert not solution.converged
    assert solution.iterations == 2
    assert solution.residual > 1e-7


def test_the_sample_grows_with_the_rows_and_not_beyond() -> None:
    def size(n: int, m: int, direct: bool) -> int:
        return nystrom._sample_size(n, m, 20, 1, 1e-7, 0.0, direct)

    assert size(1000, 500, True) == size(1000, 500, False) == 1000
    assert size(10**6, 1000, True) == 10**6
    assert size(10**6, 10**4, True) < 10**6
    assert 8000 <= size(10**5, 2000, False) <= size(10**6, 2000, False) < 10**6


MEASURE = """
import torch
from pathlib import Path
from featlearn.rfm.kernels import make_kernel
from featlearn.rfm._nystrom_solver import choose_centers
from featlearn.rfm._nystrom_solver import solve_nystrom

def peak():
    return int(Path("/proc/self/status").read_text().split("VmHWM:")[1].split()[0]) / 1024

kernel = make_kernel("laplace")
for n, limit in ((3000, 0), (30000, 0), (30000, 2**24)):
    u = torch.randn(n, 5, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    y, w = u[:, :1].sin(), torch.ones(n, dtype=torch.float64)
    centers = u[choose_centers(kernel, u, w, 200, 3.0, 1e-6, "uniform" if limit else "leverage")]
    solve_nystrom(kernel, u, y, w, centers, 3.0, 1e-6, max_memory=limit)
    print(peak())
"""


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads /proc")
def test_memory_is_that_of_a_block_and_what_may_be_kept() -> None:
    done = subprocess.run([sys.executable, "-c", MEASURE], capture_output=True, text=True, check=True, timeout=120)
    few, many, kept = (float(line) for line in re.findall(r"[\d.]+", done.stdout))
    # The whole kernel would be 48 MB; rows, targets and weights of 30,000 rows are 2.
    assert many - few < 20
    assert kept - many < 16 + 10


@pytest.mark.parametrize("how", ["uniform", "leverage"])
def test_centers_are_rows_without_repetition(how: str) -> None:
    u, _, weights = problem(700)
    weights[::3] = 0.0

    def chosen(m: int, seed: int | torch.Generator) -> list[int]:
        result: list[int] = choose_centers(LAPLACE, u, weights, m, BANDWIDTH, 1e-3, how, seed).tolist()
        return result

    rows = chosen(50, 3)
    assert rows == sorted(set(rows))
    assert len(rows) == 50
    assert all(row % 3 for row in rows)
    assert rows == chosen(50, 3) != chosen(50, 4)
    generator = torch.Generator().manual_seed(0)
    assert chosen(50, generator) != chosen(50, generator)
    assert chosen(700, 0) == chosen(10**6, 0) == [row for row in range(700) if row % 3]
    assert choose_centers(LAPLACE, u, torch.ones(700), 700, BANDWIDTH, 1e-3, how).tolist() == list(range(700))


@pytest.mark.parametrize("name", ["laplace", "polynomial 2"])
def test_leverage_scores_of_a_whole_pilot_are_exact(name: str) -> None:
    kernel = oracles.KERNELS[name]
    u, _, weights = problem(120)
    inside = oracles.matrix(kernel, u, u, BANDWIDTH)
    penalty = float(weights.sum()) * 1e-3
    hat = inside @ torch.linalg.inv(inside + torch.diag(penalty / weights))
    result = centers_module._leverage(
        kernel, u, weights, torch.arange(120), BANDWIDTH, 1e-3, torch.Generator().manual_seed(0)
    )
    assert oracles.relative_error(result, hat.diagonal()) < 1e-8


def test_leverage_finds_small_clusters() -> None:
    kernel = make_kernel("gaussian")
    u = 0.3 * oracles.numbers(2000, 3, seed=30)
    for cluster in range(12):  # 12 clusters of 5 rows, far from the rest and from each other
        u[5 * cluster : 5 * cluster + 5, cluster % 3] += 10.0 * (1 + cluster // 3)
    targets = u[:, :1].sin() + (u[:, :1] + u[:, 1:2] + u[:, 2:] > 5.0)
    errors = {}
    for how in ("uniform", "leverage"):
        result = []
        for seed in range(5):
            rows = choose_centers(kernel, u, torch.ones(2000), 60, BANDWIDTH, 1e-5, how, seed)
            solution = solve_nystrom(kernel, u, targets, torch.ones(2000), u[rows], BANDWIDTH, 1e-5)
            result.append(float((fit(kernel, u, u[rows], solution) - targets).square().mean()))
        errors[how] = sum(result) / len(result)
    assert errors["leverage"] < 0.5 * errors["uniform"]


def test_bad_input_is_refused() -> None:
    u, targets, weights = problem(30)
    good: dict[str, Any] = {"u": u, "targets": targets, "weights": weights, "centers_u": u[:5]}
    good |= {"bandwidth": 1.0, "ridge": 1e-3}
    for change, words in (
        ({"u": u.long()}, "float32 or float64"),
        ({"targets": targets[:, 0]}, r"targets must be of shape \(30, outputs\)"),
        ({"weights": weights[:-1]}, r"weights must be of shape \(30,\)"),
        ({"weights": -weights}, "not negative"),
        ({"weights": 0 * weights}, "above 0"),
        ({"centers_u": u[:5, :2]}, r"\(centers, 4\)"),
        ({"centers_u": u[:5].float()}, "dtype of centers_u must be torch.float64, got torch.float32"),
        ({"bandwidth": 0.0}, "bandwidth"),
        ({"ridge": -1.0}, "ridge"),
        ({"tolerance": 0.0}, "tolerance"),
        ({"max_iter": 0}, "max_iter"),
        ({"targets": targets * float("nan")}, "NaN"),
    ):
        with pytest.raises(InputError, match=words):
            solve_nystrom(LAPLACE, **(good | change))
    for arguments, words in (
        ((0, 1.0, 1e-3, "uniform"), "at least 1"),
        ((5, 1.0, 1e-3, "greedy"), "'uniform' or 'leverage', got 'greedy'"),
        ((5, 1.0, 0.0, "leverage"), "ridge above 0"),
    ):
        with pytest.raises(InputError, match=words):
            choose_centers(LAPLACE, u, weights, *arguments)
    with pytest.raises(SingularKernelError, match="fewer centers"):
        kernel_rows.cholesky(torch.diag(torch.tensor([2.0, -1.0], dtype=torch.float64)), 1e-16)
