"""What a probe will cost, before it is made: from the shapes of the layers alone."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import pandas as pd
from torch import nn

from featlearn._utils.memory import parse_memory, readable_size
from featlearn._utils.validation import check_int
from featlearn.errors import InputError
from featlearn.features._batch_sums import CELLS
from featlearn.features.measurement_plan import GROUPS, UNGROUPED, SumPlan, plan_sums, resolve_measure, sums_bytes
from featlearn.layers import Layer, find_layers, select_layers


@dataclass(frozen=True, eq=False)
class ProbeCost:
    """What a probe is expected to take.

    Attributes:
        table: A row a layer: shape, side on which its sums are kept, bytes of the sums, and operations for the model's
            passes, for the sums, and once at the end for the numbers.
        parameters: Of the layers.
    """

    table: pd.DataFrame
    parameters: int

    @property
    def bytes(self) -> int:
        """Of the sums of all layers; the model and one batch's graph come on top."""
        return int(self.table["bytes"].sum())

    @property
    def operations(self) -> float:
        """Floating-point operations, all in all."""
        return float(self.table[["passes", "sums", "numbers"]].to_numpy().sum())

    def rounds(self, max_memory: int | float | str | None = None) -> list[list[str]]:
        """Layers in groups whose sums fit the memory, in order; each is a call of probe with ``layers=``."""
        memory = parse_memory(max_memory)
        found: list[list[str]] = []
        left = 0
        for name, needed in self.table["bytes"].items():
            if needed > memory:
                raise InputError(
                    f"the sums of layer {name!r} alone take {readable_size(needed)}, more than max_memory = "
                    f"{readable_size(memory)}: ask for fewer quantities (measure=)"
                )
            if not found or needed > left:
                found.append([])
                left = memory
            found[-1].append(str(name))
            left -= needed
        return found

    def __str__(self) -> str:
        work = self.table[["passes", "sums", "numbers"]].sum()
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
    """Operations and memory of `featlearn.probe`, from shapes alone; the model may be on the "meta" device.

    With c outputs (or sketches), r rows and a layer of ``P = k_out k_in`` weights: a forward pass takes ``2 r P``
    operations, the backward passes ``2 c r P``. Sums of ``J^T J`` on the outputs' side take ``c r k_out^2`` (half of a
    symmetric product), on the inputs' side, where k_out is large, ``2 c r P + c r k_in^2``. The numbers take a few
    products of k x k matrices in float64, whatever the rows. Attention, activations and the reading of data are not
    counted.

    Args:
        model: Any module; nothing of it is run.
        rows: Positions that a layer sees in all: samples, times tokens or pixels; by layer, or one number for all.
        outputs: Outputs of the model, or sketches: one backward pass each.
        exact: Whether these are all the outputs (one set of sums), rather than sketches (`GROUPS` sets of them).
        measure: As in `featlearn.probe`.
        layers: As in `featlearn.probe`.
        initial: Whether the initial model will be given.
        loss: Whether a loss will be given.
        weight_decay: Whether a weight decay will be given.

    Example:
        >>> import torch, featlearn as fl
        >>> with torch.device("meta"):
        ...     model = torch.nn.Sequential(torch.nn.Linear(4096, 11008), torch.nn.ReLU(), torch.nn.Linear(11008, 4096))
        >>> print(fl.features.probe_cost(model, rows=10_000))
        2 layers of 9e+07 weights: 5.2e+13 operations (passes 59%, sums 38%, numbers 4%), 1.5 GiB of sums
    """
    chosen = select_layers(find_layers(model), layers)
    check_int("outputs", outputs)
    wanted = resolve_measure(measure, initial=initial, loss=loss, decay=weight_decay)
    groups = 1 if exact else GROUPS
    plans = plan_sums(chosen, wanted, groups, memory=None)
    found = {layer.name: _layer_cost(layer, plans[layer.name], _rows_of(rows, layer), outputs, groups, wanted)
             for layer in chosen}  # fmt: skip
    table = pd.DataFrame.from_dict(found, orient="index", columns=["shape", "side", "bytes", *_WORK])
    return ProbeCost(table, sum(layer.groups * layer.k_out * layer.k_in for layer in chosen))


_WORK = ("passes", "sums", "numbers")


def _rows_of(rows: int | Mapping[str, int], layer: Layer) -> int:
    if not isinstance(rows, Mapping):
        return rows
    if layer.name not in rows:
        raise InputError(f"rows has no number for the layer {layer.name!r}")
    return rows[layer.name]


def _layer_cost(
    layer: Layer, plan: SumPlan, rows: int, outputs: int, groups: int, wanted: frozenset[str]
) -> tuple[str, str, int, float, float, float]:
    blocks, k_out, k_in = layer.shape
    weights = blocks * k_out * k_in
    models = 2 if "Kb" in wanted else 1
    backward = (outputs * models if wanted & {"K", "Kb"} else 0) + (1 if wanted & {"B", "D"} else 0)
    # The gradient in W, and those of parts of the first batches, for its noise.
    passes = 2.0 * rows * weights * (models + backward + (1 + 2 * (CELLS - 1) if "D" in wanted else 0))
    side = k_out if plan.outer else k_in
    projected = 0.0 if plan.outer else 2.0 * weights
    of_outputs = [name for name in plan.sums if name not in UNGROUPED]
    times = outputs * len(of_outputs) + sum(name in ("B", "enfa") for name in plan.sums)
    sums = float(rows) * times * (projected + blocks * float(side) ** 2)
    kept = sum(groups if name in of_outputs else 1 for name in plan.sums if name != "D")
    # The Gram matrix of W, and one product with each set of sums.
    numbers = 2.0 * blocks * side**2 * (k_out + k_in - side) + 2.0 * blocks * kept * float(side) ** 3
    shape = f"{k_out} x {k_in}" if blocks == 1 else f"{blocks} of {k_out} x {k_in}"
    return shape, "outputs" if plan.outer else "inputs", sums_bytes(plan, groups), passes, sums, numbers
