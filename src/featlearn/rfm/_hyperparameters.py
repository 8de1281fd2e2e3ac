"""Leave-one-out selection of bandwidth, ridge and iteration, with a separate feature matrix per fold."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from featlearn.errors import InputError
from featlearn.rfm._dense_solver import KernelSolver
from featlearn.rfm.feature_updates import root_of, transform
from featlearn.rfm.iteration import Settings, learn_metric
from featlearn.rfm.kernels import Kernel
from featlearn.rfm.training_rows import TrainingRows

BANDWIDTHS = (2.0, 4.0, 8.0)
"""Multiples of the median distance to select the bandwidth from."""
SHIFTS = 10.0 ** torch.arange(-6, 2.1, 0.5, dtype=torch.float64)
"""Values of ``n lambda`` to select from, for a kernel with ones on its diagonal."""
TUNING_ROWS = 500
"""Most rows that are validated by eigendecompositions; more are validated by Cholesky factors."""
FOLDS = 5
_ENOUGH = 1000  # number of validated rows that is enough to compare iterations
_STEP = 10.0**0.5
_TRIED = ((2000, 4), (6000, 3))  # most rows, and number of ridges tried on all of them; one ridge for more rows


class LeaveOneOutValidator:
    r"""Unbiased leave-one-out errors for each RFM iteration.

    Once M is learned, leave-one-out errors of the solve are biased: M depends on the targets of all rows, and more so
    with each iteration. Therefore each of five folds has an M of its own, learned in each iteration from the rows
    outside the fold with the same bandwidth and ridge. A row is left out of the solve under the M of its fold. In the
    first iteration, M = I, these are the usual leave-one-out errors. With many rows, only the first folds are used.

    Folds of the user are left out of both M and the solve. Held-out rows are scored directly. Without validation,
    bandwidth and ridge are still selected by leave-one-out errors, under the M of all rows.

    Args:
        problem: All rows and targets.
        settings: Settings of the estimator.
        metric: M of the first iteration.
    """

    def __init__(self, problem: TrainingRows, settings: Settings, metric: Tensor) -> None:
        self._settings = settings
        n = len(problem)
        self._metrics: list[Tensor] = []
        self._fresh = True
        if settings.judge and settings.update != "none" and problem.held_out is None:
            default = torch.arange(n, device=problem.x.device) % min(FOLDS, n)  # rows are in random order
            self._folds = default if problem.folds is None else problem.folds
            rows = torch.bincount(self._folds).cumsum(0)
            self._metrics = [metric] * min(len(rows), int((rows < _ENOUGH).sum()) + 1)

    def select(self, part: TrainingRows, rows: Tensor | None, metric: Tensor) -> Hyperparameters:
        """Select the bandwidth and ridge of an iteration, and compute their error.

        Args:
            part: Rows of this iteration.
            rows: Numbers of these rows among all rows. None if they are all rows.
            metric: M of the model that is fitted to all rows.

        Returns:
            Bandwidth and ridge, with error and residuals if the settings ask for validation.

        Raises:
            InputError: The rows of the iteration belong to folds that are not validated.
        """
        settings = self._settings
        views = self._views(part, rows, metric)
        if part.held_out is None and not any(bool(view.rows.any()) for view in views):
            raise InputError(
                f"subset must be large enough for validation, got {len(part)} rows of which none is validated. "
                "Pass a larger subset, or None."
            )
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
        if settings.judge and small:
            return choice
        start = Hyperparameters(choice.bandwidth, choice.shift if shift is None else shift)
        if not settings.judge:
            return start
        tries = next((tried for most, tried in _TRIED if len(part) <= most), 1) if shift is None else 1
        return line_search(part, settings.kernel, views, start, _STEP, tries)

    def _shifts(self, few: TrainingRows) -> Tensor:
        if self._settings.ridge is not None:
            return torch.tensor([self._settings.ridge * few.total], dtype=few.x.dtype)
        least = 10 * torch.finfo(few.x.dtype).eps * len(few)
        # In units of the mean weight: the unit of the weights does not matter.
        return (SHIFTS[least <= SHIFTS] * float(few.weights.mean())).to(few.x.dtype)

    def _folds_of(self, rows: Tensor | None) -> Tensor:
        return self._folds if rows is None else self._folds[rows.to(self._folds.device)]

    def _views(self, part: TrainingRows, rows: Tensor | None, metric: Tensor) -> list[FoldView]:
        if not self._metrics or self._fresh:
            root = root_of(metric)
            held = None if part.held_out is None else transform(part.held_out.x, root)
            judged = torch.ones(len(part), dtype=torch.bool, device=part.x.device)
            if self._metrics:
                judged = self._folds_of(rows) < len(self._metrics)
            return [FoldView(transform(part.x, root), judged, held)]
        masks = [self._folds_of(rows) == fold for fold in range(len(self._metrics))]
        views = zip(self._metrics, masks, strict=True)
        return [FoldView(transform(part.x, root_of(of_fold)), mask) for of_fold, mask in views if mask.any()]

    def update(self, windows: Sequence[tuple[TrainingRows, Tensor | None]], choice: Hyperparameters) -> None:
        """Update the M of each fold by one iteration.

        Args:
            windows: Rows of this iteration with their numbers among all rows (None if they are all rows); the
                validated rows come first.
            choice: Bandwidth and ridge of this iteration.

        Raises:
            InputError: All rows of a window belong to one fold.

        Time: for each fold and window ``n^3 / 6`` and a feature matrix.
        """
        judged = windows[0][0]
        for fold, metric in enumerate(self._metrics):
            outside = []
            for part, rows in windows:
                inside = part.subset((self._folds_of(rows) != fold).nonzero().squeeze(1))
                if not len(inside):
                    raise InputError(
                        f"subset must contain rows of several folds, got {len(part)} rows of one fold. "
                        "Pass a larger subset, or None."
                    )
                outside.append((inside, choice.shift / judged.total * part.total))
            new = learn_metric(outside, self._settings, metric, choice.bandwidth)
            self._metrics[fold] = metric if new is None else new
        self._fresh = False


def _bandwidths(kernel: Kernel, u: Tensor, given: float | None) -> list[float]:
    if given is not None:
        return [given]
    multiples = (
        (1.0,) if kernel.name == "quadratic" else BANDWIDTHS
    )  # homogeneous: the bandwidth only scales the kernel
    scale = kernel_scale(kernel, u)
    return [multiple * scale for multiple in multiples]


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
    best: Hyperparameters | None = None
    pairs = [kernel.pairs(view.u, view.u) for view in views]
    if kernel.radial:
        for distances in pairs:
            distances.fill_diagonal_(0.0)
    for bandwidth in bandwidths:
        scaled = shifts
        if relative:
            diagonal = kernel.values_(pairs[0].diagonal().clone(), bandwidth)
            scaled = shifts * (float(diagonal.mean()) or 1.0)
        # Residuals of each view, shape (shifts, rows, outputs).
        residuals = [
            _residuals_by_shift(problem, kernel, view, view_pairs, bandwidth, scaled)
            for view, view_pairs in zip(views, pairs, strict=True)
        ]
        for place, shift in enumerate(scaled.tolist()):
            choice = _joined(problem, views, [values[place] for values in residuals], bandwidth, shift)
            if best is None or choice.error < best.error:
                best = choice
    assert best is not None
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
    problem: TrainingRows, kernel: Kernel, views: Sequence[FoldView], start: Hyperparameters, step: float, tries: int
) -> Hyperparameters:
    """Search the ridge of least error downhill from a start, with all rows.

    Args:
        problem: Rows and targets.
        kernel: Kernel of the model.
        views: Rows under the M of each fold.
        start: First bandwidth and ridge; the bandwidth is kept.
        step: Factor between successive ridges, above 1.
        tries: Maximum number of ridges to try. 1 keeps the start and computes its error.

    Returns:
        The selected bandwidth and ridge, with error and residuals.

    Time: ``n^3 / 3`` for each view and try, and ``f^3 / 3`` for f validated rows. Memory: an n x n matrix for each
    view.
    """
    at = _by_factors(problem, kernel, views, start.bandwidth)
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
        if best is not first:  # the error decreases in one direction only
            break
    return best


def _by_factors(
    problem: TrainingRows, kernel: Kernel, views: Sequence[FoldView], bandwidth: float
) -> Callable[[float], Hyperparameters]:
    """Return a function that computes the error of a ridge by Cholesky factors.

    The validated rows of a view come last, so that their residuals need the last block of the factor only.
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
            solver.factor((shift / problem.weights)[order])
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
