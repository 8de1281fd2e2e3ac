"""Products of a matrix with its transpose, of which half is computed."""

from __future__ import annotations

import torch
from scipy.linalg.blas import dsyrk, ssyrk
from torch import Tensor

_BLOCK = 64  # columns: below, a symmetric product takes no less time than a general one
_SYRK = {torch.float32: ssyrk, torch.float64: dsyrk}


def add_square(total: Tensor, rows: Tensor) -> None:
    """Add ``rows^T rows`` to a matrix, of which only the upper triangle is then valid; see `mirrored`.

    Computed by BLAS on the host, and by blocks of columns elsewhere.

    Args:
        total: Matrix to add to, shape (k, k).
        rows: Rows, shape (n, k).
    """
    k = rows.shape[1]
    syrk = _SYRK.get(rows.dtype) if rows.device.type == "cpu" and k >= _BLOCK else None
    if syrk is not None and total.is_contiguous() and rows.is_contiguous():
        # BLAS reads matrices by columns: the transposed sum has a lower triangle.
        syrk(1.0, rows.numpy().T, beta=1.0, c=total.numpy().T, lower=1, overwrite_c=1)
        return
    step = max(_BLOCK, k // 8)
    for start in range(0, k, step):
        stop = start + step
        total[start:stop, start:].addmm_(rows[:, start:stop].mT, rows[:, start:])


def mirrored(total: Tensor) -> Tensor:
    """Return the symmetric float64 matrix with the given upper triangle.

    Args:
        total: Matrix, or a stack of matrices.
    """
    upper = total.to(torch.float64).triu()
    return upper + upper.triu(1).mT


def gram(rows: Tensor) -> Tensor:
    """Return ``rows rows^T`` of a stack of float64 matrices.

    Args:
        rows: Matrices of shape (blocks, r, k).

    Returns:
        Symmetric matrices of shape (blocks, r, r).
    """
    if rows.shape[0] > 1 or rows.shape[1] < _BLOCK:
        return rows @ rows.mT
    total = rows.new_zeros(1, rows.shape[1], rows.shape[1])
    add_square(total[0], rows[0].mT.contiguous())
    return mirrored(total)
