"""Forms of products ``h = W x``: which dimensions of the weight, the activation and the result are which.

A form arranges the weight as matrices ``(groups, k_out, k_in)``, and the result (or its gradient) as rows ``(samples,
positions, groups, k_out)``.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

Labels = tuple[str, ...]


class Form:
    """Dimensions of one product ``h = W x``.

    Attributes:
        kind: Kind of the layer, for tables.
        shape: Shape ``(groups, k_out, k_in)`` of the weight matrices.
        layout: Dimensions of the weight that are groups, outputs and inputs, where they may differ.
        sizes: Sizes of the dimensions that make up the outputs, and of those that make up the inputs; empty if each
            is one dimension.
    """

    kind: str
    shape: tuple[int, int, int]
    layout: tuple[tuple[int, ...], ...] = ()
    sizes: tuple[tuple[int, ...], ...] = ()

    def matrix(self, weight: Tensor) -> Tensor:
        """Reshape the weight, or its gradient, to ``(groups, k_out, k_in)``."""
        raise NotImplementedError

    @property
    def family(self) -> str:
        """Name of the kind of form, which products of one layer share."""
        return type(self).__name__

    def gradient(self, of_weight: Tensor) -> Tensor:
        """Reshape the gradient in a weight that may hold copies, whose gradients add up."""
        return self.matrix(of_weight)

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
        """Return the block of each row, shape (rows,), from the arguments; None if every row has all blocks."""
        return None

    def blocks_of_rows(self, blocks: Tensor) -> Tensor:
        """Return the block of each row, shape (rows,), from those in the dimensions that select blocks."""
        raise NotImplementedError


class Contraction(Form):
    """Product given by labels of dimensions, as in ``einsum``.

    A label of the weight is an output if the activation lacks it, an input if the result lacks it, and a block
    ("group") if all three have it. Dimensions along which the weight was selected from a stack are rows.

    Args:
        kind: Kind of the layer.
        weight: Labels of the weight. Dimensions along which it holds equal copies have the label ``""``.
        activation: Labels of the activation.
        result: Labels of the result.
        sizes: Size of each label.
        chosen: Labels of the weight that select a block.
        scale: Factor of the product in the result, as ``alpha`` of ``addmm``.
    """

    def __init__(
        self,
        kind: str,
        weight: Labels,
        activation: Labels,
        result: Labels,
        sizes: Mapping[str, int],
        chosen: Collection[str] = (),
        scale: float = 1.0,
    ) -> None:
        self.kind, self._sizes, self._scale = kind, sizes, scale
        self._weight, self._activation, self._result = weight, activation, result
        self._chosen = [x for x in weight if x in chosen]
        self._rows = [x for x in result if x not in weight or x in chosen]
        self._rows += [x for x in self._chosen if x not in self._rows]
        parts = [x for x in weight if x and x not in chosen]
        self._groups = [x for x in parts if x in activation and x in result]
        self._out = [x for x in parts if x in result and x not in activation]
        self._in = [x for x in parts if x not in result and x in activation]
        groups, k_out, k_in = (math.prod(sizes[x] for x in part) for part in (self._groups, self._out, self._in))
        self.shape = (groups, k_out, k_in)
        self.sizes = tuple(tuple(sizes[x] for x in part) for part in (self._out, self._in))
        # Dimensions of size 1, such as a single sample, may be missing in another call.
        large = ([x for x in part if sizes[x] > 1] for part in (self._groups, self._out, self._in))
        self.layout = tuple(tuple(map(weight.index, part)) for part in large)

    def matrix(self, weight: Tensor) -> Tensor:
        """Reshape the weight, or its gradient, to ``(groups, k_out, k_in)``."""
        first = tuple(slice(None) if label and label not in self._chosen else 0 for label in self._weight)
        return self._as_matrix(weight[first], [x for x in self._weight if x and x not in self._chosen])

    def gradient(self, of_weight: Tensor) -> Tensor:
        """Reshape the gradient in a weight that may hold copies, whose gradients add up."""
        copies = [i for i, label in enumerate(self._weight) if not label]
        total = of_weight.sum(copies, keepdim=True) if copies else of_weight
        return self.matrix(total)

    def _as_matrix(self, weight: Tensor, labels: list[str]) -> Tensor:
        wanted = [*self._groups, *self._out, *self._in]
        for label in [x for x in labels if x not in wanted]:  # a dimension of the weight alone is summed
            weight = weight.sum(labels.index(label))
            labels.remove(label)
        return weight.permute([labels.index(x) for x in wanted]).reshape(self.shape)

    def outputs(self, h: Tensor) -> Tensor:
        """Reshape the result, or its gradient, to ``(samples, positions, groups, k_out)``."""
        rows = self._arranged(h, self._result, self._out, self.shape[1])
        return rows if self._scale == 1 else rows * self._scale

    @property
    def inputs(self) -> Callable[[Tensor], Tensor] | None:
        """Function that reshapes the activation, or its gradient, to ``(samples, positions, groups, k_in)``."""
        if set(self._activation) != {*self._rows, *self._groups, *self._in}:
            return None
        return lambda x: self._arranged(x, self._activation, self._in, self.shape[2])

    def blocks_of_rows(self, blocks: Tensor) -> Tensor:
        """Return the block of each row, shape (rows,), from those in the dimensions that select blocks."""
        return self._expanded(blocks, self._chosen, self._rows).flatten()

    def _arranged(self, t: Tensor, labels: Labels, last: list[str], size: int) -> Tensor:
        t = self._expanded(t, labels, [*self._rows, *self._groups, *last])
        rows = t.shape[: len(self._rows)] or (1,)
        return t.reshape(rows[0], math.prod(rows[1:]), self.shape[0], size)

    def _expanded(self, t: Tensor, labels: Sequence[str], wanted: Sequence[str]) -> Tensor:
        """Bring dimensions into another order; those that are missing hold equal copies."""
        missing = [x for x in wanted if x not in labels]
        t = t.permute([labels.index(x) for x in wanted if x in labels])
        for label in missing:
            t = t.unsqueeze(wanted.index(label))
        return t.expand([self._sizes[x] for x in wanted]) if missing else t


class Folded(Form):
    """Form of groups with equal matrices, such as copies of a weight per sample: their rows are those of one matrix.

    Args:
        form: Form with several groups.
    """

    def __init__(self, form: Form) -> None:
        self.kind, self._form = form.kind, form
        self.shape = (1, *form.shape[1:])

    @property
    def family(self) -> str:
        """Name of the kind of form, which products of one layer share."""
        return self._form.family

    def matrix(self, weight: Tensor) -> Tensor:
        """Reshape the weight, or its gradient, to ``(1, k_out, k_in)``."""
        return self._form.matrix(weight)[:1]

    def gradient(self, of_weight: Tensor) -> Tensor:
        """Reshape the gradient in a weight that holds copies, whose gradients add up."""
        return self._form.gradient(of_weight).sum(0, keepdim=True)

    def outputs(self, h: Tensor) -> Tensor:
        """Reshape the result, or its gradient, to ``(samples, positions, 1, k_out)``."""
        return self._form.outputs(h).flatten(1, 2).unsqueeze(2)

    @property
    def inputs(self) -> Callable[[Tensor], Tensor] | None:
        """Function that reshapes the activation, or its gradient, to ``(samples, positions, 1, k_in)``."""
        inputs = self._form.inputs
        return None if inputs is None else lambda x: inputs(x).flatten(1, 2).unsqueeze(2)


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
        return h.reshape(h.shape[0] if h.ndim > 1 else 1, math.prod(h.shape[1:-1]), 1, h.shape[-1])


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
