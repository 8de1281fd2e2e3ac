"""Eigenvalues of weights, by the Gram matrix of the smaller side."""

from __future__ import annotations

import math
from typing import Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray
from scipy.linalg import eigh_tridiagonal, lapack
from scipy.linalg.blas import dsyrk
from torch import Tensor

from featlearn.errors import FeatlearnError, InputError
from featlearn.linalg.matrices import as_float64

Array = NDArray[np.float64]


def weight_eigenvalues(
    weight: Any, *, scale: float | None = None, side: Literal["columns", "rows", "smaller"] = "columns"
) -> Tensor:
    """Compute the eigenvalues of ``W^T W / scale`` in float64.

    The eigenvalues are those of the Gram matrix of the smaller side. Singular values would resolve smaller eigenvalues,
    but take several times as long. The difference is below ``eps lambda_max``, which is beyond the precision of a
    float32 weight and counts as zero in all functions of this package.

    Args:
        weight: Weight of shape ``(h, d)``, or ``(groups, h, d)`` for a block-diagonal weight, whose spectrum consists
            of those of all blocks.
        scale: Divisor of ``W^T W``, positive. None divides by h, as in `marchenko_pastur`.
        side: ``"columns"`` for the d eigenvalues of ``W^T W``, including ``d - h`` exact zeros if h < d; ``"rows"`` for
            the h eigenvalues of ``W W^T``, including ``h - d`` zeros if d < h; ``"smaller"`` for the min(h, d)
            eigenvalues that both share.

    Returns:
        The eigenvalues, a float64 vector on the CPU, ascending.

    Raises:
        InputError: If `weight` has another shape, is empty or not finite, `scale` is not positive and finite, or `side`
            is none of the three names.

    Example:
        >>> from featlearn.spectra import weight_eigenvalues
        >>> weight_eigenvalues([[3.0, 0.0, 0.0], [0.0, 2.0, 0.0]], scale=1).tolist()
        [0.0, 4.0, 9.0]
    """
    w = as_float64(weight).cpu()
    if w.ndim not in (2, 3) or not w.numel():
        raise InputError(
            f"weight must have shape (h, d) or (groups, h, d) and not be empty, got shape {tuple(w.shape)}. "
            "Reshape a convolution to (out, in * kernel)."
        )
    if not torch.isfinite(w).all():
        raise InputError("weight must be finite, got NaN or infinite entries.")
    sizes = {"rows": w.shape[-2], "columns": w.shape[-1], "smaller": min(w.shape[-2:])}
    if side not in sizes:
        raise InputError(f"side must be 'columns', 'rows' or 'smaller', got {side!r}.")
    divisor = w.shape[-2] if scale is None else scale
    if not (math.isfinite(divisor) and divisor > 0):
        raise InputError(f"scale must be positive and finite, got {scale!r}.")
    blocks = w if w.ndim == 3 else w.unsqueeze(0)
    values = torch.from_numpy(gram_eigenvalues(blocks)) / divisor
    zeros = values.new_zeros((sizes[side] - sizes["smaller"]) * blocks.shape[0])
    return torch.cat([zeros, values])


_BLOCK = 1 << 19  # numbers per float64 block: 4 MB; larger blocks are not faster


def gram_eigenvalues(weight: Tensor, *, signs: torch.Generator | None = None) -> Array:
    """Compute the ``groups * min(h, d)`` eigenvalues that ``W^T W`` and ``W W^T`` share, in float64.

    An eigenvalue has an error of about ``eps lambda_max``: those below ``n eps lambda_max`` are rounding errors and
    count as zero in all functions of this package (`positive_eigenvalues`). Memory: see `GramMatrix`.

    Args:
        weight: Weight of shape ``(groups, h, d)`` in any floating dtype, finite.
        signs: Generator of random signs by which the entries are multiplied. None keeps the signs of the entries.

    Returns:
        The eigenvalues, ascending.
    """
    return np.sort(np.concatenate([GramMatrix(w, signs=signs).eigenvalues for w in weight.detach()]))


class GramMatrix:
    """Gram matrix of the smaller side of a weight, reduced to tridiagonal form.

    The Gram matrix is summed over blocks of the larger side and reduced in place, so that in addition to the weight
    only one block and half a Gram matrix are in memory. Eigenvectors are computed from the same reduction, if they are
    asked for.

    SciPy's BLAS and LAPACK are faster: on one thread ``dsyrk`` took half the time of torch's product, which forms both
    triangles, and ``dsytrd`` two thirds of ``torch.linalg.eigvalsh`` (both 3072 x 768).

    Time: ``h d min(h, d)`` operations for the sum and ``4/3 min(h, d)^3`` for the reduction.

    Args:
        w: Weight of shape ``(h, d)`` in any floating dtype, finite.
        signs: Generator of random signs by which the entries are multiplied. None keeps the signs of the entries.

    Attributes:
        eigenvalues: Eigenvalues, ascending, not negative.
    """

    def __init__(self, w: Tensor, *, signs: torch.Generator | None = None) -> None:
        low, high = (float(end) for end in torch.aminmax(w.detach()))
        # The reduction squares entries: a power of two keeps them in range, and changes no digit.
        self._unit = 4.0 ** math.frexp(max(-low, high))[1]
        gram = _gram(w.detach(), 1 / self._unit, signs)
        if len(gram) == 1:
            self.eigenvalues: Array = self._unit * gram[0]
            return
        work, _ = lapack.dsytrd_lwork(len(gram), lower=1)
        # The reflectors of the reduction replace the lower triangle.
        self._reflectors, self._diagonal, self._beside, self._factors, info = lapack.dsytrd(
            gram, lower=1, lwork=int(work), overwrite_a=1
        )
        values, failed = lapack.dsterf(self._diagonal, self._beside)
        if info or failed:
            raise FeatlearnError(f"The eigenvalues of a matrix of shape {tuple(w.shape)} did not converge.")
        self.eigenvalues = self._unit * values.clip(min=0.0)

    def leading_vectors(self, first: int, last: int) -> Array:
        """Return eigenvectors in the order of descending eigenvalues, shape ``(n, last - first)``.

        Time: ``2 n^2 (last - first)`` operations.

        Args:
            first: Index of the first vector; 0 is that of the largest eigenvalue.
            last: Index after that of the last vector.
        """
        n = self.eigenvalues.size
        if n == 1 or last == first:
            return np.ones((n, last - first))
        ends = (n - last, n - 1 - first)
        _, vectors = eigh_tridiagonal(self._diagonal, self._beside, select="i", select_range=ends, check_finite=False)
        reflectors, below = self._reflectors[1:, :-1], np.asfortranarray(vectors[1:])
        _, work, _ = lapack.dormqr("L", "N", reflectors, self._factors, below, -1)
        vectors[1:] = lapack.dormqr("L", "N", reflectors, self._factors, below, int(work[0]), overwrite_c=1)[0]
        result: Array = vectors[:, ::-1].copy()
        return result


def _gram(w: Tensor, factor: float, signs: torch.Generator | None) -> Array:
    """Return the lower triangle of the Gram matrix of the smaller side, times a factor, in Fortran order."""
    if w.stride(0) == 1:  # a transposed view: read its memory along the stored rows
        w = w.mT
    tall = w.shape[0] >= w.shape[1]
    larger, smaller = (0, 1) if tall else (1, 0)
    # Only one triangle is written, so that half of the zero pages are never allocated.
    gram = np.zeros((w.shape[smaller], w.shape[smaller]), order="F")
    step = min(max(1, _BLOCK // w.shape[smaller]), w.shape[larger])
    # One buffer for all blocks: new ones would accumulate on the heap.
    buffer = torch.empty(step * w.shape[smaller], dtype=torch.float64)
    for block in torch.split(w, step, dim=larger):
        copy = buffer[: block.numel()].view(block.shape).copy_(block)
        if signs is not None:
            copy *= torch.randint(0, 2, block.shape, generator=signs, dtype=torch.int8).mul_(2).sub_(1)
        columns = copy.numpy().T  # Fortran order for BLAS
        gram = dsyrk(factor, columns, beta=1.0, c=gram, trans=0 if tall else 1, lower=1, overwrite_c=1)
    return gram
