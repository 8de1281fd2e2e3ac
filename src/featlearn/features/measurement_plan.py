"""Quantities that can be measured, the sums each one needs, and the output directions that are differentiated."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from featlearn._utils.memory import readable_size
from featlearn._utils.validation import is_int
from featlearn.errors import InputError
from featlearn.layers import Layer

# Name of a quantity -> the sums over the data that it is made of. A "K" sum is of J J^T, "Kb" of
# (J - J0)(J - J0)^T, "B" of loss gradients g g^T, "D" the gradient of the loss in W. "outer" asks for the
# k_out x k_out matrix itself, where a correlation would do with the smaller side.
QUANTITIES: Mapping[str, frozenset[str]] = {
    "nfm": frozenset(),
    "weight_change": frozenset({"initial"}),
    "nfc": frozenset({"K"}),
    "agop": frozenset({"K"}),
    "ptk_covariance": frozenset({"K", "outer"}),
    "bagop": frozenset({"K", "outer"}),
    "centered_nfc": frozenset({"K", "centered", "initial"}),
    "centered_ratio": frozenset({"K", "centered", "initial"}),
    "double_centered_nfc": frozenset({"Kb", "double", "initial"}),
    "double_centered_ratio": frozenset({"K", "centered", "Kb", "double", "initial"}),
    "ptk_centered_nfc": frozenset({"Kb", "ptk", "initial"}),
    "enfa": frozenset({"B"}),
    "benfa": frozenset({"B", "outer"}),
    "fact": frozenset({"D", "decay"}),
    "bfact": frozenset({"D", "decay"}),
    "fact_symmetric": frozenset({"D", "decay"}),
    "bfact_symmetric": frozenset({"D", "decay"}),
    "relgrad": frozenset({"D", "decay"}),
    "relgrad_noise": frozenset({"D", "decay"}),
}

UNGROUPED = ("B", "D", "enfa")
"""Sums of loss gradients, which are not sketched; those of output gradients have a dimension of sketch groups."""

# What a need is met by.
_ARGUMENTS = {
    "initial": "initial= (the model, or its state_dict, before training)",
    "B": "loss=",
    "D": "loss=",
    "decay": "weight_decay= (greater than 0)",
}

# Up to this many outputs a layer keeps its k_out x k_out matrices even where k_in is smaller: 32 MB each.
_OUTER_UP_TO = 2048


@dataclass(frozen=True)
class SumPlan:
    """The sums that one layer keeps.

    Attributes:
        outer: Whether they are ``k_out x k_out`` (of J itself) or ``k_in x k_in`` (of J W).
        sums: Name of each sum and its shape; those of J get a leading dimension of groups later.
    """

    outer: bool
    sums: Mapping[str, tuple[int, int, int]]


def resolve_measure(measure: str | Iterable[str] | None, *, initial: bool, loss: bool, decay: bool) -> frozenset[str]:
    """What to accumulate for the asked quantities; None takes all that the other arguments allow."""
    available = frozenset({"K"})
    if initial:
        available |= {"initial", "centered", "Kb", "double", "ptk"}
    if loss:
        available |= {"B", "D"}
    if decay:
        available |= {"decay"}
    if measure is None:
        return available if decay else available - {"D"}
    names = [measure] if isinstance(measure, str) else list(measure)
    if not names:
        raise InputError("measure names no quantity")
    wanted: frozenset[str] = frozenset()
    for name in names:
        if name not in QUANTITIES:
            raise InputError(f"measure={name!r} is no quantity: choose from {', '.join(QUANTITIES)}")
        missing = [_ARGUMENTS[need] for need in sorted(QUANTITIES[name] - available) if need in _ARGUMENTS]
        if missing:
            raise InputError(f"{name} needs {' and '.join(dict.fromkeys(missing))}")
        wanted |= QUANTITIES[name]
    return wanted


def plan_sums(layers: Sequence[Layer], wanted: frozenset[str], groups: int, memory: int | None) -> dict[str, SumPlan]:
    """Choose for each layer the side on which its sums are kept, within the memory given; None is without bound.

    A correlation needs only the smaller side: with ``A = W W^T``, ``<F, G> = tr(A^2 K)`` and
    ``|G|^2 = tr((A K)^2)``; where k_out is large, ``W^T K W`` is summed from the projected rows ``J W``.
    """
    must_be_outer = "outer" in wanted
    outer = {layer.name: must_be_outer or layer.k_out <= max(layer.k_in, _OUTER_UP_TO) for layer in layers}

    def plans() -> dict[str, SumPlan]:
        return {layer.name: SumPlan(outer[layer.name], _sums(layer, wanted, outer[layer.name])) for layer in layers}

    def used(chosen: Mapping[str, SumPlan]) -> int:
        return sum(sums_bytes(plan, groups) for plan in chosen.values())

    chosen = plans()
    if memory is None:
        return chosen
    if used(chosen) > memory and not must_be_outer:
        for layer in layers:
            outer[layer.name] = layer.k_out <= layer.k_in
        chosen = plans()
    if used(chosen) > memory:
        largest = max(layers, key=lambda layer: sums_bytes(chosen[layer.name], groups))
        raise InputError(
            f"the sums of {len(layers)} layers take {readable_size(used(chosen))}, more than max_memory = "
            f"{readable_size(memory)}; the largest are those of {largest.name!r} "
            f"({largest.k_out} x {largest.k_in}): ask for fewer layers (layers=) or quantities (measure=)"
        )
    return chosen


def _sums(layer: Layer, wanted: frozenset[str], outer: bool) -> dict[str, tuple[int, int, int]]:
    side = layer.k_out if outer else layer.k_in
    square = (layer.groups, side, side)
    if outer:
        kinds = {"K": "K", "Kb": "Kb", "B": "B"}
    else:
        kinds = {"K": "agop", "centered": "centered", "double": "double", "ptk": "ptk", "B": "enfa"}
    sums = {name: square for need, name in kinds.items() if need in wanted}
    if "D" in wanted:
        sums["D"] = layer.shape
    return sums


def sums_bytes(plan: SumPlan, groups: int) -> int:
    """Bytes of a layer's float64 sums and of the batch's own, half as wide."""
    total = 0
    for name, (blocks, rows, columns) in plan.sums.items():
        copies = groups if name not in UNGROUPED else 1
        total += copies * blocks * rows * columns * (8 + 4)
    return total


EXACT_UP_TO = 64
SKETCHES = 16
GROUPS = 4


@dataclass(frozen=True)
class Outputs:
    """How the sum over outputs is taken.

    Attributes:
        count: Scalar outputs a sample.
        sketches: Random output vectors a sample; 0 where each output is differentiated by itself.
        groups: Sums kept apart, from whose spread the standard error is estimated.
    """

    count: int
    sketches: int = 0
    groups: int = 1

    def scale(self, groups: int | None = None) -> float:
        """What a sum over ``groups`` groups (default all) must be divided by, besides the samples."""
        if not self.sketches:
            return 1.0
        return self.sketches / self.groups * (self.groups if groups is None else groups)


def check_outputs(outputs: str | int) -> None:
    """Refuse anything but "auto", "exact" and a number of sketches."""
    if outputs in ("auto", "exact"):
        return
    if not is_int(outputs, 1):
        raise InputError(f'outputs must be "auto", "exact" or a number of random output vectors, got {outputs!r}')


def plan_outputs(outputs: str | int, count: int) -> Outputs:
    """Exact up to 64 outputs, otherwise 16 random vectors; or as the user says, in multiples of four."""
    if outputs == "exact" or (outputs == "auto" and count <= EXACT_UP_TO):
        return Outputs(count)
    sketches = SKETCHES if outputs == "auto" else int(outputs)
    if sketches <= GROUPS:
        return Outputs(count, sketches, sketches)
    # Groups of one size: a few vectors more cost less than a standard error that cannot be told.
    return Outputs(count, math.ceil(sketches / GROUPS) * GROUPS, GROUPS)


def cotangents(plan: Outputs, output: Tensor, generator: torch.Generator) -> Iterator[tuple[int, Tensor]]:
    """Vectors v, shaped like the output, and the group each belongs to: J is the gradient of <output, v>.

    Exact: v picks one output of every sample. Sketch: independent signs for every sample and output, so that
    ``E[v v^T] = I`` and the sum over outputs is unbiased (FORMULAS, section 1).
    """
    if not plan.sketches:
        for c in range(plan.count):
            v = torch.zeros_like(output, memory_format=torch.contiguous_format)
            v.view(output.shape[0], -1)[:, c] = 1
            yield 0, v
        return
    for s in range(plan.sketches):
        bits = torch.randint(0, 2, output.shape, generator=generator, dtype=torch.int8)
        yield s % plan.groups, bits.to(output.device, output.dtype).mul_(2).sub_(1)
