"""Heads of the projections of attention: which rows or columns of a weight matrix belong to which head.

``nn.MultiheadAttention`` states its number of heads. Other modules are recognized by the name of the projection
(``q_proj``, ``query``, ``c_attn``, ...) and by the number and size of heads that the module which owns it states
(``num_heads``, ``head_dim``, ...); both must agree with the shape of the matrix.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from torch import nn

from featlearn._utils.validation import is_int
from featlearn.layers.base import Layer

_COUNTS = ("num_heads", "num_attention_heads", "n_heads", "n_head", "heads", "nhead")
_SHARED_COUNTS = ("num_key_value_heads", "num_kv_heads", "n_kv_heads", "n_kv_head", "kv_heads")
_SIZES = ("head_dim", "attention_head_size", "head_size", "key_value_proj_dim", "dim_head", "d_head")
_WORDS = {"q": ("q", "query"), "k": ("k", "key"), "v": ("v", "value"), "out": ("o", "out", "output")}
_PATTERNS = (
    "{}", "{}_proj", "{}_lin", "{}_linear", "{}_attn", "{}_weight", "w{}", "w_{}", "to_{}", "proj_{}", "linear_{}",
    "{}_projection",
)  # fmt: skip
_ROLES = {pattern.format(word): role for role, words in _WORDS.items() for word in words for pattern in _PATTERNS}
_ROLES |= dict.fromkeys(("c_proj", "proj", "dense"), "out")
_ROLES |= dict.fromkeys(("c_attn", "qkv", "qkv_proj", "qkv_weight", "wqkv", "w_qkv", "to_qkv"), "qkv")
_ROLES["q_b_proj"] = "q"  # second factor of low-rank queries
# Rows of query, key and value are ordered by head in some models, by projection in others.
_ROLES |= dict.fromkeys(("query_key_value", "kv_b_proj"), "unknown")

Owner = tuple[nn.Module, str]
"""Module of attention, and name of the projection in it."""


@dataclass(frozen=True)
class Heads:
    """Heads of one projection.

    Attributes:
        parts: Name of each part, such as ``"0"``, or ``"q.0"`` if query, key and value are one matrix.
        columns: Whether the parts are columns of the matrix (of an output projection) or rows.
    """

    parts: tuple[str, ...]
    columns: bool = False


def find_heads(model: nn.Module, layers: Sequence[Layer]) -> tuple[dict[str, Heads], dict[str, str]]:
    """Find the heads of the attention projections among some layers.

    Args:
        model: Module with the layers.
        layers: Layers of the model.

    Returns:
        Heads by layer name, and, for projections whose heads are not known, the reason by layer name.
    """
    parents: dict[int, Owner] = {}
    for module in model.modules():
        for name, child in module.named_children():
            parents.setdefault(id(child), (module, name))
    owners = {layer.name: _owner(layer, parents) for layer in layers}
    widths: dict[int, dict[str, int]] = {}  # number of outputs of each projection of a module
    for layer in layers:
        if (owner := owners[layer.name]) is not None:
            widths.setdefault(id(owner[0]), {})[_ROLES.get(owner[1], "")] = layer.groups * layer.k_out
    heads, unknown = dict[str, Heads](), dict[str, str]()
    for layer in layers:
        found: Heads | str | None = None
        owner = owners[layer.name]
        if isinstance(layer.module, nn.MultiheadAttention) and layer.part is not None:
            found = Heads(_numbers(layer.module.num_heads), columns=layer.part == "out")
        elif owner is not None and owner[1] in _ROLES and _has_queries(owner[0]):
            found = _heads(layer, owner[0], _ROLES[owner[1]], widths[id(owner[0])])
        if isinstance(found, Heads):
            heads[layer.name] = found
        elif found is not None:
            unknown[layer.name] = found
    return heads, unknown


def _owner(layer: Layer, parents: Mapping[int, Owner]) -> Owner | None:
    """Return the module that computes attention with a layer, and the name of the layer in it."""
    if layer.operation is not None and layer.parameter != "weight":
        return layer.module, layer.parameter.lower()
    if layer.part is not None or id(layer.module) not in parents:
        return None
    module, name = parents[id(layer.module)]
    while isinstance(module, nn.Sequential | nn.ModuleList) and name == "0" and id(module) in parents:
        module, name = parents[id(module)]  # a projection and its dropout
    above = parents.get(id(module))
    if not _states_heads(module) and above is not None and above[1] == "output":  # as in BERT: self, output.dense
        for sibling in ("self", "attention"):
            if isinstance(other := getattr(above[0], sibling, None), nn.Module) and _states_heads(other):
                return other, name.lower()
    return module, name.lower()


def _heads(layer: Layer, owner: nn.Module, role: str, widths: Mapping[str, int]) -> Heads | str | None:
    """Return the heads of a projection, the reason why they are not known, or None if it is not one of attention."""
    if not _states_heads(owner):
        return None
    size, heads = _stated(owner, _SIZES), _stated(owner, _COUNTS)
    shared = _stated(owner, _SHARED_COUNTS)
    if size is not None:  # a module of attention; others may have the same configuration
        config = getattr(owner, "config", None)
        heads, shared = heads or _stated(config, _COUNTS), shared or _stated(config, _SHARED_COUNTS)
    columns = role == "out" and layer.groups == 1
    width = layer.k_in if columns else layer.groups * layer.k_out
    if role == "unknown" or (role == "qkv" and getattr(owner, "multi_query", None) is False):  # of GPTBigCode
        return "the order of its rows is not known"
    if role == "qkv":
        return _fused_heads(width, heads, shared, size)
    count = heads or width // (size or 1)
    if role in ("k", "v"):
        if size is None and heads is not None and "q" in widths:
            size = widths["q"] // heads
        count = _shared_heads(width, heads, shared, size, widths.get("k") == widths.get("v"))
    if not count or width % count or (size is not None and count * size != width):
        side = "inputs" if columns else "outputs"
        return f"its {width} {side} do not match {heads or 'an unknown number of'} heads of {size or 'unknown'} entries"
    if not _adjacent(layer, count, columns):
        return "the entries of a head are not adjacent"
    return Heads(_numbers(count), columns)


def _shared_heads(width: int, heads: int | None, shared: int | None, size: int | None, paired: bool) -> int:
    """Return the number of heads of keys or values, which several queries may share; 0 if it is not known."""
    if size is None:
        return shared or heads or 0
    count = width // size
    if shared is not None:
        return count if count in (shared, heads) else 0
    if count == 0 or heads is None or count == heads:
        return count
    return count if heads % count == 0 and paired else 0


def _fused_heads(width: int, heads: int | None, shared: int | None, size: int | None) -> Heads | str:
    """Return the heads of a matrix with the rows of all queries, then all keys, then all values."""
    if heads is None:
        heads = width // (3 * (size or 1))
    shared = shared or heads
    size = size or width // (heads + 2 * shared)
    if width == 2 * shared * size:  # keys and values of cross-attention
        return Heads((*_numbers(shared, "k."), *_numbers(shared, "v.")))
    if width != (heads + 2 * shared) * size:
        return f"its {width} outputs are not those of {heads} queries and {shared} keys and values of {size} entries"
    return Heads((*_numbers(heads, "q."), *_numbers(shared, "k."), *_numbers(shared, "v.")))


def _adjacent(layer: Layer, count: int, columns: bool) -> bool:
    """Return whether the entries of a head are adjacent: among several dimensions of a product, heads come first."""
    if layer.groups > 1:
        return layer.groups == count
    sizes = () if layer.operation is None else layer.operation.form.sizes
    side = sizes[1 if columns else 0] if sizes else ()
    return len(side) < 2 or side[0] == count


def _numbers(count: int, prefix: str = "") -> tuple[str, ...]:
    return tuple(f"{prefix}{i}" for i in range(count))


def _has_queries(module: nn.Module) -> bool:
    """Return whether a module has a projection to queries; other modules than those of attention have heads as well."""
    names = (*(name for name, _ in module.named_children()), *module._parameters)
    return any(_ROLES.get(name.lower()) in ("q", "qkv", "unknown") for name in names)


def _states_heads(module: nn.Module) -> bool:
    return _stated(module, (*_COUNTS, *_SIZES)) is not None


def _stated(module: object, names: Iterable[str]) -> int | None:
    """Return the first of some attributes that is a positive integer."""
    values = (getattr(module, name, None) for name in names)
    return next((int(value) for value in values if value is not None and is_int(value, 1)), None)
