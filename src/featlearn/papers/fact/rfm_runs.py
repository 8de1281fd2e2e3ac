"""Iterations of recursive feature machines on synthetic tasks (FACT paper, algorithm 1).

References:
    Boix-Adsera, Mallinar, Simon & Belkin (2025), https://arxiv.org/abs/2507.05644
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from featlearn.errors import SingularKernelError
from featlearn.rfm.iteration import Coefficients, Settings, predict_rows
from featlearn.rfm.kernels import Kernel
from featlearn.rfm.recursion import iterates
from featlearn.rfm.training_rows import TrainingRows


@dataclass(frozen=True, eq=False)
class Watched:
    """Iteration of a recursive feature machine.

    Attributes:
        metric: Matrix M of the kernel: for "nfa" ``sqrt(AGOP)`` of the last iteration, for "fact-geometric"
            ``sqrt(FACT M^T)``, up to scale.
        train: Accuracy on training rows.
        test: Accuracy on test rows.
        fit: Coefficients of kernel ridge regression.
    """

    metric: Tensor
    train: float
    test: float
    fit: Coefficients


def rows_as_they_are(X: Tensor, targets: Tensor) -> TrainingRows:
    """Return training rows of weight one, without an intercept, as in algorithm 1 of the paper."""
    return TrainingRows(X, targets, torch.ones(len(X), dtype=X.dtype), intercept=False)


def watched(
    kernel: Kernel,
    update: str,
    train: tuple[Tensor, Tensor],
    test: tuple[Tensor, Tensor],
    *,
    bandwidth: float,
    shift: float,
    n_iter: int,
) -> Iterator[Watched]:
    """Run algorithm 1 with M rescaled to the trace of I, until a solve fails or M vanishes.

    Args:
        kernel: Kernel.
        update: Update of M: "nfa", "fact" or "fact-geometric".
        train: Training rows and targets (n, c): the class is 1 if a single target is above 1/2, or the largest of
            several.
        test: Test rows and targets.
        bandwidth: Bandwidth L of the kernel.
        shift: Number added to the diagonal of K, ``n lambda``.
        n_iter: Number of updates.

    Yields:
        One iteration before each update, and one after the last.
    """
    problem = rows_as_they_are(*train)
    settings = Settings(
        kernel, update, bandwidth=bandwidth, ridge=shift / problem.total, n_iter=n_iter, judge=False, rescale="trace"
    )
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            for metric, fit in iterates(problem, settings):
                outputs = [predict_rows(problem, kernel, metric, fit, X) for X, _ in (train, test)]
                right = [_classes(o) == _classes(y) for o, (_, y) in zip(outputs, (train, test), strict=True)]
                yield Watched(metric, float(right[0].double().mean()), float(right[1].double().mean()), fit)
        except SingularKernelError:
            return


def first_above(shares: Sequence[float], level: float = 0.99) -> int | None:
    """Return the first iteration whose share is above a level; None if there is none."""
    return next((i for i, share in enumerate(shares) if share > level), None)


def _classes(outputs: Tensor) -> Tensor:
    return (outputs[:, 0] > 0.5).long() if outputs.shape[1] == 1 else outputs.argmax(1)
