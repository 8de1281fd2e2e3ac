"""Rows that a monitor measures on: fixed, kept in memory, and shared by all processes for kernels."""

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
    """Rows of the data that are used at each measurement.

    Attributes:
        batches: Raw batches as the model takes them, on their original device.
        kernel_batches: Raw batches for kernels: the first rows of all processes, of one shape.
        kernel_targets: Labels of the rows for kernels, shape ``(n,)`` or ``(n, c)``. None if there is not one label per
            row.
        samples: Number of rows in ``batches``.
        part: Whether the data has more rows than were kept.
        batch: Number of rows of a batch if the data comes in batches, as in training; None for tensors.
    """

    batches: list[Any]
    kernel_batches: list[Any]
    kernel_targets: Tensor | None
    samples: int
    part: bool
    batch: int | None = None

    @property
    def kernel_samples(self) -> int:
        """Number of rows in ``kernel_batches``."""
        return sum(_rows(raw) for raw in self.kernel_batches)


def first_of(raws: list[Any], rows: int, at_a_time: int | None = None) -> list[Any]:
    """Return the first rows of some batches, in batches of limited size.

    Args:
        raws: Raw batches.
        rows: Number of rows to take.
        at_a_time: Maximum number of rows of a batch; None keeps the batches.
    """
    result: list[Any] = []
    for raw in raws:
        n = min(_rows(raw), rows)
        size = at_a_time or max(n, 1)
        result += [_part(raw, start, min(start + size, n)) for start in range(0, n, size)]
        rows -= n
    return result


def take_rows(data: Any, samples: int | None, kernel_samples: int, batch_size: int | None) -> ProbeRows:
    """Read the data once and keep some of its rows: evenly spaced rows of tensors, the first rows of batches.

    Reading a shuffling loader again would measure other rows each time, and advance the global generator. Tensors may
    be sorted, for instance by class: their first rows are not a sample of the data.

    Args:
        data: Data, as in `featlearn.probe`.
        samples: Number of rows per process for feature matrices. None keeps all.
        kernel_samples: Number of rows for kernels, of all processes together.
        batch_size: Batch size when the data is given as tensors. None uses 256.
    """
    if samples is not None and samples < 1:
        raise InputError(f"samples must be at least 1, or None for all the data, got {samples}.")
    if kernel_samples < 2:
        raise InputError(f"kernel_samples must be at least 2, got {kernel_samples}.")
    kept: list[Any] = []
    count, part, batch = 0, False, None
    in_batches = not sliceable(data)
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
            batch = rows if in_batches and batch is None else batch
            if samples is not None and count + rows > samples:
                raw, rows, part = _part(raw, 0, samples - count), samples - count, True
            kept.append(map_tensors(raw, lambda t: t.detach().clone()))
            count += rows
    shared = kept
    if in_processes():
        world = torch.distributed.get_world_size()
        mine = [map_tensors(raw, Tensor.cpu) for raw in first_of(kept, -(-kernel_samples // world))]
        gathered: list[Any] = [None] * world
        torch.distributed.all_gather_object(gathered, mine)
        shared = [raw for of_process in gathered for raw in of_process]
    few = first_of(_usual_shape(shared), kernel_samples)
    return ProbeRows(kept, few, _targets(few), count, part, batch)


def _spread(data: Any, samples: int) -> Any:
    """Return evenly spaced rows, in an order in which the first ones are spread too."""
    data = as_tensors(data)
    order = torch.randperm(samples, generator=torch.Generator().manual_seed(0))
    which = order * rows_of(data) // samples
    return map_tensors(data, lambda t: t[which.to(t.device)])


def _usual_shape(raws: list[Any]) -> list[Any]:
    """Return the batches of the most frequent shape: kernels cannot compare samples of different padding."""
    rows: Counter[tuple[Any, ...]] = Counter()
    for raw in raws:
        rows[_shapes(raw)] += _rows(raw)
    usual = rows.most_common(1)[0][0]
    return [raw for raw in raws if _shapes(raw) == usual]


def _shapes(raw: Any) -> tuple[Any, ...]:
    shapes: list[tuple[int, ...]] = []
    map_tensors(raw, lambda t: shapes.append(tuple(t.shape[1:])))
    return tuple(shapes)


def _rows(raw: Any) -> int:
    size = as_batch(raw, torch.device("cpu"), parts=None).size if not isinstance(raw, Tensor) else len(raw)
    if size is None:
        raise InputError("A batch of data must contain tensors whose first dimension is the sample.")
    return size


def _part(raw: Any, start: int, stop: int) -> Any:
    n = _rows(raw)  # a tensor of another length, such as a mask, belongs to all samples
    return map_tensors(raw, lambda t: t[start:stop] if t.ndim and len(t) == n else t)


def _targets(raws: list[Any]) -> Tensor | None:
    """Return the targets if they are one label per row, else None."""
    targets = [as_batch(raw, torch.device("cpu"), parts=None).target for raw in raws]
    if not all(isinstance(t, Tensor) for t in targets):
        return None
    labels = torch.cat([t.detach().cpu() for t in targets])
    return labels if labels.ndim == 1 or (labels.ndim == 2 and labels.is_floating_point()) else None
