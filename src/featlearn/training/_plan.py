"""Plan of a measurement, with parts reduced that would take too much time or memory."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn

from featlearn._utils.memory import readable_size
from featlearn.capture import ModelSession, Sizes, few_rows, shared_layers
from featlearn.errors import FeatlearnError
from featlearn.features import probe_cost
from featlearn.features.measurement_plan import SKETCHES, plan_outputs
from featlearn.kernels.contractions import pair_operations, sample_operations
from featlearn.layers import Layer, find_layers
from featlearn.training._probe_data import ProbeRows, first_of

PASSES = 50
"""Time limit of one part of a measurement, in forward and backward passes of the probe rows."""

_CHEAP = 1e9  # operations, less than a second: always allowed, however few the probe rows are
_SHORT = 1.0  # seconds, likewise
_LOOKED_AT = 32  # rows of the batch in which shared rows are searched
_FEWEST_ROWS, _FEWEST_VECTORS = 8, 4
_REDUCIBLE = {
    "features": ("feature matrices", "feature_rows"),
    "ck": ("conjugate kernels", "ck_rows"),
    "ntk": ("the tangent kernel", "ntk_rows"),
}
"""Parts that can be measured on fewer rows, with their name and the attribute of the plan."""

_EIGENVALUES = 30.0  # operations of an eigenvalue problem over k^3, in units of the faster operations of products


@dataclass(frozen=True)
class MeasurementPlan:
    """Plan of a measurement within limits of time and memory.

    Attributes:
        parts: Parts that are measured, out of `featlearn.training.PARTS`.
        memory: Maximum memory of a part, in bytes.
        outputs: Outputs of the probe, as in `featlearn.probe`.
        feature_rows: Number of rows for feature matrices.
        batch_rows: Number of rows per forward pass.
        ck_rows: Number of rows of conjugate kernels.
        ntk_rows: Number of rows of the tangent kernel.
        sketches: Number of random output vectors of the tangent kernel. None uses every output.
        spectra: Names of the layers whose weight spectra are measured.
        notes: Descriptions of the parts that were reduced or omitted.
    """

    parts: frozenset[str]
    memory: int
    outputs: str | int
    feature_rows: int
    batch_rows: int
    ck_rows: int
    ntk_rows: int
    sketches: int | None
    spectra: frozenset[str]
    notes: tuple[str, ...] = ()

    def warning(self) -> str:
        """Return one sentence about the parts that were reduced."""
        return (
            f"The measurement is reduced, so that no part takes more than {readable_size(self.memory)} and about "
            f"{PASSES} passes over the probe rows: {'; '.join(self.notes)}."
        )


def sizes_of(model: nn.Module, rows: ProbeRows, forward: Any) -> Sizes:
    """Return the sizes of one sample in all layers of a model, from a forward pass of two rows or of a batch."""
    subject = ModelSession(model, forward=forward, train_mode="eval", operations=True)
    with subject.open(inputs=True):
        batch = subject.batch(rows.batches[0])
        few = few_rows(batch)
        try:
            return subject.sizes(few)
        except FeatlearnError:
            raise
        except Exception:  # a model that takes whole batches only
            if few is batch:
                raise
            return subject.sizes(batch)


@dataclass(frozen=True)
class Sharing:
    """Cost of measuring layers whose rows are shared by samples, one sample after the other.

    Attributes:
        seconds: Time per row of the data and output vector, in seconds.
        limit: Time of `PASSES` forward and backward passes of the probe rows, in seconds.
        alone: Whether samples can be run separately; otherwise the number of rows cannot be reduced.
    """

    seconds: float
    limit: float
    alone: bool


def sharing_of(
    model: nn.Module, rows: ProbeRows, sizes: Sizes, memory: int, forward: Any, layers: Any
) -> Sharing | None:
    """Search for layers whose rows are shared by samples, and time their measurement. Takes a few passes of one batch.

    Args:
        model: Model to measure.
        rows: Rows to measure on.
        sizes: Sizes of one sample, from `sizes_of`.
        memory: Maximum memory in bytes.
        forward: Forward function, as in `featlearn.probe`.
        layers: Glob patterns of layer names, as in `featlearn.probe`.

    Returns:
        The cost; None if there are no such layers, or if one batch does not fit into memory.
    """
    subject = ModelSession(model, layers=layers, forward=forward, train_mode="eval", operations=True)
    at_a_time = max(2, min(_LOOKED_AT, int(memory / (2 * sizes.graph))))
    with subject.open():
        for raw in (first_of(rows.batches, at_a_time, at_a_time)[0], rows.batches[0]):
            batch = subject.batch(raw)
            if (batch.size or 0) * sizes.graph > memory:
                continue
            try:
                trace = subject.trace(batch)
                subject.separate(trace, batch, shared_layers(trace))
            except FeatlearnError:
                raise
            except Exception:  # a model that takes whole batches only
                continue
            if not trace.shared:
                return None
            v, n = torch.ones_like(trace.output), max(1, batch.size or 1)
            began = time.perf_counter()  # after the first passes, which are slower
            again = subject.trace(batch)
            again.gradients(again.output, v)
            unit = (time.perf_counter() - began) * rows.samples / n
            samples = trace.gradients_by_sample(v)
            next(samples)
            began = time.perf_counter()
            next(samples, None)
            seconds = (time.perf_counter() - began) * len(v) / n  # an output may have several samples for a row
            return Sharing(seconds, max(PASSES * unit, _SHORT), bool(trace.alone))
    return None


def plan_measurement(
    model: nn.Module,
    layers: Mapping[str, Layer],
    sizes: Sizes,
    rows: ProbeRows,
    parts: frozenset[str],
    features: Mapping[str, Any],
    memory: int,
    sharing: Sharing | None = None,
) -> MeasurementPlan:
    """Choose the largest measurement within the limits.

    A part may take ``memory`` bytes and the operations of `PASSES` forward and backward passes of the probe rows.
    If it takes more, outputs are sketched, then rows are halved, and finally the part is omitted. Operations are
    counted from shapes: ``2 p k_out k_in`` for a layer with p positions, three times that for a forward and backward
    pass.

    Args:
        model: Model to measure.
        layers: Layers to measure, by name.
        sizes: Sizes of one sample in all layers of the model, from `sizes_of`.
        rows: Rows to measure on.
        parts: Requested parts.
        features: Arguments of the accumulator.
        memory: Maximum memory of a part, in bytes.
        sharing: Cost of layers with shared rows. None if there are none.
    """
    work = _Work(model, layers, sizes, rows.samples, features, sharing)
    limit = max(PASSES * work.passes(rows.samples, 3.0), _CHEAP)
    at_a_time = int(memory / (2 * sizes.graph))  # of this model and the initial one
    notes: tuple[str, ...] = ()
    if at_a_time < 1 and parts - {"weights"}:
        parts &= {"weights"}
        notes = (f"only weights are measured, since the graph of one row takes {readable_size(sizes.graph)}",)
    n, kernel_rows, batch_rows = rows.samples, rows.kernel_samples, max(1, min(rows.samples, at_a_time))
    plan = MeasurementPlan(
        parts, memory, features["outputs"], n, batch_rows, kernel_rows, kernel_rows, None, frozenset(layers), notes
    )
    for part in ("features", "weights", "ck", "ntk"):
        if part in plan.parts:
            plan = _spectra(plan, work, limit) if part == "weights" else _shrink(plan, work, limit, part)
    return plan


@dataclass
class _Work:
    """Estimates of the operations and bytes of the parts of a measurement, from shapes."""

    model: nn.Module
    layers: Mapping[str, Layer]
    sizes: Sizes
    samples: int
    options: Mapping[str, Any]
    sharing: Sharing | None

    def __post_init__(self) -> None:
        self._others = _others(self.model)
        every = ModelSession(self.model, operations=True).layers
        self._forward = sum(2.0 * self.sizes.positions.get(layer.name, 0) * _weights(layer) for layer in every)

    def passes(self, rows: int, number: float) -> float:
        """Return the operations of forward passes; a backward pass to the pre-activations takes as many."""
        return rows * number * max(self._forward, self.sizes.numbers)

    def cost(self, part: str, outputs: str | int, rows: int) -> tuple[float, float]:
        """Return the operations and bytes of the part "features", "ck" or "ntk"."""
        if part == "features":
            return self.features(outputs, rows)
        return self.ck(rows) if part == "ck" else self.ntk(self.vectors(outputs), rows)

    def vectors(self, outputs: str | int) -> int:
        """Return the number of output vectors."""
        planned = plan_outputs(outputs, self.sizes.outputs)
        return planned.sketches or planned.count

    def features(self, outputs: str | int, rows: int) -> tuple[float, float]:
        """Return the operations and bytes of the feature matrices."""
        planned = plan_outputs(outputs, self.sizes.outputs)
        vectors = planned.sketches or planned.count
        loss, decay = (self.options[name] is not None for name in ("loss", "weight_decay"))
        positions = {name: int(self.sizes.positions.get(name, 0) * rows) + 1 for name in self.layers}
        if not self.layers:  # products outside of modules, which the probe itself finds
            return self.passes(rows, 2.0 * (1 + vectors) + 10 * loss), 0.0
        cost = probe_cost(
            self.model, positions, outputs=vectors, exact=not planned.sketches, measure=None,
            layers=self.options["layers"], initial=True, loss=loss, weight_decay=decay,
        )  # fmt: skip
        operations = float(cost.table[["sums", "numbers"]].to_numpy().sum())
        weights = sum(_weights(layer) for layer in self.layers.values())
        # Sums, the memory of computing numbers from them, and weights in double precision, of two models.
        return self.passes(rows, 2.0 * (1 + vectors) + 10 * loss) + operations, 2.0 * cost.bytes + 32.0 * weights

    def in_time(self, outputs: str | int, rows: int) -> bool:
        """Return whether there is time to measure layers with shared rows by sample, in this and the initial model."""
        if self.sharing is None:
            return True
        if rows < self.samples and not self.sharing.alone:
            return False
        return 2 * rows * self.vectors(outputs) * self.sharing.seconds <= self.sharing.limit

    def spectrum(self, name: str) -> tuple[float, float]:
        """Return the operations and bytes of a weight spectrum: Gram matrix, eigenvalues, norms of the change."""
        layer = self.layers[name]
        small, large = sorted((layer.k_out, layer.k_in))
        work = layer.groups * (4.0 * large * small**2 + 2 * _EIGENVALUES * small**3)
        return work, 8.0 * (3 * _weights(layer) + 3 * layer.groups * small**2)

    def ck(self, rows: int) -> tuple[float, float]:
        """Return the operations and bytes of the conjugate kernels of all layers."""
        widths = sum(self.sizes.inputs.get(name, 0) for name in self.layers)
        kernels = len(self.layers)
        work = self.passes(rows, 1) + 2.0 * rows**2 * widths + kernels * _EIGENVALUES * rows**3
        return work, 8.0 * rows * widths + 24.0 * kernels * rows**2

    def ntk(self, vectors: int, rows: int) -> tuple[float, float]:
        """Return the operations and bytes of the tangent kernel."""
        work, numbers = self.passes(rows, 1 + vectors) + _EIGENVALUES * rows**3, 0.0
        for name, layer in self.layers.items():
            p = self.sizes.positions.get(name, 0)
            pairs = rows * pair_operations(layer, rows, p, vectors)
            gradients = rows * sample_operations(layer, rows, p, vectors)
            work += 2.0 * min(pairs, gradients)
            numbers += p * layer.groups * (vectors * layer.k_out + layer.k_in)
            if gradients <= pairs:
                numbers += vectors * _weights(layer)
        # Parameters that belong to no layer, or to several, are differentiated sample by sample.
        work += 2.0 * rows * (rows + 4) * vectors * self._others
        numbers += 2.0 * vectors * self._others
        # Features of at least two blocks of one row, with the gradients they are computed from, and the kernels.
        return work, 4 * 8 * numbers + 16.0 * (len(self.layers) + 1) * rows**2


def _shrink(plan: MeasurementPlan, work: _Work, limit: float, part: str) -> MeasurementPlan:
    """Reduce the output vectors and rows of a part until it fits, or omit the part."""
    what, field = _REDUCIBLE[part]
    all_rows: int = getattr(plan, field)
    requested = plan.outputs if part == "features" else "exact"
    sketch = part == "ntk" or requested == "auto"
    for outputs, rows in _smaller(requested, sketch, work.sizes.outputs, all_rows):
        operations, size = work.cost(part, outputs, rows)
        if operations > limit or size > plan.memory or (part == "features" and not work.in_time(outputs, rows)):
            continue
        by = [f"with {outputs} random output vectors"] if outputs != requested else []
        by += [f"on {rows} of {all_rows} rows"] if rows < all_rows else []
        changes: dict[str, Any] = {field: rows, "notes": plan.notes + ((f"{what} {' '.join(by)}",) if by else ())}
        if part == "features":
            changes["outputs"] = outputs
        elif outputs != "exact":
            changes["sketches"] = outputs
        return replace(plan, **changes)
    return replace(plan, parts=plan.parts - {part}, notes=(*plan.notes, f"no {what.removeprefix('the ')}"))


def _spectra(plan: MeasurementPlan, work: _Work, limit: float) -> MeasurementPlan:
    """Omit the largest matrices until the rest fits."""
    costs = {name: work.spectrum(name) for name in plan.spectra}
    left, kept = limit, []
    for name, (cost, size) in sorted(costs.items(), key=lambda item: item[1][0]):
        if cost > left or size > plan.memory:
            break
        kept.append(name)
        left -= cost
    gone = [name for name in work.layers if name not in kept]
    if not gone:
        return plan
    which = f"{gone[0]!r}" + (f" and {len(gone) - 1} more" if len(gone) > 1 else "")
    return replace(plan, spectra=frozenset(kept), notes=(*plan.notes, f"no spectrum of the weights of {which}"))


def _smaller(outputs: str | int, sketch: bool, count: int, rows: int) -> Iterator[tuple[str | int, int]]:
    """Yield outputs and rows, from the requested ones on: random output vectors, fewer rows, fewer vectors."""
    yield outputs, rows
    if sketch and count > SKETCHES:
        outputs = SKETCHES
        yield outputs, rows
    while rows > _FEWEST_ROWS:
        rows = max(_FEWEST_ROWS, rows // 2)
        yield outputs, rows
    if sketch and count > _FEWEST_VECTORS:
        yield _FEWEST_VECTORS, rows


def _others(model: nn.Module) -> int:
    """Return the number of entries of parameters that belong to no layer, or to several (tied)."""
    uses: Counter[int] = Counter()
    for layer in find_layers(model, vectors=True):
        uses.update(id(p) for name, p in layer.module.named_parameters() if name in (layer.parameter, layer.bias))
    parts = {id(layer.module) for layer in find_layers(model) if layer.part is not None}
    packed = {id(p) for m in model.modules() if id(m) in parts for p in m.parameters()}
    return sum(p.numel() for p in model.parameters() if id(p) not in packed and uses[id(p)] != 1)


def _weights(layer: Layer) -> int:
    return layer.groups * layer.k_out * layer.k_in
