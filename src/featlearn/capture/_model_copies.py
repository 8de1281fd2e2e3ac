"""Copies of a model, its initial state, and changes of its weights."""

from __future__ import annotations

import copy
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from featlearn.capture._data import map_tensors
from featlearn.errors import InputError, UnsupportedModelError
from featlearn.layers import Layer, unwrap

_EMBEDDINGS = nn.Embedding | nn.EmbeddingBag


def copied(model: nn.Module) -> nn.Module:
    """Return a deep copy of a model whose tensors can be trained, also from within inference mode.

    torch cannot copy tensors with a graph, such as weights that hooks computed in the last forward pass; the copy gets
    their values.

    Args:
        model: Module to copy.

    Returns:
        The copy.

    Raises:
        UnsupportedModelError: ``copy.deepcopy`` fails on the model.
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
                f"the model cannot be copied: copy.deepcopy(model) raised {type(error).__name__}: {error}"
            ) from error


def placed(model: nn.Module, device: torch.device | str | None, dtype: torch.dtype | None) -> nn.Module:
    """Return the model, or a copy if it is to be on another device or in another precision.

    Args:
        model: Module with parameters.
        device: Device of the result. None is the model's.
        dtype: Precision of the result. None is the model's.
    """
    parameters = list(model.parameters())
    if not parameters:
        raise InputError("the model has no parameters.")
    moved = device is not None and any(p.device != torch.device(device) for p in parameters)
    cast = dtype is not None and any(p.is_floating_point() and p.dtype != dtype for p in parameters)
    return copied(model).to(device=device, dtype=dtype) if moved or cast else model


def initial_model(initial: nn.Module | Mapping[str, Tensor], model: nn.Module, original: nn.Module) -> nn.Module:
    """Return the initial model, on the device and in the precision of the model.

    Args:
        initial: Module before training, or its state dict.
        model: Trained model as it is measured.
        original: Trained model of the caller; `model` may be a copy of it.

    Returns:
        Module with the initial weights.

    Raises:
        InputError: `initial` is of another type or architecture, or shares its weights with the original.
    """
    if not isinstance(initial, nn.Module | Mapping):
        raise InputError(f"initial must be a module or a state_dict, got {type(initial).__name__}.")
    tensors = initial.parameters() if isinstance(initial, nn.Module) else initial.values()
    live = {p.data_ptr() for p in original.parameters() if p.numel()}
    if any(isinstance(t, Tensor) and t.numel() and t.data_ptr() in live for t in tensors):
        raise InputError(
            "initial shares its weights with the model, so it has no initial values. Keep "
            "copy.deepcopy(model) or copy.deepcopy(model.state_dict()) from before training."
        )
    if isinstance(initial, nn.Module):
        dtypes = {p.dtype for p in model.parameters() if p.is_floating_point()}
        device = next(model.parameters()).device
        return placed(unwrap(initial), device, dtypes.pop() if len(dtypes) == 1 else None)
    start = copied(model)
    try:
        start.load_state_dict({_unwrapped(name): value for name, value in initial.items()})
    except RuntimeError as error:
        raise InputError(f"initial is of another architecture than the model: {error}") from error
    return start


def _unwrapped(name: str) -> str:
    """Remove the prefixes that compile and data-parallel wrappers add to the name of a parameter."""
    for prefix in ("module.", "_orig_mod.", "module."):
        name = name.removeprefix(prefix)
    return name


def matching_layers(layers: Iterable[Layer], initial: Iterable[Layer]) -> list[Layer]:
    """Return the layers of the initial model that correspond to layers of the model.

    Args:
        layers: Layers of the model.
        initial: Layers of the initial model.

    Raises:
        InputError: A layer is missing in the initial model, or has another shape.
    """
    by_name = {layer.name: layer for layer in initial}
    matched = []
    for layer in layers:
        other = by_name.get(layer.name)
        if other is None or other.shape != layer.shape:
            shape = "it has none" if other is None else f"it is {other.shape[1]} x {other.shape[2]}"
            raise InputError(
                f"initial is of another architecture: layer {layer.name!r} is {layer.shape[1]} x {layer.shape[2]} "
                f"in the model, in initial {shape}."
            )
        matched.append(other)
    return matched


def weight_mark(model: nn.Module) -> list[tuple[int, float]]:
    """Return the version and norm of each parameter; the version alone misses writes through ``.data``."""
    # An embedding with max_norm writes into its weight at each call, with the same values after the first.
    rescaled = {id(m.weight) for m in model.modules() if isinstance(m, _EMBEDDINGS) and m.max_norm is not None}
    with torch.no_grad():
        return [
            (p._version, float(p.norm() if p.is_floating_point() or p.is_complex() else p.float().norm()))
            for p in model.parameters()
            if id(p) not in rescaled
        ]


def whole_weight(weight: Tensor) -> Tensor:
    """Return a copy of a weight; a sharded one (FSDP2) is gathered, which every process must request."""
    whole = getattr(weight, "full_tensor", None)
    return weight.clone() if whole is None else whole().clone()
