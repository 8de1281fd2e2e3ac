"""Save nested containers of tensors, arrays and plain values to one safetensors file, and read all or one of them.

Tensors, arrays and bytes are the tensors of the file; what holds them together is JSON in its header. Nothing is
pickled and nothing in a file is ever run.
"""

from __future__ import annotations

import functools
import json
import math
import os
import struct
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import safetensors
import safetensors.torch
import torch
from torch import Tensor

from featlearn._utils.atomic import atomic_write, file_trouble
from featlearn.errors import InputError, RunStoreError

__all__ = ["load_nested", "read_tensor", "save_nested", "tensor_shapes"]

FORMAT = 1
_DEEPEST = 100
_LONGEST_HEADER = 90_000_000  # safetensors refuses to read one of more than 100 MB
_ARRAY_KINDS = "biufcmMSU"
_LARGEST_INTEGER = 2**63


def save_nested(path: str | os.PathLike[str], state: Any, header: Mapping[str, Any] | None = None) -> None:
    """Write a state; the file is whole or not there, whenever the process ends.

    Tensors that are the same memory seen in the same way are written once. Kinds of containers that derive from dict,
    list and tuple come back as these, `Counter` as itself.

    Args:
        path: The file; one that exists is replaced.
        state: A nest of dict (keys: strings and integers), list, tuple, tensors, numpy arrays, numbers, strings, bytes
            and None.
        header: What else to keep, as JSON can hold it.
    """
    flattener = _Flattener()
    skeleton = flattener.encode(state, "", 0)
    kept = {"format": FORMAT, "header": dict(header or {}), "skeleton": skeleton, "pairs": flattener.pairs}
    described = json.dumps(kept)
    if len(described) > _LONGEST_HEADER:
        raise InputError("the state has too many numbers outside of tensors: put long lists into tensors or arrays")
    with file_trouble(path), atomic_write(path) as draft:
        safetensors.torch.save_file(flattener.tensors, draft, {"featlearn": described})


def load_nested(path: str | os.PathLike[str]) -> tuple[Any, dict[str, Any]]:
    """State and header of a file that `save_nested` wrote, tensors on the CPU.

    Tensors that were one come back as one.
    """
    if not Path(path).is_file():
        raise RunStoreError(f"there is no file {os.fspath(path)!r}")
    try:
        with safetensors.safe_open(path, framework="pt") as stored:
            described = json.loads((stored.metadata() or {})["featlearn"])
            if described["format"] > FORMAT:
                raise RunStoreError(f"{os.fspath(path)!r} was written by a newer featlearn")
            # Copies: tensors that lie in the file's memory are aligned otherwise, and rounded otherwise.
            tensors = {name: stored.get_tensor(name).clone() for name in stored.keys()}  # noqa: SIM118  # not a dict
        for name in described["pairs"]:
            tensors[name] = torch.view_as_complex(tensors[name])
        return _decode(described["skeleton"], tensors), dict(described["header"])
    except (
        safetensors.SafetensorError,
        OSError,
        LookupError,
        ValueError,
        TypeError,
        RuntimeError,
        struct.error,
    ) as error:
        if isinstance(error, RunStoreError):
            raise
        raise RunStoreError(f"{os.fspath(path)!r} is damaged, or was not written by featlearn: {error}") from error


class _Flattener:
    """Takes a nest apart into tensors and JSON, in which whatever is not plain is a list that begins with its kind."""

    def __init__(self) -> None:
        self.tensors: dict[str, Tensor] = {}
        self.pairs: list[str] = []  # complex numbers of a kind that safetensors does not know, as pairs of real ones
        self._entries: dict[tuple[Any, ...], list[Any]] = {}
        self._storages: set[int] = set()
        # Memory that is given free may be given again, and would then pass for the same tensor.
        self._alive: list[Tensor] = []

    def encode(self, value: Any, path: str, depth: int) -> Any:
        if depth > _DEEPEST:
            raise InputError(f"{path[:60]}... is nested more than {_DEEPEST} deep: does it contain itself?")
        if isinstance(value, Mapping):
            kind = "counter" if isinstance(value, Counter) else "dict"
            return [kind, [[self._key(k, path), self.encode(v, _join(path, k), depth + 1)] for k, v in value.items()]]
        if isinstance(value, list | tuple):
            kind = "list" if isinstance(value, list) else "tuple"
            return [kind, [self.encode(v, _join(path, i), depth + 1) for i, v in enumerate(value)]]
        if isinstance(value, Tensor):
            return self._tensor(value, path)
        if isinstance(value, np.ndarray) and not isinstance(value, np.ma.MaskedArray):
            if value.dtype.kind in _ARRAY_KINDS:
                return ["array", self._bytes(value.tobytes(), path), value.dtype.str, list(value.shape)]
        elif isinstance(value, np.generic) and not isinstance(value, str | bytes):
            if value.dtype.kind in _ARRAY_KINDS:
                return ["scalar", value.tobytes().hex(), value.dtype.str]
        elif isinstance(value, bytes):
            return ["bytes", self._bytes(bytes(value), path)]
        else:
            return _plain(value, path)
        raise _refusal(value, path)

    def _key(self, key: Any, path: str) -> Any:
        if isinstance(key, bool) or not isinstance(key, str | int):
            raise InputError(f"{path or 'the state'} has the key {key!r}: only strings and integers can be kept")
        return _plain(key, path)

    def _bytes(self, content: bytes, path: str) -> str:
        return self._add(torch.from_numpy(np.frombuffer(content, np.uint8).copy()), path)

    def _tensor(self, tensor: Tensor, path: str) -> list[Any]:
        tensor = tensor.detach()
        wrapper = hasattr(tensor, "__tensor_flatten__")
        if wrapper or tensor.layout != torch.strided or tensor.is_quantized or tensor.device.type == "meta":
            raise InputError(f"{path or 'the state'} is a tensor without plain memory: only dense ones can be kept")
        seen_as = (
            tensor.device,
            tensor.data_ptr(),
            tensor.dtype,
            tensor.shape,
            tensor.stride(),
            tensor.is_conj(),
            tensor.is_neg(),
        )
        entry = self._entries.get(seen_as) if tensor.numel() else None
        if entry is None:
            self._alive.append(tensor)
            dense = tensor.resolve_conj().resolve_neg()
            as_pairs = tensor.is_complex() and not _can_write(tensor.dtype)
            if as_pairs:
                dense = torch.view_as_real(dense)
            if not _can_write(dense.dtype):
                raise InputError(f"{path or 'the state'} is a tensor of {tensor.dtype}, which cannot be kept")
            entry = self._entries[seen_as] = ["tensor", self._add(dense.cpu().contiguous(), path)]
            if as_pairs:
                self.pairs.append(entry[1])
        return entry

    def _add(self, tensor: Tensor, path: str) -> str:
        # safetensors wants every tensor in memory of its own.
        if (storage := tensor.untyped_storage().data_ptr()) in self._storages:
            tensor = tensor.clone()
        self._storages.add(storage)
        stem = path.encode("utf-8", "replace").decode() or "state"
        name, count = stem, 1
        while name in self.tensors or name == "__metadata__":
            name, count = f"{stem}#{count}", count + 1
        self.tensors[name] = tensor
        return name


def _plain(value: Any, path: str) -> Any:
    if value is None or isinstance(value, bool):
        return value
    if isinstance(value, int):
        value = int(value)
        return value if abs(value) < _LARGEST_INTEGER else ["integer", hex(value)]
    if isinstance(value, float):
        return float(value) if math.isfinite(value) else ["float", struct.pack("<d", value).hex()]
    if isinstance(value, str):
        # Two halves of a letter that stand alone would come back from JSON as the letter.
        alone = any("\ud800" <= letter <= "\udfff" for letter in value)
        return ["string", value.encode("utf-8", "surrogatepass").hex()] if alone else str(value)
    raise _refusal(value, path)


def _decode(node: Any, tensors: Mapping[str, Tensor]) -> Any:
    if not isinstance(node, list):
        return node
    kind, *rest = node
    return _READERS[kind](tensors, *rest)


def _mapping(tensors: Mapping[str, Tensor], items: list[Any]) -> dict[Any, Any]:
    return {_decode(key, tensors): _decode(value, tensors) for key, value in items}


def _dtype(name: str) -> np.dtype[Any]:
    dtype = np.dtype(name)
    if dtype.kind not in _ARRAY_KINDS:
        raise ValueError(f"unknown kind of array {name!r}")
    return dtype


def _array(tensors: Mapping[str, Tensor], name: str, dtype: str, shape: list[int]) -> np.ndarray[Any, Any]:
    return np.frombuffer(tensors[name].numpy().tobytes(), _dtype(dtype)).reshape(shape).copy()


_READERS: dict[str, Callable[..., Any]] = {
    "dict": _mapping,
    "counter": lambda tensors, items: Counter(_mapping(tensors, items)),
    "list": lambda tensors, items: [_decode(item, tensors) for item in items],
    "tuple": lambda tensors, items: tuple(_decode(item, tensors) for item in items),
    "tensor": lambda tensors, name: tensors[name],
    "array": _array,
    "scalar": lambda _, content, dtype: np.frombuffer(bytes.fromhex(content), _dtype(dtype))[0],
    "bytes": lambda tensors, name: tensors[name].numpy().tobytes(),
    "integer": lambda _, digits: int(digits, 16),
    "float": lambda _, content: struct.unpack("<d", bytes.fromhex(content))[0],
    "string": lambda _, content: bytes.fromhex(content).decode("utf-8", "surrogatepass"),
}


@functools.cache
def _can_write(dtype: torch.dtype) -> bool:
    try:
        safetensors.torch.save({"probe": torch.empty(0, dtype=dtype)})
    except (KeyError, ValueError, TypeError, safetensors.SafetensorError):
        return False
    return True


def _join(path: str, key: Any) -> str:
    return f"{path}.{key}" if path else str(key)


def _refusal(value: Any, path: str) -> InputError:
    return InputError(
        f"{path or 'the state'} is of type {type(value).__name__}, which cannot be kept: only containers, tensors, "
        "arrays, numbers, strings and bytes can"
    )


def tensor_shapes(file: Path) -> dict[str, tuple[int, ...]]:
    """Names and shapes of the real tensors of a mapping that `save_nested` wrote; only the file's head is read."""
    with _opened(file) as (stored, names):
        return {name: tuple(stored.get_slice(inner).get_shape()) for name, inner in names.items()}


def read_tensor(file: Path, name: str) -> Tensor:
    """One of them, on the CPU."""
    with _opened(file) as (stored, names):
        if name not in names:
            there = ", ".join(list(names)[:6]) or "none"
            raise InputError(f"{file.stem} has no tensor {name!r}; it has {there}")
        tensor: Tensor = stored.get_tensor(names[name]).clone()
        return tensor


@contextmanager
def _opened(file: Path) -> Iterator[tuple[Any, dict[str, str]]]:
    """The file, and where in it the tensors of the mapping are: two that were one are kept once."""
    if not file.is_file():
        raise RunStoreError(f"there is no file {str(file)!r}")
    try:
        with safetensors.safe_open(file, framework="pt") as stored:
            described = json.loads((stored.metadata() or {})["featlearn"])
            if described["format"] > FORMAT:
                raise RunStoreError(f"{str(file)!r} was written by a newer featlearn")
            kind, items = described["skeleton"]
            names = {
                str(key): str(node[1])
                for key, node in (items if kind == "dict" else [])
                if isinstance(node, list) and node[0] == "tensor" and node[1] not in described["pairs"]
            }
            yield stored, names
    except (safetensors.SafetensorError, OSError, LookupError, ValueError, TypeError, RuntimeError) as error:
        if isinstance(error, RunStoreError | InputError):
            raise
        raise RunStoreError(f"{str(file)!r} is damaged, or was not written by featlearn: {error}") from error
