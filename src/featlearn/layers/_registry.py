"""Which weight matrices a model has, and what becomes of each of its parameters."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from torch import Tensor, nn
from torch.nn.utils import parametrize

from featlearn._utils.patterns import parse_patterns, select_matching
from featlearn.errors import InputError
from featlearn.layers._attention import attention_layers
from featlearn.layers._conv import conv_layers
from featlearn.layers._linear import linear_layers, transposed_layers
from featlearn.layers._norm_embedding import (
    batch_norm_layers,
    embedding_layers,
    group_norm_layers,
    instance_norm_layers,
    last_norm_layers,
)
from featlearn.layers.base import Layer, child_name

Factory = Callable[[str, nn.Module], list[Layer]]

# Looked up by a class of the module whose forward is the module's own, so that a subclass which computes
# something else is never mistaken for its parent.
_FACTORIES: dict[type[nn.Module], Factory] = {
    nn.Linear: linear_layers,
    nn.Conv1d: conv_layers,
    nn.Conv2d: conv_layers,
    nn.Conv3d: conv_layers,
    nn.MultiheadAttention: attention_layers,
}

# No weight matrices, but linear in their parameters: for kernels, which count all.
_VECTOR_FACTORIES: dict[type[nn.Module], Factory] = {
    nn.Embedding: embedding_layers,
    nn.LayerNorm: last_norm_layers,
    nn.RMSNorm: last_norm_layers,
    nn.GroupNorm: group_norm_layers,
    **dict.fromkeys((nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d), batch_norm_layers),
    **dict.fromkeys((nn.InstanceNorm1d, nn.InstanceNorm2d, nn.InstanceNorm3d), instance_norm_layers),
}

_REASONS: list[tuple[type[nn.Module] | tuple[type[nn.Module], ...], str]] = [
    ((nn.Embedding, nn.EmbeddingBag), "embedding: a look-up by index, it has no vector input x"),
    (
        (nn.RNNBase, nn.RNNCellBase),
        "recurrent: its steps run inside one fused call and show no pre-activations",
    ),
    (
        (nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d),
        "transposed convolution: not supported; register it with featlearn.layers.register_layer",
    ),
    (nn.Bilinear, "bilinear: it multiplies two inputs, it is not of the form W x"),
    (nn.LayerNorm, "normalization: an elementwise scale, not a matrix product"),
    (nn.MultiheadAttention, "attention: a constant key or value token, not a matrix product"),
]


@dataclass(frozen=True)
class ParameterCoverage:
    """What a probe does with one parameter of two or more dimensions."""

    parameter: str
    shape: tuple[int, ...]
    layers: tuple[str, ...]
    reason: str
    tied_to: tuple[str, ...]

    @property
    def taken(self) -> bool:
        """Whether the parameter is measured as a layer."""
        return bool(self.layers)


def register_layer(module_type: type[nn.Module], factory: Factory) -> None:
    """Teach featlearn a new kind of layer.

    Args:
        module_type: Class of the modules.
        factory: ``factory(name, module)`` returns the module's `Layer`, in a list. The module must be called
            as a module and return its pre-activations.
    """
    _FACTORIES[module_type] = factory


def unwrap(model: nn.Module) -> nn.Module:
    """The model inside compile, DistributedDataParallel and DataParallel wrappers.

    The inner model computes the same function; the wrappers' own forward would compile or communicate.
    """
    while True:
        if isinstance(model, nn.DataParallel | nn.parallel.DistributedDataParallel):
            model = model.module
        elif isinstance(inner := getattr(model, "_orig_mod", None), nn.Module):
            model = inner
        else:
            return model


def find_layers(model: nn.Module, vectors: bool = False) -> list[Layer]:
    """Every weight matrix of the model that can be seen as ``h = W x``, in the order of its modules.

    Args:
        model: The model.
        vectors: Whether gains of normalization layers and embeddings count as well.
    """
    factories = _FACTORIES | _VECTOR_FACTORIES if vectors else _FACTORIES
    layers: list[Layer] = []
    owned: set[int] = set()  # modules whose matrix a parent already shows, as attention's out_proj
    for name, module, skip in _walk(model):
        factory = None if skip or id(module) in owned else _factory(module, factories)
        if factory is not None:
            for layer in factory(name, module):
                layers.append(_with_note(layer))
                owned.add(id(_owner(layer)[0]))
    # A whole model that is one layer has the empty path: give it a name that can be typed.
    return [layer if layer.name else replace(layer, name="model") for layer in layers]


def select_layers(layers: Sequence[Layer], patterns: str | Iterable[str] | None) -> list[Layer]:
    """The layers whose names match any of the globs, in the order of the model; None takes all."""
    if not layers:
        raise InputError(
            "the model has no layer that featlearn can measure: it looks for Linear, Conv1d/2d/3d, "
            "MultiheadAttention and transformers' Conv1D modules; teach it others with "
            "featlearn.layers.register_layer"
        )
    if patterns is None:
        return list(layers)
    wanted = parse_patterns(patterns, "layers")
    picked = set(select_matching(wanted, [layer.name for layer in layers], "layers", "layer"))
    return [layer for layer in layers if layer.name in picked]


def coverage(
    model: nn.Module, taken: Iterable[Layer], reasons: Mapping[str, str] | None = None
) -> list[ParameterCoverage]:
    """What becomes of each parameter of two or more dimensions: none is skipped silently.

    Args:
        model: The model.
        taken: The layers that were measured.
        reasons: Layer name -> why it was not measured, where that is not the user's choice.
    """
    names_of: dict[int, list[str]] = {}
    shapes: dict[int, tuple[int, ...]] = {}
    owner: dict[int, tuple[nn.Module, str]] = {}
    others: dict[int, list[str]] = {}  # modules that use a parameter otherwise, as an embedding
    for name, module, skip in _walk(model):
        for local, parameter in module.named_parameters(recurse=False):
            if parameter.ndim >= 2:
                names_of.setdefault(id(parameter), []).append(child_name(name, local))
                shapes[id(parameter)] = tuple(parameter.shape)
                owner.setdefault(id(parameter), (module, skip))
                if _factory(module) is None:
                    others.setdefault(id(parameter), []).append(f"{name} ({type(module).__name__})")
    layers_of: dict[int, list[str]] = {}
    for layer in taken:
        for tensor in _tensors_behind(layer):
            layers_of.setdefault(id(tensor), []).append(layer.name)
    found = {id(p): layer.name for layer in find_layers(model) for p in _tensors_behind(layer)}
    rows = []
    for key, names in names_of.items():
        layers = tuple(dict.fromkeys(layers_of.get(key, ())))
        if layers:
            reason = "taken" + "".join(f"; {use} uses it as well" for use in others.get(key, ()) if len(names) > 1)
        elif key in found:
            reason = (reasons or {}).get(found[key], "left out by the layers argument")
        else:
            reason = _reason(*owner[key])
        rows.append(ParameterCoverage(names[0], shapes[key], layers, reason, tuple(names[1:])))
    return rows


def _walk(model: nn.Module) -> Iterator[tuple[str, nn.Module, str]]:
    """Modules, each once: path without what wrappers add to it, module, and why it asks to be left out."""
    skipped: dict[str, str] = {}
    for path, module in model.named_modules():
        parent = path.rpartition(".")[0]
        reason = str(getattr(module, "featlearn_skip", "")) or (skipped.get(parent, "") if path else "")
        skipped[path] = reason
        yield ".".join(part for part in path.split(".") if part != "_orig_mod"), module, reason


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
    """The module that holds a layer's weight, and the weight's name in it."""
    path, _, local = layer.parameter.rpartition(".")
    return layer.module.get_submodule(path), local


def _tensors_behind(layer: Layer) -> list[Tensor]:
    """The parameters a layer's weight is made of: one, or those of its parametrization."""
    module, local = _owner(layer)
    if parametrize.is_parametrized(module, local):
        return list(module.parametrizations[local].parameters())  # type: ignore[union-attr,index]
    own = dict(module.named_parameters(recurse=False))
    if local in own:
        return [own[local]]
    # The older weight_norm and spectral_norm keep their factors beside the weight.
    return [own[name] for name in (f"{local}_g", f"{local}_v", f"{local}_orig") if name in own]


def _with_note(layer: Layer) -> Layer:
    module, local = _owner(layer)
    # Not by reading the weight: a spectral norm in training mode would advance its power iteration.
    if local in dict(module.named_parameters(recurse=False)):
        return layer
    return replace(layer, note="parametrized: decay acts on the factors, so FACT = NFM need not hold")


def _reason(module: nn.Module, skip: str) -> str:
    if skip:
        return skip
    known = next((base.__name__ for base in type(module).__mro__ if base in _FACTORIES), None)
    if known is not None and _factory(module) is None:
        return (
            f"{type(module).__name__} is a {known} with a forward of its own; "
            "register it with featlearn.layers.register_layer"
        )
    for kinds, reason in _REASONS:
        if isinstance(module, kinds):
            return reason
    return (
        f"a parameter of {type(module).__name__} used in its own code; register it with featlearn.layers.register_layer"
    )
