"""Cost of a probe in operations and memory, from the shapes of the layers."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

from torch import nn

from featlearn._utils.memory import parse_memory, readable_size
from featlearn._utils.validation import check_int
from featlearn.errors import InputError
from featlearn.features._batch_sums import CELLS
from featlearn.features.measurement_plan import GROUPS, UNGROUPED, SumPlan, plan_sums, resolve_measure, sums_bytes
from featlearn.layers import Layer, find_layers, select_layers

if TYPE_CHECKING:
    import pandas as pd

_WORK = ["passes", "sums", "numbers"]


@dataclass(frozen=True, eq=False)
class ProbeCost:
    """Expected operations and memory of a probe.

    Attributes:
        table: Table with one row per layer: shape, side on which its sums are kept, bytes of the sums, and operations
            for the passes of the model, for the sums, and once at the end for the numbers.
        parameters: Number of weights of the layers.
    """

    table: pd.DataFrame
    parameters: int

    @property
    def bytes(self) -> int:
        """Bytes of the sums of all layers, without the model and the graph of one batch."""
        return int(self.table["bytes"].sum())

    @property
    def operations(self) -> float:
        """Total number of floating-point operations."""
        return float(self.table[_WORK].to_numpy().sum())

    def rounds(self, max_memory: int | float | str | None = None) -> list[list[str]]:
        """Group the layers, in order, so that the sums of each group fit the memory.

        Args:
            max_memory: Limit in bytes, or text such as ``"2 GB"``. None is half of the memory of the machine.

        Returns:
            Lists of layer names, each for one call of `featlearn.probe` with ``layers=``.

        Raises:
            InputError: The sums of a single layer exceed the limit.
        """
        memory = parse_memory(max_memory)
        rounds: list[list[str]] = []
        left = 0
        for name, needed in self.table["bytes"].items():
            if needed > memory:
                raise InputError(
                    f"max_memory must hold the sums of layer {name!r}, which alone take {readable_size(needed)}, got "
                    f"{readable_size(memory)}. Measure fewer quantities (measure=)."
                )
            if not rounds or needed > left:
                rounds.append([])
                left = memory
            rounds[-1].append(str(name))
            left -= needed
        return rounds

    def __str__(self) -> str:
        work = self.table[_WORK].sum()
        parts = ", ".join(f"{name} {value / self.operations:.0%}" for name, value in work.items())
        return (
            f"{len(self.table)} layers of {self.parameters:.2g} weights: {self.operations:.2g} operations ({parts}), "
            f"{readable_size(self.bytes)} of sums"
        )


def probe_cost(
    model: nn.Module,
    rows: int | Mapping[str, int],
    *,
    outputs: int = 16,
    exact: bool = False,
    measure: str | Iterable[str] | None = "nfc",
    layers: str | Iterable[str] | None = None,
    initial: bool = False,
    loss: bool = False,
    weight_decay: bool = False,
) -> ProbeCost:
    """Estimate the operations and memory of `featlearn.probe` from the shapes of the layers.

    With c outputs (or sketches), r rows and a layer of ``P = k_out k_in`` weights: a forward pass takes ``2 r P``
    operations, the backward passes ``2 c r P``. Sums of ``J^T J`` on the side of the outputs take ``c r k_out^2`` (half
    of a symmetric product), on the side of the inputs, where k_out is large, ``2 c r P + c r k_in^2``. The numbers take
    a few products of k x k matrices in float64, independent of the rows. Attention, activations and data loading are
    not counted.

    Args:
        model: Module, which is not called; it may be on the "meta" device.
        rows: Number of positions: samples, times tokens or pixels. Integer for all layers, or integers by layer name.
        outputs: Number of outputs of the model, or of sketches: one backward pass each.
        exact: Whether `outputs` counts outputs (one set of sums) rather than sketches (four sets of sums).
        measure: Quantities to measure, as in `featlearn.probe`. None takes all that the other arguments allow.
        layers: Glob pattern of layer names, or several. None takes all layers.
        initial: Whether the initial model will be passed.
        loss: Whether a loss will be passed.
        weight_decay: Whether a weight decay will be passed.

    Returns:
        The cost by layer.

    Raises:
        InputError: An argument is invalid, or `rows` lacks a layer.

    Example:
        >>> import torch, featlearn as fl
        >>> with torch.device("meta"):
        ...     model = torch.nn.Sequential(torch.nn.Linear(4096, 11008), torch.nn.ReLU(), torch.nn.Linear(11008, 4096))
        >>> print(fl.features.probe_cost(model, rows=10_000))
        2 layers of 9e+07 weights: 3.8e+13 operations (passes 81%, sums 14%, numbers 5%), 1.5 GiB of sums
    """
    import pandas as pd

    chosen = select_layers(find_layers(model), layers)
    costs = layer_costs(
        chosen, rows, outputs=outputs, exact=exact, measure=measure, initial=initial, loss=loss,
        weight_decay=weight_decay,
    )  # fmt: skip
    table = pd.DataFrame.from_dict(costs, orient="index", columns=list(LayerCost._fields))
    return ProbeCost(table, sum(layer.groups * layer.k_out * layer.k_in for layer in chosen))


class LayerCost(NamedTuple):
    """Cost of one layer in a probe.

    Attributes:
        shape: Shape of the weights as text.
        side: Side on which its sums are kept, "outputs" or "inputs".
        bytes: Bytes of the sums.
        passes: Operations of the passes of the model.
        sums: Operations of the sums.
        numbers: Operations of the numbers, once at the end.
    """

    shape: str
    side: str
    bytes: int
    passes: float
    sums: float
    numbers: float


def layer_costs(
    layers: Sequence[Layer],
    rows: int | Mapping[str, int],
    *,
    outputs: int,
    exact: bool,
    measure: str | Iterable[str] | None,
    initial: bool,
    loss: bool,
    weight_decay: bool,
) -> dict[str, LayerCost]:
    """Estimate the cost of each layer, as `probe_cost` does, without the time of making a table.

    Args:
        layers: Layers to measure.
        rows: Number of positions, as in `probe_cost`.
        outputs: Number of outputs of the model, or of sketches.
        exact: Whether `outputs` counts outputs rather than sketches.
        measure: Quantities to measure.
        initial: Whether the initial model will be passed.
        loss: Whether a loss will be passed.
        weight_decay: Whether a weight decay will be passed.
    """
    check_int("outputs", outputs)
    wanted = resolve_measure(measure, initial=initial, loss=loss, decay=weight_decay)
    groups = 1 if exact else GROUPS
    plans = plan_sums(layers, wanted, groups, None, everything=measure is None)
    costs = {}
    for layer in layers:
        if isinstance(rows, Mapping) and layer.name not in rows:
            raise InputError(f"rows must have a number for each layer, got no number for the layer {layer.name!r}.")
        count = rows[layer.name] if isinstance(rows, Mapping) else rows
        costs[layer.name] = _layer_cost(layer, plans[layer.name], count, outputs, groups, wanted)
    return costs


def _layer_cost(layer: Layer, plan: SumPlan, rows: int, outputs: int, groups: int, wanted: frozenset[str]) -> LayerCost:
    blocks, k_out, k_in = layer.shape
    weights = blocks * k_out * k_in
    models = 2 if "Kb" in wanted else 1
    backward = (outputs * models if wanted & {"K", "Kb"} else 0) + (1 if wanted & {"B", "D"} else 0)
    # With the gradient in W, and those of parts of the first batches for its noise.
    passes = 2.0 * rows * weights * (models + backward + (1 + 2 * (CELLS - 1) if "D" in wanted else 0))
    side = k_out if plan.outer else k_in
    projected = 0.0 if plan.outer or plan.at_inputs else 2.0 * weights
    of_outputs = [name for name in plan.sums if name not in UNGROUPED]
    times = outputs * len(of_outputs) + sum(name in ("B", "enfa") for name in plan.sums)
    sums = float(rows) * times * (projected + blocks * float(side) ** 2)
    kept = sum(groups if name in of_outputs else 1 for name in plan.sums if name != "D")
    # The Gram matrix of W, and one product with each set of sums.
    numbers = 2.0 * blocks * side**2 * (k_out + k_in - side) + 2.0 * blocks * kept * float(side) ** 3
    shape = f"{k_out} x {k_in}" if blocks == 1 else f"{blocks} of {k_out} x {k_in}"
    return LayerCost(shape, "outputs" if plan.outer else "inputs", sums_bytes(plan, groups), passes, sums, numbers)
