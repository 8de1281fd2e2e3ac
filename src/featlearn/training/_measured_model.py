"""Model in training with all that its measurements share."""

from __future__ import annotations

import time
import warnings
from collections.abc import Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from featlearn._utils.memory import available_memory
from featlearn.capture import at_rest, check_parameters, initial_model, matching_layers, preserved_rng
from featlearn.features import FeatureAccumulator
from featlearn.kernels.model_kernels import ModelKernels
from featlearn.layers import Layer, find_layers, select_layers, unwrap
from featlearn.spectra import Phase
from featlearn.training import _measurement as measuring
from featlearn.training._first_process import run_in_first
from featlearn.training._measurement import Observed, Snapshot, Start
from featlearn.training._plan import MeasurementPlan, plan_measurement, sharing_of, sizes_of
from featlearn.training._prices import Passes, time_passes
from featlearn.training._probe_data import ProbeRows, first_of
from featlearn.training._sizing import Sizing, describe_size
from featlearn.training._threads import limited_threads
from featlearn.training._work import Work

_SIZES = {"features": "feature_rows", "weights": "spectra", "ck": "ck_rows", "ntk": "ntk_rows"}


class MeasuredModel:
    """Model in training and its initial state, with layers, checks and numbers of the start that are found once.

    They are found at the first measurement, and again after a change of the model's structure. A later measurement
    makes one forward pass of each row for features in each of the two models, and one of the rows of the kernels.

    Args:
        model: Model in training.
        initial: Model before training, of which this object is the owner.
        rows: Rows to measure on.
        parts: Parts to measure, of `featlearn.training.PARTS`.
        features: Arguments of the `featlearn.FeatureAccumulator`.
        directions: Directions by layer name, see `featlearn.training.Monitor`.
        matrices: Names of the matrices to keep in a snapshot.
        max_memory: Maximum memory of a part in bytes. None is a tenth of the memory that is free at the first
            measurement.
        in_budget: Whether measurements are sized by their time.

    Attributes:
        initial: Model before training.
        rows: Rows to measure on.
    """

    def __init__(
        self,
        model: nn.Module,
        initial: nn.Module,
        rows: ProbeRows,
        parts: Iterable[str],
        features: Mapping[str, Any],
        directions: Mapping[str, Tensor],
        matrices: Iterable[str],
        max_memory: int | None,
        in_budget: bool = False,
    ) -> None:
        self._model, self.initial, self.rows = model, initial, rows
        self._parts, self._options, self._matrices = frozenset(parts), features, list(matrices)
        self._directions, self._max_memory = directions, max_memory
        self._in_budget, self._warned = in_budget, False
        self._plan: MeasurementPlan | None = None
        self._planned_for: _Structure | None = None
        self._sizing: Sizing | None = None
        self._start = Start({}, {})
        self._start_sizes: dict[str, tuple[int, int | None]] = {}
        self._structure: _Structure | None = None
        self._layers: dict[str, Layer] = {}
        self._first: dict[str, Layer] = {}
        self._features: FeatureAccumulator | None = None
        self._features_kind: tuple[object, ...] | None = None
        self._kernels: ModelKernels | None = None
        self._kernels_sketches: int | None = None

    def prepare(self) -> None:
        """Find the layers, the largest measurement that memory allows, and the times of its parts.

        A model that cannot be run yet is prepared at its first measurement.
        """
        with preserved_rng(), suppress(Exception), self.limited_threads():
            self._look_at_plan()
            if self._sizing is not None and (plan := self._sizing.trial()) is not None:  # in the first process
                # Searches and checks of the first batch are made here, so that the first measurement is short.
                with (total := self._accumulator(plan)).session():
                    total.update(first_of(self.rows.batches, 2, plan.batch_rows)[0])
                seconds: dict[str, float] = {}
                with _timed(seconds, "numbers"):
                    measuring.feature_numbers(total, plan.omitted)
                self._sizing.learn_numbers(plan, seconds["numbers"], turn=False)

    @property
    def sizing(self) -> Sizing | None:
        """Sizes of measurements within a budget; None in processes other than the first, and before `prepare`."""
        return self._sizing

    def measure(
        self,
        step: int,
        in_first_process: bool,
        plan: MeasurementPlan | None = None,
        observed: Observed | None = None,
    ) -> Snapshot:
        """Measure the model as it is now.

        Args:
            step: Training step of the measurement.
            in_first_process: Whether this process measures weights and kernels too, and warns.
            plan: Sizes of the measurement, from `sizing`. None is the largest one that memory allows.
            observed: Signals of the training that the diagnoses take into account.

        Returns:
            The measurement.

        Raises:
            InputError: The model is not finite, or has another architecture than its initial state.
        """
        full = self._look_at_plan()
        if full.notes and in_first_process and not self._warned:
            warnings.warn(full.warning(), UserWarning, stacklevel=6)
        self._warned = True
        plan = full if plan is None else plan
        numbers: dict[str, dict[str, float]] = {name: {} for name in self._layers}
        whole: dict[str, float] = {}
        phases: dict[measuring.Key, Phase] = {}
        matrices: dict[str, Tensor] = {}
        seconds: dict[str, float] = {}
        single = {name for name, layer in self._layers.items() if layer.groups * layer.k_out == 1}
        if "features" in plan.parts:
            total = self._accumulator(plan)
            with _timed(seconds, "features"):
                measuring.sum_features(total, self.rows, plan)
            with _timed(seconds, "numbers"):
                report, by_layer = measuring.feature_numbers(total, plan.omitted)
                for name, values in by_layer.items():
                    # Products outside of modules are known to the probe alone.
                    numbers.setdefault(name, {}).update(values)
                single |= {name for name, features in report.items() if features.shape[:2] == (1, 1)}
                matrices |= measuring.feature_matrices(report, self._matrices)
        if in_first_process and "weights" in plan.parts:
            with _timed(seconds, "weights"):
                chosen = [name for name in self._layers if not plan.sized or name in plan.spectra]
                by_layer, of, stored = self._measure_weights(chosen, plan)
                for name, values in by_layer.items():
                    numbers[name] = values | numbers[name]
                phases |= of
                matrices |= stored
        if in_first_process and plan.parts & {"ck", "ntk"}:
            for owner, values, of, stored in self._measure_kernels(plan, seconds):
                (whole if owner is None else numbers[owner]).update(values)
                phases |= of
                matrices |= stored
        numbers = {name: values for name, values in numbers.items() if values}
        part = self.rows.part or plan.feature_rows < self.rows.samples
        readings = measuring.diagnose_layers(single, numbers, phases, part, observed or Observed())
        if self._sizing is not None:
            self._sizing.learn(plan, seconds)
        sizes = {"features": plan.feature_rows, "weights": len(plan.spectra), "ck": plan.ck_rows, "ntk": plan.ntk_rows}
        whole |= {f"monitor.{_SIZES[part]}": float(number) for part, number in sizes.items() if part in plan.parts}
        return Snapshot(
            step, numbers, whole, readings, phases, matrices, reduced=describe_size(plan, full, len(self._layers))
        )

    def layers_of_both(self) -> tuple[dict[str, Layer], dict[str, Layer]]:
        """Return the layers of the model and of the initial model, by name."""
        self._look_at_structure()
        return self._layers, self._first

    def limited_threads(self) -> AbstractContextManager[object]:
        """Limit the threads of BLAS in a block to those that the eigenvalue problems of the layers need."""
        self._look_at_structure()
        return limited_threads(self._layers.values())

    def _look_at_structure(self) -> None:
        """Check the parameters; find the layers at first, and again if modules or parameters are not the same."""
        model = unwrap(self._model)
        check_parameters(model)
        structure = _Structure.of(model)
        if structure == self._structure:
            return
        layers, first = (selected_layers(m, self._options["layers"]) for m in (model, self.initial))
        matching_layers(layers.values(), first.values())
        self._structure, self._layers, self._first = structure, layers, first
        self._features = self._kernels = None

    def _look_at_plan(self) -> MeasurementPlan:
        """Return the largest measurement; it is planned at first, and again for another structure before the first."""
        self._look_at_structure()
        # Once: later measurements must be of the same rows as the first.
        if self._plan is None or (not self._warned and self._planned_for != self._structure):
            self._plan = run_in_first(self._make_plan)
            self._planned_for = self._structure
        return self._plan

    def _accumulator(self, plan: MeasurementPlan) -> FeatureAccumulator:
        """Return an accumulator without sums."""
        # Few rows are a sample of those of later measurements, with which their correlations are compared.
        rows = "sample" if plan.feature_rows < self.rows.samples or plan.outputs == 1 else "all"
        kind = (plan.outputs, plan.measure, rows)
        if self._features is None or self._features_kind != kind:
            options = {**self._options, "outputs": plan.outputs, "measure": plan.measure, "rows": rows}
            options["max_memory"] = plan.memory
            self._features = FeatureAccumulator(self._model, initial=self.initial, **options)
            self._features_kind = kind
        else:
            self._features.reset()
        return self._features

    def _measure_weights(
        self, names: Iterable[str], plan: MeasurementPlan
    ) -> tuple[dict[str, dict[str, float]], dict[measuring.Key, Phase], dict[str, Tensor]]:
        layers = {name: self._layers[name] for name in names}
        with at_rest(unwrap(self._model)), at_rest(self.initial):
            new = [name for name in layers if name in plan.spectra and (name, "w") not in self._start.spectra]
            measuring.add_start_weights(self._start, {name: self._first[name] for name in new})
            return measuring.weight_numbers(layers, self._first, self._start, self._directions, self._matrices)

    def _measure_kernels(
        self, plan: MeasurementPlan, seconds: dict[str, float]
    ) -> Iterator[tuple[str | None, dict[str, float], dict[measuring.Key, Phase], dict[str, Tensor]]]:
        """Yield the numbers, phases and matrices of each layer and of the model (None)."""
        sizes = {"ck": (plan.ck_rows, None), "ntk": (plan.ntk_rows, plan.sketches)}
        wanted = [part for part in sizes if part in plan.parts]
        together = len(wanted) > 1 and plan.ck_rows == plan.ntk_rows  # from the same forward passes
        for parts in [wanted] if together else [[part] for part in wanted]:
            began = time.perf_counter()
            current = replace(plan, parts=frozenset(parts))
            new = [part for part in parts if self._start_sizes.get(part) != sizes[part]]
            if new:
                # The model may have been moved or cast since the initial copy.
                first = initial_model(self.initial, unwrap(self._model), unwrap(self._model))
                kernels = measuring.measure_kernels(self._make_kernels(first, plan), self.rows, current)
                measuring.add_start_kernels(self._start, kernels, parts)
                self._start_sizes |= {part: sizes[part] for part in parts}
            if self._kernels is None or self._kernels_sketches != plan.sketches:
                self._kernels, self._kernels_sketches = self._make_kernels(self._model, plan), plan.sketches
            kernels = measuring.measure_kernels(self._kernels, self.rows, current)
            targets = self.rows.kernel_targets
            by_owner, of, stored = measuring.kernel_numbers(kernels, targets, self._start, self._matrices)
            for number, (owner, values) in enumerate(by_owner.items()):
                yield owner, values, of if not number else {}, stored if not number else {}
            for part in parts:
                seconds[part] = (time.perf_counter() - began) / len(parts)

    def _make_kernels(self, model: nn.Module, plan: MeasurementPlan) -> ModelKernels:
        return ModelKernels(
            model, self._layers, sketches=plan.sketches, forward=self._options["forward"], max_memory=plan.memory
        )

    def _make_plan(self) -> MeasurementPlan:
        model, rows, forward = unwrap(self._model), self.rows, self._options["forward"]
        memory = self._max_memory or available_memory() // 10
        sizes, sharing = sizes_of(model, rows, forward), None
        if "features" in self._parts:
            sharing = sharing_of(model, rows, sizes, memory, forward, self._options["layers"])
        work = Work(model, self._layers, sizes, rows.samples, self._options, sharing, self._matrices)
        full = plan_measurement(work, rows, self._parts, memory)
        if self._in_budget and full.parts - {"weights"}:
            self._sizing = Sizing(full, work, time_passes(model, rows, sizes, memory, forward), rows.batch)
        elif self._in_budget:
            self._sizing = Sizing(full, work, Passes(0.0, 0.0), rows.batch)
        return full


@contextmanager
def _timed(seconds: dict[str, float], part: str) -> Iterator[None]:
    began = time.perf_counter()
    yield
    seconds[part] = time.perf_counter() - began


def selected_layers(model: nn.Module, globs: str | Iterable[str] | None) -> dict[str, Layer]:
    """Return the layers of a model that match patterns, by name; a model without known layers has none.

    Args:
        model: The model.
        globs: Glob pattern of layer names, or several. None selects all.
    """
    layers = find_layers(unwrap(model))
    return {layer.name: layer for layer in select_layers(layers, globs)} if layers else {}


class _Structure(NamedTuple):
    """Modules and parameters of a model, equal for models of the same modules and the same parameter objects.

    Attributes:
        modules: Name and type of each module.
        parameters: Name, precision and device of each parameter.
        identities: The parameters by identity, which are kept alive so that no other tensor takes their place.
    """

    modules: list[tuple[str, type]]
    parameters: list[tuple[str, torch.dtype, torch.device]]
    identities: list[_Same]

    @classmethod
    def of(cls, model: nn.Module) -> _Structure:
        """Return the structure of a model."""
        parameters = list(model.named_parameters())
        return cls(
            [(name, type(module)) for name, module in model.named_modules()],
            [(name, p.dtype, p.device) for name, p in parameters],
            [_Same(p) for _, p in parameters],
        )


class _Same:
    """Object that is equal to those of the same tensor."""

    def __init__(self, tensor: Tensor) -> None:
        self.tensor = tensor

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Same) and self.tensor is other.tensor
