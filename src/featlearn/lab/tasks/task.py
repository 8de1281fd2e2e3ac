"""What tasks have in common."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from featlearn.errors import InputError

__all__ = ["ClassificationTask", "RegressionTask", "check_sizes", "orthonormal_columns"]


def check_sizes(n: int, n_test: int) -> None:
    """Refuse numbers of points that make no task."""
    if n < 2 or n_test < 0:
        raise InputError(f"a task needs n >= 2 training points and n_test >= 0, got n={n}, n_test={n_test}")


def orthonormal_columns(d: int, k: int, generator: torch.Generator) -> Tensor:
    """``(d, k)`` with orthonormal columns, uniform over all such matrices, in float64."""
    q, triangle = torch.linalg.qr(torch.randn(d, k, generator=generator, dtype=torch.float64))
    # QR alone is not Haar: the signs of the triangle's diagonal belong to the basis.
    columns: Tensor = q * triangle.diagonal().sign()
    return columns


@dataclass(frozen=True, eq=False)
class RegressionTask:
    """Points, labels and the function behind them.

    Attributes:
        X: Training inputs, ``(n, d)``.
        y: Training labels, ``(n, 1)``.
        X_test: Test inputs, ``(n_test, d)``.
        y_test: Test labels, ``(n_test, 1)``, without noise.
        target: The function that labels obey, with their scale: ``target(X)`` is ``y``, up to noise.
        scale: Factor between the target as the paper writes it and the labels.
        covariance: Of the inputs, in float64; None stands for the identity.
        noise: Standard deviation of the noise in the training labels.
    """

    X: Tensor
    y: Tensor
    X_test: Tensor
    y_test: Tensor
    target: Callable[[Tensor], Tensor]
    scale: float
    covariance: Tensor | None = None
    noise: float = 0.0


@dataclass(frozen=True, eq=False)
class ClassificationTask:
    """Points and their classes.

    Attributes:
        X: Training inputs, ``(n, d)``.
        y: Training classes, ``(n,)`` integers from 0 to ``classes - 1``.
        X_test: Test inputs, ``(n_test, d)``.
        y_test: Test classes, ``(n_test,)``, without noise.
        classes: Number of classes.
        noise: Chance that a training label is wrong.
    """

    X: Tensor
    y: Tensor
    X_test: Tensor
    y_test: Tensor
    classes: int
    noise: float = 0.0
