"""Recursive feature machines on synthetic tasks, watched iteration by iteration."""

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
    """One iteration.

    Attributes:
        metric: M of its solve: for "nfa" the last iteration's ``sqrt(AGOP)``, for "fact-geometric" its
            ``sqrt(FACT M^T)``, up to scale.
        train: Share of training rows whose class is right.
        test: Share of test rows.
        fit: The solve.
    """

    metric: Tensor
    train: float
    test: float
    fit: Coefficients


def rows_as_they_are(X: Tensor, targets: Tensor) -> TrainingRows:
    """Rows of weight one, without an intercept, as algorithm 1 of the paper has them."""
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
    """Algorithm 1 with M rescaled to the trace of I; ends early where a solve fails or M vanishes.

    Args:
        kernel: The kernel.
        update: "nfa", "fact" or "fact-geometric".
        train: Rows, and targets (n, c): the class is 1 if the only target is above 1/2, or the largest of several.
        test: The same for rows to judge by.
        bandwidth: L.
        shift: Added to the diagonal of K, ``n lambda``.
        n_iter: Updates.
    """
    problem = rows_as_they_are(*train)
    settings = Settings(
        kernel, update, bandwidth=bandwidth, ridge=shift / problem.total, n_iter=n_iter, judge=False, rescale="trace"
    )
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            for metric, fit in iterates(problem, settings):
                shares = [
                    float((_classes(predict_rows(problem, kernel, metric, fit, X)) == _classes(y)).double().mean())
                    for X, y in (train, test)
                ]
                yield Watched(metric, shares[0], shares[1], fit)
        except SingularKernelError:
            return


def first_above(shares: Sequence[float], level: float = 0.99) -> int | None:
    """Return the first iteration whose share is above a level; None if there is none."""
    return next((i for i, share in enumerate(shares) if share > level), None)


def _classes(outputs: Tensor) -> Tensor:
    return (outputs[:, 0] > 0.5).long() if outputs.shape[1] == 1 else outputs.argmax(1)
