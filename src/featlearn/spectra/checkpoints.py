"""Torch checkpoints, read without executing anything in them."""

from __future__ import annotations

import re
import warnings
import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from featlearn.errors import InputError

__all__ = ["CheckpointReader", "state_of"]

_INSIDE = ("state_dict", "model_state_dict", "model", "module", "net", "weights", "params")
_DEPTH = 4
_KEPT = 64 << 20  # bytes of a mapped file that may stay in memory after use


def state_of(checkpoint: Any, depth: int = _DEPTH) -> Mapping[str, Any] | None:
    """The state dict in a checkpoint: itself, or what one of the usual keys holds; None if there is none."""
    if not isinstance(checkpoint, Mapping) or not depth:
        return None
    if any(isinstance(value, Tensor) for value in checkpoint.values()):
        return checkpoint if all(isinstance(name, str) for name in checkpoint) else None
    for key in _INSIDE:
        state = state_of(checkpoint.get(key), depth - 1)
        if state is not None:
            return state
    return None


class CheckpointReader:
    """Reads tensors of checkpoints, one file at a time.

    Files are mapped into memory, where the system brings in what is read and keeps it as long as the file is
    mapped. So the map is made anew once enough of it has been read.
    """

    def __init__(self) -> None:
        self._file: Path | None = None
        self._state: Mapping[str, Any] = {}
        self._read = 0

    def state(self, file: Path) -> Mapping[str, Any]:
        """The state dict of a file."""
        if file != self._file or self._read > _KEPT:
            self._file, self._state = None, {}  # the old map goes before the new one comes
            self._state = _load(file)
            self._file, self._read = file, 0
        return self._state

    def read(self, file: Path, name: str) -> Tensor:
        """A tensor of a file."""
        tensor: Tensor = self.state(file)[name]
        self._read += tensor.numel() * tensor.element_size()
        return tensor


def _load(file: Path) -> Mapping[str, Any]:
    try:
        # Only the zip format of torch 1.6 and later can be mapped.
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of pickle's protocol: what cannot be read is refused below
            loaded = torch.load(file, map_location="cpu", weights_only=True, mmap=zipfile.is_zipfile(file))
    except Exception as error:  # bytes that are no pickle make it raise nearly anything
        refused = re.search(r"GLOBAL (\S+)", str(error))
        why = f"it asks for {refused[1]}" if refused else "it is damaged or no checkpoint"
        raise InputError(
            f"{file.name} cannot be read as tensors alone, for {why}, and a pickle is never executed here: "
            "save model.state_dict(), best as safetensors"
        ) from error
    state = state_of(loaded)
    if state is None:
        keys = ", ".join(map(repr, list(loaded)[:5])) if isinstance(loaded, Mapping) else type(loaded).__name__
        raise InputError(f"{file.name} holds no state dict, got {keys or 'an empty dict'}: save model.state_dict()")
    return state
