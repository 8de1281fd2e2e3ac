"""Accumulation of feature matrices over batches."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from featlearn._utils.memory import check_fits, memory_limit, parse_memory
from featlearn._utils.rng import Seed, as_generator
from featlearn._utils.validation import check_option
from featlearn.capture import Batch, Forward, ModelSession, Sizes, batches, few_rows, preserved_rng, rows_of
from featlearn.errors import FeatlearnError, InputError, UnsupportedModelError
from featlearn.features._batch_gradients import BatchGradients
from featlearn.features._batch_sums import CELLS, BatchSums, Totals, in_processes
from featlearn.features._feature_matrices import LayerFeatures
from featlearn.features._merging import totals_of_layers
from featlearn.features._report import Report
from featlearn.features._split import SplitArgument, parse_split, plan_splits
from featlearn.features.measurement_plan import (
    GROUPS,
    Outputs,
    SumPlan,
    check_outputs,
    plan_outputs,
    plan_sums,
    resolve_measure,
)
from featlearn.features.objective import Loss, WeightDecay, check_loss, decay_of_layers, summed_loss
from featlearn.layers import Layer, coverage
from featlearn.linalg.symmetric_products import mirrored

_LOST = (
    "gradients are NaN, infinite or so small that their squares are lost; pass dtype=torch.float64, or scale the output"
)


_LATE = 8  # times that a batch is run again, because it has products that no batch had before
_SMALL = 1e-3  # rounding errors of sums whose terms are a thousand times larger than other gradients, and more
_OF_PAIRS = ("Kb", "double", "ptk")  # sums of J - J0


class FeatureAccumulator:
    """Sums of a model's feature matrices over batches: update, merge, reduce over processes, compute.

    The model must not change between updates. After each call it is in the state it was in before: hooks are attached
    only while a batch is measured.

    Time of an update: one forward pass, one backward pass per output (or sketch) and a product of ``rows * k_out^2``
    per layer and output; twice that with `initial` if J0 is needed. Memory: the graph of one batch, and per layer
    float64 matrices on its smaller side, independent of the number of samples.

    Args:
        model: Module to measure. Compiled and DistributedDataParallel modules are unwrapped.
        initial: Module before training, or its state dict, for centered quantities. None leaves them out.
        loss: Function ``loss(output, target)`` that returns one value per sample, or a scalar. None leaves the eNFA and
            FACT out.
        loss_reduction: Reduction of the trained loss over samples, and of a scalar loss: ``"mean"`` or ``"sum"``.
        weight_decay: Lambda of FACT, as in ``torch.optim.SGD``: number, ``{glob: number}``, or the optimizer. None
            leaves FACT out.
        layers: Glob pattern of layer names, or several. None takes all layers.
        outputs: ``"exact"`` differentiates each output, an integer is the number of random output vectors, ``"auto"``
            is exact for up to 64 outputs and takes 16 vectors for more.
        measure: Quantities to measure, see `featlearn.features.QUANTITIES`. None takes all that the other arguments
            allow.
        forward: Function ``forward(model, batch)`` that returns the output, samples first. None calls the model on the
            inputs of the batch.
        train_mode: ``"error"`` refuses BatchNorm or dropout in training mode; ``"eval"`` switches the model to
            evaluation mode and restores it.
        max_memory: Limit for the sums and a batch, in bytes or as text such as ``"2 GB"``. None takes half of the
            memory of the machine, at most what is available.
        device: Device to measure on. A device other than the model's measures a copy. None is the model's.
        dtype: Precision to measure in. A dtype other than the model's measures a copy. None is the model's.
        generator: Generator or seed of the random output vectors. None is the seed 0.
        split: Layers to measure in parts, each a layer of its own: ``"experts"`` (one per expert of a stack),
            ``"heads"`` (one per head of each attention projection), ``{glob: number}`` (equal parts of the outputs), or
            a list of these. Patterns here and in other arguments match names of whole layers. None splits no layer.
        embeddings: Whether the tables of ``nn.Embedding`` are layers, whose inputs are unit vectors.
        rows: ``"all"`` measures the rows of the batches. ``"sample"`` takes them as a random sample of a larger data
            set, whose correlations are estimated: four groups of rows are summed separately, so that few rows do not
            decrease correlations, and standard errors include the sampling of rows. Take at least four rows.

    Raises:
        InputError: An argument is invalid, or the sums do not fit into the memory.

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
        split: SplitArgument | None = None,
        embeddings: bool = False,
        rows: str = "all",
    ) -> None:
        check_loss(loss)
        check_option("loss_reduction", loss_reduction, ("mean", "sum"))
        self._by_rows = check_option("rows", rows, ("all", "sample")) == "sample"
        if weight_decay is not None and loss is None:
            raise InputError("weight_decay needs loss=: FACT is computed from the gradient of the loss. Pass loss=.")
        check_outputs(outputs)
        self._split, self._remarks = parse_split(split), dict[str, str]()
        self._embeddings = bool(embeddings)
        self._subject = ModelSession(
            model,
            layers=layers,
            forward=forward,
            train_mode=train_mode,
            device=device,
            dtype=dtype,
            operations=True,
            embeddings=self._embeddings,
        )
        self._weight_decay, self._decay = weight_decay, dict[str, float]()
        self._arguments: dict[str, Any] = {"measure": measure, "initial": initial is not None, "loss": loss is not None}
        self._wanted = resolve_measure(**self._arguments, decay=weight_decay is not None)
        self._initial = None if initial is None else self._subject.for_initial_model(initial)
        self._loss, self._loss_argument = loss, loss
        self._loss_reduction, self._outputs_argument = loss_reduction, outputs
        self._memory, self._max_memory = parse_memory(max_memory), max_memory
        if max_memory is None:
            self._memory = min(self._memory, memory_limit(None))
        self._sizes: Sizes | None = None
        self._seed = generator
        self._generator = as_generator(generator, "sketch")
        self._totals = Totals({}, self._subject.device)
        self._weights: dict[str, dict[str, Tensor]] = {}
        self._marks: list[list[tuple[int, float]]] = []
        self._spare: tuple[tuple[int, torch.dtype], dict[str, BatchSums]] | None = None
        self._synced = False
        self._held: ExitStack | None = None
        norms = nn.modules.batchnorm._BatchNorm
        self._normalized = any(isinstance(module, norms) for module in self._subject.model.modules())
        self._planned, self._frozen = False, True

    def _plan(self) -> None:
        """Choose the sums of each layer, once the layers are known."""
        if self._planned:
            return
        plans = self._plan_layers(self._subject.layers)
        self._totals = Totals(plans, self._subject.device)
        self._planned = True

    def _plan_layers(self, layers: Sequence[Layer]) -> dict[str, SumPlan]:
        """Choose the sums of some layers, and pass the layers on to the sessions."""
        subject = self._subject
        # Read from the original model: the optimizer holds its parameters, not those of a copy.
        self._decay = decay_of_layers(self._weight_decay, subject.layers_of_original())
        self._wanted = resolve_measure(**self._arguments, decay=bool(self._decay))
        self._loss = self._loss_argument if self._wanted & {"B", "D"} else None
        groups = 1 if self._outputs_argument == "exact" and not self._by_rows else GROUPS
        everything = self._arguments["measure"] is None
        # A backward pass in half precision would round J W, which is computed in single precision otherwise.
        rough = subject.mixed or any(p.dtype.itemsize < 4 for p in subject.model.parameters() if p.is_floating_point())
        # Before the first forward pass not all layers are known, so that patterns may match none.
        strict = subject.prepared and not self._planned
        splits, remarks = plan_splits(self._split, subject.model, layers, strict=strict)
        self._remarks = {**self._remarks, **remarks}
        plans = plan_sums(layers, self._wanted, groups, self._memory, everything or rough, splits)
        if rough:
            plans = {name: replace(plan, at_inputs=False) for name, plan in plans.items()}
        if self._initial is not None:
            self._initial.adopt(subject)
        subject.at_inputs |= {name for name, plan in plans.items() if plan.at_inputs}
        return plans

    def _add_late_layers(self) -> None:
        """Add layers that an earlier pass did not have, such as an expert without tokens; their sums start at zero."""
        assert self._held is not None
        new = self._subject.add_late_products()
        self._held.close()
        self._totals.extend(self._plan_layers(new) if new else {})
        self._spare = None
        self._weights |= self._weights_of({layer.name for layer in new})
        self._reopen()

    def _prepare(self, batch: Batch) -> None:
        """Find the layers, and the memory of a sample, in a forward pass of a few samples before the first batch."""
        subject, few = self._subject, few_rows(batch)
        if self._planned:
            return
        try:
            self._sizes = subject.prepare(few)
        except FeatlearnError:
            raise
        except Exception:  # any error that a model may raise for a batch of another size
            if few is batch:
                raise
            subject.prepare(batch)
        self._plan()

    @property
    def samples(self) -> int:
        """Number of samples measured so far."""
        return self._totals.samples

    @contextmanager
    def session(self) -> Iterator[FeatureAccumulator]:
        """Keep the hooks attached over several updates, which saves attaching them for each batch.

        Yields:
            This accumulator.
        """
        with ExitStack() as stack:
            stack.enter_context(preserved_rng())  # data may draw random numbers before the first pass
            self._held = stack  # the hooks are attached when the layers are known
            try:
                yield self
            finally:
                self._held = None

    def suggest_batch_size(self, data: Any) -> int:
        """Return the batch size for data given as tensors, from the activations of two samples.

        The graph of a batch may take an eighth of the memory, but not more than 256 MB, and the pre-activations of a
        layer about 4 MB, which caches hold: larger batches are not faster. Batches are of equal size.

        Args:
            data: Tensor, tuple ``(X, y)`` or dict, as in `featlearn.probe`.

        Returns:
            A batch size between 1 and 2048; the number of all samples if the model does not accept two samples.
        """
        try:
            self._prepare(self._subject.batch(next(batches(data, 2))))
        except FeatlearnError:
            raise
        except Exception:  # any error that a model may raise for a batch of another size
            return rows_of(data)
        if self._sizes is None:
            return rows_of(data)
        sizes, rows = self._sizes, rows_of(data)
        most = min(2048, int(min(self._memory // 8, 2**28) / sizes.graph), max(8, int(2**22 / sizes.largest)))
        return math.ceil(rows / math.ceil(rows / most)) if most > 1 else 1

    def update(self, batch: Any) -> None:
        """Measure one batch and add it. A batch that raises an error leaves the sums unchanged.

        Args:
            batch: Tensor of inputs, tuple or list ``(inputs, target)``, or dict of keyword arguments with its target
                under ``"labels"``.

        Raises:
            InputError: The batch is invalid or does not fit into the memory, the weights have changed since the first
                batch, or `sync` was called.
            UnsupportedModelError: A layer has complex weights.
        """
        if self._synced:
            raise InputError("the sums were already reduced over the processes. Make a new accumulator for more data.")
        ready = self._subject.batch(batch)
        self._prepare(ready)
        with self._within_session():
            self._read_weights()
            self._check_memory(ready)
            self._update(ready)

    def reset(self) -> None:
        """Drop all sums, and measure the present weights of the model from the next batch on.

        For use after a training step: a new accumulator would search the layers and make its checks again. Layers,
        checks and the initial model are kept, and random output vectors start again if `generator` is a seed. The
        structure of the model must be as before.

        Raises:
            InputError: A parameter is NaN or infinite.

        Example:
            >>> import torch, featlearn as fl
            >>> model = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.Tanh(), torch.nn.Linear(4, 1))
            >>> total = fl.FeatureAccumulator(model)
            >>> total.update(torch.randn(8, 3))
            >>> _ = model[0].weight.data.mul_(2.0)
            >>> total.reset()
            >>> total.update(torch.randn(8, 3))
            >>> total.compute().samples
            8
        """
        self._subject.refresh()
        self._generator = as_generator(self._seed, "sketch")
        self._weights, self._marks, self._spare, self._synced = {}, [], None, False
        self._totals = Totals({}, self._subject.device)
        self._planned = False
        if self._subject.prepared:
            self._plan()  # the weight decay of an optimizer may have changed

    def merge_state(self, other: FeatureAccumulator) -> None:
        """Add the sums of another accumulator of the same model, as if this one had measured its data.

        Args:
            other: Accumulator of the same weights, layers and quantities.

        Raises:
            InputError: The other accumulator is this one, or does not measure the same weights and quantities.
        """
        if not isinstance(other, FeatureAccumulator):
            raise InputError(f"other must be a FeatureAccumulator, got {type(other).__name__}.")
        if other is self:
            raise InputError("an accumulator cannot be merged into itself: its data would count twice.")
        if other.samples == 0:
            return
        if self.samples == 0:
            if not self._planned:
                self._subject.adopt(other._subject)
                self._plan()
            self._read_weights()
        names = self._subject.names_of_layers(other._subject)
        if names is None or self._settings(names.values()) != other._settings(names):
            raise InputError("only accumulators of the same layers and quantities can be merged.")
        # Layers that only the data of the other accumulator have, such as experts.
        late = self._subject.late_layers_of(other._subject)
        weights = self._weights | {name: {"W": w} for name, w in self._subject.weights(late.values()).items()}
        names |= {name: layer.name for name, layer in late.items()}
        for name, own in names.items():
            for key, value in weights[own].items():
                if not torch.equal(value.cpu(), other._weights[name][key].cpu().reshape(value.shape)):
                    raise InputError(f"the accumulators measured different weights of layer {own!r}.")
        self._subject.add_layers_of(other._subject, late.values())
        if late:
            self._totals.extend(self._plan_layers(list(late.values())))
            self._weights |= self._weights_of({layer.name for layer in late.values()})
            self._spare = None
            if self._subject.is_open:
                self._reopen()
        self._totals.add(totals_of_layers(other._totals, names, self._totals.plans))

    def sync(self) -> None:
        """Add up the sums of all processes of ``torch.distributed``; each process then holds the total.

        Does nothing in a single process. A process without a batch must call it as well.

        Raises:
            InputError: The processes measure different weights or quantities, or no process has measured a batch.
        """
        if not in_processes() or self._synced:
            return
        if self.samples == 0:
            self._plan()
            self._read_weights()
        self._totals.reduce(self._settings(), self._weights)
        self._synced = True

    def compute(self, *, leave_out: Collection[str] = ()) -> Report:
        """Return the report of all batches added so far. Further batches may be added afterwards.

        Args:
            leave_out: Names of layers that the report does not contain, which saves the time of preparing their sums.

        Returns:
            Report with one entry per layer.

        Raises:
            InputError: No batch has been added.
        """
        totals = self._totals
        if totals.samples == 0 or totals.outputs is None:
            raise InputError("no batch has been measured yet. Call update(batch) first.")
        outside = totals.outside - totals.seen
        measured = [layer for layer in self._subject.layers if layer.name not in outside]
        wanted = [layer for layer in measured if layer.name not in leave_out]
        of_layers = {layer.name: self._features(layer, totals.outputs) for layer in wanted}
        features = {part.name: part for parts in of_layers.values() for part in parts}
        reasons = dict.fromkeys(outside, "its weight is used without calling the module")
        off = {layer.name for layer in measured if layer.name not in totals.seen}
        reasons |= {name: self._why_unseen(name) for name in off}
        uses = None if self._subject.sharded else self._subject.uses
        taken = [layer for layer in measured if layer.name not in off]
        left = [layer for layer in measured if layer.name in off] + self._subject.other_products()
        rows = [
            replace(row, layers=tuple(part.name for name in row.layers for part in of_layers.get(name, [])))
            for row in coverage(self._subject.model, taken, reasons, uses, left, self._embeddings)
        ]
        name = self._subject.output_name
        return Report(features, rows, samples=totals.samples, outputs=totals.outputs, output_name=name)

    # --- one batch -------------------------------------------------------------------------------

    def _update(self, batch: Batch) -> None:
        totals = self._totals
        try:
            trace = self._subject.trace(batch)
        except RuntimeError as error:
            if not self._unfreeze(error):
                raise
            trace = self._subject.trace(batch)
        for _ in range(_LATE):
            if not self._subject.has_late_products():
                break
            self._add_late_layers()
            trace = self._subject.trace(batch)
        if trace.complex:
            raise UnsupportedModelError(
                f"complex weights are not supported, got layer {min(trace.complex)!r}. Leave it out with layers=."
            )
        samples = trace.output.shape[0]
        count = trace.output.numel() // samples
        plan = replace(totals.outputs or plan_outputs(self._outputs_argument, count, self._by_rows), count=count)
        initial = None
        if self._initial is not None and self._initial.is_open:
            initial = self._initial.trace(batch)
            now, before = tuple(trace.output.shape), tuple(initial.output.shape)
            if now != before:
                raise InputError(f"initial must return outputs of the shape {now} of the model's, got {before}.")
        total = None
        if self._loss is not None:
            total = summed_loss(self._loss, trace.output, batch.own_target(), samples, self._loss_reduction)
        gradients = BatchGradients(
            self._subject, self._initial, batch, trace, initial, total, self._wanted, self.samples
        )
        state = self._generator.get_state()
        new = self._batch_sums(plan, torch.float64 if trace.output.dtype == torch.float64 else torch.float32)
        gradients.add_to(new, plan, self._generator)
        lost: set[str] = set()
        if out := gradients.out_of_range(new):
            # The squares leave the range of single precision: measure these layers again in double precision.
            self._generator.set_state(state)
            wide = {name: self._empty(name, plan, torch.float64) for name in out}
            gradients.add_to(wide, plan, self._generator)
            new = {**new, **wide}
            lost = gradients.out_of_range(wide)
            if lost >= set(trace.calls):
                raise InputError(
                    f"the gradients of every layer, such as {min(lost)!r}, are NaN, infinite or too small to be "
                    "squared on this batch. Scale the output, or pass dtype=torch.float64."
                )
        if not totals.samples and _has_small(new):
            self._subject.look_for_noise(batch)
        outside = self._subject.used_outside(trace)
        cells, spread = 0, dict[str, Tensor]()
        if total is not None and "D" in self._wanted:
            cells = min(samples, CELLS) if totals.cells < CELLS**2 and not self._subject.sharded else 1
            spread = gradients.spread_over_parts(new, cells)
        # No statement below raises: the batch is added as a whole.
        totals.lost |= lost
        totals.unpaired |= gradients.unpaired
        totals.several |= trace.several
        totals.random |= set(trace.calls) if trace.random else set()
        totals.add_batch(plan, samples, new)
        totals.add_cells(cells, {name: value for name, value in spread.items() if name not in lost})
        totals.seen |= set(trace.calls)
        totals.shared |= trace.shared & set(trace.calls)
        totals.blocked |= trace.blocked
        totals.transformed |= trace.transformed
        totals.outside |= outside

    def _unfreeze(self, error: Exception) -> bool:
        """Open the session without frozen parameters, if an error shows that the model differentiates by its own."""
        if not self._frozen or isinstance(error, FeatlearnError) or "require" not in str(error):
            return False
        self._frozen = False
        self._reopen()
        return True

    def _empty(self, name: str, plan: Outputs, dtype: torch.dtype) -> BatchSums:
        return BatchSums(self._totals.plans[name], plan.groups, self._weights[name], dtype, self.samples)

    def _batch_sums(self, plan: Outputs, dtype: torch.dtype) -> dict[str, BatchSums]:
        """Return empty sums for a batch, in the memory of the last batch if it fits."""
        key = (plan.groups, dtype)
        if self._spare is None or self._spare[0] != key:
            self._spare = (key, {name: self._empty(name, plan, dtype) for name in self._totals.plans})
        else:
            for part in self._spare[1].values():
                part.clear()
                part.start = self.samples
        return self._spare[1]

    # --- state -----------------------------------------------------------------------------------

    @contextmanager
    def _within_session(self) -> Iterator[None]:
        with nullcontext() if self._held is not None else self.session():
            assert self._held is not None
            if not self._subject.is_open:
                self._open()
            yield

    def _open(self) -> None:
        """Attach the hooks until the end of the session."""
        assert self._held is not None
        trained = "D" in self._wanted
        self._held.enter_context(self._subject.open(weight_gradients=trained, frozen=self._frozen and not trained))
        if self._initial is not None and "Kb" in self._wanted:
            self._held.enter_context(self._initial.open(frozen=self._frozen))

    def _reopen(self) -> None:
        """Attach the hooks again, for other layers or other options."""
        assert self._held is not None
        self._held.close()
        self._held.enter_context(preserved_rng())
        self._open()

    def _check_memory(self, batch: Batch) -> None:
        """Refuse a batch whose graph does not fit, from the activations of two of its samples."""
        if self._sizes is None or self._subject.sharded or few_rows(batch) is batch:
            return
        rows, graph = batch.size or 0, self._sizes.graph
        smaller = max(1, int(memory_limit(self._max_memory) / 4 / graph))
        fix = "measure less at once"
        if smaller < rows:
            fix = f"pass smaller batches, such as batch_size={min(smaller, 2048)}"
        check_fits(rows * graph, f"a batch of {rows:,} samples", fix, self._max_memory)

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
        self._weights = self._weights_of(self._totals.plans)

    def _weights_of(self, names: Collection[str]) -> dict[str, dict[str, Tensor]]:
        """Copy the weights of some layers, and those of the initial model if they are needed."""
        weights = {name: {"W": self._arranged(name, w)} for name, w in self._subject.weights().items() if name in names}
        if self._initial is not None and "initial" in self._wanted:
            for name, w in self._initial.weights().items():
                if name in names:
                    weights[name]["W0"] = self._arranged(name, w)
        return weights

    def _arranged(self, name: str, weight: Tensor) -> Tensor:
        """Return the weight of a layer with the blocks of its parts."""
        split = self._totals.plans[name].split
        return weight if split is None else weight.reshape(split.shape)

    def _settings(self, names: Iterable[str] | None = None) -> str:
        """Return a text that is equal for accumulators whose sums can be added.

        Args:
            names: Names of the layers to compare, in the same order for both accumulators. None compares all layers,
                and their names.
        """
        chosen = list(self._totals.plans if names is None else names)
        plans = [self._totals.plans[name] for name in chosen]
        sums = [(plan.outer, sorted(plan.sums.items()), plan.split and plan.split.part_shape) for plan in plans]
        decay = [self._decay.get(name) for name in chosen]
        return repr((chosen if names is None else [], sums, decay, self._loss_reduction))

    def _why_unseen(self, name: str) -> str:
        """Return why a layer has no gradients."""
        if name in self._totals.transformed:
            return "called inside of a function of torch.func, where no gradient can be taken"
        return "called with autograd off" if name in self._totals.blocked else "not called in the forward pass"

    def _features(self, layer: Layer, outputs: Outputs) -> list[LayerFeatures]:
        """Return the measurements of a layer, or of each of its parts."""
        totals = self._totals
        lost, averages = layer.name in totals.lost, {}
        for key, value in totals.sums[layer.name].items() if not lost else ():
            if key in _OF_PAIRS and layer.name in totals.unpaired:
                continue
            if key == "D" and layer.name in totals.several:
                continue
            if key == "D":
                averages[key] = value / (totals.samples if self._loss_reduction == "mean" else 1)
            else:
                averages[key] = mirrored(value) / (totals.samples * (outputs.scale(1) if value.ndim == 4 else 1.0))
        flags = [text for text in (layer.note, self._remarks.get(layer.name)) if text]
        if lost:
            flags.append(f"not measured: {_LOST}")
        if layer.name in totals.unpaired:
            flags.append("called on other rows in the initial model: no J - J0")
        if layer.name in totals.several:
            flags.append("its weight is computed from several parameters, so no FACT")
        if layer.name in totals.random:
            flags.append("random numbers are drawn in evaluation mode: another measurement differs")
        if self._subject.sharded:
            flags.append("weights are spread over processes: rows that samples share are not looked for")
        if layer.name in totals.shared:
            flags.append("rows shared by samples: measured sample by sample")
        if layer.name not in totals.seen:
            flags.append(self._why_unseen(layer.name))
        at = len(flags)
        if "D" in averages:
            if layer.name not in self._decay:
                flags.append("no weight decay, so no FACT")
            elif self._normalized:
                flags.append("BatchNorm trains on other gradients than these, so FACT = NFM need not hold")
        if outputs.sketches and outputs.groups == 1:
            flags.append("sketched in one group")
        weights, decay = self._weights[layer.name], self._decay.get(layer.name)
        noise = totals.gradient_noise(layer.name, self._loss_reduction) if "D" in averages else None
        split = totals.plans[layer.name].split
        pieces = [(layer.name, weights, averages)]
        if split is not None:
            pieces = [(x, split.part(i, weights), split.part(i, averages)) for i, x in enumerate(split.names)]
        features = []
        for i, (name, matrices, sums) in enumerate(pieces):
            shape, remarks = layer.shape if split is None else split.part_shape, list(flags)
            called = layer.name in totals.seen
            if called and any(not value.any() for key, value in sums.items() if key in ("K", "agop")):
                remarks.insert(at, "the output does not depend on this layer")
            deviation = None if noise is None else noise[i]
            features.append(LayerFeatures(name, layer.kind, shape, matrices, sums, decay, tuple(remarks), deviation))
        return features


def _has_small(sums: Mapping[str, BatchSums]) -> bool:
    """Return whether the gradients of a layer are so much smaller than those of others that they may be rounding."""
    sizes = [
        float(part.sums[key].diagonal(dim1=-2, dim2=-1).sum())
        for part in sums.values()
        for key in part.sums
        if key in ("K", "agop")
    ]
    return any(0 < size < _SMALL**2 * max(sizes) for size in sizes)
