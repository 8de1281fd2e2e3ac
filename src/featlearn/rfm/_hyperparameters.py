"""Leave-one-out selection of bandwidth, ridge and iteration, with a separate feature matrix per fold."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from featlearn.errors import InputError
from featlearn.rfm._hyperparameter_search import (
    FoldView,
    GridPoint,
    Hyperparameters,
    kernel_scale,
    line_search,
    line_search_single,
    search_downhill,
    search_grid,
)
from featlearn.rfm.feature_updates import Metric, transform
from featlearn.rfm.iteration import Settings, learn_metric
from featlearn.rfm.kernels import Kernel
from featlearn.rfm.training_rows import TrainingRows

BANDWIDTHS = (2.0, 4.0, 8.0)
"""Multiples of the median distance to select the bandwidth from."""
SHIFTS = 10.0 ** torch.arange(-6, 2.1, 0.5, dtype=torch.float64)
"""Values of ``n lambda`` to select from, for a kernel with ones on its diagonal."""
TUNING_ROWS = 500
"""Most rows that are validated by eigendecompositions; more are validated by Cholesky factors."""
GRID_ROWS = 150
"""Most rows for which every iteration evaluates the whole grid of bandwidths and ridges."""
SINGLE_ROWS = 2000
"""Most rows that are validated in float64; more are validated in float32 if its rounding errors allow."""
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

    def __init__(self, problem: TrainingRows, settings: Settings, metric: Metric) -> None:
        self._settings = settings
        n = len(problem)
        self._metrics: list[Metric] = []
        self._points: list[GridPoint] = []
        self._fresh = True
        if settings.judge and settings.update != "none" and problem.held_out is None:
            default = torch.arange(n, device=problem.x.device) % min(FOLDS, n)  # rows are in random order
            self._folds = default if problem.folds is None else problem.folds
            rows = torch.bincount(self._folds).cumsum(0)
            self._metrics = [metric] * min(len(rows), int((rows < _ENOUGH).sum()) + 1)

    def select(self, part: TrainingRows, rows: Tensor | None, metric: Metric) -> Hyperparameters:
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
            u = transform(part.x, metric.root) if self._metrics and not self._fresh else views[0].u
            bandwidths = _bandwidths(settings.kernel, u, settings.bandwidth)
            choice = self._search(few, [view.first(len(few)) for view in views], bandwidths, shift is None)
        if settings.judge and small:
            return choice
        start = Hyperparameters(choice.bandwidth, choice.shift if shift is None else shift)
        if not settings.judge:
            return start
        tries = next((tried for most, tried in _TRIED if len(part) <= most), 1) if shift is None else 1
        search = part, settings.kernel, views, start, _STEP, tries
        if len(part) > SINGLE_ROWS and part.x.dtype == torch.float64 and part.held_out is None:
            single = line_search_single(*search)
            if single is not None:
                return single
        return line_search(*search)

    def _search(
        self, few: TrainingRows, views: Sequence[FoldView], bandwidths: Sequence[float], relative: bool
    ) -> Hyperparameters:
        """Search the whole grid in the first iteration, and downhill from the previous result in later ones.

        Few rows, or more features than rows, may have several local minima: the whole grid is searched each time.
        """
        kernel, shifts = self._settings.kernel, self._shifts(few)
        points = []
        if self._points and len(few) > max(GRID_ROWS, few.x.shape[1]):
            points = search_downhill(few, kernel, views, bandwidths, shifts, self._points, relative)
        if not points or not min(point.choice.error for point in points) < math.inf:
            points = search_grid(few, kernel, views, bandwidths, shifts, relative)
        self._points = points
        return min(points, key=lambda point: point.choice.error).choice

    def _shifts(self, few: TrainingRows) -> Tensor:
        if self._settings.ridge is not None:
            return torch.tensor([self._settings.ridge * few.total], dtype=few.x.dtype)
        least = 10 * torch.finfo(few.x.dtype).eps * len(few)
        # In units of the mean weight: the unit of the weights does not matter.
        return (SHIFTS[least <= SHIFTS] * float(few.weights.mean())).to(few.x.dtype)

    def _folds_of(self, rows: Tensor | None) -> Tensor:
        return self._folds if rows is None else self._folds[rows.to(self._folds.device)]

    def _views(self, part: TrainingRows, rows: Tensor | None, metric: Metric) -> list[FoldView]:
        if not self._metrics or self._fresh:
            held = None if part.held_out is None else transform(part.held_out.x, metric.root)
            judged = torch.ones(len(part), dtype=torch.bool, device=part.x.device)
            if self._metrics:
                judged = self._folds_of(rows) < len(self._metrics)
            return [FoldView(transform(part.x, metric.root), judged, held)]
        masks = [self._folds_of(rows) == fold for fold in range(len(self._metrics))]
        views = zip(self._metrics, masks, strict=True)
        return [FoldView(transform(part.x, of_fold.root), mask) for of_fold, mask in views if mask.any()]

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
