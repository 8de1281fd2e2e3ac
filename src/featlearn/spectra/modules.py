"""The tensors of a live model, with what its modules know about them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy
from torch.nn.utils import parametrize

from featlearn.layers import Layer, find_layers, unwrap
from featlearn.layers.layer import child_name
from featlearn.spectra.stored import StoredTensor, tie, unusable

__all__ = ["module_tensors"]

_Made = tuple[str, Callable[[], Tensor], dict[str, Tensor]]
"""Name of a weight that is computed, how, and the parameters that it is made of."""

_KINDS: list[tuple[Any, str]] = [
    ((nn.Embedding, nn.EmbeddingBag), "embedding"),
    ((nn.RNNBase, nn.RNNCellBase), "recurrent"),
]


def module_tensors(model: nn.Module) -> list[StoredTensor]:
    """Describe every parameter and saved buffer of a model; a parametrised weight is what its factors make."""
    model = unwrap(model)
    layers: dict[tuple[int, str], list[Layer]] = {}
    for layer in find_layers(model):
        path, _, local = layer.parameter.rpartition(".")
        layers.setdefault((id(layer.module.get_submodule(path)), local), []).append(layer)
    found: list[StoredTensor] = []
    keys: dict[str, Any] = {}
    for path, module in model.named_modules(remove_duplicate=False):
        if isinstance(module, parametrize.ParametrizationList):
            continue  # told by its owner
        name = ".".join(part for part in path.split(".") if part != "_orig_mod")
        hidden: set[str] = set()
        for local, make, factors in _made_weights(module):
            weight, full = make(), child_name(name, local)
            note = "parametrised: the weight that its factors make"
            parts = tuple(_described(child_name(name, factor), tensor) for factor, tensor in factors.items())
            shown = tuple(layers.get((id(module), local), ()))
            found.append(_described(full, weight, make, note=note, layers=shown, parts=parts))
            keys[full] = id(module), local
            hidden |= set(factors)
        for local, parameter in module.named_parameters(recurse=False):
            if local not in hidden:
                full = child_name(name, local)
                shown = tuple(layers.get((id(module), local), ()))
                found.append(_described(full, parameter, kind=_kind(module), groups=_groups(module), layers=shown))
                keys[full] = id(parameter)
        for local, buffer in module.named_buffers(recurse=False):
            if local not in module._non_persistent_buffers_set:
                full = child_name(name, local)
                found.append(_described(full, buffer, reason="a buffer, no parameter"))
                keys[full] = id(buffer)
    return tie(found, keys)


def _described(name: str, tensor: Tensor, read: Callable[[], Tensor] | None = None, **more: Any) -> StoredTensor:
    dtype = str(tensor.dtype).removeprefix("torch.")
    if is_lazy(tensor):
        return StoredTensor(name, (), dtype, torch.Tensor, reason="not initialised: the model has not run yet")
    more.setdefault("reason", unusable(tensor))
    return StoredTensor(name, tuple(tensor.shape), dtype, read or (lambda: tensor.detach()), **more)


def _kind(module: nn.Module) -> str:
    return next((kind for types, kind in _KINDS if isinstance(module, types)), "")


def _groups(module: nn.Module) -> int | None:
    """Groups of a transposed convolution, whose weight is (in, out / groups, kernel)."""
    transposed = isinstance(module, nn.ConvTranspose1d | nn.ConvTranspose2d | nn.ConvTranspose3d)
    return module.groups if transposed else None  # type: ignore[return-value]


def _made_weights(module: nn.Module) -> Iterator[_Made]:
    """Weights that are no parameters of a module but are made of some."""
    if parametrize.is_parametrized(module):
        for local, originals in module.parametrizations.items():  # type: ignore[operator,union-attr]
            factors = {f"parametrizations.{local}.{n}": p for n, p in originals.named_parameters(recurse=False)}
            yield local, partial(_at_rest, module, local), factors
    for hook in module._forward_pre_hooks.values():  # the older weight_norm and spectral_norm
        local = str(getattr(hook, "name", ""))
        own = dict(module.named_parameters(recurse=False))
        factors = {n: own[n] for n in (f"{local}_g", f"{local}_v", f"{local}_orig") if n in own}
        if factors and hasattr(hook, "compute_weight"):
            # The weight itself is of the last forward pass. A spectral norm must not take a step.
            options = (False,) if f"{local}_orig" in factors else ()
            yield local, partial(_by_hook, hook, module, *options), factors


def _by_hook(hook: Any, module: nn.Module, *options: bool) -> Tensor:
    weight: Tensor = hook.compute_weight(module, *options)
    return weight.detach()


def _at_rest(module: nn.Module, local: str) -> Tensor:
    """A parametrised weight as in evaluation mode: in training mode a spectral norm would take a step."""
    inner = list(module.parametrizations[local].modules())  # type: ignore[union-attr,index]
    modes = [m.training for m in inner]
    try:
        for m in inner:
            m.training = False
        with torch.no_grad():
            weight: Tensor = getattr(module, local)
        return weight
    finally:
        for m, mode in zip(inner, modes, strict=True):
            m.training = mode
