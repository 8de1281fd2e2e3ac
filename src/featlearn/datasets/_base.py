"""What tasks have in common."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import one_hot

from featlearn.errors import InputError


def check_sizes(n: int, n_test: int) -> None:
    """Refuse numbers of points that make no task."""
    if n < 2 or n_test < 0:
        raise InputError(f"a task needs n >= 2 training points and n_test >= 0, got n={n}, n_test={n_test}")


def one_hot_labels(y: Tensor, classes: int, dtype: torch.dtype | None = None) -> Tensor:
    """Classes as targets of a regression: 1 in the column of the class, 0 elsewhere.

    Args:
        y: ``(n,)`` integers from 0 to ``classes - 1``.
        classes: Number of columns.
        dtype: Of the result; torch's default if None.

    Returns:
        ``(n, classes)``.

    >>> one_hot_labels(torch.tensor([2, 0]), 3)
    tensor([[0., 0., 1.],
            [1., 0., 0.]])
    """
    if y.ndim != 1 or y.is_floating_point() or y.is_complex():
        raise InputError(f"y must be a vector of integers, got shape {tuple(y.shape)} of {y.dtype}")
    if len(y) and not (y.min() >= 0 and y.max() < classes):
        raise InputError(f"y must be from 0 to {classes - 1}, got {int(y.min())} to {int(y.max())}")
    return one_hot(y.long(), classes).to(torch.get_default_dtype() if dtype is None else dtype)


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
        y: Training labels, ``(n, 1)``, or ``(n, c)`` of a target with c outputs.
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
