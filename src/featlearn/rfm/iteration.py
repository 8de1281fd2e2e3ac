"""Solve kernel ridge regression and update the feature matrix: one RFM iteration."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from featlearn.rfm.feature_updates import agop, fact, next_metric, root_of, transform
from featlearn.rfm.kernel_solver import Gram
from featlearn.rfm.kernels import Kernel
from featlearn.rfm.training_rows import Problem

__all__ = ["Fit", "Settings", "averaged", "first_metric", "fit_rows", "predict_rows", "rescaled", "updated"]


@dataclass(frozen=True)
class Settings:
    """What a machine is told; see `featlearn.RFMRegressor` for the meaning."""

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
class Fit:
    """Coefficients of a machine for one M.

    Attributes:
        alpha: ``(n, c)``.
        bandwidth: L.
        shift: ``n lambda``: the solve is ``K + shift W^{-1}``.
        condition: Estimated condition number of the solve.
    """

    alpha: Tensor
    bandwidth: float
    shift: float
    condition: float


def first_metric(x: Tensor, kernel: Kernel, diagonal: bool) -> Tensor:
    """M = I, or its diagonal; a column that is constant says nothing to a radial kernel, and has no part in it."""
    told = (x.amax(0) > x.amin(0)).to(x.dtype)
    if not kernel.radial or not told.any():
        told = torch.ones_like(told)
    return told if diagonal else torch.diag(told)


def fit_rows(
    problem: Problem, kernel: Kernel, metric: Tensor, bandwidth: float, shift: float
) -> tuple[Fit, Callable[[], Tensor]]:
    """Solve ``(K + shift W^{-1}) alpha = Y - mean``.

    Returns:
        The fit, and a function that makes the slopes between all rows, in the same n x n matrix; to be called once.

    Time: ``n^3 / 3``. Memory: one n x n matrix, as long as the function lives.
    """
    gram = Gram(kernel, transform(problem.x, root_of(metric)), bandwidth)
    gram.factor(shift / problem.weights)
    alpha = gram.solve(problem.targets - problem.mean)
    return Fit(alpha, bandwidth, shift, gram.condition), gram.slopes


def predict_rows(problem: Problem, kernel: Kernel, metric: Tensor, fit: Fit, x: Tensor) -> Tensor:
    """What the machine fitted to the problem says of other rows, ``(m, c)``."""
    root = root_of(metric)
    return kernel.matrix(transform(x, root), transform(problem.x, root), fit.bandwidth) @ fit.alpha + problem.mean


def updated(
    problem: Problem,
    settings: Settings,
    metric: Tensor,
    fit: Fit,
    make_slopes: Callable[[], Tensor],
) -> Tensor | None:
    """The next M; None where there is none: a constant function has no features.

    Args:
        problem: The rows that were fitted.
        settings: Update, power and scale.
        metric: M of the fit.
        fit: The fit.
        make_slopes: As `fit_rows` gave it.
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
    """The next M, scaled as the settings want it; its trace is that of the one before, which is that of I."""
    if settings.rescale == "trace":
        return new * (_trace(metric) / _trace(new))
    return new / new.max() if settings.rescale == "max" else new


def averaged(metrics: Sequence[Tensor | None], settings: Settings, metric: Tensor) -> Tensor | None:
    """The mean of what several windows of rows have learned; None if none of them has learned anything.

    Each window's M is noisy, and an iteration multiplies: a direction that one M misses is hard to find again. The
    mean of two windows of half the rows is as good as the M of all rows, at a quarter of its cost.
    """
    learned = [new for new in metrics if new is not None]
    if not learned:
        return None
    return learned[0] if len(learned) == 1 else rescaled(torch.stack(learned).mean(0), settings, metric)


def _trace(metric: Tensor) -> float:
    return float(metric.sum() if metric.ndim == 1 else metric.trace())
