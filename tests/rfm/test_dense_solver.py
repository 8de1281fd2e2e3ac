"""The Gram matrix in one buffer against dense algebra, and exact leave-one-out errors against refits."""

from __future__ import annotations

import warnings

import numpy as np
import pytest
import rfm_oracles as oracles
import torch
from sklearn.exceptions import ConvergenceWarning
from torch import Tensor

from featlearn.errors import SingularKernelError
from featlearn.rfm._dense_solver import KernelSolver
from featlearn.rfm.kernels import make_kernel
from featlearn.rfm.training_rows import TrainingRows

BANDWIDTH = 2.0
SIZES = {"one strip": 60, "strips": 1100}


def case(n: int, c: int = 3) -> tuple[Tensor, Tensor, Tensor]:
    """Rows, right-hand sides and a shift."""
    return oracles.numbers(n, 4, seed=n), oracles.numbers(n, c, seed=n + 1), oracles.positive(n, seed=n + 2)


def inverse_diagonal(solver: KernelSolver, n: int) -> Tensor:
    return 1.0 / solver.loo_residuals(torch.ones(n, 1, dtype=solver._buffer.dtype))[:, 0]


@pytest.mark.parametrize("n", SIZES.values(), ids=SIZES)
@pytest.mark.parametrize("name", ["laplace", "lpq 1.5 1.2", "polynomial 3"])
def test_solve_and_inverse_diagonal_are_those_of_numpy(name: str, n: int) -> None:
    kernel = oracles.KERNELS[name]
    u, right, shift = case(n)
    dense = oracles.matrix(kernel, u, u, BANDWIDTH).numpy()
    solver = KernelSolver(kernel, u, BANDWIDTH)
    for turn in (shift, 0.3 * shift.flip(0)):  # the second factor comes from the pairs, not from the first factor
        shifted = dense + np.diag(turn.numpy())
        solver.factor(turn)
        assert solver.jitter == 0.0
        assert (
            oracles.relative_error(solver.solve(right), torch.from_numpy(np.linalg.solve(shifted, right.numpy())))
            < 1e-11
        )
        inverse = torch.from_numpy(np.linalg.inv(shifted).diagonal().copy())
        assert oracles.relative_error(inverse_diagonal(solver, n), inverse) < 1e-11


@pytest.mark.parametrize("name", oracles.KERNELS)
def test_slopes_after_a_factor_are_those_of_the_pairs(name: str) -> None:
    kernel = oracles.KERNELS[name]
    u, _, shift = case(600)
    u[77] = u[550]
    expected = kernel.slopes_(kernel.pairs(u, u), BANDWIDTH)
    solver = KernelSolver(kernel, u, BANDWIDTH)
    solver.factor(shift)
    inverse_diagonal(solver, 600)
    slopes = solver.slopes()
    assert torch.equal(slopes, slopes.mT)
    assert oracles.relative_error(slopes, expected) < 1e-12
    if kernel.radial and kernel.exponent < kernel.norm:
        assert (slopes == 0).sum() == 600 + 2


@pytest.mark.parametrize("n", SIZES.values(), ids=SIZES)
def test_the_factor_is_made_in_place_below_the_pairs(n: int) -> None:
    kernel = make_kernel("laplace")
    u, right, shift = case(n)
    solver = KernelSolver(kernel, u, BANDWIDTH)
    buffer = solver._buffer
    pairs = buffer.triu(1)
    assert oracles.relative_error(pairs, kernel.pairs(u, u).triu(1)) < 1e-12
    solver.factor(shift)
    assert torch.equal(buffer.triu(1), pairs)
    factor = buffer.tril()
    dense = oracles.matrix(kernel, u, u, BANDWIDTH) + torch.diag(shift)
    assert oracles.relative_error(factor @ factor.mT, dense) < 1e-12
    solver.solve(right)
    assert torch.equal(buffer.tril(), factor)
    inverse_diagonal(solver, n)
    assert torch.equal(buffer.triu(1), pairs)
    assert solver.slopes().data_ptr() == buffer.data_ptr()


def test_float32_is_as_good_as_its_precision_lets_it_be() -> None:
    kernel = make_kernel("laplace")
    u, right, _ = case(700)
    shift = torch.full((700,), 0.1, dtype=torch.float64)
    dense = oracles.matrix(kernel, u, u, BANDWIDTH) + torch.diag(shift)
    solver = KernelSolver(kernel, u.float(), BANDWIDTH)
    solver.factor(shift.float())
    solved, diagonal = solver.solve(right.float()), inverse_diagonal(solver, 700)
    assert solved.dtype == diagonal.dtype == torch.float32
    assert oracles.relative_error(solved, torch.linalg.solve(dense, right)) < 1e-3
    assert oracles.relative_error(diagonal, torch.linalg.inv(dense).diagonal()) < 1e-3
    assert oracles.relative_error(solver.slopes(), kernel.slopes_(kernel.pairs(u, u), BANDWIDTH)) < 1e-3


@pytest.mark.parametrize("name", ["gaussian", "laplace", "exp"])
@pytest.mark.parametrize("size", [1e-8, 1e-3, 1.0])
def test_condition_is_estimated(name: str, size: float) -> None:
    kernel = oracles.KERNELS[name]
    u, _, _ = case(80)
    shift = torch.full((80,), size, dtype=torch.float64)
    solver = KernelSolver(kernel, u, BANDWIDTH)
    solver.factor(shift)
    true = np.linalg.cond(oracles.matrix(kernel, u, u, BANDWIDTH).numpy() + np.diag(shift.numpy()), 1)
    assert true / 10 < solver.condition < true * 10


def test_a_singular_matrix_gets_jitter_and_a_warning() -> None:
    kernel = make_kernel("gaussian")
    u = oracles.numbers(40, 3, seed=5).float()
    u = torch.cat([u, u, u])
    y = u[:, :1].sin()
    solver = KernelSolver(kernel, u, 4.0)
    with pytest.warns(ConvergenceWarning, match=r"singular to torch.float32 precision.*larger ridge"):
        solver.factor(torch.zeros(120))
    assert 0 < solver.jitter < 1e-2
    fitted = kernel.matrix(u, u, 4.0).double() @ solver.solve(y).double()
    assert (fitted - y).abs().max() < 0.05
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        solver.factor(torch.ones(120))  # the ladder starts anew
    assert solver.jitter == 0.0


def test_a_hopeless_matrix_is_refused() -> None:
    u = oracles.numbers(30, 3, seed=6)
    with pytest.raises(SingularKernelError, match="not positive definite"):
        KernelSolver(make_kernel("laplace"), u, 1.0).factor(torch.full((30,), -5.0, dtype=torch.float64))
    with pytest.raises(SingularKernelError, match="larger ridge"):
        KernelSolver(make_kernel("laplace"), u * float("nan"), 1.0).factor(torch.ones(30, dtype=torch.float64))


@pytest.mark.parametrize("intercept", [False, True])
@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("name", ["laplace", "gaussian", "polynomial 2"])
def test_leave_one_out_is_that_of_refits(name: str, weighted: bool, intercept: bool) -> None:
    kernel = oracles.KERNELS[name]
    n, ridge = 50, 1e-2
    u, targets, weights = case(n)
    targets = targets + 3.0
    weights = weights if weighted else torch.ones_like(weights)
    dense = oracles.matrix(kernel, u, u, BANDWIDTH)
    solver = KernelSolver(kernel, u, BANDWIDTH)
    solver.factor(float(weights.sum()) * ridge / weights)
    problem = TrainingRows(u, targets, weights, intercept=intercept)
    solved = solver.solve(problem.right_sides())
    residuals, alpha = problem.residuals(solver.loo_residuals(solved)), solved[:, :-1] - problem.mean * solved[:, -1:]
    expected = oracles.left_out_errors(dense, targets, weights, ridge, intercept)
    assert oracles.relative_error(residuals, expected) < 1e-8
    mean = (weights[:, None] * targets).sum(0) / weights.sum() if intercept else 0.0
    direct = oracles.ridge_coefficients(dense, targets - mean, weights, float(weights.sum()) * ridge)
    assert oracles.relative_error(alpha, direct) < 1e-8


@pytest.mark.parametrize("keep_pairs", [False, True])
@pytest.mark.parametrize("last", [1, 37, 299, 300])
@pytest.mark.parametrize("folds", [None, "one", "several"])
def test_last_rows_are_left_out_by_the_last_block_of_the_factor(folds: str | None, last: int, keep_pairs: bool) -> None:
    kernel, n = make_kernel("laplace"), 300
    u, right, shift = case(n)
    inverse = torch.linalg.inv(oracles.matrix(kernel, u, u, BANDWIDTH) + torch.diag(shift))
    numbers = torch.arange(n) % 4 if folds == "several" else torch.zeros(n, dtype=torch.long)
    numbers[: n - last] = 9
    expected = (inverse @ right)[n - last :]
    if folds is None:
        expected = expected / inverse.diagonal()[n - last :, None]
    else:
        for fold in numbers[n - last :].unique():
            out = (numbers == fold).nonzero()[:, 0]
            expected[out - n + last] = torch.linalg.solve(inverse[out][:, out], expected[out - n + last])
    solver = KernelSolver(kernel, u, BANDWIDTH, keep_pairs)
    for _ in range(2):  # the second factor comes from the upper triangle, not from the first factor
        solver.factor(shift)
        result = solver.loo_residuals(solver.solve(right), None if folds is None else numbers, last)
        assert result.shape == (last, 3)
        assert oracles.relative_error(result, expected) < 1e-11
