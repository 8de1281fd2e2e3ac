"""Recursive feature machine: solve, update the feature matrix, keep the best iteration.

References:
    Boix-Adsera, Mallinar, Simon & Belkin (2025), https://arxiv.org/abs/2507.05644, algorithm 1 (FACT paper).
"""

from __future__ import annotations

import math
import time
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

import torch
from sklearn.exceptions import ConvergenceWarning
from torch import Tensor

from featlearn._utils.rng import as_generator
from featlearn.errors import SingularKernelError
from featlearn.linalg.ranks import effective_rank
from featlearn.rfm._hyperparameter_search import Hyperparameters
from featlearn.rfm._hyperparameters import LeaveOneOutValidator
from featlearn.rfm._nystrom_solver import choose_centers, solve_nystrom
from featlearn.rfm._row_span import lift_metric, reduce_rows, span_of_rows
from featlearn.rfm.feature_updates import Metric, transform
from featlearn.rfm.iteration import Coefficients, Settings, first_metric, fit_rows, learn_metric, update_metric
from featlearn.rfm.training_rows import TrainingRows

WINDOWS = 2
"""Number of windows of rows over which an iteration averages M, if it does not use all rows."""


@dataclass(frozen=True)
class Iteration:
    """Record of one iteration.

    Attributes:
        iteration: Number of the iteration; 0 is plain kernel regression.
        error: Mean squared error of rows left out, under an M that was learned without them, or of held-out rows; in
            the user's units, summed over outputs.
        ridge: Ridge lambda of the solve.
        bandwidth: Bandwidth L of the kernel.
        effective_rank: Effective rank of M: the exponential of the entropy of its spectrum.
        condition: Estimated condition number of the solve.
        rows: Number of distinct rows of the solve.
        seconds: Duration of the iteration in seconds.
        standardized_error: Error with each output in units of its standard deviation. The iteration with the least
            one is kept. NaN in files of earlier versions.
    """

    iteration: int
    error: float
    ridge: float
    bandwidth: float
    effective_rank: float
    condition: float
    rows: int
    seconds: float
    standardized_error: float = math.nan


@dataclass(frozen=True, eq=False)
class HeldOutResiduals:
    """Residuals of rows left out of the fit, or of held-out rows.

    Attributes:
        targets: Targets, shape ``(m, c)``.
        residuals: Targets minus predictions, shape ``(m, c)``.
        weights: Weight of each row, shape ``(m,)``.
    """

    targets: Tensor
    residuals: Tensor
    weights: Tensor


@dataclass(frozen=True, eq=False)
class FittedRFM:
    """Fitted model, ``f(x) = mean + k(M^{1/2} x, M^{1/2} centers) alpha``.

    Attributes:
        metric: Feature matrix M, shape ``(d, d)``, or its diagonal, shape ``(d,)``.
        centers: Rows of the kernel expansion, shape ``(n, d)``.
        fit: Coefficients and bandwidth.
        mean: Constant term, shape ``(c,)``.
        ridge: Ridge lambda of the last solve.
        best: Number of the iteration that was kept.
        error: Validation error of that iteration, in the user's units.
        unseen: Residuals of the validated rows; None without validation.
        history: Records of all iterations.
    """

    metric: Tensor
    centers: Tensor
    fit: Coefficients
    mean: Tensor
    ridge: float
    best: int
    error: float
    unseen: HeldOutResiduals | None
    history: tuple[Iteration, ...]


def learn(
    problem: TrainingRows,
    settings: Settings,
    advance: Callable[[Iteration], None] | None = None,
    refit: TrainingRows | None = None,
    interruptible: bool = False,
) -> FittedRFM:
    """Run the iterations and keep the best one.

    The best iteration has the least error of `featlearn.rfm._hyperparameters.LeaveOneOutValidator`. Iterations stop
    when that error has not improved for ``patience`` of them, when M vanishes, when the time limit is near, or when a
    solve fails after the first.

    Args:
        problem: Rows and targets.
        settings: Settings of the estimator.
        advance: Function that is called with the record of each iteration. None calls nothing.
        refit: Rows of the last solve, such as training and held-out rows together. None uses the rows of ``problem``.
        interruptible: Whether Ctrl-C after the first solve ends the fit with the best iteration and a warning. False
            raises KeyboardInterrupt.

    Returns:
        The fitted model.

    Raises:
        SingularKernelError: The first solve fails.

    Time: for each iteration ``n^3 / 3`` and the feature matrix, see `featlearn.rfm.feature_updates`. Validation costs
    as much as 20 such solves for 1,000 rows (five M, four ridges), and as 3 for 5,000 rows (one M, three ridges). If
    there are more features than rows, the iterations run in the span of the rows, see `featlearn.rfm._row_span`.
    Memory: one n x n matrix; during validation one per validated M, five up to 1,000 rows.
    """
    whole, basis = problem, span_of_rows(problem, settings)
    if basis is None:
        metric = first_metric(problem.x, settings.kernel, settings.diagonal)
    else:
        problem, metric = reduce_rows(problem, settings, basis)
    validator = LeaveOneOutValidator(problem, settings, metric)
    history: list[Iteration] = []
    started = time.perf_counter()
    best: tuple[Hyperparameters, int, Metric, Coefficients, TrainingRows] | None = None
    for iteration in range(settings.n_iter + 1):
        began = time.perf_counter()
        if history and settings.time_limit is not None and began - started + history[-1].seconds > settings.time_limit:
            break
        last = settings.update == "none" or iteration == settings.n_iter
        # Without validation the last solve can use all rows at once.
        window = settings.subset if settings.judge or not last or settings.centers is not None else None
        windows = _windows(problem, window, iteration)
        part, rows = windows[0]  # the window that is validated
        try:
            choice = validator.select(part, rows, metric)
            fit, slopes = fit_rows(part, settings.kernel, metric, choice.bandwidth, choice.shift)
            if best is None or not settings.judge or choice.error < best[0].error:
                best = choice, iteration, metric, fit, part
            late = settings.judge and settings.patience is not None and iteration - best[1] >= settings.patience
            new = None if last or late else update_metric(part, settings, metric, fit, slopes)
            del slopes  # frees its n x n matrix before the next one is allocated
            if new is not None:
                others = [(other, choice.shift / part.total * other.total) for other, _ in windows[1:]]
                new = learn_metric(others, settings, metric, choice.bandwidth, new)
        except SingularKernelError:
            if best is None:
                raise
            _warn_singular(iteration)
            break
        except KeyboardInterrupt:
            if best is None or not interruptible:
                raise
            _warn_interrupted(iteration)
            if best[1] != iteration:
                break
            new = None  # the iteration that is kept has a line in the history
        try:
            if new is not None:
                validator.update(windows, choice)
        except KeyboardInterrupt:
            if not interruptible:
                raise
            _warn_interrupted(iteration)
            new = None
        except SingularKernelError:  # in a fold: the next iteration could not be validated
            _warn_singular(iteration + 1)
            new = None
        rank = effective_rank(metric.eigenvalues)
        line = Iteration(
            iteration, _user_error(part, choice), choice.shift / part.total, choice.bandwidth, rank, fit.condition,
            len(part), time.perf_counter() - began, choice.error,
        )  # fmt: skip
        history.append(line)
        if advance is not None:
            advance(line)
        if new is None:
            break
        metric = new
    assert best is not None
    choice, number, metric, fit, part = best
    full = problem if refit is None else refit
    rows = None
    shift = choice.shift if settings.ridge is None else settings.ridge * full.total
    if settings.centers is not None:
        fit, rows = _fit_centers(full, settings, metric, replace(fit, shift=shift))
    elif part is not full:
        fit, _ = fit_rows(full, settings.kernel, metric, choice.bandwidth, shift)
    matrix, x = metric.matrix, full.x
    if basis is not None:
        x = whole.x
        first = number == 0  # M = I leaves the span
        matrix = first_metric(x, settings.kernel, False).matrix if first else lift_metric(metric, basis)
    centers = x if rows is None else x[rows]
    ridge, error, unseen = fit.shift / full.total, _user_error(part, choice), _unseen(part, choice)
    return FittedRFM(matrix, centers, fit, full.mean, ridge, number, error, unseen, tuple(history))


def iterates(problem: TrainingRows, settings: Settings) -> Iterator[tuple[Tensor, Coefficients]]:
    """Yield M and the coefficients of each iteration, without validation.

    Args:
        problem: Rows and targets.
        settings: Settings of the estimator; bandwidth and ridge must be given.

    Yields:
        M and the coefficients fitted with it.
    """
    assert settings.bandwidth is not None and settings.ridge is not None
    metric = first_metric(problem.x, settings.kernel, settings.diagonal)
    for iteration in range(settings.n_iter + 1):
        shift = settings.ridge * problem.total
        fit, slopes = fit_rows(problem, settings.kernel, metric, settings.bandwidth, shift)
        yield metric.matrix, fit
        new = None if iteration == settings.n_iter else update_metric(problem, settings, metric, fit, slopes)
        del slopes
        if new is None:
            return
        metric = new


def _fit_centers(
    problem: TrainingRows, settings: Settings, metric: Metric, start: Coefficients
) -> tuple[Coefficients, Tensor]:
    """Solve with Nystrom centers on all rows; return the coefficients and the row numbers of the centers."""
    assert settings.centers is not None
    u = transform(problem.x, metric.root)
    ridge = start.shift / problem.total
    chosen = choose_centers(
        settings.kernel, u, problem.weights, settings.centers, start.bandwidth, ridge, settings.center_sampling,
        as_generator(settings.seed, "centers"),
    )  # fmt: skip
    targets = problem.targets - problem.mean
    solved = solve_nystrom(settings.kernel, u, targets, problem.weights, u[chosen], start.bandwidth, ridge)
    return replace(start, alpha=solved.coefficients, condition=math.nan), chosen


def _warn_singular(iteration: int) -> None:
    message = f"iteration {iteration} failed (singular kernel matrix): the best earlier iteration is kept"
    warnings.warn(message, ConvergenceWarning, stacklevel=3)


def _warn_interrupted(iteration: int) -> None:
    message = f"interrupted in iteration {iteration}: the best iteration is kept"
    warnings.warn(message, ConvergenceWarning, stacklevel=3)


def _unseen(part: TrainingRows, choice: Hyperparameters) -> HeldOutResiduals | None:
    if choice.residuals is None:
        return None
    if part.held_out is not None:
        return HeldOutResiduals(part.held_out.targets, choice.residuals, part.held_out.weights)
    rows = choice.judged
    return HeldOutResiduals(part.targets[rows], choice.residuals[rows], part.weights[rows])


def _user_error(part: TrainingRows, choice: Hyperparameters) -> float:
    """Return the error of the hyperparameters in the user's units; NaN without validation."""
    if part.scales is None or choice.residuals is None:
        return choice.error
    return part.error(choice.residuals, choice.judged, part.scales)


def _windows(problem: TrainingRows, size: int | None, iteration: int) -> list[tuple[TrainingRows, Tensor | None]]:
    """Return the windows of an iteration with their row numbers, None for all; successive windows cover all rows."""
    n = len(problem)
    if size is None or size >= n:
        return [(problem, None)]
    windows = [(torch.arange(size) + (WINDOWS * iteration + k) * size) % n for k in range(WINDOWS)]
    return [(problem.subset(rows.to(problem.x.device)), rows) for rows in windows]
