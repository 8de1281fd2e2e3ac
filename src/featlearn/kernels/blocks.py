"""A kernel from the features of blocks of samples, within a bound on memory."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from featlearn.capture import Batch, Subject, batches, few_rows, rows_of, sliceable
from featlearn.errors import InputError
from featlearn.kernels.shares import Share, bytes_of, contract
from featlearn.kernels.tangent_features import Features, TangentFeatures, called_by_some
from featlearn.numerics.memory import available_memory, check_fits, parse_memory

__all__ = [
    "block_kernels",
    "blocks_of",
    "check_memory",
    "check_outputs",
    "first_batch",
    "gradient_memory",
    "most_rows",
    "rows_at_a_time",
]

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
    """Return the data in batches of at most so many rows; batches that were given are cut where samples can be told."""
    size = max(1, min(_MOST_ROWS, int(rows)))
    found = []
    for raw in batches(data, size if sliceable(data) else None):
        batch = subject.batch(raw)
        n = batch.size or 0
        if n <= size or few_rows(batch) is batch:
            found.append(batch)
        else:
            found += [batch.rows(start, min(start + size, n)) for start in range(0, n, size)]
    return found


def check_memory(X: Any, Z: Any, tangents: TangentFeatures, full: bool, max_memory: Any) -> None:
    """Refuse a tangent kernel that does not fit, before anything of it is made.

    Args:
        X: Inputs, as in `featlearn.ntk`.
        Z: Other inputs, or None.
        tangents: Features, which know what a sample takes.
        full: Whether the kernel has a block for each pair of outputs.
        max_memory: As in `featlearn.ntk`.
    """
    c = tangents.count
    fewer = "pass sketches=16 for random output vectors, or outputs= the number of one output" if c > 1 else ""
    check_fits(
        8 * tangents.numbers_of_the_rest,
        f"a tangent kernel holds the gradients of two samples, which for {c:,} outputs",
        fewer or "leave parameters out with parameters=",
        max_memory,
    )
    # The kernels come on top of max_memory: what is free limits them. Each is there in blocks, and once joined.
    n = most_rows(X, most=None)
    m = n if Z is None else most_rows(Z, most=None)
    kernel = 8.0 * n * m * (c**2 if full else 1)
    what = f"a kernel of {n:,} x {m:,} samples" + (f" and {c:,} x {c:,} outputs" if full else "")
    check_fits(kernel * (tangents.shares + 1), f"{what}, for each of {tangents.shares} layers,", "take fewer samples")


def most_rows(*data: Any, most: int | None = _MOST_ROWS) -> int:
    """About how many samples there are, at most as many as a block has: for the choice of a form."""
    found = [_rows(part) for part in data if part is not None]
    return max((rows if most is None else min(most, rows) for rows in found), default=64)


def _rows(data: Any) -> int:
    """Samples of data in any form; a guess where only reading it would tell."""
    if sliceable(data):
        return rows_of(data)
    if isinstance(data, list):
        return sum(_rows_of_batch(raw) for raw in data)
    try:
        sized: Any = data.dataset if isinstance(data, torch.utils.data.DataLoader) else data
        return len(sized)
    except (TypeError, AttributeError, NotImplementedError):  # a stream
        return 64


def _rows_of_batch(raw: Any) -> int:
    try:
        return rows_of(raw)
    except InputError:  # tensors of other lengths beside the samples
        return 1


def gradient_memory(max_memory: int | float | str | None) -> int:
    """Return the bytes that gradients may take: by default a quarter of the machine, or half of what is free."""
    if max_memory is not None:
        return parse_memory(max_memory)
    return min(parse_memory(None), available_memory()) // 2
