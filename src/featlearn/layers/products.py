"""Products of activations with weights: which dimensions of a call are rows, inputs and outputs of ``h = W x``.

`read_product` knows the functions of PyTorch that multiply two tensors. A `Form` then says how the weight becomes
matrices ``(groups, k_out, k_in)``, and how the result (or its gradient) becomes rows ``(samples, positions, groups,
k_out)``.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

Slot = int | str
Labels = tuple[str, ...]


class Form:
    """Dimensions of one product ``h = W x``.

    Attributes:
        kind: Kind of the layer, for tables.
        shape: Shape ``(groups, k_out, k_in)`` of the weight matrices.
        layout: Dimensions of the weight that are groups, outputs and inputs, where they may differ.
    """

    kind: str
    shape: tuple[int, int, int]
    layout: tuple[tuple[int, ...], ...] = ()

    def matrix(self, weight: Tensor) -> Tensor:
        """Reshape the weight, or its gradient, to ``(groups, k_out, k_in)``."""
        raise NotImplementedError

    def outputs(self, h: Tensor) -> Tensor:
        """Reshape the result, or its gradient, to ``(samples, positions, groups, k_out)``."""
        raise NotImplementedError

    @property
    def inputs(self) -> Callable[[Tensor], Tensor] | None:
        """Function that reshapes the activation, or its gradient, to ``(samples, positions, groups, k_in)``.

        None if the gradient at the activation is not ``J W`` row by row.
        """
        return None

    def members(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Tensor | None:
        """Return the block of each row, shape (rows,); None if every row has all blocks."""
        return None


class Contraction(Form):
    """Product given by labels of dimensions, as in ``einsum``.

    A label of the weight is an output if the activation lacks it, an input if the result lacks it, and a block
    ("group") if all three have it.

    Args:
        kind: Kind of the layer.
        weight: Labels of the weight. Dimensions that are broadcast have the label ``""``.
        activation: Labels of the activation.
        result: Labels of the result.
        sizes: Size of each label.
        gathered: Number of leading dimensions of the weight that select a block for each row.
    """

    def __init__(
        self,
        kind: str,
        weight: Labels,
        activation: Labels,
        result: Labels,
        sizes: Mapping[str, int],
        gathered: int = 0,
    ) -> None:
        self.kind = kind
        chosen = weight[:gathered]
        self._weight, self._activation, self._result = weight, activation, result
        self._rows = [x for x in result if x not in weight or x in chosen]
        self._groups = [x for x in weight if x and x in activation and x in result and x not in chosen]
        self._out = [x for x in weight if x and x in result and x not in activation]
        self._in = [x for x in weight if x and x not in result and x in activation]
        self._gathered = gathered
        # The blocks of the rows are known if the rows begin with the dimensions that select them.
        self.valid = all(x in activation for x in chosen) and list(chosen) == self._rows[:gathered]
        groups, k_out, k_in = (math.prod(sizes[x] for x in part) for part in (self._groups, self._out, self._in))
        self.shape = (groups, k_out, k_in)
        # Dimensions of size 1, such as a single sample, may be missing in another call.
        parts = ([x for x in part if sizes[x] > 1] for part in (self._groups, self._out, self._in))
        self.layout = tuple(tuple(map(weight.index, part)) for part in parts)

    def matrix(self, weight: Tensor) -> Tensor:
        """Reshape the weight, or its gradient, to ``(groups, k_out, k_in)``."""
        labels = self._weight[self._gathered :]
        index = tuple(slice(None) if label else 0 for label in labels)
        weight, kept = weight[index], [label for label in labels if label]
        wanted = [*self._groups, *self._out, *self._in]
        for label in [x for x in kept if x not in wanted]:  # a dimension of the weight alone is summed
            weight = weight.sum(kept.index(label))
            kept.remove(label)
        return weight.permute([kept.index(x) for x in wanted]).reshape(self.shape)

    def outputs(self, h: Tensor) -> Tensor:
        """Reshape the result, or its gradient, to ``(samples, positions, groups, k_out)``."""
        return self._arranged(h, self._result, self._out, self.shape[1])

    @property
    def inputs(self) -> Callable[[Tensor], Tensor] | None:
        """Function that reshapes the activation, or its gradient, to ``(samples, positions, groups, k_in)``."""
        if set(self._activation) != {*self._rows, *self._groups, *self._in}:
            return None
        return lambda x: self._arranged(x, self._activation, self._in, self.shape[2])

    def _arranged(self, t: Tensor, labels: Labels, last: list[str], size: int) -> Tensor:
        t = t.permute([labels.index(x) for x in (*self._rows, *self._groups, *last)])
        rows = t.shape[: len(self._rows)] or (1,)
        return t.reshape(rows[0], math.prod(rows[1:]), self.shape[0], size)


class Convolution(Form):
    """Convolution, whose matrix acts on the patches of the input.

    Args:
        weight: Weight of shape (channels out, channels in / groups, *kernel).
        groups: Number of groups.
        padded: Whether the input is padded.
        stride: Stride of each side.
    """

    def __init__(self, weight: Tensor, groups: int, padded: bool, stride: Sequence[int]) -> None:
        self.kind = f"conv{weight.ndim - 2}d"
        self.shape = (groups, weight.shape[0] // groups, math.prod(weight.shape[1:]))
        self._dims = weight.ndim - 2
        self._pointwise = math.prod(weight.shape[2:]) == 1 and not padded and all(s == 1 for s in stride)

    def matrix(self, weight: Tensor) -> Tensor:
        """Reshape the weight, or its gradient, to ``(groups, k_out, k_in)``."""
        return weight.reshape(self.shape)

    def outputs(self, h: Tensor) -> Tensor:
        """Reshape the result, or its gradient, to ``(samples, positions, groups, k_out)``."""
        if h.ndim == self._dims + 1:
            h = h.unsqueeze(0)
        return h.reshape(h.shape[0], self.shape[0], h.shape[1] // self.shape[0], -1).permute(0, 3, 1, 2)

    @property
    def inputs(self) -> Callable[[Tensor], Tensor] | None:
        """Function that reshapes the activation, or its gradient, to ``(samples, positions, groups, k_in)``."""
        return self.outputs if self._pointwise else None


class TransposedConvolution(Form):
    """Transposed convolution: a matrix from the channels of an input position to a patch of the output.

    With ``y_q = W x_q`` in ``(channels out) x kernel`` at each position q of the input, the output is the sum of all
    patches y_q at their places. The gradient in y_q is therefore the patch of the output's gradient.

    Args:
        weight: Weight of shape (channels in, channels out / groups, *kernel).
        sides: Sizes of the input.
        groups: Number of groups.
        stride: Stride of each side.
        padding: Padding of each side.
        dilation: Dilation of each side.
    """

    def __init__(
        self,
        weight: Tensor,
        sides: Sequence[int],
        groups: int,
        stride: Sequence[int],
        padding: Sequence[int],
        dilation: Sequence[int],
    ) -> None:
        self._kernel = tuple(weight.shape[2:])
        self.kind = f"conv_transpose{len(self._kernel)}d"
        self.shape = (groups, math.prod(weight.shape[1:]), weight.shape[0] // groups)
        self._sides, self._stride, self._padding, self._dilation = tuple(sides), stride, padding, dilation

    def matrix(self, weight: Tensor) -> Tensor:
        """Reshape the weight, or its gradient, to ``(groups, k_out, k_in)``."""
        groups, k_out, k_in = self.shape
        return weight.reshape(groups, k_in, k_out).mT

    def outputs(self, h: Tensor) -> Tensor:
        """Return the patch of each input position, shape ``(samples, positions, groups, k_out)``."""
        dims = len(self._kernel)
        if h.ndim == dims + 1:
            h = h.unsqueeze(0)
        pads: list[int] = []
        spans = [d * (k - 1) + 1 for d, k in zip(self._dilation, self._kernel, strict=True)]
        for size, side, s, p, span in zip(h.shape[2:], self._sides, self._stride, self._padding, spans, strict=True):
            # The whole result, of which the call returns a part; output_padding adds positions that no patch reaches.
            pads = [p, (side - 1) * s + span - p - size, *pads]
        h = F.pad(h, pads)
        for axis, (span, s, d) in enumerate(zip(spans, self._stride, self._dilation, strict=True)):
            h = h.unfold(2 + axis, span, s)[..., ::d]
        n, channels = h.shape[:2]
        h = h.permute(0, *range(2, 2 + dims), 1, *range(2 + dims, 2 + 2 * dims))
        groups = self.shape[0]
        return h.reshape(n, math.prod(self._sides), groups, channels // groups * math.prod(self._kernel))

    @property
    def inputs(self) -> Callable[[Tensor], Tensor] | None:
        """Function that reshapes the activation, or its gradient, to ``(samples, positions, groups, k_in)``."""

        def channels(x: Tensor) -> Tensor:
            if x.ndim == len(self._kernel) + 1:
                x = x.unsqueeze(0)
            return x.reshape(x.shape[0], self.shape[0], self.shape[2], -1).permute(0, 3, 1, 2)

        return channels


class BilinearForm(Form):
    """Bilinear layer, whose matrix acts on the products of the entries of two inputs.

    Args:
        weight: Weight of shape (k_out, first inputs, second inputs).
    """

    kind = "bilinear"

    def __init__(self, weight: Tensor) -> None:
        self.shape = (1, weight.shape[0], weight.shape[1] * weight.shape[2])

    def matrix(self, weight: Tensor) -> Tensor:
        """Reshape the weight, or its gradient, to ``(groups, k_out, k_in)``."""
        return weight.reshape(self.shape)

    def outputs(self, h: Tensor) -> Tensor:
        """Reshape the result, or its gradient, to ``(samples, positions, groups, k_out)``."""
        return h.reshape(h.shape[0] if h.ndim > 1 else 1, -1, 1, h.shape[-1])


class GroupedProduct(Form):
    """Product of sorted rows with one matrix per expert, as ``grouped_mm``.

    Args:
        weight: Weight of shape (experts, k_in, k_out).
    """

    kind = "experts"

    def __init__(self, weight: Tensor) -> None:
        experts, k_in, k_out = weight.shape
        self.shape = (experts, k_out, k_in)

    def matrix(self, weight: Tensor) -> Tensor:
        """Reshape the weight, or its gradient, to ``(groups, k_out, k_in)``."""
        return weight.mT

    def outputs(self, h: Tensor) -> Tensor:
        """Reshape the result, or its gradient, to ``(samples, positions, 1, k_out)``."""
        return h.reshape(h.shape[0], 1, 1, h.shape[-1])

    @property
    def inputs(self) -> Callable[[Tensor], Tensor] | None:
        """Function that reshapes the activation, or its gradient, to ``(samples, positions, 1, k_in)``."""
        return self.outputs

    def members(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Tensor | None:
        """Return the expert of each row, shape (rows,)."""
        ends = kwargs["offs"] if "offs" in kwargs else args[2]
        return torch.searchsorted(ends.long(), torch.arange(len(args[0]), device=ends.device), right=True)


# --- functions of PyTorch ---------------------------------------------------------------------------------------------

FormOf = Callable[[Tensor, Tensor | None, int, frozenset[int]], Form | None]
"""Function of the weight, the activation, the number of gathered dimensions and the copied dimensions of the weight."""


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
    """

    args: list[Any]
    kwargs: dict[str, Any]
    candidates: tuple[Candidate, ...]

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
        def form(w: Tensor, x: Tensor | None, gathered: int, copied: frozenset[int]) -> Form | None:
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
            result_form = Contraction(kind, mine, its, result, sizes | {n: 1 for n in its if n not in sizes}, gathered)
            return result_form if result_form.valid else None

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
    return _pair(args, kwargs, "matmul", first, second, _matmul_labels)


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
    sizes = {
        name: size for names, t in zip(parts, operands, strict=True) for name, size in zip(names, t.shape, strict=True)
    }

    def candidate(index: int) -> Candidate:
        # The other operands together are the activation: their product has all of their labels.
        others = tuple(dict.fromkeys(x for i, names in enumerate(parts) if i != index for x in names))

        def form(w: Tensor, x: Tensor | None, gathered: int, copied: frozenset[int]) -> Form | None:
            mine = tuple("" if i in copied else name for i, name in enumerate(parts[index]))
            made = Contraction("einsum", mine, others, result, sizes, gathered)
            return made if made.valid else None

        return Candidate(1 + index, None, form)

    return ProductCall(flat, dict(kwargs), tuple(candidate(i) for i in range(len(operands))))


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

    def form(w: Tensor, x: Tensor | None, gathered: int, copied: frozenset[int]) -> Form | None:
        return None if gathered or copied else BilinearForm(w)

    return ProductCall(list(args), dict(kwargs), (Candidate(slot, None, form),))


def _grouped(args: Sequence[Any], kwargs: Mapping[str, Any]) -> ProductCall | None:
    if len(args) < 2 or not isinstance(args[1], Tensor) or args[1].ndim != 3 or args[0].ndim != 2:
        return None

    def form(w: Tensor, x: Tensor | None, gathered: int, copied: frozenset[int]) -> Form | None:
        return None if gathered or copied else GroupedProduct(w)

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

        def form(w: Tensor, x: Tensor | None, gathered: int, copied: frozenset[int]) -> Form | None:
            assert x is not None
            dims = w.ndim - 2
            if gathered or copied:
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
