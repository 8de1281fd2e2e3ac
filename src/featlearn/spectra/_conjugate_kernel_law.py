"""Limiting law of the conjugate kernel of random layers: a deformed Marchenko-Pastur law.

References:
    Wang, Engel, Sarwate, Dumitriu & Chiang (2022), https://arxiv.org/abs/2211.06506, section 2 (the spectral paper).

    Fan & Wang (2020), "Spectra of the conjugate kernel and neural tangent kernel for linear-width neural networks",
    https://arxiv.org/abs/2005.11879.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
import torch
from numpy.polynomial import polynomial as poly
from numpy.typing import NDArray
from torch import Tensor

from featlearn.errors import FeatlearnError, InputError
from featlearn.linalg.gaussian_quadrature import activation_constants
from featlearn.spectra._kernel_equations import layers_law
from featlearn.spectra._laws import Law, marchenko_pastur
from featlearn.spectra._series_bulk import series_bulk

LINEAR = 1e-12  # distance of the slope from 1 below which the activation counts as linear
_MASS = 1e-6  # largest error of the total mass
_BLOCK = 65_536

Activation = Callable[[Tensor], Tensor]


def conjugate_kernel_law(
    activation_or_slope: Activation | float | Sequence[Activation | float],
    n: int,
    width: int | Sequence[int],
    d: int,
) -> Law:
    """Return the limiting law of the conjugate kernel ``X1^T X1`` (n x n), ``X1 = sigma(W X / sqrt d) / sqrt(width)``.

    W (width x d) and X (d x n) have standard normal entries, and all sizes are large. The activation sigma is centered
    and normalized under N(0, 1); a callable is normalized by this function. The law depends on it only through
    ``b = E[sigma'(z)]``. The population law is that of ``t = (1 - b^2) + b^2 x``, where x is Marchenko-Pastur of ratio
    n/d (with the atom ``1 - d/n`` if n > d), and with ``g = n / width`` the companion transform v solves

        z = -1/v + g int t / (1 + t v) dmu(t).

    The Stieltjes transform of x is algebraic, and therefore that of the kernel is, too. With ``u = b^2 n/d``,
    ``Q(y) = (1 - b^2) u y^2 + (1 - u) y - 1`` and ``v = -y (1 + u y) / Q``,

        z y (1 + u y)^2 = (1 - g) Q (1 + u y) - g Q^2

    is a quartic in y. Its root in the upper half plane gives the density, and the critical points of z(y) are the
    edges. If d < n and the layer is wide, the law can have two bulks: one of the linear part of sigma, and one of the
    rest.

    With L layers, ``X_l = sigma(W_l X_{l-1}) / sqrt(width_l)`` and ``X_0 = X / sqrt d``, the law of ``X_L^T X_L`` is

        mu_l = MP(n / width_l) boxtimes ((1 - b_l^2) + b_l^2 mu_{l-1}),  mu_0 = MP(n / d),

    where boxtimes is the free multiplicative convolution. The transforms of all layers are computed together, see
    `featlearn.spectra.tangent_kernel_law`. Edges are accurate to about 1e-12, and to 1e-8 if one comes close to zero.
    Time: 0.3 to 0.5 seconds for two to four layers; a few milliseconds for one.

    An activation with a second Hermite coefficient (softplus, ReLU) causes spikes beyond this law.

    Args:
        activation_or_slope: Activation function, or the slope b of the normalized activation, between -1 and 1; or a
            sequence of them, one per layer.
        n: Number of samples, positive.
        width: Width of the layer, positive; or a sequence of widths, one per layer.
        d: Dimension of the inputs, positive.

    Returns:
        The law of the eigenvalues of the kernel.

    Raises:
        InputError: If a size is not positive, a slope is not between -1 and 1, activations and widths differ in number,
            or the activation is linear and three of the sizes are equal to the smallest.
        FeatlearnError: If the computed law does not integrate to one.

    References:
        Wang, Engel, Sarwate, Dumitriu & Chiang (2022), https://arxiv.org/abs/2211.06506, section 2.

        Fan & Wang (2020), https://arxiv.org/abs/2005.11879, theorem 3.4.

    Example:
        >>> import torch
        >>> from featlearn.spectra import conjugate_kernel_law
        >>> left, right = conjugate_kernel_law(torch.tanh, n=1000, width=750, d=500).edges
        >>> round(right, 3)
        9.177
        >>> round(conjugate_kernel_law(torch.tanh, n=1000, width=[750, 750], d=500).edges[1], 3)
        12.141
    """
    widths, activations = layer_arguments(activation_or_slope, n, width, d)
    slopes = [slope_of(one) for one in activations]
    squares = [1.0 if abs(slope) > 1 - LINEAR else slope * slope for slope in slopes]
    if len(widths) > 1:
        name = f"the conjugate kernel with squared slopes {squares}, n={n}, widths={widths}, d={d}"
        return layers_law(squares, n, [d, *widths], [0.0] * len(widths) + [1.0], name)
    return _one_layer(slopes[0], squares[0], n, widths[0], d)


def layer_arguments(activation: object, n: int, width: int | Sequence[int], d: int) -> tuple[list[int], list[Any]]:
    """Validate the sizes of a network; return its widths and its activations, one per layer."""
    widths = list(width) if isinstance(width, Iterable) else [width]
    for name, value in (("n", n), *(("width", one) for one in widths), ("d", d)):
        if not (math.isfinite(value) and value > 0):
            raise InputError(f"{name} must be positive and finite, got {value!r}.")
    several = isinstance(activation, Sequence) and not isinstance(activation, str)
    activations = list(activation) if several else [activation] * len(widths)  # type: ignore[call-overload]
    if not widths or len(activations) != len(widths):
        raise InputError(
            f"There must be one activation per width and at least one width, got {len(activations)} and {len(widths)}."
        )
    return widths, activations


def _one_layer(slope: float, square: float, n: int, width: int, d: int) -> Law:
    """Return the law of one layer, by its quartic equation."""
    if square * n / d < 1e-10 or square < 1e-7:
        return marchenko_pastur(width, n)  # t = 1 up to rounding: no linear part is left
    sizes = sorted((n, width, d) if square == 1 else (n, width))
    if len(sizes) == 3 and sizes[0] == sizes[2]:
        raise InputError(
            f"n, width and d must not all be equal for a linear activation, got {n}: a density like x^(-2/3) at zero "
            "is not supported. Change one of the sizes by one."
        )
    equation = _Equation(square, square * n / d, n / width)
    # Zero is a hard edge if two of the sizes that limit the rank are equal to the smallest.
    bulks = tuple(series_bulk(equation.density, *edges) for edges in equation.bulks(hard=sizes[0] == sizes[1]))
    atom = max(0.0, 1 - sizes[0] / n)
    total = atom + sum(bulk.mass for bulk in bulks)
    if abs(total - 1) > _MASS:
        raise FeatlearnError(
            f"The conjugate-kernel law of slope {slope:g}, n={n}, width={width}, d={d} integrates to {total:.9f} "
            "instead of 1. Please report these numbers."
        )
    return Law(bulks, atom, 1.0)


def slope_of(activation_or_slope: Activation | float) -> float:
    """Return the slope b of an activation, which is normalized, or validate a given one."""
    if callable(activation_or_slope):
        return activation_constants(activation_or_slope).slope
    if isinstance(activation_or_slope, bool) or not isinstance(activation_or_slope, (int, float)):
        raise InputError(
            "activation_or_slope must be a callable or the slope b as a number, got "
            f"{type(activation_or_slope).__name__}."
        )
    slope = float(activation_or_slope)
    if not abs(slope) <= 1:
        raise InputError(f"The slope of a normalized activation must be between -1 and 1 (Parseval), got {slope:g}.")
    return slope


@dataclass(frozen=True)
class _Equation:
    """Quartic equation of `conjugate_kernel_law`. Polynomials are coefficients in ascending order."""

    square: float
    u: float
    g: float

    @property
    def _q(self) -> NDArray[np.float64]:
        return np.array([-1.0, 1 - self.u, (1 - self.square) * self.u])

    @property
    def _numerator(self) -> NDArray[np.float64]:
        """Numerator N of ``z = N / (y (1 + u y)^2)``."""
        q = self._q
        result: NDArray[np.float64] = poly.polysub(
            (1 - self.g) * poly.polymul(q, [1, self.u]), self.g * poly.polymul(q, q)
        )
        return np.pad(result, (0, 5 - len(result)))

    def bulks(self, *, hard: bool) -> list[tuple[float, float]]:
        """Return the edges of the bulks, from left to right."""
        n, u = self._numerator, self.u
        # z' = 0, without the factor (1 + u y)^2 / (y (1 + u y)^2)^2.
        critical = poly.polysub(poly.polymul(poly.polyder(n), [0, 1, u]), poly.polymul(n, [1, 3 * u]))
        roots = _roots(critical.astype(np.float64))
        y = roots.real[np.abs(roots.imag) < 1e-7 * np.abs(roots)]
        # s is a transform only where w(s), the inverse of the Marchenko-Pastur transform, increases.
        y = y[(1 + u * y) ** 2 > u * self.square * y * y]
        z = poly.polyval(y, n) / (y * (1 + u * y) ** 2)
        floor = 1e-13 * z.max() if hard else 0.0  # a hard edge is a root, too, up to rounding
        edges = [*([0.0] if hard else []), *sorted(float(e) for e in z if e > floor)]
        middles = torch.tensor([(a + b) / 2 for a, b in pairwise(edges)], dtype=torch.float64)
        inside = (self.density(middles) > 0).tolist()
        return [(a, b) for (a, b), kept in zip(pairwise(edges), inside, strict=True) if kept]

    def density(self, x: Tensor) -> Tensor:
        """Compute the density ``Im v / (pi g)`` on the real line."""
        flat = x.reshape(-1).numpy()
        blocks = [self._density(flat[i : i + _BLOCK]) for i in range(0, len(flat), _BLOCK)]
        return torch.from_numpy(np.concatenate(blocks) if blocks else flat.copy()).reshape(x.shape)

    def _density(self, z: NDArray[np.float64]) -> NDArray[np.float64]:
        u = self.u
        coefficients = np.tile(self._numerator, (len(z), 1))
        coefficients[:, 1:4] -= np.outer(z, [1, 2 * u, u * u])
        degree = 4 if self.square < 1 else 3  # the leading term vanishes for a linear activation
        y = _stacked_roots(coefficients[:, : degree + 1])
        # The transform is the root for which v, the transform s of x and its companion are all in the upper half
        # plane (s has the sign of y). The other roots solve the quartic on another sheet.
        with np.errstate(divide="ignore", invalid="ignore"):  # poles are roots on another sheet
            v = -y * (1 + u * y) / poly.polyval(y, self._q)
            w = (-1 / v - (1 - self.square)) / self.square
            companion = -1 / (w * (1 + u * y))
        valid = (y.imag > 0) & (v.imag > 0) & (companion.imag > 0)
        result: NDArray[np.float64] = np.where(valid, v.imag, 0.0).max(1) / (math.pi * self.g)
        return result


def _roots(coefficients: NDArray[np.float64]) -> NDArray[np.complex128]:
    top = int(np.nonzero(coefficients)[0].max())
    roots: NDArray[np.complex128] = _stacked_roots(coefficients[None, : top + 1])[0]
    return roots


def _stacked_roots(coefficients: NDArray[np.float64]) -> NDArray[np.complex128]:
    """Compute the roots of polynomials of the same degree, one per row of coefficients.

    The roots are eigenvalues of companion matrices, refined by Newton's method.
    """
    count, degree = len(coefficients), coefficients.shape[1] - 1
    companion = np.zeros((count, degree, degree))
    companion[:, np.arange(1, degree), np.arange(degree - 1)] = 1
    companion[:, :, -1] = -coefficients[:, :-1] / coefficients[:, -1:]
    roots = np.linalg.eigvals(companion).astype(np.complex128)
    factors = np.arange(1, degree + 1)
    for _ in range(2):
        value, slope = _polyval(roots, coefficients), _polyval(roots, coefficients[:, 1:] * factors)
        with np.errstate(divide="ignore", invalid="ignore"):
            step = value / slope
        # At a double root the step is noise: accept only steps far below the size of the root.
        roots = roots - np.where(np.abs(step) < 1e-6 * np.abs(roots), step, 0.0)
    return roots


def _polyval(x: NDArray[np.complex128], coefficients: NDArray[np.float64]) -> NDArray[np.complex128]:
    total = np.zeros_like(x)
    for column in coefficients.T[::-1]:
        total = total * x + column[:, None]
    return total
