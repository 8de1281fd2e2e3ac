"""Plan of a measurement, with parts reduced that would take too much time or memory."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn

from featlearn._utils.memory import readable_size
from featlearn.capture import ModelSession, Sizes, few_rows, shared_layers
from featlearn.errors import FeatlearnError
from featlearn.features.measurement_plan import SKETCHES
from featlearn.training._probe_data import ProbeRows, first_of
from featlearn.training._work import Sharing, Work

PASSES = 50
"""Time limit of one part of a measurement, in forward and backward passes of the probe rows."""

_CHEAP = 1e9  # operations, less than a second: always allowed, however few the probe rows are
_SHORT = 1.0  # seconds, likewise
_LOOKED_AT = 16  # rows of the batch in which shared rows are searched
_FEWEST_ROWS, _FEWEST_VECTORS = 8, 4
_REDUCIBLE = {
    "features": ("feature matrices", "feature_rows"),
    "ck": ("conjugate kernels", "ck_rows"),
    "ntk": ("the tangent kernel", "ntk_rows"),
}
"""Parts that can be measured on fewer rows, with their name and the attribute of the plan."""


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
        sized: Whether the plan is smaller than memory allows, to save time; weights are measured of the layers in
            ``spectra`` only.
        measure: Quantities of the probe. None is all; otherwise those that need no gradients of the initial model.
        omitted: Names of the layers whose feature matrices are left out.
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
    sized: bool = False
    measure: tuple[str, ...] | None = None
    omitted: frozenset[str] = frozenset()

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


def plan_measurement(work: Work, rows: ProbeRows, parts: frozenset[str], memory: int) -> MeasurementPlan:
    """Choose the largest measurement within the limits.

    A part may take ``memory`` bytes and the operations of `PASSES` forward and backward passes of the probe rows.
    If it takes more, outputs are sketched, then rows are halved, and finally the part is omitted. Operations are
    counted from shapes: ``2 p k_out k_in`` for a layer with p positions, three times that for a forward and backward
    pass.

    Args:
        work: Operations and bytes of the parts.
        rows: Rows to measure on.
        parts: Requested parts.
        memory: Maximum memory of a part, in bytes.
    """
    limit = max(PASSES * work.passes(rows.samples, 3.0), _CHEAP)
    at_a_time = int(memory / (2 * work.sizes.graph))  # of this model and the initial one
    notes: tuple[str, ...] = ()
    if at_a_time < 1 and parts - {"weights"}:
        parts &= {"weights"}
        notes = (f"only weights are measured, since the graph of one row takes {readable_size(work.sizes.graph)}",)
    n, kernel_rows, batch_rows = rows.samples, rows.kernel_samples, max(1, min(rows.samples, at_a_time))
    plan = MeasurementPlan(
        parts,
        memory,
        work.options["outputs"],
        n,
        batch_rows,
        kernel_rows,
        kernel_rows,
        None,
        frozenset(work.layers),
        notes,
    )
    for part in ("features", "weights", "ck", "ntk"):
        if part in plan.parts:
            plan = _spectra(plan, work, limit) if part == "weights" else _shrink(plan, work, limit, part)
    return plan


def _shrink(plan: MeasurementPlan, work: Work, limit: float, part: str) -> MeasurementPlan:
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


def _spectra(plan: MeasurementPlan, work: Work, limit: float) -> MeasurementPlan:
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
