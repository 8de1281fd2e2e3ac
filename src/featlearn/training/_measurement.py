"""Measurement of a model during training: metrics per layer and of the whole model, diagnoses, matrices."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from featlearn._utils.standard_errors import jackknife_error, mean_and_error
from featlearn.errors import FeatlearnError, InputError
from featlearn.features import FeatureAccumulator, LayerFeatures, NotMeasuredError, Report, in_processes
from featlearn.kernels import kernel_target_alignment
from featlearn.kernels.alignment import labels_vary
from featlearn.kernels.model_kernels import ModelKernels
from featlearn.layers import Layer
from featlearn.spectra import (
    Phase,
    against_norms,
    effective_rank,
    leading_alignment,
    phase,
    stable_rank,
    weight_eigenvalues,
)
from featlearn.spectra.matrix_norms import matrix_norms, relative_norms
from featlearn.training._plan import MeasurementPlan
from featlearn.training._probe_data import ProbeRows, first_of
from featlearn.training.diagnosis import Diagnosis, Findings, diagnose_layer

if TYPE_CHECKING:
    import pandas as pd

PARTS = ("features", "weights", "ck", "ntk")
"""Parts of a measurement: NFC and FACT families; spectra of W, of conjugate kernels and of the tangent kernel."""

BESIDES = ("ck", "ntk", "spectra")
"""Names of matrices that a monitor can store besides feature matrices."""

_EIGENVALUES = ".eigenvalues"

Array = NDArray[np.float64]
Numbers = dict[str, float]
Key = tuple[str | None, str]
"""Name of a layer, None for the model, and "w", "ck" or "ntk"."""


@dataclass(frozen=True, eq=False)
class Snapshot:
    """Measurement of a monitor at one step.

    Attributes:
        step: Training step of the measurement.
        layers: Metrics of each layer, as a mapping of layer names to mappings of metric names to numbers.
        model: Metrics of the whole model, and numbers of the rows and spectra that were measured, such as
            ``monitor.feature_rows``.
        readings: `Diagnosis` of each layer whose features or weights are measured.
        phases: Phases of spectra, with keys such as ``("net.0", "w")``, ``("net.0", "ck")``, ``(None, "ntk")``. Their
            names change when two measurements in a row agree.
        matrices: Requested matrices, with names such as ``"net.0/agop"``. Eigenvalues are vectors, with names such as
            ``"net.0/w.eigenvalues"``.
        seconds: Time that the measurement took, in seconds.
        reduced: Parts that were left out or measured on fewer rows to stay within the budget, as text.
        findings: Findings of each layer, and of the model (None); an empty list where there were some before.

    Example:
        >>> import torch, featlearn as fl
        >>> _ = torch.manual_seed(0)
        >>> model = torch.nn.Sequential(torch.nn.Linear(5, 8), torch.nn.ReLU(), torch.nn.Linear(8, 1))
        >>> monitor = fl.Monitor(model, (torch.randn(64, 5), torch.randn(64, 1)))
        >>> snapshot = monitor.measure()
        >>> snapshot.step, list(snapshot.layers), snapshot.readings["0"].word
        (0, ['0', '2'], 'untrained')
        >>> list(snapshot.table(["nfc"]).columns)
        ['nfc', 'reading']
    """

    step: int
    layers: dict[str, Numbers]
    model: Numbers
    readings: dict[str, Diagnosis] = field(default_factory=dict)
    phases: dict[Key, Phase] = field(default_factory=dict, repr=False)
    matrices: dict[str, Tensor] = field(default_factory=dict, repr=False)
    seconds: float = 0.0
    reduced: str = ""
    findings: Findings = field(default_factory=Findings, repr=False)

    def table(self, columns: Iterable[str] | None = None) -> pd.DataFrame:
        """Return the metrics and the diagnosis of each layer.

        Args:
            columns: Names of metrics. None selects all that were measured.

        Returns:
            Table with one row per layer, one column per metric, and the diagnosis in the column "reading".

        Raises:
            InputError: If a metric was not measured.
        """
        import pandas as pd

        table = pd.DataFrame.from_dict(self.layers, orient="index")
        table.index.name = "layer"
        if columns is not None:
            wanted = list(columns)
            if missing := [name for name in wanted if name not in table.columns]:
                raise InputError(
                    f"columns must be among {', '.join(table.columns)}; not measured: {', '.join(missing)}."
                )
            table = table[wanted]
        table["reading"] = pd.Series({name: str(reading.word) for name, reading in self.readings.items()}, dtype=object)
        return table

    def texts(self) -> dict[str | None, dict[str, str]]:
        """Return diagnoses, phases and findings as text, by layer, for the run store; the key None is the model."""
        result: dict[str | None, dict[str, str]] = {}
        for name, reading in self.readings.items():
            result.setdefault(name, {}).update({"reading": reading.word, "reason": reading.text})
        for (layer, kind), of in self.phases.items():
            result.setdefault(layer, {})[f"{kind}.phase"] = of.name
        if self.reduced:
            result.setdefault(None, {})["monitor.reduced"] = self.reduced
        for owner, text in self.findings.texts().items():
            result.setdefault(owner, {})["findings"] = text
        return result


@dataclass(frozen=True)
class Observed:
    """Signals of the training that diagnoses take into account.

    Attributes:
        layers: Signals by layer.
        outputs: Names of the layers whose outputs are those of the model.
        diverged: Whether the training has diverged.
    """

    layers: Mapping[str, Numbers] = field(default_factory=dict)
    outputs: frozenset[str] = frozenset()
    diverged: bool = False


@dataclass(frozen=True, eq=False)
class Start:
    """Numbers of the initial model, which those of later models are compared with.

    Attributes:
        spectra: Eigenvalues of weights and kernels.
        norms: Frobenius, operator and 2-to-infinity norms of the weights of each layer with one matrix.
    """

    spectra: dict[Key, Array]
    norms: dict[str, tuple[float, float, float]]


def add_start_weights(start: Start, layers: Mapping[str, Layer]) -> None:
    """Measure weights of the initial model, which must be at rest (`featlearn.capture.at_rest`).

    Args:
        start: Numbers of the initial model, which are added to.
        layers: Layers of the initial model, by name.
    """
    for name, layer in layers.items():
        start.spectra[name, "w"] = _weight_spectrum(layer)
        if layer.groups == 1:
            start.norms[name] = matrix_norms(_weight(layer)[0].double().cpu())


def add_start_kernels(start: Start, kernels: Mapping[Key, Tensor], parts: Collection[str]) -> None:
    """Replace the spectra of the kernels of the initial model.

    Args:
        start: Numbers of the initial model, which are changed.
        kernels: Kernels of the initial model, from `measure_kernels`.
        parts: Kinds of kernels, "ck" and "ntk".
    """
    for key in [key for key in start.spectra if key[1] in parts]:
        del start.spectra[key]
    start.spectra.update({key: _eigenvalues(mean_and_error(kernel)[0]) for key, kernel in kernels.items()})


def sum_features(total: FeatureAccumulator, rows: ProbeRows, plan: MeasurementPlan) -> None:
    """Make one pass over the rows for feature matrices, summed over processes."""
    with _raise_on_all_ranks(), total.session():
        for raw in first_of(rows.batches, plan.feature_rows, plan.batch_rows):
            total.update(raw)
    total.sync()


def feature_numbers(total: FeatureAccumulator, omitted: Collection[str]) -> tuple[Report, dict[str, Numbers]]:
    """Compute NFC variants, FACT family and change of weights from the sums of a pass.

    Args:
        total: Sums, from `sum_features`.
        omitted: Names of the layers that are left out.
    """
    report = total.compute(leave_out=omitted)
    numbers = report.numbers()
    for name, features in report.items():
        numbers[name]["weight_norm"] = features.weight_norm
    return report, numbers


@contextmanager
def _raise_on_all_ranks() -> Iterator[None]:
    """Raise the error of one process on all of them, which would otherwise wait for its sums."""
    failure: Exception | None = None
    try:
        yield
    except Exception as error:
        failure = error
    messages: list[Any] = [None if failure is None else str(failure)]
    if in_processes():
        messages *= torch.distributed.get_world_size()
        torch.distributed.all_gather_object(messages, messages[0])
    if failure is not None:
        raise failure
    for rank, message in enumerate(messages):
        if message is not None:
            raise InputError(f"Process {rank} could not measure: {message}")


def weight_numbers(
    layers: Mapping[str, Layer],
    initial: Mapping[str, Layer],
    start: Start,
    directions: Mapping[str, Any],
    wanted: Iterable[str],
) -> tuple[dict[str, Numbers], dict[Key, Phase], dict[str, Tensor]]:
    """Measure spectra of ``W^T W / h``, norms of the change, and alignment with given directions.

    Both models must be at rest (`featlearn.capture.at_rest`) meanwhile.

    Args:
        layers: Layers of the trained model, by name.
        initial: Layers of the initial model, by name.
        start: Numbers of the initial model.
        directions: Directions of some layers, by name.
        wanted: Names of the matrices to store; "spectra" stores the eigenvalues.

    Returns:
        Metrics of each layer, phases, and eigenvalues by name.
    """
    numbers: dict[str, Numbers] = {}
    phases: dict[Key, Phase] = {}
    spectra: dict[str, Tensor] = {}
    for name, layer in layers.items():
        values = numbers.setdefault(name, {})
        before = start.spectra.get((name, "w"))
        if before is not None:
            after = _weight_spectrum(layer)
            metrics, of = _spectrum_numbers(before, after, "w", partial(_weight, layer))
            values |= metrics | {"w.initial_effective_rank": effective_rank(before) if before.any() else 0.0}
            if of is not None:
                phases[name, "w"] = of
            if "spectra" in wanted:
                spectra[f"{name}/w{_EIGENVALUES}"] = torch.from_numpy(after)
        now = _weight(layer)
        then = _weight(initial[name]).to(now)  # the model may have been moved or cast since the initial copy
        features = LayerFeatures(name, layer.kind, layer.shape, {"W": now, "W0": then}, {})
        values |= {"weight_norm": features.weight_norm, "weight_change": features.weight_change}
        if name in start.norms:
            change = matrix_norms((now[0].double() - then[0].double()).cpu())
            _, operator, two_to_infinity = relative_norms(change, start.norms[name])
            values |= {"weight_change_operator": operator, "weight_change_two_to_infinity": two_to_infinity}
            if name in directions:
                beta = torch.as_tensor(directions[name])
                leading = leading_alignment(now[0], beta, k=1 if beta.ndim == 1 else beta.shape[1])
                values["alignment"] = float(leading.projections.min())
    return numbers, phases, spectra


def kernel_numbers(
    kernels: Mapping[Key, Tensor], targets: Tensor | None, start: Start, wanted: Iterable[str]
) -> tuple[dict[str | None, Numbers], dict[Key, Phase], dict[str, Tensor]]:
    """Compute spectra of conjugate and tangent kernels, and their alignment with the labels.

    Args:
        kernels: Kernels, from `measure_kernels`. Kernels of groups of random vectors give standard errors too.
        targets: Labels of the rows; None if there is not one per row.
        start: Numbers of the initial model.
        wanted: Names of the matrices to store: "ck", "ntk", and "spectra" for eigenvalues.

    Returns:
        Metrics of each layer and of the model (None), phases, and kernels and eigenvalues by name.
    """
    numbers: dict[str | None, Numbers] = {}
    phases: dict[Key, Phase] = {}
    matrices: dict[str, Tensor] = {}
    for (layer, kind), measured in kernels.items():
        before = start.spectra.get((layer, kind))
        if before is None:
            continue
        kernel, error = mean_and_error(measured)
        after = _eigenvalues(kernel)
        values, of = _spectrum_numbers(before, after, kind)
        if of is not None:
            phases[layer, kind] = of
        if measured.ndim == 3 and kernel.any():
            values[f"{kind}.relative_se"] = float(error.norm() / kernel.norm())
        labels = None if targets is None else targets[: len(kernel)]
        if labels is not None and kernel.any() and labels_vary(labels):
            values[f"{kind}.kta"] = kernel_target_alignment(kernel, labels)
            if groups := measured.ndim == 3 and measured.shape[-1]:
                others = (measured.sum(-1) - measured[..., j] for j in range(groups))
                values[f"{kind}.kta_se"] = jackknife_error([kernel_target_alignment(K, labels) for K in others])
        numbers.setdefault(layer, {}).update(values)
        name = kind if layer is None else f"{layer}/{kind}"
        if kind in wanted:
            matrices[name] = kernel
        if "spectra" in wanted:
            matrices[f"{name}{_EIGENVALUES}"] = torch.from_numpy(after)
    return numbers, phases, matrices


def diagnose_layers(
    single: Collection[str],
    numbers: Mapping[str, Numbers],
    phases: Mapping[Key, Phase],
    part: bool,
    observed: Observed,
) -> dict[str, Diagnosis]:
    """Return the diagnosis of each layer whose change is measured.

    Args:
        single: Names of the layers with one output, whose NFC is 1.
        numbers: Numbers by layer name.
        phases: Phases of the spectra.
        part: Whether only a part of the training rows is measured, see `diagnose_layer`.
        observed: Signals of the training.
    """
    result = {}
    # A layer without a gradient is cut off if others have changed, or if a dead layer explains it.
    trained = any(values.get("weight_change", 0.0) > 0 for values in numbers.values())
    trained |= any(values.get("signal.dead_share", 0.0) >= 1 for values in observed.layers.values())
    for name, values in numbers.items():
        if "weight_change" in values:
            of = phases[name, "w"].name if (name, "w") in phases else None
            trivial = name in single or name in observed.outputs
            known = {**values, **observed.layers.get(name, {})}
            result[name] = diagnose_layer(known, of, trivial, part, observed.diverged, trained)
    return result


def feature_matrices(report: Report, wanted: Iterable[str]) -> dict[str, Tensor]:
    """Return the wanted feature matrices of all layers that have them, with names such as ``"net.0/agop"``."""
    result = {}
    names = [name for name in wanted if name not in BESIDES]
    for layer, features in report.items():
        for name in names:
            with suppress(NotMeasuredError):
                result[f"{layer}/{name}"] = features.matrix(name)
    return result


def measure_kernels(kernels: ModelKernels, rows: ProbeRows, plan: MeasurementPlan) -> dict[Key, Tensor]:
    """Return the conjugate and tangent kernels on the CPU; kernels that the model does not allow give a warning.

    Kernels that overflow, as those of a model whose activations explode, are left out.

    Args:
        kernels: Kernels of the model.
        rows: Rows to measure on.
        plan: Plan of the measurement.
    """
    measured = _measure_kernels(kernels, rows, plan)
    return {key: kernel for key, kernel in measured.items() if bool(torch.isfinite(kernel).all())}


def _measure_kernels(kernels: ModelKernels, rows: ProbeRows, plan: MeasurementPlan) -> dict[Key, Tensor]:
    result: dict[Key, Tensor] = {}
    wanted = [part for part in ("ck", "ntk") if part in plan.parts]
    if wanted == ["ck", "ntk"] and plan.ck_rows == plan.ntk_rows:
        with suppress(FeatlearnError):  # one of them may be possible on its own
            conjugate, tangent = kernels.both(first_of(rows.kernel_batches, plan.ck_rows, plan.batch_rows))
            result |= {(name, "ck"): kernel.cpu() for name, kernel in conjugate.items()}
            return result | {(None, "ntk"): tangent.cpu()}
    if "ck" in wanted:
        with _warn_if_unsupported("conjugate kernels"):
            conjugate = kernels.conjugate(first_of(rows.kernel_batches, plan.ck_rows, plan.batch_rows))
            result |= {(name, "ck"): kernel.cpu() for name, kernel in conjugate.items()}
    if "ntk" in wanted:
        with _warn_if_unsupported("tangent kernels"):
            result[None, "ntk"] = kernels.tangent(first_of(rows.kernel_batches, plan.ntk_rows, plan.batch_rows)).cpu()
    return result


@contextmanager
def _warn_if_unsupported(what: str) -> Iterator[None]:
    try:
        yield
    except FeatlearnError as error:
        warnings.warn(f"{what} are not measured: {error}", UserWarning, stacklevel=6)


def _weight(layer: Layer) -> Tensor:
    return layer.matrix(layer.weight().detach())


def _weight_spectrum(layer: Layer) -> Array:
    return np.asarray(weight_eigenvalues(_weight(layer), side="smaller"))


def _eigenvalues(kernel: Tensor) -> Array:
    return np.asarray(torch.linalg.eigvalsh(kernel).clamp_min(0))


def _spectrum_numbers(
    before: Array, after: Array, prefix: str, make_weight: Callable[[], Tensor] | None = None
) -> tuple[Numbers, Phase | None]:
    ranks = (effective_rank(after), stable_rank(after)) if after.any() else (0.0, 0.0)
    numbers = {f"{prefix}.top": float(after.max())}
    numbers |= {f"{prefix}.effective_rank": ranks[0], f"{prefix}.stable_rank": ranks[1]}
    if not after.any() or not before.any():  # a layer that starts at zero has no bulk
        return numbers, None
    result = phase(before, after)
    if make_weight is not None:
        result = against_norms(result, make_weight)
    if (evidence := result.evidence) is not None:
        numbers[f"{prefix}.spikes"] = float(len(evidence.spikes))
        numbers[f"{prefix}.bulk_distance"] = evidence.bulk_distance
        if evidence.trained_edge is not None:
            numbers[f"{prefix}.edge"] = evidence.trained_edge.edge
        if evidence.tail is not None:
            numbers[f"{prefix}.alpha"] = evidence.tail.fit.alpha
            numbers[f"{prefix}.tail_share"] = evidence.tail.fit.n_tail / len(result.trained)
    return numbers, result


def as_parts(measure: str | Iterable[str] | None) -> tuple[str, ...]:
    """Return the parts to measure, of `featlearn.training.PARTS`."""
    if measure is None:
        return PARTS
    parts = (measure,) if isinstance(measure, str) else tuple(measure)
    if not parts or any(part not in PARTS for part in parts):
        raise InputError(f"measure must be one or more of {', '.join(PARTS)}, got {measure!r}.")
    return parts


def as_directions(directions: Mapping[str, Any], layers: Mapping[str, Layer]) -> dict[str, Tensor]:
    """Return the directions of layers, each with one entry per input of its layer."""
    checked = {}
    for name, given in directions.items():
        if name not in layers:
            raise InputError(f"directions must name layers out of {', '.join(layers)}; got {name!r}.")
        beta, k = torch.as_tensor(given).detach().cpu(), layers[name].k_in
        if beta.ndim not in (1, 2) or len(beta) != k:
            raise InputError(
                f"directions of layer {name!r} must have shape ({k},) or ({k}, q), got shape {tuple(beta.shape)}."
            )
        checked[name] = beta
    return checked
