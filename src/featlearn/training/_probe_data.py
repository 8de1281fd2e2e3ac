"""The rows that a monitor looks at: the same ones each time, kept in memory, shared by all processes for kernels."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from featlearn.capture import (
    as_batch,
    as_tensors,
    batches,
    map_tensors,
    preserved_loader,
    preserved_rng,
    rows_of,
    sliceable,
)
from featlearn.errors import InputError
from featlearn.features import in_processes


@dataclass(frozen=True, eq=False)
class ProbeRows:
    """What is measured at every step.

    Attributes:
        batches: Raw batches, as the model takes them, on the CPU or where they were.
        kernel_batches: Raw batches of the kernels: the first rows, of all processes, of one shape.
        kernel_targets: Their labels, ``(n,)`` or ``(n, c)``; None where there are none, or no one-per-row labels.
        samples: Rows in ``batches``.
        part: Whether the data has more rows than were kept.
    """

    batches: list[Any]
    kernel_batches: list[Any]
    kernel_targets: Tensor | None
    samples: int
    part: bool

    @property
    def kernel_samples(self) -> int:
        """Rows in ``kernel_batches``."""
        return sum(_rows(raw) for raw in self.kernel_batches)


def first_of(raws: list[Any], rows: int, at_a_time: int) -> list[Any]:
    """Return the first rows of some batches, in batches of at most ``at_a_time`` rows.

    Args:
        raws: Raw batches.
        rows: Number of rows to take.
        at_a_time: Number of rows of a batch at most.
    """
    found: list[Any] = []
    for raw in raws:
        n = min(_rows(raw), rows)
        found += [_part(raw, start, min(start + at_a_time, n)) for start in range(0, n, at_a_time)]
        rows -= n
    return found


def take_rows(data: Any, samples: int | None, kernel_samples: int, batch_size: int | None) -> ProbeRows:
    """Read the data once and keep some of its rows: of tensors rows from all over, of batches the first.

    Taking them anew from a shuffling loader would measure other rows each time, and move the global generator. Tensors
    may be sorted, by class for instance: their first rows would be no sample of the data.

    Args:
        data: As `featlearn.probe` takes it.
        samples: Rows of each process for feature matrices; None keeps all.
        kernel_samples: Rows for kernels, of all processes together.
        batch_size: Rows a batch, for data given as tensors.
    """
    if samples is not None and samples < 1:
        raise InputError(f"samples must be at least 1, or None for all the data, got {samples}")
    if kernel_samples < 2:
        raise InputError(f"kernel_samples must be at least 2, got {kernel_samples}")
    kept: list[Any] = []
    count, part = 0, False
    if samples is not None and sliceable(data) and rows_of(data) > samples:
        data, part = _spread(data, samples), True
    # Not under inference mode, whose tensors cannot be differentiated through.
    with preserved_rng(), preserved_loader(data), torch.inference_mode(False):
        for raw in batches(data, batch_size or 256):
            if count == samples:
                part = True
                break
            raw = as_tensors(raw)
            rows = _rows(raw)
            if samples is not None and count + rows > samples:
                raw, rows, part = _first(raw, samples - count), samples - count, True
            kept.append(map_tensors(raw, lambda t: t.detach().clone()))
            count += rows
    shared = _alike(_of_all_processes(kept, kernel_samples))
    few, left = [], kernel_samples
    for raw in shared:
        rows = min(_rows(raw), left)
        few.append(_first(raw, rows))
        left -= rows
        if not left:
            break
    return ProbeRows(kept, few, _targets(few), count, part)


def _spread(data: Any, samples: int) -> Any:
    """Rows at equal distances, in an order that spreads the first of them as well."""
    data = as_tensors(data)
    order = torch.randperm(samples, generator=torch.Generator().manual_seed(0))
    which = order * rows_of(data) // samples
    return map_tensors(data, lambda t: t[which.to(t.device)])


def _alike(raws: list[Any]) -> list[Any]:
    """The batches of the shape that most rows have: kernels compare samples, and those padded otherwise are unlike."""
    rows: Counter[tuple[Any, ...]] = Counter()
    for raw in raws:
        rows[_shapes(raw)] += _rows(raw)
    usual = rows.most_common(1)[0][0]
    return [raw for raw in raws if _shapes(raw) == usual]


def _shapes(raw: Any) -> tuple[Any, ...]:
    found: list[tuple[int, ...]] = []
    map_tensors(raw, lambda t: found.append(tuple(t.shape[1:])))
    return tuple(found)


def _of_all_processes(kept: list[Any], kernel_samples: int) -> list[Any]:
    if not in_processes():
        return kept
    world = torch.distributed.get_world_size()
    mine, left = [], -(-kernel_samples // world)
    for raw in kept:
        rows = min(_rows(raw), left)
        if rows:
            mine.append(map_tensors(_first(raw, rows), Tensor.cpu))
        left -= rows
    gathered: list[Any] = [None] * world
    torch.distributed.all_gather_object(gathered, mine)
    return [raw for part in gathered for raw in part]


def _rows(raw: Any) -> int:
    size = as_batch(raw, torch.device("cpu"), parts=None).size if not isinstance(raw, Tensor) else len(raw)
    if size is None:
        raise InputError("a batch to monitor must hold tensors with samples first")
    return size


def _first(raw: Any, rows: int) -> Any:
    return _part(raw, 0, rows)


def _part(raw: Any, start: int, stop: int) -> Any:
    n = _rows(raw)  # what has another length, a mask or a number, belongs to all samples
    return map_tensors(raw, lambda t: t[start:stop] if t.ndim and len(t) == n else t)


def _targets(raws: list[Any]) -> Tensor | None:
    """Labels of the rows, one a row, if that is what the targets are."""
    targets = [as_batch(raw, torch.device("cpu"), parts=None).target for raw in raws]
    if not all(isinstance(t, Tensor) for t in targets):
        return None
    labels = torch.cat([t.detach().cpu() for t in targets])
    fits = labels.ndim == 1 or (labels.ndim == 2 and labels.is_floating_point())
    return labels if fits else None
