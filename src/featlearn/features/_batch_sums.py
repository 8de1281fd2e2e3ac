"""Sums of outer products over rows, and totals of batches and processes."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from featlearn.capture import without_autocast
from featlearn.errors import InputError
from featlearn.features.measurement_plan import UNGROUPED, Outputs, SumPlan
from featlearn.linalg.symmetric_products import add_square

Blocks = int | Tensor | None

_NARROW = 64  # channels: above, a copy of the rows is worth its time


def add_gram(total: Tensor, rows: Tensor) -> None:
    """Add ``rows^T rows`` to ``total``, of which only the upper triangle is valid.

    Half of a symmetric product is not computed, see `featlearn.linalg.symmetric_products`.

    Args:
        total: Sum to add to, shape (blocks, k, k).
        rows: Rows to add, shape (samples, positions, blocks, k).
    """
    n, positions, blocks, k = rows.shape
    if k == 1:  # depthwise convolutions
        total += rows.square().sum((0, 1)).unsqueeze(-1)
    elif blocks > 1:
        by_block = rows.flatten(0, 1).permute(1, 2, 0)
        total.baddbmm_(by_block, by_block.mT)
    elif rows.stride(1) == 1 and positions >= k and k <= _NARROW:  # channels first, as in convolutions: no copy
        channels = rows.squeeze(2).mT
        total[0].addbmm_(channels, channels.mT)
    else:
        add_square(total[0], rows.reshape(n * positions, k))


def empty_sums(plan: SumPlan, groups: int, dtype: torch.dtype, device: torch.device) -> dict[str, Tensor]:
    """Return zeros for the sums of a layer; sums of J have a leading dimension of groups."""
    return {
        name: torch.zeros(shape if name in UNGROUPED else (groups, *shape), dtype=dtype, device=device)
        for name, shape in plan.sums.items()
    }


class BatchSums:
    """Sums of one layer over one batch, in the precision of the model.

    They are added to the float64 sums once the whole batch has been measured: float64 products would take 2.5 times
    the time, and a batch that raises an error leaves the float64 sums unchanged.

    Args:
        plan: Names and shapes of the sums.
        groups: Number of groups of vectors, or of rows.
        weights: ``W`` and, with an initial model, ``W0``, each of shape (blocks, k_out, k_in), as the sums are kept.
        dtype: Precision of the products.
        start: Number of samples before this batch, with which groups of rows take turns.
    """

    def __init__(
        self, plan: SumPlan, groups: int, weights: Mapping[str, Tensor], dtype: torch.dtype, start: int = 0
    ) -> None:
        self.dtype, self._split = dtype, plan.split
        self._groups, self.start = groups, start
        self._blocks = weights["W"].shape[0]
        self.sums = empty_sums(plan, groups, dtype, weights["W"].device)
        self._weights: dict[str, Tensor] = {}
        if not plan.outer and not plan.at_inputs:
            w = weights["W"].to(dtype)
            self._weights = {"agop": w, "enfa": w}
            if "W0" in weights:
                w0 = weights["W0"].to(dtype)
                self._weights |= {"ptk": w0, "centered": w - w0, "double": w - w0}

    def clear(self) -> None:
        """Reset the sums to zero for another batch; allocating new memory for large sums takes longer."""
        for value in self.sums.values():
            value.zero_()

    def add_output_gradients(
        self, group: int | None, rows: Tensor, initial: Tensor | None, blocks: Blocks = None
    ) -> None:
        """Add the rows J of one output (or sketch), and the rows J0 of the initial model if they are needed.

        Args:
            group: Index of the group. None divides the rows among the groups.
            rows: Gradients J, shape (samples, positions, blocks, k_out); J W, with k_in, if the plan is at the inputs.
            initial: Gradients J0 of the same inputs in the initial model, or None.
            blocks: Block of all rows, or block of each row, shape (r,). None if each row has all blocks.
        """
        if group is None:
            before: list[Tensor | None] = [None] * self._groups
            if initial is not None:
                before = list(initial.tensor_split(self._groups))
            of_rows = blocks.tensor_split(self._groups) if isinstance(blocks, Tensor) else [blocks] * self._groups
            for i, part in enumerate(rows.tensor_split(self._groups)):
                if len(part):
                    self.add_output_gradients((self.start + i) % self._groups, part, before[i], of_rows[i])
            return
        rows = self._divided(rows)
        change = None if initial is None else rows - self._divided(initial)
        for name in self.sums:
            if name in ("K", "agop", "centered"):
                self._add(name, self.sums[name][group], rows, blocks)
            elif name in ("Kb", "double", "ptk") and change is not None:
                self._add(name, self.sums[name][group], change, blocks)

    def add_loss_gradients(self, rows: Tensor, blocks: Blocks = None) -> None:
        """Add the rows g = dl/dh of per-sample losses; see `add_output_gradients`."""
        for name in ("B", "enfa"):
            if name in self.sums:
                self._add(name, self.sums[name], self._divided(rows), blocks)

    def _divided(self, rows: Tensor) -> Tensor:
        """Return rows in the precision of the sums, divided among the parts of the layer."""
        rows = rows.to(self.dtype)
        return rows if self._split is None else self._split.rows(rows)

    def _add(self, name: str, total: Tensor, rows: Tensor, blocks: Blocks) -> None:
        weight = self._weights.get(name)
        if blocks is None:
            add_gram(total, _projected(rows, weight))
            return
        width = rows.shape[2]  # groups of one block
        if isinstance(blocks, int):
            parts = [(blocks, rows)]
        else:
            order = blocks.argsort()
            counts = torch.bincount(blocks, minlength=self._blocks // width).tolist()
            sorted_rows = rows.flatten(0, 1).unsqueeze(1)[order]
            parts = list(enumerate(torch.split(sorted_rows, counts)))
        for block, part in parts:
            if len(part):
                at = slice(block * width, (block + 1) * width)
                add_gram(total[at], _projected(part, None if weight is None else weight[at]))

    def add_weight_gradient(self, matrix: Tensor) -> None:
        """Add the gradient of the summed losses with respect to W, shape (blocks, k_out, k_in)."""
        self.sums["D"] += self.arranged(matrix).to(self.dtype)

    def arranged(self, matrix: Tensor) -> Tensor:
        """Return a matrix of the layer, shape (blocks, k_out, k_in), in the shape of the sums."""
        return matrix if self._split is None else matrix.reshape(self._split.shape)

    def squares(self, matrix: Tensor) -> Tensor:
        """Return the sum of the squares of a matrix in the shape of the sums, for each part, shape (parts,)."""
        return matrix.square().sum().reshape(1) if self._split is None else self._split.squares(matrix)

    def finite(self) -> bool:
        """Return whether no sum overflowed."""
        return all(bool(torch.isfinite(value.sum())) for value in self.sums.values())

    def tiny(self, given: torch.dtype) -> bool:
        """Return whether a sum of squares is zero, or so small that its entries or the gradients have lost digits.

        Args:
            given: Precision of the gradients.
        """
        of_sums, of_gradients = torch.finfo(self.dtype), torch.finfo(torch.promote_types(given, torch.float32))
        limit = max(of_sums.tiny / of_sums.eps, (100 * of_gradients.tiny) ** 2)
        sums = [value for name, value in self.sums.items() if name in ("K", "agop")]
        return any(float(value.diagonal(dim1=-2, dim2=-1).amax()) < limit for value in sums if value.numel())


def _projected(rows: Tensor, weight: Tensor | None) -> Tensor:
    """Return ``J W``, or J itself without a weight."""
    if weight is None:
        return rows
    n, positions, blocks, _ = rows.shape
    with without_autocast(rows.device):
        product = torch.bmm(rows.flatten(0, 1).transpose(0, 1), weight).transpose(0, 1)
    return product.reshape(n, positions, blocks, weight.shape[2])


CELLS = 4
"""Number of parts of a batch whose gradients in W are compared, and number of batches that are split."""
_SETS = ("seen", "blocked", "outside", "shared", "lost", "unpaired", "several", "random", "transformed")
_NONE = -(2**62)  # below every value that processes compare


@dataclass
class Totals:
    """Sums over the data, in float64; only the upper triangle of a square sum is valid.

    Attributes:
        plans: Names and shapes of the sums, by layer name.
        device: Device of the sums.
        samples: Number of samples added.
        outputs: Outputs or sketches that were differentiated; None before the first batch.
        sums: Sums by layer name and name of the sum.
        seen: Names of the layers that were called.
        blocked: Names of the layers that were called with autograd off.
        outside: Names of the layers whose weight is used without calling the module.
        shared: Names of the layers in which a row acts on several samples.
        lost: Names of the layers whose gradients left the range of their precision.
        unpaired: Names of the layers that the initial model calls on other rows.
        several: Names of the layers whose weight is computed more than once in a forward pass.
        random: Names of the layers of passes that draw random numbers.
        transformed: Names of the layers that were called inside of a function of torch.func.
        cells: Number of parts of the data whose gradients in W are compared.
        spread: ``sum |s_i|^2 / n_i`` by layer name, over these parts of n_i samples with the summed gradient s_i; one
            number per part of the layer.
    """

    plans: Mapping[str, SumPlan]
    device: torch.device
    samples: int = 0
    outputs: Outputs | None = None
    sums: dict[str, dict[str, Tensor]] = field(default_factory=dict)
    seen: set[str] = field(default_factory=set)
    blocked: set[str] = field(default_factory=set)
    outside: set[str] = field(default_factory=set)
    shared: set[str] = field(default_factory=set)
    lost: set[str] = field(default_factory=set)
    unpaired: set[str] = field(default_factory=set)
    several: set[str] = field(default_factory=set)
    random: set[str] = field(default_factory=set)
    transformed: set[str] = field(default_factory=set)
    cells: int = 0
    spread: dict[str, Tensor] = field(default_factory=dict)

    def extend(self, plans: Mapping[str, SumPlan]) -> None:
        """Add sums of further layers, which start at zero.

        Args:
            plans: Names and shapes of the sums, by layer name.
        """
        self.plans = {**self.plans, **plans}
        if self.outputs is not None:
            for name, plan in plans.items():
                self.sums[name] = empty_sums(plan, self.outputs.groups, torch.float64, self.device)

    def start(self, outputs: Outputs) -> None:
        """Make the sums for a choice of outputs, or raise if they were made for another choice."""
        if self.outputs is None:
            self.outputs = outputs
            self.sums = {
                name: empty_sums(plan, outputs.groups, torch.float64, self.device) for name, plan in self.plans.items()
            }
        elif replace(outputs, count=0) != replace(self.outputs, count=0):
            raise InputError(
                "the accumulators differentiated different outputs. Pass the same outputs= and rows= to all."
            )

    def add_batch(self, outputs: Outputs, samples: int, new: Mapping[str, BatchSums]) -> None:
        """Add the sums of a completely measured batch."""
        self.start(outputs)
        for name, part in new.items():
            for key, value in part.sums.items() if name not in self.lost else ():
                self.sums[name][key].add_(value)
        self.samples += samples

    def add_cells(self, cells: int, spread: Mapping[str, Tensor]) -> None:
        """Add parts of the data whose gradients in W were measured separately."""
        self.cells += cells
        for name, value in spread.items():
            value = value.to(self.device)
            self.spread[name] = self.spread[name] + value if name in self.spread else value

    def gradient_noise(self, name: str, reduction: str) -> list[float] | None:
        """Estimate the sampling noise of a layer's gradient in W, for samples drawn from a large population.

        With m parts of n_i samples and summed gradients s_i, an analysis of variance gives the variance of one sample,
        ``(sum |s_i|^2 / n_i - |s|^2 / n) / (m - 1)``; the mean over n samples has 1/n of it.

        Args:
            name: Name of the layer.
            reduction: Reduction of the loss over samples, ``"mean"`` or ``"sum"``.

        Returns:
            Standard deviation of the gradient in the Frobenius norm, for each part of the layer; None with fewer than
            two parts of the data.
        """
        if self.cells < 2 or name not in self.spread:
            return None
        split, d = self.plans[name].split, self.sums[name]["D"]
        squares = d.square().sum().reshape(1) if split is None else split.squares(d)
        variance = (self.spread[name] - squares / self.samples).clamp_min(0.0) / (self.cells - 1)
        scale = 1 if reduction == "mean" else self.samples
        return [math.sqrt(value / self.samples) * scale for value in variance.tolist()]

    def add(self, other: Totals) -> None:
        """Add other totals of the same plans."""
        if other.outputs is None:
            return
        self.start(other.outputs)
        for name, sums in self.sums.items():
            for key, value in sums.items():
                value += other.sums[name][key].to(value.device)
        self.samples += other.samples
        self.add_cells(other.cells, other.spread)
        for kind in _SETS:
            getattr(self, kind).update(getattr(other, kind))

    def reduce(self, settings: str, weights: Mapping[str, Mapping[str, Tensor]]) -> None:
        """Add up the totals of all processes, which must have the same settings and weights.

        Args:
            settings: Text that must be the same in all processes.
            weights: Weights that must be the same in all processes, by layer name.
        """
        self._agree(_fingerprint(settings, weights))
        counts = torch.tensor([self.samples, self.cells], device=self.device)
        torch.distributed.all_reduce(counts)
        self.samples, self.cells = counts.tolist()
        parts = [1 if plan.split is None else len(plan.split.names) for plan in self.plans.values()]
        zeros = {k: torch.zeros(n, dtype=torch.float64) for k, n in zip(self.plans, parts, strict=True)}
        spread = torch.cat([self.spread.get(k, zeros[k]).to(self.device) for k in self.plans])
        torch.distributed.all_reduce(spread)
        self.spread = dict(zip(self.plans, torch.split(spread, parts), strict=True))
        for kind in _SETS:
            marks = torch.tensor([name in getattr(self, kind) for name in self.plans], dtype=torch.int32)
            marks = marks.to(self.device)
            torch.distributed.all_reduce(marks, torch.distributed.ReduceOp.MAX)
            setattr(self, kind, {name for name, mark in zip(self.plans, marks.tolist(), strict=True) if mark})
        for sums in self.sums.values():
            for value in sums.values():
                torch.distributed.all_reduce(value)

    def _agree(self, fingerprint: int) -> None:
        """Take the outputs of the other processes, or raise in all processes if they differ.

        The largest and smallest value over the processes are compared: either every process raises or none does, so
        that none is left waiting. A process without a batch has no outputs yet and agrees with any.
        """
        mine = self.outputs
        ways = [_NONE] * 6
        if mine is not None:
            ways = [mine.sketches, mine.groups, int(mine.by_rows)]
            ways += [-way for way in ways]
        header = torch.tensor([0 if mine is None else mine.count, fingerprint, -fingerprint, *ways], device=self.device)
        torch.distributed.all_reduce(header, torch.distributed.ReduceOp.MAX)
        count, high, low, *ways = header.tolist()
        if ways[0] == _NONE:
            raise InputError("no process has measured a batch yet. Call update() before sync().")
        if high != -low:
            raise InputError("the processes measure different models, layers or quantities. Measure the same in all.")
        if ways[:3] != [-way for way in ways[3:]]:
            raise InputError('the processes differentiated different outputs. Pass the same outputs=, not "auto".')
        self.start(Outputs(count, ways[0], ways[1], bool(ways[2])))


def in_processes() -> bool:
    """Return whether torch.distributed is initialized in this process."""
    return torch.distributed.is_available() and torch.distributed.is_initialized()


def _fingerprint(settings: str, weights: Mapping[str, Mapping[str, Tensor]]) -> int:
    """Return a hash that is equal in processes that measure the same weights with the same settings."""
    digest = hashlib.blake2b(settings.encode(), digest_size=7)
    for parts in weights.values():
        for weight in parts.values():
            digest.update(weight.cpu().contiguous().view(torch.uint8).numpy().tobytes())
    return int.from_bytes(digest.digest(), "little")
