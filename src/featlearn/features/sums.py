"""Sums of outer products over rows: the inner loop of every probe."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from featlearn.features.measures import UNGROUPED, Plan

__all__ = ["BatchSums", "add_gram", "empty_sums", "mirrored"]

# Columns taken at a time by `add_gram`: 64 saves 28% of the time at k = 256, and costs nothing below.
_BLOCK = 64


def add_gram(total: Tensor, rows: Tensor) -> None:
    """Add ``rows^T rows`` to ``total``, of which only the upper triangle is meant (`mirrored` fills the rest).

    Args:
        total: (blocks, k, k).
        rows: (r, blocks, k).

    Half of a symmetric product need not be computed: block columns times the columns from there on.
    """
    if total.shape[0] > 1:
        by_block = rows.permute(1, 2, 0)
        total.baddbmm_(by_block, by_block.mT)
        return
    flat, square = rows.squeeze(1), total[0]
    step = max(_BLOCK, flat.shape[1] // 8)
    for start in range(0, flat.shape[1], step):
        stop = start + step
        square[start:stop, start:].addmm_(flat[:, start:stop].mT, flat[:, start:])


def mirrored(total: Tensor) -> Tensor:
    """The symmetric matrix, in float64, of which the upper triangle is given."""
    upper = total.to(torch.float64).triu()
    return upper + upper.triu(1).mT


def empty_sums(plan: Plan, groups: int, dtype: torch.dtype, device: torch.device) -> dict[str, Tensor]:
    """Zeros for the sums of a layer; those of J with a leading dimension of sketch groups."""
    return {
        name: torch.zeros(shape if name in UNGROUPED else (groups, *shape), dtype=dtype, device=device)
        for name, shape in plan.sums.items()
    }


class BatchSums:
    """The sums of one layer over one batch, in the precision of the model.

    They are added to the float64 sums when the whole batch has been measured: float64 products throughout
    would cost 2.5 times the time, and a batch that fails half-way leaves nothing behind.

    Args:
        plan: Which sums.
        groups: Number of sketch groups.
        weights: ``W`` and, with an initial model, ``W0``, as (blocks, k_out, k_in).
        dtype: Precision of the products.
    """

    def __init__(self, plan: Plan, groups: int, weights: Mapping[str, Tensor], dtype: torch.dtype) -> None:
        self.dtype = dtype
        self.sums = empty_sums(plan, groups, dtype, weights["W"].device)
        self._weights: dict[str, Tensor] = {}
        if not plan.outer:
            w = weights["W"].to(dtype)
            self._weights = {"agop": w, "enfa": w}
            if "W0" in weights:
                w0 = weights["W0"].to(dtype)
                self._weights |= {"ptk": w0, "centered": w - w0, "double": w - w0}

    def clear(self) -> None:
        """Start another batch in the same memory: fresh pages for large sums cost more than the zeros."""
        for value in self.sums.values():
            value.zero_()

    def add_output_gradients(self, group: int, rows: Tensor, initial: Tensor | None) -> None:
        """Add the rows J of one output (or sketch), and of the initial model's J0 where they are needed.

        Args:
            group: Sketch group.
            rows: J as (r, blocks, k_out).
            initial: J0 of the same inputs, or None.
        """
        rows = rows.to(self.dtype)
        change = None if initial is None else rows - initial.to(self.dtype)
        for name in self.sums:
            if name in ("K", "agop", "centered"):
                add_gram(self.sums[name][group], self._project(name, rows))
            elif name in ("Kb", "double", "ptk") and change is not None:
                add_gram(self.sums[name][group], self._project(name, change))

    def add_loss_gradients(self, rows: Tensor) -> None:
        """Add the rows g = dl/dh of per-sample losses, (r, blocks, k_out)."""
        for name in ("B", "enfa"):
            if name in self.sums:
                add_gram(self.sums[name], self._project(name, rows.to(self.dtype)))

    def add_weight_gradient(self, matrix: Tensor) -> None:
        """Add the gradient of the summed losses with respect to W, (blocks, k_out, k_in)."""
        self.sums["D"] += matrix.to(self.dtype)

    def fold_into(self, sums: Mapping[str, Tensor]) -> None:
        """Add to the float64 sums of the layer; of squares, too, only the upper triangle is meant."""
        for name, value in self.sums.items():
            sums[name].add_(value)

    def finite(self) -> bool:
        """Whether no sum overflowed."""
        return all(bool(torch.isfinite(value.sum())) for value in self.sums.values())

    def tiny(self, given: torch.dtype) -> bool:
        """Whether a sum of squares is zero, or so small that its entries, or the gradients, have lost digits.

        Args:
            given: Precision of the gradients.
        """
        precision = torch.promote_types(given, torch.float32)
        limit = torch.finfo(self.dtype).tiny / torch.finfo(self.dtype).eps
        limit = max(limit, (100 * torch.finfo(precision).tiny) ** 2)
        sums = [value for name, value in self.sums.items() if name in ("K", "agop")]
        return any(float(value.diagonal(dim1=-2, dim2=-1).amax()) < limit for value in sums if value.numel())

    def _project(self, name: str, rows: Tensor) -> Tensor:
        weight = self._weights.get(name)
        if weight is None:
            return rows
        with torch.autocast(rows.device.type, enabled=False):  # it would round the product to half precision
            return torch.bmm(rows.transpose(0, 1), weight).transpose(0, 1)
