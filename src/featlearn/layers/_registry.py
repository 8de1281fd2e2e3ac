"""Registry of kinds of layers, search for the layers of a model, and coverage of its parameters."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
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
from featlearn.layers.base import Layer, Record, child_name

Factory = Callable[[str, nn.Module], list[Layer]]
"""Function of the name and the module that returns the layers of the module."""

# A factory is used for a subclass only if the subclass has the same forward function.
_FACTORIES: dict[type[nn.Module], Factory] = {
    nn.Linear: linear_layers,
    **dict.fromkeys((nn.Conv1d, nn.Conv2d, nn.Conv3d), conv_layers),
    nn.MultiheadAttention: attention_layers,
    **dict.fromkeys((nn.RNN, nn.LSTM, nn.GRU, nn.RNNCell, nn.LSTMCell, nn.GRUCell), recurrent_layers),
}

# Modules without a weight matrix that are linear in their parameters: for kernels, which include all parameters.
_VECTOR_FACTORIES: dict[type[nn.Module], Factory] = {
    nn.Embedding: embedding_layers,
    nn.LayerNorm: last_norm_layers,
    nn.RMSNorm: last_norm_layers,
    nn.GroupNorm: group_norm_layers,
    **dict.fromkeys((nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d), batch_norm_layers),
    **dict.fromkeys((nn.InstanceNorm1d, nn.InstanceNorm2d, nn.InstanceNorm3d), instance_norm_layers),
}

_REGISTER = "register it with featlearn.layers.register_layer"
_REASONS: list[tuple[type[nn.Module] | tuple[type[nn.Module], ...], str]] = [
    ((nn.Embedding, nn.EmbeddingBag), "embedding: a look-up by index, it has no vector input x"),
    (nn.LayerNorm, "normalization: an elementwise scale, not a matrix product"),
    (nn.MultiheadAttention, "attention: a constant key or value token, not a matrix product"),
]


@dataclass(frozen=True)
class ParameterCoverage:
    """Layers of one parameter of two or more dimensions, or the reason why it has none.

    Attributes:
        parameter: Path of the parameter in the model.
        shape: Shape of the parameter.
        layers: Names of the layers that are measured.
        reason: ``"taken"`` with remarks, or the reason why no layer is measured.
        tied_to: Other paths of the same parameter.
        role: Use of the parameter: ``"product"`` (of a layer, or of a product that was not measured), ``"embedding"``,
            ``"constant"`` (added to activations or multiplied with them entry by entry), ``"unused"``, or ``""`` if it
            is not known.
    """

    parameter: str
    shape: tuple[int, ...]
    layers: tuple[str, ...]
    reason: str
    tied_to: tuple[str, ...]
    role: str = ""

    @property
    def taken(self) -> bool:
        """True if the parameter is measured as a layer."""
        return bool(self.layers)


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
    _FACTORIES[module_type] = factory


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
    factories = _FACTORIES | _VECTOR_FACTORIES if vectors else _FACTORIES
    if embeddings:
        factories = factories | {nn.Embedding: embedding_layers}
    layers: list[Layer] = []
    owned: set[int] = set()  # modules whose matrix a parent has, such as out_proj of attention
    for name, module, skip in _walk(model):
        factory = None if skip or id(module) in owned else _factory(module, factories)
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


def coverage(
    model: nn.Module,
    taken: Iterable[Layer],
    reasons: Mapping[str, str] | None = None,
    uses: Mapping[str, Collection[str]] | None = None,
    left_out: Iterable[Layer] = (),
    embeddings: bool = False,
) -> list[ParameterCoverage]:
    """List each parameter of two or more dimensions with its layers, or the reason why it has none.

    Args:
        model: Module with the parameters.
        taken: Layers that were measured.
        reasons: Reasons why layers were not measured, by layer name. Other layers were left out by the caller.
        uses: Names of the functions that used each parameter together with data, by path. None if not known.
        left_out: Further layers of the model that were not measured, beside those of its modules.
        embeddings: Whether embeddings count as layers.

    Returns:
        One row per parameter; tied parameters have one row.
    """
    taken = list(taken)
    measured = {id(layer.module) for layer in taken}
    names_of: dict[int, list[str]] = {}
    shapes: dict[int, tuple[int, ...]] = {}
    owner: dict[int, tuple[nn.Module, str]] = {}
    others: dict[int, list[str]] = {}  # modules that use a parameter in another way, such as embeddings
    for name, module, skip in _walk(model):
        for local, parameter in module.named_parameters(recurse=False):
            if parameter.ndim >= 2:
                names_of.setdefault(id(parameter), []).append(child_name(name, local))
                shapes[id(parameter)] = tuple(parameter.shape)
                owner.setdefault(id(parameter), (module, skip))
                if _factory(module) is None and id(module) not in measured:
                    others.setdefault(id(parameter), []).append(f"{name} ({type(module).__name__})")
    layers_of: dict[int, list[str]] = {}
    products: set[int] = set()
    for layer in taken:
        for tensor in tensors_behind(layer):
            layers_of.setdefault(id(tensor), []).append(layer.name)
            products |= set() if layer.one_hot else {id(tensor)}
    others_known = (*find_layers(model, embeddings=embeddings), *left_out)
    # A table that is tied to a product is known by the product.
    ordered = sorted(others_known, key=lambda layer: not layer.one_hot)
    known = {id(p): layer for layer in ordered for p in tensors_behind(layer)}
    rows = []
    for key, names in names_of.items():
        layers = tuple(dict.fromkeys(layers_of.get(key, ())))
        module, skip = owner[key]
        role = "product"
        if layers:
            role = "product" if key in products else "embedding"
            reason = "taken" + "".join(f"; {use} uses it as well" for use in others.get(key, ()) if len(names) > 1)
            rest = set[str]().union(*((uses or {}).get(name, ()) for name in names)) - _KNOWN_USES
            if rest:
                reason += f"; a use by {', '.join(sorted(rest))} is not measured"
        elif key in known:
            reason = (reasons or {}).get(known[key].name, "left out by the layers argument")
            role = "embedding" if known[key].one_hot else "product"
        elif skip or uses is None:
            reason, role = _reason(module, skip), ""
        else:
            reason, role = _use(module, set[str]().union(*(uses.get(name, ()) for name in names)))
            if embeddings and role == "embedding":
                reason = "embedding: only modules with the forward function of nn.Embedding are measured"
        rows.append(ParameterCoverage(names[0], shapes[key], layers, reason, tuple(names[1:]), role))
    return rows


LAYER_INPUT = "a layer that takes it as its input"
"""Use of a parameter, such as a learned query, as the input of a layer."""
OF_PARAMETERS = "a product with another parameter"
"""Use of a parameter in a product that computes a weight, or a constant."""
# Functions that use a parameter together with activations, without a product.
_USES = {
    "embedding": ("embedding", "embedding_bag", "__getitem__", "index_select", "gather", "take_along_dim"),
    "constant": (
        "add", "__add__", "__radd__", "__iadd__", "add_", "sub", "__sub__", "__rsub__", "cat", "concat", "concatenate",
        "stack", "where", "mul", "__mul__", "__rmul__", "mul_", "__imul__", "div", "__truediv__", "layer_norm",
        "rms_norm", "group_norm", "instance_norm", "batch_norm", "prelu", "pow", "__pow__", "__setitem__",
        "masked_fill", "attn_mask", LAYER_INPUT,
    ),
}  # fmt: skip


_KNOWN_USES = {OF_PARAMETERS} | {function for functions in _USES.values() for function in functions}


def _use(module: nn.Module, names: set[str]) -> tuple[str, str]:
    """Return the reason why a parameter is not a layer, and its role, from the functions that used it."""
    if isinstance(module, nn.Embedding | nn.EmbeddingBag):
        return _reason(module, ""), "embedding"
    if not names:
        return "not used in the forward pass", "unused"
    reason = _reason(module, "")
    if "forward of its own" in reason:
        return reason, "product"
    role = next((role for role, functions in _USES.items() if names <= {*functions}), "product")
    if isinstance(module, nn.LayerNorm | nn.RMSNorm):
        return reason, role
    if role == "embedding":
        return "embedding: a look-up by index, it has no vector input x", role
    shown = ", ".join(sorted(names))
    if role == "constant":
        return f"a constant that is combined with activations entry by entry ({shown}), not a matrix product", role
    return f"used by {shown}, in a form that is not W x; {_REGISTER}", role


def _walk(model: nn.Module) -> Iterator[tuple[str, nn.Module, str]]:
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
    skipped = {id(p) for _, module, skip in _walk(model) if skip for p in module.parameters(recurse=False)}
    return {path for path, p in model.named_parameters() if id(p) in skipped}


def _factory(module: nn.Module, factories: Mapping[type[nn.Module], Factory] = _FACTORIES) -> Factory | None:
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


def _reason(module: nn.Module, skip: str) -> str:
    if skip:
        return skip
    known = next((base.__name__ for base in type(module).__mro__ if base in _FACTORIES), None)
    if known is not None and _factory(module) is None:
        return f"{type(module).__name__} is a {known} with a forward of its own; {_REGISTER}"
    for kinds, reason in _REASONS:
        if isinstance(module, kinds):
            return reason
    return f"a parameter of {type(module).__name__} used in its own code; {_REGISTER}"
