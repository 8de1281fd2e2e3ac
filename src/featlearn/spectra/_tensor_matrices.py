"""Matrices of a tensor, determined by its module in a model, otherwise by its name and shape."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy
from torch.nn.utils import parametrize

from featlearn.layers import Layer, find_layers, unwrap
from featlearn.layers.base import child_name
from featlearn.spectra._stored_tensor import StoredTensor, tie, unusable

_FLOATS = ("float64", "float32", "float16", "bfloat16")
# Modules whose weight contains query, key and value, in this order.
_FUSED = ("c_attn", "qkv", "Wqkv")
# Modules whose weight interleaves them by head in some models and not in others.
_MIXED = ("query_key_value", "qkv_proj")
# Conv1D of Transformers in GPT-2 and related models stores (k_in, k_out); other models use these names for nn.Linear.
_CONV1D = ("c_attn", "c_fc", "c_proj", "q_attn")


@dataclass(frozen=True)
class Matrix:
    """Matrix of a stored tensor.

    Attributes:
        name: Path of the module, followed by the part if there are several.
        kind: Kind of the matrix, such as "linear" or "attention".
        shape: Shape ``(groups, rows, columns)`` of a block-diagonal matrix.
        view: Function that maps the tensor to a view of this shape.
        note: Note for the report; empty for none.
    """

    name: str
    kind: str
    shape: tuple[int, int, int]
    view: Callable[[Tensor], Tensor] = field(repr=False)
    note: str = ""

    @property
    def eigenvalues(self) -> int:
        """Number of eigenvalues of the smaller side."""
        return self.shape[0] * min(self.shape[1:])


def find_matrices(tensors: Sequence[StoredTensor]) -> list[tuple[StoredTensor, list[Matrix], str]]:
    """Return each tensor with its matrices, or with an empty list and the reason."""
    names = {t.name for t in tensors}
    conv1d = any(
        t.name.endswith("c_attn.weight") and len(t.shape) == 2 and t.shape[1] == 3 * t.shape[0] for t in tensors
    )
    result: list[tuple[StoredTensor, list[Matrix], str]] = []
    used: set[str] = set()
    for tensor in tensors:
        reason = _unfit(tensor)
        matrices: list[Matrix] = []
        if not reason:
            if tensor.layers:
                matrices = [Matrix(x.name, x.kind, x.shape, x.matrix) for x in tensor.layers]
            else:
                matrices = _by_name(tensor, names, conv1d)
            matrices = [part for matrix in matrices for part in _split(matrix)]
            # The tensors "a" and "a.weight" would have the same name.
            matrices = [replace(m, name=tensor.name) if m.name in used else m for m in matrices]
            used |= {m.name for m in matrices}
        result.append((tensor, matrices, reason))
    return result


def _unfit(tensor: StoredTensor) -> str:
    """Return the reason why a tensor has no matrices; empty if it has."""
    if tensor.reason:
        return tensor.reason
    if tensor.dtype not in _FLOATS:
        return f"dtype {tensor.dtype}: integers, or quantized values whose scales are stored elsewhere"
    if len(tensor.shape) < 2:
        return "a vector, not a matrix" if tensor.shape else "a scalar, not a matrix"
    if not math.prod(tensor.shape):
        return "empty"
    if tensor.name.rpartition(".")[2].endswith(("bias", "mask")):
        return "a bias or mask, not a weight"
    return ""


def _by_name(tensor: StoredTensor, names: Collection[str], conv1d: bool) -> list[Matrix]:
    owner, _, local = tensor.name.rpartition(".")
    shape = tensor.shape
    if local == "in_proj_weight" and len(shape) == 2 and shape[0] == 3 * shape[1]:
        return _thirds(Matrix(owner, "attention", (1, *shape), _block), "")
    if local in ("q_proj_weight", "k_proj_weight", "v_proj_weight") and len(shape) == 2:
        return [Matrix(child_name(owner, local[0]), "attention", (1, *shape), _block)]
    above, _, last = owner.rpartition(".")
    if local == "weight" and last == "out_proj" and len(shape) == 2:
        siblings = (child_name(above, "in_proj_weight"), child_name(above, "q_proj_weight"))
        if any(name in names for name in siblings):
            return [Matrix(child_name(above, "out"), "attention", (1, *shape), _block)]
    weight = local == "weight"
    name = (owner or "model") if weight else tensor.name
    note = "a stored factor of a parametrized weight" if ".parametrizations." in f".{tensor.name}" else ""
    if tensor.groups is not None:
        blocks = tensor.groups, shape[0] // tensor.groups, math.prod(shape[1:])
        return [Matrix(name, "transposed conv", blocks, lambda t: t.reshape(blocks))]
    if len(shape) == 2:
        if conv1d and weight and last in _CONV1D:
            return [Matrix(name, "linear (transposed)", (1, shape[1], shape[0]), lambda t: t.mT.unsqueeze(0))]
        guess = "embedding" if _is_embedding(name) else "matrix" if weight else "parameter"
        return [Matrix(name, tensor.kind or guess, (1, *shape), _block, note)]
    if weight:
        note = "the number of groups of the convolution is not in the file: taken as one group"
        return [Matrix(name, "conv", (1, shape[0], math.prod(shape[1:])), lambda t: t.flatten(1).unsqueeze(0), note)]
    long = tuple(size for size in shape if size > 1)
    sizes = (1,) * (2 - len(long)) + long
    stack = math.prod(sizes[:-2]), sizes[-2], sizes[-1]
    kind = "embedding" if _is_embedding(name) else "parameter" if stack[0] == 1 else "stack"
    return [Matrix(name, kind, stack, lambda t: t.reshape(stack), note)]


def _split(matrix: Matrix) -> list[Matrix]:
    """Split a fused matrix into query, key and value, if their positions are certain."""
    groups, rows, columns = matrix.shape
    last = matrix.name.rpartition(".")[2]
    if groups != 1 or rows != 3 * columns or matrix.kind.startswith("conv"):
        return [matrix]
    if last in _MIXED:
        note = "query, key and value together, not split: some models interleave them by head"
        return [replace(matrix, note=note)]
    if last in _FUSED:
        return _thirds(matrix, "a third of the rows of a fused weight")
    return [matrix]


def _thirds(matrix: Matrix, note: str) -> list[Matrix]:
    size = matrix.shape[1] // 3

    def third(index: int) -> Callable[[Tensor], Tensor]:
        return lambda t: matrix.view(t)[:, index * size : (index + 1) * size]

    return [
        replace(matrix, name=child_name(matrix.name, x), shape=(1, size, matrix.shape[2]), view=third(i), note=note)
        for i, x in enumerate("qkv")
    ]


def _block(tensor: Tensor) -> Tensor:
    return tensor.unsqueeze(0)


def _is_embedding(name: str) -> bool:
    last = name.rpartition(".")[2]
    return "embed" in last or last in ("wte", "wpe")


_Made = tuple[str, Callable[[], Tensor], dict[str, Tensor]]
"""Name of a weight that is computed, the function that computes it, and its factors by name."""

_KINDS: list[tuple[Any, str]] = [
    ((nn.Embedding, nn.EmbeddingBag), "embedding"),
    ((nn.RNNBase, nn.RNNCellBase), "recurrent"),
]


def module_tensors(model: nn.Module) -> list[StoredTensor]:
    """Describe every parameter and saved buffer of a model, with parametrized weights instead of their factors."""
    model = unwrap(model)
    layers: dict[tuple[int, str], list[Layer]] = {}
    for layer in find_layers(model):
        if layer.kind == "recurrent":
            continue  # the gates cannot be read from a file, so a recurrent weight is one matrix in both
        path, _, local = layer.parameter.rpartition(".")
        layers.setdefault((id(layer.module.get_submodule(path)), local), []).append(layer)
    result: list[StoredTensor] = []
    keys: dict[str, Any] = {}
    for path, module in model.named_modules(remove_duplicate=False):
        if isinstance(module, parametrize.ParametrizationList):
            continue  # described with the module that it belongs to
        name = ".".join(part for part in path.split(".") if part != "_orig_mod")
        hidden: set[str] = set()
        for local, make, factors in _made_weights(module):
            weight, full = make(), child_name(name, local)
            note = "parametrized: the weight computed from its factors"
            parts = tuple(_described(child_name(name, factor), tensor) for factor, tensor in factors.items())
            shown = tuple(layers.get((id(module), local), ()))
            result.append(_described(full, weight, make, note=note, layers=shown, parts=parts))
            keys[full] = id(module), local
            hidden |= set(factors)
        for local, parameter in module.named_parameters(recurse=False):
            if local not in hidden:
                full = child_name(name, local)
                shown = tuple(layers.get((id(module), local), ()))
                result.append(_described(full, parameter, kind=_kind(module), groups=_groups(module), layers=shown))
                keys[full] = id(parameter)
        for local, buffer in module.named_buffers(recurse=False):
            if local not in module._non_persistent_buffers_set:
                full = child_name(name, local)
                result.append(_described(full, buffer, reason="a buffer, not a parameter"))
                keys[full] = id(buffer)
    return tie(result, keys)


def _described(name: str, tensor: Tensor, read: Callable[[], Tensor] | None = None, **more: Any) -> StoredTensor:
    dtype = str(tensor.dtype).removeprefix("torch.")
    if is_lazy(tensor):
        return StoredTensor(name, (), dtype, torch.Tensor, reason="not initialized: the model has not run yet")
    more.setdefault("reason", unusable(tensor))
    return StoredTensor(name, tuple(tensor.shape), dtype, read or (lambda: tensor.detach()), **more)


def _kind(module: nn.Module) -> str:
    return next((kind for types, kind in _KINDS if isinstance(module, types)), "")


def _groups(module: nn.Module) -> int | None:
    """Return the groups of a transposed convolution, whose weight is (in, out / groups, kernel); otherwise None."""
    transposed = isinstance(module, nn.ConvTranspose1d | nn.ConvTranspose2d | nn.ConvTranspose3d)
    return module.groups if transposed else None  # type: ignore[return-value]


def _made_weights(module: nn.Module) -> Iterator[_Made]:
    """Yield the weights of a module that are computed from parameters."""
    if parametrize.is_parametrized(module):
        for local, originals in module.parametrizations.items():  # type: ignore[operator,union-attr]
            factors = {f"parametrizations.{local}.{n}": p for n, p in originals.named_parameters(recurse=False)}
            yield local, partial(_at_rest, module, local), factors
    for hook in module._forward_pre_hooks.values():  # the older weight_norm and spectral_norm
        local = str(getattr(hook, "name", ""))
        parameters = dict(module.named_parameters(recurse=False))
        factors = {n: parameters[n] for n in (f"{local}_g", f"{local}_v", f"{local}_orig") if n in parameters}
        if factors and hasattr(hook, "compute_weight"):
            # The attribute has the weight of the last forward pass. A spectral norm must not take a power iteration.
            options = (False,) if f"{local}_orig" in factors else ()
            yield local, partial(_by_hook, hook, module, *options), factors


def _by_hook(hook: Any, module: nn.Module, *options: bool) -> Tensor:
    weight: Tensor = hook.compute_weight(module, *options)
    return weight.detach()


def _at_rest(module: nn.Module, local: str) -> Tensor:
    """Compute a parametrized weight in evaluation mode, in which a spectral norm does not take a power iteration."""
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
