"""Division of layers into parts that are measured as layers of their own: experts, heads, or equal parts.

The rows of a weight matrix are divided before the sums: a layer whose outputs are divided has one block per part, and
``K`` of a part is a diagonal block of ``K``. Experts are blocks already. The columns are divided after the sums: all
parts have the same outputs, so ``K`` is that of the layer, and ``W_h^T K W_h`` is a diagonal block of ``W^T K W``.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from typing import NamedTuple

from torch import Tensor, nn

from featlearn._utils.patterns import pick_values
from featlearn._utils.validation import is_int
from featlearn.errors import InputError
from featlearn.layers import Layer, find_heads

SplitArgument = str | Mapping[str, int] | Iterable[str | Mapping[str, int]]
_KINDS = ("experts", "heads")
_OF_INPUTS = ("agop", "centered", "double", "ptk", "enfa")  # sums on the side of the inputs
_OF_WEIGHTS = ("W", "W0", "D")


@dataclass(frozen=True)
class Split:
    """Division of one layer into parts of equal size.

    Attributes:
        names: Name of each part.
        shape: Shape (groups, k_out, k_in) of the layer whose sums are kept: each block of the layer is divided into
            `pieces` blocks.
        pieces: Number of blocks that the outputs of a block are divided into.
        columns: Whether the parts are columns of the matrix. Otherwise they are rows.
    """

    names: tuple[str, ...]
    shape: tuple[int, int, int]
    pieces: int = 1
    columns: bool = False

    def layer(self, layer: Layer) -> Layer:
        """Return the layer whose sums are kept, for a choice of sums; gradients at its input would mix the parts."""
        if self.pieces == 1:
            return layer
        groups, k_out, _ = self.shape
        return replace(layer, groups=groups, k_out=k_out, input_gradients=False, operation=None)

    def rows(self, rows: Tensor) -> Tensor:
        """Divide gradients of shape (samples, positions, blocks, k_out) among the blocks of the parts."""
        n, positions, blocks, k = rows.shape
        return rows.reshape(n, positions, blocks * self.pieces, k // self.pieces) if self.pieces > 1 else rows

    def squares(self, matrix: Tensor) -> Tensor:
        """Return the sum of the squares of each part of a matrix of shape (groups, k_out, k_in), shape (parts,)."""
        dims = (0, 1) if self.columns else (1, 2)
        return matrix.square().sum(dims).reshape(len(self.names), -1).sum(1)

    @property
    def part_shape(self) -> tuple[int, int, int]:
        """Shape (groups, k_out, k_in) of one part."""
        groups, k_out, k_in = self.shape
        parts = len(self.names)
        return (groups, k_out, k_in // parts) if self.columns else (groups // parts, k_out, k_in)

    def part(self, index: int, values: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return the weights or sums of one part.

        Args:
            index: Index of the part.
            values: Weights or sums of the layer, by name.
        """
        groups, _, k_in = self.part_shape
        if not self.columns:
            return {name: value.narrow(-3, index * groups, groups).contiguous() for name, value in values.items()}
        result = dict(values)  # sums of the outputs are those of the layer, in the same memory
        for name, value in values.items():
            sides = (-1,) if name in _OF_WEIGHTS else (-1, -2) if name in _OF_INPUTS else ()
            for side in sides:
                value = value.narrow(side, index * k_in, k_in)
            result[name] = value.contiguous()
        return result


class Request(NamedTuple):
    """Parts that were asked for.

    Attributes:
        kinds: Kinds of parts, of ``"experts"`` and ``"heads"``.
        counts: Numbers of equal parts of the outputs, by glob pattern of layer names.
    """

    kinds: frozenset[str]
    counts: Mapping[str, int]


def parse_split(split: SplitArgument | None) -> Request:
    """Check the argument ``split`` of a probe.

    Args:
        split: ``"experts"`` divides stacks of experts, ``"heads"`` the projections of attention, a mapping divides the
            outputs of the layers that a glob pattern matches into equal parts; or several of these. None divides none.

    Raises:
        InputError: The argument is something else, or a number of parts is not an integer of at least 2.
    """
    kinds, counts = set[str](), dict[str, int]()
    items: Iterable[object] = () if split is None else (split,)
    if isinstance(split, Iterable) and not isinstance(split, str | Mapping):
        items = list(split)
    for item in items:
        if isinstance(item, Mapping):
            counts |= item
        elif isinstance(item, str) and item in _KINDS:
            kinds.add(item)
        else:
            raise InputError(f"split must be 'experts', 'heads', a mapping {{glob: parts}} or a list, got {item!r}.")
    for glob, count in counts.items():
        if not isinstance(glob, str) or not is_int(count, 2):
            raise InputError(f"split must map glob patterns to numbers of parts from 2, got {glob!r}: {count!r}.")
    if split is not None and not kinds and not counts:
        raise InputError("split must name at least one kind or pattern, got none. Leave it out to split no layer.")
    return Request(frozenset(kinds), counts)


def plan_splits(
    request: Request, model: nn.Module, layers: Sequence[Layer], strict: bool = True
) -> tuple[dict[str, Split], dict[str, str]]:
    """Choose the parts of each layer.

    Args:
        request: Parts that were asked for. A number of parts has precedence over experts and heads.
        model: Module with the layers.
        layers: Layers to measure.
        strict: Whether it is an error if there is nothing to divide.

    Returns:
        Parts by layer name, and remarks on attention projections that are not divided, by layer name.

    Raises:
        InputError: A pattern matches no layer, a number of parts does not divide the outputs, or there is nothing to
            divide.
    """
    kinds, counts = request
    splits, remarks = dict[str, Split](), dict[str, str]()
    names = [layer.name for layer in layers]
    if "experts" in kinds:
        for layer in layers:
            if count := _experts(layer):
                splits[layer.name] = _row_split(layer, [_expert_name(layer.name, i) for i in range(count)])
        if strict and not splits:
            raise InputError(
                f"split='experts' needs a stack of experts, got none in {len(layers)} layers. Experts that are modules "
                "are separate layers already."
            )
    if "heads" in kinds:
        heads, unknown = find_heads(model, layers)
        if strict and not heads:
            detail = "".join(f" The heads of {name!r} are not known: {why}." for name, why in [*unknown.items()][:1])
            raise InputError(
                f"split='heads' needs attention whose number of heads is known, got none in {len(layers)} layers."
                f"{detail} Pass a mapping such as {{'*.q': 8}}."
            )
        remarks = {name: f"not split into heads: {why}" for name, why in unknown.items()}
        for layer in layers:
            if (found := heads.get(layer.name)) is not None:
                parts = [f"{layer.name}.{part}" for part in found.parts]
                splits[layer.name] = _column_split(layer, parts) if found.columns else _row_split(layer, parts)
    known = {glob: count for glob, count in counts.items() if strict or _matches(glob, names)}
    chosen = pick_values(known, names, "split", "layer") if known else {}
    for layer in layers:
        if layer.name in chosen:
            splits[layer.name] = _row_split(layer, [f"{layer.name}.{i}" for i in range(chosen[layer.name])])
            remarks.pop(layer.name, None)
    _check_unique([part for name in names for part in (splits[name].names if name in splits else (name,))])
    return splits, remarks


def _matches(glob: str, names: Sequence[str]) -> bool:
    return any(fnmatchcase(name, glob) for name in names)


def _experts(layer: Layer) -> int | None:
    """Return the number of experts in the stack of a layer; None if it is not a stack of experts."""
    if layer.operation is None:
        return None
    if layer.operation.blocks is not None:
        return layer.operation.blocks
    owner = f"{layer.name} {type(layer.module).__name__}".lower()
    is_stack = layer.operation.form.kind == "experts" or "expert" in owner
    return layer.groups if is_stack and layer.groups > 1 else None


def _expert_name(name: str, index: int) -> str:
    """Return the name of an expert: ``experts.3.up`` of ``experts.up``, ``up.3`` of ``up``."""
    *parents, last = name.split(".")
    for i in reversed(range(len(parents))):
        if "expert" in parents[i].lower():
            return ".".join([*parents[: i + 1], str(index), *parents[i + 1 :], last])
    return f"{name}.{index}"


def _row_split(layer: Layer, names: Sequence[str]) -> Split:
    """Divide the outputs of a layer: its blocks, or each block, into equal parts."""
    groups, k_out, k_in = layer.shape
    parts = len(names)
    if layer.is_complex:
        raise InputError(f"split must name layers with real weights, got {layer.name!r} with complex weights.")
    if groups % parts == 0:
        return Split(tuple(names), layer.shape)
    pieces = parts // groups
    if parts % groups or k_out % pieces:
        size = f"{k_out} outputs" if groups == 1 else f"{groups} blocks of {k_out} outputs"
        raise InputError(f"split must divide the {size} of layer {layer.name!r} into equal parts, got {parts} parts.")
    return Split(tuple(names), (parts, k_out // pieces, k_in), pieces)


def _column_split(layer: Layer, names: Sequence[str]) -> Split:
    if layer.is_complex:
        raise InputError(f"split must name layers with real weights, got {layer.name!r} with complex weights.")
    return Split(tuple(names), layer.shape, columns=True)


def _check_unique(names: Sequence[str]) -> None:
    if len(set(names)) < len(names):
        twice = next(name for name in names if names.count(name) > 1)
        raise InputError(f"split must give each part a name of its own, got {twice!r} twice. Choose with layers=.")
