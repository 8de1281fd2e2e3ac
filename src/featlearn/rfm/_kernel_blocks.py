"""The kernel of many rows with few centers, in blocks of rows, and the triangular algebra around it."""

from __future__ import annotations

import math
from collections.abc import Iterator

import torch
from torch import Tensor

from featlearn.errors import InputError, SingularKernelError
from featlearn.rfm.kernels import Kernel, row_blocks

BLOCK = 2**18  # entries of a block of the kernel: its products are then taken from the cache
_LADDER = 8


class KernelRows:
    """The kernel of all rows with the centers, ``K_nC``, in blocks of rows; all are kept, or none.

    Vectors are the rows of ``(c, m)`` or ``(c, n)`` matrices: with few of them, products are faster so.
    """

    def __init__(self, kernel: Kernel, u: Tensor, centers: Tensor, bandwidth: float, max_memory: int) -> None:
        self.kernel, self.u, self.centers, self.bandwidth = kernel, u, centers, bandwidth
        m = len(centers)
        self._slices = row_blocks(len(u), m, BLOCK)
        # All or nothing: a kept part of a larger matrix costs more page faults than it saves exponentials.
        fits = len(u) * m * u.element_size() <= max_memory
        self._kept = u.new_empty(len(u) if fits else 0, m)
        self._computed = False
        step = self._slices[0].stop
        self._block = u.new_empty(step if len(self._kept) < len(u) else 0, m)
        self._wide = None if u.dtype == torch.float64 else u.new_empty(step, m, dtype=torch.float64)

    @property
    def kept_share(self) -> float:
        """Which part of the rows is kept: 1 or 0."""
        return len(self._kept) / len(self.u)

    def blocks(self) -> Iterator[tuple[slice, Tensor]]:
        """Blocks of ``K_nC`` in float64, each with its rows; a block is gone when the next one comes."""
        for rows in self._slices:
            kept = rows.stop <= len(self._kept)
            block = self._kept[rows] if kept else self._block[: rows.stop - rows.start]
            if not (kept and self._computed):
                self.kernel.matrix(self.u[rows], self.centers, self.bandwidth, out=block)
            yield rows, block if self._wide is None else self._wide[: len(block)].copy_(block)
        self._computed = True

    def moments(self, targets: Tensor, weights: Tensor) -> Tensor:
        """``Y^T W K_nC``, ``(c, m)``."""
        total = weights.new_zeros(targets.shape[1], len(self.centers))
        for rows, block in self.blocks():
            total.addmm_((targets[rows].double() * weights[rows, None]).mT, block)
        return total

    def normal_product(self, vectors: Tensor, weights: Tensor) -> Tensor:
        """``V K_nC^T W K_nC``, ``(c, m)``, in one pass."""
        total = torch.zeros_like(vectors)
        for rows, block in self.blocks():
            total.addmm_((vectors @ block.mT).mul_(weights[rows]), block)
        return total


def over(vectors: Tensor, factor: Tensor) -> Tensor:
    """``V L^{-1}``."""
    result: Tensor = torch.linalg.solve_triangular(factor, vectors, upper=False, left=False)
    return result


def over_transposed(vectors: Tensor, factor: Tensor) -> Tensor:
    """``V L^{-T}``."""
    result: Tensor = torch.linalg.solve_triangular(factor.mT, vectors, upper=True, left=False)
    return result


def cholesky(matrix: Tensor, eps: float) -> Tensor:
    """Lower Cholesky factor of a float64 matrix, which is changed, with as little jitter as it takes.

    Args:
        matrix: Symmetric, positive semi-definite up to rounding.
        eps: Relative precision of its entries. Jitter starts from it, not from zero: without any, a factor that just
            succeeds is as inaccurate.
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
        f"the kernel of the centers is not positive definite even with {jitter / 10.0:.1e} on its diagonal: "
        "take fewer centers, or rows in float64"
    )


def kernel_diagonal(kernel: Kernel, u: Tensor, bandwidth: float) -> Tensor:
    """The kernel of each row with itself."""
    return kernel.values_(torch.zeros_like(u[:, 0]) if kernel.radial else u.square().sum(1), bandwidth)


def check_rows(u: Tensor, weights: Tensor, bandwidth: float, ridge: float) -> None:
    """Refuse rows, weights and numbers that make no problem."""
    if u.ndim != 2 or u.dtype not in (torch.float32, torch.float64) or not len(u):
        raise InputError(f"u must be rows in float32 or float64, got shape {tuple(u.shape)} in {u.dtype}")
    if weights.shape != u.shape[:1]:
        raise InputError(f"weights must be of shape ({len(u)},), one for each row, got {tuple(weights.shape)}")
    if not bool((weights >= 0).all()) or not 0 < float(weights.sum()) < math.inf:
        raise InputError("weights must be finite and not negative, and one of them above 0")
    if not 0 < bandwidth < math.inf:
        raise InputError(f"bandwidth must be above 0, got {bandwidth!r}")
    if not 0 <= ridge < math.inf:
        raise InputError(f"ridge must be 0 or more, got {ridge!r}")
