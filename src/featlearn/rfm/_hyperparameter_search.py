"""Search of bandwidth and ridge by leave-one-out errors, exhaustive or downhill."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from featlearn.errors import SingularKernelError
from featlearn.rfm._dense_solver import KernelSolver
from featlearn.rfm.kernels import Kernel
from featlearn.rfm.training_rows import TrainingRows

PIVOT_ERROR = 0.01
"""Largest rounding error of the pivots of a factor that is not repaired."""
SINGLE_TOLERANCE = 1e-4
"""Relative difference of errors in float32 below which two ridges are as good as each other."""


@dataclass(frozen=True, eq=False)
class FoldView:
    """Training rows under the M of one fold, and the mask of rows that this M was not learned from.

    Attributes:
        u: Training rows transformed by the root of M, shape ``(n, d)``.
        rows: Mask of the rows that M was not learned from, shape ``(n,)``. Only these rows are validated.
        held_u: Held-out rows transformed by the root of M, shape ``(m, d)``. None if there are none.
    """

    u: Tensor
    rows: Tensor
    held_u: Tensor | None = None

    def first(self, count: int) -> FoldView:
        """Return the view of the first ``count`` rows."""
        return FoldView(self.u[:count], self.rows[:count], self.held_u)


@dataclass(frozen=True, eq=False)
class Hyperparameters:
    """Bandwidth and ridge, with their validation error.

    Attributes:
        bandwidth: Bandwidth L of the kernel.
        shift: ``n lambda`` of the solve with ``K + shift W^{-1}``.
        error: Mean squared error of the validated rows; NaN if not requested.
        residuals: Residual of each row, shape ``(n, c)``; of the held-out rows if there are any. None if not requested.
        judged: Mask of the validated rows, shape ``(n,)``. None for held-out rows.
    """

    bandwidth: float
    shift: float
    error: float = math.nan
    residuals: Tensor | None = None
    judged: Tensor | None = None


def kernel_scale(kernel: Kernel, u: Tensor) -> float:
    """Return the unit of bandwidths: the median distance of two rows, or the root mean square norm of a row."""
    if not kernel.radial:
        return float(u.square().sum(1).mean().sqrt()) or 1.0
    few = u[:500]
    first, second = torch.triu_indices(len(few), len(few), 1, device=u.device)
    distances = kernel.pairs(few, few)[first, second]
    distances = distances[distances > 0]
    return float(distances.median()) ** (1.0 / kernel.norm) if len(distances) else 1.0


def tune(
    problem: TrainingRows,
    kernel: Kernel,
    views: Sequence[FoldView],
    bandwidths: Sequence[float],
    shifts: Tensor,
    relative: bool = True,
) -> Hyperparameters:
    r"""Return the bandwidth and ridge with the least error, by one eigendecomposition per bandwidth and view.

    With ``W^{1/2} K W^{1/2} = Q diag(e) Q^T``, the inverse at every ridge is ``W^{1/2} Q diag(1 / (e + n lambda))
    Q^T W^{1/2}``: its diagonal and its products with the targets cost ``n^2`` per ridge.

    Args:
        problem: Rows and targets, at most a few hundred.
        kernel: Kernel of the model.
        views: Rows under the M of each fold; each row is validated in at most one view.
        bandwidths: Bandwidths to select from.
        shifts: Values of ``n lambda`` to select from, shape ``(shifts,)``.
        relative: Whether the shifts are multiplied by the mean of the kernel's diagonal.

    Returns:
        The selected bandwidth and ridge, with error and residuals.

    Time: about ``10 n^3`` for each bandwidth and view. Memory: four n x n matrices.
    """
    return min(
        search_grid(problem, kernel, views, bandwidths, shifts, relative), key=lambda point: point.choice.error
    ).choice


@dataclass(frozen=True, eq=False)
class GridPoint:
    """Bandwidth and ridge of the grid.

    Attributes:
        choice: Bandwidth and ridge, with their error.
        place: Index of the ridge in the grid.
    """

    choice: Hyperparameters
    place: int


def search_grid(
    problem: TrainingRows,
    kernel: Kernel,
    views: Sequence[FoldView],
    bandwidths: Sequence[float],
    shifts: Tensor,
    relative: bool = True,
) -> list[GridPoint]:
    """Return the ridge with the least error for each bandwidth; the arguments are those of `tune`."""
    pairs = [kernel.pairs(view.u, view.u) for view in views]
    if kernel.radial:
        for distances in pairs:
            distances.fill_diagonal_(0.0)
    points = []
    for bandwidth in bandwidths:
        scaled = _scaled(kernel, views, bandwidth, shifts, relative)
        # Residuals of each view, shape (shifts, rows, outputs).
        residuals = [
            _residuals_by_shift(problem, kernel, view, view_pairs, bandwidth, scaled)
            for view, view_pairs in zip(views, pairs, strict=True)
        ]
        choices = [
            _joined(problem, views, [values[place] for values in residuals], bandwidth, shift)
            for place, shift in enumerate(scaled.tolist())
        ]
        place = min(range(len(choices)), key=lambda place: choices[place].error)
        points.append(GridPoint(choices[place], place))
    return points


def _scaled(kernel: Kernel, views: Sequence[FoldView], bandwidth: float, shifts: Tensor, relative: bool) -> Tensor:
    """Return the shifts in units of the mean of the kernel's diagonal if they are relative."""
    if not relative or kernel.radial:
        return shifts
    diagonal = kernel.values_(views[0].u.square().sum(1), bandwidth)
    return shifts * (float(diagonal.mean()) or 1.0)


def search_downhill(
    problem: TrainingRows,
    kernel: Kernel,
    views: Sequence[FoldView],
    bandwidths: Sequence[float],
    shifts: Tensor,
    starts: Sequence[GridPoint],
    relative: bool = True,
) -> list[GridPoint]:
    """Return a ridge with a locally least error for each bandwidth, from those of the previous iteration.

    The bandwidths are visited from the previous best one outwards, until the error increases. For each one the
    ridge goes downhill on the grid.

    Args:
        problem: Rows and targets, at most a few hundred.
        kernel: Kernel of the model.
        views: Rows under the M of each fold; each row is validated in at most one view.
        bandwidths: Bandwidths to select from, ascending.
        shifts: Values of ``n lambda`` to select from, shape ``(shifts,)``, ascending.
        starts: Result for the previous M, one per bandwidth.
        relative: Whether the shifts are multiplied by the mean of the kernel's diagonal.

    Returns:
        One point per bandwidth. The error of a bandwidth that was not visited is infinite.

    Time: ``n^3 / 3`` for each bandwidth, view and ridge tried, about three ridges per bandwidth.
    """
    points = [
        GridPoint(Hyperparameters(point.choice.bandwidth, point.choice.shift, math.inf), point.place)
        for point in starts
    ]

    def visit(number: int) -> float:
        bandwidth = bandwidths[number]
        scaled = _scaled(kernel, views, bandwidth, shifts, relative).tolist()
        at = _by_factors(problem, kernel, views, bandwidth, repair=False)
        points[number] = _walk(at, scaled, points[number].place)
        return points[number].choice.error

    middle = min(range(len(starts)), key=lambda number: starts[number].choice.error)
    least = visit(middle)
    for way in (-1, 1):
        number, before = middle + way, least
        while 0 <= number < len(bandwidths):
            error = visit(number)
            if error >= before:
                break
            number, before = number + way, error
    return points


def _walk(at: Callable[[float], Hyperparameters], shifts: Sequence[float], start: int) -> GridPoint:
    """Go downhill from a place of the grid, first to smaller ridges, then to larger ones."""
    best = GridPoint(at(shifts[start]), start)
    for way in (-1, 1):
        place = start + way
        while 0 <= place < len(shifts):
            other = at(shifts[place])
            if not other.error < best.choice.error:
                break
            best = GridPoint(other, place)
            place += way
        if best.place != start:  # the error decreases in one direction only
            break
    return best


def _residuals_by_shift(
    problem: TrainingRows, kernel: Kernel, view: FoldView, pairs: Tensor, bandwidth: float, shifts: Tensor
) -> Tensor:
    roots = problem.weights.sqrt()[:, None]
    k = kernel.values_(pairs.clone(), bandwidth)
    values, vectors = torch.linalg.eigh(k.mul_(roots).mul_(roots.mT))
    values = values.clamp_min(0)
    turned = vectors.mT @ (roots * problem.right_sides())
    held = None if view.held_u is None else kernel.matrix(view.held_u, view.u, bandwidth)
    squares = roots.square() * vectors.square()
    residuals = []
    for shift in shifts.tolist():
        inverse = 1.0 / (values + shift)
        solved = roots * (vectors @ (inverse[:, None] * turned))
        if held is not None:
            residuals.append(problem.held_out_residuals(held, solved))
        elif problem.folds is None:
            residuals.append(problem.residuals(solved / (squares @ inverse)[:, None]))
        else:  # `KernelSolver.loo_residuals` of the validated folds
            left_out = torch.zeros_like(solved)
            for fold in sorted(set(problem.folds[view.rows].tolist())):
                rows = (problem.folds == fold).nonzero().squeeze(1)
                part = roots[rows] * vectors[rows]
                left_out[rows] = torch.linalg.solve((part * inverse) @ part.mT, solved[rows])
            residuals.append(problem.residuals(left_out))
    return torch.stack(residuals)


def _joined(
    problem: TrainingRows, views: Sequence[FoldView], residuals: Sequence[Tensor], bandwidth: float, shift: float
) -> Hyperparameters:
    """Join the residuals of the validated rows of all views, and compute their error."""
    if problem.held_out is not None:
        return Hyperparameters(bandwidth, shift, problem.error(residuals[0]), residuals[0])
    joined = torch.zeros_like(residuals[0])
    judged = torch.zeros_like(views[0].rows)
    for view, values in zip(views, residuals, strict=True):
        joined[view.rows] = values[view.rows]
        judged |= view.rows
    return Hyperparameters(bandwidth, shift, problem.error(joined, judged), joined, judged)


def line_search(
    problem: TrainingRows,
    kernel: Kernel,
    views: Sequence[FoldView],
    start: Hyperparameters,
    step: float,
    tries: int,
    tolerance: float = 0.0,
    repair: bool = True,
) -> Hyperparameters:
    """Search the ridge of least error downhill from a start, with all rows.

    Args:
        problem: Rows and targets.
        kernel: Kernel of the model.
        views: Rows under the M of each fold.
        start: First bandwidth and ridge; the bandwidth is kept.
        step: Factor between successive ridges, above 1.
        tries: Maximum number of ridges to try. 1 keeps the start and computes its error.
        tolerance: Relative difference of errors below which two ridges are as good as each other, which ends the
            search.
        repair: Whether a singular kernel matrix gets jitter. False raises an error for it, or if the rounding errors of
            the factor exceed `PIVOT_ERROR`.

    Returns:
        The selected bandwidth and ridge, with error and residuals.

    Raises:
        SingularKernelError: The kernel matrix is singular, or inaccurate without ``repair``.

    Time: ``n^3 / 3`` for each view and try, and ``f^3 / 3`` for f validated rows. Memory: an n x n matrix for each
    view.
    """
    at = _by_factors(problem, kernel, views, start.bandwidth, repair)
    best = at(start.shift)
    if not repair and not math.isfinite(best.error):
        raise SingularKernelError("the kernel matrix is singular or inaccurate")
    left = tries - 1
    for factor in (1.0 / step, step):
        first = best
        while left:
            left -= 1
            other = at(best.shift * factor)
            if not repair and not math.isfinite(other.error):
                raise SingularKernelError("the kernel matrix is singular or inaccurate")
            if abs(other.error - best.error) < tolerance * best.error:  # flat: nothing is to be found
                return best
            if not other.error < best.error:
                break
            best = other
        if best is not first:  # the error decreases in one direction only
            break
    return best


def line_search_single(
    problem: TrainingRows, kernel: Kernel, views: Sequence[FoldView], start: Hyperparameters, step: float, tries: int
) -> Hyperparameters | None:
    """Search the ridge in float32, which is twice as fast; None if its rounding errors could matter.

    The arguments are those of `line_search`, in float64. Errors agree with those in float64 to about 1e-5, so ridges
    that differ by less count as equal, and the first one is kept.
    """
    assert problem.held_out is None
    spread = None if problem.spread is None else problem.spread.float()
    single = replace(problem, targets=problem.targets.float(), weights=problem.weights.float(), spread=spread)
    try:
        few_digits = [FoldView(view.u.float(), view.rows) for view in views]
        result = line_search(single, kernel, few_digits, start, step, tries, SINGLE_TOLERANCE, repair=False)
    except SingularKernelError:
        return None
    assert result.residuals is not None
    residuals = result.residuals.double()
    return replace(result, error=problem.error(residuals, result.judged), residuals=residuals)


def _by_factors(
    problem: TrainingRows, kernel: Kernel, views: Sequence[FoldView], bandwidth: float, repair: bool = True
) -> Callable[[float], Hyperparameters]:
    """Return a function that computes the error of a ridge by Cholesky factors.

    The validated rows of a view come last, so that their residuals need the last block of the factor only. Without
    ``repair`` the error of a kernel matrix that is singular, or whose factor is inaccurate, is infinite.
    """
    orders = [torch.cat([(~view.rows).nonzero()[:, 0], view.rows.nonzero()[:, 0]]) for view in views]
    solvers = [
        KernelSolver(kernel, view.u[order], bandwidth, keep_pairs=False)
        for view, order in zip(views, orders, strict=True)
    ]
    right = problem.right_sides()
    held = [None if view.held_u is None else kernel.matrix(view.held_u, view.u, bandwidth) for view in views]

    def at(shift: float) -> Hyperparameters:
        residuals = []
        for solver, view, order, held_kernel in zip(solvers, views, orders, held, strict=True):
            try:
                solver.factor((shift / problem.weights)[order], repair)
            except SingularKernelError:
                if repair:
                    raise
                return Hyperparameters(bandwidth, shift, math.inf)
            if not repair and solver.pivot_error > PIVOT_ERROR:
                return Hyperparameters(bandwidth, shift, math.inf)
            solved = solver.solve(right[order])
            if held_kernel is not None:
                residuals.append(problem.held_out_residuals(held_kernel, solved))
                continue
            count = int(view.rows.sum())
            left_out = torch.zeros_like(right)
            folds = None if problem.folds is None else problem.folds[order]
            left_out[order[len(order) - count :]] = solver.loo_residuals(solved, folds, count)
            residuals.append(problem.residuals(left_out))
        return _joined(problem, views, residuals, bandwidth, shift)

    return at
