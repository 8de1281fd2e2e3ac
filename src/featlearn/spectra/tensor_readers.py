"""Open the weights of a model, state dict, file or folder without executing code, and read tensors one by one."""

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


Source = nn.Module | Mapping[str, Any] | str | os.PathLike[str]
"""What weights can be read from."""

_CHECKPOINTS = (".pt", ".pth", ".bin", ".ckpt")
_SAFE_DTYPES = {"F64": "float64", "F32": "float32", "F16": "float16", "BF16": "bfloat16", "BOOL": "bool"}


def open_source(source: Source, argument: str = "source") -> list[StoredTensor]:
    """Describe every tensor of a source; none of them is read.

    Args:
        source: A model, a state dict or a checkpoint that holds one, a ``.safetensors`` file, a torch checkpoint
            (``.pt``, ``.pth``, ``.bin``, ``.ckpt``), or a folder of one of these, sharded or not.
        argument: Name of the argument, for messages.
    """
    if isinstance(source, nn.Module):
        return module_tensors(source)
    if isinstance(source, Mapping):
        state = state_of(source)
        if state is None:
            raise InputError(f"{argument} is a mapping without tensors, got the keys {_listed(map(str, source))}")
        found = _mapping_tensors(state, state.__getitem__)
    elif isinstance(source, str | os.PathLike):
        found = _path_tensors(Path(source), argument)
    else:
        raise InputError(
            f"{argument} must be a model, a state dict, a file or a folder of weights, got {type(source).__name__}"
        )
    return undo_weight_norm(_without_wrappers(found))


def _path_tensors(path: Path, argument: str) -> list[StoredTensor]:
    if path.is_dir():
        return _folder_tensors(path)
    if not path.exists():
        raise InputError(f"{argument} {str(path)!r} does not exist")
    return _file_tensors([path], CheckpointReader())


def _file_tensors(files: Sequence[Path], reader: CheckpointReader) -> list[StoredTensor]:
    """The tensors of one file, or of files that hold parts of one model."""
    found: dict[str, StoredTensor] = {}
    owner: dict[str, Path] = {}
    for file in files:
        if file.suffix == ".safetensors":
            tensors = _safetensors(file)
        elif file.suffix in _CHECKPOINTS:
            state = reader.state(file)
            tensors = _mapping_tensors(state, partial(reader.read, file))
        else:
            known = ", ".join((".safetensors", *_CHECKPOINTS))
            raise InputError(f"weights are read from {known} files, got {file.name!r}: save the model's state dict")
        for tensor in tensors:
            if tensor.name in found:
                raise InputError(
                    f"{tensor.name!r} is both in {owner[tensor.name].name} and in {file.name}: "
                    "the folder holds more than one model, so name the file"
                )
            found[tensor.name], owner[tensor.name] = tensor, file
    return list(found.values())


def _folder_tensors(folder: Path) -> list[StoredTensor]:
    reader = CheckpointReader()
    files = sorted(f for f in folder.iterdir() if f.is_file())
    for ending in (".safetensors.index.json", ".bin.index.json"):
        indices = [f for f in files if f.name.endswith(ending)]
        if len(indices) > 1:
            raise InputError(f"{str(folder)!r} holds {len(indices)} indices: name one of the weight files instead")
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
        raise InputError(f"{str(folder)!r} holds {_listed(f.name for f in named)}: name one of them")
    known = ", ".join((".safetensors", *_CHECKPOINTS))
    raise InputError(f"{str(folder)!r} holds no weights: there is no {known} file in it")


def _indexed_tensors(index: Path, reader: CheckpointReader) -> list[StoredTensor]:
    try:
        shard_of = json.loads(index.read_text(encoding="utf-8"))["weight_map"]
        shards = sorted(set(shard_of.values()))
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise InputError(f"{index.name} is no index of weights: {type(error).__name__}: {error}") from error
    for shard in shards:
        if not isinstance(shard, str) or Path(shard).name != shard:
            raise InputError(f"{index.name} names {shard!r}, and a shard must be a file beside it")
        if not (index.parent / shard).is_file():
            raise InputError(f"{index.name} names {shard!r}, which is missing: download it again")
    found = _file_tensors([index.parent / shard for shard in shards], reader)
    missing = sorted(set(shard_of) - {t.name for t in found} - {name for t in found for name in t.tied})
    if missing:
        raise InputError(f"{index.name} names {_listed(missing)}, which no shard holds: the download is damaged")
    return sorted(found, key=lambda t: _natural(t.name))


def _safetensors(file: Path) -> list[StoredTensor]:
    """A file is opened anew for each tensor: pages that were read once would stay in memory as long as it is open."""

    def read(name: str) -> Tensor:
        with safe_open(str(file), "pt") as opened:
            tensor: Tensor = opened.get_tensor(name)
        return tensor

    try:
        with safe_open(str(file), "pt") as opened:
            names = sorted(opened.keys(), key=_natural)
            aliases: dict[str, list[str]] = {}
            # safetensors' save_model drops tied tensors and says in the metadata which name stands for them.
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
        raise InputError(f"{file.name} is no readable safetensors file: {error}: copy or download it again") from error


def _mapping_tensors(state: Mapping[str, Any], read: Callable[[str], Tensor]) -> list[StoredTensor]:
    found = []
    keys: dict[str, Any] = {}
    for name, value in state.items():
        if isinstance(value, Tensor):
            keys[name] = identity(value)
            dtype = str(value.dtype).removeprefix("torch.")
            found.append(StoredTensor(name, tuple(value.shape), dtype, partial(read, name), reason=unusable(value)))
        else:
            reason = f"no tensor but {type(value).__name__}"
            found.append(StoredTensor(name, (), "", torch.Tensor, reason=reason))
    return tie(found, keys)


def _without_wrappers(tensors: Sequence[StoredTensor]) -> list[StoredTensor]:
    """Names without what compile and data-parallel wrappers add to them."""
    wrapped = all(t.name.startswith("module.") for t in tensors)

    def plain(name: str) -> str:
        name = name.removeprefix("module.") if wrapped else name
        return ".".join(part for part in name.split(".") if part != "_orig_mod")

    return [replace(t, name=plain(t.name), tied=tuple(map(plain, t.tied))) for t in tensors]


def _natural(name: str) -> list[tuple[int, str]]:
    """Sorts ``h.2`` before ``h.10``."""
    return [(int(part), "") if part.isdigit() else (-1, part) for part in re.split(r"(\d+)", name)]


def _listed(names: Iterable[str]) -> str:
    every = list(names)
    return ", ".join(map(repr, every[:3])) + (f" and {len(every) - 3} more" if len(every) > 3 else "")
