"""Solve kernel ridge regression and update the feature matrix: one RFM iteration."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from featlearn.rfm._dense_solver import KernelSolver
from featlearn.rfm.feature_updates import agop, fact, next_metric, root_of, transform
from featlearn.rfm.kernels import Kernel
from featlearn.rfm.training_rows import TrainingRows


@dataclass(frozen=True)
class Settings:
    """Settings of an estimator; see `featlearn.RFMRegressor` for their meaning."""

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


@dataclass(frozen=True, eq=False)
class Coefficients:
    """Coefficients of the kernel part for one M.

    Attributes:
        alpha: Coefficients, ``(n, c)``.
        bandwidth: Bandwidth L of the kernel.
        shift: ``n lambda``: the solve is ``K + shift W^{-1}``.
        condition: Estimated condition number of the solve.
    """

    alpha: Tensor
    bandwidth: float
    shift: float
    condition: float


def first_metric(x: Tensor, kernel: Kernel, diagonal: bool) -> Tensor:
    """Return M = I, or its diagonal; a constant column, which a radial kernel ignores, gets 0 under one."""
    used = (x.amax(0) > x.amin(0)).to(x.dtype)
    if not kernel.radial or not used.any():
        used = torch.ones_like(used)
    return used if diagonal else torch.diag(used)


def fit_rows(
    problem: TrainingRows, kernel: Kernel, metric: Tensor, bandwidth: float, shift: float
) -> tuple[Coefficients, Callable[[], Tensor]]:
    """Solve ``(K + shift W^{-1}) alpha = Y - mean``.

    Returns:
        The coefficients, and a function that makes the slopes between all rows in the same n x n matrix; to be called
        once.

    Time: ``n^3 / 3``. Memory: one n x n matrix, as long as the function lives.
    """
    solver = KernelSolver(kernel, transform(problem.x, root_of(metric)), bandwidth)
    solver.factor(shift / problem.weights)
    alpha = solver.solve(problem.targets - problem.mean)
    return Coefficients(alpha, bandwidth, shift, solver.condition), solver.slopes


def predict_rows(problem: TrainingRows, kernel: Kernel, metric: Tensor, fit: Coefficients, x: Tensor) -> Tensor:
    """Predict other rows from the coefficients of the training rows, ``(m, c)``."""
    root = root_of(metric)
    return kernel.matrix(transform(x, root), transform(problem.x, root), fit.bandwidth) @ fit.alpha + problem.mean


def update_metric(
    problem: TrainingRows,
    settings: Settings,
    metric: Tensor,
    fit: Coefficients,
    make_slopes: Callable[[], Tensor],
) -> Tensor | None:
    """Compute the next M; None if it vanishes, as for a constant function.

    Args:
        problem: Rows that were fitted.
        settings: Update, power and scale.
        metric: M of the fit.
        fit: Coefficients of the fit.
        make_slopes: Second result of `fit_rows`.
    """
    root = root_of(metric)
    u = transform(problem.x, root)
    slopes = make_slopes()
    new = next_metric(
        settings.update,
        metric,
        settings.power,
        lambda: agop(settings.kernel, slopes, u, root, fit.alpha, problem.weights),
        lambda: fact(settings.kernel, slopes, problem.x, u, root, fit.alpha),
    )
    if not 0 < _trace(new) < math.inf:
        return None
    return rescaled(new, settings, metric)


def rescaled(new: Tensor, settings: Settings, metric: Tensor) -> Tensor:
    """Scale the next M by the settings; "trace" keeps the trace of the M before, which is that of I."""
    if settings.rescale == "trace":
        return new * (_trace(metric) / _trace(new))
    return new / new.max() if settings.rescale == "max" else new


def average_metrics(metrics: Sequence[Tensor | None], settings: Settings, metric: Tensor) -> Tensor | None:
    """Return the mean of the M of several windows of rows; None if all of them vanish.

    Each window's M is noisy, and an iteration multiplies: a direction that one M misses is hard to find again. The
    mean of two windows of half the rows is as good as the M of all rows, at a quarter of its cost.
    """
    learned = [new for new in metrics if new is not None]
    if not learned:
        return None
    return learned[0] if len(learned) == 1 else rescaled(torch.stack(learned).mean(0), settings, metric)


def _trace(metric: Tensor) -> float:
    return float(metric.sum() if metric.ndim == 1 else metric.trace())
