"""Readers of the weights of a model, state dict, file or folder, tensor by tensor and without executing code."""

from __future__ import annotations

import json
import os
import re
import warnings
import zipfile
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn

from featlearn.errors import InputError
from featlearn.spectra._stored_tensor import StoredTensor, identity, tie, undo_weight_norm, unusable
from featlearn.spectra._tensor_matrices import module_tensors

_INSIDE = ("state_dict", "model_state_dict", "model", "module", "net", "weights", "params")
_DEPTH = 4
_KEPT = 64 << 20  # bytes of a mapped file that can stay in memory after use


def state_of(checkpoint: Any, depth: int = _DEPTH) -> Mapping[str, Any] | None:
    """Return the state dict of a checkpoint: itself, or the value of a usual key. None if it has none."""
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
    """Reader of tensors of checkpoints, one file at a time.

    Files are mapped into memory. The operating system loads the parts that are read and keeps them as long as the file
    is mapped, so the file is mapped again after enough of it has been read.
    """

    def __init__(self) -> None:
        self._file: Path | None = None
        self._state: Mapping[str, Any] = {}
        self._read = 0

    def state(self, file: Path) -> Mapping[str, Any]:
        """Return the state dict of a file.

        Args:
            file: Checkpoint of torch.

        Returns:
            The tensors by name, mapped into memory if possible.

        Raises:
            InputError: If the file cannot be read without executing code, or contains no state dict.
        """
        if file != self._file or self._read > _KEPT:
            self._file, self._state = None, {}  # release the old map before the new one is made
            self._state = _load(file)
            self._file, self._read = file, 0
        return self._state

    def read(self, file: Path, name: str) -> Tensor:
        """Return a tensor of a file.

        Args:
            file: Checkpoint of torch.
            name: Name of the tensor.

        Returns:
            The tensor.
        """
        tensor: Tensor = self.state(file)[name]
        self._read += tensor.numel() * tensor.element_size()
        return tensor


def _load(file: Path) -> Mapping[str, Any]:
    try:
        # Only the zip format of torch 1.6 and later can be mapped.
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # about pickle protocols: unreadable files raise an error below
            loaded = torch.load(file, map_location="cpu", weights_only=True, mmap=zipfile.is_zipfile(file))
    except Exception as error:  # bytes that are not a pickle can raise any exception
        refused = re.search(r"GLOBAL (\S+)", str(error))
        why = f"it refers to {refused[1]}" if refused else "it is damaged or not a checkpoint"
        raise InputError(
            f"{file.name} must be a checkpoint of tensors only, but {why}, and a pickle is never executed. "
            "Save model.state_dict(), preferably as safetensors."
        ) from error
    state = state_of(loaded)
    if state is None:
        keys = ", ".join(map(repr, list(loaded)[:5])) if isinstance(loaded, Mapping) else type(loaded).__name__
        raise InputError(
            f"{file.name} must contain a state dict, got {keys or 'an empty dict'}. Save model.state_dict()."
        )
    return state


Source = nn.Module | Mapping[str, Any] | str | os.PathLike[str]
"""Source of weights: a model, a state dict, or the path of a file or folder."""

_CHECKPOINTS = (".pt", ".pth", ".bin", ".ckpt")
_SAFE_DTYPES = {"F64": "float64", "F32": "float32", "F16": "float16", "BF16": "bfloat16", "BOOL": "bool"}


def open_source(source: Source, argument: str = "source") -> list[StoredTensor]:
    """Describe every tensor of a source without reading its values.

    Args:
        source: Model, state dict or checkpoint that contains one, ``.safetensors`` file, torch checkpoint (``.pt``,
            ``.pth``, ``.bin``, ``.ckpt``), or folder of one of these, sharded or not.
        argument: Name of the argument, for error messages.

    Returns:
        The tensors, those with several names once.

    Raises:
        InputError: If the source cannot be read.
    """
    if isinstance(source, nn.Module):
        return module_tensors(source)
    if isinstance(source, Mapping):
        state = state_of(source)
        if state is None:
            keys = _listed(map(str, source)) or "none"
            raise InputError(f"{argument} must contain tensors, got a mapping without tensors (keys: {keys}).")
        tensors = _mapping_tensors(state, state.__getitem__)
    elif isinstance(source, str | os.PathLike):
        tensors = _path_tensors(Path(source), argument)
    else:
        raise InputError(
            f"{argument} must be a model, a state dict, a file or a folder of weights, got {type(source).__name__}."
        )
    return undo_weight_norm(_without_wrappers(tensors))


def _path_tensors(path: Path, argument: str) -> list[StoredTensor]:
    if path.is_dir():
        return _folder_tensors(path)
    if not path.exists():
        raise InputError(f"{argument} {str(path)!r} does not exist.")
    return _file_tensors([path], CheckpointReader())


def _file_tensors(files: Sequence[Path], reader: CheckpointReader) -> list[StoredTensor]:
    """Describe the tensors of one file, or of files that contain parts of one model."""
    result: dict[str, StoredTensor] = {}
    owner: dict[str, Path] = {}
    for file in files:
        if file.suffix == ".safetensors":
            tensors = _safetensors(file)
        elif file.suffix in _CHECKPOINTS:
            state = reader.state(file)
            tensors = _mapping_tensors(state, partial(reader.read, file))
        else:
            known = ", ".join((".safetensors", *_CHECKPOINTS))
            raise InputError(f"A file of weights must end in {known}, got {file.name!r}. Save model.state_dict().")
        for tensor in tensors:
            if tensor.name in result:
                raise InputError(
                    f"{tensor.name!r} is both in {owner[tensor.name].name} and in {file.name}: "
                    "the folder contains more than one model. Pass one of the files."
                )
            result[tensor.name], owner[tensor.name] = tensor, file
    return list(result.values())


def _folder_tensors(folder: Path) -> list[StoredTensor]:
    reader = CheckpointReader()
    files = sorted(f for f in folder.iterdir() if f.is_file())
    for ending in (".safetensors.index.json", ".bin.index.json"):
        indices = [f for f in files if f.name.endswith(ending)]
        if len(indices) > 1:
            raise InputError(
                f"{str(folder)!r} must contain one index, got {len(indices)}. Pass one of the weight files."
            )
        if indices:
            return _indexed_tensors(indices[0], reader)
    safe = [f for f in files if f.suffix == ".safetensors"]
    if safe:
        return _file_tensors(safe, reader)
    checkpoints = [f for f in files if f.suffix in _CHECKPOINTS]
    named = [f for f in checkpoints if f.name == "pytorch_model.bin"] or checkpoints
    if len(named) == 1:
        return _file_tensors(named, reader)
    if named:
        files_in = _listed(f.name for f in named)
        raise InputError(f"{str(folder)!r} must contain one checkpoint, got {files_in}. Pass one of them.")
    known = ", ".join((".safetensors", *_CHECKPOINTS))
    raise InputError(f"No weights in {str(folder)!r}: it must contain a {known} file.")


def _indexed_tensors(index: Path, reader: CheckpointReader) -> list[StoredTensor]:
    try:
        shard_of = json.loads(index.read_text(encoding="utf-8"))["weight_map"]
        shards = sorted(set(shard_of.values()))
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise InputError(f"{index.name} must be an index of weights, got {type(error).__name__}: {error}.") from error
    for shard in shards:
        if not isinstance(shard, str) or Path(shard).name != shard:
            raise InputError(f"The shards of {index.name} must be files in the same folder, got {shard!r}.")
        if not (index.parent / shard).is_file():
            raise InputError(f"{index.name} lists {shard!r}, which is missing. Download it again.")
    tensors = _file_tensors([index.parent / shard for shard in shards], reader)
    missing = sorted(set(shard_of) - {t.name for t in tensors} - {name for t in tensors for name in t.tied})
    if missing:
        raise InputError(f"{index.name} lists {_listed(missing)}, which no shard contains. Download the files again.")
    return sorted(tensors, key=lambda t: _natural(t.name))


def _safetensors(file: Path) -> list[StoredTensor]:
    """Describe the tensors of a safetensors file.

    The file is opened again for each tensor: pages that were read would stay in memory as long as it is open.
    """

    def read(name: str) -> Tensor:
        with safe_open(str(file), "pt") as opened:
            tensor: Tensor = opened.get_tensor(name)
        return tensor

    try:
        with safe_open(str(file), "pt") as opened:
            names = sorted(opened.keys(), key=_natural)
            aliases: dict[str, list[str]] = {}
            # save_model of safetensors drops tied tensors and stores the remaining name in the metadata.
            for other, name in (opened.metadata() or {}).items():
                if name in names and other not in names:
                    aliases.setdefault(name, []).append(other)
            described = [(name, opened.get_slice(name)) for name in names]
            return [
                StoredTensor(
                    name,
                    tuple(part.get_shape()),
                    _SAFE_DTYPES.get(part.get_dtype(), part.get_dtype()),
                    partial(read, name),
                    tuple(aliases.get(name, ())),
                )
                for name, part in described
            ]
    except (SafetensorError, OSError) as error:
        raise InputError(
            f"{file.name} cannot be read as a safetensors file ({error}). Copy or download it again."
        ) from error


def _mapping_tensors(state: Mapping[str, Any], read: Callable[[str], Tensor]) -> list[StoredTensor]:
    tensors = []
    keys: dict[str, Any] = {}
    for name, value in state.items():
        if isinstance(value, Tensor):
            keys[name] = identity(value)
            dtype = str(value.dtype).removeprefix("torch.")
            tensors.append(StoredTensor(name, tuple(value.shape), dtype, partial(read, name), reason=unusable(value)))
        else:
            reason = f"not a tensor but {type(value).__name__}"
            tensors.append(StoredTensor(name, (), "", torch.Tensor, reason=reason))
    return tie(tensors, keys)


def _without_wrappers(tensors: Sequence[StoredTensor]) -> list[StoredTensor]:
    """Remove the prefixes of compiled and data-parallel wrappers from the names."""
    wrapped = all(t.name.startswith("module.") for t in tensors)

    def plain(name: str) -> str:
        name = name.removeprefix("module.") if wrapped else name
        return ".".join(part for part in name.split(".") if part != "_orig_mod")

    return [replace(t, name=plain(t.name), tied=tuple(map(plain, t.tied))) for t in tensors]


def _natural(name: str) -> list[tuple[int, str]]:
    """Return a sort key that puts ``h.2`` before ``h.10``."""
    return [(int(part), "") if part.isdigit() else (-1, part) for part in re.split(r"(\d+)", name)]


def _listed(names: Iterable[str]) -> str:
    every = list(names)
    return ", ".join(map(repr, every[:3])) + (f" and {len(every) - 3} more" if len(every) > 3 else "")
