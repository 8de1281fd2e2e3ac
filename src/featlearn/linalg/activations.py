"""Activation functions by name, as modules."""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable, Sequence
from functools import partial

import torch
from torch import Tensor, nn

from featlearn.errors import InputError
from featlearn.linalg.gaussian_quadrature import activation_constants

Activation = str | nn.Module | type[nn.Module] | Callable[..., "nn.Module | Tensor"]
"""A name, a module (copied), a factory of modules, or a function of a tensor."""


def _erf(h: Tensor) -> Tensor:
    return torch.erf(h)


_NAMED: dict[str, Callable[[], nn.Module]] = {
    "relu": nn.ReLU,
    "tanh": nn.Tanh,
    "gelu": nn.GELU,
    "silu": nn.SiLU,
    "softplus": nn.Softplus,
    "sigmoid": nn.Sigmoid,
    "identity": nn.Identity,
    "erf": lambda: Elementwise(_erf),
    "quadratic": lambda: Elementwise(torch.square),
}


def activation_module(activation: Activation) -> nn.Module:
    """A new module for an activation.

    Args:
        activation: One of relu, tanh, gelu, silu, softplus, sigmoid, erf, quadratic (h^2) and identity; a
            module, which is copied; a factory (a module class, a partial of one, or a function without
            arguments); or a function of a tensor, such as ``torch.sin``.
    """
    if isinstance(activation, str):
        if activation not in _NAMED:
            raise InputError(f"no activation is called {activation!r}: choose from {', '.join(sorted(_NAMED))}")
        return _NAMED[activation]()
    if isinstance(activation, nn.Module):
        return copy.deepcopy(activation)
    if _is_factory(activation):
        made = activation()
        if not isinstance(made, nn.Module):
            raise InputError(f"the activation factory must return a module, got {type(made).__name__}")
        return made
    if callable(activation):
        return Elementwise(activation)
    raise InputError(f"activation must be a name, a module or a function, got {type(activation).__name__}")


def normalized_activation(activation: Activation, kinks: Sequence[float] = ()) -> NormalizedActivation:
    """``(sigma(z) - E sigma) / sd sigma`` under z ~ N(0, 1) (spectral paper, assumption 4.2 and section 4).

    Args:
        activation: As in `activation_module`.
        kinks: Points other than multiples of 1/2 where the function, or a derivative of it, jumps.

    >>> round(float(normalized_activation("softplus")(torch.zeros(1))), 4)
    -0.2167
    """
    module = activation_module(activation)
    with torch.no_grad():
        # A copy, for the module may have parameters in another dtype.
        constants = activation_constants(copy.deepcopy(module).double(), kinks)
    return NormalizedActivation(module, constants.mean, constants.std)


def _is_factory(activation: object) -> bool:
    made_of = activation.func if isinstance(activation, partial) else activation
    if isinstance(made_of, type):
        return issubclass(made_of, nn.Module)
    if not callable(activation):
        return False
    try:
        return not inspect.signature(activation).parameters
    except ValueError:  # functions written in C, such as torch.sin, tell no signature
        return False


class Elementwise(nn.Module):
    """A function of a tensor as a module without parameters."""

    def __init__(self, function: Callable[..., nn.Module | Tensor]) -> None:
        super().__init__()
        self.function = function

    def forward(self, h: Tensor) -> Tensor:
        """The function at every entry of ``h``."""
        out = self.function(h)
        if not isinstance(out, Tensor):
            raise InputError(f"the activation must return a tensor, got {type(out).__name__}")
        return out

    def extra_repr(self) -> str:
        """Name of the function, for printing."""
        return getattr(self.function, "__name__", repr(self.function)).lstrip("_")


class NormalizedActivation(nn.Module):
    """See `normalized_activation`.

    Attributes:
        activation: The module before normalization.
        mean: What is taken off.
        std: What the rest is divided by.
    """

    def __init__(self, activation: nn.Module, mean: float, std: float) -> None:
        super().__init__()
        self.activation = activation
        self.mean = mean
        self.std = std

    def forward(self, h: Tensor) -> Tensor:
        """``(activation(h) - mean) / std``."""
        out: Tensor = self.activation(h)
        return (out - self.mean) / self.std

    def extra_repr(self) -> str:
        """The two constants, for printing."""
        return f"mean={self.mean:.6g}, std={self.std:.6g}"
