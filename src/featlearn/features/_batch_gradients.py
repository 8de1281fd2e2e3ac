"""Gradients of one batch, added to the sums of its layers."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from itertools import chain, repeat

import torch
from torch import Tensor

from featlearn.capture import Batch, ModelSession, Owners, Profile, Trace, output_signs, row_profiles, shared_layers
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

    def spread_over_parts(self, new: Mapping[str, BatchSums], parts: int) -> dict[str, Tensor]:
        """Return ``sum |s_i|^2 / n_i`` per layer, shape (parts of the layer,), over random parts of the batch.

        Here s_i is the gradient of the summed losses of n_i samples in the weight.

        Args:
            new: Sums of the whole batch by layer name, with "D".
            parts: Number of parts; 1 takes the batch as a whole.
        """
        assert self.total is not None
        n = self.trace.output.shape[0]
        rest = {name: sums.sums["D"].double() for name, sums in new.items()}
        v = self._output_gradient(self.total) if parts > 1 else None
        cell = torch.randperm(n, generator=torch.Generator().manual_seed(self.seed)) % parts
        spread = {name: torch.zeros_like(new[name].squares(value)) for name, value in rest.items()}
        for i in range(parts):
            mask, gradients = cell == i, rest
            if v is not None and i < parts - 1:  # the last part is the rest
                weights = mask.to(v.device, v.dtype).reshape(-1, *[1] * (v.ndim - 1))
                matrices = self.trace.weight_gradients(v * weights)
                gradients = {k: new[k].arranged(matrix).double() for k, matrix in matrices.items() if k in rest}
                rest = rest | {name: rest[name] - value for name, value in gradients.items()}
            for name, value in gradients.items():
                spread[name] += new[name].squares(value) / int(mask.sum())
        return spread

    def _add_output_gradients(self, new: Mapping[str, BatchSums], plan: Outputs, generator: torch.Generator) -> None:
        trace, initial = self.trace, self.initial
        # Where functions round to single precision, each output is differentiated, whatever the batch it is in.
        seed = None if trace.lowered else self.seed
        for i, (group, v) in enumerate(cotangents(plan, trace.output, generator, seed)):
            v0 = v if initial is None else v.to(initial.output.dtype)
            before = None if initial is None else initial.gradients(initial.output, v0)
            if i == 0 and not (trace.shared or self.subject.sharded):
                self._add_first(new, plan, group, v, v0, before)
            else:
                self._add_streamed(group, v, before, new)
            before_by_sample: Iterable[Rows | None] = repeat(None)
            if initial is not None:
                before_by_sample = initial.gradients_by_sample(v0)
            for a, (rows, rows_before) in enumerate(zip(trace.gradients_by_sample(v), before_by_sample, strict=False)):
                of_sample = (self.seed + a) % plan.groups if group is None else group
                self._add_rows(of_sample, rows, rows_before, new, trace.of_sample(a))

    def _add_first(
        self, new: Mapping[str, BatchSums], plan: Outputs, group: int | None, v: Tensor, v0: Tensor, before: Rows | None
    ) -> None:
        """Add the gradients of the first vector, and find the layers whose rows are shared by samples."""
        known: dict[str, dict[int, Profile]] = {}
        self._add_streamed(group, v, before, new, None if self.trace.has_own_rows else known)
        owners = Owners()
        covers_all = plan.covers_all(v.dtype) and not (self.trace.lowered and not plan.sketches and plan.count > 1)
        profiles = known if covers_all else None
        shared = shared_layers(self.trace, v if covers_all else None, profiles, self.seed, owners)
        initial = self.initial if before is not None else None
        if initial is not None and before is not None:
            vector, known_before, owners_before = v0 if covers_all else None, None, Owners()
            if covers_all and not initial.has_own_rows:
                known_before = {name: dict(enumerate(map(row_profiles, rows))) for name, rows in before.items()}
            shared |= shared_layers(initial, vector, known_before, self.seed, owners_before)
            self.unpaired.update(_with_other_owners(owners, owners_before))
        self._separate(shared, before)
        for name in shared & new.keys():
            new[name].clear()

    def _add_streamed(
        self,
        group: int | None,
        v: Tensor,
        before: Rows | None,
        new: Mapping[str, BatchSums],
        profiles: dict[str, dict[int, Profile]] | None = None,
    ) -> None:
        """Add the gradients of one vector while the backward pass makes them; fill their profiles if given."""
        trace = self.trace
        left = {name: self._paired_calls(name, before[name]) for name in new} if before is not None else {}

        def consume(name: str, index: int, rows: Tensor) -> None:
            if profiles is not None:
                profiles.setdefault(name, {})[index] = row_profiles(rows)
            if name in new:
                initial = left[name].pop(index, None) if name in left else None
                new[name].add_output_gradients(group, rows, initial, trace.calls[name][index].blocks)

        trace.stream(trace.output, v, consume)
        for name, rows_of in left.items():  # calls that the output no longer depends on: J = 0
            for index, initial in rows_of.items():
                blocks = trace.calls[name][index].blocks
                new[name].add_output_gradients(group, torch.zeros_like(initial), initial, blocks)

    def _paired_calls(self, name: str, initial: list[Tensor]) -> dict[int, Tensor]:
        """Return the gradients J0 of a layer by call; none if the initial model calls it on other rows."""
        calls = self.trace.calls.get(name, ())
        if not initial or not calls:
            return {}
        assert self.initial is not None
        # Which rows an expert gets is a choice of the model: those of the initial model are others.
        same = [call.at for call in calls] == [call.at for call in self.initial.calls[name]]
        if not same or any(call.blocks is not None for call in calls):
            self.unpaired.add(name)
            return {}
        return dict(enumerate(initial))

    def _add_rows(
        self, group: int | None, now: Rows, before: Rows | None, new: Mapping[str, BatchSums], trace: Trace
    ) -> None:
        """Add the gradients of one sample in the layers with shared rows."""
        for name, sums in new.items():
            rows = now.pop(name)
            initial: list[Tensor | None] = [None] * len(rows)
            blocks_of_calls = trace.blocks(name)
            if before is not None:
                pair = _paired(rows, before.pop(name))
                if pair is None or any(blocks is not None for blocks in blocks_of_calls):
                    self.unpaired.add(name)
                else:
                    rows, initial = pair
            for j, j0, blocks in zip(rows, initial, blocks_of_calls or [None] * len(rows), strict=False):
                sums.add_output_gradients(group, j, j0, blocks)

    def _add_loss_gradients(self, total: Tensor, new: Mapping[str, BatchSums]) -> None:
        trace = self.trace
        if "B" in self.wanted and not self.wanted & {"K", "Kb"} and not (trace.shared or self.subject.sharded):
            self._separate(shared_layers(trace, None, None, self.seed), None)
        if "D" in self.wanted:
            for name, matrix in trace.stream_with_weights(total, self._add_loss_rows(new)).items():
                if name in new:
                    new[name].add_weight_gradient(matrix)
        else:
            trace.stream(total, None, self._add_loss_rows(new))
        if "B" in self.wanted and trace.shared:
            for a, rows in enumerate(trace.gradients_by_sample(self._output_gradient(total))):
                for name, sums in new.items():
                    for g, blocks in zip(rows.pop(name), trace.of_sample(a).blocks(name), strict=False):
                        sums.add_loss_gradients(g, blocks)

    def _add_loss_rows(self, new: Mapping[str, BatchSums]) -> Callable[[str, int, Tensor], None]:
        def consume(name: str, index: int, rows: Tensor) -> None:
            if name in new:
                new[name].add_loss_gradients(rows, self.trace.calls[name][index].blocks)

        return consume

    def _separate(self, shared: set[str], before: Rows | None) -> None:
        """Switch the traces to sample-by-sample gradients for layers whose rows are shared by samples.

        Args:
            shared: Names of the layers.
            before: Gradients in the initial model; those of these layers are removed. None if they are not needed.
        """
        # Layers that share rows in one of the two models are measured sample by sample in both.
        self.subject.separate(self.trace, self.batch, shared)
        if before is not None and self.initial is not None and self.subject_before is not None:
            self.subject_before.separate(self.initial, self.batch, shared)

    def _output_gradient(self, total: Tensor) -> Tensor:
        """Return the gradient of the summed losses in the output."""
        (v,) = torch.autograd.grad(
            total, self.trace.output, retain_graph=True, allow_unused=True, materialize_grads=True
        )
        return v


def _with_other_owners(now: Owners, before: Owners) -> set[str]:
    """Return the layers in which the same row is one of another sample in the initial model."""
    result = now.keys() ^ before.keys()  # in the order of the samples in one model only
    for name in now.keys() & before.keys():
        for i in now[name].keys() & before[name].keys():
            a, b = now[name][i], before[name][i]
            if a.shape != b.shape or bool(((a != b) & ~a.isnan() & ~b.isnan()).any()):
                result.add(name)
    return result


def _paired(rows: list[Tensor], initial: list[Tensor]) -> tuple[list[Tensor], list[Tensor | None]] | None:
    """Match the gradients at initialization with those now; missing gradients are zero. None if they do not match."""
    rows = rows or [torch.zeros_like(j0) for j0 in initial]
    initial = initial or [torch.zeros_like(j) for j in rows]
    if [j.shape for j in rows] != [j.shape for j in initial]:
        return None
    return rows, list(initial)
