"""Tasks with inputs and targets, and the folder of data sets."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor
from torch.nn.functional import one_hot

from featlearn._utils.folders import cache_folder
from featlearn._utils.validation import check_int
from featlearn.errors import DataNotPresent, InputError

Target = Callable[[Tensor], Tensor]


def check_sizes(n: int, n_test: int) -> None:
    """Raise an InputError if there are fewer than 2 training points or less than 0 test points."""
    check_int("n", n, 2)
    check_int("n_test", n_test, 0)


def one_hot_labels(y: Tensor, classes: int, dtype: torch.dtype | None = None) -> Tensor:
    """Encode classes as regression targets: 1 in the column of the class, 0 elsewhere.

    Args:
        y: Classes, integers from 0 to ``classes - 1``, shape ``(n,)``.
        classes: Number of classes.
        dtype: Type of the result. None is torch's default.

    Returns:
        Targets, shape ``(n, classes)``.

    Raises:
        InputError: ``y`` is not a vector of integers in that range.

    Example:
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
    """Draw a ``(d, k)`` matrix with orthonormal columns in float64, uniform over all such matrices."""
    q, triangle = torch.linalg.qr(torch.randn(d, k, generator=generator, dtype=torch.float64))
    # Q of the QR decomposition is Haar-distributed only after multiplication by the signs of R's diagonal.
    columns: Tensor = q * triangle.diagonal().sign()
    return columns


@dataclass(frozen=True, eq=False)
class RegressionTask:
    """Regression task: points, labels and the target function.

    Attributes:
        X: Training inputs, shape ``(n, d)``.
        y: Training labels, shape ``(n, 1)``, or ``(n, c)`` for a target with c outputs.
        X_test: Test inputs, shape ``(n_test, d)``.
        y_test: Test labels without noise, shape ``(n_test, 1)`` or ``(n_test, c)``.
        target: Target function in the scale of the labels: ``target(X)`` is ``y`` up to noise.
        scale: Factor from the target of the paper to the labels.
        covariance: Covariance of the inputs, shape ``(d, d)``, in float64. None stands for the identity.
        noise: Standard deviation of the noise in the training labels.
    """

    X: Tensor
    y: Tensor
    X_test: Tensor
    y_test: Tensor
    target: Target
    scale: float
    covariance: Tensor | None = None
    noise: float = 0.0


@dataclass(frozen=True, eq=False)
class ClassificationTask:
    """Classification task: points and their classes.

    Attributes:
        X: Training inputs, shape ``(n, d)``.
        y: Training classes, integers from 0 to ``classes - 1``, shape ``(n,)``.
        X_test: Test inputs, shape ``(n_test, d)``.
        y_test: Test classes without noise, shape ``(n_test,)``.
        classes: Number of classes.
        noise: Probability that a training label is wrong.
    """

    X: Tensor
    y: Tensor
    X_test: Tensor
    y_test: Tensor
    classes: int
    noise: float = 0.0


def data_folder(name: str, folder: str | os.PathLike[str] | None = None) -> Path:
    """Return the folder of a data set, which need not exist.

    Args:
        name: Name of the folder of the data set, e.g. ``"uci121"``.
        folder: Folder of the data set. None is ``name`` in the folder of the environment variable FEATLEARN_DATA, or
            else in the folder ``featlearn`` of the user's cache.

    Returns:
        Path of the folder.

    Example:
        >>> from featlearn.datasets import data_folder
        >>> data_folder("uci121", "/data/uci").as_posix()
        '/data/uci'
        >>> data_folder("uci121").name
        'uci121'
    """
    if folder is not None:
        return Path(folder).expanduser()
    if data := os.environ.get("FEATLEARN_DATA"):
        return Path(data).expanduser() / name
    return cache_folder() / "featlearn" / name


def not_present(name: str, folder: Path, files: Sequence[str], hint: str = "") -> DataNotPresent:
    """Return the error for missing files of a data set.

    Args:
        name: Name of the folder of the data set.
        folder: Folder without the files.
        files: Missing files.
        hint: Another solution, for the end of the message.
    """
    *others, last = files
    what, them = (f"{', '.join(others)} or {last}", "them") if others else (last, "it")
    return DataNotPresent(
        f"there is no {what} in {str(folder)!r}: put {them} there, pass the folder that holds {them}, "
        f"or set FEATLEARN_DATA to the folder above {name}" + (f"; {hint}" if hint else "")
    )
