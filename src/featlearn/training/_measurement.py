"""One measurement of a model during training: numbers a layer, numbers of the whole, words, matrices."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np
import pandas as pd
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from featlearn.capture import Forward, at_rest
from featlearn.errors import FeatlearnError, InputError
from featlearn.features import FeatureAccumulator, NotMeasuredError, Report, in_processes
from featlearn.kernels import ck_by_layer, kernel_target_alignment, ntk
from featlearn.kernels.alignment import labels_vary
from featlearn.layers import Layer
from featlearn.spectra import (
    Phase,
    against_norms,
    change_norms,
    effective_rank,
    leading_alignment,
    phase,
    stable_rank,
    weight_eigenvalues,
)
from featlearn.training._plan import MeasurementPlan
from featlearn.training._probe_data import ProbeRows, first_of
from featlearn.training.diagnosis import Diagnosis, diagnose_layer

PARTS = ("features", "weights", "ck", "ntk")
"""What can be measured: NFC and FACT families; spectra of W; of conjugate kernels; of the tangent kernel."""

BESIDES = ("ck", "ntk", "spectra")
"""What can be kept of a measurement besides feature matrices."""

_EIGENVALUES = ".eigenvalues"

Array = NDArray[np.float64]
Numbers = dict[str, float]


@dataclass(frozen=True, eq=False)
class Snapshot:
    """What a monitor saw at one step.

    Attributes:
        step: Of the training.
        layers: For each layer name -> number.
        model: Numbers of the whole model, and scalars that were handed over.
        readings: A `Diagnosis` a layer, where features or weights are measured.
        phases: Phases of spectra: ``("net.0", "w")``, ``("net.0", "ck")``, ``(None, "ntk")``.
        matrices: ``"net.0/agop"`` and so on, where asked for; eigenvalues are vectors, ``"net.0/w.eigenvalues"``.
        seconds: What it took.
    """

    step: int
    layers: dict[str, Numbers]
    model: Numbers
    readings: dict[str, Diagnosis] = field(default_factory=dict)
    phases: dict[tuple[str | None, str], Phase] = field(default_factory=dict, repr=False)
    matrices: dict[str, Tensor] = field(default_factory=dict, repr=False)
    seconds: float = 0.0

    def table(self, columns: Iterable[str] | None = None) -> pd.DataFrame:
        """A row a layer: its numbers, and the word of its reading.

        Args:
            columns: Names of numbers; None takes all that were measured.
        """
        table = pd.DataFrame.from_dict(self.layers, orient="index")
        table.index.name = "layer"
        if columns is not None:
            wanted = list(columns)
            missing = [name for name in wanted if name not in table.columns]
            if missing:
                raise InputError(f"not measured: {', '.join(missing)}; there are {', '.join(table.columns)}")
            table = table[wanted]
        table["reading"] = pd.Series({name: str(reading.word) for name, reading in self.readings.items()}, dtype=object)
        return table

    def texts(self) -> dict[str | None, dict[str, str]]:
        """Words for the run store: readings and phases, a layer; None is the whole model."""
        found: dict[str | None, dict[str, str]] = {}
        for name, reading in self.readings.items():
            found.setdefault(name, {}).update({"reading": reading.word, "reason": reading.text})
        for (layer, kind), of in self.phases.items():
            found.setdefault(layer, {})[f"{kind}.phase"] = of.name
        return found


@dataclass(frozen=True, eq=False)
class Start:
    """Spectra before training, which later ones are compared with.

    Attributes:
        spectra: ``("net.0", "w")`` and so on -> eigenvalues.
    """

    spectra: Mapping[tuple[str | None, str], Array]


def make_start(
    initial: nn.Module, layers: Mapping[str, Layer], rows: ProbeRows, plan: MeasurementPlan, forward: Forward | None
) -> Start:
    """Measure the spectra of the initial model."""
    spectra: dict[tuple[str | None, str], Array] = {}
    if "weights" in plan.parts:
        with at_rest(initial):
            spectra |= {(name, "w"): _weight_spectrum(layers[name]) for name in layers if name in plan.spectra}
    spectra |= {key: _eigenvalues(k) for key, k in _kernels(initial, list(layers), rows, plan, forward).items()}
    return Start(spectra)


def feature_numbers(
    total: FeatureAccumulator, rows: ProbeRows, plan: MeasurementPlan
) -> tuple[Report, dict[str, Numbers]]:
    """NFC variants, FACT family, change of weights: one pass over the rows, reduced over the processes."""
    with _raise_on_all_ranks(), total.session():
        for raw in first_of(rows.batches, plan.feature_rows, plan.batch_rows):
            total.update(raw)
    total.sync()
    report = total.compute()
    table = report.table("all").drop(columns=["kind", "shape", "flags"], errors="ignore")
    numbers = {str(name): {str(k): float(v) for k, v in row.items()} for name, row in table.to_dict("index").items()}
    for name, features in report.items():
        numbers[name]["weight_norm"] = features.weight_norm
    return report, numbers


@contextmanager
def _raise_on_all_ranks() -> Iterator[None]:
    """A block that fails on one process fails on all: the others would wait for its sums, or take others for them."""
    failure: Exception | None = None
    try:
        yield
    except Exception as error:
        failure = error
    told: list[Any] = [None if failure is None else str(failure)]
    if in_processes():
        told *= torch.distributed.get_world_size()
        torch.distributed.all_gather_object(told, told[0])
    if failure is not None:
        raise failure
    for rank, message in enumerate(told):
        if message is not None:
            raise InputError(f"process {rank} could not measure: {message}")


def weight_numbers(
    layers: Mapping[str, Layer], initial: Mapping[str, Layer], start: Start, directions: Mapping[str, Any]
) -> tuple[dict[str, Numbers], dict[tuple[str | None, str], Phase], dict[str, Tensor]]:
    """Spectra of ``W^T W / h``, norms of the change, and alignment with given directions; last the eigenvalues.

    Both models are at rest (`featlearn.capture.at_rest`) meanwhile.
    """
    numbers: dict[str, Numbers] = {}
    phases: dict[tuple[str | None, str], Phase] = {}
    spectra: dict[str, Tensor] = {}
    for name, layer in layers.items():
        found: Numbers = {}
        of: Phase | None = None
        measured = (name, "w") in start.spectra
        if measured:
            before, after = start.spectra[name, "w"], _weight_spectrum(layer)
            found, of = _spectrum_numbers(before, after, "w", partial(_weight, layer))
            spectra[f"{name}/w{_EIGENVALUES}"] = torch.from_numpy(after)
            found["w.initial_effective_rank"] = effective_rank(before) if before.any() else 0.0
        now = _weight(layer)
        then = _weight(initial[name]).to(now)  # the model may have been moved, or cast, since the start was kept
        found["weight_norm"] = float(now.double().norm())
        found["weight_change"] = float((now.double() - then.double()).norm() / then.double().norm())
        if layer.groups == 1 and measured:
            change = change_norms(then[0], now[0])
            found["weight_change_operator"] = change.relative_operator
            found["weight_change_two_to_infinity"] = change.relative_two_to_infinity
            if name in directions:
                beta = torch.as_tensor(directions[name])
                leading = leading_alignment(now[0], beta, k=1 if beta.ndim == 1 else beta.shape[1])
                found["alignment"] = float(leading.projections.min())
        numbers[name] = found
        if of is not None:
            phases[name, "w"] = of
    return numbers, phases, spectra


def kernel_numbers(
    model: nn.Module, names: list[str], rows: ProbeRows, start: Start, plan: MeasurementPlan, forward: Forward | None
) -> tuple[dict[str | None, Numbers], dict[tuple[str | None, str], Phase], dict[str, Tensor]]:
    """Spectra of conjugate and tangent kernels, and how they match the labels; last the kernels and eigenvalues."""
    numbers: dict[str | None, Numbers] = {}
    phases: dict[tuple[str | None, str], Phase] = {}
    matrices: dict[str, Tensor] = {}
    for key, kernel in _kernels(model, names, rows, plan, forward).items():
        layer, kind = key
        if key not in start.spectra:
            continue
        after = _eigenvalues(kernel)
        found, of = _spectrum_numbers(start.spectra[key], after, kind)
        targets = None if rows.kernel_targets is None else rows.kernel_targets[: len(kernel)]
        if targets is not None and kernel.any() and labels_vary(targets):
            found[f"{kind}.kta"] = kernel_target_alignment(kernel, targets)
        numbers.setdefault(layer, {}).update(found)
        own = kind if layer is None else f"{layer}/{kind}"
        matrices |= {own: kernel, f"{own}{_EIGENVALUES}": torch.from_numpy(after)}
        if of is not None:
            phases[key] = of
    return numbers, phases, matrices


def read(
    layers: Mapping[str, Layer],
    numbers: Mapping[str, Numbers],
    phases: Mapping[tuple[str | None, str], Phase],
    part: bool,
) -> dict[str, Diagnosis]:
    """A reading for each layer whose change is known; ``part``: of a part of the training data."""
    return {
        name: diagnose_layer(
            found,
            phases[name, "w"].name if (name, "w") in phases else None,
            trivial=layers[name].groups * layers[name].k_out == 1,
            part=part,
        )
        for name, found in numbers.items()
        if "weight_change" in found
    }


def wanted_of(kept: Mapping[str, Tensor], wanted: Iterable[str]) -> dict[str, Tensor]:
    """Of kernels and eigenvalues, those that are to be kept."""
    names = set(wanted)
    return {
        name: value
        for name, value in kept.items()
        if ("spectra" if name.endswith(_EIGENVALUES) else name.rpartition("/")[2]) in names
    }


def matrices_of(report: Report, wanted: Iterable[str]) -> dict[str, Tensor]:
    """Feature matrices by name, of every layer that has them."""
    found = {}
    for layer, features in report.items():
        for name in wanted:
            try:
                found[f"{layer}/{name}"] = features.matrix(name)
            except NotMeasuredError:
                continue
    return found


def _kernels(
    model: nn.Module, names: list[str], rows: ProbeRows, plan: MeasurementPlan, forward: Forward | None
) -> dict[tuple[str | None, str], Tensor]:
    found: dict[tuple[str | None, str], Tensor] = {}
    if "ck" in plan.parts and names:
        data = first_of(rows.kernel_batches, plan.ck_rows, plan.batch_rows)
        with _left_out("conjugate kernels"):
            kernels = ck_by_layer(model, data, layers=names, forward=forward, train_mode="eval")
            found |= {(name, "ck"): kernel for name, kernel in kernels.items()}
    if "ntk" in plan.parts:
        data = first_of(rows.kernel_batches, plan.ntk_rows, plan.batch_rows)
        # The same output vectors each time, so that spectra can be compared with those of the start.
        with _left_out("tangent kernels"):
            kernel = ntk(
                model, data, sketches=plan.sketches, generator=0, max_memory=plan.memory, forward=forward,
                train_mode="eval",
            )  # fmt: skip
            assert isinstance(kernel, Tensor)
            found[None, "ntk"] = kernel
    return {key: kernel.cpu() for key, kernel in found.items()}


@contextmanager
def _left_out(what: str) -> Iterator[None]:
    """A part that the model does not allow is left out with a warning, and does not end the measurement."""
    try:
        yield
    except FeatlearnError as error:
        warnings.warn(f"{what} are not measured: {error}", UserWarning, stacklevel=6)


def _weight(layer: Layer) -> Tensor:
    return layer.matrix(layer.weight().detach())


def _weight_spectrum(layer: Layer) -> Array:
    values: Array = weight_eigenvalues(_weight(layer), side="smaller").numpy()
    return values


def _eigenvalues(kernel: Tensor) -> Array:
    values: Array = torch.linalg.eigvalsh(kernel).clamp_min(0).numpy()
    return values


def _spectrum_numbers(
    before: Array, after: Array, prefix: str, make_weight: Callable[[], Tensor] | None = None
) -> tuple[Numbers, Phase | None]:
    numbers = {f"{prefix}.top": float(after.max())}
    if not after.any():
        return numbers | {f"{prefix}.effective_rank": 0.0, f"{prefix}.stable_rank": 0.0}, None
    numbers |= {f"{prefix}.effective_rank": effective_rank(after), f"{prefix}.stable_rank": stable_rank(after)}
    if not before.any():  # a layer that starts at zero has no bulk
        return numbers, None
    found = phase(before, after)
    if make_weight is not None:
        found = against_norms(found, make_weight)
    evidence = found.evidence
    if evidence is not None:
        numbers[f"{prefix}.spikes"] = float(len(evidence.spikes))
        numbers[f"{prefix}.bulk_distance"] = evidence.bulk_distance
        if evidence.trained_edge is not None:
            numbers[f"{prefix}.edge"] = evidence.trained_edge.edge
        if evidence.tail is not None:
            numbers[f"{prefix}.alpha"] = evidence.tail.fit.alpha
    return numbers, found


def as_parts(measure: str | Iterable[str] | None) -> tuple[str, ...]:
    """Return the parts to measure, of `featlearn.training.PARTS`."""
    if measure is None:
        return PARTS
    parts = (measure,) if isinstance(measure, str) else tuple(measure)
    wrong = [part for part in parts if part not in PARTS]
    if wrong or not parts:
        raise InputError(f"measure must be of {', '.join(PARTS)}, got {measure!r}")
    return parts


def as_directions(directions: Mapping[str, Any], layers: Mapping[str, Layer]) -> dict[str, Tensor]:
    """Return the directions of layers, each with one entry per input of its layer."""
    checked = {}
    for name, given in directions.items():
        if name not in layers:
            raise InputError(f"directions names layer {name!r}, and there are {', '.join(layers)}")
        beta = torch.as_tensor(given).detach().cpu()
        if beta.ndim not in (1, 2) or len(beta) != layers[name].k_in:
            raise InputError(
                f"directions of layer {name!r} must be ({layers[name].k_in},) or ({layers[name].k_in}, q), "
                f"got shape {tuple(beta.shape)}"
            )
        checked[name] = beta
    return checked
