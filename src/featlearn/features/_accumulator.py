"""Feature matrices summed batch by batch."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import replace
from itertools import chain, repeat
from typing import Any

import torch
from torch import Tensor, nn

from featlearn._utils.memory import check_fits, memory_limit, parse_memory
from featlearn._utils.rng import Seed, as_generator
from featlearn._utils.validation import check_option
from featlearn.capture import Batch, Forward, ModelSession, Sizes, Trace, batches, few_rows, rows_of, shared_layers
from featlearn.errors import FeatlearnError, InputError, UnsupportedModelError
from featlearn.features._batch_sums import CELLS, BatchSums, Totals, in_processes, mirrored
from featlearn.features._feature_matrices import LayerFeatures
from featlearn.features._report import Report
from featlearn.features.measurement_plan import (
    GROUPS,
    Outputs,
    check_outputs,
    cotangents,
    plan_outputs,
    plan_sums,
    resolve_measure,
)
from featlearn.features.objective import Loss, WeightDecay, check_loss, decay_of_layers, summed_loss
from featlearn.layers import Layer, coverage, find_layers, select_layers

Rows = dict[str, list[Tensor]]

_LOST = (
    "gradients are NaN, infinite or so small that their squares are lost; pass dtype=torch.float64, or scale the output"
)


class FeatureAccumulator:
    """Sums of a model's feature matrices over batches: update, merge, reduce over processes, compute.

    The arguments are those of `featlearn.probe`. The model must not change between updates. Between calls it
    is as it was found: hooks live only while a batch is measured.

    Time of an update: one forward pass, one backward pass an output (or sketch) and a product of
    ``rows * k_out^2`` a layer and output; twice that with `initial` if J0 is needed. Memory: one batch's graph,
    and for each layer float64 matrices on its smaller side, whatever the number of samples.

    Example:
        >>> import torch, featlearn as fl
        >>> model = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.Tanh(), torch.nn.Linear(4, 1))
        >>> total = fl.FeatureAccumulator(model)
        >>> for batch in torch.randn(4, 8, 3):
        ...     total.update(batch)
        >>> total.compute().samples
        32
    """

    def __init__(
        self,
        model: nn.Module,
        *,
        initial: nn.Module | Mapping[str, Tensor] | None = None,
        loss: Loss | None = None,
        loss_reduction: str = "mean",
        weight_decay: WeightDecay | None = None,
        layers: str | Iterable[str] | None = None,
        outputs: str | int = "auto",
        measure: str | Iterable[str] | None = None,
        forward: Forward | None = None,
        train_mode: str = "error",
        max_memory: int | float | str | None = None,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        generator: Seed = None,
    ) -> None:
        check_loss(loss)
        check_option("loss_reduction", loss_reduction, ("mean", "sum"))
        if weight_decay is not None and loss is None:
            raise InputError("weight_decay is the lambda of FACT, which needs loss= as well")
        check_outputs(outputs)
        self._subject = ModelSession(
            model, layers=layers, forward=forward, train_mode=train_mode, device=device, dtype=dtype
        )
        # Read from the user's own model: a copy has other parameters than the optimizer holds.
        self._decay = decay_of_layers(weight_decay, select_layers(find_layers(self._subject.original), layers))
        self._wanted = resolve_measure(
            measure, initial=initial is not None, loss=loss is not None, decay=bool(self._decay)
        )
        self._initial = None if initial is None else self._subject.for_initial_model(initial)
        self._loss = loss if self._wanted & {"B", "D"} else None
        self._loss_reduction, self._outputs_argument = loss_reduction, outputs
        self._memory, self._max_memory = parse_memory(max_memory), max_memory
        if max_memory is None:
            self._memory = min(self._memory, memory_limit(None))
        self._sizes: Sizes | None = None
        self._sharded = self._subject.sharded
        groups = 1 if outputs == "exact" else GROUPS
        plans = plan_sums(self._subject.layers, self._wanted, groups, self._memory)
        self._generator = as_generator(generator, "sketch")
        self._totals = Totals(plans, self._subject.device)
        self._weights: dict[str, dict[str, Tensor]] = {}
        self._marks: list[list[tuple[int, float]]] = []
        self._spare: tuple[tuple[int, torch.dtype], dict[str, BatchSums]] | None = None
        self._synced = False
        norms = nn.modules.batchnorm._BatchNorm
        self._normalized = any(isinstance(module, norms) for module in self._subject.model.modules())

    @property
    def samples(self) -> int:
        """Samples measured so far."""
        return self._totals.samples

    @contextmanager
    def session(self) -> Iterator[FeatureAccumulator]:
        """Keep the hooks attached over several updates, which saves setting them up for each batch."""
        with ExitStack() as stack:
            stack.enter_context(self._subject.open(weight_gradients="D" in self._wanted))
            if self._initial is not None and "Kb" in self._wanted:
                stack.enter_context(self._initial.open())
            yield self

    def suggest_batch_size(self, data: Any) -> int:
        """Return the batch size for data given as tensors, from the activations of two samples.

        A batch's graph may take an eighth of the memory, but not more than 256 MB: larger batches are not faster. A
        model that does not take two samples gets all of them at once.

        Args:
            data: A tensor, a tuple ``(X, y)`` or a dict, as `featlearn.probe` takes it.
        """
        with self._within_session():
            first = self._subject.batch(next(batches(data, 2)))
            try:
                self._sizes = self._subject.sizes(first)
            except FeatlearnError:
                raise
            except Exception:  # whatever a model says to a batch of another size than it was made for
                return rows_of(data)
        return max(1, min(2048, int(min(self._memory // 8, 2**28) / self._sizes.graph)))

    def update(self, batch: Any) -> None:
        """Measure one batch and add it; a batch that fails leaves the sums as they were.

        Args:
            batch: A tensor of inputs, a tuple or list ``(inputs, target)``, or a dict of keyword arguments
                with its target under ``"labels"``.
        """
        if self._synced:
            raise InputError("the sums were reduced over the processes: make a new accumulator for further data")
        with self._within_session():
            self._read_weights()
            ready = self._subject.batch(batch)
            self._check_memory(ready)
            self._update(ready)

    def merge_state(self, other: FeatureAccumulator) -> None:
        """Add the sums of another accumulator of the same model, exactly as if this one had seen its data."""
        if not isinstance(other, FeatureAccumulator):
            raise InputError(f"only another FeatureAccumulator can be merged, got {type(other).__name__}")
        if other is self:
            raise InputError("an accumulator cannot be merged into itself: its data would count twice")
        if other.samples == 0:
            return
        if self.samples == 0:
            self._read_weights()
        if self._settings() != other._settings():
            raise InputError("only accumulators of the same layers and quantities can be merged")
        for name, weights in self._weights.items():
            for key, value in weights.items():
                if not torch.equal(value.cpu(), other._weights[name][key].cpu()):
                    raise InputError(f"the accumulators measured different weights of layer {name!r}")
        self._totals.add(other._totals)

    def sync(self) -> None:
        """Add up the sums of all processes of ``torch.distributed``; each then holds the whole.

        Does nothing in a single process. A process that got no batch must call it as well.
        """
        if not in_processes() or self._synced:
            return
        if self.samples == 0:
            self._read_weights()
        self._totals.reduce(self._settings(), self._weights)
        self._synced = True

    def compute(self) -> Report:
        """The report of all that has been added; the accumulator may go on."""
        totals = self._totals
        if totals.samples == 0 or totals.outputs is None:
            raise InputError("nothing has been measured yet: call update(batch) first")
        outside = totals.outside - totals.seen
        measured = [layer for layer in self._subject.layers if layer.name not in outside]
        features = {layer.name: self._features(layer, totals.outputs) for layer in measured}
        reason = "its weight is used without calling the module, where no pre-activation can be seen"
        rows = coverage(self._subject.model, measured, dict.fromkeys(outside, reason))
        return Report(features, rows, samples=totals.samples, outputs=totals.outputs)

    # --- one batch -------------------------------------------------------------------------------

    def _update(self, batch: Batch) -> None:
        trace = self._subject.trace(batch)
        if trace.complex:
            raise UnsupportedModelError(
                f"complex weights are not supported: layer {min(trace.complex)!r} has them. Leave it out with layers="
            )
        samples = trace.output.shape[0]
        count = trace.output.numel() // samples
        plan = replace(self._totals.outputs or plan_outputs(self._outputs_argument, count), count=count)
        initial = self._initial_trace(trace, batch)
        total = None
        if self._loss is not None:
            total = summed_loss(self._loss, trace.output, batch.own_target(), samples, self._loss_reduction)
        drawn = self._generator.get_state()
        new = self._batch_sums(plan, torch.float64 if trace.output.dtype == torch.float64 else torch.float32)
        self._add_batch(plan, batch, trace, initial, total, new)
        lost: set[str] = set()
        if out := _out_of_range(trace, new):
            # Their squares leave the range of single precision: these layers once more, in double.
            self._generator.set_state(drawn)
            wide = {name: self._empty(name, plan, torch.float64) for name in out}
            self._add_batch(plan, batch, trace, initial, total, wide)
            new = {**new, **wide}
            lost = _out_of_range(trace, wide)
            if lost >= set(trace.calls):
                raise InputError(
                    f"the gradients of every layer, such as {min(lost)!r}, are NaN, infinite or too small to be "
                    "squared on this batch: scale the output, or pass dtype=torch.float64"
                )
        outside = self._subject.used_outside(trace)
        cells, spread = self._cells(total, trace, new)
        # From here on nothing fails: the batch is added as a whole.
        self._totals.lost |= lost
        self._totals.add_batch(plan, samples, new)
        self._totals.add_cells(cells, {name: value for name, value in spread.items() if name not in lost})
        self._totals.seen |= set(trace.calls)
        self._totals.shared |= trace.shared & set(trace.calls)
        self._totals.blocked |= trace.blocked
        self._totals.outside |= outside

    def _separate(
        self, batch: Batch, trace: Trace, initial: Trace | None, v: Tensor | None, now: Rows, before: Rows | None
    ) -> None:
        """Find the layers whose rows several samples of the batch share, and let the traces give them one by one.

        Args:
            batch: The batch.
            trace: Its trace.
            initial: Its trace in the initial model, or None.
            v: Cotangent that asks about all outputs; None takes one.
            now: Gradients for this cotangent; those of layers with shared rows are taken out.
            before: The same of the initial model, or None.
        """
        if trace.shared or self._sharded:
            return
        seed = self.samples
        shared = shared_layers(trace, v, None if v is None else now, seed)
        if initial is not None:
            shared |= shared_layers(initial, v, None if v is None else before, seed)
        # What is shared in one of the two is taken sample by sample in both.
        self._subject.separate(trace, batch, shared)
        if initial is not None and self._initial is not None:
            self._initial.separate(initial, batch, shared)
        for rows in (now, before or {}):
            rows |= {name: [] for name in shared & rows.keys()}

    def _add_batch(
        self,
        plan: Outputs,
        batch: Batch,
        trace: Trace,
        initial: Trace | None,
        total: Tensor | None,
        new: Mapping[str, BatchSums],
    ) -> None:
        """Add all gradients of a batch to the sums of some layers."""
        if self._wanted & {"K", "Kb"}:
            self._add_output_gradients(plan, batch, trace, initial, new)
        if total is not None:
            self._add_loss_gradients(total, batch, trace, new)

    def _initial_trace(self, trace: Trace, batch: Batch) -> Trace | None:
        if self._initial is None or not self._initial.is_open:
            return None
        initial = self._initial.trace(batch)
        if initial.output.shape != trace.output.shape:
            raise InputError(
                f"the initial model gives outputs {tuple(initial.output.shape)}, the model {tuple(trace.output.shape)}"
            )
        return initial

    def _empty(self, name: str, plan: Outputs, dtype: torch.dtype) -> BatchSums:
        return BatchSums(self._totals.plans[name], plan.groups, self._weights[name], dtype)

    def _batch_sums(self, plan: Outputs, dtype: torch.dtype) -> dict[str, BatchSums]:
        """Empty sums for a batch, in the memory of the last one where it fits."""
        key = (plan.groups, dtype)
        if self._spare is None or self._spare[0] != key:
            self._spare = (key, {name: self._empty(name, plan, dtype) for name in self._totals.plans})
        else:
            for part in self._spare[1].values():
                part.clear()
        return self._spare[1]

    def _add_output_gradients(
        self, plan: Outputs, batch: Batch, trace: Trace, initial: Trace | None, new: Mapping[str, BatchSums]
    ) -> None:
        whole = bool(plan.sketches) or plan.count == 1  # one vector then asks about all outputs
        for i, (group, v) in enumerate(cotangents(plan, trace.output, self._generator)):
            v0 = None if initial is None else v.to(initial.output.dtype)
            now = trace.gradients(trace.output, v)
            before = None if initial is None else initial.gradients(initial.output, v0)
            if i == 0:
                self._separate(batch, trace, initial, v if whole else None, now, before)
            self._add_rows(group, now, before, new)
            start: Iterable[Rows | None] = repeat(None)
            if initial is not None and v0 is not None:
                start = initial.gradients_by_sample(v0)
            for now, before in zip(trace.gradients_by_sample(v), start, strict=False):
                self._add_rows(group, now, before, new)

    def _add_rows(self, group: int, now: Rows, before: Rows | None, new: Mapping[str, BatchSums]) -> None:
        for name, sums in new.items():
            found = now.pop(name)
            start: list[Tensor | None] = [None] * len(found)
            if before is not None:
                found, start = _paired(name, found, before.pop(name))
            for j, j0 in zip(found, start, strict=True):
                sums.add_output_gradients(group, _flat(j), None if j0 is None else _flat(j0))

    def _add_loss_gradients(self, total: Tensor, batch: Batch, trace: Trace, new: Mapping[str, BatchSums]) -> None:
        if "D" in self._wanted:
            rows, gradients = trace.gradients_and_weight_gradients(total)
            for name, matrix in self._matrices(gradients).items():
                if name in new:
                    new[name].add_weight_gradient(matrix)
        else:
            rows = trace.gradients(total)
        if "B" in self._wanted and not self._wanted & {"K", "Kb"}:
            self._separate(batch, trace, None, None, rows, None)
        by_sample: Iterable[Rows] = ()
        if "B" in self._wanted and trace.shared:
            by_sample = trace.gradients_by_sample(_output_gradient(total, trace))
        for part in chain([rows], by_sample):
            for name, sums in new.items():
                for g in part.pop(name):
                    sums.add_loss_gradients(_flat(g))

    def _cells(self, total: Tensor | None, trace: Trace, new: Mapping[str, BatchSums]) -> tuple[int, dict[str, float]]:
        """Compare gradients in W of parts of the batch: their number, and ``sum |s_i|^2 / n_i`` of each layer.

        The first batches are cut, into parts that do not depend on the order of the rows in any simple way; later ones
        count as one part each.
        """
        if total is None or "D" not in self._wanted:
            return 0, {}
        n = trace.output.shape[0]
        parts = min(n, CELLS) if self._totals.cells < CELLS**2 and not self._sharded else 1
        left = {name: sums.sums["D"].double() for name, sums in new.items()}
        if parts == 1:
            return 1, {name: float(value.square().sum()) / n for name, value in left.items()}
        v = _output_gradient(total, trace)
        cell = torch.randperm(n, generator=torch.Generator().manual_seed(self.samples)) % parts
        spread = dict.fromkeys(left, 0.0)
        for i in range(parts):
            mask = cell == i
            if i < parts - 1:
                weights = mask.to(v.device, v.dtype).reshape(-1, *[1] * (v.ndim - 1))
                found = {
                    k: m.double() for k, m in self._matrices(trace.weight_gradients(v * weights)).items() if k in left
                }
                left = {k: value - found[k] if k in found else value for k, value in left.items()}
            else:
                found = left
            for name, value in found.items():
                spread[name] += float(value.square().sum()) / int(mask.sum())
        return parts, spread

    def _matrices(self, gradients: Mapping[str, Tensor]) -> dict[str, Tensor]:
        return {x.name: x.matrix(gradients[x.name]) for x in self._subject.layers if x.name in gradients}

    # --- state -----------------------------------------------------------------------------------

    @contextmanager
    def _within_session(self) -> Iterator[None]:
        with nullcontext() if self._subject.is_open else self.session():
            yield

    def _check_memory(self, batch: Batch) -> None:
        """Refuse a batch whose graph does not fit, from the activations of two of its samples."""
        few = few_rows(batch)
        if few is batch or self._sharded:
            return
        if self._sizes is None:
            try:
                self._sizes = self._subject.sizes(few)
            except FeatlearnError:
                raise
            except Exception:  # whatever a model says to a batch of another size than it was made for
                return
        rows, graph = batch.size or 0, self._sizes.graph
        smaller = max(1, int(memory_limit(self._max_memory) / 4 / graph))
        check_fits(
            rows * graph,
            f"a batch of {rows:,} samples",
            f"pass smaller batches, such as batch_size={min(smaller, 2048)}"
            if smaller < rows
            else "measure less at once",
            self._max_memory,
        )

    def _read_weights(self) -> None:
        """Copy the weights before the first batch; later, refuse weights that have changed since."""
        marks = [subject.mark() for subject in (self._subject, self._initial) if subject is not None]
        outdated = self._subject.is_outdated()
        if outdated or (self.samples and marks != self._marks):
            when = "since it was copied" if outdated else "between two batches"
            raise InputError(f"the model's weights changed {when}: make a new FeatureAccumulator after a training step")
        if self.samples:
            return
        self._marks, self._spare = marks, None
        self._weights = {name: {"W": w} for name, w in self._subject.weights().items()}
        if self._initial is not None and "initial" in self._wanted:
            for name, w in self._initial.weights().items():
                self._weights[name]["W0"] = w

    def _settings(self) -> str:
        """What accumulators must share to be added up."""
        plans = {name: (plan.outer, dict(plan.sums)) for name, plan in self._totals.plans.items()}
        return repr((plans, sorted(self._decay.items()), self._loss_reduction))

    def _features(self, layer: Layer, outputs: Outputs) -> LayerFeatures:
        totals = self._totals
        averages = {}
        for key, value in totals.sums[layer.name].items():
            if layer.name in totals.lost:
                continue
            if key == "D":
                averages[key] = value / (totals.samples if self._loss_reduction == "mean" else 1)
            else:
                averages[key] = mirrored(value) / (totals.samples * (outputs.scale(1) if value.ndim == 4 else 1.0))
        flags = [layer.note] if layer.note else []
        if layer.name in totals.lost:
            flags.append(f"not measured: {_LOST}")
        if self._sharded:
            flags.append("weights are spread over processes: rows that samples share are not looked for")
        if layer.name in totals.shared:
            flags.append("rows shared by samples: measured sample by sample")
        if layer.name not in totals.seen:
            off = layer.name in totals.blocked
            flags.append("called with autograd off" if off else "not called in the forward pass")
        elif any(not value.any() for key, value in averages.items() if key in ("K", "agop")):
            flags.append("the output does not depend on this layer")
        if "D" in averages:
            if layer.name not in self._decay:
                flags.append("no weight decay, so no FACT")
            elif self._normalized:
                flags.append("BatchNorm trains on other gradients than these, so FACT = NFM need not hold")
        if outputs.sketches and outputs.groups == 1:
            flags.append("sketched in one group")
        weights, decay = self._weights[layer.name], self._decay.get(layer.name)
        noise = totals.gradient_noise(layer.name, self._loss_reduction) if "D" in averages else None
        return LayerFeatures(layer.name, layer.kind, layer.shape, weights, averages, decay, tuple(flags), noise)


def _output_gradient(total: Tensor, trace: Trace) -> Tensor:
    """Gradient of the summed losses in the output, through which alone they depend on the model sample by sample."""
    (v,) = torch.autograd.grad(total, trace.output, retain_graph=True, allow_unused=True, materialize_grads=True)
    return v


def _flat(rows: Tensor) -> Tensor:
    """(samples, positions, groups, k) as (rows, groups, k)."""
    return rows.flatten(0, 1)


def _paired(name: str, rows: list[Tensor], initial: list[Tensor]) -> tuple[list[Tensor], list[Tensor | None]]:
    """Match the gradients at initialization with those now; one that is missing is zero."""
    if not rows:
        return [torch.zeros_like(j0) for j0 in initial], list(initial)
    if not initial:
        return rows, [torch.zeros_like(j) for j in rows]
    if [j.shape for j in rows] != [j.shape for j in initial]:
        raise InputError(
            f"layer {name!r} is called on other rows in the initial model, so J - J0 has no meaning: "
            "leave double_centered_nfc and ptk_centered_nfc out of measure="
        )
    return rows, list(initial)


def _out_of_range(trace: Trace, new: Mapping[str, BatchSums]) -> set[str]:
    """Layers whose gradients, or their squares, leave the range of the precision of the sums, at either end."""
    out = {name for name, sums in new.items() if not sums.finite()}
    small = {name for name in trace.calls if name in new and new[name].tiny(trace.output.dtype)} - out
    if not small:
        return out
    signs = torch.ones(trace.output.shape, dtype=trace.output.dtype, device=trace.output.device)
    signs.view(-1)[::2] = -1
    for rows in chain([trace.gradients(trace.output, signs)], trace.gradients_by_sample(signs)):
        # A layer that no gradient reaches is dead, not out of range.
        out |= {name for name in small if any(bool(j.any()) for j in rows[name])}
    return out
