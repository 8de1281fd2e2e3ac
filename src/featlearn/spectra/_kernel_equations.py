"""Equations of the limiting laws of the kernels of random networks: sums over layers, and very wide layers.

References:
    Fan & Wang (2020), "Spectra of the conjugate kernel and neural tangent kernel for linear-width neural networks",
    https://arxiv.org/abs/2005.11879.

    Wang & Zhu (2021), "Deformed semicircle law and concentration of nonlinear random matrices for ultra-wide neural
    networks", https://arxiv.org/abs/2109.09304.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from featlearn.errors import InputError
from featlearn.spectra._laws import Law
from featlearn.spectra._transform_law import Array, Complex, law_of


def layers_law(squares: Sequence[float], n: int, sizes: Sequence[int], weights: Sequence[float], name: str) -> Law:
    """Return the law of ``sum_l q_l K_l`` of the kernels of layers 0 to L, see `LayerEquation`.

    Args:
        squares: Squared slopes ``b_l^2``, from 0 to 1, of layers 1 to L.
        n: Number of samples.
        sizes: Dimension of the inputs and widths of layers 1 to L.
        weights: Weights q_l of layers 0 to L, not negative; the last is positive. Either all but the last are zero, or
            ``q_{l-1} = b_l^2 q_l``.
        name: Name of the law with its arguments, for error messages.

    Returns:
        The law.

    Raises:
        InputError: If the density grows faster than ``x^(-1/2)`` at zero, which is not supported.
        FeatlearnError: If the computed law does not integrate to one.
    """
    # To a layer without linear part the one below is noise: it starts the recursion, as the data do.
    first = max(layer for layer, square in enumerate([0.0, *squares]) if square == 0)
    squares, sizes, weights = squares[first:], sizes[first:], weights[first:]
    ratios = [n / size for size in sizes]
    mean, edge, high = 0.0, 1.0, 0.0
    for square, ratio, weight in zip([0.0, *squares], ratios, weights, strict=True):
        edge = (1 - square + square * edge) * (1 + math.sqrt(ratio)) ** 2
        mean, high = mean + weight, high + weight * edge
    rank, hard = _rank(squares, n, sizes, sums=any(weights[:-1]), name=name)
    equation = LayerEquation(np.array([0.0, *squares]), np.array(ratios), np.array(weights))
    # Bounds of the edges of the layers; none is reached.
    return law_of(equation, low=0.0, high=1.001 * high, atom=1 - rank / n, mean=mean, hard=hard, name=name)


def _rank(squares: Sequence[float], n: int, sizes: Sequence[int], *, sums: bool, name: str) -> tuple[int, bool]:
    """Return the rank of a sum of kernels of layers, and whether it has a hard edge at zero."""
    linear = [False, *(square == 1 for square in squares)]
    if sums:
        # A linear layer adds nothing to the span of the layer below, a nonlinear one adds as many directions as units.
        total = sum(size for size, dull in zip(sizes, linear, strict=True) if not dull)
        return min(n, total), n == total
    # The top layer alone: linear layers hand on the rank of the layer below, a nonlinear one has full rank.
    first = max(layer for layer, dull in enumerate(linear) if not dull)
    limits = sorted([n, *sizes[first:]])
    if len(limits) > 2 and limits[0] == limits[2]:
        raise InputError(
            f"At most two of the sizes that limit the rank of {name} may be equal to the smallest, got {limits}: a "
            "density like x^(-2/3) at zero is not supported. Change one of the sizes by one."
        )
    return limits[0], limits[0] == limits[1]


def semicircle_law(square: float, n: int, d: int, name: str) -> Law:
    """Return the law of `SemicircleEquation`.

    Args:
        square: Squared slope ``b^2``, from 0 to 1.
        n: Number of samples.
        d: Dimension of the inputs.
        name: Name of the law with its arguments, for the error message.

    Returns:
        The law.

    Raises:
        FeatlearnError: If the computed law does not integrate to one.
    """
    high = 2.002 * (1 - square + square * (1 + math.sqrt(n / d)) ** 2)
    atom = max(0.0, 1 - d / n) if square == 1 else 0.0
    equation = SemicircleEquation(square, n / d)
    return law_of(equation, low=-high, high=high, atom=atom, mean=0.0, hard=False, name=name)


@dataclass(frozen=True, eq=False)
class LayerEquation:
    """Equation of the law of ``sum_l q_l K_l``, the kernels ``K_l = X_l^T X_l`` of layers 0 to L.

    The rows of X_l are independent given the layer below, with covariance ``(1 - b_l^2) I + b_l^2 K_{l-1}`` (the
    identity for l = 0). Removing the layers one after the other, from the top, leaves coefficients c_l of K_l and the
    identity:

        c_L = q_L,  c_{l-1} = q_{l-1} + b_l^2 p_l,  1/m = -z + sum_l (1 - b_l^2) p_l,  p_l = c_l / (1 + c_l g_l T_l),
        T_0 = m,  T_l = (1 - b_l^2) m + b_l^2 T_{l-1} / (1 + c_{l-1} g_{l-1} T_{l-1}),

    with ``g_l = n / d_l``. The unknowns are m and c_0 to c_{L-1}.

    Attributes:
        squares: ``b_l^2`` of layers 0 to L; that of layer 0, the data, is 0.
        ratios: ``g_l``, samples per unit of each layer.
        weights: ``q_l``.
    """

    squares: Array
    ratios: Array
    weights: Array

    @property
    def signs(self) -> Array:
        """Signs of the imaginary parts: 1 for m, and -1 for the coefficients."""
        result: Array = np.concatenate([[1.0], -np.ones(len(self.weights) - 1)])
        return result

    @property
    def start(self) -> Array:
        """Coefficients of the layers at infinity, where T = 0."""
        c = self.weights.copy()
        for layer in range(len(c) - 1, 0, -1):
            c[layer - 1] += self.squares[layer] * c[layer]
        result: Array = np.concatenate([[0.0], c[:-1]])
        return result

    def step(self, u: Complex, z: Complex) -> tuple[Complex, Complex]:
        """Return the map and its derivatives, by forward differentiation."""
        count, points = u.shape
        unit = np.eye(count)[:, :, None]
        image, derivative = np.empty_like(u), np.empty((count, count, points), dtype=np.complex128)
        t, dt = u[0], unit[0]
        total, dtotal = -z, np.zeros((count, points), dtype=np.complex128)
        tau, dtau = t, dt
        for layer, (square, ratio) in enumerate(zip(self.squares, self.ratios, strict=True)):
            if layer:
                t, dt = (1 - square) * u[0] + square * tau, (1 - square) * unit[0] + square * dtau
            top = layer == count - 1
            c, dc = (self.weights[-1], 0.0 * unit[0]) if top else (u[layer + 1], unit[layer + 1])
            inverse = 1 / (1 + ratio * c * t)
            dinverse = -(inverse**2) * ratio * (c * dt + t * dc)
            p, dp = c * inverse, c * dinverse + inverse * dc
            tau, dtau = t * inverse, t * dinverse + inverse * dt
            total, dtotal = total + (1 - square) * p, dtotal + (1 - square) * dp
            if layer:
                image[layer] = self.weights[layer - 1] + square * p
                derivative[layer] = square * dp
        image[0] = 1 / total
        derivative[0] = -(image[0] ** 2) * dtotal
        return image, derivative


@dataclass(frozen=True, eq=False)
class SemicircleEquation:
    """Equation of the free product of the semicircle law and the law of ``t = (1 - b^2) + b^2 x``, x Marchenko-Pastur.

    With ``g = n / d`` and ``p = 1 / (1 - g b^2 B m)`` the transform m and ``B = int t dmu / (-z - t B)`` solve

        1/m = -z - (1 - b^2) B - b^2 B p,  B = (1 - b^2) m + b^2 m p.

    Attributes:
        square: ``b^2``.
        ratio: g.
    """

    square: float
    ratio: float

    @property
    def signs(self) -> Array:
        """Signs of the imaginary parts: both are transforms of measures."""
        return np.ones(2)

    @property
    def start(self) -> Array:
        """Values at infinity: zero."""
        return np.zeros(2)

    def step(self, u: Complex, z: Complex) -> tuple[Complex, Complex]:
        """Return the map and its derivatives."""
        m, b = u
        rest, k = 1 - self.square, self.square * self.ratio
        p = 1 / (1 - k * b * m)
        p_m, p_b = p**2 * k * b, p**2 * k * m
        new = 1 / (-z - rest * b - self.square * b * p)
        image = np.stack([new, rest * m + self.square * m * p])
        derivative = np.stack([
            np.stack([new**2 * self.square * b * p_m, new**2 * (rest + self.square * (p + b * p_b))]),
            np.stack([rest + self.square * (p + m * p_m), self.square * m * p_b]),
        ])  # fmt: skip
        return image, derivative
