"""Solve kernel ridge regression with Nystrom centers by a preconditioned conjugate gradient.

The model is ``f(x) = k(x, C) a`` with m centers C. The idea of a preconditioner from the centers is that of FALKON
(Rudi, Carratino and Rosasco 2017); here it is made from a sample of all rows as well, so that it works at any ridge.
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
    r"""Rows to be centers, drawn without replacement.

    "leverage" draws row i with a probability proportional to its ridge leverage score, the weight of row i in its own
    fitted value, estimated from a uniform sample J of p rows (as in Rudi et al. 2018):

    ``l_i = w_i / (N lambda) [k_ii - k_iJ (K_JJ + lambda D^{-1})^{-1} k_Ji]``, ``D = diag(w_j n / (p N))``, N = sum w.

    Rows in places where few others are have large scores; "uniform" may leave such places without a center.

    Args:
        kernel: The kernel.
        u: Rows transformed by the root of M, ``(n, d)``; centered for a radial kernel.
        weights: Of the rows, ``(n,)``; a row of weight zero is never a center.
        m: How many; if there are no more rows of positive weight, all of them.
        bandwidth: L.
        ridge: lambda, above 0 for "leverage".
        how: "uniform" or "leverage".
        generator: Generator or seed.

    Returns:
        Row numbers, ascending.

    Time: "leverage" ``O(n p (d + p))`` with p = 512 at the most. Memory: ``O(n + p^2)`` and a block of the kernel.
    """
    check_rows(u, weights, bandwidth, ridge)
    if not isinstance(m, int) or isinstance(m, bool) or m < 1:
        raise InputError(f"m, the number of centers, must be a whole number of at least 1, got {m!r}")
    if how not in ("uniform", "leverage"):
        raise InputError(f'how must be "uniform" or "leverage", got {how!r}')
    random = as_generator(generator, "nystrom centers")
    rows = weights.nonzero()[:, 0]
    if m >= len(rows):
        return rows
    if how == "uniform":
        picked = torch.randperm(len(rows), generator=random)[:m]
    else:
        scores = _leverage(kernel, u, weights, rows, bandwidth, ridge, random)
        # A race of exponential clocks: the first m to ring are a sample without replacement, for any n.
        clocks = torch.empty(len(rows), dtype=torch.float64).exponential_(generator=random)
        picked = torch.topk(clocks / scores[rows].cpu(), m, largest=False).indices
    chosen: Tensor = rows[picked.to(rows.device)].sort().values
    return chosen


def _leverage(
    kernel: Kernel, u: Tensor, weights: Tensor, rows: Tensor, bandwidth: float, ridge: float, random: torch.Generator
) -> Tensor:
    """Ridge leverage scores of all rows, estimated from a sample of those given, float64."""
    if ridge == 0:
        raise InputError('how="leverage" needs a ridge above 0: without one, every row has the same score')
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
    # What the pilot explains wholly is 0 or less by rounding, and must still be able to ring.
    scores.clamp_min_(torch.finfo(u.dtype).eps * scores.max())
    return scores.mul_(weights).div_(total * ridge)


_LEAST_RIDGE = 1e-13  # in units of the kernel: below it is rounding
_ROUNDING_SHARE = 0.1  # of the penalty, that rounding may reach in the direct form of the preconditioner
_LEAST_SAMPLE = 4  # rows of the preconditioner's sample for each center, at least
# Costs of one entry of the kernel in a step, in operations of a product of matrices (a thread does some 40 a ns).
_KERNEL_COST = 200.0  # to compute it, beyond its inner product
_KEPT_COST = 40.0  # to read it from memory
_OUTPUT_COST = 12.0  # to multiply it twice, for each output


@dataclass(frozen=True)
class NystromSolution:
    """Coefficients of the centers, and how they were found.

    Attributes:
        coefficients: ``(m, c)``, in the dtype of the rows.
        iterations: Steps of the conjugate gradient, one pass over all rows each.
        residual: The largest over outputs of ``|P r| / |P b|``, r the residual of the normal equations as the
            recurrence has it, b their right-hand side and P the preconditioner: up to a small factor, the relative
            error of the fit.
        converged: Whether that is at most the tolerance.
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
    r"""Kernel ridge regression with centers.

    Minimizes ``sum_i w_i |y_i - k(u_i, C) a|^2 / N + lambda a^T K_CC a`` with ``N = sum w``, that is, solves

    ``(K_nC^T W K_nC + N lambda K_CC) a = K_nC^T W Y``

    by a conjugate gradient in the variables ``b = R^T L^T a``. ``L L^T = K_CC`` turns the penalty into ``N lambda I``;
    ``R R^T`` is the matrix of the normal equations in that basis, with s rows, drawn with probabilities ``w_i / N``,
    in the place of all. The sampled matrix then differs from the whole one as a covariance of s samples in m dimensions
    does from the true one, at any ridge: the error falls by a power of ``m / s`` each step. The centers count as one
    row each on top, for the sake of places with few rows. s is the multiple of m, four times or more, that makes the
    sample and the expected steps cheapest together. Where that is n (up to some thousand centers), all rows are taken,
    once, and one or two steps are left, which mend the rounding. Then ``K_nC^T W K_nC`` itself is summed up, unless
    its rounding would show beside the penalty, as with a Gaussian kernel and a small ridge; if so, rows are put into
    the basis first.

    Each pass computes the kernel in blocks of rows and takes both products from the cache; if all of it fits
    `max_memory`, it is kept instead of computed again. An output that has converged is left out of later passes.

    ``K_CC`` gets a jitter of the rounding of its mean diagonal, times ``sqrt(m)``, in the dtype of u: a further penalty
    on ``|a|^2`` of lambda times that. A ridge below 1e-13 of that mean is raised to it. In float32 the entries of
    ``K_nC`` are computed and kept in float32, and everything else (products, ``K_CC``, factors, vectors) is in float64;
    the fit is then good to about 1e-5 for a Laplace kernel, but only to 1e-2 or so for smooth ones at ridges of 1e-6 or
    less: take float64 there.

    Args:
        kernel: The kernel.
        u: Rows transformed by the root of M, ``(n, d)``; centered for a radial kernel.
        targets: Y, ``(n, c)``.
        weights: Of the rows, ``(n,)``, not negative.
        centers_u: C, ``(m, d)``, transformed and centered like u, usually ``u[choose_centers(...)]``.
        bandwidth: L.
        ridge: lambda, 0 or more.
        tolerance: Of `NystromSolution.residual`.
        max_iter: Steps after which to give up, with a warning.
        max_memory: Bytes that a kept ``K_nC`` may take.
        progress: Whether to show a progress bar.

    Time: ``O(n m (d + c))`` a step and ``O(m^3 + s m^2)`` before; one or two steps if s is n, else some 10 to 20.
    Memory: ``5 m^2`` numbers in float64, ``K_nC`` if it is kept, and a block of 2^18 entries or 512 rows.
    """
    check_rows(u, weights, bandwidth, ridge)
    _check_problem(u, targets, centers_u, tolerance, max_iter)
    weights = weights.double()
    total = float(weights.sum())
    rows = KernelRows(kernel, u, centers_u, bandwidth, max_memory)
    right = rows.moments(targets, weights)
    if not torch.isfinite(right).all():
        raise InputError("the rows or targets have NaN or infinite values, or the kernel overflows: scale the rows")
    basis = kernel.matrix(centers_u.double(), centers_u.double(), bandwidth)
    penalty = total * max(ridge, _LEAST_RIDGE * float(basis.diagonal().mean()))
    basis = cholesky(basis, torch.finfo(u.dtype).eps)
    # Rounding of the entries of K_nC^T W K_nC, as it looks in the basis of K_CC, against the penalty.
    rounding = torch.finfo(torch.float64).eps * total * len(basis) / float(basis.diagonal().min()) ** 2
    direct = _ROUNDING_SHARE * penalty > rounding * float(basis.square().sum(1).mean()) ** 2
    size = _sample_size(len(u), len(centers_u), u.shape[1], targets.shape[1], tolerance, rows.kept_share, direct)
    sampled = _sampled_factor(rows, weights, basis, penalty, size, direct)

    def product(vectors: Tensor) -> Tensor:
        """The matrix of the normal equations in the variables b."""
        halfway = over(vectors, sampled)
        moments = rows.normal_product(over(halfway, basis), weights)
        return over_transposed(over_transposed(moments, basis).add_(halfway, alpha=penalty), sampled)

    with progress_bar(max_iter, "conjugate gradient", progress) as advance:
        start = over_transposed(over_transposed(right, basis), sampled)
        found, iterations, residual = _conjugate_gradient(product, start, tolerance, max_iter, advance)
    converged = residual <= tolerance
    if not converged:
        warnings.warn(
            f"the conjugate gradient has a relative residual of {residual:.1e} after {iterations} steps, above the "
            f"tolerance of {tolerance:.1e}: take a larger ridge, more max_iter or a larger tolerance",
            ConvergenceWarning,
            stacklevel=2,
        )
    coefficients = over(over(found, sampled), basis).mT.to(u.dtype).contiguous()
    return NystromSolution(coefficients, iterations, residual, converged)


def _sample_size(n: int, m: int, d: int, c: int, tolerance: float, kept_share: float, direct: bool) -> int:
    """Rows of the preconditioner's sample, from the costs of it and of the steps that it leaves to do.

    A sampled row costs ``m^2`` operations for its products and 1.5 times as much for the triangular solve before, which
    the direct form does not need. s rows leave about ``3 log(1 / tolerance) / log(s / m)`` steps of n rows (measured;
    2 in place of 3 for Gaussian features), n rows two.
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
    """R: the factor of the matrix of the normal equations in the basis of ``K_CC``, from a sample of rows.

    Args:
        rows: The kernel with the centers.
        weights: Of all rows.
        basis: L.
        penalty: ``N lambda``.
        size: s; n for all rows.
        direct: For all rows, ``L^{-1} (K_nC^T W K_nC) L^{-T}``, the rounding of whose middle is small enough.
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
            # One draw in each of s equal parts of the weight: a row of weight w comes s w / N times, nearly.
            draws = torch.rand(size, generator=as_generator(0, "nystrom sample"), dtype=torch.float64)
            draws = (draws + torch.arange(size)).to(weights.device) * (total / size)
            sample = torch.searchsorted(weights.cumsum(0), draws, right=True).clamp_max_(n - 1)
            shares = (total / size).expand(size)
            matrix = (basis.mT @ basis).mul_(total / n)  # the rows of the centers, K_CC L^{-T} = L
        for part in row_blocks(size, len(basis), max(BLOCK, 512 * len(basis))):
            entries = rows.kernel.matrix(rows.u[sample[part]], rows.centers, rows.bandwidth).double()
            _add_products(matrix, over_transposed(entries, basis).mul_(shares[part, None].sqrt()))
    matrix.diagonal().add_(penalty)
    return cholesky(matrix, torch.finfo(matrix.dtype).eps)


def _add_products(matrix: Tensor, block: Tensor) -> None:
    """Add ``B^T B`` to the lower triangle; the upper one is anything."""
    if matrix.device.type != "cpu":
        matrix.addmm_(block.mT, block)
        return
    # scipy's BLAS works in place on column-major arrays: our transposes. It does half the work of a full product.
    columns = block.contiguous().numpy().T
    summed = blas.dsyrk(1.0, columns, beta=1.0, c=matrix.numpy().T, lower=0, overwrite_c=1)
    assert np.shares_memory(summed, matrix.numpy()), "the sum went into a copy"


def _conjugate_gradient(
    product: Callable[[Tensor], Tensor], right: Tensor, tolerance: float, max_iter: int, advance: Callable[..., None]
) -> tuple[Tensor, int, float]:
    """Solutions of a positive definite system for each row of `right`, each until it has converged.

    Returns:
        Solutions, steps of the longest, and the largest relative residual.
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
        if not (curvature > 0).all():  # rounding has the last word: no step makes it better
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


def _check_problem(u: Tensor, targets: Tensor, centers_u: Tensor, tolerance: float, max_iter: int) -> None:
    if targets.ndim != 2 or len(targets) != len(u) or not targets.shape[1]:
        raise InputError(f"targets must be of shape ({len(u)}, outputs), got {tuple(targets.shape)}")
    if centers_u.ndim != 2 or centers_u.shape[1] != u.shape[1] or not len(centers_u):
        raise InputError(f"centers_u must be of shape (centers, {u.shape[1]}), got {tuple(centers_u.shape)}")
    if centers_u.dtype != u.dtype:
        raise InputError(f"centers_u must be in {u.dtype} as u is, got {centers_u.dtype}")
    if not 0 < tolerance < 1:
        raise InputError(f"tolerance must be between 0 and 1, got {tolerance!r}")
    if max_iter < 1:
        raise InputError(f"max_iter must be at least 1, got {max_iter!r}")
