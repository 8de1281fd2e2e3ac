"""The models that are measured: the user's own or a copy, and the one before training."""

from __future__ import annotations

import copy
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from featlearn.capture.batches import map_tensors
from featlearn.errors import InputError, UnsupportedModelError
from featlearn.layers import Layer, unwrap

__all__ = ["copied", "initial_model", "matching_layers", "placed"]


def copied(model: nn.Module) -> nn.Module:
    """A deep copy whose tensors can be trained and differentiated, wherever it is made.

    Tensors that a module keeps from its last forward pass, such as weights that hooks compute, have a graph, with which
    torch refuses to copy them; the copy gets their values.
    """
    computed: dict[int, Any] = {}

    def detach(t: Tensor) -> None:
        if not t.is_leaf:
            computed[id(t)] = t.detach().clone()

    with torch.inference_mode(False), torch.no_grad():
        for module in model.modules():
            map_tensors(vars(module), detach)
        try:
            return copy.deepcopy(model, computed)
        except Exception as error:
            raise UnsupportedModelError(
                f"the model cannot be copied: copy.deepcopy(model) says {type(error).__name__}: {error}"
            ) from error


def placed(model: nn.Module, device: torch.device | str | None, dtype: torch.dtype | None) -> nn.Module:
    """The model itself, or a copy where another device or precision is asked for."""
    parameters = list(model.parameters())
    if not parameters:
        raise InputError("the model has no parameters")
    moved = device is not None and any(p.device != torch.device(device) for p in parameters)
    cast = dtype is not None and any(p.is_floating_point() and p.dtype != dtype for p in parameters)
    if not (moved or cast):
        return model
    return copied(model).to(device=device, dtype=dtype)


def initial_model(initial: nn.Module | Mapping[str, Tensor], model: nn.Module, original: nn.Module) -> nn.Module:
    """The initial model, on the device and in the precision of the model."""
    reference = next(model.parameters())
    dtypes = {p.dtype for p in model.parameters() if p.is_floating_point()}
    live = {p.data_ptr() for p in original.parameters() if p.numel()}
    if isinstance(initial, nn.Module):
        start = unwrap(initial)
        tensors: Iterable[Tensor] = start.parameters()
    elif isinstance(initial, Mapping):
        tensors = [t for t in initial.values() if isinstance(t, Tensor)]
    else:
        raise InputError(f"initial must be a module or a state_dict, got {type(initial).__name__}")
    if any(t.data_ptr() in live for t in tensors if t.numel()):
        raise InputError(
            "initial shares its weights with the model, so that nothing would have changed: keep "
            "copy.deepcopy(model) or copy.deepcopy(model.state_dict()) from before training"
        )
    if not isinstance(initial, nn.Module):
        start = copied(model)
        try:
            start.load_state_dict({_unwrapped(name): value for name, value in initial.items()})
        except RuntimeError as error:
            raise InputError(f"initial is of another architecture than the model: {error}") from error
        return start
    return placed(start, reference.device, dtypes.pop() if len(dtypes) == 1 else None)


def _unwrapped(name: str) -> str:
    """The name of a parameter without what compile and data-parallel wrappers add to it."""
    for prefix in ("module.", "_orig_mod.", "module."):
        name = name.removeprefix(prefix)
    return name


def matching_layers(layers: Iterable[Layer], initial: Iterable[Layer]) -> list[Layer]:
    """Of the initial model's layers those that correspond to the model's."""
    by_name = {layer.name: layer for layer in initial}
    matched = []
    for layer in layers:
        other = by_name.get(layer.name)
        if other is None or other.shape != layer.shape:
            found = "it has none" if other is None else f"there it is {other.shape[1]} x {other.shape[2]}"
            raise InputError(
                f"initial is of another architecture: layer {layer.name!r} is {layer.shape[1]} x {layer.shape[2]} "
                f"in the model, and {found}"
            )
        matched.append(other)
    return matched
