"""Model in training with all that its measurements share."""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Mapping
from contextlib import AbstractContextManager
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from featlearn._utils.memory import available_memory
from featlearn.capture import at_rest, check_parameters, matching_layers
from featlearn.features import FeatureAccumulator
from featlearn.kernels.model_kernels import ModelKernels
from featlearn.layers import Layer, find_layers, select_layers, unwrap
from featlearn.spectra import Phase
from featlearn.training import _measurement as measuring
from featlearn.training._first_process import run_in_first
from featlearn.training._measurement import Observed, Snapshot, Start
from featlearn.training._plan import MeasurementPlan, plan_measurement, sharing_of, sizes_of
from featlearn.training._probe_data import ProbeRows
from featlearn.training._threads import limited_threads


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
    ) -> None:
        self._model, self.initial, self.rows = model, initial, rows
        self._parts, self._options, self._matrices = frozenset(parts), features, list(matrices)
        self._directions, self._max_memory = directions, max_memory
        self._plan: MeasurementPlan | None = None
        self._start: Start | None = None
        self._structure: _Structure | None = None
        self._layers: dict[str, Layer] = {}
        self._first: dict[str, Layer] = {}
        self._features: FeatureAccumulator | None = None
        self._kernels: ModelKernels | None = None

    def measure(self, step: int, in_first_process: bool, observed: Observed | None = None) -> Snapshot:
        """Measure the model as it is now.

        Args:
            step: Training step of the measurement.
            in_first_process: Whether this process measures weights and kernels too, and warns.
            observed: Signals of the training that the diagnoses take into account.

        Returns:
            The measurement.

        Raises:
            InputError: The model is not finite, or has another architecture than its initial state.
        """
        self._look_at_structure()
        if self._plan is None:  # once: later measurements must be of the same rows as the first
            self._plan = run_in_first(self._make_plan)
            if self._plan.notes and in_first_process:
                warnings.warn(self._plan.warning(), UserWarning, stacklevel=6)
        plan = self._plan
        numbers: dict[str, dict[str, float]] = {name: {} for name in self._layers}
        whole: dict[str, float] = {}
        phases: dict[measuring.Key, Phase] = {}
        matrices: dict[str, Tensor] = {}
        single = {name for name, layer in self._layers.items() if layer.groups * layer.k_out == 1}
        if "features" in plan.parts:
            report, by_layer = measuring.feature_numbers(self._accumulator(plan), self.rows, plan)
            for name, values in by_layer.items():
                # Products outside of modules are known to the probe alone.
                numbers.setdefault(name, {}).update(values)
            single |= {name for name, features in report.items() if features.shape[:2] == (1, 1)}
            matrices |= measuring.feature_matrices(report, self._matrices)
        if in_first_process:
            if self._start is None:
                self._start = self._measure_start(plan)
            if "weights" in plan.parts:
                with at_rest(unwrap(self._model)), at_rest(self.initial):
                    by_layer, of, stored = measuring.weight_numbers(
                        self._layers, self._first, self._start, self._directions, self._matrices
                    )
                numbers = {name: by_layer.get(name, {}) | values for name, values in numbers.items()}
                phases |= of
                matrices |= stored
            if plan.parts & {"ck", "ntk"}:
                if self._kernels is None:
                    self._kernels = self._make_kernels(self._model, plan)
                kernels = measuring.measure_kernels(self._kernels, self.rows, plan)
                targets = self.rows.kernel_targets
                by_owner, of, stored = measuring.kernel_numbers(kernels, targets, self._start, self._matrices)
                for owner, values in by_owner.items():
                    (whole if owner is None else numbers[owner]).update(values)
                phases |= of
                matrices |= stored
        numbers = {name: values for name, values in numbers.items() if values}
        part = self.rows.part or plan.feature_rows < self.rows.samples
        readings = measuring.diagnose_layers(single, numbers, phases, part, observed or Observed())
        return Snapshot(step, numbers, whole, readings, phases, matrices)

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

    def _accumulator(self, plan: MeasurementPlan) -> FeatureAccumulator:
        """Return an accumulator without sums."""
        if self._features is None:
            options = {**self._options, "outputs": plan.outputs, "max_memory": plan.memory}
            self._features = FeatureAccumulator(self._model, initial=self.initial, **options)
        else:
            self._features.reset()
        return self._features

    def _make_kernels(self, model: nn.Module, plan: MeasurementPlan) -> ModelKernels:
        return ModelKernels(
            model, self._layers, sketches=plan.sketches, forward=self._options["forward"], max_memory=plan.memory
        )

    def _measure_start(self, plan: MeasurementPlan) -> Start:
        kernels: dict[measuring.Key, Tensor] = {}
        if plan.parts & {"ck", "ntk"}:
            kernels = measuring.measure_kernels(self._make_kernels(self.initial, plan), self.rows, plan)
        with at_rest(self.initial):
            return measuring.measure_start(self._first, kernels, plan)

    def _make_plan(self) -> MeasurementPlan:
        model, rows, forward = unwrap(self._model), self.rows, self._options["forward"]
        memory = self._max_memory or available_memory() // 10
        sizes, sharing = sizes_of(model, rows, forward), None
        if "features" in self._parts:
            sharing = sharing_of(model, rows, sizes, memory, forward, self._options["layers"])
        return plan_measurement(model, self._layers, sizes, rows, self._parts, self._options, memory, sharing)


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
