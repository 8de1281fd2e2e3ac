"""Search for the parameters whose gradients are those of one layer."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from featlearn.capture import Trace
from featlearn.kernels.contractions import single
from featlearn.layers import Layer

_COARSEST = 0.03  # relative error of sums in half precision; a gradient with a part of another layer differs more


@dataclass(frozen=True)
class Owned:
    """Parameters that belong to layers, see `owned`.

    Attributes:
        weights: Names of the layers that own their weight.
        biases: Names of the layers that own their bias.
        parameters: ``id`` of the parameters that belong to layers completely.
        totals: Total gradients that the gradients of layers were compared with, by ``id`` of the parameter.
        telling: Whether none of the gradients that agreed was zero; the agreement of zeros is not conclusive.
    """

    weights: frozenset[str]
    biases: frozenset[str]
    parameters: frozenset[int]
    totals: Mapping[int, Tensor]
    telling: bool


def owned(layers: Iterable[Layer], trace: Trace, parameters: Sequence[Tensor]) -> Owned:
    """Find the parameters that belong to layers, by one backward pass with random weights.

    A parameter belongs to a layer if its total gradient is the one assembled from the ``x`` and ``J`` of the layer. A
    parameter that belongs to layers only in part, as that of a packed attention may, is not included.

    Args:
        layers: Layers of the model.
        trace: Trace of a batch.
        parameters: Parameters of the model.

    Returns:
        The layers and parameters.
    """
    n = trace.output.shape[0]
    generator = torch.Generator().manual_seed(0)
    # Normal weights, because the signs of two samples may cancel.
    weights = torch.randn(trace.output.shape, generator=generator).to(trace.output)
    rows, grads = trace.gradients_and_totals(trace.output, weights, parameters)
    true = {id(t): g for t, g in zip(parameters, grads, strict=True)}
    alone = torch.zeros_like(weights)
    alone[0] = weights[0]
    first = trace.gradients(trace.output, alone)
    covered: dict[int, int] = {}
    claims: list[tuple[int, str, str]] = []
    for layer in layers:
        # Rows must be samples: the output of the first sample must not depend on the other rows.
        if not rows[layer.name] or any(j.shape[0] != n or j[1:].any() for j in first[layer.name]):
            continue
        j, x = torch.cat(rows[layer.name], dim=1), trace.inputs(layer)
        weight, eps = layer.weight(), torch.finfo(j.dtype).eps
        j, x = single(j), single(x) if x.is_floating_point() else x
        if id(weight) in true:
            sizes = _assembled(layer, x.abs() if x.is_floating_point() else x, j.abs())  # indices have no size
            if _is_sum(layer.matrix(true[id(weight)]), _assembled(layer, x, j), sizes, eps):
                claims.append((id(weight), layer.name, "weight"))
                covered[id(weight)] = covered.get(id(weight), 0) + layer.matrix(weight).numel()
        bias = bias_of(layer)
        if bias is None or layer.vector is None or id(bias) not in true:
            continue
        if _is_sum(layer.vector(true[id(bias)]), j.sum((0, 1)), j.abs().sum((0, 1)), eps):
            claims.append((id(bias), layer.name, "bias"))
            covered[id(bias)] = covered.get(id(bias), 0) + layer.vector(bias).numel()
    whole = frozenset(id(t) for t in parameters if covered.get(id(t)) == t.numel())
    return Owned(
        frozenset(name for key, name, part in claims if part == "weight" and key in whole),
        frozenset(name for key, name, part in claims if part == "bias" and key in whole),
        whole,
        true,
        all(bool(true[key].any()) for key, _, _ in claims),
    )


def _assembled(layer: Layer, x: Tensor, j: Tensor) -> Tensor:
    """Return the gradient in a layer's weight from its inputs and gradients, shape (groups, k_out, k_in)."""
    if not layer.one_hot:
        return torch.einsum("npgo,npgi->goi", j, x)
    ids, kept = x.flatten(), (x.flatten() >= 0).unsqueeze(1)
    table = j.new_zeros(layer.k_in, layer.k_out)
    return table.index_add_(0, ids.clamp_min(0), j.flatten(0, 2) * kept).mT.unsqueeze(0)


def _is_sum(total: Tensor, other: Tensor, sizes: Tensor, eps: float) -> bool:
    """Return whether two sums are equal up to rounding by ``eps``, given the sum of the absolute values of their terms.

    Terms may cancel: the gradient in the bias of the keys of an attention is zero up to rounding.
    """
    limit = min(100 * max(eps, torch.finfo(total.dtype).eps), _COARSEST)
    return float((total - other).norm()) <= limit * float(sizes.norm())


def bias_of(layer: Layer) -> Tensor | None:
    """Return the bias of a layer, or None."""
    bias: Any = layer.module
    for part in (layer.bias or "").split("."):
        bias = getattr(bias, part, None)
    return bias if isinstance(bias, Tensor) else None
