"""One tensor of a state on disk, without the rest of it."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import safetensors
from torch import Tensor

from featlearn.errors import InputError, RunStoreError
from featlearn.runs.nested import FORMAT

__all__ = ["read_tensor", "tensor_shapes"]


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
