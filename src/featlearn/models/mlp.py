"""Fully connected networks, in the standard and in the NTK parameterization."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from itertools import pairwise
from typing import Literal

import torch
from torch import Tensor, nn

from featlearn._utils.public_names import renamed_arguments
from featlearn._utils.rng import Seed, as_generator
from featlearn._utils.validation import check_option, is_int
from featlearn.errors import InputError
from featlearn.linalg.activations import Activation, activation_module, normalized_activation
from featlearn.models.initialization import ScaleOf, scale_weights


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


Init = str | Callable[[tuple[int, int], torch.Generator], Tensor]
"""A name, or a function of the shape and a generator."""


@renamed_arguments(normalised="normalized")
def ntk_mlp(
    widths: Sequence[int],
    *,
    activation: Activation = "tanh",
    normalized: bool = True,
    init: Init | Sequence[Init] = "normal",
    generator: Seed = None,
    dtype: torch.dtype | None = None,
) -> nn.Sequential:
    """A fully connected network in the NTK parameterization (spectral paper, equation 1).

    ``h_0 = x / sqrt(d)``, ``h_l = sigma(W_l h_{l-1}) / sqrt(n_l)``, ``f(x) = v^T h_{L-1}``, without biases. The
    parameters are the W_l and v themselves, with entries of order one, so that learning rates have the paper's
    meaning. The factors stand in modules of their own: what a linear layer takes in is ``h_{l-1}``, and the
    conjugate kernel of the last one (`featlearn.ck`) is equation (4) without further scaling. Linear layers are
    named "1", "4", "7", ...

    Args:
        widths: Input, hidden and output widths, e.g. ``[500, 750, 1]``.
        activation: A name, a module, a factory or a function, see `activation_module`.
        normalized: Whether to center and normalize the activation under N(0, 1), as the paper does, see
            `normalized_activation` (for kinks other than at multiples of 1/2, pass what that returns, and False).
        init: Distribution of the entries, or one a layer: "normal" is N(0, 1), "uniform" and "rademacher" have
            variance 1 too, "cauchy" is the standard Cauchy law (figure 3c has it in the first layer alone:
            ``["cauchy", "normal"]``); or a function of the shape and a generator.
        generator: Generator or integer seed.
        dtype: Of the parameters, torch's default if None. Numbers are drawn in float64 and rounded, so that
            a network has the same weights in every dtype.

    >>> net = ntk_mlp([500, 750, 1], generator=0)
    >>> [name for name, module in net.named_modules() if isinstance(module, nn.Linear)]
    ['1', '4']
    """
    check_widths(widths)
    generator = as_generator(generator, "ntk_mlp")
    net = nn.Sequential()
    for draw, (k_in, k_out) in zip(_inits(init, len(widths) - 1), pairwise(widths), strict=True):
        if len(net):
            net.append(normalized_activation(activation) if normalized else activation_module(activation))
        net.append(Scale(1 / math.sqrt(k_in)))
        net.append(linear_layer(_drawn(draw, (k_out, k_in), generator), dtype=dtype))
    return net


def _normal(shape: tuple[int, int], generator: torch.Generator) -> Tensor:
    return torch.randn(shape, generator=generator, dtype=torch.float64)


def _unit(shape: tuple[int, int], generator: torch.Generator) -> Tensor:
    return torch.rand(shape, generator=generator, dtype=torch.float64)


_NAMED: dict[str, Callable[[tuple[int, int], torch.Generator], Tensor]] = {
    "normal": _normal,
    "uniform": lambda shape, generator: math.sqrt(12) * (_unit(shape, generator) - 0.5),
    "rademacher": lambda shape, generator: (_unit(shape, generator) - 0.5).sign(),
    "cauchy": lambda shape, generator: (math.pi * (_unit(shape, generator) - 0.5)).tan(),
}


def _inits(init: Init | Sequence[Init], layers: int) -> list[Init]:
    if isinstance(init, str) or callable(init):
        return [init] * layers
    if not isinstance(init, Sequence) or len(init) != layers:
        raise InputError(f"init must be a distribution, or {layers} of them, one a layer, got {init!r}")
    return list(init)


def _drawn(init: Init, shape: tuple[int, int], generator: torch.Generator) -> Tensor:
    if isinstance(init, str):
        if init not in _NAMED:
            raise InputError(f"no distribution is called {init!r}: choose from {', '.join(sorted(_NAMED))}")
        return _NAMED[init](shape, generator)
    if not callable(init):
        raise InputError(f"a distribution must be a name or a function, got {type(init).__name__}")
    weight = init(shape, generator)
    if not isinstance(weight, Tensor) or tuple(weight.shape) != shape:
        raise InputError(f"the function given as init must return a tensor of the shape it is asked for, {shape}")
    return weight


class Scale(nn.Module):
    """Multiplication by a fixed number."""

    def __init__(self, factor: float) -> None:
        super().__init__()
        self.factor = factor

    def forward(self, h: Tensor) -> Tensor:
        """``factor * h``."""
        return self.factor * h

    def extra_repr(self) -> str:
        """The number, for printing."""
        return f"{self.factor:.6g}"
