"""Feature matrices summed batch by batch."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from featlearn.capture import (
    Batch,
    Capture,
    Forward,
    Trace,
    as_batch,
    batches,
    check_parameters,
    first_rows,
    preserved,
    refresh_hooked_weights,
    run_forward,
)
from featlearn.errors import InputError, UnsupportedModelError
from featlearn.features.decay import WeightDecay, decay_of_layers
from featlearn.features.layer_features import LayerFeatures
from featlearn.features.losses import Loss, summed_loss
from featlearn.features.measures import Plan, parse_memory, plan_sums, resolve_measure
from featlearn.features.models import initial_model, matching_layers, placed
from featlearn.features.outputs import GROUPS, Outputs, check_outputs, cotangents, plan_outputs
from featlearn.features.report import Report
from featlearn.features.sums import BatchSums, empty_sums
from featlearn.layers import Layer, coverage, find_layers, select_layers, unwrap
from featlearn.numerics.seeds import Seed, as_generator

__all__ = ["FeatureAccumulator"]

_EMBEDDINGS = nn.Embedding | nn.EmbeddingBag
_NONE = -(2**62)  # below every value that processes compare


class FeatureAccumulator:
    """Sums of a model's feature matrices over batches: update, merge, reduce over processes, compute.

    The arguments are those of `featlearn.probe`. The model must not change between updates. Between calls it
    is as it was found: hooks live only while a batch is measured.

    Time of an update: one forward pass, one backward pass an output (or sketch) and a product of
    ``rows * k_out^2`` a layer and output; twice that with `initial` if J0 is needed. Memory: one batch's graph, and
    for each layer float64 matrices on its smaller side, whatever the number of samples.

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
        if not isinstance(model, nn.Module):
            raise InputError(f"model must be a torch.nn.Module, got {type(model).__name__}")
        for name, function in (("loss", loss), ("forward", forward)):
            if function is not None and not callable(function):
                raise InputError(f"{name} must be a function, got {function!r}")
        if loss_reduction not in ("mean", "sum"):
            raise InputError(f'loss_reduction must be "mean" or "sum", got {loss_reduction!r}')
        if train_mode not in ("error", "eval"):
            raise InputError(f'train_mode must be "error" or "eval", got {train_mode!r}')
        if weight_decay is not None and loss is None:
            raise InputError("weight_decay is the lambda of FACT, which needs loss= as well")
        check_outputs(outputs)
        # Read from the user's own model: a copy would have other parameters than the optimiser holds.
        decay = decay_of_layers(weight_decay, select_layers(find_layers(unwrap(model)), layers))
        self._original = unwrap(model)
        check_parameters(self._original)
        self._model = placed(self._original, device, dtype)
        # A copy would not follow what is done to the original.
        self._original_mark = [] if self._model is self._original else _mark(self._original)
        self._all_layers = find_layers(self._model)
        self._layers = select_layers(self._all_layers, layers)
        self._decay = decay
        wanted = resolve_measure(measure, initial=initial is not None, loss=loss is not None, decay=bool(decay))
        self._wanted = wanted
        self._initial = None if initial is None else initial_model(initial, self._model, unwrap(model))
        if self._initial is not None:
            check_parameters(self._initial, "the initial model")
        self._initial_layers = [] if self._initial is None else matching_layers(self._layers, self._initial)
        self._loss = loss if wanted & {"B", "D"} else None
        self._loss_reduction, self._outputs_argument = loss_reduction, outputs
        self._forward, self._train_mode, self._dtype = forward, train_mode, dtype
        self._memory = parse_memory(max_memory)
        self._plans: dict[str, Plan] = plan_sums(
            self._layers, wanted, 1 if outputs == "exact" else GROUPS, self._memory
        )
        self._generator = as_generator(generator, "sketch")
        self._weights: dict[str, dict[str, Tensor]] = {}
        self._marks: list[list[tuple[int, float]]] = []
        self._sums: dict[str, dict[str, Tensor]] = {}
        self._outputs: Outputs | None = None
        self._samples = 0
        self._seen: set[str] = set()
        self._blocked: set[str] = set()
        self._outside: set[str] = set()
        self._captures: tuple[Capture, Capture | None] | None = None
        self._spare: tuple[tuple[int, torch.dtype], dict[str, BatchSums]] | None = None
        self._synced = False

    @property
    def samples(self) -> int:
        """Samples measured so far."""
        return self._samples

    @property
    def device(self) -> torch.device:
        """Where the model is, and the data must go."""
        return next(self._model.parameters()).device

    @contextmanager
    def session(self) -> Iterator[FeatureAccumulator]:
        """Keep the hooks attached over several updates, which saves setting them up for each batch."""
        with ExitStack() as stack:
            current = stack.enter_context(
                Capture(
                    self._model,
                    self._layers,
                    train_mode=self._train_mode,
                    weight_gradients="D" in self._wanted,
                )
            )
            initial = None
            if self._initial is not None and "Kb" in self._wanted:
                initial = stack.enter_context(
                    Capture(
                        self._initial,
                        self._initial_layers,
                        train_mode=self._train_mode,
                        what="the initial model",
                    )
                )
            self._captures = (current, initial)
            stack.callback(setattr, self, "_captures", None)
            yield self

    def suggest_batch_size(self, data: Any) -> int:
        """Rows of a batch for data given as tensors, from the activations of two samples.

        A batch's graph holds the pre-activations and about as much again for what lies between layers; it
        may take an eighth of the memory, but not more than 256 MB: larger batches are not faster.
        """
        if self._captures is None:
            with self.session():
                return self.suggest_batch_size(data)
        first = next(iter(batches(data, 2)))  # not one: a model with batch statistics would fail on it
        batch = as_batch(first, self.device, self._dtype, parts=2 if self._forward is None else None)
        self._check_dtype(batch)
        trace = self._captures[0].forward(lambda: self._run(self._model, batch))
        numbers = sum(call.shape.numel() for calls in trace.calls.values() for call in calls)
        each = 4 * trace.output.element_size() * max(numbers, trace.output.numel()) / (batch.size or 1)
        return max(1, min(1024, int(min(self._memory // 8, 2**28) / each)))

    def update(self, batch: Any) -> None:
        """Measure one batch and add it; a batch that fails leaves the sums as they were.

        Args:
            batch: A tensor of inputs, a tuple or list ``(inputs, target)``, or a dict of keyword arguments
                with its target under ``"labels"``.
        """
        if self._synced:
            raise InputError("the sums were reduced over the processes: make a new accumulator for further data")
        with nullcontext() if self._captures is not None else self.session():
            self._read_weights()
            self._update(batch)

    def merge_state(self, other: FeatureAccumulator) -> None:
        """Add the sums of an accumulator of the same model and arguments, exactly as if it had seen its data."""
        if other is self:
            raise InputError("an accumulator cannot be merged into itself: its data would count twice")
        if other._samples == 0:
            return
        if self._samples == 0:
            self._read_weights()
        same = self._plans == other._plans and self._decay == other._decay
        same = same and self._loss_reduction == other._loss_reduction
        if not same or [x.name for x in self._layers] != [x.name for x in other._layers]:
            raise InputError("only accumulators of the same layers and quantities can be merged")
        for name, weights in self._weights.items():
            for key, value in weights.items():
                if not torch.equal(value.cpu(), other._weights[name][key].cpu()):
                    raise InputError(f"the accumulators measured different weights of layer {name!r}")
        assert other._outputs is not None
        self._start(other._outputs)
        for name, sums in self._sums.items():
            for key, value in sums.items():
                value += other._sums[name][key].to(value.device)
        self._samples += other._samples
        self._seen |= other._seen
        self._blocked |= other._blocked
        self._outside |= other._outside

    def sync(self) -> None:
        """Add up the sums of all processes of ``torch.distributed``; each then holds the whole.

        Does nothing in a single process. A process that got no batch must call it as well.
        """
        if not (torch.distributed.is_available() and torch.distributed.is_initialized()) or self._synced:
            return
        reduce = torch.distributed.all_reduce
        if self._outputs is None:
            self._read_weights()
        # What must agree, as its largest and smallest value: every process then raises, or none does, and none is
        # left waiting for the others. A process without a batch has no way of taking outputs and agrees with any.
        plan = self._outputs or Outputs(0, 0, 0)
        mark = self._fingerprint()
        ways = [plan.sketches, plan.groups, -plan.sketches, -plan.groups] if self._outputs else [_NONE] * 4
        header = torch.tensor([plan.count, mark, -mark, *ways], device=self.device)
        reduce(header, torch.distributed.ReduceOp.MAX)
        count, high, low, sketches, groups, least_sketches, least_groups = header.tolist()
        if groups == _NONE:
            raise InputError("no process has measured a batch yet: call update() before sync()")
        if high != -low:
            raise InputError("the processes measure different models, layers or quantities: sync() cannot add them up")
        if (sketches, groups) != (-least_sketches, -least_groups):
            raise InputError('the processes took the outputs in different ways: pass the same outputs=, not "auto"')
        self._start(Outputs(count, sketches, groups))
        samples = torch.tensor([self._samples], device=self.device)
        reduce(samples)
        self._samples = int(samples)
        marks = torch.tensor(
            [[x.name in found for x in self._layers] for found in (self._seen, self._blocked, self._outside)],
            dtype=torch.int32,
            device=self.device,
        )
        reduce(marks, torch.distributed.ReduceOp.MAX)
        self._seen, self._blocked, self._outside = (
            {x.name for x, mark in zip(self._layers, row, strict=True) if mark} for row in marks.tolist()
        )
        for sums in self._sums.values():
            for value in sums.values():
                reduce(value)
        self._synced = True

    def compute(self) -> Report:
        """The report of all that has been added; the accumulator may go on."""
        if self._samples == 0 or self._outputs is None:
            raise InputError("nothing has been measured yet: call update(batch) first")
        outside = self._outside - self._seen
        features = {
            layer.name: self._features(layer, self._outputs) for layer in self._layers if layer.name not in outside
        }
        reason = "its weight is used without calling the module, where no pre-activation can be seen"
        measured = [layer for layer in self._layers if layer.name not in outside]
        rows = coverage(self._model, measured, dict.fromkeys(outside, reason))
        return Report(features, rows, samples=self._samples, outputs=self._outputs)

    # --- one batch -------------------------------------------------------------------------------

    def _update(self, raw: Any) -> None:
        assert self._captures is not None
        capture, initial_capture = self._captures
        batch = as_batch(raw, self.device, self._dtype, parts=2 if self._forward is None else None)
        self._check_dtype(batch)
        trace = capture.forward(lambda: self._run(self._model, batch))
        n = self._count_samples(trace.output, batch)
        if not self._samples:
            self._check_apart(batch, trace.output)
        plan = self._outputs or plan_outputs(self._outputs_argument, trace.output.numel() // n)
        plan = replace(plan, count=trace.output.numel() // n)
        dtype = torch.float64 if trace.output.dtype == torch.float64 else torch.float32
        new = self._batch_sums(plan, dtype)
        if self._wanted & {"K", "Kb"}:
            initial_trace = None
            if initial_capture is not None and self._initial is not None:
                initial = self._initial
                initial_trace = initial_capture.forward(lambda: self._run(initial, batch))
                if initial_trace.output.shape != trace.output.shape:
                    raise InputError(
                        f"the initial model gives outputs {tuple(initial_trace.output.shape)}, "
                        f"the model {tuple(trace.output.shape)}"
                    )
            self._add_output_gradients(plan, trace, initial_trace, new)
            del initial_trace
        if self._loss is not None:
            self._add_loss_gradients(self._loss, batch, n, trace, new)
        for name, sums in new.items():
            if not sums.finite():
                raise InputError(
                    f"the gradients of layer {name!r}, or their squares, are NaN or infinite on this batch; if they "
                    "are only large, pass dtype=torch.float64"
                )
        self._check_not_lost(trace, new)
        outside = self._used_outside(trace)
        # From here on nothing fails: the batch is added as a whole.
        self._start(plan)
        for name, sums in new.items():
            sums.fold_into(self._sums[name])
        self._samples += n
        self._seen |= set(trace.calls)
        self._blocked |= trace.blocked
        self._outside |= outside

    def _batch_sums(self, plan: Outputs, dtype: torch.dtype) -> dict[str, BatchSums]:
        """Empty sums for a batch, in the memory of the last one where it fits."""
        key = (plan.groups, dtype)
        if self._spare is None or self._spare[0] != key:
            sums = {
                layer.name: BatchSums(self._plans[layer.name], plan.groups, self._weights[layer.name], dtype)
                for layer in self._layers
            }
            self._spare = (key, sums)
        else:
            for part in self._spare[1].values():
                part.clear()
        return self._spare[1]

    def _add_output_gradients(
        self, plan: Outputs, trace: Trace, initial: Trace | None, new: Mapping[str, BatchSums]
    ) -> None:
        for group, v in cotangents(plan, trace.output, self._generator):
            rows = trace.gradients(trace.output, v)
            initial_rows = None if initial is None else initial.gradients(initial.output, v.to(initial.output.dtype))
            for layer in self._layers:
                found = rows.pop(layer.name)
                start: list[Tensor | None] = [None] * len(found)
                if initial_rows is not None:
                    found, start = _paired(layer, found, initial_rows.pop(layer.name))
                for j, j0 in zip(found, start, strict=True):
                    new[layer.name].add_output_gradients(group, _flat(j), None if j0 is None else _flat(j0))

    def _add_loss_gradients(self, loss: Loss, batch: Batch, n: int, trace: Trace, new: Mapping[str, BatchSums]) -> None:
        total = summed_loss(loss, trace.output, batch.own_target(), n, self._loss_reduction)
        if "D" in self._wanted:
            rows, gradients = trace.gradients_and_weight_gradients(total)
        else:
            rows, gradients = trace.gradients(total), {}
        for layer in self._layers:
            for g in rows.pop(layer.name):
                new[layer.name].add_loss_gradients(_flat(g))
            if layer.name in gradients:
                new[layer.name].add_weight_gradient(layer.matrix(gradients[layer.name]))

    def _used_outside(self, trace: Trace) -> set[str]:
        """Layers whose module was not called but whose weight the output depends on all the same."""
        idle = [x for x in self._layers if x.name not in trace.calls and x.name not in trace.blocked]
        weights = [x.weight() for x in idle]
        idle_weights = [(x, w) for x, w in zip(idle, weights, strict=True) if w.requires_grad]
        if not idle_weights:
            return set()
        grads = torch.autograd.grad(
            trace.output.sum(), [w for _, w in idle_weights], retain_graph=True, allow_unused=True
        )
        # A weight tied to a layer that was called is accounted for there.
        called = {id(x.weight()) for x in self._layers if x.name in trace.calls}
        return {x.name for (x, w), g in zip(idle_weights, grads, strict=True) if g is not None and id(w) not in called}

    # --- state -----------------------------------------------------------------------------------

    def _read_weights(self) -> None:
        """Copy the weights before the first batch; later, refuse weights that have changed since."""
        marks = [_mark(model) for model in (self._model, self._initial) if model is not None]
        stale = self._model is not self._original and _mark(self._original) != self._original_mark
        if stale or (self._samples and marks != self._marks):
            raise InputError(
                "the model's weights changed "
                + ("since it was copied" if stale else "between two batches")
                + ": make a new FeatureAccumulator after a training step"
            )
        if self._samples:
            return
        self._marks, self._spare = marks, None
        self._weights = {name: {"W": w} for name, w in self._copies(self._model, self._layers).items()}
        if self._initial is not None and "initial" in self._wanted:
            for name, w in self._copies(self._initial, self._initial_layers).items():
                self._weights[name]["W0"] = w

    def _copies(self, model: nn.Module, layers: Iterable[Layer]) -> dict[str, Tensor]:
        with preserved(model), torch.no_grad():
            if self._train_mode == "eval":
                model.eval()
            refresh_hooked_weights(model)
            return {layer.name: layer.matrix(layer.weight()).detach().clone() for layer in layers}

    def _fingerprint(self) -> int:
        """A number that processes share if they measure the same weights in the same way."""
        digest = hashlib.blake2b(digest_size=7)
        plans = {name: (plan.outer, dict(plan.sums)) for name, plan in self._plans.items()}
        digest.update(repr((plans, sorted(self._decay.items()), self._loss_reduction)).encode())
        for weights in self._weights.values():
            for weight in weights.values():
                digest.update(weight.cpu().contiguous().view(torch.uint8).numpy().tobytes())
        return int.from_bytes(digest.digest(), "little")

    def _start(self, plan: Outputs) -> None:
        if self._outputs is not None:
            if (plan.sketches, plan.groups) != (self._outputs.sketches, self._outputs.groups):
                raise InputError("the accumulators took the outputs in different ways: pass the same outputs=")
            return
        self._outputs = plan
        self._sums = {
            layer.name: empty_sums(self._plans[layer.name], plan.groups, torch.float64, self.device)
            for layer in self._layers
        }

    def _features(self, layer: Layer, outputs: Outputs) -> LayerFeatures:
        averages = {}
        for key, value in self._sums[layer.name].items():
            if key == "D":
                averages[key] = value / self._samples if self._loss_reduction == "mean" else value.clone()
            elif value.ndim == 4:
                averages[key] = value / (self._samples * outputs.scale(1))
            else:
                averages[key] = value / self._samples
        flags = [layer.note] if layer.note else []
        if layer.name not in self._seen:
            flags.append(
                "called with autograd off" if layer.name in self._blocked else "not called in the forward pass"
            )
        elif any(not value.any() for key, value in averages.items() if key in ("K", "agop")):
            flags.append("the output does not depend on this layer")
        if outputs.sketches and outputs.groups == 1:
            flags.append("sketched in one group")
        return LayerFeatures(
            layer.name,
            layer.kind,
            layer.shape,
            self._weights[layer.name],
            averages,
            self._decay.get(layer.name),
            tuple(flags),
        )

    def _run(self, model: nn.Module, batch: Batch) -> Any:
        try:
            return run_forward(model, batch, self._forward)
        except RuntimeError as error:
            own = {p.dtype for p in model.parameters() if p.is_floating_point()}
            given = batch.dtypes()
            if "dtype" in str(error) and len(own | given) > 1:
                raise InputError(
                    f"the forward pass failed on mixed dtypes ({error}): the parameters are {_listed(own)} and the "
                    f"inputs {_listed(given)}; cast the data, or pass dtype= to measure a copy in one precision"
                ) from error
            raise

    def _check_not_lost(self, trace: Trace, new: Mapping[str, BatchSums]) -> None:
        """Refuse gradients whose squares vanish below the smallest numbers of their precision."""
        small = [name for name in trace.calls if new[name].tiny()]
        if not small:
            return
        signs = torch.ones_like(trace.output)
        signs.view(-1)[::2] = -1
        rows = trace.gradients(trace.output, signs)
        for name in small:
            largest = max((float(j.abs().max()) for j in rows[name] if j.numel()), default=0.0)
            if largest > 0:
                raise InputError(
                    f"the gradients of layer {name!r} are of size {largest:.1g}, so that their squares are lost in "
                    f"{str(new[name].dtype).removeprefix('torch.')}: pass dtype=torch.float64, or scale the output"
                )

    # --- checks ----------------------------------------------------------------------------------

    def _check_dtype(self, batch: Batch) -> None:
        own = {p.dtype for p in self._model.parameters() if p.is_floating_point()}
        x = batch.inputs
        if (
            self._forward is None
            and len(own) == 1
            and isinstance(x, Tensor)
            and x.is_floating_point()
            and x.dtype not in own
            and not torch.is_autocast_enabled(x.device.type)
        ):
            (dtype,) = own
            raise InputError(
                f"the inputs are {x.dtype} and the model's parameters {dtype}: cast the data, or pass "
                f"dtype={x.dtype} to measure a copy of the model in that precision"
            )

    def _check_apart(self, batch: Batch, output: Tensor) -> None:
        """Refuse a model whose samples act on each other, by its output for the first rows of the batch alone.

        The gradient of an output summed over samples is then not the gradient of each sample: batch statistics,
        or a model that expects samples in its second dimension. A forward function of the user's is trusted.
        """
        first = None if self._forward is not None else first_rows(batch, output.shape[0])
        if first is None:
            return
        state = torch.get_rng_state()
        try:
            alone = run_forward(self._model, first, None)
        except (RuntimeError, ValueError):
            return  # the model takes no batch of this size
        if not isinstance(alone, Tensor) or not torch.equal(state, torch.get_rng_state()):
            return
        expected = output.detach()[: alone.shape[0] if alone.ndim else 1]
        if alone.shape != expected.shape:
            return
        error = float((alone.detach().double() - expected.double()).norm())
        if error > math.sqrt(torch.finfo(output.dtype).eps) * float(expected.double().norm()):
            raise UnsupportedModelError(
                "the samples of a batch act on each other: the first outputs change when the rest of the batch is "
                "left out, so that gradients per sample have no meaning (batch statistics, or samples in another "
                "than the first dimension?); if they are meant to, pass forward=, which is not checked"
            )

    def _count_samples(self, output: Tensor, batch: Batch) -> int:
        if output.ndim == 0:
            raise InputError(
                "the output must have a leading dimension of samples, got a scalar: pass forward= to return the "
                "outputs rather than a loss"
            )
        if output.numel() == 0:
            raise InputError(f"the output is empty: it has shape {tuple(output.shape)}")
        n = output.shape[0]
        if self._forward is None and batch.size is not None and batch.size != n:
            raise InputError(
                f"the batch has {batch.size} rows and the output {n}: samples must come first in both; "
                "pass forward= to rearrange"
            )
        return n


def _mark(model: nn.Module) -> list[tuple[int, float]]:
    """What changes when a parameter does; its version alone does not tell of writes through ``.data``."""
    # An embedding with max_norm writes into its weight at each call, which changes nothing from then on.
    own = {id(m.weight) for m in model.modules() if isinstance(m, _EMBEDDINGS) and m.max_norm is not None}
    with torch.no_grad():
        return [
            (p._version, float(p.norm() if p.is_floating_point() else p.float().norm()))
            for p in model.parameters()
            if id(p) not in own
        ]


def _listed(dtypes: set[torch.dtype]) -> str:
    return " and ".join(sorted(str(dtype) for dtype in dtypes)) or "no floating-point tensor"


def _flat(rows: Tensor) -> Tensor:
    """(samples, positions, groups, k) as (rows, groups, k)."""
    return rows.flatten(0, 1)


def _paired(layer: Layer, rows: list[Tensor], initial: list[Tensor]) -> tuple[list[Tensor], list[Tensor | None]]:
    """Match the gradients at initialisation with those now; one that is missing is zero."""
    if not rows:
        return [torch.zeros_like(j0) for j0 in initial], list(initial)
    if not initial:
        return rows, [torch.zeros_like(j) for j in rows]
    if [j.shape for j in rows] != [j.shape for j in initial]:
        raise InputError(
            f"layer {layer.name!r} is called on other rows in the initial model, so J - J0 has no meaning: "
            "leave double_centered_nfc and ptk_centered_nfc out of measure="
        )
    return rows, list(initial)
