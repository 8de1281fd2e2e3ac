"""Layers of products that a model computes itself, outside of known modules."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize

from featlearn.layers._complex import as_real
from featlearn.layers._linear_conv import token_rows
from featlearn.layers.base import Layer
from featlearn.layers.forms import Form

Lookup = Callable[[str], Tensor]


@dataclass(frozen=True, eq=False)
class Operation:
    """Product of activations with a weight that is computed from parameters alone.

    Attributes:
        key: Hashable mark of the product, the same in each forward pass.
        path: Path of the largest parameter of the weight.
        leaves: Paths of all parameters of the weight.
        view: Whether the weight holds entries of one parameter, only rearranged.
        value: Function of a look-up of parameters by path, and the index of a block, that returns the weight.
        form: Dimensions of the product.
        is_complex: Whether the result is complex.
        blocks: Number of matrices in the stack from which each call selects one, such as experts; None without a stack.
        at_inputs: Whether gradients at the activation are ``J W`` row by row.
    """

    key: Any
    path: str
    leaves: frozenset[str]
    view: bool
    value: Callable[[Lookup, int | None], Tensor]
    form: Form
    is_complex: bool
    blocks: int | None
    at_inputs: bool


def tensor_at(model: nn.Module, path: str) -> Tensor:
    """Return the tensor of a model at a dotted path.

    Args:
        model: Module with the tensor.
        path: Path of a parameter, or of a parametrized weight.
    """
    parent, _, local = path.rpartition(".")
    tensor: Tensor = getattr(model.get_submodule(parent), local)
    return tensor


def operation_layer(model: nn.Module, name: str, operation: Operation) -> Layer:
    """Return the layer of a product in a model, or in another model of the same architecture.

    Args:
        model: Module with the parameters.
        name: Name of the layer.
        operation: The product.
    """
    parent, _, local = operation.path.rpartition(".")
    module = model.get_submodule(parent)
    groups, k_out, k_in = operation.form.shape

    def lookup(path: str) -> Tensor:
        return tensor_at(model, path)

    form, blocks = operation.form, operation.blocks

    def matrices(find: Lookup) -> Tensor:
        """Return the matrices of the weight, or of all blocks."""
        if blocks is None:
            return form.matrix(operation.value(find, None))
        return torch.cat([form.matrix(operation.value(find, i)) for i in range(blocks)])

    if operation.view:

        def with_weight(w: Tensor) -> Lookup:
            return lambda path: w if path in operation.leaves else lookup(path)

        weight, matrix, note = (lambda: lookup(operation.path)), (lambda w: matrices(with_weight(w))), ""
    else:
        weight, matrix = (lambda: matrices(lookup)), (lambda w: w)
        note = "computed weight: decay acts on its parameters, so FACT = NFM need not hold"
    layer = Layer(
        name=name,
        kind=operation.form.kind,
        module=module,
        part=None,
        parameter=local,
        groups=groups * (operation.blocks or 1),
        k_out=k_out,
        k_in=k_in,
        weight=weight,
        matrix=matrix,
        outputs=token_rows,
        inputs=token_rows,
        ndim=0,
        note=note,
        operation=operation,
        leaves=tuple(leaf for path in sorted(operation.leaves) for leaf in leaves_at(model, path)),
    )
    return as_real(layer) if operation.is_complex else layer


def leaves_at(model: nn.Module, path: str) -> list[Tensor]:
    """Return the parameters behind a path: the parameter, or those of a parametrized weight."""
    parent, _, local = path.rpartition(".")
    module = model.get_submodule(parent)
    if parametrize.is_parametrized(module, local):
        return list(module.parametrizations[local].parameters())  # type: ignore[union-attr,index]
    return [tensor_at(model, path)]
