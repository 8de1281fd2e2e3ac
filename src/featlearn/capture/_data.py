"""Conversion of data sets to batches, and forward passes on a batch."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, is_dataclass
from dataclasses import fields as dataclass_fields
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from featlearn._utils.validation import check_int
from featlearn.errors import InputError

Forward = Callable[[nn.Module, Any], Any]
"""Function of a model and a batch that returns the output, samples first."""

_TARGETS = ("labels", "label", "targets", "target")


@dataclass(frozen=True)
class Batch:
    """One batch of data on the device of the model.

    Attributes:
        raw: Batch as it was passed, with its tensors on the device.
        inputs: Inputs of the model: tensor, tuple or list of arguments, or dict of keyword arguments.
        target: Target of the loss; None if there is none.
        size: Number of samples; None if it is unknown.
    """

    raw: Any
    inputs: Any
    target: Any
    size: int | None

    def dtypes(self) -> set[torch.dtype]:
        """Return the dtypes of the floating-point inputs."""
        dtypes: set[torch.dtype] = set()
        map_tensors(self.inputs, lambda t: dtypes.add(t.dtype) if t.is_floating_point() else None)
        return dtypes

    def rows(self, start: int, stop: int) -> Batch:
        """Return a range of samples.

        Args:
            start: Index of the first sample.
            stop: Index after the last sample.
        """
        raw, inputs, target = _slice((self.raw, self.inputs, self.target), start, stop)
        return Batch(raw, inputs, target, stop - start)

    def samples(self, which: list[int], n: int, raw: bool) -> Batch | None:
        """Return a batch of some of the n samples; None if a tensor does not have one row per sample.

        Args:
            which: Indices of the samples.
            n: Number of samples of the batch.
            raw: Whether the raw batch is passed to the user's forward function, rather than its inputs to the model.
        """
        part = self.raw if raw else self.inputs
        if set(_sizes(part)) != {n}:
            return None
        part = map_tensors(part, lambda t: pick_rows(t, which))
        return Batch(part, part, None, len(which))

    def own_target(self) -> Any:
        """Return a copy of the target: a loss may write into it, and the batch is the data of the caller."""
        return map_tensors(self.target, Tensor.clone)


def batches(data: Any, batch_size: int | None = None) -> Iterator[Any]:
    """Yield the raw batches of a data set.

    Args:
        data: Tensor, tuple ``(X, y)`` or dict, which are one data set and are split; Dataset; or an iterable of
            batches, such as a list or a DataLoader.
        batch_size: Number of rows per batch. None is one batch, or 64 rows for a Dataset. Ignored for iterables.

    Yields:
        Batches as `as_batch` accepts them.

    Raises:
        InputError: The data is empty or of an unknown type, or the batch size is not a positive integer.
    """
    if batch_size is not None:
        check_int("batch_size", batch_size)
    if sliceable(data):
        data = as_tensors(data)
        n = rows_of(data)
        if n == 0:
            raise InputError("the data is empty: it has no samples.")
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
            f"got {type(data).__name__}."
        )
    empty = True
    for batch in data:
        empty = False
        yield batch
    if empty:
        raise InputError("the data is empty: it has no batch.")


@contextmanager
def preserved_loader(data: Any) -> Iterator[None]:
    """Restore the workers of a DataLoader and the generators of it and its samplers at the end of a block.

    Args:
        data: DataLoader; other data is left as it is.
    """
    batch_sampler = getattr(data, "batch_sampler", None)
    owners = (data, getattr(data, "sampler", None), batch_sampler, getattr(batch_sampler, "sampler", None))
    with ExitStack() as stack:
        for generator in (getattr(owner, "generator", None) for owner in owners):
            if isinstance(generator, torch.Generator):
                stack.callback(generator.set_state, generator.get_state())
        if isinstance(data, torch.utils.data.DataLoader):
            # A second iterator would restart persistent workers: in mid-epoch, or without drawing their seed.
            stack.callback(setattr, data, "_iterator", vars(data).get("_iterator"))
            data._iterator = None
        yield


def _refuse_inputs_and_target(data: list[Any]) -> None:
    """Refuse a list ``[X, y]``, which is most likely meant as one data set."""
    parts = [as_tensors(part) for part in data]
    if len(parts) != 2 or not all(isinstance(part, Tensor) and part.ndim for part in parts):
        return
    X, y = parts
    if len(X) == len(y) and (X.ndim != y.ndim or X.dtype != y.dtype):
        raise InputError("a list is a list of batches, but data looks like [X, y]. Pass the tuple (X, y).")


def sliceable(data: Any) -> bool:
    """Return whether the data is one data set whose rows can be split into batches."""
    return isinstance(data, Tensor | np.ndarray | tuple | Mapping)


def as_batch(raw: Any, device: torch.device, dtype: torch.dtype | None = None, parts: int | None = 2) -> Batch:
    """Move a raw batch to a device, check it for NaN, and split it into inputs and target.

    Args:
        raw: Tensor, tuple or list ``(inputs, target)``, or dict (labels under ``"labels"``).
        device: Device of the model.
        dtype: Precision of floating-point tensors. None leaves them unchanged.
        parts: Maximum number of parts of a tuple. None allows any, for a user's forward function.

    Returns:
        The batch.

    Raises:
        InputError: The batch has too many parts, no tensor, or entries that are not finite.
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
                "pass forward=lambda model, batch: ... to call the model."
            )
        inputs, target = raw[0], raw[-1] if len(raw) > 1 else None
    else:
        inputs, target = raw, None
    sizes = _sizes(inputs)
    # A user's forward function may accept inputs without tensors.
    for part, what, needed in ((inputs, "batch", parts is not None), (target, "target", target is not None)):
        if needed and not _sizes(part):
            raise InputError(f"a {what} must hold a tensor or a numpy array, got {type(part).__name__}.")
    map_tensors(inputs, lambda t: _check_finite(t, "inputs"))
    map_tensors(target, lambda t: _check_finite(t, "targets"))
    return Batch(raw, inputs, target, sizes[0] if sizes and sizes[0] >= 0 else None)


def run_forward(model: nn.Module, batch: Batch, forward: Forward | None) -> Any:
    """Call the model on a batch and return the output tensor.

    Args:
        model: Module to call.
        batch: Batch to call it on.
        forward: Function ``forward(model, batch)``. None passes a tensor as the argument, a tuple of tensors as the
            arguments, a dict as the keyword arguments, and takes the output from the result by `find_output`.
    """
    return find_output(call_model(model, batch, forward))[0]


def call_model(model: nn.Module, batch: Batch, forward: Forward | None) -> Any:
    """Call the model on a batch and return what it returns, see `run_forward`."""
    # Copies, because a model may write into its input, and the batch is the data of the caller.
    if forward is not None:
        return forward(model, map_tensors(batch.raw, Tensor.clone))
    inputs = map_tensors(batch.inputs, Tensor.clone)
    if isinstance(inputs, Mapping):
        return model(**inputs)
    return model(*inputs) if isinstance(inputs, tuple | list) else model(inputs)


def find_output(result: Any) -> tuple[Any, str]:
    """Return the tensor to differentiate from the result of a model, and its name in the result.

    A tensor is itself the output. From a dict, a dataclass or a tuple it is ``logits``, else ``last_hidden_state``,
    else the first floating-point tensor of one or more dimensions, in the order of the fields.

    Args:
        result: Result of a model.

    Returns:
        The tensor with its name, which is empty for a tensor; the result itself if it has no such tensor.
    """
    if isinstance(result, Tensor):
        return result, ""
    fields: dict[str, Any] = {}
    if isinstance(result, Mapping):
        fields = dict(result)
    elif is_dataclass(result) and not isinstance(result, type):
        fields = {field.name: getattr(result, field.name, None) for field in dataclass_fields(result)}
    elif isinstance(result, tuple | list):
        names = getattr(result, "_fields", None) or [str(i) for i in range(len(result))]
        fields = dict(zip(names, result, strict=True))
    for name in ("logits", "last_hidden_state"):
        named = fields[name] if name in fields else getattr(result, name, None)
        if isinstance(named, Tensor):
            return named, name
    for name, value in fields.items():
        if isinstance(value, Tensor) and value.is_floating_point() and value.ndim:
            return value, str(name)
    for name, value in fields.items():
        output, inner = (
            find_output(value) if isinstance(value, Mapping | tuple | list) or is_dataclass(value) else (0, "")
        )
        if isinstance(output, Tensor):
            return output, f"{name}.{inner}"
    return result, ""


def pick_rows(t: Tensor, which: list[int]) -> Tensor:
    """Return some rows of a tensor, by slices, which need no index on its device."""
    return torch.cat([t[i : i + 1] for i in which])


def few_rows(batch: Batch) -> Batch:
    """Return the first two samples of a batch; the batch itself if its tensors have different numbers of rows."""
    sizes = set(_sizes(batch.raw))
    return batch.rows(0, 2) if len(sizes) == 1 and min(sizes) > 2 else batch


def rows_of(data: Any) -> int:
    """Return the number of samples: the leading dimension, which must be the same for every tensor.

    Args:
        data: Tensor, array, tuple or dict.

    Raises:
        InputError: The data has no tensor, or tensors of different numbers of rows.
    """
    sizes = _sizes(as_tensors(data))
    if not sizes:
        raise InputError("data must have a tensor or an array, got none.")
    if min(sizes) < 0 or len(set(sizes)) > 1:
        raise InputError(f"the parts of the data must have the same number of rows, got {sizes}.")
    return sizes[0]


def _sizes(data: Any) -> list[int]:
    """Return the leading dimension of every tensor, -1 for a scalar."""
    sizes: list[int] = []
    map_tensors(data, lambda t: sizes.append(t.shape[0] if t.ndim else -1))
    return sizes


def as_tensors(data: Any) -> Any:
    """Replace the numpy arrays in data by tensors, which share their memory."""
    if isinstance(data, np.ndarray):
        return torch.from_numpy(data) if data.flags.writeable else torch.from_numpy(data.copy())
    return _rebuilt(data, as_tensors)


def map_tensors(data: Any, function: Callable[[Tensor], Any]) -> Any:
    """Apply a function to every tensor in nested tuples, lists and dicts.

    Args:
        data: Nested containers.
        function: Function of a tensor.

    Returns:
        The same containers with the results.
    """
    if isinstance(data, Tensor):
        return function(data)
    return _rebuilt(data, lambda part: map_tensors(part, function))


def _rebuilt(data: Any, function: Callable[[Any], Any]) -> Any:
    """Return a container of the same kind with the function applied to its parts; other objects unchanged."""
    if isinstance(data, Mapping):
        return {k: function(v) for k, v in data.items()}
    if isinstance(data, tuple) and hasattr(data, "_fields"):  # a named tuple has one argument per field
        return type(data)(*(function(v) for v in data))
    if type(data) in (tuple, list):
        return type(data)(function(v) for v in data)
    return data


def _slice(data: Any, start: int, stop: int) -> Any:
    return map_tensors(data, lambda t: t[start:stop])


def _placed(t: Tensor, device: torch.device, dtype: torch.dtype | None) -> Tensor:
    t = t.detach()
    if t.is_inference():
        t = t.clone()  # a tensor of inference mode cannot be saved for a backward pass
    return t.to(device=device, dtype=dtype if t.is_floating_point() else None)


def _check_finite(t: Tensor, what: str) -> None:
    # A finite sum implies finite entries: a cheap test before the exact one.
    if t.is_floating_point() and not torch.isfinite(t.sum()) and not torch.isfinite(t).all():
        bad = int((~torch.isfinite(t)).sum())
        raise InputError(f"the {what} have {bad} NaN or infinite entries of {t.numel()}. Clean the data first.")
