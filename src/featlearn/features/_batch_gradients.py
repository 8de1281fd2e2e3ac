"""Gradients of one batch, added to the sums of its layers."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from itertools import chain, repeat

import torch
from torch import Tensor

from featlearn.capture import Batch, ModelSession, Trace, output_signs, shared_layers
from featlearn.features._batch_sums import BatchSums
from featlearn.features.measurement_plan import Outputs, cotangents

Rows = dict[str, list[Tensor]]


@dataclass(frozen=True, eq=False)
class BatchGradients:
    """Traces of one batch, and the loss on it, whose gradients are added to sums.

    Attributes:
        subject: Session of the model.
        subject_before: Session of the initial model, or None.
        batch: The batch.
        trace: Trace of the batch in the model.
        initial: Trace of the batch in the initial model; None if J0 is not needed.
        total: Sum of the per-sample losses; None without a loss.
        wanted: Sums to accumulate, see `featlearn.features.measurement_plan.QUANTITIES`.
        seed: Seed of random signs and cuts: the number of samples measured before.
        unpaired: Names of the layers that the initial model calls on other rows, so that J - J0 is not defined.
    """

    subject: ModelSession
    subject_before: ModelSession | None
    batch: Batch
    trace: Trace
    initial: Trace | None
    total: Tensor | None
    wanted: frozenset[str]
    seed: int
    unpaired: set[str] = field(default_factory=set)

    def add_to(self, new: Mapping[str, BatchSums], plan: Outputs, generator: torch.Generator) -> None:
        """Add all gradients of the batch to the sums of some layers.

        Args:
            new: Sums by layer name.
            plan: Outputs or sketches to differentiate.
            generator: Generator of the sketches.
        """
        if self.wanted & {"K", "Kb"}:
            self._add_output_gradients(new, plan, generator)
        if self.total is not None:
            self._add_loss_gradients(self.total, new)

    def out_of_range(self, new: Mapping[str, BatchSums]) -> set[str]:
        """Return the layers whose gradients, or their squares, overflow or underflow the precision of the sums."""
        trace = self.trace
        out = {name for name, sums in new.items() if not sums.finite()}
        small = {name for name in trace.calls if name in new and new[name].tiny(trace.output.dtype)} - out
        if not small:
            return out
        signs = output_signs(trace.output, self.seed)
        for rows in chain([trace.gradients(trace.output, signs)], trace.gradients_by_sample(signs)):
            # A layer that no gradient reaches is dead, not out of range.
            out |= {name for name in small if any(bool(j.any()) for j in rows[name])}
        return out

    def spread_over_parts(self, new: Mapping[str, BatchSums], parts: int) -> dict[str, float]:
        """Return ``sum |s_i|^2 / n_i`` per layer over random parts of the batch with weight gradients s_i.

        Args:
            new: Sums of the whole batch by layer name, with "D".
            parts: Number of parts; 1 takes the batch as a whole.
        """
        assert self.total is not None
        n = self.trace.output.shape[0]
        rest = {name: sums.sums["D"].double() for name, sums in new.items()}
        v = self._output_gradient(self.total) if parts > 1 else None
        cell = torch.randperm(n, generator=torch.Generator().manual_seed(self.seed)) % parts
        spread = dict.fromkeys(rest, 0.0)
        for i in range(parts):
            mask, gradients = cell == i, rest
            if v is not None and i < parts - 1:  # the last part is the rest
                weights = mask.to(v.device, v.dtype).reshape(-1, *[1] * (v.ndim - 1))
                matrices = self.trace.weight_gradients(v * weights)
                gradients = {name: matrix.double() for name, matrix in matrices.items() if name in rest}
                rest = rest | {name: rest[name] - value for name, value in gradients.items()}
            for name, value in gradients.items():
                spread[name] += float(value.square().sum()) / int(mask.sum())
        return spread

    def _add_output_gradients(self, new: Mapping[str, BatchSums], plan: Outputs, generator: torch.Generator) -> None:
        trace, initial = self.trace, self.initial
        whole = bool(plan.sketches) or plan.count == 1  # each vector then covers all outputs
        for i, (group, v) in enumerate(cotangents(plan, trace.output, generator)):
            now, before = trace.gradients(trace.output, v), None
            before_by_sample: Iterable[Rows | None] = repeat(None)
            v0 = v if initial is None else v.to(initial.output.dtype)
            if initial is not None:
                before = initial.gradients(initial.output, v0)
            if i == 0:
                self._separate(v if whole else None, now, before)
            if initial is not None:
                before_by_sample = initial.gradients_by_sample(v0)
            self._add_rows(group, now, before, new, trace)
            for a, (rows, rows_before) in enumerate(zip(trace.gradients_by_sample(v), before_by_sample, strict=False)):
                self._add_rows(group, rows, rows_before, new, trace.of_sample(a))

    def _add_rows(self, group: int, now: Rows, before: Rows | None, new: Mapping[str, BatchSums], trace: Trace) -> None:
        for name, sums in new.items():
            rows = now.pop(name)
            initial: list[Tensor | None] = [None] * len(rows)
            blocks_of_calls = trace.blocks(name)
            if before is not None:
                pair = _paired(rows, before.pop(name))
                # Which rows an expert gets is a choice of the model: those of the initial model are others.
                if pair is None or any(blocks is not None for blocks in blocks_of_calls):
                    self.unpaired.add(name)
                else:
                    rows, initial = pair
            for j, j0, blocks in zip(rows, initial, blocks_of_calls or [None] * len(rows), strict=False):
                sums.add_output_gradients(group, j.flatten(0, 1), None if j0 is None else j0.flatten(0, 1), blocks)

    def _add_loss_gradients(self, total: Tensor, new: Mapping[str, BatchSums]) -> None:
        if "D" in self.wanted:
            rows, gradients = self.trace.gradients_and_weight_gradients(total)
            for name, matrix in gradients.items():
                if name in new:
                    new[name].add_weight_gradient(matrix)
        else:
            rows = self.trace.gradients(total)
        by_sample: Iterable[Rows] = ()
        if "B" in self.wanted:
            if not self.wanted & {"K", "Kb"}:
                self._separate(None, rows, None)
            if self.trace.shared:
                by_sample = self.trace.gradients_by_sample(self._output_gradient(total))
        for a, part in enumerate(chain([rows], by_sample), start=-1):
            trace = self.trace if a < 0 else self.trace.of_sample(a)
            for name, sums in new.items():
                for g, blocks in zip(part.pop(name), trace.blocks(name), strict=False):
                    sums.add_loss_gradients(g.flatten(0, 1), blocks)

    def _separate(self, v: Tensor | None, now: Rows, before: Rows | None) -> None:
        """Find the layers whose rows are shared by samples, and switch their traces to sample-by-sample gradients.

        Args:
            v: Cotangent that covers all outputs. None draws one.
            now: Gradients for this cotangent; those of layers with shared rows are removed.
            before: The same gradients in the initial model; None if they are not needed.
        """
        if self.trace.shared or self.subject.sharded:
            return
        initial = self.initial if before is not None else None
        shared = shared_layers(self.trace, v, None if v is None else now, self.seed)
        if initial is not None:
            shared |= shared_layers(initial, v, None if v is None else before, self.seed)
        # Layers that share rows in one of the two models are measured sample by sample in both.
        self.subject.separate(self.trace, self.batch, shared)
        if initial is not None and self.subject_before is not None:
            self.subject_before.separate(initial, self.batch, shared)
        for rows in (now, before or {}):
            rows |= {name: [] for name in shared & rows.keys()}

    def _output_gradient(self, total: Tensor) -> Tensor:
        """Return the gradient of the summed losses in the output."""
        (v,) = torch.autograd.grad(
            total, self.trace.output, retain_graph=True, allow_unused=True, materialize_grads=True
        )
        return v


def _paired(rows: list[Tensor], initial: list[Tensor]) -> tuple[list[Tensor], list[Tensor | None]] | None:
    """Match the gradients at initialization with those now; missing gradients are zero. None if they do not match."""
    rows = rows or [torch.zeros_like(j0) for j0 in initial]
    initial = initial or [torch.zeros_like(j) for j in rows]
    if [j.shape for j in rows] != [j.shape for j in initial]:
        return None
    return rows, list(initial)
