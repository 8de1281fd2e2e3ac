"""Expectations over a standard normal variable: moments, Hermite coefficients, constants of activations."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
import torch
from torch import Tensor

from featlearn._utils.validation import check_int
from featlearn.errors import InputError

Function = Callable[[Tensor], Tensor]

_REACH = 14.0  # the normal density is 1e-43 there
_PANELS = 56  # each is half a standard deviation wide
_ORDER = 24


def gaussian_mean(function: Function, kinks: Sequence[float] = ()) -> float:
    """Compute ``E[f(z)]`` for standard normal z, by Gauss-Legendre quadrature on panels of half a standard deviation.

    Smooth functions, and functions with kinks at multiples of 1/2 (such as ReLU at 0), are exact to about 1e-13 of the
    size of the integrand; a Gauss-Hermite rule would reach 1e-3 for ReLU.

    Args:
        function: Function that maps a float64 tensor elementwise. It must grow more slowly than ``exp(z^2 / 2)``.
        kinks: Further points where the function or one of its derivatives jumps.

    Returns:
        The expectation.

    Raises:
        InputError: If the function is not elementwise, or not finite between -14 and 14.

    Example:
        >>> import torch
        >>> from featlearn.linalg import gaussian_mean
        >>> round(gaussian_mean(torch.relu), 6)  # 1 / sqrt(2 pi)
        0.398942
        >>> round(gaussian_mean(lambda z: z**4), 6)
        3.0
    """
    z, weights = _rule(tuple(sorted(float(k) for k in kinks)))
    values = function(z)
    if not isinstance(values, Tensor) or values.shape != z.shape:
        raise InputError("function must map a tensor to a tensor of the same shape.")
    total = float((values.to(torch.float64) * weights).sum())
    if not math.isfinite(total):
        raise InputError("function must be finite between -14 and 14, got NaN or infinity.")
    return total


def gaussian_means(function: Function, deviations: Tensor) -> Tensor:
    """Compute ``E[f(s z)]`` for standard normal z and several standard deviations s, as `gaussian_mean` does.

    Args:
        function: Function that maps a float64 tensor elementwise, with kinks at 0 at most.
        deviations: Standard deviations, of any shape.

    Returns:
        The expectations, of the same shape.
    """
    z, weights = _rule(())
    return function(deviations.unsqueeze(-1) * z).to(torch.float64) @ weights


def hermite(z: Tensor, degree: int) -> Tensor:
    """Compute normalized probabilists' Hermite polynomials, orthonormal under N(0, 1).

    ``sqrt(k+1) h_{k+1} = z h_k - sqrt(k) h_{k-1}``.

    Args:
        z: Points at which the polynomials are evaluated, of any shape.
        degree: Highest degree, at least 0.

    Returns:
        ``h_0 ... h_degree`` at z, shape ``(degree + 1, *z.shape)``.

    Example:
        >>> import torch
        >>> from featlearn.linalg import hermite
        >>> values = hermite(torch.tensor([2.0]), degree=2)  # 1, z, (z^2 - 1) / sqrt(2)
        >>> [round(value, 4) for value in values.flatten().tolist()]
        [1.0, 2.0, 2.1213]
    """
    check_int("degree", degree, 0)
    rows = [torch.ones_like(z)]
    if degree > 0:
        rows.append(z)
    for k in range(1, degree):
        rows.append((z * rows[k] - math.sqrt(k) * rows[k - 1]) / math.sqrt(k + 1))
    return torch.stack(rows)


def hermite_coefficients(function: Function, degree: int, kinks: Sequence[float] = ()) -> Tensor:
    """Compute the Hermite coefficients ``c_k = E[f(z) h_k(z)]``, so that ``E[f^2] = sum c_k^2``.

    Args:
        function: Function that maps a float64 tensor elementwise.
        degree: Highest degree, at least 0.
        kinks: Points, other than multiples of 1/2, where the function or one of its derivatives jumps.

    Returns:
        ``c_0 ... c_degree``, shape ``(degree + 1,)``.

    Example:
        >>> from featlearn.linalg import hermite_coefficients
        >>> coefficients = hermite_coefficients(lambda z: z**2, degree=3)  # z^2 = 1 + sqrt(2) h_2
        >>> [abs(round(value, 4)) for value in coefficients.tolist()]
        [1.0, 0.0, 1.4142, 0.0]
    """
    z, weights = _rule(tuple(sorted(float(k) for k in kinks)))
    return hermite(z, degree) @ (function(z).to(torch.float64) * weights)


@dataclass(frozen=True)
class ActivationConstants:
    """Constants of an activation under a standard normal input.

    Attributes:
        mean: ``E[sigma(z)]``.
        std: Standard deviation of ``sigma(z)``.
        slope: ``b = E[sigma'(z)]`` of the normalized activation ``(sigma - mean) / std``.
        second: Second Hermite coefficient of the normalized activation; if it is not zero, spikes are expected at
            initialization.

    References:
        Wang, Engel, Sarwate, Dumitriu & Chiang (2022), "Spectral evolution and invariance in linear-width neural
        networks", https://arxiv.org/abs/2211.06506, section 4.
    """

    mean: float
    std: float
    slope: float
    second: float


def activation_constants(function: Function, kinks: Sequence[float] = ()) -> ActivationConstants:
    """Compute the constants of an activation and of its normalized form under N(0, 1).

    By Stein's identity ``E[sigma'(z)] = E[z sigma(z)]``, so no derivative is needed.

    Args:
        function: Activation, a function that maps a float64 tensor elementwise.
        kinks: Points, other than multiples of 1/2, where the function or one of its derivatives jumps.

    Returns:
        Mean, standard deviation, slope and second Hermite coefficient.

    Raises:
        InputError: If the activation is constant.

    Example:
        >>> import torch
        >>> from featlearn.linalg import activation_constants
        >>> constants = activation_constants(torch.relu)
        >>> round(constants.mean, 4), round(constants.slope, 4)
        (0.3989, 0.8564)
        >>> abs(round(activation_constants(torch.tanh).second, 4))  # 0 for odd functions
        0.0
    """
    mean = gaussian_mean(function, kinks)
    std = math.sqrt(gaussian_mean(lambda z: (function(z) - mean).square(), kinks))
    if not std > 1e-12 * max(1.0, abs(mean)):
        raise InputError("function must not be constant: a constant activation cannot be normalized.")
    coefficients = hermite_coefficients(function, 2, kinks) / std
    return ActivationConstants(mean, std, float(coefficients[1]), float(coefficients[2]))


@lru_cache(maxsize=32)
def _rule(kinks: tuple[float, ...]) -> tuple[Tensor, Tensor]:
    """Return nodes, and weights times the normal density."""
    edges = np.union1d(np.linspace(-_REACH, _REACH, _PANELS + 1), [k for k in kinks if abs(k) < _REACH])
    nodes, weights = np.polynomial.legendre.leggauss(_ORDER)
    half, middle = np.diff(edges) / 2, (edges[1:] + edges[:-1]) / 2
    z = (middle[:, None] + half[:, None] * nodes).ravel()
    w = (half[:, None] * weights).ravel() * np.exp(-(z**2) / 2) / math.sqrt(2 * math.pi)
    return torch.from_numpy(z), torch.from_numpy(w)
