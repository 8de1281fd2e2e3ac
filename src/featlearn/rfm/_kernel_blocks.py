"""Kernel of many rows with few centers, in blocks of rows, and triangular solves."""

from __future__ import annotations

import math
from collections.abc import Iterator

import torch
from torch import Tensor

from featlearn._utils.validation import check_number
from featlearn.errors import InputError, SingularKernelError
from featlearn.rfm.kernels import Kernel, row_blocks

BLOCK = 2**18  # entries of a block of the kernel, which then stays in the cache for its products
_LADDER = 8


class KernelRows:
    """Kernel of all rows with the centers, ``K_nC``, in blocks of rows; all blocks are kept in memory, or none.

    Vectors are rows of ``(c, m)`` or ``(c, n)`` matrices, since products of few vectors are faster in this layout.

    Args:
        kernel: Kernel of the model.
        u: Rows transformed by the root of M, shape ``(n, d)``.
        centers: Centers transformed by the root of M, shape ``(m, d)``.
        bandwidth: Bandwidth L of the kernel.
        max_memory: Bytes that a kept ``K_nC`` may take. A larger matrix is computed again for each pass.
    """

    def __init__(self, kernel: Kernel, u: Tensor, centers: Tensor, bandwidth: float, max_memory: int) -> None:
        self.kernel, self.u, self.centers, self.bandwidth = kernel, u, centers, bandwidth
        m = len(centers)
        self._slices = row_blocks(len(u), m, BLOCK)
        # All or nothing: page faults of a part that is kept cost more than the exponentials that it saves.
        fits = len(u) * m * u.element_size() <= max_memory
        self._kept = u.new_empty(len(u) if fits else 0, m)
        self._computed = False
        step = self._slices[0].stop
        self._block = u.new_empty(step if len(self._kept) < len(u) else 0, m)
        self._wide = None if u.dtype == torch.float64 else u.new_empty(step, m, dtype=torch.float64)

    @property
    def kept_share(self) -> float:
        """Share of the rows that is kept in memory: 1 or 0."""
        return len(self._kept) / len(self.u)

    def blocks(self) -> Iterator[tuple[slice, Tensor]]:
        """Yield the rows and entries of each block of ``K_nC``, in float64; the next block overwrites the entries."""
        for rows in self._slices:
            kept = rows.stop <= len(self._kept)
            block = self._kept[rows] if kept else self._block[: rows.stop - rows.start]
            if not (kept and self._computed):
                self.kernel.matrix(self.u[rows], self.centers, self.bandwidth, out=block)
            yield rows, block if self._wide is None else self._wide[: len(block)].copy_(block)
        self._computed = True

    def moments(self, targets: Tensor, weights: Tensor) -> Tensor:
        """Return ``Y^T W K_nC``, shape ``(c, m)``."""
        total = weights.new_zeros(targets.shape[1], len(self.centers))
        for rows, block in self.blocks():
            total.addmm_((targets[rows].double() * weights[rows, None]).mT, block)
        return total

    def normal_product(self, vectors: Tensor, weights: Tensor) -> Tensor:
        """Return ``V K_nC^T W K_nC``, shape ``(c, m)``, in one pass over the rows."""
        total = torch.zeros_like(vectors)
        for rows, block in self.blocks():
            total.addmm_((vectors @ block.mT).mul_(weights[rows]), block)
        return total


def over(vectors: Tensor, factor: Tensor) -> Tensor:
    """Return ``V L^{-1}`` with a lower triangular L."""
    result: Tensor = torch.linalg.solve_triangular(factor, vectors, upper=False, left=False)
    return result


def over_transposed(vectors: Tensor, factor: Tensor) -> Tensor:
    """Return ``V L^{-T}`` with a lower triangular L."""
    result: Tensor = torch.linalg.solve_triangular(factor.mT, vectors, upper=True, left=False)
    return result


def cholesky(matrix: Tensor, eps: float) -> Tensor:
    """Return the lower Cholesky factor of a float64 matrix, with the least jitter that suffices.

    Args:
        matrix: Symmetric matrix, positive semi-definite up to rounding, shape ``(m, m)``. Its diagonal is overwritten.
        eps: Relative precision of the entries. The first attempt already has a jitter of this size: a factor without
            jitter that just succeeds would be as inaccurate.

    Raises:
        SingularKernelError: The matrix is not positive definite even with the largest jitter.
    """
    diagonal = matrix.diagonal().clone()
    jitter = eps * float(diagonal.mean()) * math.sqrt(len(diagonal))
    factor: Tensor
    for _ in range(_LADDER):
        matrix.diagonal().copy_(diagonal + jitter)
        factor, failed = torch.linalg.cholesky_ex(matrix)
        if not failed and math.isfinite(jitter):
            return factor
        jitter *= 10.0
    raise SingularKernelError(
        f"the kernel of the centers is not positive definite even with {jitter / 10.0:.1e} added to its diagonal. "
        "Pass fewer centers, or rows in float64."
    )


def kernel_diagonal(kernel: Kernel, u: Tensor, bandwidth: float) -> Tensor:
    """Return the kernel of each row with itself, shape ``(n,)``."""
    return kernel.values_(torch.zeros_like(u[:, 0]) if kernel.radial else u.square().sum(1), bandwidth)


def check_rows(u: Tensor, weights: Tensor, bandwidth: float, ridge: float) -> None:
    """Raise an InputError if rows, weights, bandwidth or ridge are not allowed."""
    if u.ndim != 2 or u.dtype not in (torch.float32, torch.float64) or not len(u):
        raise InputError(f"u must be rows in float32 or float64, got shape {tuple(u.shape)} in {u.dtype}")
    if weights.shape != u.shape[:1]:
        raise InputError(f"weights must be of shape ({len(u)},), one per row, got {tuple(weights.shape)}")
    if not bool((weights >= 0).all()) or not 0 < float(weights.sum()) < math.inf:
        raise InputError("weights must be finite and not negative, with at least one above 0")
    check_number("bandwidth", bandwidth, above=0)
    check_number("ridge", ridge, 0)
