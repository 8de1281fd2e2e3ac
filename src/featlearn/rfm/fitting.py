"""One solve and one update: the two halves of an iteration."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from featlearn.rfm.gram import Gram
from featlearn.rfm.kernels import Kernel
from featlearn.rfm.problem import Problem
from featlearn.rfm.updates import agop, fact, next_metric, root_of, transform

__all__ = ["Fit", "Settings", "first_metric", "fit_rows", "predict_rows", "updated"]


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
    blend: bool = False,
) -> Tensor | None:
    """The next M; None where there is none: a constant function has no features.

    Args:
        problem: The rows that were fitted.
        settings: Update, power and scale.
        metric: M of the fit.
        fit: The fit.
        make_slopes: As `fit_rows` gave it.
        blend: Whether to average the next M with this one.
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
    trace = float(new.sum() if new.ndim == 1 else new.trace())
    if not 0 < trace < math.inf:
        return None
    if settings.rescale == "trace":  # that of I
        new = new * (float(metric.sum() if metric.ndim == 1 else metric.trace()) / trace)
    elif settings.rescale == "max":
        new = new / new.max()
    return (metric + new) / 2 if blend else new
