"""Networks in the NTK parameterization: weights of order one, and the scale between the layers."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from itertools import pairwise

import torch
from torch import Tensor, nn

from featlearn._utils.public_names import renamed_arguments
from featlearn._utils.rng import Seed, as_generator
from featlearn.errors import InputError
from featlearn.linalg.activations import Activation, activation_module, normalized_activation
from featlearn.models.mlp import check_widths, linear_layer

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
