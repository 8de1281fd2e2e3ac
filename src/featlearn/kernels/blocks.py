"""A kernel from the features of blocks of samples, within a bound on memory."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from featlearn.capture import Batch, Subject, batches, rows_of, sliceable
from featlearn.errors import InputError
from featlearn.kernels.shares import Share, bytes_of, contract
from featlearn.kernels.tangent_features import Features, called_by_some

__all__ = ["block_kernels", "blocks_of", "check_outputs", "first_batch", "most_rows", "rows_at_a_time"]

_FIRST = 64
_MOST_ROWS = 4096
_FEWEST_ROWS = 64
_BLOCK = 2**28  # bytes of features in a block: larger ones only take more time to be joined


def check_outputs(outputs: str | int) -> None:
    """Refuse what is neither a way to take the outputs together nor the number of one."""
    if outputs not in ("trace", "full") and (not isinstance(outputs, int) or isinstance(outputs, bool) or outputs < 0):
        raise InputError(f'outputs must be "trace", "full" or the number of an output, got {outputs!r}')


def block_kernels(
    left: Sequence[Batch], right: Sequence[Batch], features: Callable[[Batch], Features], full: bool, memory: float
) -> dict[str, Tensor]:
    """Each share's kernel from the features of blocks of samples; symmetric if both sides are one list.

    The features of as many blocks on the right are kept as fit into half of the memory; those of the others are
    computed again for each block on the left.
    """
    rows: dict[str, list[list[Tensor]]] = {}
    kept: dict[int, Features] = {}
    free = memory / 2

    def of_right(j: int) -> Features:
        nonlocal free
        if j in kept:
            return kept[j]
        found = features(right[j])
        size = sum(bytes_of(share) for share in found.values())
        if size <= free and len(left) > 1:
            kept[j], free = found, free - size
        return found

    for i, block in enumerate(left):
        a = of_right(i) if right is left else features(block)
        row: dict[str, list[Tensor]] = {}
        for j in range(len(right)):
            if right is left and j < i:
                found = {name: _mirrored(parts[j][i]) for name, parts in rows.items()}
            else:
                b = a if right is left and i == j else of_right(j)
                found = {name: contract(share, _partner(b, name), full).to(torch.float64) for name, share in a.items()}
            for name, kernel in found.items():
                row.setdefault(name, []).append(kernel)
        for name, parts in row.items():
            rows.setdefault(name, []).append(parts)
    return {name: torch.cat([torch.cat(parts, dim=1) for parts in found]) for name, found in rows.items()}


def _mirrored(block: Tensor) -> Tensor:
    """A block below the diagonal from the one above it: the kernel of X against itself is symmetric."""
    return block.mT if block.ndim == 2 else block.permute(1, 0, 3, 2)


def _partner(features: Features, name: str) -> Share:
    if name not in features:
        raise called_by_some(name)
    return features[name]


def rows_at_a_time(numbers: float, memory: float) -> float:
    """How many samples a block has: what products need to be fast, and no more than the memory allows.

    A quarter of it is for the features of a block and what they are made of, another for those of a second one.
    """
    size = 4 * max(1.0, numbers)
    return min(memory / 8 / size, max(_FEWEST_ROWS, _BLOCK / size))


def first_batch(subject: Subject, data: Any) -> Batch:
    """Samples to learn from what a sample takes."""
    return subject.batch(next(iter(batches(data, _FIRST if sliceable(data) else None))))


def blocks_of(subject: Subject, data: Any, rows: float) -> list[Batch]:
    """The data in batches of so many rows, if it can be cut."""
    size = max(1, min(_MOST_ROWS, int(rows))) if sliceable(data) else None
    return [subject.batch(raw) for raw in batches(data, size)]


def most_rows(*data: Any) -> int:
    """About how many samples a block will have, for the choice of a form."""
    return max((min(_MOST_ROWS, rows_of(part)) for part in data if part is not None and sliceable(part)), default=64)
