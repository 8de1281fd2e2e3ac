"""Selections of matrices from a stack, such as experts: which blocks a tensor holds, and where."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Size, Tensor


@dataclass(frozen=True, eq=False)
class Selection:
    """Selection of matrices, such as experts, from the first dimension of a stack.

    Attributes:
        ids: Index of the selected block, or a tensor of indices.
        count: Number of blocks in the stack.
        rest: Index of the dimensions after the first.
        shape: Shape of the selected tensor.
        soft: Whether the ids depend on the data.
    """

    ids: int | Tensor
    count: int
    rest: tuple[Any, ...]
    shape: Size
    soft: bool

    def of(self, stack: Tensor, block: int | None) -> Tensor:
        """Return the selected tensor, or one block in place of each selected one."""
        if isinstance(self.ids, int):
            return stack.select(0, self.ids if block is None else block)[self.rest]
        if block is None:
            return stack[(self.ids, *self.rest)]
        one = stack.select(0, block)[self.rest]
        return one.expand(*self.ids.shape, *one.shape)

    def slots(self) -> Tensor:
        """Return the position in `ids` of each entry of the selected tensor."""
        assert isinstance(self.ids, Tensor)
        slots = torch.arange(self.ids.numel()).reshape(*self.ids.shape, *[1] * (len(self.shape) - self.ids.ndim))
        return slots.expand(self.shape)

    def same_block(self, other: Selection) -> bool:
        """Return whether another selection is of the same block, or this one itself."""
        return other is self or (isinstance(self.ids, int) and (self.ids, self.count) == (other.ids, other.count))


@dataclass(frozen=True, eq=False)
class Index:
    """Index along the first dimension of a tensor.

    Attributes:
        stack: Tensor that is indexed.
        ids: Index, or tensor of indices; None if all are returned, one by one.
        rest: Index of the dimensions after the first.
    """

    stack: Tensor
    ids: int | Tensor | None
    rest: tuple[Any, ...] = ()

    def selection(self, part: Tensor, ids: int | Tensor, soft: bool) -> Selection:
        """Return the selection that a part of the result is."""
        count = self.stack.shape[0]
        return Selection(ids % count, count, self.rest, part.shape, soft)


def read_index(name: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Index | None:
    """Return the index of a call that selects along the first dimension of a tensor; None for other calls.

    Args:
        name: Name of the function.
        args: Its arguments.
        kwargs: Its keyword arguments.
    """
    if name == "embedding":
        # torch.embedding(weight, input), but torch.nn.functional.embedding(input, weight).
        pair = [t for t in (*args, *kwargs.values()) if isinstance(t, Tensor)][:2]
        ids, stack = sorted(pair, key=Tensor.is_floating_point) if len(pair) == 2 else (None, None)
        return None if ids is None or stack is None else Index(stack, ids)
    if name not in ("__getitem__", "select", "unbind", "index_select"):
        return None
    given = dict(zip(("input", *_PLACES[name]), args, strict=False)) | dict(kwargs)
    stack, dim, index = given.get("input"), given.get("dim", 0), given.get("index")
    if not isinstance(stack, Tensor) or dim != 0:
        return None
    if name == "unbind":
        return Index(stack, None)
    first, *rest = index if isinstance(index, tuple) and index else (index,)
    if not all(isinstance(part, slice) or part is Ellipsis or part is None for part in rest):
        return None
    if isinstance(first, Tensor) and first.dtype in (torch.int64, torch.int32):
        return Index(stack, first if first.ndim else int(first), tuple(rest))
    if isinstance(first, int) and not isinstance(first, bool):
        return Index(stack, first, tuple(rest))
    return None


_PLACES = {"__getitem__": ("index",), "unbind": ("dim",), "select": ("dim", "index"), "index_select": ("dim", "index")}
