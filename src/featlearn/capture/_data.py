"""Data as the user has it, turned into batches and forward calls."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from featlearn.errors import InputError

Forward = Callable[[nn.Module, Any], Any]

_TARGETS = ("labels", "label", "targets", "target")


@dataclass(frozen=True)
class Batch:
    """One batch: what the user handed over, on the right device, and its parts."""

    raw: Any
    inputs: Any
    target: Any
    size: int | None

    def dtypes(self) -> set[torch.dtype]:
        """Of the floating-point inputs."""
        found: set[torch.dtype] = set()
        map_tensors(self.inputs, lambda t: found.add(t.dtype) if t.is_floating_point() else None)
        return found

    def rows(self, start: int, stop: int) -> Batch:
        """Some of the samples."""
        raw, inputs, target = (_slice(part, start, stop) for part in (self.raw, self.inputs, self.target))
        return Batch(raw, inputs, target, stop - start)

    def samples(self, which: list[int], n: int, raw: bool) -> Batch | None:
        """Return some of the n samples, to be run by themselves; None where a tensor has not one row per sample.

        Args:
            which: Numbers of the samples.
            n: Number of samples of the batch.
            raw: Whether the whole batch is handed to the user's forward function, rather than its inputs to the model.
        """
        part = self.raw if raw else self.inputs
        if set(_sizes(part)) != {n}:
            return None
        part = map_tensors(part, lambda t: pick_rows(t, which))
        return Batch(part, part, None, len(which))

    def own_target(self) -> Any:
        """A copy of the target: a loss may write into it, and the batch is the user's data."""
        return map_tensors(self.target, Tensor.clone)


def batches(data: Any, batch_size: int | None = None) -> Iterator[Any]:
    """Raw batches of a data set.

    A tensor, a tuple ``(X, y)`` and a dict are one data set, cut into ``batch_size`` rows; anything else that
    can be iterated, a list or a DataLoader, gives batches by itself.
    """
    if batch_size is not None and (not isinstance(batch_size, int) or batch_size < 1):
        raise InputError(f"batch_size must be a whole number of at least 1, got {batch_size!r}")
    if sliceable(data):
        data = as_tensors(data)
        n = rows_of(data)
        if n == 0:
            raise InputError("the data is empty: it has no samples")
        step = n if batch_size is None else batch_size
        for start in range(0, n, step):
            yield _slice(data, start, min(start + step, n))
        return
    if isinstance(data, torch.utils.data.Dataset):
        data = torch.utils.data.DataLoader(data, batch_size=batch_size or 64)
    if isinstance(data, list):
        _refuse_inputs_and_target(data)
    if not isinstance(data, Iterable):
        raise InputError(
            "data must be a tensor, a tuple (X, y), a dict, a list of batches, a Dataset or a DataLoader, "
            f"got {type(data).__name__}"
        )
    empty = True
    for batch in data:
        empty = False
        yield batch
    if empty:
        raise InputError("the data is empty: it gave no batch")


@contextmanager
def preserved_loader(data: Any) -> Iterator[None]:
    """Give a loader its workers, and the generators that it and its samplers own their state, back."""
    batch_sampler = getattr(data, "batch_sampler", None)
    owners = (data, getattr(data, "sampler", None), batch_sampler, getattr(batch_sampler, "sampler", None))
    found = [getattr(owner, "generator", None) for owner in owners]
    states = [(own, own.get_state()) for own in found if isinstance(own, torch.Generator)]
    # A second iterator would begin persistent workers anew: in the middle of an epoch, or without drawing their seed.
    workers = vars(data).get("_iterator") if isinstance(data, torch.utils.data.DataLoader) else None
    if isinstance(data, torch.utils.data.DataLoader):
        data._iterator = None
    try:
        yield
    finally:
        if isinstance(data, torch.utils.data.DataLoader):
            data._iterator = workers
        for own, state in states:
            own.set_state(state)


def _refuse_inputs_and_target(data: list[Any]) -> None:
    """A list is a list of batches; ``[X, y]``, as a DataLoader collates a batch, is most likely meant as one."""
    parts = [as_tensors(part) for part in data]
    if len(parts) != 2 or not all(isinstance(part, Tensor) and part.ndim for part in parts):
        return
    X, y = parts
    if len(X) == len(y) and (X.ndim != y.ndim or X.dtype != y.dtype):
        raise InputError("a list holds batches, so that [X, y] would be two of them: write the tuple (X, y)")


def sliceable(data: Any) -> bool:
    """Whether the data is one data set whose rows can be cut into batches."""
    return isinstance(data, Tensor | np.ndarray | tuple | Mapping)


def as_batch(raw: Any, device: torch.device, dtype: torch.dtype | None = None, parts: int | None = 2) -> Batch:
    """A raw batch with its tensors on a device, checked for NaN, and split into inputs and target.

    Args:
        raw: Tensor, tuple or list ``(inputs, target)``, or dict (labels under ``"labels"``).
        device: Where the model is.
        dtype: What floating-point tensors become; None leaves them.
        parts: How many parts a tuple may have; None for any (the user's forward function reads it).
    """
    raw = map_tensors(as_tensors(raw), lambda t: _placed(t, device, dtype))
    if isinstance(raw, Mapping):
        key = next((k for k in _TARGETS if k in raw), None)
        inputs = {k: v for k, v in raw.items() if k != key}
        target = None if key is None else raw[key]
    elif isinstance(raw, tuple | list):
        if parts is not None and not 1 <= len(raw) <= parts:
            raise InputError(
                f"a batch must be inputs or (inputs, target), got {len(raw)} parts: "
                "pass forward=lambda model, batch: ... to say how the model is called"
            )
        inputs, target = raw[0], raw[-1] if len(raw) > 1 else None
    else:
        inputs, target = raw, None
    if parts is not None:  # otherwise the user's forward function knows what a batch is
        _check_tensors(inputs, "batch")
    if target is not None:
        _check_tensors(target, "target")
    map_tensors(inputs, lambda t: _check_finite(t, "inputs"))
    map_tensors(target, lambda t: _check_finite(t, "targets"))
    return Batch(raw, inputs, target, _rows_or_none(inputs))


def run_forward(model: nn.Module, batch: Batch, forward: Forward | None) -> Any:
    """Call the model on a batch and pick the output tensor.

    Without ``forward``: a tensor is the argument, a tuple of tensors the arguments, a dict the keyword
    arguments; of a structured result, an object or a dict, the ``logits``, else ``last_hidden_state``, else the first
    tensor count.
    """
    # Copies, because a model may write into its input, and the batch is the user's data.
    if forward is not None:
        return forward(model, map_tensors(batch.raw, Tensor.clone))
    inputs = map_tensors(batch.inputs, Tensor.clone)
    if isinstance(inputs, Mapping):
        result = model(**inputs)
    elif isinstance(inputs, tuple | list):
        result = model(*inputs)
    else:
        result = model(inputs)
    for name in ("logits", "last_hidden_state"):
        named = result.get(name) if isinstance(result, Mapping) else getattr(result, name, None)
        if isinstance(named, Tensor):
            return named
    if isinstance(result, tuple | list) and result and isinstance(result[0], Tensor):
        return result[0]
    return result


def pick_rows(t: Tensor, which: list[int]) -> Tensor:
    """Return some rows of a tensor, by slices: no index has to be brought to its device."""
    return torch.cat([t[i : i + 1] for i in which])


def few_rows(batch: Batch) -> Batch:
    """The first two samples of a batch, where its tensors agree on what a sample is; otherwise the batch."""
    sizes = set(_sizes(batch.raw))
    return batch.rows(0, 2) if len(sizes) == 1 and min(sizes) > 2 else batch


def rows_of(data: Any) -> int:
    """Number of samples: the leading dimension, the same for every tensor in the data."""
    sizes = _sizes(as_tensors(data))
    if not sizes:
        raise InputError("the data holds no tensor")
    if min(sizes) < 0 or len(set(sizes)) > 1:
        raise InputError(f"the parts of the data must have as many rows, got {sizes}")
    return sizes[0]


def _sizes(data: Any) -> list[int]:
    """Leading dimension of every tensor, -1 for one without dimensions."""
    sizes: list[int] = []
    map_tensors(data, lambda t: sizes.append(t.shape[0] if t.ndim else -1))
    return sizes


def _rows_or_none(inputs: Any) -> int | None:
    sizes = _sizes(inputs)
    return sizes[0] if sizes and sizes[0] >= 0 else None


def _check_tensors(part: Any, what: str) -> None:
    if not _sizes(part):
        raise InputError(f"a {what} must hold a tensor or a numpy array, got {type(part).__name__}")


def as_tensors(data: Any) -> Any:
    """The data with tensors in the place of its numpy arrays, whose memory they share."""
    if isinstance(data, np.ndarray):
        return torch.from_numpy(data) if data.flags.writeable else torch.from_numpy(data.copy())
    return _rebuilt(data, as_tensors)


def map_tensors(data: Any, function: Callable[[Tensor], Any]) -> Any:
    """Apply a function to every tensor in nested tuples, lists and dicts."""
    if isinstance(data, Tensor):
        return function(data)
    return _rebuilt(data, lambda part: map_tensors(part, function))


def _rebuilt(data: Any, function: Callable[[Any], Any]) -> Any:
    """A container of the same kind with the function applied to its parts; anything else as it is."""
    if isinstance(data, Mapping):
        return {k: function(v) for k, v in data.items()}
    if isinstance(data, tuple) and hasattr(data, "_fields"):  # a named tuple takes its parts one by one
        return type(data)(*(function(v) for v in data))
    if type(data) in (tuple, list):
        return type(data)(function(v) for v in data)
    return data


def _slice(data: Any, start: int, stop: int) -> Any:
    return map_tensors(data, lambda t: t[start:stop])


def _placed(t: Tensor, device: torch.device, dtype: torch.dtype | None) -> Tensor:
    t = t.detach()
    if t.is_inference():
        t = t.clone()  # a tensor made in inference mode cannot be saved for a backward pass
    return t.to(device=device, dtype=dtype if t.is_floating_point() else None)


def _check_finite(t: Tensor, what: str) -> None:
    # A sum is finite unless an entry is not, or it overflows: a quick look before the thorough one.
    if t.is_floating_point() and not torch.isfinite(t.sum()) and not torch.isfinite(t).all():
        bad = int((~torch.isfinite(t)).sum())
        raise InputError(f"the {what} have {bad} NaN or infinite entries of {t.numel()}: clean the data first")
