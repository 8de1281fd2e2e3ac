"""Quantities that can be measured, the sums each one needs, and the output directions that are differentiated."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from featlearn._utils.memory import readable_size
from featlearn._utils.validation import check_option, is_int
from featlearn.errors import InputError
from featlearn.features._split import Split
from featlearn.layers import Layer

# Sums over the data that each quantity needs. "K" is the sum of J J^T, "Kb" of (J - J0)(J - J0)^T, "B" of loss
# gradients g g^T, "D" the gradient of the loss in W. "outer" requires the k_out x k_out matrix, where a correlation
# needs the smaller side only.
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
"""Sums of loss gradients, which are not sketched; sums of output gradients have a dimension of sketch groups."""

# Arguments that each need requires.
_ARGUMENTS = {
    "initial": "initial= (the model, or its state_dict, before training)",
    "B": "loss=",
    "D": "loss=",
    "decay": "weight_decay= (greater than 0)",
}

# Layers of up to this k_out keep k_out x k_out matrices even if k_in is smaller: 32 MB each.
_OUTER_UP_TO = 2048


@dataclass(frozen=True)
class SumPlan:
    """Sums that are kept for one layer.

    Attributes:
        outer: Whether the sums are ``k_out x k_out`` (of J) or ``k_in x k_in`` (of J W).
        sums: Shape of each sum by name, without the leading dimension of sketch groups.
        at_inputs: Whether gradients are taken at the input of the layer, where they are ``J W``.
        split: Parts of the layer that are measured as layers of their own; None if it is measured as a whole.
    """

    outer: bool
    sums: Mapping[str, tuple[int, int, int]]
    at_inputs: bool = False
    split: Split | None = None


def resolve_measure(measure: str | Iterable[str] | None, *, initial: bool, loss: bool, decay: bool) -> frozenset[str]:
    """Return the sums to accumulate for some quantities.

    Args:
        measure: Name of a quantity, or several. None takes all that the other arguments allow.
        initial: Whether there is an initial model.
        loss: Whether there is a loss.
        decay: Whether a layer has a positive weight decay.

    Returns:
        Names of sums, see `QUANTITIES`.

    Raises:
        InputError: A quantity is unknown, or an argument that it needs is missing.
    """
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
        raise InputError("measure must name at least one quantity, got none. Leave it out to measure all.")
    wanted: frozenset[str] = frozenset()
    for name in names:
        check_option("measure", name, QUANTITIES)
        missing = [_ARGUMENTS[need] for need in sorted(QUANTITIES[name] - available) if need in _ARGUMENTS]
        if missing:
            raise InputError(f"{name} needs {' and '.join(dict.fromkeys(missing))}.")
        wanted |= QUANTITIES[name]
    return wanted


def plan_sums(
    layers: Sequence[Layer],
    wanted: frozenset[str],
    groups: int,
    memory: int | None,
    everything: bool = True,
    splits: Mapping[str, Split] | None = None,
) -> dict[str, SumPlan]:
    """Choose for each layer the side on which its sums are kept, within a memory limit.

    A correlation needs only the smaller side: with ``A = W W^T``, ``<F, G> = tr(A^2 K)`` and
    ``|G|^2 = tr((A K)^2)``; if k_out is large, ``W^T K W`` is summed from the projected rows ``J W``. These are the
    gradients at the input of a linear layer, which a backward pass computes anyway.

    Args:
        layers: Layers to measure.
        wanted: Sums to accumulate, from `resolve_measure`.
        groups: Number of sketch groups.
        memory: Limit in bytes. None is unlimited.
        everything: Whether layers of moderate size keep ``k_out x k_out`` matrices even if k_in is smaller, so that
            every quantity can be computed from the sums.
        splits: Parts of layers that are measured as layers of their own, by layer name.

    Returns:
        The sums by layer name.

    Raises:
        InputError: The sums exceed the limit.
    """
    splits = splits or {}
    layers = [splits[x.name].layer(x) if x.name in splits else x for x in layers]
    must_be_outer, limit = "outer" in wanted, math.inf if memory is None else memory
    free = not everything and not wanted & {"centered", "double", "ptk"}
    for largest_outer in (_OUTER_UP_TO,) if must_be_outer else (_OUTER_UP_TO, 0):
        plans = {}
        for x in layers:
            up_to = 0 if free and _has_input_gradients(x) else largest_outer
            plan = _plan(x, wanted, must_be_outer or x.k_out <= max(x.k_in, up_to))
            plans[x.name] = replace(plan, split=splits.get(x.name))
        sizes = {name: sums_bytes(plan, groups) for name, plan in plans.items()}
        if sum(sizes.values()) <= limit:
            return plans
    largest = max(layers, key=lambda layer: sizes[layer.name])
    raise InputError(
        f"the sums of {len(layers)} layers take {readable_size(sum(sizes.values()))}, more than max_memory = "
        f"{readable_size(limit)}; the largest are those of {largest.name!r} "
        f"({largest.k_out} x {largest.k_in}): ask for fewer layers (layers=) or quantities (measure=)"
    )


def _plan(layer: Layer, wanted: frozenset[str], outer: bool) -> SumPlan:
    side = layer.k_out if outer else layer.k_in
    if outer:
        kinds = {"K": "K", "Kb": "Kb", "B": "B"}
    else:
        kinds = {"K": "agop", "centered": "centered", "double": "double", "ptk": "ptk", "B": "enfa"}
    sums = {name: (layer.groups, side, side) for need, name in kinds.items() if need in wanted}
    at_inputs = not outer and sums.keys() <= {"agop", "enfa"} and _has_input_gradients(layer)
    return SumPlan(outer, sums | ({"D": layer.shape} if "D" in wanted else {}), at_inputs)


def _has_input_gradients(layer: Layer) -> bool:
    if layer.operation is None or layer.is_complex:
        return layer.input_gradients
    return layer.operation.at_inputs


def sums_bytes(plan: SumPlan, groups: int) -> int:
    """Return the bytes of a layer's float64 sums and of the float32 sums of a batch.

    Args:
        plan: Sums of the layer.
        groups: Number of sketch groups.
    """
    entries = (math.prod(shape) * (1 if name in UNGROUPED else groups) for name, shape in plan.sums.items())
    return sum(entries) * (8 + 4)


EXACT_UP_TO = 64
SKETCHES = 16
GROUPS = 4


@dataclass(frozen=True)
class Outputs:
    """Outputs or random output vectors that are differentiated.

    Attributes:
        count: Number of scalar outputs per sample.
        sketches: Number of random output vectors per sample; 0 if each output is differentiated separately.
        groups: Number of separate sums, from whose spread the standard error is estimated.
        by_rows: Whether groups consist of different rows. Otherwise they consist of different vectors.
    """

    count: int
    sketches: int = 0
    groups: int = 1
    by_rows: bool = False

    def covers_all(self, dtype: torch.dtype) -> bool:
        """Return whether the first vector of `cotangents` with a seed has a part of every output.

        Args:
            dtype: Precision of the output; half precision would round an orthonormal basis.
        """
        return bool(self.sketches) or self.count == 1 or (self.count <= EXACT_UP_TO and dtype.itemsize > 2)

    def scale(self, groups: int | None = None) -> float:
        """Return the divisor of a sum over groups that makes it an estimate of the sum over outputs.

        Args:
            groups: Number of groups in the sum. None is all groups.
        """
        return max(self.sketches, 1) / self.groups * (self.groups if groups is None else groups)


def check_outputs(outputs: str | int) -> None:
    """Raise an error unless `outputs` is "auto", "exact" or a positive number of random output vectors."""
    if outputs not in ("auto", "exact") and not is_int(outputs, 1):
        raise InputError(f'outputs must be "auto", "exact" or a number of random output vectors, got {outputs!r}.')


def plan_outputs(outputs: str | int, count: int, by_rows: bool = False) -> Outputs:
    """Return the outputs or random output vectors to differentiate.

    Args:
        outputs: ``"exact"`` for each output, a number of random vectors (rounded up to a multiple of four, if above
            four and not by rows), or ``"auto"``: exact up to 64 outputs, otherwise 16 vectors.
        count: Number of scalar outputs per sample.
        by_rows: Whether to sum four groups of rows separately.
    """
    exact = outputs == "exact" or (outputs == "auto" and count <= EXACT_UP_TO)
    sketches = 0 if exact else SKETCHES if outputs == "auto" else int(outputs)
    if by_rows:
        return Outputs(count, sketches, GROUPS, by_rows=True)
    if exact:
        return Outputs(count)
    if sketches <= GROUPS:
        return Outputs(count, sketches, sketches)
    # Groups of equal size, which the standard error needs.
    return Outputs(count, math.ceil(sketches / GROUPS) * GROUPS, GROUPS)


def cotangents(
    plan: Outputs, output: Tensor, generator: torch.Generator, seed: int | None = None
) -> Iterator[tuple[int | None, Tensor]]:
    """Yield vectors v, shaped like the output, with the index of their group: J is the gradient of <output, v>.

    Exact: one output after the other, or, with a seed and at most 64 outputs, a random orthonormal basis of the outputs
    of each sample, whose first vector has a part of every output. The sum over the outputs of ``J J^T`` is the same in
    any basis. Sketch: independent signs for every sample and output, so that ``E[v v^T] = I`` and the sum over outputs
    is unbiased.

    Args:
        plan: Outputs or random output vectors.
        output: Output of the model, samples first.
        generator: Generator of the random signs.
        seed: Seed of the bases of the samples. None takes one output after the other.

    Yields:
        Index of the group, None if each row has its own, and the vector.
    """
    n, first = output.shape[0], None if plan.by_rows else 0
    if plan.sketches:
        for s in range(plan.sketches):
            yield (
                None if plan.by_rows else s % plan.groups,
                _as_signs(torch.randint(0, 2, output.shape, generator=generator, dtype=torch.int8), output),
            )
        return
    if plan.count == 1:
        yield first, torch.ones_like(output, memory_format=torch.contiguous_format)
        return
    if seed is None or not plan.covers_all(output.dtype):
        for c in range(plan.count):
            v = torch.zeros_like(output, memory_format=torch.contiguous_format)
            v.view(n, -1)[:, c] = 1
            yield first, v
        return
    bits = torch.randint(0, 2, (n, plan.count), generator=torch.Generator().manual_seed(seed), dtype=torch.int8)
    signs = _as_signs(bits, output)
    for row in _cosine_basis(plan.count).to(output.device, output.dtype):
        yield first, (signs * row).view(output.shape)


def _as_signs(bits: Tensor, output: Tensor) -> Tensor:
    return bits.to(output.device, output.dtype).mul_(2).sub_(1)


def _cosine_basis(size: int) -> Tensor:
    """Return an orthonormal basis with the first vector ``(1, ..., 1) / sqrt(size)``: the discrete cosine transform."""
    places = torch.arange(size, dtype=torch.float64)
    basis = torch.cos(torch.pi / size * places[:, None] * (places + 0.5)) * math.sqrt(2 / size)
    basis[0] /= math.sqrt(2)
    return basis
