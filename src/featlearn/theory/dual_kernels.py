"""Infinitely wide layers: ``E[f(u) f(v)]`` for jointly Gaussian u and v, of activations and their derivatives."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
import torch
from torch import Tensor

from featlearn.errors import InputError

__all__ = ["ACTIVATIONS", "Activation", "as_activation", "pair_mean"]

Function = Callable[[Tensor], Tensor]
Kernel = Callable[[Tensor, Tensor, Tensor], Tensor]
_NODES = 96


@dataclass(frozen=True)
class Activation:
    """An activation and the kernels that it makes of an infinitely wide layer.

    Kernels take the covariance ``(q_ii, q_ij, q_jj)`` of two pre-activations.

    Attributes:
        kernel: ``E[phi(u) phi(v)]``.
        slope_kernel: ``E[phi'(u) phi'(v)]``.
    """

    kernel: Kernel
    slope_kernel: Kernel


def _relu(q11: Tensor, q12: Tensor, q22: Tensor) -> Tensor:
    """Of Cho and Saul: ``sqrt(q11 q22) (sin t + (pi - t) cos t) / (2 pi)``, with t the angle."""
    size = (q11 * q22).sqrt()
    t = (q12 / size).clamp(-1, 1).arccos()
    return size * (t.sin() + (math.pi - t) * t.cos()) / (2 * math.pi)


def _step(q11: Tensor, q12: Tensor, q22: Tensor) -> Tensor:
    return (math.pi - (q12 / (q11 * q22).sqrt()).clamp(-1, 1).arccos()) / (2 * math.pi)


def _erf(q11: Tensor, q12: Tensor, q22: Tensor) -> Tensor:
    return 2 / math.pi * (2 * q12 / ((1 + 2 * q11) * (1 + 2 * q22)).sqrt()).clamp(-1, 1).arcsin()


def _erf_slope(q11: Tensor, q12: Tensor, q22: Tensor) -> Tensor:
    return 4 / math.pi / ((1 + 2 * q11) * (1 + 2 * q22) - 4 * q12.square()).sqrt()


def _cdf(q11: Tensor, q12: Tensor, q22: Tensor) -> Tensor:
    """Of the normal distribution function: ``P(w < u, w' < v)`` for further independent normal w, w'."""
    return 0.25 + (q12 / ((1 + q11) * (1 + q22)).sqrt()).clamp(-1, 1).arcsin() / (2 * math.pi)


def _softplus_like(q11: Tensor, q12: Tensor, q22: Tensor) -> Tensor:
    """Of the antiderivative ``x Phi(x) + phi(x)`` of the distribution function."""
    return pair_mean(_normal_integral, q11, q12, q22)


def _normal_integral(x: Tensor) -> Tensor:
    below: Tensor = torch.special.ndtr(x)
    return x * below + torch.exp(-x.square() / 2) / math.sqrt(2 * math.pi)


ACTIVATIONS = {
    "relu": Activation(_relu, _step),
    "erf": Activation(_erf, _erf_slope),
    "quadratic": Activation(lambda a, b, c: a * c + 2 * b.square(), lambda a, b, c: 4 * b),
    "normal-integral": Activation(_softplus_like, _cdf),
    "linear": Activation(lambda a, b, c: b, lambda a, b, c: torch.ones_like(b)),
}
"""Activations with closed forms; "normal-integral" has the normal distribution function as its derivative."""


def as_activation(activation: str | tuple[Function, Function]) -> Activation:
    """An activation by its name, or from a function and its derivative, by quadrature."""
    if isinstance(activation, str):
        if activation not in ACTIVATIONS:
            raise InputError(
                f"no closed form for {activation!r}: choose from {', '.join(ACTIVATIONS)}, or pass (phi, derivative)"
            )
        return ACTIVATIONS[activation]
    if not isinstance(activation, tuple) or len(activation) != 2 or not all(callable(f) for f in activation):
        raise InputError(f"activation must be a name or a pair (phi, derivative) of functions, got {activation!r}")
    phi, slope = activation
    return Activation(lambda a, b, c: pair_mean(phi, a, b, c), lambda a, b, c: pair_mean(slope, a, b, c))


def pair_mean(function: Function, q11: Tensor, q12: Tensor, q22: Tensor) -> Tensor:
    """``E[f(u) f(v)]`` over centred Gaussian (u, v) of given covariance, elementwise, by a product of Gauss rules.

    For smooth functions exact to rounding. A jump, as of ReLU's derivative, leaves errors of some 1e-3: take its
    closed form.

    Args:
        function: Elementwise, smooth.
        q11: Variances of u.
        q12: Covariances.
        q22: Variances of v.

    Time: 96^2 values of the function for each entry.
    """
    z, w = _gauss_hermite()
    together = torch.broadcast_tensors(q11, q12, q22)  # type: ignore[no-untyped-call]
    shape = together[0].shape
    a, b, c = (q.to(torch.float64).reshape(-1) for q in together)
    found = torch.empty_like(a)
    step = max(1, 2**21 // len(z) ** 2)
    for first in range(0, len(a), step):
        s11, s12, s22 = (q[first : first + step, None] for q in (a, b, c))
        root = s11.sqrt()
        u = root * z
        share = torch.where(root > 0, s12 / root.clamp_min(torch.finfo(torch.double).tiny), 0.0)
        rest = (s22 - share.square()).clamp_min(0).sqrt()
        v = share[:, :, None] * z[:, None] + rest[:, :, None] * z
        found[first : first + step] = ((function(u) * w)[:, :, None] * function(v) * w).sum((1, 2))
    return found.reshape(shape)


@lru_cache(maxsize=1)
def _gauss_hermite() -> tuple[Tensor, Tensor]:
    nodes, weights = np.polynomial.hermite_e.hermegauss(_NODES)
    return torch.from_numpy(nodes), torch.from_numpy(weights / math.sqrt(2 * math.pi))
