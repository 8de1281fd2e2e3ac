"""Entries of containers: dicts, lists, live modules, and the inert objects of a pickle."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
from torch import Tensor, nn

from featlearn.spectra._inert_pickle import Built, Global
from featlearn.spectra._pickle_constructors import PickledArray
from featlearn.spectra._stored_tensor import StoredTensor
from featlearn.spectra._tensor_matrices import module_tensors
from featlearn.spectra._tensor_records import TensorRecord

_LONGEST = 300  # characters of a key: names of hostile files must not become long

SEARCHED = (nn.Module, Mapping, list, tuple, Built, Tensor, TensorRecord, PickledArray, np.ndarray, StoredTensor)
"""Types of objects that are tensors or can contain some."""


def entries_of(value: Any) -> list[tuple[str, Any, str]]:
    """Return the entries of a container.

    Args:
        value: Module, mapping, list, tuple or object of a pickle.

    Returns:
        Name, value and note of each entry. The note is the reason why a tensor is not a weight, or empty.
    """
    if isinstance(value, nn.Module):
        return [(t.name, t, "") for t in module_tensors(value)]
    if isinstance(value, Mapping):
        return [(_text(key), child, "") for key, child in value.items()]
    if isinstance(value, list | tuple):
        return [(str(i), child, "") for i, child in enumerate(value) if isinstance(child, SEARCHED)]
    if is_module(value) and not value.name.startswith("__torch__"):
        return list(_module_entries(value))
    return [(name, child, "") for name, child in _object_entries(value).items()]


def _object_entries(value: Built) -> dict[str, Any]:
    """Return the items, elements, attributes and arguments of an object."""
    result = {_text(key): child for key, child in value.pairs}
    result |= {str(i): child for i, child in enumerate(value.elements)}
    for state in value.states:
        for part in state if isinstance(state, tuple) else (state,):
            if isinstance(part, Built):
                result |= {name: child for name, child in _pairs(part).items() if name not in result}
            elif isinstance(part, list | tuple | TensorRecord | PickledArray):
                result.setdefault("state", part)
    for i, argument in enumerate(value.arguments):
        if isinstance(argument, Built | list | tuple | TensorRecord | PickledArray):
            result.setdefault(f"args.{i}" if result else str(i), argument)
    return result


def _pairs(value: Any) -> dict[str, Any]:
    return {_text(key): child for key, child in value.pairs} if isinstance(value, Built) else {}


def is_module(value: Any) -> bool:
    """Return whether an object is a module.

    Args:
        value: Live module, or an object of a pickle.

    Returns:
        True for live modules, those that were saved as a whole, and those of TorchScript.
    """
    if not isinstance(value, Built):
        return isinstance(value, nn.Module)
    if value.name.startswith("__torch__"):
        return True
    return any({"_parameters", "_modules"} <= set(_pairs(state)) for state in value.states)


def _module_entries(value: Built) -> Iterator[tuple[str, Any, str]]:
    state: dict[str, Any] = {}
    for part in value.states:
        state |= _pairs(part)
    parameters = {name: child for name, child in _pairs(state["_parameters"]).items() if child is not None}
    for name, child in parameters.items():
        yield name, child, ""
    hidden = state.get("_non_persistent_buffers_set")
    unsaved = set(filter(_is_text, [*getattr(hidden, "elements", ()), *(hidden if isinstance(hidden, list) else ())]))
    for argument in getattr(hidden, "arguments", ()):
        unsaved |= set(filter(_is_text, argument if isinstance(argument, list) else ()))
    for name, child in _pairs(state.get("_buffers")).items():
        if child is not None and name not in unsaved:
            yield name, child, "a buffer, not a parameter"
    parallel = value.name.endswith("DataParallel")
    for name, child in _pairs(state["_modules"]).items():
        if child is not None:
            yield "" if parallel and name == "module" else name, child, ""
    for name, child in state.items():
        # The older weight norm and spectral norm keep the computed weight as an attribute.
        computed = f"{name}_g" in parameters or f"{name}_orig" in parameters
        if not name.startswith("_") and not computed:
            yield name, child, "an attribute, not a parameter" if _is_tensor(child) else ""


def _is_text(value: Any) -> bool:
    return isinstance(value, str)


def _is_tensor(value: Any) -> bool:
    return isinstance(value, Tensor | TensorRecord | PickledArray)


def _text(key: Any) -> str:
    if isinstance(key, bytes):
        key = key.decode("latin-1")
    return str(key)[:_LONGEST] if isinstance(key, str | int | float) else type(key).__name__


def type_name(value: Any) -> str:
    """Return the name of the type of a value.

    Args:
        value: Value of a file.

    Returns:
        Name of the class, without its module.
    """
    if isinstance(value, Built | Global):
        return " ".join(value.name.rpartition(".")[2][:_LONGEST].split()) or "object"
    return type(value).__name__
