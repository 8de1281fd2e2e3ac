"""Algorithm 1 of the FACT paper: solve, learn M from the solution, solve again; the best iterate is kept."""

from __future__ import annotations

import math
import time
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

import torch
from sklearn.exceptions import ConvergenceWarning
from torch import Tensor

from featlearn.numerics import as_generator
from featlearn.rfm.gram import Gram, SingularKernelError
from featlearn.rfm.kernels import Kernel
from featlearn.rfm.nystrom import choose_centers, solve_nystrom
from featlearn.rfm.problem import Problem
from featlearn.rfm.selection import Solution, kernel_scale, predict_rows, tune
from featlearn.rfm.updates import agop, fact, next_metric, root_of, transform
from featlearn.spectra import effective_rank

__all__ = ["Iteration", "Machine", "Settings", "iterates", "learn", "solve_rows"]

BANDWIDTHS = (1.0, 2.0, 4.0, 8.0)
"""Multiples of the median distance that leave-one-out errors choose from."""
SHIFTS = 10.0 ** torch.arange(-6, 2.1, 0.5, dtype=torch.float64)
"""``n lambda`` that leave-one-out errors choose from, for a kernel with ones on its diagonal."""
TUNING_ROWS = 500
"""Rows that eigendecompositions see; more are solved by Cholesky factors."""
_TRIED = ((2000, 4), (6000, 3))
"""Ridges tried on all rows, by the number of rows; beyond, the one found on few rows is taken."""
_STEP = 10.0**0.5
_FOLDS = 5


@dataclass(frozen=True)
class Settings:
    """What a machine is told; see `featlearn.RFMRegressor` for the meaning."""

    kernel: Kernel
    update: str = "fact-geometric"
    power: float = 0.5
    rescale: str | None = "trace"
    bandwidth: float | None = None
    ridge: float | None = None
    n_iter: int = 5
    diagonal: bool = False
    subset: int | None = None
    judge: bool = True
    patience: int | None = 2
    centers: int | None = None
    center_sampling: str = "uniform"
    seed: int = 0


@dataclass(frozen=True)
class Iteration:
    """One line of the history.

    Attributes:
        iteration: 0 is plain kernel regression.
        error: Mean squared error that judges the iterate: of machines that have not seen the row, M included.
        loo_error: Mean squared error of leaving rows out of the solve alone.
        ridge: lambda.
        bandwidth: L.
        effective_rank: Of M: the exponential of its spectrum's entropy.
        condition: Estimated condition number of the solve.
        rows: Distinct rows of the solve.
        seconds: Since the iteration began.
    """

    iteration: int
    error: float
    loo_error: float
    ridge: float
    bandwidth: float
    effective_rank: float
    condition: float
    rows: int
    seconds: float


@dataclass(frozen=True, eq=False)
class Machine:
    """A fitted machine, ``f(x) = mean + k(M^{1/2} x, M^{1/2} centers) alpha``.

    Attributes:
        metric: M, ``(d, d)``, or its diagonal ``(d,)``.
        centers: Rows of the kernel part, ``(n, d)``.
        solution: Coefficients, bandwidth and error.
        mean: ``(c,)``.
        ridge: lambda.
        best: Number of the iterate.
        judged: Which rows of the problem the solution's residuals belong to; None stands for all.
        history: A line an iteration.
    """

    metric: Tensor
    centers: Tensor
    solution: Solution
    mean: Tensor
    ridge: float
    best: int
    judged: Tensor | None
    history: tuple[Iteration, ...]


def _bandwidths(kernel: Kernel, u: Tensor, given: float | None) -> list[float]:
    if given is not None:
        return [given]
    scale = kernel_scale(kernel, u)
    if kernel.name == "quadratic":  # homogeneous: a bandwidth is a factor of the kernel
        return [scale]
    return [multiple * scale for multiple in BANDWIDTHS]


def solve_rows(problem: Problem, settings: Settings, metric: Tensor, start: Solution | None = None) -> Solution:
    """Fit the rows with one M; bandwidth and ridge are chosen where the settings leave them open.

    Up to `TUNING_ROWS` rows, eigendecompositions choose and solve at once. With more, they choose on the first rows
    (rows have no order, see `featlearn.rfm.problem.distinct_rows`); then the ridge walks downhill on the errors of all
    rows, for a few steps.

    Args:
        problem: Rows and targets.
        settings: Kernel, and what is given.
        metric: M.
        start: A solution whose bandwidth and ridge are taken over, instead of a choice on few rows.
    """
    return _solve(problem, settings, metric, start)[0]


def _solve(
    problem: Problem, settings: Settings, metric: Tensor, start: Solution | None = None
) -> tuple[Solution, Callable[[], Tensor]]:
    """The solution, and a function that makes the slopes; it can be called once."""
    kernel = settings.kernel
    root = root_of(metric)
    u = transform(problem.x, root)
    held_u = None if problem.held_out is None else transform(problem.held_out.x, root)
    open_choice = settings.bandwidth is None or settings.ridge is None
    shift = None if settings.ridge is None else settings.ridge * problem.total
    if open_choice and start is None:
        few = problem if len(problem) <= TUNING_ROWS else problem.part(torch.arange(TUNING_ROWS, device=u.device))
        eps = torch.finfo(u.dtype).eps
        shifts = SHIFTS[10 * eps * len(few) <= SHIFTS].to(u.dtype)
        if settings.ridge is not None:
            shifts = torch.tensor([settings.ridge * few.total], dtype=u.dtype)
        candidates = _bandwidths(kernel, u, settings.bandwidth)
        start = tune(few, kernel, u[: len(few)], held_u, candidates, shifts, relative=settings.ridge is None)
        if few is problem:
            chosen = start.bandwidth
            return start, lambda: Gram(kernel, u, chosen).slopes()
    bandwidth = settings.bandwidth if settings.bandwidth is not None else _bandwidth_of(start)
    gram = Gram(kernel, u, bandwidth)

    def at(shift: float) -> Solution:
        gram.factor(shift / problem.weights)
        solved = gram.solve(problem.right_sides())
        solution = Solution(problem.coefficients(solved), bandwidth, shift, math.nan, None, gram.condition)
        if not settings.judge:
            return solution
        if problem.held_out is not None:
            assert held_u is not None
            residuals = problem.held_out.targets - predict_rows(kernel, held_u, u, solution, problem.mean)
        else:
            residuals = problem.residuals(gram.missed(solved, problem.folds))
        return replace(solution, error=problem.error(residuals), residuals=residuals)

    if shift is not None:
        return at(shift), gram.slopes
    assert start is not None
    best = at(start.shift)
    left = _ridges_tried(len(problem)) - 1 if settings.judge else 0
    for factor in (1.0 / _STEP, _STEP):
        first = best
        while left:
            left -= 1
            other = at(best.shift * factor)
            if not other.error < best.error:
                break
            best = other
        if best is not first:  # the error falls on one side only
            break
    return best, gram.slopes


def _ridges_tried(rows: int) -> int:
    return next((tried for most, tried in _TRIED if rows <= most), 1)


def _bandwidth_of(start: Solution | None) -> float:
    assert start is not None
    return start.bandwidth


def learn(
    problem: Problem,
    settings: Settings,
    advance: Callable[[Iteration], None] | None = None,
    refit: Problem | None = None,
) -> Machine:
    """Run the iterations and keep the best one.

    Bandwidth and ridge are judged by leaving single rows out of the solve. That does not do for the iterates: M has
    seen the targets of all rows, and a row left out is remembered by it, the more so the more often M was learnt. So
    iterates are judged by machines that have not seen a fold of the rows at all, M included (`_CrossFit`); these take
    bandwidth and ridge over, and cost one Cholesky factor each. Iterations stop when that error has not improved for
    ``patience`` of them, when M vanishes, or when a solve fails after the first.

    Args:
        problem: Rows and targets.
        settings: What the machine is told.
        advance: Called with each iteration's line.
        refit: Rows of the last solve, if not the problem's: those held out may come back for it.

    Time: for each iteration ``n^3 / 3`` (twice that with errors, and again for each ridge tried), the feature
    matrix, see `featlearn.rfm.updates`, and about as much again for the folds. Memory: one n x n matrix, or four
    while n <= 500.
    """
    x = problem.x
    metric = _first_metric(x, settings)
    crossed = _CrossFit(problem, settings, metric) if settings.judge and problem.held_out is None else None
    history: list[Iteration] = []
    best: tuple[float, int, Tensor, Solution, Tensor | None] | None = None
    for iteration in range(settings.n_iter + 1):
        began = time.perf_counter()
        last = settings.update == "none" or iteration == settings.n_iter
        # What nobody judges can be solved on all rows at once.
        few = settings.subset if settings.judge or not last or settings.centers is not None else None
        rows = _window(len(problem), few, iteration)
        part = problem if rows is None else problem.part(rows.to(x.device))
        try:
            solution, slopes = _solve(part, settings, metric)
            # M of one window rests on few rows; once it has taken shape, windows are averaged.
            blend = rows is not None and iteration >= 2
            new = None if last else _updated(part, settings, metric, solution, slopes, blend)
            del slopes  # and its n x n matrix, before the next one is made
            error = solution.error
            if crossed is not None and settings.update != "none":
                solution = replace(solution, residuals=crossed.residuals(part, rows, solution, last, blend))
                assert solution.residuals is not None
                error = part.error(solution.residuals)
        except SingularKernelError:
            if best is None:
                raise
            _warn_stopped(iteration, "the kernel matrix is singular")
            break
        if best is None or not settings.judge or error < best[0]:
            best = error, iteration, metric, solution, rows
        line = Iteration(
            iteration, error, solution.error, solution.shift / part.total, solution.bandwidth, _rank(metric),
            solution.condition, len(part), time.perf_counter() - began,
        )  # fmt: skip
        history.append(line)
        if advance is not None:
            advance(line)
        late = settings.judge and settings.patience is not None and iteration - best[1] >= settings.patience
        if new is None or late:
            break
        metric = new
    assert best is not None
    error, number, metric, solution, rows = best
    full = problem if refit is None else refit
    final, centers = solution, full.x
    if settings.centers is not None:
        final, centers = _fit_centers(full, settings, metric, solution)
    elif rows is not None or refit is not None:
        # Only a ridge that is still to be chosen needs errors of all rows.
        judge = settings.judge and refit is None and settings.ridge is None and _ridges_tried(len(full)) > 1
        final = solve_rows(full, replace(settings, judge=judge), metric, start=solution)
    final = replace(final, error=error, residuals=solution.residuals)
    return Machine(metric, centers, final, full.mean, final.shift / full.total, number, rows, tuple(history))


def iterates(problem: Problem, settings: Settings) -> Iterator[tuple[Tensor, Solution]]:
    """M and the solution of each iteration, one after the other, judged by nobody."""
    x = problem.x
    metric = _first_metric(x, settings)
    for _ in range(settings.n_iter + 1):
        solution, slopes = _solve(problem, settings, metric)
        yield metric, solution
        new = _updated(problem, settings, metric, solution, slopes)
        del slopes
        if new is None:
            return
        metric = new


def _first_metric(x: Tensor, settings: Settings) -> Tensor:
    d = x.shape[1]
    return x.new_ones(d) if settings.diagonal else torch.eye(d, dtype=x.dtype, device=x.device)


class _CrossFit:
    """Machines that have not seen a fold of the rows, M included, one for each fold.

    The folds are the problem's own, or every fifth row: rows have no order.
    """

    def __init__(self, problem: Problem, settings: Settings, metric: Tensor) -> None:
        self._settings = replace(settings, judge=False)
        count = min(_FOLDS, len(problem))
        own = torch.arange(len(problem), device=problem.x.device) % count
        self._folds = own if problem.folds is None else problem.folds
        self._metrics = [metric] * (int(self._folds.max()) + 1)

    def residuals(self, part: Problem, rows: Tensor | None, solution: Solution, last: bool, blend: bool) -> Tensor:
        """Errors of each row by the machine that has not seen it, with the bandwidth and ridge of this solution.

        Args:
            part: The rows of this iteration.
            rows: Which of the problem's they are; None is all.
            solution: Of the machine that has seen them all.
            last: Whether no further M is wanted.
            blend: Whether the next M is averaged with this one.
        """
        kernel = self._settings.kernel
        folds = self._folds if rows is None else self._folds[rows.to(self._folds.device)]
        residuals = torch.empty_like(part.targets)
        for fold, metric in enumerate(self._metrics):
            outside = folds == fold
            if not outside.any():
                continue
            inside = part.part((~outside).nonzero().squeeze(1))
            given = replace(self._settings, bandwidth=solution.bandwidth, ridge=solution.shift / inside.total)
            fitted, slopes = _solve(inside, given, metric)
            root = root_of(metric)
            there = transform(part.x[outside], root)
            predicted = predict_rows(kernel, there, transform(inside.x, root), fitted, inside.mean)
            residuals[outside] = part.targets[outside] - predicted
            if not last:
                new = _updated(inside, self._settings, metric, fitted, slopes, blend)
                self._metrics[fold] = metric if new is None else new
            del slopes
        return residuals


def _fit_centers(problem: Problem, settings: Settings, metric: Tensor, start: Solution) -> tuple[Solution, Tensor]:
    """The last solve with Nystrom centres, on all rows; errors are those of the rows that M was learnt on."""
    assert settings.centers is not None
    u = transform(problem.x, root_of(metric))
    ridge = settings.ridge if settings.ridge is not None else start.shift / problem.total
    chosen = choose_centers(
        settings.kernel, u, problem.weights, settings.centers, start.bandwidth, ridge, settings.center_sampling,
        as_generator(settings.seed, "centers"),
    )  # fmt: skip
    targets = problem.targets - problem.mean
    fitted = solve_nystrom(settings.kernel, u, targets, problem.weights, u[chosen], start.bandwidth, ridge)
    return replace(start, alpha=fitted.coefficients, shift=ridge * problem.total), problem.x[chosen]


def _updated(
    part: Problem,
    settings: Settings,
    metric: Tensor,
    solution: Solution,
    make_slopes: Callable[[], Tensor],
    blend: bool = False,
) -> Tensor | None:
    """The next M; None where there is none: a constant function has no features."""
    root = root_of(metric)
    u = transform(part.x, root)
    slopes = make_slopes()
    new = next_metric(
        settings.update,
        metric,
        settings.power,
        lambda: agop(settings.kernel, slopes, u, root, solution.alpha, part.weights),
        lambda: fact(settings.kernel, slopes, part.x, u, root, solution.alpha),
    )
    trace = float(new.sum() if new.ndim == 1 else new.trace())
    if not 0 < trace < math.inf:
        return None
    if settings.rescale == "trace":
        new = new * (len(new) / trace)
    elif settings.rescale == "max":
        new = new / new.max()
    return (metric + new) / 2 if blend else new


def _warn_stopped(iteration: int, why: str) -> None:
    warnings.warn(
        f"iteration {iteration} failed ({why}): the best iterate before it is kept", ConvergenceWarning, stacklevel=3
    )


def _rank(metric: Tensor) -> float:
    values = metric if metric.ndim == 1 else torch.linalg.eigvalsh(metric.double())
    return effective_rank(values.clamp_min(0))


def _window(n: int, subset: int | None, iteration: int) -> Tensor | None:
    """Rows that an iteration sees, None for all: windows of a circle, so that few iterations see most rows."""
    if subset is None or subset >= n:
        return None
    return (torch.arange(subset) + iteration * subset) % n
