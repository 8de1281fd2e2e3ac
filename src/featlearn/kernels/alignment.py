"""Alignment of a kernel with labels, and of two kernels.

References:
    Wang, Engel, Sarwate, Dumitriu & Chiang (2022), https://arxiv.org/abs/2211.06506, eq. 15.
"""

from __future__ import annotations

from typing import Any, Literal

import torch
from torch import Tensor

from featlearn._utils.validation import check_option
from featlearn.errors import InputError
from featlearn.linalg.matrices import as_float64, cosine


def check_kernel(kernel: Any, what: str = "the kernel") -> Tensor:
    """Return a kernel as a float64 tensor, or raise unless it is square, symmetric, finite and not zero.

    Args:
        kernel: Kernel of shape (n, n).
        what: Name of the kernel in messages.
    """
    k = as_float64(kernel)
    if k.ndim != 2 or k.shape[0] != k.shape[1] or k.shape[0] == 0:
        raise InputError(f"{what} must be square, (n, n), got shape {tuple(k.shape)}.")
    if not torch.isfinite(k).all():
        raise InputError(f"{what} must be finite, got NaN or infinite entries.")
    size = float(k.abs().max())
    if size == 0:
        raise InputError(f"{what} must not be zero: its alignment is not defined.")
    skew = float((k - k.mT).abs().max())
    if skew > 1e-4 * size:
        raise InputError(f"{what} must be symmetric, got a difference of {skew:.2g} from its transpose.")
    return k


def label_kernel(y: Any) -> Tensor:
    """Return the kernel ``y y^T`` of labels.

    Args:
        y: Labels of shape (n,) or (n, c); the kernel is summed over columns. Integer labels are classes and become
            one-hot rows: the kernel is 1 within a class and 0 between classes.

    Returns:
        Kernel of shape (n, n) in float64.

    Raises:
        InputError: The labels have another shape, are not finite, or are all zero.

    Example:
        >>> import featlearn as fl
        >>> fl.label_kernel([0, 1, 1]).tolist()  # classes
        [[1.0, 0.0, 0.0], [0.0, 1.0, 1.0], [0.0, 1.0, 1.0]]
        >>> fl.label_kernel([1.0, -1.0]).tolist()  # real labels
        [[1.0, -1.0], [-1.0, 1.0]]
    """
    rows, _ = _label_rows(y)
    return rows @ rows.mT


def labels_vary(y: Any) -> bool:
    """Return whether `kernel_target_alignment` is defined for labels: two classes, or a real label other than 0.

    Args:
        y: Labels as in `label_kernel`.
    """
    rows, classes = _label_rows(y, zero=True)
    return rows.shape[1] > 1 if classes else bool(rows.any())


def _label_rows(y: Any, zero: bool = False) -> tuple[Tensor, bool]:
    """Return labels as rows (n, c) in float64, classes as one-hot rows, and whether they are classes."""
    labels = torch.as_tensor(y)
    classes = not labels.is_floating_point()
    if labels.ndim not in (1, 2) or labels.shape[0] == 0:
        raise InputError(f"labels must be (n,) or (n, c), got shape {tuple(labels.shape)}.")
    if classes:
        if labels.ndim != 1:
            raise InputError(f"class labels must be (n,), got shape {tuple(labels.shape)}.")
        labels = torch.nn.functional.one_hot(torch.unique(labels, return_inverse=True)[1])
    rows = labels.detach().to(torch.float64).reshape(labels.shape[0], -1)
    if not torch.isfinite(rows).all():
        raise InputError("labels must be finite, got NaN or infinite entries.")
    if not zero and not rows.any():
        raise InputError("labels must not be all zero: their alignment is not defined.")
    return rows, classes


def kernel_target_alignment(kernel: Any, y: Any, *, center: bool | Literal["auto"] = "auto") -> float:
    """Return the kernel-target alignment, ``KTA = <K, y y^T> / (|K|_F |y y^T|_F)``.

    Equation 15 of the reference has real y; for one column ``|y y^T| = |y|^2``. Integer and boolean labels are classes
    and become one-hot rows, whose columns are centered: for two classes of the same size, the alignment is that of the
    labels +1 and -1. One-hot rows that are not centered are dominated by their mean, so that any kernel with positive
    entries, such as that of an untrained network, appears aligned with them.

    Args:
        kernel: Kernel of shape (n, n).
        y: Labels as in `label_kernel`: classes of shape (n,), or real labels of shape (n,) or (n, c).
        center: Whether to subtract the column means of the labels. "auto" does so for classes and takes real labels as
            they are; False takes one-hot rows as they are, too.

    Returns:
        The alignment, between -1 and 1.

    Raises:
        InputError: The kernel and y have different sizes, or y is zero after centering.

    Example:
        >>> import featlearn as fl
        >>> kernel = [[1.0, -1.0], [-1.0, 1.0]]
        >>> round(fl.kernel_target_alignment(kernel, [1.0, -1.0]), 4)
        1.0
        >>> round(fl.kernel_target_alignment(kernel, [0, 1]), 4)
        1.0
        >>> round(fl.kernel_target_alignment(kernel, [1.0, 1.0]), 4)
        0.0
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
    """Return ``H K H`` with ``H = I - 11^T/n``, the kernel of centered features.

    Args:
        kernel: Kernel of shape (n, n).

    Returns:
        Kernel of shape (n, n) in float64.

    Raises:
        InputError: The kernel is not square, symmetric, finite and different from zero.

    Example:
        >>> from featlearn.kernels import centered_kernel
        >>> centered_kernel([[3.0, 1.0], [1.0, 3.0]]).tolist()
        [[1.0, -1.0], [-1.0, 1.0]]
    """
    k = check_kernel(kernel)
    rows = k - k.mean(0, keepdim=True)
    return rows - rows.mean(1, keepdim=True)


def centered_alignment(kernel: Any, other: Any) -> float:
    """Return the cosine of two kernels after centering both, ``<H K H, H L H> / (|H K H| |H L H|)``.

    Args:
        kernel: Kernel of shape (n, n).
        other: Another kernel of shape (n, n), such as a `label_kernel`.

    Returns:
        The alignment, between -1 and 1.

    Raises:
        InputError: The kernels have different sizes, or one is constant and therefore zero after centering.

    Example:
        >>> import torch, featlearn as fl
        >>> labels = fl.label_kernel([0, 0, 1, 1])
        >>> round(fl.centered_alignment(5.0 + labels, labels), 4)  # a constant does not matter
        1.0
        >>> round(fl.centered_alignment(torch.eye(4), labels), 4)
        0.5774
    """
    first, second = check_kernel(kernel), check_kernel(other, "the other kernel")
    _check_sizes(first, second)
    centered = [centered_kernel(k) for k in (first, second)]
    for k, c in zip((first, second), centered, strict=True):
        if float(c.norm()) <= 1e-12 * float(k.norm()):
            raise InputError("a kernel is zero after centering: its features, or the labels, are constant.")
    return cosine(*centered)


def _check_sizes(first: Tensor, second: Tensor) -> None:
    if first.shape != second.shape:
        raise InputError(f"both kernels must have the same size, got {first.shape[0]} points and {second.shape[0]}.")
