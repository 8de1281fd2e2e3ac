"""Readers of the weights of a model, state dict, file or folder, tensor by tensor and without executing code."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open
from torch import Tensor, nn

from featlearn._utils.weight_formats import weight_files, weight_format
from featlearn.errors import InputError
from featlearn.spectra._inert_pickle import Built, DamagedError
from featlearn.spectra._numpy_files import read_npy, read_npz
from featlearn.spectra._stored_tensor import StoredTensor, undo_weight_norm
from featlearn.spectra._tensor_matrices import module_tensors
from featlearn.spectra._tensor_search import find_tensors, optimizer_reason
from featlearn.spectra._torch_archives import read_pickle_file, read_torch_tar, read_torch_zip

_READERS: dict[str, Callable[[Path], list[tuple[str, Any]]]] = {
    "torch zip": read_torch_zip,
    "torch tar": read_torch_tar,
    "pickle": read_pickle_file,
    "npy": read_npy,
    "npz": read_npz,
}


class CheckpointReader:
    """Reader of all tensors of a checkpoint."""

    def state(self, file: Path) -> Mapping[str, Any]:
        """Return the state dict of a file.

        Args:
            file: File of weights.

        Returns:
            The tensors by name, tied ones under each of their names.

        Raises:
            InputError: If the file cannot be read, or contains no tensors.
        """
        state: dict[str, Any] = {}
        for tensor in _file_tensors(weight_files(file)):
            if tensor.dtype and not tensor.reason.startswith(("quantized", "without", "on the meta")):
                state |= dict.fromkeys((tensor.name, *tensor.tied), tensor.read())
        return state


Source = nn.Module | Mapping[str, Any] | str | os.PathLike[str]
"""Source of weights: a model, a state dict, or the path of a file or folder."""

_SAFE_DTYPES = {"F64": "float64", "F32": "float32", "F16": "float16", "BF16": "bfloat16", "BOOL": "bool"}


def open_source(source: Source, argument: str = "source") -> list[StoredTensor]:
    """Describe every tensor of a source without reading its values.

    Args:
        source: Model, state dict or checkpoint that contains one, file of weights, or folder of one. A file is
            recognized by its content: safetensors, checkpoints and TorchScript archives of torch, ``.npy`` and
            ``.npz`` files, and indices of sharded models.
        argument: Name of the argument, for error messages.

    Returns:
        The tensors, those with several names once.

    Raises:
        InputError: If the source cannot be read.
    """
    if isinstance(source, nn.Module):
        return module_tensors(source)
    if isinstance(source, Mapping):
        tensors = find_tensors([("", source)])
        if not tensors:
            keys = _listed(map(str, source)) or "none"
            raise InputError(f"{argument} must contain tensors, got a mapping without tensors (keys: {keys}).")
    elif isinstance(source, str | os.PathLike):
        tensors = _file_tensors(weight_files(Path(source), argument))
    else:
        raise InputError(
            f"{argument} must be a model, a state dict, a file or a folder of weights, got {type(source).__name__}."
        )
    return undo_weight_norm(_without_wrappers(tensors))


def _file_tensors(files: Sequence[Path]) -> list[StoredTensor]:
    """Describe the tensors of one file, or of files that contain parts of one model."""
    result: dict[str, StoredTensor] = {}
    owner: dict[str, Path] = {}
    for file in files:
        kind = weight_format(file)
        if kind == "index":
            return _indexed_tensors(file)
        for tensor in _safetensors(file) if kind == "safetensors" else _checkpoint(file, _READERS[kind]):
            if tensor.name in result and not tensor.dtype:
                continue  # an entry such as the epoch, in each of the files
            if tensor.name in result:
                raise InputError(
                    f"{tensor.name!r} is both in {owner[tensor.name].name} and in {file.name}: "
                    "the folder contains more than one model. Pass one of the files."
                )
            result[tensor.name], owner[tensor.name] = tensor, file
    return list(result.values())


def _checkpoint(file: Path, read: Callable[[Path], list[tuple[str, Any]]]) -> list[StoredTensor]:
    """Describe the tensors of a file that can contain other objects."""
    try:
        roots = read(file)
        tensors = find_tensors(roots)
    except (InputError, MemoryError):
        raise
    except OSError as error:
        raise InputError(f"{file.name} cannot be read: {error.strerror or error}.") from error
    except Exception as error:  # damaged bytes can raise any exception
        why = str(error) if isinstance(error, DamagedError) else f"it is damaged ({type(error).__name__})"
        raise InputError(
            f"{file.name} must be a checkpoint of tensors only, but it is damaged or not a checkpoint, and a pickle is "
            f"never executed: {why}. Copy it again, or save model.state_dict(), preferably as safetensors."
        ) from error
    if not tensors:
        raise InputError(
            f"{file.name} must contain a state dict, got {_contents(roots[0][1])}. Save model.state_dict()."
        )
    return tensors


def _contents(root: Any) -> str:
    """Return the keys or the type of an object without weights."""
    if isinstance(root, Built) and root.pairs:
        return _listed(str(key) if isinstance(key, str | int) else type(key).__name__ for key, _ in root.pairs)
    name = root.name if isinstance(root, Built) else type(root).__name__
    return "an empty dict" if name == "dict" else " ".join(name[:80].split()) or "an object"


def _indexed_tensors(index: Path) -> list[StoredTensor]:
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
        if weight_format(index.parent / shard) == "index":
            raise InputError(f"The shards of {index.name} must be files of weights, got the index {shard!r}.")
    tensors = _file_tensors([index.parent / shard for shard in shards])
    names = {name for t in tensors for name in (t.name, *t.tied)}
    missing = sorted(name for name in shard_of if name not in names and name.removeprefix("module.") not in names)
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
                    optimizer_reason(name),
                )
                for name, part in described
            ]
    except (SafetensorError, OSError) as error:
        raise InputError(
            f"{file.name} cannot be read as a safetensors file ({error}). Copy or download it again."
        ) from error


def _without_wrappers(tensors: Sequence[StoredTensor]) -> list[StoredTensor]:
    """Remove the prefixes of compiled and data-parallel wrappers from the names."""
    wrapped = all(t.name.startswith("module.") for t in tensors if t.dtype)

    def plain(name: str) -> str:
        name = name.removeprefix("module.") if wrapped else name
        return ".".join(part for part in name.split(".") if part != "_orig_mod")

    return [replace(t, name=plain(t.name), tied=tuple(map(plain, t.tied))) for t in tensors]


def _natural(name: str) -> list[tuple[int, str]]:
    """Return a sort key that puts ``h.2`` before ``h.10``."""
    return [(int(part), "") if part.isdigit() else (-1, part) for part in re.split(r"(\d+)", name)]


def _listed(names: Iterable[str]) -> str:
    every = list(names)
    return ", ".join(repr(name[:80]) for name in every[:3]) + (f" and {len(every) - 3} more" if len(every) > 3 else "")
