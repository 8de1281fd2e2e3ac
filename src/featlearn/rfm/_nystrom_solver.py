"""Solve kernel ridge regression with Nystrom centers by a preconditioned conjugate gradient.

The model is ``f(x) = k(x, C) a`` with m centers C. FALKON computes a preconditioner from the centers; the one here uses
a sample of all rows as well, so that it works at any ridge.

References:
    Rudi, Carratino & Rosasco (2017), "FALKON: An optimal large scale kernel method", https://arxiv.org/abs/1705.10958.
    Rudi, Calandriello, Carratino & Rosasco (2018), "On fast leverage score sampling and optimal learning",
    https://arxiv.org/abs/1810.13258.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from scipy.linalg import blas
from sklearn.exceptions import ConvergenceWarning
from torch import Tensor

from featlearn._utils.progress import progress_bar
from featlearn._utils.rng import Seed, as_generator
from featlearn._utils.validation import check_int, check_number, check_option
from featlearn.errors import InputError
from featlearn.rfm._kernel_blocks import BLOCK, KernelRows, check_rows, cholesky, kernel_diagonal, over, over_transposed
from featlearn.rfm.kernels import Kernel, row_blocks

_PILOT = 512  # rows from which leverage scores are estimated


def choose_centers(
    kernel: Kernel,
    u: Tensor,
    weights: Tensor,
    m: int,
    bandwidth: float,
    ridge: float,
    how: str = "uniform",
    generator: Seed = None,
) -> Tensor:
    r"""Draw rows without replacement as centers.

    "leverage" draws row i with a probability proportional to its ridge leverage score, the weight of row i in its own
    fitted value, estimated from a uniform sample J of p rows (as in Rudi et al. 2018):

    ``l_i = w_i / (N lambda) [k_ii - k_iJ (K_JJ + lambda D^{-1})^{-1} k_Ji]``, ``D = diag(w_j n / (p N))``, N = sum w.

    Rows with few neighbors have large scores; "uniform" may leave such regions without a center.

    Args:
        kernel: Kernel of the model.
        u: Rows transformed by the root of M, shape ``(n, d)``; centered for a radial kernel.
        weights: Weight of each row, shape ``(n,)``. Rows of weight 0 are never centers.
        m: Number of centers, at least 1. All rows of positive weight are centers if there are no more than that.
        bandwidth: Bandwidth L of the kernel.
        ridge: Ridge lambda; above 0 for "leverage".
        how: Sampling of the centers: "uniform" or "leverage".
        generator: Generator or seed. None is seed 0.

    Returns:
        Row numbers of the centers, ascending.

    Raises:
        InputError: An argument is not allowed.

    Time: ``O(n p (d + p))`` for "leverage", p at most 512. Memory: ``O(n + p^2)`` and a block of the kernel.
    """
    check_rows(u, weights, bandwidth, ridge)
    check_int("m", m)
    check_option("how", how, ("uniform", "leverage"))
    random = as_generator(generator, "nystrom centers")
    rows = weights.nonzero()[:, 0]
    if m >= len(rows):
        return rows
    if how == "uniform":
        picked = torch.randperm(len(rows), generator=random)[:m]
    else:
        scores = _leverage(kernel, u, weights, rows, bandwidth, ridge, random)
        # The m smallest of exponential variables with these rates are a weighted sample without replacement.
        clocks = torch.empty(len(rows), dtype=torch.float64).exponential_(generator=random)
        picked = torch.topk(clocks / scores[rows].cpu(), m, largest=False).indices
    chosen: Tensor = rows[picked.to(rows.device)].sort().values
    return chosen


def _leverage(
    kernel: Kernel, u: Tensor, weights: Tensor, rows: Tensor, bandwidth: float, ridge: float, random: torch.Generator
) -> Tensor:
    """Estimate the ridge leverage scores of all rows from a sample of ``rows``, in float64."""
    if ridge == 0:
        raise InputError('how="leverage" requires a ridge above 0, got 0. Without a ridge all scores are equal.')
    pilot = rows[torch.randperm(len(rows), generator=random)[:_PILOT].to(rows.device)]
    weights = weights.double()
    total = weights.sum()
    within = kernel.matrix(u[pilot].double(), u[pilot].double(), bandwidth)
    within.diagonal().add_(ridge * total * len(pilot) / (len(rows) * weights[pilot]))
    factor = cholesky(within, torch.finfo(u.dtype).eps)
    scores = torch.empty_like(weights)
    for block, entries in KernelRows(kernel, u, u[pilot], bandwidth, 0).blocks():
        explained = over_transposed(entries, factor).square_().sum(1)
        scores[block] = kernel_diagonal(kernel, u[block].double(), bandwidth).sub_(explained)
    # Scores of rows that the pilot explains completely are 0 or less by rounding; they must be positive.
    scores.clamp_min_(torch.finfo(u.dtype).eps * scores.max())
    return scores.mul_(weights).div_(total * ridge)


_LEAST_RIDGE = 1e-13  # least ridge, in units of the kernel: a smaller one is within rounding
_ROUNDING_SHARE = 0.1  # largest share of rounding in the penalty for the direct form of the preconditioner
_LEAST_SAMPLE = 4  # least number of sampled rows per center for the preconditioner
# Costs of one entry of the kernel per step, in operations of a matrix product (about 40 per thread and nanosecond).
_KERNEL_COST = 200.0  # to compute it, without the inner product
_KEPT_COST = 40.0  # to read it from memory
_OUTPUT_COST = 12.0  # to multiply it twice, per output


@dataclass(frozen=True)
class NystromSolution:
    """Coefficients of the centers, and the convergence of the solver.

    Attributes:
        coefficients: Coefficients, shape ``(m, c)``, in the dtype of the rows.
        iterations: Number of conjugate gradient steps, one pass over all rows each.
        residual: Maximum over outputs of ``|P r| / |P b|``, with the recursive residual r of the normal equations,
            their right-hand side b and the preconditioner P: up to a small factor, the relative error of the fit.
        converged: Whether the residual is at most the tolerance.
    """

    coefficients: Tensor
    iterations: int
    residual: float
    converged: bool


def solve_nystrom(
    kernel: Kernel,
    u: Tensor,
    targets: Tensor,
    weights: Tensor,
    centers_u: Tensor,
    bandwidth: float,
    ridge: float,
    *,
    tolerance: float = 1e-7,
    max_iter: int = 100,
    max_memory: int = 2**30,
    progress: bool = False,
) -> NystromSolution:
    r"""Solve kernel ridge regression with centers.

    Minimizes ``sum_i w_i |y_i - k(u_i, C) a|^2 / N + lambda a^T K_CC a`` with ``N = sum w``, that is, solves

    ``(K_nC^T W K_nC + N lambda K_CC) a = K_nC^T W Y``

    by a conjugate gradient in the variables ``b = R^T L^T a``. ``L L^T = K_CC`` turns the penalty into ``N lambda I``.
    ``R R^T`` is the matrix of the normal equations in that basis, computed from s rows drawn with probabilities
    ``w_i / N``, and from the centers as one row each, for regions with few rows. At any ridge, it differs from the full
    matrix like a covariance of s samples in m dimensions from the true one, and the error decreases by a power of
    ``m / s`` per step. s is the multiple of m, at least four times, with the least expected cost of sample and steps.
    If that is n (up to some thousand centers), all rows are used, and one or two steps correct the rounding. Then
    ``K_nC^T W K_nC`` is summed directly, unless its rounding is large compared with the penalty, as with a Gaussian
    kernel and a small ridge; in this case rows are transformed to the basis first.

    Each pass computes the kernel in blocks of rows that stay in the cache for both products. If the whole kernel fits
    ``max_memory``, it is kept. Outputs that have converged are left out of later passes.

    A jitter is added to ``K_CC``: the rounding of its mean diagonal in the dtype of u, times ``sqrt(m)``. It acts as a
    further penalty on ``|a|^2`` of lambda times the jitter. A ridge below 1e-13 of that mean is raised to it. In
    float32 the entries of ``K_nC`` are computed and kept in float32, and everything else (products, ``K_CC``, factors,
    vectors) is in float64. The fit is then accurate to about 1e-5 for a Laplace kernel, but only to about 1e-2 for
    smooth kernels at ridges of 1e-6 or less: use float64 for these.

    Args:
        kernel: Kernel of the model.
        u: Rows transformed by the root of M, shape ``(n, d)``; centered for a radial kernel.
        targets: Targets Y, shape ``(n, c)``.
        weights: Weight of each row, shape ``(n,)``, not negative.
        centers_u: Centers C, shape ``(m, d)``, transformed and centered like u; usually ``u[choose_centers(...)]``.
        bandwidth: Bandwidth L of the kernel.
        ridge: Ridge lambda, 0 or more.
        tolerance: Largest `NystromSolution.residual` of a converged solution, between 0 and 1.
        max_iter: Maximum number of steps; a warning is issued if they do not suffice.
        max_memory: Bytes that a kept ``K_nC`` may take.
        progress: Whether to show a progress bar.

    Returns:
        Coefficients of the centers, and the convergence of the solver.

    Raises:
        InputError: An argument is not allowed, or the kernel overflows.

    Time: ``O(n m (d + c))`` per step after ``O(m^3 + s m^2)``; one or two steps if s is n, otherwise 10 to 20.
    Memory: ``5 m^2`` numbers in float64, ``K_nC`` if it is kept, and a block of 2^18 entries or 512 rows.
    """
    check_rows(u, weights, bandwidth, ridge)
    if targets.ndim != 2 or len(targets) != len(u) or not targets.shape[1]:
        raise InputError(f"targets must be of shape ({len(u)}, outputs), got {tuple(targets.shape)}")
    if centers_u.ndim != 2 or centers_u.shape[1] != u.shape[1] or not len(centers_u):
        raise InputError(f"centers_u must be of shape (centers, {u.shape[1]}), got {tuple(centers_u.shape)}")
    check_option("the dtype of centers_u", centers_u.dtype, [u.dtype])
    check_number("tolerance", tolerance, above=0, below=1)
    check_int("max_iter", max_iter)
    weights = weights.double()
    total = float(weights.sum())
    rows = KernelRows(kernel, u, centers_u, bandwidth, max_memory)
    right = rows.moments(targets, weights)
    if not torch.isfinite(right).all():
        raise InputError("u and targets must be finite and give a finite kernel, got NaN or infinity. Scale the rows.")
    basis = kernel.matrix(centers_u.double(), centers_u.double(), bandwidth)
    penalty = total * max(ridge, _LEAST_RIDGE * float(basis.diagonal().mean()))
    basis = cholesky(basis, torch.finfo(u.dtype).eps)
    # Rounding of the entries of K_nC^T W K_nC in the basis of K_CC, to be compared with the penalty.
    rounding = torch.finfo(torch.float64).eps * total * len(basis) / float(basis.diagonal().min()) ** 2
    direct = _ROUNDING_SHARE * penalty > rounding * float(basis.square().sum(1).mean()) ** 2
    size = _sample_size(len(u), len(centers_u), u.shape[1], targets.shape[1], tolerance, rows.kept_share, direct)
    sampled = _sampled_factor(rows, weights, basis, penalty, size, direct)

    def product(vectors: Tensor) -> Tensor:
        """Multiply by the matrix of the normal equations in the variables b."""
        halfway = over(vectors, sampled)
        moments = rows.normal_product(over(halfway, basis), weights)
        return over_transposed(over_transposed(moments, basis).add_(halfway, alpha=penalty), sampled)

    with progress_bar(max_iter, "conjugate gradient", progress) as advance:
        start = over_transposed(over_transposed(right, basis), sampled)
        solution, iterations, residual = _conjugate_gradient(product, start, tolerance, max_iter, advance)
    converged = residual <= tolerance
    if not converged:
        warnings.warn(
            f"the conjugate gradient has a relative residual of {residual:.1e} after {iterations} steps, above the "
            f"tolerance of {tolerance:.1e}. Pass a larger ridge, max_iter or tolerance.",
            ConvergenceWarning,
            stacklevel=2,
        )
    coefficients = over(over(solution, sampled), basis).mT.to(u.dtype).contiguous()
    return NystromSolution(coefficients, iterations, residual, converged)


def _sample_size(n: int, m: int, d: int, c: int, tolerance: float, kept_share: float, direct: bool) -> int:
    """Return the number of rows in the preconditioner's sample with the least total cost of sample and steps.

    A sampled row costs ``m^2`` operations for its products and 1.5 times as much for its triangular solve, which the
    direct form does not need. With s rows about ``3 log(1 / tolerance) / log(s / m)`` steps over n rows remain
    (measured; 2 instead of 3 for Gaussian features), with n rows two steps.
    """
    again = _KERNEL_COST + 2.0 * d
    step = n * (kept_share * _KEPT_COST + (1.0 - kept_share) * again + _OUTPUT_COST * c)
    best, least = n, n * ((1.0 if direct else 2.5) * m + again) + 2.0 * step
    size = _LEAST_SAMPLE * m
    while size < n:
        cost = size * (2.5 * m + again) + 3.0 * math.log(1.0 / tolerance) / math.log(size / m) * step
        if cost < least:
            best, least = size, cost
        size *= 2
    return best


def _sampled_factor(
    rows: KernelRows, weights: Tensor, basis: Tensor, penalty: float, size: int, direct: bool
) -> Tensor:
    """Factor the matrix of the normal equations in the basis of ``K_CC``, from a sample of rows.

    Args:
        rows: Kernel of all rows with the centers.
        weights: Weight of each row, shape ``(n,)``.
        basis: Cholesky factor L of ``K_CC``.
        penalty: ``N lambda``.
        size: Number s of sampled rows; n uses all rows.
        direct: Whether ``K_nC^T W K_nC`` is summed before the change of basis, if all rows are used.
    """
    n = len(rows.u)
    total = weights.sum()
    matrix = basis.new_zeros(basis.shape)  # not zeros_like: the factor is column-major
    if size == n and direct:
        for block, entries in rows.blocks():
            _add_products(matrix, entries * weights[block, None].sqrt())
        matrix = matrix.tril() + matrix.tril(-1).mT
        matrix = over_transposed(over_transposed(matrix, basis).mT.contiguous(), basis)
    else:
        if size == n:
            sample, shares = torch.arange(n, device=weights.device), weights
        else:
            # One draw from each of s equal parts of the total weight: a row of weight w is drawn about s w / N times.
            draws = torch.rand(size, generator=as_generator(0, "nystrom sample"), dtype=torch.float64)
            draws = (draws + torch.arange(size)).to(weights.device) * (total / size)
            sample = torch.searchsorted(weights.cumsum(0), draws, right=True).clamp_max_(n - 1)
            shares = (total / size).expand(size)
            matrix = (basis.mT @ basis).mul_(total / n)  # the centers as rows: K_CC L^{-T} = L
        for part in row_blocks(size, len(basis), max(BLOCK, 512 * len(basis))):
            entries = rows.kernel.matrix(rows.u[sample[part]], rows.centers, rows.bandwidth).double()
            _add_products(matrix, over_transposed(entries, basis).mul_(shares[part, None].sqrt()))
    matrix.diagonal().add_(penalty)
    return cholesky(matrix, torch.finfo(matrix.dtype).eps)


def _add_products(matrix: Tensor, block: Tensor) -> None:
    """Add ``B^T B`` to the lower triangle; the upper triangle is undefined."""
    if matrix.device.type != "cpu":
        matrix.addmm_(block.mT, block)
        return
    # BLAS works in place on column-major arrays, here the transposes, and does half the work of a full product.
    columns = block.contiguous().numpy().T
    summed = blas.dsyrk(1.0, columns, beta=1.0, c=matrix.numpy().T, lower=0, overwrite_c=1)
    assert np.shares_memory(summed, matrix.numpy()), "the sum went into a copy"


def _conjugate_gradient(
    product: Callable[[Tensor], Tensor], right: Tensor, tolerance: float, max_iter: int, advance: Callable[..., None]
) -> tuple[Tensor, int, float]:
    """Solve a positive definite system for each row of ``right`` until it converges.

    Returns:
        Solutions, number of steps, and the largest relative residual.
    """
    solution, residual, direction = torch.zeros_like(right), right.clone(), right.clone()
    squares = right.square().sum(1)
    goals = tolerance**2 * squares
    start = squares.clone()
    for step in range(max_iter + 1):
        active = (squares > goals).nonzero()[:, 0]
        if step == max_iter or not len(active):
            break
        towards = direction[active]
        moved = product(towards)
        curvature = (towards * moved).sum(1)
        if not (curvature > 0).all():  # rounding dominates: further steps do not improve the solution
            break
        length = (squares[active] / curvature)[:, None]
        solution[active] += length * towards
        residual[active] -= length * moved
        now = residual[active].square().sum(1)
        direction[active] = residual[active] + (now / squares[active])[:, None] * towards
        squares[active] = now
        advance()
    relative = torch.where(start > 0, squares / start, 0.0)
    return solution, step, math.sqrt(float(relative.max()))
