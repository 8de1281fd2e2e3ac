"""Which matrices a stored tensor is: by its module where there is one, otherwise by its name and shape."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field, replace

from torch import Tensor

from featlearn.layers.layer import child_name
from featlearn.spectra.stored import StoredTensor

__all__ = ["Matrix", "find_matrices"]

_FLOATS = ("float64", "float32", "float16", "bfloat16")
# Modules whose one weight holds query, key and value, one after the other.
_FUSED = ("c_attn", "qkv", "Wqkv")
# Those that mix them head by head in some models and not in others.
_MIXED = ("query_key_value", "qkv_proj")
# Transformers' Conv1D in GPT-2 and its kin, which stores (k_in, k_out); others use the names for plain layers.
_CONV1D = ("c_attn", "c_fc", "c_proj", "q_attn")


@dataclass(frozen=True)
class Matrix:
    """A matrix of a stored tensor.

    Attributes:
        name: Path of its module, with the part where there are several.
        kind: What it is, in a word.
        shape: (groups, rows, columns): a block-diagonal matrix.
        view: The tensor as that.
        note: What a reader of the report should know.
    """

    name: str
    kind: str
    shape: tuple[int, int, int]
    view: Callable[[Tensor], Tensor] = field(repr=False)
    note: str = ""

    @property
    def eigenvalues(self) -> int:
        """How many there are, on the smaller side."""
        return self.shape[0] * min(self.shape[1:])


def find_matrices(tensors: Sequence[StoredTensor]) -> list[tuple[StoredTensor, list[Matrix], str]]:
    """Each tensor with its matrices, or with none and the reason."""
    names = {t.name for t in tensors}
    conv1d = any(
        t.name.endswith("c_attn.weight") and len(t.shape) == 2 and t.shape[1] == 3 * t.shape[0] for t in tensors
    )
    found: list[tuple[StoredTensor, list[Matrix], str]] = []
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
            # "a" and "a.weight" would have one name.
            matrices = [replace(m, name=tensor.name) if m.name in used else m for m in matrices]
            used |= {m.name for m in matrices}
        found.append((tensor, matrices, reason))
    return found


def _unfit(tensor: StoredTensor) -> str:
    """Why a tensor has no matrices, or nothing."""
    if tensor.reason:
        return tensor.reason
    if tensor.dtype not in _FLOATS:
        return f"of dtype {tensor.dtype}: integers, or quantised numbers whose scales are elsewhere"
    if len(tensor.shape) < 2:
        return "a vector, no matrix" if tensor.shape else "a number, no matrix"
    if not math.prod(tensor.shape):
        return "empty"
    if tensor.name.rpartition(".")[2].endswith(("bias", "mask")):
        return "a bias or a mask, no weight"
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
    note = "the stored factor of a parametrised weight" if ".parametrizations." in f".{tensor.name}" else ""
    if tensor.groups is not None:
        blocks = tensor.groups, shape[0] // tensor.groups, math.prod(shape[1:])
        return [Matrix(name, "transposed conv", blocks, lambda t: t.reshape(blocks))]
    if len(shape) == 2:
        if conv1d and weight and last in _CONV1D:
            return [Matrix(name, "linear (transposed)", (1, shape[1], shape[0]), lambda t: t.mT.unsqueeze(0))]
        guess = "embedding" if _is_embedding(name) else "matrix" if weight else "parameter"
        return [Matrix(name, tensor.kind or guess, (1, *shape), _block, note)]
    if weight:
        note = "groups of a convolution are not in the file: taken as one"
        return [Matrix(name, "conv", (1, shape[0], math.prod(shape[1:])), lambda t: t.flatten(1).unsqueeze(0), note)]
    long = tuple(size for size in shape if size > 1)
    sizes = (1,) * (2 - len(long)) + long
    stack = math.prod(sizes[:-2]), sizes[-2], sizes[-1]
    kind = "embedding" if _is_embedding(name) else "parameter" if stack[0] == 1 else "stack"
    return [Matrix(name, kind, stack, lambda t: t.reshape(stack), note)]


def _split(matrix: Matrix) -> list[Matrix]:
    """Query, key and value of a fused matrix, where it is certain how they lie in it."""
    groups, rows, columns = matrix.shape
    last = matrix.name.rpartition(".")[2]
    if groups != 1 or rows != 3 * columns or matrix.kind.startswith("conv"):
        return [matrix]
    if last in _MIXED:
        note = "query, key and value together: some models mix them head by head, so they were not split"
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
