"""Fully connected networks in the standard and in the NTK parameterization.

References:
    Beaglehole, Mitliagkas & Agarwala, "Feature learning as alignment", https://openreview.net/forum?id=JXCe2ZcUXr (NFA
    paper).
    Wang, Engel, Sarwate, Dumitriu & Chiang (2022), https://arxiv.org/abs/2211.06506 (spectral paper).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from itertools import pairwise
from typing import Any, Literal, TypeVar

import torch
from torch import Tensor, nn

from featlearn._utils.public_names import renamed_arguments
from featlearn._utils.rng import Seed, as_generator
from featlearn._utils.validation import check_option, is_int
from featlearn.errors import InputError
from featlearn.linalg.activations import Activation, activation_module, normalized_activation
from featlearn.models.initialization import ScaleOf, scale_weights

_Layer = TypeVar("_Layer", nn.Linear, nn.Conv2d)


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
    """Create a fully connected network, ``f(x) = W_L phi(W_{L-1} ... phi(W_1 x))``.

    Linear layers and activations alternate; the linear layers are named "0", "2", "4", ...

    Args:
        widths: Input, hidden and output widths, e.g. ``[32, 128, 128, 1]``.
        activation: Activation: a name, a module, a factory or a function, as in `activation_module`.
        bias: Whether layers have biases; in the papers they have none.
        init: Initialization: "uniform" is PyTorch's default, U(-1/sqrt(k_in), 1/sqrt(k_in)), for weights and biases
            (standard deviation 1/sqrt(3 k_in)); "normal" is N(0, 1/k_in) with zero biases.
        scales: Scale of each layer's weights: one number per layer, or ``{glob over layer names: number}`` as in
            `scale_weights`. None does not scale weights. Biases are never scaled.
        scale_of: Meaning of a scale: "std" multiplies the weights by it; "variance" multiplies them by its square root,
            as in N(0, s/k) of the first version of the NFA paper.
        generator: Generator or integer seed. None is seed 0.
        dtype: Type of the parameters. None is torch's default. Numbers are drawn in float64 and rounded, so that a
            network has the same weights in every dtype.

    Returns:
        The network.

    Raises:
        InputError: An argument is not allowed.

    Example:
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
    """Raise an InputError if the widths are not two or more positive integers."""
    if len(widths) < 2 or not all(is_int(k, 1) for k in widths):
        raise InputError(f"widths must be two or more positive integers, got {list(widths)}")


def linear_layer(weight: Tensor, bias: Tensor | None = None, dtype: torch.dtype | None = None) -> nn.Linear:
    """Create a linear layer with given parameters.

    Args:
        weight: Weight, shape ``(k_out, k_in)``.
        bias: Bias, shape ``(k_out,)``. None creates a layer without bias.
        dtype: Type to which the parameters are rounded. None is torch's default.
    """
    k_out, k_in = weight.shape
    return with_parameters(weight, bias, nn.Linear, k_in, k_out, dtype=dtype)


def with_parameters(weight: Tensor, bias: Tensor | None, kind: type[_Layer], *sizes: int, **options: Any) -> _Layer:
    """Create a layer of a kind with given parameters; sizes and options are those of its constructor."""
    # skip_init leaves the parameters unset: the constructor would draw from the global generator.
    layer: _Layer = nn.utils.skip_init(kind, *sizes, bias=bias is not None, **options)  # type: ignore[no-untyped-call]
    with torch.no_grad():
        layer.weight.copy_(weight)
        if bias is not None and layer.bias is not None:
            layer.bias.copy_(bias)
    return layer


def _draw(shape: tuple[int, ...], k_in: int, init: str, generator: torch.Generator) -> Tensor:
    if init == "normal":
        return draw_normal(shape, generator) / math.sqrt(k_in)
    unit = torch.rand(shape, generator=generator, dtype=torch.float64)
    return (2 * unit - 1) / math.sqrt(k_in)


def _by_name(scales: Sequence[float] | Mapping[str, float], layers: int) -> Mapping[str, float]:
    if isinstance(scales, Mapping):
        return scales
    if len(scales) != layers:
        raise InputError(f"scales must be {layers} numbers, one per layer, or {{name: number}}, got {scales!r}")
    return {str(2 * i): scale for i, scale in enumerate(scales)}


Init = str | Callable[[tuple[int, int], torch.Generator], Tensor]
"""Distribution of weights: a name, or a function of the shape and a generator."""


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
    """Create a fully connected network in the NTK parameterization (spectral paper, equation 1).

    ``h_0 = x / sqrt(d)``, ``h_l = sigma(W_l h_{l-1}) / sqrt(n_l)``, ``f(x) = v^T h_{L-1}``, without biases. The
    parameters are W_l and v, with entries of order one, so that learning rates have the same meaning as in the paper.
    The factors are separate modules: the input of a linear layer is ``h_{l-1}``, and the conjugate kernel of the last
    layer (`featlearn.ck`) is equation (4) without further scaling. Linear layers are named "1", "4", "7", ...

    Args:
        widths: Input, hidden and output widths, e.g. ``[500, 750, 1]``.
        activation: Activation: a name, a module, a factory or a function, as in `activation_module`.
        normalized: Whether the activation is centered and normalized under N(0, 1), as in the paper and in
            `normalized_activation`. For kinks other than at multiples of 1/2, pass the result of that function as
            ``activation``, and False.
        init: Distribution of the entries, or one per layer: "normal" is N(0, 1), "uniform" and "rademacher" have
            variance 1 too, "cauchy" is the standard Cauchy distribution (in the first layer only in figure 3c:
            ``["cauchy", "normal"]``); or a function of the shape and a generator.
        generator: Generator or integer seed. None is seed 0.
        dtype: Type of the parameters. None is torch's default. Numbers are drawn in float64 and rounded, so that a
            network has the same weights in every dtype.

    Returns:
        The network.

    Raises:
        InputError: An argument is not allowed.

    Example:
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


def draw_normal(shape: tuple[int, ...], generator: torch.Generator) -> Tensor:
    """Draw standard normal numbers in float64."""
    return torch.randn(shape, generator=generator, dtype=torch.float64)


def _unit(shape: tuple[int, int], generator: torch.Generator) -> Tensor:
    return torch.rand(shape, generator=generator, dtype=torch.float64)


_NAMED: dict[str, Callable[[tuple[int, int], torch.Generator], Tensor]] = {
    "normal": draw_normal,
    "uniform": lambda shape, generator: math.sqrt(12) * (_unit(shape, generator) - 0.5),
    "rademacher": lambda shape, generator: (_unit(shape, generator) - 0.5).sign(),
    "cauchy": lambda shape, generator: (math.pi * (_unit(shape, generator) - 0.5)).tan(),
}


def _inits(init: Init | Sequence[Init], layers: int) -> list[Init]:
    if isinstance(init, str) or callable(init):
        return [init] * layers
    if not isinstance(init, Sequence) or len(init) != layers:
        raise InputError(f"init must be a distribution, or {layers} distributions, one per layer, got {init!r}")
    return list(init)


def _drawn(init: Init, shape: tuple[int, int], generator: torch.Generator) -> Tensor:
    if isinstance(init, str):
        return _NAMED[check_option("init", init, sorted(_NAMED))](shape, generator)
    if not callable(init):
        raise InputError(f"init must be a name or a function, got {type(init).__name__}")
    weight = init(shape, generator)
    if not isinstance(weight, Tensor) or tuple(weight.shape) != shape:
        raise InputError(f"init must return a tensor of the requested shape, {shape}, got {weight!r:.60}")
    return weight


class Scale(nn.Module):
    """Multiplication by a fixed number.

    Args:
        factor: Number to multiply by.
    """

    def __init__(self, factor: float) -> None:
        super().__init__()
        self.factor = factor

    def forward(self, h: Tensor) -> Tensor:
        """Return ``factor * h``.

        Args:
            h: Tensor of any shape.
        """
        return self.factor * h

    def extra_repr(self) -> str:
        """Return the factor as text for the representation of the module."""
        return f"{self.factor:.6g}"
