"""Leave-one-out selection of bandwidth, ridge and iteration, with a separate feature matrix per fold."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from featlearn.errors import InputError
from featlearn.rfm._dense_solver import KernelSolver
from featlearn.rfm.feature_updates import root_of, transform
from featlearn.rfm.iteration import Settings, average_metrics, fit_rows, update_metric
from featlearn.rfm.kernels import Kernel
from featlearn.rfm.training_rows import TrainingRows

BANDWIDTHS = (2.0, 4.0, 8.0)
"""Multiples of the median distance to select from."""
SHIFTS = 10.0 ** torch.arange(-6, 2.1, 0.5, dtype=torch.float64)
"""Values of ``n lambda`` to select from, for a kernel with ones on its diagonal."""
TUNING_ROWS = 500
"""Most rows that are validated by eigendecompositions; more are validated by Cholesky factors."""
FOLDS = 5
_ENOUGH = 1000  # rows whose errors distinguish iterates
_STEP = 10.0**0.5
_TRIED = ((2000, 4), (6000, 3))  # most rows -> ridges tried on all of them; with more rows, one


class LeaveOneOutValidator:
    r"""Unbiased leave-one-out errors for each RFM iteration.

    Leaving a row out of the solve is not enough once M is learned: M depends on the targets of all rows, and a row
    that is left out of the solve has still shaped M, more so with every iteration. So each of five folds has a second
    M, learned in step with the first from the rows outside the fold, with the same bandwidth and ridge; a row is left
    out of the solve under the M of its fold. At the first iteration, M = I, these are the usual leave-one-out errors.
    With many rows the first folds are enough.

    Folds that are given are left out whole, of M and of the solve. Held-out rows are scored as they are. Without
    validation, a bandwidth and ridge that are not given are still selected by leaving out rows, under the one M.

    Args:
        problem: All rows.
        settings: Settings of the estimator.
        metric: M of the first iteration.
    """

    def __init__(self, problem: TrainingRows, settings: Settings, metric: Tensor) -> None:
        self._settings = settings
        n = len(problem)
        self._metrics: list[Tensor] = []
        self._fresh = True
        if settings.judge and settings.update != "none" and problem.held_out is None:
            default = torch.arange(n, device=problem.x.device) % min(FOLDS, n)  # rows have no order
            self._folds = default if problem.folds is None else problem.folds
            rows = torch.bincount(self._folds).cumsum(0)
            self._metrics = [metric] * min(len(rows), int((rows < _ENOUGH).sum()) + 1)

    def select(self, part: TrainingRows, rows: Tensor | None, metric: Tensor) -> Hyperparameters:
        """Select the bandwidth and ridge of an iteration, and compute their error.

        Args:
            part: Rows of this iteration.
            rows: Their row numbers among all rows; None if they are all rows.
            metric: M of the model that is fitted to all rows.
        """
        settings = self._settings
        views = self._views(part, rows, metric)
        if part.held_out is None and not any(bool(view.rows.any()) for view in views):
            raise InputError(f"none of the {len(part)} rows of a subset can be judged: take a larger subset, or None")
        shift = None if settings.ridge is None else settings.ridge * part.total
        small = len(part) <= TUNING_ROWS
        if settings.bandwidth is not None and shift is not None and not (settings.judge and small):
            choice = Hyperparameters(settings.bandwidth, shift)
        else:
            few = part if small else part.subset(torch.arange(TUNING_ROWS, device=part.x.device))
            u = transform(part.x, root_of(metric)) if self._metrics and not self._fresh else views[0].u
            choice = tune(
                few, settings.kernel, [view.first(len(few)) for view in views],
                _bandwidths(settings.kernel, u, settings.bandwidth), self._shifts(few), relative=shift is None,
            )  # fmt: skip
        if not settings.judge:
            return Hyperparameters(choice.bandwidth, choice.shift if shift is None else shift)
        if small:
            return choice
        tries = next((tried for most, tried in _TRIED if len(part) <= most), 1) if shift is None else 1
        start = Hyperparameters(choice.bandwidth, choice.shift if shift is None else shift)
        return line_search(part, settings.kernel, views, start, _STEP, tries)

    def _shifts(self, few: TrainingRows) -> Tensor:
        if self._settings.ridge is not None:
            return torch.tensor([self._settings.ridge * few.total], dtype=few.x.dtype)
        least = 10 * torch.finfo(few.x.dtype).eps * len(few)
        # In units of the mean weight, so that the unit of the weights does not matter.
        return (SHIFTS[least <= SHIFTS] * float(few.weights.mean())).to(few.x.dtype)

    def _folds_of(self, rows: Tensor | None) -> Tensor:
        return self._folds if rows is None else self._folds[rows.to(self._folds.device)]

    def _views(self, part: TrainingRows, rows: Tensor | None, metric: Tensor) -> list[FoldView]:
        every = torch.ones(len(part), dtype=torch.bool, device=part.x.device)
        if not self._metrics or self._fresh:
            root = root_of(metric)
            held = None if part.held_out is None else transform(part.held_out.x, root)
            judged = self._folds_of(rows) < len(self._metrics) if self._metrics else every
            return [FoldView(transform(part.x, root), judged, held)]
        folds = self._folds_of(rows)
        unseen = [(of_fold, folds == fold) for fold, of_fold in enumerate(self._metrics)]
        return [FoldView(transform(part.x, root_of(of_fold)), rows) for of_fold, rows in unseen if rows.any()]

    def update(self, windows: Sequence[tuple[TrainingRows, Tensor | None]], choice: Hyperparameters) -> None:
        """Update the M of each fold by one iteration.

        Args:
            windows: Rows of this iteration with their row numbers among all rows (None if they are all rows); the
                validated rows first.
            choice: Bandwidth and ridge of this iteration.

        Time: for each fold and window ``n^3 / 6`` and a feature matrix.
        """
        judged = windows[0][0]
        for fold, metric in enumerate(self._metrics):
            learned = []
            for part, rows in windows:
                inside = part.subset((self._folds_of(rows) != fold).nonzero().squeeze(1))
                if not len(inside):
                    raise InputError(
                        f"the {len(part)} rows of a subset are all of one fold: take a larger subset, or None"
                    )
                shift = choice.shift / judged.total * part.total
                fit, slopes = fit_rows(inside, self._settings.kernel, metric, choice.bandwidth, shift)
                learned.append(update_metric(inside, self._settings, metric, fit, slopes))
                del slopes  # and its matrix, before the next one is made
            new = average_metrics(learned, self._settings, metric)
            self._metrics[fold] = metric if new is None else new
        self._fresh = False


def _bandwidths(kernel: Kernel, u: Tensor, given: float | None) -> list[float]:
    if given is not None:
        return [given]
    scale = kernel_scale(kernel, u)
    if kernel.name == "quadratic":  # homogeneous: a bandwidth is a factor of the kernel
        return [scale]
    return [multiple * scale for multiple in BANDWIDTHS]


@dataclass(frozen=True, eq=False)
class FoldView:
    """Training rows under the M of one fold, and which of them that M was not learned from.

    Attributes:
        u: Training rows, transformed by the root of M.
        rows: Rows that M was not learned from, ``(n,)`` of booleans: only these are validated.
        held_u: Held-out rows, transformed; None if there are none.
    """

    u: Tensor
    rows: Tensor
    held_u: Tensor | None = None

    def first(self, count: int) -> FoldView:
        """Return the view of the first rows only."""
        return FoldView(self.u[:count], self.rows[:count], self.held_u)


@dataclass(frozen=True, eq=False)
class Hyperparameters:
    """Bandwidth and ridge, with their validation error.

    Attributes:
        bandwidth: Bandwidth L of the kernel.
        shift: ``n lambda``: the solve is ``K + shift W^{-1}``.
        error: Mean squared error of the validated rows; NaN if not requested.
        residuals: Residual of each row, ``(n, c)``; of the held-out rows if there are any. None if not requested.
        judged: Rows that the residuals belong to, ``(n,)`` of booleans; None for held-out rows.
    """

    bandwidth: float
    shift: float
    error: float = math.nan
    residuals: Tensor | None = None
    judged: Tensor | None = None


def kernel_scale(kernel: Kernel, u: Tensor) -> float:
    """Return a bandwidth of order one: the median distance of two rows, or the root mean square norm of a row."""
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
        problem: Rows and targets; meant for some hundred rows.
        kernel: The kernel.
        views: Rows under the M of each fold; each row is validated in at most one view.
        bandwidths: Bandwidths to select from.
        shifts: Values of ``n lambda`` to select from.
        relative: Whether the shifts are meant for a kernel with a mean of 1 on its diagonal.

    Time: about ``10 n^3`` for each bandwidth and view. Memory: four n x n matrices.
    """
    best: Hyperparameters | None = None
    pairs = [_self_pairs(kernel, view.u) for view in views]
    for bandwidth in bandwidths:
        scaled = shifts
        if relative:
            diagonal = kernel.values_(pairs[0].diagonal().clone(), bandwidth)
            scaled = shifts * (float(diagonal.mean()) or 1.0)
        # (shifts, rows, outputs): a few hundred rows each
        residuals = [
            _residuals_by_shift(problem, kernel, view, of_view, bandwidth, scaled)
            for view, of_view in zip(views, pairs, strict=True)
        ]
        for place, shift in enumerate(scaled.tolist()):
            choice = _judged(problem, views, [of_view[place] for of_view in residuals], bandwidth, shift)
            if best is None or choice.error < best.error:
                best = choice
    assert best is not None
    return best


def _self_pairs(kernel: Kernel, u: Tensor) -> Tensor:
    pairs = kernel.pairs(u, u)
    return pairs.fill_diagonal_(0.0) if kernel.radial else pairs


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
            assert problem.held_out is not None
            residuals.append(problem.held_out.targets - (held @ problem.coefficients(solved) + problem.mean))
        elif problem.folds is None:
            residuals.append(problem.residuals(solved / (squares @ inverse)[:, None]))
        else:
            residuals.append(
                problem.residuals(_fold_residuals(solved, vectors, inverse, roots, problem.folds, view.rows))
            )
    return torch.stack(residuals)


def _fold_residuals(
    solved: Tensor, vectors: Tensor, inverse: Tensor, roots: Tensor, folds: Tensor, judged: Tensor
) -> Tensor:
    """Return `KernelSolver.loo_residuals` of folds, from an eigendecomposition; of the validated folds only."""
    result = torch.zeros_like(solved)
    for fold in sorted(set(folds[judged].tolist())):
        rows = (folds == fold).nonzero().squeeze(1)
        part = roots[rows] * vectors[rows]
        result[rows] = torch.linalg.solve((part * inverse) @ part.mT, solved[rows])
    return result


def _judged(
    problem: TrainingRows, views: Sequence[FoldView], residuals: Sequence[Tensor], bandwidth: float, shift: float
) -> Hyperparameters:
    """Join the residuals of all views, each for its validated rows."""
    if problem.held_out is not None:
        return Hyperparameters(bandwidth, shift, problem.error(residuals[0]), residuals[0])
    together = torch.zeros_like(residuals[0])
    judged = torch.zeros_like(views[0].rows)
    for view, of_view in zip(views, residuals, strict=True):
        together[view.rows] = of_view[view.rows]
        judged |= view.rows
    return Hyperparameters(bandwidth, shift, problem.error(together, judged), together, judged)


def line_search(
    problem: TrainingRows, kernel: Kernel, views: Sequence[FoldView], start: Hyperparameters, step: float, tries: int
) -> Hyperparameters:
    """Search the ridge downhill from a start, by the errors of all rows.

    Args:
        problem: Rows and targets.
        kernel: The kernel.
        views: Rows under the M of each fold.
        start: First bandwidth and ridge; the bandwidth is kept.
        step: Factor from one ridge to the next.
        tries: Most ridges to try; with 1 the error of the start is computed and the start is kept.

    Time: ``2 n^3 / 3`` for each view and try. Memory: an n x n matrix for each view.
    """
    solvers = [KernelSolver(kernel, view.u, start.bandwidth) for view in views]

    def at(shift: float) -> Hyperparameters:
        residuals = []
        for solver, view in zip(solvers, views, strict=True):
            solver.factor(shift / problem.weights)
            solved = solver.solve(problem.right_sides())
            if view.held_u is not None:
                assert problem.held_out is not None
                predicted = kernel.matrix(view.held_u, view.u, start.bandwidth) @ problem.coefficients(solved)
                residuals.append(problem.held_out.targets - (predicted + problem.mean))
            else:
                residuals.append(problem.residuals(solver.loo_residuals(solved, problem.folds, view.rows)))
        return _judged(problem, views, residuals, start.bandwidth, shift)

    best = at(start.shift)
    left = tries - 1
    for factor in (1.0 / step, step):
        first = best
        while left:
            left -= 1
            other = at(best.shift * factor)
            if not other.error < best.error:
                break
            best = other
        if best is not first:  # the error falls on one side only
            break
    return best
