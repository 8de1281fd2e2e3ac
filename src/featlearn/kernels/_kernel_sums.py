"""Tangent kernels that are added up block by block, in place."""

from __future__ import annotations

import torch
from torch import Tensor

from featlearn.errors import InputError

TOTAL = "total"
"""Name of the sum over layers."""


class KernelSums:
    """Sums of the contributions of layers to a kernel, in float64: of all layers together, or of each.

    Each sum exists once. Blocks of samples whose number is not known in advance enlarge it.

    Args:
        rows: Expected number of rows.
        columns: Expected number of columns.
        by_layer: Whether the contribution of each layer is kept.
    """

    def __init__(self, rows: int, columns: int, by_layer: bool) -> None:
        self._expected, self._by_layer = (rows, columns), by_layer
        self._rows, self._columns = [0], [0]  # where blocks begin, and where the last one ends
        self._sums: dict[str, Tensor] = {}

    def add(self, i: int, j: int, name: str, kernel: Tensor) -> None:
        """Add the contribution of a layer between two blocks of samples.

        Args:
            i: Index of the block of rows; blocks come in order.
            j: Index of the block of columns; in the first block of rows they come in order.
            name: Name of the layer.
            kernel: Contribution, shape (n_i, m_j, ...).

        Raises:
            InputError: The contribution is not finite.
        """
        # A sum of finite numbers may overflow.
        if not torch.isfinite(kernel.sum()) and not torch.isfinite(kernel).all():
            raise InputError(f"the gradients in {name!r} are NaN or infinite. Leave parameters out with parameters=.")
        for starts, index, size in ((self._rows, i, kernel.shape[0]), (self._columns, j, kernel.shape[1])):
            if len(starts) == index + 1:
                starts.append(starts[-1] + size)
        key = name if self._by_layer else TOTAL
        if key not in self._sums:
            shape = (*self._expected, *kernel.shape[2:])
            self._sums[key] = torch.zeros(shape, dtype=torch.float64, device=kernel.device)
        if self._sums[key].shape[0] < self._rows[i + 1] or self._sums[key].shape[1] < self._columns[j + 1]:
            self._enlarge(key)
        self._sums[key][self._block(i, j)] += kernel

    def mirror(self, full: bool) -> None:
        """Copy the blocks above the diagonal to those below it.

        Args:
            full: Whether the kernel has a block per pair of outputs, which is transposed too.
        """
        for sums in self._sums.values():
            for i in range(1, len(self._columns) - 1):
                for j in range(i):
                    above = sums[self._block(j, i)].transpose(0, 1)
                    sums[self._block(i, j)] = above.mT if full else above

    def kernels(self) -> dict[str, Tensor]:
        """Return the sums by layer name, or by `TOTAL`."""
        return {name: sums[: self._rows[-1], : self._columns[-1]] for name, sums in self._sums.items()}

    def begin(self) -> None:
        """Start with the first block, whose contributions are added to what there is."""
        self._rows, self._columns = [0], [0]

    def _block(self, i: int, j: int) -> tuple[slice, slice]:
        return slice(*self._rows[i : i + 2]), slice(*self._columns[j : j + 2])

    def _enlarge(self, key: str) -> None:
        before = self._sums[key]
        sizes = [max(size, starts[-1]) for size, starts in zip(before.shape, (self._rows, self._columns), strict=False)]
        after = before.new_zeros((*sizes, *before.shape[2:]))
        after[: before.shape[0], : before.shape[1]] = before
        self._sums[key] = after
