"""Estimates of the operations and bytes of a measurement, from shapes."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any

from torch import nn

from featlearn.capture import ModelSession, Sizes
from featlearn.features import LayerCost, layer_costs
from featlearn.features.measurement_plan import QUANTITIES, plan_outputs
from featlearn.kernels.contractions import pair_operations, sample_operations
from featlearn.layers import Layer, find_layers

_EIGENVALUES = 30.0  # operations of an eigenvalue problem over k^3, in units of the faster operations of products


@dataclass(frozen=True)
class Sharing:
    """Cost of measuring layers whose rows are shared by samples, one sample after the other.

    Attributes:
        seconds: Time per row of the data and output vector, in seconds.
        limit: Time of `featlearn.training.PASSES` forward and backward passes of the probe rows, in seconds.
        alone: Whether samples can be run separately; otherwise the number of rows cannot be reduced.
    """

    seconds: float
    limit: float
    alone: bool


@dataclass
class Work:
    """Estimates of the operations and bytes of the parts of a measurement, from shapes.

    Attributes:
        model: Model to measure.
        layers: Layers to measure, by name.
        sizes: Sizes of one sample in all layers of the model.
        samples: Number of rows for feature matrices.
        options: Arguments of the accumulator.
        sharing: Cost of layers with shared rows. None if there are none.
        matrices: Names of the matrices to store.
    """

    model: nn.Module
    layers: Mapping[str, Layer]
    sizes: Sizes
    samples: int
    options: Mapping[str, Any]
    sharing: Sharing | None = None
    matrices: Collection[str] = ()

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

    def feature_passes(self, outputs: str | int, rows: int, both: bool = True) -> float:
        """Return the operations of the passes for feature matrices; arguments as in `features`."""
        passes = (2.0 if both else 1.0) * (1 + self.vectors(outputs)) + 10 * (self.options["loss"] is not None)
        return self.passes(rows, passes)

    def features(self, outputs: str | int, rows: int, both: bool = True) -> tuple[float, float]:
        """Return the operations and bytes of the feature matrices.

        Args:
            outputs: Outputs of the probe.
            rows: Number of rows.
            both: Whether gradients of the initial model are taken too.
        """
        passes, costs = self.feature_passes(outputs, rows, both), self.layer_costs(outputs, rows, both).values()
        operations, size = sum(cost.sums + cost.numbers for cost in costs), sum(cost.bytes for cost in costs)
        weights = sum(_weights(layer) for layer in self.layers.values())
        # Sums, the memory of computing numbers from them, and weights in double precision, of two models.
        return passes + operations, 2.0 * size + 32.0 * weights

    def layer_costs(self, outputs: str | int, rows: int, both: bool = True) -> dict[str, LayerCost]:
        """Return the cost of feature matrices by layer; none for products outside of modules, which the probe finds.

        Args:
            outputs: Outputs of the probe.
            rows: Number of rows.
            both: Whether gradients of the initial model are taken too.
        """
        if not self.layers:
            return {}
        planned = plan_outputs(outputs, self.sizes.outputs)
        loss, decay = (self.options[name] is not None for name in ("loss", "weight_decay"))
        return layer_costs(
            list(self.layers.values()),
            {name: int(self.sizes.positions.get(name, 0) * rows) + 1 for name in self.layers},
            outputs=planned.sketches or planned.count, exact=not planned.sketches, measure=self.measure(both),
            initial=True, loss=loss, weight_decay=decay,
        )  # fmt: skip

    def measure(self, both: bool) -> tuple[str, ...] | None:
        """Return the quantities of the probe; None is all of them.

        Args:
            both: Whether gradients of the initial model are taken too.
        """
        if both:
            return None
        given = {"B": self.options["loss"] is not None, "decay": self.options["weight_decay"] is not None}
        left_out = {"Kb"} | {need for need, known in given.items() if not known}
        return tuple(
            name for name, needs in QUANTITIES.items()
            if not needs & left_out and ("outer" not in needs or name in self.matrices)
        )  # fmt: skip

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
