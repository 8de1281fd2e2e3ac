"""Representation of a weight matrix as ``h = W x``."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

if TYPE_CHECKING:
    from featlearn.layers.operations import Operation


Record = Callable[[str, Tensor, Tensor], Tensor]
"""Function of the part, the input x and the pre-activations h that returns the h to continue with."""


@dataclass(frozen=True)
class Layer:
    """Weight matrix of a model, with the functions that represent it as ``h = W x``.

    Four functions (`weight`, `matrix`, `outputs`, `inputs`) describe every kind of layer, so that other packages do not
    depend on the type of the module.

    Attributes:
        name: Path in the model, such as ``"net.0"`` or ``"attn.q"``.
        kind: Kind of the layer, for tables.
        module: Module that owns the weight.
        part: Name of the matrix in a module with several, such as ``"q"``; None in a module with one.
        parameter: Name of the weight tensor in ``module``.
        groups: Number of blocks on the diagonal: the groups of a convolution, otherwise 1.
        k_out: Number of outputs of a block.
        k_in: Number of inputs of a block.
        weight: Function that returns the present weight tensor of ``module``, which autograd differentiates.
        matrix: Function that reshapes the weight tensor, or its gradient, to ``(groups, k_out, k_in)``.
        outputs: Function that reshapes pre-activations, or their gradient, to ``(samples, positions, groups, k_out)``.
        inputs: Function that converts the input of the module to ``(samples, positions, groups, k_in)``.
        ndim: Smallest number of dimensions of ``h``, including the samples.
        bias: Name of the bias in ``module``, which adds a constant to ``h``; None without a bias.
        vector: Function that reshapes the bias, or its gradient, to ``(groups, k_out)``.
        one_hot: Whether inputs are unit vectors: ``inputs`` then returns their indices, ``(samples, positions, 1, 1)``.
        sample_gradients: Function that returns the gradient of each sample in the weight, ``(samples, c, groups, k_out,
            k_in)``, from the input of the module and c gradients as ``outputs`` returns them; None if the product of
            these and ``inputs`` is the fastest way.
        note: Remark on this layer for reports.
        input_gradients: Whether ``inputs`` also reshapes the gradient at the input of the module, which is then
            ``J W`` row by row.
        is_complex: Whether the pre-activations are complex; sizes and matrices are those of the real form.
        operation: Product that the layer stands for; None if the layer is a module, or a part of one.
        leaves: Parameters that the weight is computed from; empty if it is the one named ``parameter``.
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
    input_gradients: bool = False
    is_complex: bool = False
    operation: Operation | None = field(default=None, repr=False)
    leaves: tuple[Tensor, ...] = field(default=(), repr=False)

    @property
    def shape(self) -> tuple[int, int, int]:
        """Shape ``(groups, k_out, k_in)`` of the weight matrices."""
        return self.groups, self.k_out, self.k_in


def stacked(rows: Sequence[Tensor], dim: int) -> Tensor:
    """Stack tensors along a new dimension; a single tensor is not copied.

    Args:
        rows: Tensors of one shape.
        dim: Index of the new dimension.
    """
    return rows[0].unsqueeze(dim) if len(rows) == 1 else torch.stack(list(rows), dim=dim)


def child_name(parent: str, child: str) -> str:
    """Return the dotted path of a child; the root of a model has the empty path.

    Args:
        parent: Path of the parent.
        child: Name of the child in the parent.
    """
    return f"{parent}.{child}" if parent else child


def module_layer(name: str, kind: str, module: nn.Module, shape: tuple[int, int, int], **options: Any) -> Layer:
    """Return the layer of a module with one matrix ``weight``, and a ``bias`` that may be None.

    Args:
        name: Path in the model.
        kind: Kind of the layer.
        module: Module that owns the weight.
        shape: Shape (groups, k_out, k_in).
        **options: Further attributes of `Layer`: ``matrix``, ``outputs``, ``inputs`` and the optional ones.
    """
    groups, k_out, k_in = shape
    fixed: dict[str, Any] = {"weight": lambda: module.weight, "vector": lambda b: b.reshape(groups, k_out)}
    bias = None if getattr(module, "bias", None) is None else "bias"
    return Layer(name, kind, module, None, "weight", groups, k_out, k_in, bias=bias, **fixed, **options)
