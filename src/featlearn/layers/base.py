"""The one view of a weight matrix: ``h = W x``."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn


@dataclass(frozen=True)
class Layer:
    """A weight matrix of a model, with what is needed to see it as ``h = W x``.

    Every kind of layer is told to the rest of the library by four functions, so that nothing outside this
    package asks whether a layer is a convolution.

    Attributes:
        name: Path in the model, as ``"net.0"`` or ``"attn.q"``.
        kind: What it is, in a word, for tables.
        module: The module that owns the weight.
        part: Which matrix of a module that owns several (``"q"``); None where it owns one.
        parameter: Name of the weight tensor in ``module``.
        groups: Number of blocks on the diagonal (grouped convolutions; otherwise 1).
        k_out: Outputs of a block.
        k_in: Inputs of a block.
        weight: The weight tensor that autograd knows, as ``module`` holds it at this moment.
        matrix: That tensor, or its gradient, as ``(groups, k_out, k_in)``.
        outputs: Pre-activations or their gradient as ``(samples, positions, groups, k_out)``.
        inputs: Inputs as ``(samples, positions, groups, k_in)``.
        ndim: Dimensions that ``h`` has at least, with its dimension of samples.
        bias: Name of the bias in ``module``, which adds a constant to ``h``; None without one.
        vector: The bias, or its gradient, as ``(groups, k_out)``.
        one_hot: Whether inputs are unit vectors: ``inputs`` then gives their indices, ``(samples, positions, 1, 1)``.
        sample_gradients: The gradient in the weight of each sample, ``(samples, c, groups, k_out, k_in)``, from the
            input ``x`` as the module was given it and c gradients as ``outputs`` gives them, where there is a faster
            way than the product of ``inputs`` and these.
        note: What a reader of the report should know about this layer.
    """

    name: str
    kind: str
    module: nn.Module = field(repr=False)
    part: str | None
    parameter: str
    groups: int
    k_out: int
    k_in: int
    weight: Callable[[], Tensor] = field(repr=False)
    matrix: Callable[[Tensor], Tensor] = field(repr=False)
    outputs: Callable[[Tensor], Tensor] = field(repr=False)
    inputs: Callable[[Tensor], Tensor] = field(repr=False)
    ndim: int = 2
    bias: str | None = None
    vector: Callable[[Tensor], Tensor] | None = field(default=None, repr=False)
    one_hot: bool = False
    sample_gradients: Callable[[Tensor, Sequence[Tensor]], Tensor] | None = field(default=None, repr=False)
    note: str = ""

    @property
    def shape(self) -> tuple[int, int, int]:
        """``(groups, k_out, k_in)``."""
        return self.groups, self.k_out, self.k_in


def stacked(rows: Sequence[Tensor], dim: int) -> Tensor:
    """Tensors along a new dimension; one alone is not copied."""
    return rows[0].unsqueeze(dim) if len(rows) == 1 else torch.stack(list(rows), dim=dim)


def child_name(parent: str, child: str) -> str:
    """Dotted path of a child; the root of a model has the empty path."""
    return f"{parent}.{child}" if parent else child
