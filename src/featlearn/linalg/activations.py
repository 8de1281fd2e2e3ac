"""Activation functions as modules, by name and normalized."""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable, Sequence
from functools import partial

import torch
from torch import Tensor, nn

from featlearn._utils.validation import check_option
from featlearn.errors import InputError
from featlearn.linalg.gaussian_quadrature import activation_constants

Activation = str | nn.Module | type[nn.Module] | Callable[..., "nn.Module | Tensor"]
"""Name, module (copied), factory of modules, or function of a tensor."""


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
    """Create a module for an activation.

    Args:
        activation: One of "relu", "tanh", "gelu", "silu", "softplus", "sigmoid", "erf", "quadratic" (h^2) and
            "identity"; a module, which is copied; a factory (module class, partial of one, or function without
            arguments); or a function of a tensor, such as ``torch.sin``.

    Returns:
        A new module.

    Raises:
        InputError: If the activation is not one of these.

    Example:
        >>> activation_module("quadratic")(torch.tensor([3.0]))
        tensor([9.])
    """
    if isinstance(activation, str):
        return _NAMED[check_option("activation", activation, sorted(_NAMED))]()
    if isinstance(activation, nn.Module):
        return copy.deepcopy(activation)
    if _is_factory(activation):
        made = activation()
        if not isinstance(made, nn.Module):
            raise InputError(f"activation must return a module if it is a factory, got {type(made).__name__}.")
        return made
    if callable(activation):
        return Elementwise(activation)
    raise InputError(f"activation must be a name, a module or a function, got {type(activation).__name__}.")


def normalized_activation(activation: Activation, kinks: Sequence[float] = ()) -> NormalizedActivation:
    """Create a module for an activation with mean 0 and variance 1 under a standard normal input.

    ``(sigma(z) - E sigma) / sd sigma`` with z ~ N(0, 1).

    Args:
        activation: Name, module, factory or function, as for `activation_module`.
        kinks: Points, other than multiples of 1/2, where the function or one of its derivatives jumps.

    Returns:
        A new module.

    Example:
        >>> import torch
        >>> from featlearn.linalg import gaussian_mean, normalized_activation
        >>> activation = normalized_activation("softplus")
        >>> round(float(activation(torch.zeros(1))), 4)
        -0.2167
        >>> round(gaussian_mean(lambda z: activation(z) ** 2), 4)
        1.0

    References:
        Wang, Engel, Sarwate, Dumitriu & Chiang (2022), "Spectral evolution and invariance in linear-width neural
        networks", https://arxiv.org/abs/2211.06506, assumption 4.2 and section 4.
    """
    module = activation_module(activation)
    with torch.no_grad():
        # A copy, since the module can have parameters of another dtype.
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
    except ValueError:  # functions written in C, such as torch.sin, have no signature
        return False


class Elementwise(nn.Module):
    """Function of a tensor as a module without parameters.

    Args:
        function: Function that maps a tensor to a tensor of the same shape.
    """

    def __init__(self, function: Callable[..., nn.Module | Tensor]) -> None:
        super().__init__()
        self.function = function

    def forward(self, h: Tensor) -> Tensor:
        """Apply the function to every entry of ``h``."""
        out = self.function(h)
        if not isinstance(out, Tensor):
            raise InputError(f"activation must return a tensor, got {type(out).__name__}.")
        return out

    def extra_repr(self) -> str:
        """Return the name of the function, for printing."""
        return getattr(self.function, "__name__", repr(self.function)).lstrip("_")


class NormalizedActivation(nn.Module):
    """Activation with mean 0 and variance 1 under a standard normal input; made by `normalized_activation`.

    Attributes:
        activation: Module before normalization.
        mean: Mean of the activation, which is subtracted.
        std: Standard deviation of the activation, by which the difference is divided.
    """

    def __init__(self, activation: nn.Module, mean: float, std: float) -> None:
        super().__init__()
        self.activation = activation
        self.mean = mean
        self.std = std

    def forward(self, h: Tensor) -> Tensor:
        """Return ``(activation(h) - mean) / std``.

        Args:
            h: Tensor of pre-activations, of any shape.
        """
        out: Tensor = self.activation(h)
        return (out - self.mean) / self.std

    def extra_repr(self) -> str:
        """Return mean and standard deviation, for printing."""
        return f"mean={self.mean:.6g}, std={self.std:.6g}"
