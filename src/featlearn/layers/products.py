"""Calls of PyTorch's functions that are products of activations with weights."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from featlearn.layers.forms import (
    BilinearForm,
    Contraction,
    Convolution,
    Form,
    GroupedProduct,
    Labels,
    TransposedConvolution,
)

Slot = int | str

FormOf = Callable[[Tensor, Tensor | None, frozenset[int], frozenset[int]], Form | None]
"""Function of the weight, the activation, and the dimensions of the weight that select blocks or hold copies."""


@dataclass(frozen=True)
class Candidate:
    """Reading of a call as a product with one of its operands as the weight.

    Attributes:
        weight: Place of the weight among the arguments.
        activation: Place of the activation; None if there are several.
        form: Function that returns the form, or None if the call has no form ``W x``.
    """

    weight: Slot
    activation: Slot | None
    form: FormOf


@dataclass(frozen=True)
class ProductCall:
    """Arguments of a call in one order, and its readings as a product.

    Attributes:
        args: Positional arguments.
        kwargs: Keyword arguments.
        candidates: Readings, one per operand that may be the weight.
        labels: Labels of the operands and of the result, in an ``einsum`` of three or more; otherwise None.
    """

    args: list[Any]
    kwargs: dict[str, Any]
    candidates: tuple[Candidate, ...]
    labels: tuple[list[Labels], Labels] | None = None

    def at(self, slot: Slot) -> Any:
        """Return the argument at a place."""
        return self.kwargs[slot] if isinstance(slot, str) else self.args[slot]

    def replaced(self, slot: Slot, value: Any) -> tuple[list[Any], dict[str, Any]]:
        """Return the arguments with another value at a place."""
        args, kwargs = list(self.args), dict(self.kwargs)
        if isinstance(slot, str):
            kwargs[slot] = value
        else:
            args[slot] = value
        return args, kwargs


def read_product(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> ProductCall | None:
    """Return the readings of a call as a product of two tensors.

    Args:
        func: Function, as ``__torch_function__`` receives it.
        args: Positional arguments of the call.
        kwargs: Keyword arguments of the call.

    Returns:
        The readings; None if the function is not a product of tensors.
    """
    reader = _READERS.get(func)
    if reader is None and "grouped_mm" in str(getattr(func, "__name__", "")):
        reader = _grouped
    return None if reader is None else reader(args, kwargs)


def weights_multiplied_first(
    call: ProductCall, is_weight: Callable[[Tensor], bool], run: Callable[..., Tensor]
) -> ProductCall:
    """Return an ``einsum`` of several weights as that of their product; other calls as they are.

    Args:
        call: Call of a product.
        is_weight: Function that returns whether an operand is a weight.
        run: Function ``run(func, args, kwargs)`` that multiplies the weights.
    """
    if call.labels is None:
        return call
    (parts, result), operands = call.labels, call.args[1:]
    weights = [i for i, operand in enumerate(operands) if is_weight(operand)]
    others = [i for i in range(len(operands)) if i not in weights]
    if len(weights) < 2 or not others:
        return call
    letters = {x: chr(ord("a") + i) for i, x in enumerate(dict.fromkeys(x for part in parts for x in part))}

    def equation(terms: Sequence[Labels], of: Labels) -> str:
        return ",".join("".join(letters[x] for x in term) for term in terms) + "->" + "".join(letters[x] for x in of)

    needed = {*result}.union(*(parts[i] for i in others))
    merged = tuple(dict.fromkeys(x for i in weights for x in parts[i] if x in needed))
    first = [equation([parts[i] for i in weights], merged), *(operands[i] for i in weights)]
    second = [equation([*(parts[i] for i in others), merged], result), *(operands[i] for i in others)]
    return _einsum([*second, run(torch.einsum, first, {})], call.kwargs) or call


def _slot(args: Sequence[Any], kwargs: Mapping[str, Any], index: int, *names: str) -> Slot | None:
    if index < len(args):
        return index
    return next((name for name in names if name in kwargs), None)


def _pair(
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    kind: str,
    first: Slot | None,
    second: Slot | None,
    labels: Callable[[Tensor, Tensor], tuple[Labels, Labels, Labels] | None],
    scale: float = 1.0,
) -> ProductCall | None:
    """Return both readings of a product of two operands with labeled dimensions."""
    if first is None or second is None:
        return None
    call = ProductCall(list(args), dict(kwargs), ())
    a, b = call.at(first), call.at(second)
    if not isinstance(a, Tensor) or not isinstance(b, Tensor):
        return None
    read = labels(a, b)
    if read is None:
        return None
    of_a, of_b, result = read
    sizes: dict[str, int] = {}
    for tensor, names in ((a, of_a), (b, of_b)):
        for name, size in zip(names, tensor.shape, strict=True):
            sizes[name] = max(sizes.get(name, 1), size)

    def candidate(weight: Slot, own: Labels, activation: Slot, other: Labels) -> Candidate:
        def form(w: Tensor, x: Tensor | None, chosen: frozenset[int], copied: frozenset[int]) -> Form | None:
            assert x is not None
            # A dimension of size 1 that is broadcast, or of equal copies, is not one of the weight.
            mine = tuple(
                "" if i in copied or (size == 1 and sizes[name] > 1) else name
                for i, (name, size) in enumerate(zip(own, w.shape, strict=True))
            )
            its = tuple(
                f"{name}=1" if size == 1 and sizes[name] > 1 else name
                for name, size in zip(other, x.shape, strict=True)
            )
            if len(set(its)) < len(its) or len({m for m in mine if m}) < sum(map(bool, mine)):
                return None  # a diagonal
            every = sizes | {n: 1 for n in its if n not in sizes}
            return Contraction(kind, mine, its, result, every, {mine[i] for i in chosen}, scale)

        return Candidate(weight, activation, form)

    candidates = (candidate(second, of_b, first, of_a), candidate(first, of_a, second, of_b))
    return ProductCall(list(args), dict(kwargs), candidates)


def _matmul_labels(a: Tensor, b: Tensor) -> tuple[Labels, Labels, Labels]:
    batch = max(a.ndim, b.ndim, 2) - 2
    names = tuple(f"b{i}" for i in range(batch, 0, -1))
    of_a: Labels = ("k",) if a.ndim == 1 else (*names[batch - (a.ndim - 2) :], "m", "k")
    of_b: Labels = ("k",) if b.ndim == 1 else (*names[batch - (b.ndim - 2) :], "k", "n")
    result = (*names, *(["m"] if a.ndim > 1 else []), *(["n"] if b.ndim > 1 else []))
    return of_a, of_b, result


def _matmul(args: Sequence[Any], kwargs: Mapping[str, Any]) -> ProductCall | None:
    first, second = _slot(args, kwargs, 0, "input"), _slot(args, kwargs, 1, "other", "mat2", "vec", "tensor2")
    return _pair(args, kwargs, "matmul", first, second, _matmul_labels)


def _reversed_matmul(args: Sequence[Any], kwargs: Mapping[str, Any]) -> ProductCall | None:
    return _pair(args, kwargs, "matmul", 1, 0, _matmul_labels)


def _added_matmul(args: Sequence[Any], kwargs: Mapping[str, Any]) -> ProductCall | None:
    first = _slot(args, kwargs, 1, "mat1", "batch1")
    second = _slot(args, kwargs, 2, "mat2", "batch2", "vec")
    alpha = kwargs.get("alpha", 1)
    return _pair(args, kwargs, "matmul", first, second, _matmul_labels, float(alpha))


def _linear(args: Sequence[Any], kwargs: Mapping[str, Any]) -> ProductCall | None:
    def labels(x: Tensor, w: Tensor) -> tuple[Labels, Labels, Labels]:
        rows = tuple(f"r{i}" for i in range(x.ndim - 1))
        outputs = ("n",) if w.ndim == 2 else ()
        return (*rows, "k"), (*outputs, "k"), (*rows, *outputs)

    first, second = _slot(args, kwargs, 0, "input"), _slot(args, kwargs, 1, "weight")
    return _pair(args, kwargs, "linear", first, second, labels)


def _einsum(args: Sequence[Any], kwargs: Mapping[str, Any]) -> ProductCall | None:
    if not args or not isinstance(args[0], str):
        return None
    operands = list(args[1]) if len(args) == 2 and isinstance(args[1], list | tuple) else list(args[1:])
    if not all(isinstance(t, Tensor) for t in operands):
        return None
    labels = _einsum_labels(args[0], [t.ndim for t in operands])
    if labels is None:
        return None
    parts, result = labels
    flat = [args[0], *operands]
    if len(operands) == 2:
        return _pair(flat, kwargs, "einsum", 1, 2, lambda a, b: (parts[0], parts[1], result))
    if len(operands) < 3:
        return None
    sizes: dict[str, int] = {}
    for names, t in zip(parts, operands, strict=True):
        for name, size in zip(names, t.shape, strict=True):
            sizes[name] = max(sizes.get(name, 1), size)

    def candidate(index: int) -> Candidate:
        # The other operands together are the activation: their product has all of their labels.
        others = tuple(dict.fromkeys(x for i, names in enumerate(parts) if i != index for x in names))

        def form(w: Tensor, x: Tensor | None, chosen: frozenset[int], copied: frozenset[int]) -> Form | None:
            named = enumerate(zip(parts[index], w.shape, strict=True))
            mine = tuple("" if i in copied or (size == 1 and sizes[name] > 1) else name for i, (name, size) in named)
            return Contraction("einsum", mine, others, result, sizes, {mine[i] for i in chosen})

        return Candidate(1 + index, None, form)

    return ProductCall(flat, dict(kwargs), tuple(candidate(i) for i in range(len(operands))), labels)


def _einsum_labels(equation: str, dims: Sequence[int]) -> tuple[list[Labels], Labels] | None:
    """Return the labels of the operands and the result; None if an operand has a label twice."""
    left, arrow, right = equation.replace(" ", "").partition("->")
    terms = left.split(",")
    if len(terms) != len(dims):
        return None
    parts: list[Labels] = []
    widest = 0
    for term, ndim in zip(terms, dims, strict=True):
        before, dots, after = term.partition("...")
        wide = ndim - len(before) - len(after)
        if wide < 0 or (wide and not dots):
            return None
        widest = max(widest, wide)
        parts.append((*before, *(f".{i}" for i in range(wide, 0, -1)), *after))
    if any(len(set(part)) < len(part) for part in parts):
        return None
    dotted = tuple(f".{i}" for i in range(widest, 0, -1))
    if not arrow:
        letters = [x for part in parts for x in part if not x.startswith(".")]
        return parts, (*dotted, *sorted(x for x in set(letters) if letters.count(x) == 1))
    before, dots, after = right.partition("...")
    return parts, (*before, *(dotted if dots else ()), *after)


def _tensordot(args: Sequence[Any], kwargs: Mapping[str, Any]) -> ProductCall | None:
    dims = kwargs.get("dims", args[2] if len(args) > 2 else 2)

    def labels(a: Tensor, b: Tensor) -> tuple[Labels, Labels, Labels] | None:
        if isinstance(dims, Tensor):
            return None
        if isinstance(dims, int):
            pairs = list(zip(range(a.ndim - dims, a.ndim), range(dims), strict=True))
        else:
            first, second = ([d] if isinstance(d, int) else list(d) for d in dims)
            pairs = [(i % a.ndim, j % b.ndim) for i, j in zip(first, second, strict=True)]
        summed = {i: f"k{n}" for n, (i, _) in enumerate(pairs)}
        of_a = tuple(summed.get(i, f"a{i}") for i in range(a.ndim))
        met = {j: f"k{n}" for n, (_, j) in enumerate(pairs)}
        of_b = tuple(met.get(j, f"b{j}") for j in range(b.ndim))
        return of_a, of_b, tuple(x for x in (*of_a, *of_b) if not x.startswith("k"))

    return _pair(args, kwargs, "tensordot", _slot(args, kwargs, 0, "a"), _slot(args, kwargs, 1, "b"), labels)


def _bilinear(args: Sequence[Any], kwargs: Mapping[str, Any]) -> ProductCall | None:
    slot = _slot(args, kwargs, 2, "weight")
    if slot is None:
        return None

    def form(w: Tensor, x: Tensor | None, chosen: frozenset[int], copied: frozenset[int]) -> Form | None:
        return None if chosen or copied else BilinearForm(w)

    return ProductCall(list(args), dict(kwargs), (Candidate(slot, None, form),))


def _grouped(args: Sequence[Any], kwargs: Mapping[str, Any]) -> ProductCall | None:
    if len(args) < 2 or not isinstance(args[1], Tensor) or args[1].ndim != 3 or args[0].ndim != 2:
        return None

    def form(w: Tensor, x: Tensor | None, chosen: frozenset[int], copied: frozenset[int]) -> Form | None:
        return None if chosen or copied else GroupedProduct(w)

    return ProductCall(list(args), dict(kwargs), (Candidate(1, 0, form),))


def _sides(value: Any, dims: int) -> tuple[int, ...]:
    values = (value,) if isinstance(value, int) else tuple(value)
    return values * dims if len(values) == 1 else values


def _convolution(transposed: bool) -> Callable[[Sequence[Any], Mapping[str, Any]], ProductCall | None]:
    order = (
        "input",
        "weight",
        "bias",
        "stride",
        "padding",
        *(["output_padding", "groups", "dilation"] if transposed else ["dilation", "groups"]),
    )

    def read(args: Sequence[Any], kwargs: Mapping[str, Any]) -> ProductCall | None:
        given = dict(zip(order, args, strict=False)) | dict(kwargs)

        def form(w: Tensor, x: Tensor | None, chosen: frozenset[int], copied: frozenset[int]) -> Form | None:
            assert x is not None
            dims = w.ndim - 2
            if chosen or copied:
                return None
            stride, padding, groups = given.get("stride", 1), given.get("padding", 0), given.get("groups", 1)
            if not transposed:
                padded = padding == "same" or (padding != "valid" and any(_sides(padding, dims)))
                return Convolution(w, groups, padded, _sides(stride, dims))
            options = (_sides(value, dims) for value in (stride, padding, given.get("dilation", 1)))
            return TransposedConvolution(w, x.shape[-dims:], groups, *options)

        first, second = _slot(args, kwargs, 0, "input"), _slot(args, kwargs, 1, "weight")
        if first is None or second is None:
            return None
        return ProductCall(list(args), dict(kwargs), (Candidate(second, first, form),))

    return read


_MATMULS = (
    torch.matmul,
    Tensor.matmul,
    Tensor.__matmul__,
    torch.mm,
    Tensor.mm,
    torch.bmm,
    Tensor.bmm,
    torch.mv,
    Tensor.mv,
)
_ADDED = (torch.addmm, Tensor.addmm, torch.baddbmm, Tensor.baddbmm, torch.addmv, Tensor.addmv)
_READERS: dict[Any, Callable[[Sequence[Any], Mapping[str, Any]], ProductCall | None]] = {
    F.linear: _linear,
    **dict.fromkeys(_MATMULS, _matmul),
    Tensor.__rmatmul__: _reversed_matmul,
    **dict.fromkeys(_ADDED, _added_matmul),
    torch.einsum: _einsum,
    torch.tensordot: _tensordot,
    **dict.fromkeys((F.bilinear, torch.bilinear), _bilinear),
    **dict.fromkeys((F.conv1d, F.conv2d, F.conv3d, torch.conv1d, torch.conv2d, torch.conv3d), _convolution(False)),
    **dict.fromkeys((F.conv_transpose1d, F.conv_transpose2d, F.conv_transpose3d), _convolution(True)),
    **dict.fromkeys((torch.conv_transpose1d, torch.conv_transpose2d, torch.conv_transpose3d), _convolution(True)),
}
