"""Who judges bandwidth, ridge and iterates: rows left out of the solve, by an M that has not seen them."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from featlearn.errors import InputError
from featlearn.rfm.fitting import Settings, averaged, fit_rows, updated
from featlearn.rfm.kernels import Kernel
from featlearn.rfm.problem import Problem
from featlearn.rfm.selection import Choice, View, kernel_scale, tune, walk
from featlearn.rfm.updates import root_of, transform

__all__ = ["Judge"]

BANDWIDTHS = (2.0, 4.0, 8.0)
"""Multiples of the median distance to choose from."""
SHIFTS = 10.0 ** torch.arange(-6, 2.1, 0.5, dtype=torch.float64)
"""``n lambda`` to choose from, for a kernel with ones on its diagonal."""
TUNING_ROWS = 500
"""Rows that eigendecompositions see; more are judged by Cholesky factors."""
FOLDS = 5
_ENOUGH = 1000  # rows whose errors tell iterates apart
_STEP = 10.0**0.5
_TRIED = ((2000, 4), (6000, 3))  # ridges tried on all rows, by their number; beyond, that found on few rows is judged


class Judge:
    r"""Exact leave-one-out errors that tell the truth about iterates.

    Leaving a row out of the solve is not enough once M is learnt: M has seen the targets of all rows, and remembers a
    row that is left out, the more so the longer it learns. So there is a second M for each of five folds, learnt in
    step with the first from the rows outside the fold, with the same bandwidth and ridge; a row is left out of the
    solve under the M that has not seen its fold. At the first iteration, M = I, these are the usual leave-one-out
    errors. With many rows the first folds are enough.

    Folds that are given are left out whole, of M and of the solve. Held-out rows are judged as they are. Where nothing
    is to be judged, bandwidth and ridge that are left open are still chosen by leaving out rows, under the one M.

    Args:
        problem: All rows.
        settings: What the machine is told.
        metric: The first M.
    """

    def __init__(self, problem: Problem, settings: Settings, metric: Tensor) -> None:
        self._settings = settings
        n = len(problem)
        self._metrics: list[Tensor] = []
        self._fresh = True
        if settings.judge and settings.update != "none" and problem.held_out is None:
            own = torch.arange(n, device=problem.x.device) % min(FOLDS, n)  # rows have no order
            self._folds = own if problem.folds is None else problem.folds
            rows = torch.bincount(self._folds).cumsum(0)
            self._metrics = [metric] * min(len(rows), int((rows < _ENOUGH).sum()) + 1)

    def choose(self, part: Problem, rows: Tensor | None, metric: Tensor) -> Choice:
        """Bandwidth and ridge of an iteration, judged.

        Args:
            part: The rows of this iteration.
            rows: Which of the problem's they are; None is all.
            metric: M of the machine itself.
        """
        settings = self._settings
        views = self._views(part, rows, metric)
        if part.held_out is None and not any(bool(view.rows.any()) for view in views):
            raise InputError(f"none of the {len(part)} rows of a subset can be judged: take a larger subset, or None")
        shift = None if settings.ridge is None else settings.ridge * part.total
        small = len(part) <= TUNING_ROWS
        if settings.bandwidth is not None and shift is not None and not (settings.judge and small):
            choice = Choice(settings.bandwidth, shift)
        else:
            few = part if small else part.part(torch.arange(TUNING_ROWS, device=part.x.device))
            u = transform(part.x, root_of(metric)) if self._metrics and not self._fresh else views[0].u
            choice = tune(
                few, settings.kernel, [view.first(len(few)) for view in views],
                _bandwidths(settings.kernel, u, settings.bandwidth), self._shifts(few), relative=shift is None,
            )  # fmt: skip
        if not settings.judge:
            return Choice(choice.bandwidth, choice.shift if shift is None else shift)
        if small:
            return choice
        tries = next((tried for most, tried in _TRIED if len(part) <= most), 1) if shift is None else 1
        start = Choice(choice.bandwidth, choice.shift if shift is None else shift)
        return walk(part, settings.kernel, views, start, _STEP, tries)

    def _shifts(self, few: Problem) -> Tensor:
        if self._settings.ridge is not None:
            return torch.tensor([self._settings.ridge * few.total], dtype=few.x.dtype)
        least = 10 * torch.finfo(few.x.dtype).eps * len(few)
        # In units of the mean weight, so that the unit of the weights does not matter.
        return (SHIFTS[least <= SHIFTS] * float(few.weights.mean())).to(few.x.dtype)

    def _folds_of(self, rows: Tensor | None) -> Tensor:
        return self._folds if rows is None else self._folds[rows.to(self._folds.device)]

    def _views(self, part: Problem, rows: Tensor | None, metric: Tensor) -> list[View]:
        every = torch.ones(len(part), dtype=torch.bool, device=part.x.device)
        if not self._metrics or self._fresh:
            root = root_of(metric)
            held = None if part.held_out is None else transform(part.held_out.x, root)
            judged = self._folds_of(rows) < len(self._metrics) if self._metrics else every
            return [View(transform(part.x, root), judged, held)]
        folds = self._folds_of(rows)
        seen_by = [(own, folds == fold) for fold, own in enumerate(self._metrics)]
        return [View(transform(part.x, root_of(own)), unseen) for own, unseen in seen_by if unseen.any()]

    def learn(self, windows: Sequence[tuple[Problem, Tensor | None]], choice: Choice) -> None:
        """Take the folds' own M one iteration on.

        Args:
            windows: The rows of this iteration, the judged ones first, and which of the problem's they are (None is
                all).
            choice: Bandwidth and ridge of this iteration.

        Time: for each fold and window ``n^3 / 6`` and a feature matrix.
        """
        judged = windows[0][0]
        for fold, metric in enumerate(self._metrics):
            learnt = []
            for part, rows in windows:
                inside = part.part((self._folds_of(rows) != fold).nonzero().squeeze(1))
                if not len(inside):
                    raise InputError(
                        f"the {len(part)} rows of a subset are all of one fold: take a larger subset, or None"
                    )
                shift = choice.shift / judged.total * part.total
                fit, slopes = fit_rows(inside, self._settings.kernel, metric, choice.bandwidth, shift)
                learnt.append(updated(inside, self._settings, metric, fit, slopes))
                del slopes  # and its matrix, before the next one is made
            new = averaged(learnt, self._settings, metric)
            self._metrics[fold] = metric if new is None else new
        self._fresh = False


def _bandwidths(kernel: Kernel, u: Tensor, given: float | None) -> list[float]:
    if given is not None:
        return [given]
    scale = kernel_scale(kernel, u)
    if kernel.name == "quadratic":  # homogeneous: a bandwidth is a factor of the kernel
        return [scale]
    return [multiple * scale for multiple in BANDWIDTHS]
