"""Eigenvalues of a weight of any size, without a float64 copy of it."""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray
from scipy.linalg import eigh
from scipy.linalg.blas import dsyrk
from torch import Tensor

__all__ = ["gram_eigenvalues"]

_BLOCK = 1 << 19  # numbers that are float64 at a time: 4 MB; larger blocks were no faster


def gram_eigenvalues(weight: Tensor) -> NDArray[np.float64]:
    r"""The ``groups * min(h, d)`` eigenvalues that ``W^T W`` and ``W W^T`` share, in float64, ascending.

    The Gram matrix of the smaller side is summed over blocks of the larger one, so that beside the weight only a
    block and half a Gram matrix are in memory. An eigenvalue is exact to about ``eps lambda_max``: those below
    ``n eps lambda_max`` are rounding, and count as zero wherever spectra are read (`positive_eigenvalues`).

    SciPy's BLAS and LAPACK: on one thread its ``dsyrk`` took half the time of torch's product, which forms both
    triangles, and its ``dsyevr`` two thirds of ``torch.linalg.eigvalsh`` (both 3072 x 768).

    Args:
        weight: (groups, h, d) in any floating dtype, finite.
    """
    return np.sort(np.concatenate([_block_eigenvalues(w) for w in weight.detach()]))


def _block_eigenvalues(w: Tensor) -> NDArray[np.float64]:
    if w.stride(0) == 1:  # a transposed view: its memory is read along the rows it was stored in
        w = w.mT
    tall = w.shape[0] >= w.shape[1]
    larger, smaller = (0, 1) if tall else (1, 0)
    # Only the upper triangle is ever touched, so that half the pages of the zeros never exist.
    gram = np.zeros((w.shape[smaller], w.shape[smaller]), order="F")
    step = min(max(1, _BLOCK // w.shape[smaller]), w.shape[larger])
    # One buffer for all blocks: new ones would pile up on the allocator's heap.
    buffer = torch.empty(step * w.shape[smaller], dtype=torch.float64)
    for block in torch.split(w, step, dim=larger):
        columns = buffer[: block.numel()].view(block.shape).copy_(block).numpy().T  # Fortran's order, as BLAS wants it
        gram = dsyrk(1.0, columns, beta=1.0, c=gram, trans=0 if tall else 1, overwrite_c=1)
    values: NDArray[np.float64] = eigh(
        gram, lower=False, eigvals_only=True, driver="evr", overwrite_a=True, check_finite=False
    )
    return values.clip(min=0.0)
