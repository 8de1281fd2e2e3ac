"""Registry of kinds of layers, and search for the layers of a model."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from torch import Tensor, nn
from torch.nn.utils import parametrize

from featlearn._utils.patterns import parse_patterns, select_matching
from featlearn.errors import InputError
from featlearn.layers._adapters import adapter_layers, is_adapter
from featlearn.layers._attention import attention_in_parts, attention_layers
from featlearn.layers._complex import as_real
from featlearn.layers._linear_conv import conv_layers, linear_layers, transposed_layers
from featlearn.layers._norm_embedding import (
    batch_norm_layers,
    embedding_layers,
    group_norm_layers,
    instance_norm_layers,
    last_norm_layers,
)
from featlearn.layers._recurrent import recurrent_in_parts, recurrent_layers
from featlearn.layers.base import Layer, Record

Factory = Callable[[str, nn.Module], list[Layer]]
"""Function of the name and the module that returns the layers of the module."""

FACTORIES: dict[type[nn.Module], Factory] = {
    nn.Linear: linear_layers,
    **dict.fromkeys((nn.Conv1d, nn.Conv2d, nn.Conv3d), conv_layers),
    nn.MultiheadAttention: attention_layers,
    **dict.fromkeys((nn.RNN, nn.LSTM, nn.GRU, nn.RNNCell, nn.LSTMCell, nn.GRUCell), recurrent_layers),
}
"""Factories by class. A factory is used for a subclass only if the subclass has the same forward function."""

# Modules without a weight matrix that are linear in their parameters: for kernels, which include all parameters.
_VECTOR_FACTORIES: dict[type[nn.Module], Factory] = {
    nn.Embedding: embedding_layers,
    nn.LayerNorm: last_norm_layers,
    nn.RMSNorm: last_norm_layers,
    nn.GroupNorm: group_norm_layers,
    **dict.fromkeys((nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d), batch_norm_layers),
    **dict.fromkeys((nn.InstanceNorm1d, nn.InstanceNorm2d, nn.InstanceNorm3d), instance_norm_layers),
}


def register_layer(module_type: type[nn.Module], factory: Factory) -> None:
    """Register a new kind of layer.

    Args:
        module_type: Class of the modules.
        factory: Function ``factory(name, module)`` that returns a list with the `Layer` of the module. The module must
            be called as a module and return its pre-activations.

    Example:
        >>> import torch
        >>> from featlearn.layers import Layer, find_layers, register_layer, token_rows
        >>> class Dense(torch.nn.Linear):
        ...     def forward(self, x):
        ...         return x @ self.weight.T
        >>> def dense_layers(name, module):
        ...     return [
        ...         Layer(
        ...             name, "dense", module, None, "weight", 1, module.out_features, module.in_features,
        ...             weight=lambda: module.weight, matrix=lambda w: w[None], outputs=token_rows, inputs=token_rows,
        ...         )
        ...     ]
        >>> register_layer(Dense, dense_layers)
        >>> [layer.kind for layer in find_layers(torch.nn.Sequential(Dense(3, 2)))]
        ['dense']
    """
    FACTORIES[module_type] = factory


def in_parts(module: nn.Module, record: Record) -> Callable[..., Any]:
    """Return a forward function equal to that of a module with several matrices, which passes each to a recorder.

    Args:
        module: Attention or recurrent module.
        record: Function ``record(part, x, h)`` of tensors with the samples first, which returns the ``h`` to continue
            with.

    Returns:
        Function with the arguments and results of the module's ``forward``.
    """
    if isinstance(module, nn.MultiheadAttention):
        return attention_in_parts(module, record)
    return recurrent_in_parts(module, record)


def unwrap(model: nn.Module) -> nn.Module:
    """Return the model inside compile, DistributedDataParallel and DataParallel wrappers.

    The inner model computes the same function; the forward function of a wrapper would compile or communicate.

    Args:
        model: Module with or without wrappers.

    Returns:
        The innermost module that is not a wrapper.
    """
    while True:
        if isinstance(model, nn.DataParallel | nn.parallel.DistributedDataParallel):
            model = model.module
        elif isinstance(inner := getattr(model, "_orig_mod", None), nn.Module):
            model = inner
        else:
            return model


def find_layers(model: nn.Module, vectors: bool = False, merged: bool = False, embeddings: bool = False) -> list[Layer]:
    """Find every weight matrix of a model that has the form ``h = W x``, in the order of its modules.

    Args:
        model: Module to search.
        vectors: Whether to include gains of normalization layers and embeddings.
        merged: Whether low-rank adapters count as one layer with the merged weight ``W + B A``, beside A and B, and
            complex weights as real ones of twice the size.
        embeddings: Whether to include embeddings.

    Returns:
        The layers. A model that is a single layer gets the name ``"model"``.

    Example:
        >>> import torch
        >>> from featlearn.layers import find_layers
        >>> [layer.name for layer in find_layers(torch.nn.Sequential(torch.nn.Linear(3, 2), torch.nn.ReLU()))]
        ['0']
    """
    factories = FACTORIES | _VECTOR_FACTORIES if vectors else FACTORIES
    if embeddings:
        factories = factories | {nn.Embedding: embedding_layers}
    layers: list[Layer] = []
    owned: set[int] = set()  # modules whose matrix a parent has, such as out_proj of attention
    for name, module, skip in walk(model):
        factory = None if skip or id(module) in owned else find_factory(module, factories)
        if merged and not skip and is_adapter(module):
            factory = adapter_layers
        if factory is not None:
            for layer in factory(name, module):
                layer = _with_note(layer)
                if merged and any(p.is_complex() for p in tensors_behind(layer)):
                    layer = as_real(layer)
                layers.append(layer)
                owned.add(id(_owner(layer)[0]))
    # A model that is one layer has the empty path.
    return [layer if layer.name else replace(layer, name="model") for layer in layers]


def select_layers(layers: Sequence[Layer], patterns: str | Iterable[str] | None) -> list[Layer]:
    """Return the layers whose names match any of some glob patterns, in the order of the model.

    Args:
        layers: Layers of a model.
        patterns: Glob pattern, or several. None selects all layers.

    Raises:
        InputError: The list is empty, or a pattern matches no layer.
    """
    if not layers:
        raise InputError(
            "the model has no layer that featlearn can measure: no Linear, Conv1d/2d/3d, MultiheadAttention or "
            "Conv1D of transformers. Register other modules with featlearn.layers.register_layer."
        )
    if patterns is None:
        return list(layers)
    wanted = parse_patterns(patterns, "layers")
    picked = set(select_matching(wanted, [layer.name for layer in layers], "layers", "layer"))
    return [layer for layer in layers if layer.name in picked]


def walk(model: nn.Module) -> Iterator[tuple[str, nn.Module, str]]:
    """Yield each module once: its path without those of wrappers, the module, and its reason to be left out."""
    skipped: dict[str, str] = {}
    for path, module in model.named_modules():
        parent = path.rpartition(".")[0]
        reason = str(getattr(module, "featlearn_skip", "")) or (skipped.get(parent, "") if path else "")
        skipped[path] = reason
        yield ".".join(part for part in path.split(".") if part != "_orig_mod"), module, reason


def skipped_parameters(model: nn.Module) -> set[str]:
    """Return the paths of the parameters in modules with the attribute ``featlearn_skip``.

    Args:
        model: Module to search.
    """
    skipped = {id(p) for _, module, skip in walk(model) if skip for p in module.parameters(recurse=False)}
    return {path for path, p in model.named_parameters() if id(p) in skipped}


def find_factory(module: nn.Module, factories: Mapping[type[nn.Module], Factory] = FACTORIES) -> Factory | None:
    """Return the function that makes the layers of a module; None if it is of another kind, or has another forward.

    Args:
        module: Module of the model.
        factories: Functions by class of modules.
    """
    kind = type(module)
    if kind.__name__ == "Conv1D" and kind.__module__.startswith("transformers."):
        return transposed_layers
    for base in kind.__mro__:
        if base in factories:
            same = getattr(kind, "forward", None) is getattr(base, "forward", None)
            return factories[base] if same else None
    return None


def _owner(layer: Layer) -> tuple[nn.Module, str]:
    """Return the module that holds the weight of a layer, and the name of the weight in it."""
    path, _, local = layer.parameter.rpartition(".")
    return layer.module.get_submodule(path), local


def tensors_behind(layer: Layer) -> list[Tensor]:
    """Return the parameters that the weight of a layer is computed from.

    Args:
        layer: Layer of a model.

    Returns:
        The weight, or the parameters of its parametrization.
    """
    if layer.leaves:
        return list(layer.leaves)
    module, local = _owner(layer)
    if parametrize.is_parametrized(module, local):
        return list(module.parametrizations[local].parameters())  # type: ignore[union-attr,index]
    parameters = dict(module.named_parameters(recurse=False))
    # The older weight_norm and spectral_norm have their factors instead of the weight.
    names = [local] if local in parameters else [f"{local}_g", f"{local}_v", f"{local}_orig"]
    return [parameters[name] for name in names if name in parameters]


def _with_note(layer: Layer) -> Layer:
    if layer.leaves:
        return layer
    module, local = _owner(layer)
    # The weight is not read: a spectral norm in training mode would advance its power iteration.
    if local in dict(module.named_parameters(recurse=False)):
        return layer
    return replace(layer, note="parametrized: decay acts on the factors, so FACT = NFM need not hold")
