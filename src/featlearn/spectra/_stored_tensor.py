"""Tensor of a model or file that is read on demand, with known shape and dtype."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from featlearn.layers import Layer


@dataclass(frozen=True)
class StoredTensor:
    """Tensor of a model or a file.

    Attributes:
        name: Name in the state dict, without the prefixes of wrappers.
        shape: Shape of the tensor.
        dtype: Name of the dtype, such as "float32".
        read: Function that returns the tensor, to be dropped after use.
        tied: Other names of the same tensor.
        reason: Reason why the tensor is not a weight, if the source determines it; otherwise empty.
        note: Note for the report; empty for none.
        kind: Kind of the weight, if the module determines it; otherwise empty.
        groups: Number of blocks along the first dimension, if the module determines it; otherwise None.
        layers: Layers that view the tensor as matrices, if the module determines them; otherwise empty.
        parts: Stored tensors that the tensor is computed from, if it is not stored itself.
    """

    name: str
    shape: tuple[int, ...]
    dtype: str
    read: Callable[[], Tensor] = field(repr=False)
    tied: tuple[str, ...] = ()
    reason: str = ""
    note: str = ""
    kind: str = ""
    groups: int | None = None
    layers: tuple[Layer, ...] = ()
    parts: tuple[StoredTensor, ...] = ()


def unusable(tensor: Tensor) -> str:
    """Return the reason why the values of a tensor cannot be read; empty if they can."""
    if tensor.device.type == "meta":
        return "on the meta device, without values"
    if tensor.layout != torch.strided:
        return f"layout {tensor.layout} is not supported"
    return "quantized" if tensor.is_quantized else ""


def identity(tensor: Tensor) -> Any:
    """Return a key that is equal for two names of the same tensor; None if it has no memory to compare."""
    if unusable(tensor) or not tensor.numel():
        return None
    return tensor.data_ptr(), tuple(tensor.shape), tensor.stride(), tensor.dtype, tensor.device


def tie(tensors: Sequence[StoredTensor], keys: Mapping[str, Any]) -> list[StoredTensor]:
    """Merge tensors of the same key into one, under the first name.

    Args:
        tensors: Tensors in the order of the source.
        keys: Key of each name, from `identity`; tensors without a key are not merged.

    Returns:
        The tensors, with the other names as ``tied``.
    """
    first: dict[Any, int] = {}
    kept: list[StoredTensor] = []
    for tensor in tensors:
        key = keys.get(tensor.name)
        if key is not None and key in first:
            place = first[key]
            kept[place] = replace(kept[place], tied=(*kept[place].tied, tensor.name))
            continue
        if key is not None:
            first[key] = len(kept)
        kept.append(tensor)
    return kept


def undo_weight_norm(tensors: Sequence[StoredTensor]) -> list[StoredTensor]:
    """Replace the factors g and v of a weight norm by the weight ``g v / |v|``."""
    named = {t.name: t for t in tensors}
    made: dict[str, StoredTensor] = {}
    used: set[str] = set()
    for gain in tensors:
        match = re.fullmatch(r"((?:.*\.)?)(?:parametrizations\.(\w+)\.original0|(\w+)_g)", gain.name)
        if match is None:
            continue
        owner, new, old = match.groups()
        other = named.get(f"{owner}parametrizations.{new}.original1" if new else f"{owner}{old}_v")
        if other is None or not _is_gain(gain.shape, other.shape):
            continue
        made[gain.name] = StoredTensor(
            f"{owner}{new or old}",
            other.shape,
            other.dtype,
            partial(_weight_norm, gain, other),
            reason=gain.reason or other.reason,
            note="parametrized: the weight computed from its factors",
            parts=(gain, other),
        )
        used |= {gain.name, other.name}
    return [made.get(t.name, t) for t in tensors if t.name in made or t.name not in used]


def _is_gain(g: tuple[int, ...], v: tuple[int, ...]) -> bool:
    return len(v) >= 2 and (g == () or (len(g) == len(v) and all(a in (1, b) for a, b in zip(g, v, strict=True))))


def _weight_norm(gain: StoredTensor, direction: StoredTensor) -> Tensor:
    g, v = gain.read(), direction.read()
    g, v = (t if t.dtype == torch.float64 else t.float() for t in (g, v))
    axes = [i for i in range(v.ndim) if g.ndim == 0 or g.shape[i] == 1]
    made: Tensor = v * (g / v.norm(dim=axes, keepdim=True))
    return made
