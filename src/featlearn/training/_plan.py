"""Plan a measurement: estimate the time and memory of each part, and make smaller what takes too much."""

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
"""How many forward and backward passes of the probe rows one part of a measurement may take."""

_CHEAP = 1e9  # operations, less than a second: never too much, however few the probe rows are
_SHORT = 1.0  # seconds, likewise
_LOOKED_AT = 32  # rows, where the model takes fewer than all
_FEWEST_ROWS, _FEWEST_VECTORS = 8, 4
_EIGENVALUES = 30.0  # operations of an eigenvalue problem over k^3: fewer, but slower than those of products


@dataclass(frozen=True)
class MeasurementPlan:
    """What a measurement is made of, within its limits.

    Attributes:
        parts: Parts that are measured, of `featlearn.training.PARTS`.
        memory: Bytes that a part may take.
        outputs: How the probe takes outputs, as in `featlearn.probe`.
        feature_rows: Number of rows for feature matrices.
        batch_rows: Number of rows that are run at a time.
        ck_rows: Number of rows of conjugate kernels.
        ntk_rows: Number of rows of the tangent kernel.
        sketches: Random output vectors of the tangent kernel; None takes every output.
        spectra: Names of the layers whose weights get spectra.
        notes: What was made smaller or left out, in words.
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
        """Return one sentence about what was made smaller."""
        return (
            f"a measurement is made smaller, so that no part takes more than {readable_size(self.memory)} and about "
            f"{PASSES} passes over the probe rows: {'; '.join(self.notes)}"
        )


def sizes_of(model: nn.Module, rows: ProbeRows, forward: Any) -> Sizes:
    """Return what one sample takes in all layers of a model, from a forward pass of two rows, or of a batch."""
    subject = ModelSession(model, forward=forward, train_mode="eval")
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
    """What it takes to measure layers whose rows samples share, one sample after the other.

    Attributes:
        seconds: Time of one row of the data and one output vector.
        limit: Time of `PASSES` forward and backward passes of the probe rows.
        alone: Whether samples can be run by themselves; otherwise the rows cannot be fewer.
    """

    seconds: float
    limit: float
    alone: bool


def sharing_of(
    model: nn.Module, rows: ProbeRows, sizes: Sizes, memory: int, forward: Any, layers: Any
) -> Sharing | None:
    """Look for layers whose rows samples share; None if there is none, or if not even one batch fits into memory.

    Args:
        model: The model.
        rows: The rows.
        sizes: What a sample takes.
        memory: Bytes that may be taken.
        forward: As in `featlearn.probe`.
        layers: As in `featlearn.probe`.

    Time: a few passes of one batch.
    """
    subject = ModelSession(model, layers=layers, forward=forward, train_mode="eval")
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
            began = time.perf_counter()  # not of the first passes, which are slower
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
    Where it takes more, outputs are sketched, then rows are halved, and at last the part is left out. Operations are
    counted from shapes: ``2 p k_out k_in`` for a layer with p positions, three times that for a forward and backward
    pass.

    Args:
        model: The model.
        layers: The layers that are watched, by name.
        sizes: What a sample takes, of all layers of the model.
        rows: The rows.
        parts: Parts that were asked for.
        features: Arguments of the accumulator.
        memory: Bytes that a part may take.
        sharing: What layers with shared rows take, or None if there are none.
    """
    work = _Work(model, layers, sizes, rows.samples, features, sharing)
    limit = max(PASSES * work.passes(rows.samples, 3.0), _CHEAP)
    kernel_rows = rows.kernel_samples
    whole = MeasurementPlan(
        parts, memory, features["outputs"], rows.samples, rows.samples, kernel_rows, kernel_rows, None,
        frozenset(layers),
    )  # fmt: skip
    at_a_time = int(memory / (2 * sizes.graph))  # of this model and the initial one
    if at_a_time < 1 and parts - {"weights"}:
        note = f"only weights are measured, for the graph of one row takes {readable_size(sizes.graph)}"
        whole = replace(whole, parts=parts & {"weights"}, notes=(note,))
    plan = replace(whole, batch_rows=max(1, min(rows.samples, at_a_time)))
    for part, choose in (("features", _features), ("weights", _spectra), ("ck", _ck), ("ntk", _ntk)):
        if part in plan.parts:
            plan = choose(plan, work, limit)
    return plan


class _Work:
    """Operations and bytes of the parts of a measurement, from shapes."""

    def __init__(
        self,
        model: nn.Module,
        layers: Mapping[str, Layer],
        sizes: Sizes,
        samples: int,
        features: Mapping[str, Any],
        sharing: Sharing | None,
    ) -> None:
        self.layers, self.sizes, self.samples, self._sharing = layers, sizes, samples, sharing
        self._model, self._features = model, features
        every = {layer.name: layer for layer in ModelSession(model).layers}
        self._others = _others(model)
        self._all_weights = sum(_weights(layer) for layer in layers.values())
        self._forward = sum(2.0 * sizes.positions.get(n, 0) * _weights(layer) for n, layer in every.items())

    def passes(self, rows: int, number: float) -> float:
        """Operations of so many forward passes; a backward pass to the pre-activations takes as many."""
        return rows * number * max(self._forward, self.sizes.numbers)

    def features(self, outputs: str | int, rows: int) -> tuple[float, float]:
        """Operations and bytes of the feature matrices."""
        planned = plan_outputs(outputs, self.sizes.outputs)
        vectors = planned.sketches or planned.count
        loss, decay = (self._features[name] is not None for name in ("loss", "weight_decay"))
        positions = {name: int(self.sizes.positions.get(name, 0) * rows) + 1 for name in self.layers}
        cost = probe_cost(
            self._model, positions, outputs=vectors, exact=not planned.sketches, measure=None,
            layers=self._features["layers"], initial=True, loss=loss, weight_decay=decay,
        )  # fmt: skip
        sums = float(cost.table[["sums", "numbers"]].to_numpy().sum())
        # Sums, what numbers are computed in, and weights in double precision, of two models.
        return self.passes(rows, 2.0 * (1 + vectors) + 10 * loss) + sums, 2.0 * cost.bytes + 32.0 * self._all_weights

    def in_time(self, outputs: str | int, rows: int) -> bool:
        """Whether layers with shared rows can be measured sample by sample, in this model and the initial one."""
        if self._sharing is None:
            return True
        if rows < self.samples and not self._sharing.alone:
            return False
        planned = plan_outputs(outputs, self.sizes.outputs)
        vectors = planned.sketches or planned.count
        return 2 * rows * vectors * self._sharing.seconds <= self._sharing.limit

    def spectrum(self, name: str) -> tuple[float, float]:
        """Operations and bytes of the spectrum of a weight: its Gram matrix, eigenvalues, and norms of the change."""
        layer = self.layers[name]
        small, large = sorted((layer.k_out, layer.k_in))
        work = layer.groups * (4.0 * large * small**2 + 2 * _EIGENVALUES * small**3)
        return work, 8.0 * (3 * _weights(layer) + 3 * layer.groups * small**2)

    def ck(self, rows: int) -> tuple[float, float]:
        """Operations and bytes of the conjugate kernels of all layers."""
        widths = sum(self.sizes.inputs.get(name, 0) for name in self.layers)
        kernels = len(self.layers)
        work = self.passes(rows, 1) + 2.0 * rows**2 * widths + kernels * _EIGENVALUES * rows**3
        return work, 8.0 * rows * widths + 24.0 * kernels * rows**2

    def ntk(self, vectors: int, rows: int) -> tuple[float, float]:
        """Operations and bytes of the tangent kernel."""
        work, numbers = self.passes(rows, 1 + vectors) + _EIGENVALUES * rows**3, 0.0
        for name, layer in self.layers.items():
            p = self.sizes.positions.get(name, 0)
            pairs = rows * pair_operations(layer, rows, p, vectors)
            gradients = rows * sample_operations(layer, rows, p, vectors)
            work += 2.0 * min(pairs, gradients)
            numbers += p * layer.groups * (vectors * layer.k_out + layer.k_in)
            if gradients <= pairs:
                numbers += vectors * _weights(layer)
        # Parameters that are no layer's own are differentiated sample by sample.
        work += 2.0 * rows * (rows + 4) * vectors * self._others
        numbers += 2.0 * vectors * self._others
        # Features of two blocks of one row at least, with what they are made of, and the kernels.
        return work, 4 * 8 * numbers + 16.0 * (len(self.layers) + 1) * rows**2


def _features(plan: MeasurementPlan, work: _Work, limit: float) -> MeasurementPlan:
    for outputs, rows in _smaller(plan.outputs, plan.outputs == "auto", work.sizes.outputs, plan.feature_rows):
        if _fits(work.features(outputs, rows), limit, plan.memory) and work.in_time(outputs, rows):
            notes = _reduced("feature matrices", outputs, plan.outputs, rows, plan.feature_rows)
            return replace(plan, outputs=outputs, feature_rows=rows, notes=(*plan.notes, *notes))
    return _without(plan, "features", "feature matrices")


def _spectra(plan: MeasurementPlan, work: _Work, limit: float) -> MeasurementPlan:
    """Leave out the largest matrices until the rest fits."""
    left, kept = limit, []
    for name in sorted(plan.spectra, key=lambda name: work.spectrum(name)[0]):
        cost, size = work.spectrum(name)
        if cost > left or size > plan.memory:
            break
        kept.append(name)
        left -= cost
    gone = [name for name in work.layers if name not in kept]
    if not gone:
        return plan
    which = f"{gone[0]!r}" + (f" and {len(gone) - 1} more" if len(gone) > 1 else "")
    return replace(plan, spectra=frozenset(kept), notes=(*plan.notes, f"no spectrum of the weights of {which}"))


def _ck(plan: MeasurementPlan, work: _Work, limit: float) -> MeasurementPlan:
    for _, rows in _smaller("exact", False, 1, plan.ck_rows):
        if _fits(work.ck(rows), limit, plan.memory):
            notes = _reduced("conjugate kernels", None, None, rows, plan.ck_rows)
            return replace(plan, ck_rows=rows, notes=(*plan.notes, *notes))
    return _without(plan, "ck", "conjugate kernels")


def _ntk(plan: MeasurementPlan, work: _Work, limit: float) -> MeasurementPlan:
    count = work.sizes.outputs
    for outputs, rows in _smaller("exact", True, count, plan.ntk_rows):
        vectors = count if outputs == "exact" else int(outputs)
        if _fits(work.ntk(vectors, rows), limit, plan.memory):
            sketches = None if outputs == "exact" else vectors
            notes = _reduced("the tangent kernel", sketches, None, rows, plan.ntk_rows)
            return replace(plan, ntk_rows=rows, sketches=sketches, notes=(*plan.notes, *notes))
    return _without(plan, "ntk", "the tangent kernel")


def _smaller(outputs: str | int, sketch: bool, count: int, rows: int) -> Iterator[tuple[str | int, int]]:
    """Yield ways to measure, from what was asked for on: random output vectors, then fewer rows, then fewer vectors."""
    yield outputs, rows
    if sketch and count > SKETCHES:
        outputs = SKETCHES
        yield outputs, rows
    while rows > _FEWEST_ROWS:
        rows = max(_FEWEST_ROWS, rows // 2)
        yield outputs, rows
    if sketch and count > _FEWEST_VECTORS:
        yield _FEWEST_VECTORS, rows


def _fits(cost: tuple[float, float], operations: float, memory: float) -> bool:
    return cost[0] <= operations and cost[1] <= memory


def _reduced(what: str, outputs: Any, asked: Any, rows: int, all_rows: int) -> list[str]:
    by = [f"with {outputs} random output vectors"] if outputs != asked else []
    by += [f"on {rows} of {all_rows} rows"] if rows < all_rows else []
    return [f"{what} {' '.join(by)}"] if by else []


def _without(plan: MeasurementPlan, part: str, what: str) -> MeasurementPlan:
    return replace(plan, parts=plan.parts - {part}, notes=(*plan.notes, f"no {what.removeprefix('the ')}"))


def _others(model: nn.Module) -> int:
    """Numbers of the parameters that are no layer's own: used in a module's own code, or tied."""
    uses: Counter[int] = Counter()
    for layer in find_layers(model, vectors=True):
        uses.update(id(p) for name, p in layer.module.named_parameters() if name in (layer.parameter, layer.bias))
    parts = {id(layer.module) for layer in find_layers(model) if layer.part is not None}
    packed = {id(p) for m in model.modules() if id(m) in parts for p in m.parameters()}
    return sum(p.numel() for p in model.parameters() if id(p) not in packed and uses[id(p)] != 1)


def _weights(layer: Layer) -> int:
    return layer.groups * layer.k_out * layer.k_in
