"""How well a kernel matches labels, and two kernels each other."""

from __future__ import annotations

from typing import Any, Literal

import torch
from torch import Tensor

from featlearn._utils.validation import check_option
from featlearn.errors import InputError
from featlearn.linalg.matrices import as_float64, cosine


def check_kernel(kernel: Any, what: str = "the kernel") -> Tensor:
    """A kernel on one set of points as float64: square, symmetric, finite and not zero."""
    k = as_float64(kernel)
    if k.ndim != 2 or k.shape[0] != k.shape[1] or k.shape[0] == 0:
        raise InputError(f"{what} must be square, (n, n), got shape {tuple(k.shape)}")
    if not torch.isfinite(k).all():
        raise InputError(f"{what} has NaN or infinite entries")
    size = float(k.abs().max())
    if size == 0:
        raise InputError(f"{what} is zero: nothing can be aligned with it")
    skew = float((k - k.mT).abs().max())
    if skew > 1e-4 * size:
        raise InputError(f"{what} must be symmetric: it differs from its transpose by up to {skew:.2g}")
    return k


def label_kernel(y: Any) -> Tensor:
    """``y y^T``, the kernel that knows the labels: (n,) or (n, c) labels, summed over columns.

    Integer labels are classes and become one-hot rows, so that entries are 1 within a class and 0 between.
    """
    rows, _ = _label_rows(y)
    return rows @ rows.mT


def labels_vary(y: Any) -> bool:
    """Whether `kernel_target_alignment` is defined for these labels: two classes, or a real label other than 0."""
    rows, classes = _label_rows(y, zero=True)
    return rows.shape[1] > 1 if classes else bool(rows.any())


def _label_rows(y: Any, zero: bool = False) -> tuple[Tensor, bool]:
    """Labels as rows (n, c) in float64, classes as one-hot rows, and whether they are classes."""
    labels = torch.as_tensor(y)
    classes = not labels.is_floating_point()
    if labels.ndim not in (1, 2) or labels.shape[0] == 0:
        raise InputError(f"labels must be (n,) or (n, c), got shape {tuple(labels.shape)}")
    if classes:
        if labels.ndim != 1:
            raise InputError(f"class labels must be (n,), got shape {tuple(labels.shape)}")
        labels = torch.nn.functional.one_hot(torch.unique(labels, return_inverse=True)[1])
    rows = labels.detach().to(torch.float64).reshape(labels.shape[0], -1)
    if not torch.isfinite(rows).all():
        raise InputError("labels have NaN or infinite entries")
    if not zero and not rows.any():
        raise InputError("labels are all zero: nothing can be aligned with them")
    return rows, classes


def kernel_target_alignment(kernel: Any, y: Any, *, center: bool | Literal["auto"] = "auto") -> float:
    """Return the kernel-target alignment, ``KTA = <K, y y^T> / (|K|_F |y y^T|_F)``.

    This is equation 15 of the spectral paper, where y is real; for one column ``|y y^T| = |y|^2``. Integer and boolean
    labels are classes and become one-hot rows, whose columns are centered: of two classes with as many samples each,
    the alignment is that of the labels +1 and -1. One-hot rows that are not centered are mostly their mean, so that
    any kernel with positive entries, such as that of an untrained network, looks aligned with them.

    Args:
        kernel: Kernel of shape (n, n).
        y: Labels as in `label_kernel`: classes of shape (n,), or real labels of shape (n,) or (n, c).
        center: Whether to subtract the column means of the labels. "auto" does so for classes and takes real labels as
            they are; False takes one-hot rows as they are, too.

    Raises:
        InputError: The kernel and y do not fit, or nothing is left of y after centering.

    >>> kernel_target_alignment([[1.0, -1.0], [-1.0, 1.0]], [1.0, -1.0])
    1.0
    >>> round(kernel_target_alignment([[1.0, -1.0], [-1.0, 1.0]], [0, 1]), 12)
    1.0
    """
    check_option("center", center, ("auto", True, False))
    k = check_kernel(kernel)
    rows, classes = _label_rows(y)
    if classes if center == "auto" else center:
        if not (rows != rows[0]).any():
            raise InputError(
                "y must have two classes or more, got one: nothing is left after centering. Pass center=False to align "
                "with a constant."
                if classes
                else "y must vary, got the same label in every row: nothing is left after centering. Pass center=False."
            )
        rows = rows - rows.mean(0)
    target = rows @ rows.mT
    _check_sizes(k, target)
    return cosine(k, target.to(k.device))


def centered_kernel(kernel: Any) -> Tensor:
    """``H K H`` with ``H = I - 11^T/n``: the kernel of features whose mean is removed."""
    k = check_kernel(kernel)
    rows = k - k.mean(0, keepdim=True)
    return rows - rows.mean(1, keepdim=True)


def centered_alignment(kernel: Any, other: Any) -> float:
    """Cosine of two kernels after centering both, ``<H K H, H L H> / (|H K H| |H L H|)``.

    Args:
        kernel: (n, n).
        other: Another (n, n) kernel; `label_kernel` makes one of labels.

    Raises:
        InputError: A kernel is constant, so that nothing is left of it (labels without variance).
    """
    first, second = check_kernel(kernel), check_kernel(other, "the other kernel")
    _check_sizes(first, second)
    centered = [centered_kernel(k) for k in (first, second)]
    for k, c in zip((first, second), centered, strict=True):
        if float(c.norm()) <= 1e-12 * float(k.norm()):
            raise InputError("nothing is left of a kernel after centering: its features, or the labels, are constant")
    return cosine(*centered)


def _check_sizes(first: Tensor, second: Tensor) -> None:
    if first.shape != second.shape:
        raise InputError(f"the kernel is of {first.shape[0]} points and what it is compared with of {second.shape[0]}")
