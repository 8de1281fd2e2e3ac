"""Coverage of a model's parameters: the layers of each, or the reason why it has none."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass

from torch import nn

from featlearn.layers._registry import FACTORIES, find_factory, find_layers, tensors_behind, walk
from featlearn.layers.base import Layer, child_name

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
            ``"constant"`` (added to activations or multiplied with them entry by entry), ``"mixed"`` (with activations,
            but not in a product: centers of distances, filters of Fourier transforms), ``"unused"``, or ``""`` if it is
            not known.
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
    for name, module, skip in walk(model):
        for local, parameter in module.named_parameters(recurse=False):
            if parameter.ndim >= 2:
                names_of.setdefault(id(parameter), []).append(child_name(name, local))
                shapes[id(parameter)] = tuple(parameter.shape)
                owner.setdefault(id(parameter), (module, skip))
                if find_factory(module) is None and id(module) not in measured:
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
MIXED = "a product after it was combined with activations"
"""Use of a parameter in ``(W * s(x)) @ x``, where the weight depends on the data."""
SUMMED = "a sum of entrywise products"
"""Use of a parameter in ``(x[:, None] * W).sum(-1)``."""
DISTANCES = "distances from activations"
"""Use of a parameter as centers in ``((x[:, None] - C) ** 2).sum(-1)``."""
CONVOLVED = "a product of Fourier transforms"
"""Use of a parameter in ``irfft(rfft(x) * rfft(w))``, which is a convolution."""
WEIGHTED_COUNTS = "embedding_bag with per_sample_weights"
"""Use of a table whose rows are summed with weights: a product with weighted counts of the indices."""
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


# Uses that mix a parameter with activations, but not in a product W x of rows.
_MIXES = {
    "cdist": "centers of distances to activations",
    "pairwise_distance": "centers of distances to activations",
    DISTANCES: "centers of distances to activations",
    CONVOLVED: "a filter that is multiplied with the Fourier transform of activations (a convolution)",
}


def _use(module: nn.Module, names: set[str]) -> tuple[str, str]:
    """Return the reason why a parameter is not a layer, and its role, from the functions that used it."""
    if WEIGHTED_COUNTS in names:
        return f"a product of the table with weighted counts of indices ({WEIGHTED_COUNTS}); {_REGISTER}", "product"
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
    kinds = sorted({_MIXES[name] for name in names & _MIXES.keys()})
    if kinds and names - _MIXES.keys() <= {SUMMED, MIXED, *_USES["constant"]}:
        return f"{' and '.join(kinds)}: mixed with activations, but not in a product W x ({shown})", "mixed"
    if role == "constant":
        return f"a constant that is combined with activations entry by entry ({shown}), not a matrix product", role
    return f"used by {shown}, in a form that is not W x; {_REGISTER}", role


def _reason(module: nn.Module, skip: str) -> str:
    if skip:
        return skip
    known = next((base.__name__ for base in type(module).__mro__ if base in FACTORIES), None)
    if known is not None and find_factory(module) is None:
        return f"{type(module).__name__} is a {known} with a forward of its own; {_REGISTER}"
    for kinds, reason in _REASONS:
        if isinstance(module, kinds):
            return reason
    return f"a parameter of {type(module).__name__} used in its own code; {_REGISTER}"
