"""Tensors with a JSON header in one safetensors file, and nested containers of tensors on top of it.

Nothing is pickled, and no content of a file is executed.
"""

from __future__ import annotations

import functools
import json
import math
import os
import struct
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import safetensors

from featlearn._utils.atomic import atomic_write, file_trouble
from featlearn._utils.validation import is_tensor
from featlearn.errors import FeatlearnError, InputError, RunStoreError

if TYPE_CHECKING:  # commands that list and export runs do without torch
    import torch
    from torch import Tensor

FORMAT = 1
_DEEPEST = 100
_LONGEST_HEADER = 90_000_000  # safetensors refuses to read one of more than 100 MB
_ARRAY_KINDS = "biufcmMSU"
_LARGEST_INTEGER = 2**63
_PathLike = str | os.PathLike[str]


def write_state(path: _PathLike, tensors: Mapping[str, Tensor], header: Mapping[str, Any] | None = None) -> None:
    """Write tensors and a header to one safetensors file, which is complete or absent whenever the process ends.

    Args:
        path: File to write; an existing one is replaced.
        tensors: Tensors by name, on any device.
        header: JSON object to store with the tensors, such as a kind and a version; None stores no header.
    """
    import safetensors.torch

    described = None if header is None else json.dumps(header)
    if described is not None and len(described) > _LONGEST_HEADER:
        raise InputError("the state has too many numbers outside of tensors: put long lists into tensors or arrays")
    plain: dict[str, Tensor] = {}
    storages: set[int] = set()
    for name, tensor in tensors.items():
        dense = tensor.detach().cpu().contiguous()
        storage = dense.untyped_storage().data_ptr()
        plain[name] = dense.clone() if storage in storages else dense  # safetensors refuses memory that is shared
        storages.add(storage)
    with atomic_write(path) as draft:
        safetensors.torch.save_file(plain, draft, None if described is None else {"featlearn": described})


@contextmanager
def open_state(
    path: _PathLike,
    *,
    versions: Sequence[int],
    kind: str | None = None,
    version_key: str = "schema_version",
    error: type[FeatlearnError] = InputError,
) -> Iterator[tuple[Any, dict[str, Any]]]:
    """Open a file that `write_state` wrote with a header; errors in the block count as damage of the file.

    Args:
        path: File to read.
        versions: Versions of the format that can be read.
        kind: Kind that the header must have; None accepts any.
        version_key: Key of the version in the header.
        error: Class of the errors for a file that is missing, damaged, of another kind or of a newer version.

    Yields:
        The open file of safetensors, see `stored_tensors`, and the header.
    """
    if not Path(path).is_file():
        raise error(f"there is no file {os.fspath(path)!r}")
    with ExitStack() as opened:
        with damage_errors(path, error):
            stored = opened.enter_context(safetensors.safe_open(path, framework="pt"))
            header = dict(json.loads((stored.metadata() or {})["featlearn"]))
        check_version(path, header, versions, version_key, error)
        if kind is not None and header.get("kind") != kind:
            raise error(f"{os.fspath(path)!r} holds a {header.get('kind')}, not a {kind}")
        with damage_errors(path, error):
            yield stored, header


def stored_tensors(stored: Any) -> dict[str, Tensor]:
    """Read all tensors of an open file.

    They are copies: tensors in the memory of the file are aligned otherwise, and rounded otherwise.
    """
    return {name: stored.get_tensor(name).clone() for name in stored.keys()}  # noqa: SIM118  # not a dict


def check_version(
    path: _PathLike,
    header: Mapping[str, Any],
    versions: Sequence[int],
    key: str = "schema_version",
    error: type[FeatlearnError] = InputError,
) -> None:
    """Raise `error` if the version in a header cannot be read."""
    version = header.get(key)
    if version not in versions:
        newer = isinstance(version, int) and version > max(versions)
        reason = "was written by a newer featlearn" if newer else "is damaged, or was not written by featlearn"
        readable = " and ".join(map(str, versions))
        raise error(f"{os.fspath(path)!r} {reason}: it has format {version}, and this featlearn reads {readable}")


@contextmanager
def damage_errors(path: _PathLike, error: type[FeatlearnError] = InputError) -> Iterator[None]:
    """Raise `error` with the path for what goes wrong in the block when a damaged file is read."""
    try:
        yield
    except (
        safetensors.SafetensorError,
        ArithmeticError,
        AttributeError,
        LookupError,
        OSError,
        RuntimeError,
        TypeError,
        ValueError,
        struct.error,
    ) as cause:
        raise error(f"{os.fspath(path)!r} is damaged, or was not written by featlearn: {cause}") from cause


def save_nested(path: _PathLike, state: Any, header: Mapping[str, Any] | None = None) -> None:
    """Write a nest of containers, which is complete or absent whenever the process ends.

    Tensors that are the same memory with the same strides are written once. Types that derive from dict, list and tuple
    come back as these, `Counter` as itself.

    Args:
        path: File to write; an existing one is replaced.
        state: Nest of dict (keys: strings and integers), list, tuple, tensors, numpy arrays, numbers, strings, bytes
            and None.
        header: JSON object to store with the state.

    Example:
        >>> import tempfile, torch
        >>> from pathlib import Path
        >>> from featlearn.runs import load_nested, save_nested
        >>> file = Path(tempfile.mkdtemp()) / "state.safetensors"
        >>> save_nested(file, {"step": 3, "moments": [torch.ones(2), None]}, {"kind": "optimizer"})
        >>> load_nested(file)
        ({'step': 3, 'moments': [tensor([1., 1.]), None]}, {'kind': 'optimizer'})
    """
    flattener = _Flattener()
    skeleton = flattener.encode(state, "", 0)
    kept = {"format": FORMAT, "header": dict(header or {}), "skeleton": skeleton, "pairs": flattener.pairs}
    with file_trouble(path):
        write_state(path, flattener.tensors, kept)


def load_nested(path: _PathLike) -> tuple[Any, dict[str, Any]]:
    """Read a file that `save_nested` wrote.

    Args:
        path: File to read.

    Returns:
        The state, with tensors on the CPU, and the header. Tensors that shared memory share it again.

    Example:
        >>> import tempfile, torch
        >>> from pathlib import Path
        >>> from featlearn.runs import load_nested, save_nested
        >>> file, weight = Path(tempfile.mkdtemp()) / "tied.safetensors", torch.ones(2)
        >>> save_nested(file, {"embedding": weight, "head": weight})
        >>> state, header = load_nested(file)
        >>> state["embedding"].data_ptr() == state["head"].data_ptr()  # written once, and shared again
        True
    """
    import torch

    with _open_nested(path) as (stored, described):
        tensors = stored_tensors(stored)
        for name in described["pairs"]:
            tensors[name] = torch.view_as_complex(tensors[name])
        return _decode(described["skeleton"], tensors), dict(described["header"])


def tensor_shapes(file: Path) -> dict[str, tuple[int, ...]]:
    """Return names and shapes of the real tensors of a mapping that `save_nested` wrote; reads the header only."""
    with _open_nested(file) as (stored, described):
        return {name: tuple(stored.get_slice(inner).get_shape()) for name, inner in _tensor_names(described).items()}


def read_tensor(file: Path, name: str) -> Tensor:
    """Read one tensor of a mapping that `save_nested` wrote, on the CPU."""
    with _open_nested(file) as (stored, described):
        names = _tensor_names(described)
        tensor: Tensor | None = stored.get_tensor(names[name]).clone() if name in names else None
    if tensor is None:
        raise InputError(f"{file.stem} has no tensor {name!r}; it has {', '.join(list(names)[:6]) or 'none'}")
    return tensor


_open_nested = functools.partial(open_state, versions=(FORMAT,), version_key="format", error=RunStoreError)


def _tensor_names(described: Mapping[str, Any]) -> dict[str, str]:
    """Map the keys of the mapping to names in the file: two tensors that were one are stored once."""
    kind, items = described["skeleton"]
    return {
        str(key): str(node[1])
        for key, node in (items if kind == "dict" else [])
        if isinstance(node, list) and node[0] == "tensor" and node[1] not in described["pairs"]
    }


class _Flattener:
    """Split a nest into tensors and JSON, in which a value that is not plain is a list that starts with its kind."""

    def __init__(self) -> None:
        self.tensors: dict[str, Tensor] = {}
        self.pairs: list[str] = []  # complex numbers of a kind that safetensors does not know, as pairs of real ones
        self._entries: dict[tuple[Any, ...], list[Any]] = {}
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
        if is_tensor(value):
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
        import torch

        return self._add(torch.from_numpy(np.frombuffer(content, np.uint8).copy()), path)

    def _tensor(self, tensor: Tensor, path: str) -> list[Any]:
        import torch

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
    import safetensors.torch
    import torch

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
