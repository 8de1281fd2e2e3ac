"""Tensor that can be read later, with the shape and type known beforehand."""

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
    """A tensor of a model or a file.

    Attributes:
        name: In the state dict, without what wrappers add.
        shape: Of the tensor.
        dtype: In torch's words.
        read: The tensor itself, to be dropped after use.
        tied: Other names of the same tensor.
        reason: Why it is no weight, where its owner knows.
        note: What a reader of the report should know.
        kind: What it is, where its owner knows.
        groups: Blocks along its first dimension, where its owner knows.
        layers: How it is seen as matrices, where its owner knows.
        parts: Stored tensors that it is made of, if it is not stored itself.
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
    """Why the numbers of a tensor cannot be read, or nothing."""
    if tensor.device.type == "meta":
        return "on the meta device: it has no numbers"
    if tensor.layout != torch.strided:
        return f"of layout {tensor.layout}"
    return "quantized" if tensor.is_quantized else ""


def identity(tensor: Tensor) -> Any:
    """A key that two tensors share if they are one; None if that cannot be told."""
    if unusable(tensor) or not tensor.numel():
        return None
    return tensor.data_ptr(), tuple(tensor.shape), tensor.stride(), tensor.dtype, tensor.device


def tie(tensors: Sequence[StoredTensor], keys: Mapping[str, Any]) -> list[StoredTensor]:
    """The tensors, those of one key once, under the first name."""
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
    """Tensors with the factors g and v of a weight norm replaced by the weight ``g v / |v|`` that they make."""
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
            note="parametrized: the weight that its factors make",
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
