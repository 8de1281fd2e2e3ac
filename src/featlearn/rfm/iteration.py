"""Solve kernel ridge regression and update the feature matrix: one RFM iteration."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass

import torch
from torch import Tensor

from featlearn.rfm._dense_solver import KernelSolver
from featlearn.rfm.feature_updates import Metric, agop, as_metric, decompose_update, fact, transform
from featlearn.rfm.kernels import Kernel
from featlearn.rfm.training_rows import TrainingRows


@dataclass(frozen=True)
class Settings:
    """Validated settings of an estimator, named as the parameters of `featlearn.RFMRegressor`.

    Attributes:
        kernel: Kernel with its exponent, norm, degree and offset.
        update: Update rule of M: "fact", "fact-geometric", "nfa" or "none".
        power: Power of the AGOP of update "nfa".
        rescale: Scale of M: "trace", "max" or None.
        bandwidth: Bandwidth L. None selects it in each iteration.
        ridge: Ridge lambda. None selects it in each iteration.
        n_iter: Maximum number of updates of M.
        diagonal: Whether M is diagonal.
        subset: Number of rows per window. None uses all rows.
        judge: Whether iterations are validated.
        patience: Iterations without a lower error before the fit stops. None never stops early.
        centers: Number of Nystrom centers of the last solve. None solves with all rows.
        center_sampling: Sampling of the centers: "uniform" or "leverage".
        seed: Seed of the centers.
        time_limit: Seconds after which no iteration is started. None does not limit the time.
    """

    kernel: Kernel
    update: str = "fact"
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
    time_limit: float | None = None


@dataclass(frozen=True, eq=False)
class Coefficients:
    """Coefficients of the kernel expansion for one M.

    Attributes:
        alpha: Coefficients, shape ``(n, c)``.
        bandwidth: Bandwidth L of the kernel.
        shift: ``n lambda`` of the solve with ``K + shift W^{-1}``.
        condition: Estimated condition number of the solve; NaN if it was not estimated.
    """

    alpha: Tensor
    bandwidth: float
    shift: float
    condition: float


def first_metric(x: Tensor, kernel: Kernel, diagonal: bool) -> Metric:
    """Return M = I, or its diagonal; constant columns get 0 under a radial kernel, which ignores them."""
    used = (x.amax(0) > x.amin(0)).to(x.dtype)
    if not kernel.radial or not used.any():
        used = torch.ones_like(used)
    identity = used if diagonal else torch.diag(used)
    return Metric(identity, identity, used.double(), float(used.sum()))


def fit_rows(
    problem: TrainingRows,
    kernel: Kernel,
    metric: Metric | Tensor,
    bandwidth: float,
    shift: float,
    with_condition: bool = True,
) -> tuple[Coefficients, Callable[[], Tensor]]:
    """Solve ``(K + shift W^{-1}) alpha = Y - mean``.

    Args:
        problem: Rows and targets.
        kernel: Kernel of the model.
        metric: M, shape ``(d, d)``, or its diagonal, shape ``(d,)``.
        bandwidth: Bandwidth L of the kernel.
        shift: ``n lambda``, positive.
        with_condition: Whether to estimate the condition number of the solve.

    Returns:
        The coefficients, and a function that computes the slopes between all rows in the same n x n matrix. Call the
        function at most once.

    Time: ``n^3 / 3``. Memory: one n x n matrix until the function is deleted.
    """
    solver = KernelSolver(kernel, transform(problem.x, as_metric(metric).root), bandwidth)
    solver.factor(shift / problem.weights)
    alpha = solver.solve(problem.targets - problem.mean)
    condition = solver.condition if with_condition else math.nan
    return Coefficients(alpha, bandwidth, shift, condition), solver.slopes


def predict_rows(
    problem: TrainingRows, kernel: Kernel, metric: Metric | Tensor, fit: Coefficients, x: Tensor
) -> Tensor:
    """Predict the outputs of other rows.

    Args:
        problem: Training rows and targets.
        kernel: Kernel of the model.
        metric: M, shape ``(d, d)``, or its diagonal, shape ``(d,)``.
        fit: Coefficients of the training rows.
        x: Rows to predict, shape ``(m, d)``, centered as the training rows.

    Returns:
        Outputs, shape ``(m, c)``.
    """
    root = as_metric(metric).root
    return kernel.matrix(transform(x, root), transform(problem.x, root), fit.bandwidth) @ fit.alpha + problem.mean


def update_metric(
    problem: TrainingRows,
    settings: Settings,
    metric: Metric | Tensor,
    fit: Coefficients,
    make_slopes: Callable[[], Tensor],
) -> Metric | None:
    """Compute the next M; None if it vanishes, as for a constant function.

    Args:
        problem: Rows that were fitted.
        settings: Update rule, power and scale.
        metric: M of the fit.
        fit: Coefficients of the fit.
        make_slopes: Second result of `fit_rows`.
    """
    metric = as_metric(metric)
    u = transform(problem.x, metric.root)
    if settings.update == "nfa":
        matrix = agop(settings.kernel, make_slopes(), u, metric.root, fit.alpha, problem.weights)
    else:
        matrix = fact(settings.kernel, make_slopes(), problem.x, u, metric.root, fit.alpha)
    new = decompose_update(settings.update, metric, settings.power, matrix)
    return _rescaled(new, settings, metric) if 0 < new.trace < math.inf else None


def _rescaled(new: Metric, settings: Settings, metric: Metric) -> Metric:
    if settings.rescale == "trace":
        return new.scaled(metric.trace / new.trace)
    return new.scaled(1.0 / float(new.matrix.max())) if settings.rescale == "max" else new


def learn_metric(
    windows: Iterable[tuple[TrainingRows, float]],
    settings: Settings,
    metric: Metric,
    bandwidth: float,
    *learned: Metric,
) -> Metric | None:
    """Return the mean of the next M over several windows of rows; None if all of them vanish.

    The M of a single window is noisy, and a direction that is lost in one iteration hardly returns in later ones. The
    mean of two windows of half the rows is as good as the M of all rows, at a quarter of the cost.

    Args:
        windows: Rows to fit, with the ``n lambda`` of each fit.
        settings: Kernel, update rule, power and scale.
        metric: M of the fits.
        bandwidth: Bandwidth L of the kernel.
        learned: Next M of further windows, to be included in the mean.
    """
    metrics = list(learned)
    for rows, shift in windows:
        fit, slopes = fit_rows(rows, settings.kernel, metric, bandwidth, shift, with_condition=False)
        new = update_metric(rows, settings, metric, fit, slopes)
        del slopes  # frees its n x n matrix before the next one is allocated
        metrics += [] if new is None else [new]
    if len(metrics) < 2:
        return metrics[0] if metrics else None
    return _rescaled(as_metric(torch.stack([new.matrix for new in metrics]).mean(0)), settings, metric)
