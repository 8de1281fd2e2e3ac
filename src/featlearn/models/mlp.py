"""Fully connected networks with the initializations of the papers."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Literal

import torch
from torch import Tensor, nn

from featlearn._utils.rng import Seed, as_generator
from featlearn._utils.validation import check_option, is_int
from featlearn.errors import InputError
from featlearn.linalg.activations import Activation, activation_module
from featlearn.models.initialization import ScaleOf, scale_weights

__all__ = ["check_widths", "linear_layer", "mlp"]


def mlp(
    widths: Sequence[int],
    *,
    activation: Activation = "relu",
    bias: bool = False,
    init: Literal["uniform", "normal"] = "uniform",
    scales: Sequence[float] | Mapping[str, float] | None = None,
    scale_of: ScaleOf = "std",
    generator: Seed = None,
    dtype: torch.dtype | None = None,
) -> nn.Sequential:
    """A fully connected network, ``f(x) = W_L phi(W_{L-1} ... phi(W_1 x))``.

    Linear layers and activations alternate, so that the linear ones are named "0", "2", "4", ...

    Args:
        widths: Input, hidden and output widths, e.g. ``[32, 128, 128, 1]``.
        activation: A name, a module, a factory or a function, see `activation_module`.
        bias: Whether layers have biases; the papers have none.
        init: "uniform" is PyTorch's own, U(-1/sqrt(k_in), 1/sqrt(k_in)), for weights and biases (standard
            deviation 1/sqrt(3 k_in)); "normal" is N(0, 1/k_in) with zero biases.
        scales: One number a layer, or ``{glob over layer names: number}``, see `scale_weights`; 1 by default.
            Biases are not scaled.
        scale_of: What a scale multiplies, for the papers have two readings: "std" multiplies the weights by
            it; "variance" multiplies them by its square root, as in N(0, s/k) of the NFA paper's first
            version.
        generator: Generator or integer seed.
        dtype: Of the parameters, torch's default if None. Numbers are drawn in float64 and rounded, so that
            a network has the same weights in every dtype.

    >>> net = mlp([32, 128, 128, 1], scales={"0": 0.01}, generator=0)
    >>> [name for name, module in net.named_modules() if isinstance(module, nn.Linear)]
    ['0', '2', '4']
    """
    check_widths(widths)
    check_option("init", init, ("uniform", "normal"))
    generator = as_generator(generator, "mlp")
    net = nn.Sequential()
    for k_in, k_out in pairwise(widths):
        if len(net):
            net.append(activation_module(activation))
        weight, shift = _draw((k_out, k_in), k_in, init, generator), None
        if bias:
            shift = _draw((k_out,), k_in, init, generator) if init == "uniform" else torch.zeros(k_out)
        net.append(linear_layer(weight, shift, dtype))
    if scales is not None:
        scale_weights(net, _by_name(scales, len(widths) - 1), scale_of)
    return net


def check_widths(widths: Sequence[int]) -> None:
    """Refuse what cannot be the widths of a network."""
    if len(widths) < 2 or not all(is_int(k, 1) for k in widths):
        raise InputError(f"widths must be two or more positive integers, got {list(widths)}")


def linear_layer(weight: Tensor, bias: Tensor | None = None, dtype: torch.dtype | None = None) -> nn.Linear:
    """A linear layer with given parameters, rounded to ``dtype`` (torch's default if None)."""
    k_out, k_in = weight.shape
    # skip_init leaves the parameters unset: nn.Linear would draw from the global generator.
    linear: nn.Linear = nn.utils.skip_init(  # type: ignore[no-untyped-call]
        nn.Linear, k_in, k_out, bias=bias is not None, dtype=dtype
    )
    with torch.no_grad():
        linear.weight.copy_(weight)
        if bias is not None:
            linear.bias.copy_(bias)
    return linear


def _draw(shape: tuple[int, ...], k_in: int, init: str, generator: torch.Generator) -> Tensor:
    if init == "normal":
        return torch.randn(shape, generator=generator, dtype=torch.float64) / math.sqrt(k_in)
    unit = torch.rand(shape, generator=generator, dtype=torch.float64)
    return (2 * unit - 1) / math.sqrt(k_in)


def _by_name(scales: Sequence[float] | Mapping[str, float], layers: int) -> Mapping[str, float]:
    if isinstance(scales, Mapping):
        return scales
    if len(scales) != layers:
        raise InputError(f"scales must be {layers} numbers, one a layer, or {{name: number}}, got {scales!r}")
    return {str(2 * i): scale for i, scale in enumerate(scales)}
