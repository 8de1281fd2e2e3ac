"""Bulks of limiting laws as cosine series of the mass per angle."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from scipy.fft import dct
from torch import Tensor

_FIRST, _LAST = 64, 2**15  # smallest and largest number of nodes
_SERIES_ROUNDING = 1e-14


def series_bulk(
    density: Callable[[Tensor], Tensor],
    left: float,
    right: float,
    *,
    tolerance: float = 1e-13,
    most: int = _LAST,
) -> SeriesBulk:
    """Build the bulk of a density that vanishes like a square root at two edges.

    In the singular value, ``sqrt(x) = c - r cos t``, the mass per angle is smooth and even in t, so that its cosine
    series converges geometrically and is integrated term by term. The number of nodes is doubled until the series has
    converged. The angle is that of the singular value instead of x, because edges near zero are common and x has its
    pole at zero.

    A left edge of exactly 0 is a hard edge, where the density grows like ``1/sqrt(x)``: mirrored at zero, the singular
    values fill ``-sqrt(b) ... sqrt(b)``, and both edges are square roots again.

    Args:
        density: Function that maps a float64 tensor of points strictly between the edges to the density.
        left: Left edge; 0 for a hard edge.
        right: Right edge.
        tolerance: Size of the last coefficients, over the largest, at which the series counts as converged.
        most: Largest number of nodes, a power of 2.

    Returns:
        The bulk.
    """
    low = -math.sqrt(right) if left == 0 else math.sqrt(left)
    center, radius = (low + math.sqrt(right)) / 2, (math.sqrt(right) - low) / 2
    nodes = _FIRST
    while True:
        t = math.pi * (np.arange(nodes) + 0.5) / nodes
        s = torch.from_numpy(center - radius * np.cos(t)).abs()
        # A mirrored law has the density |s| f(s^2) on either side, other laws have 2 s f(s^2).
        per_angle = density(s.square()) * s * (1 if left == 0 else 2) * radius * torch.from_numpy(np.sin(t))
        coefficients = np.asarray(dct(per_angle.numpy(), type=2)) / nodes
        coefficients[0] /= 2
        size = np.abs(coefficients).max()
        if np.abs(coefficients[-nodes // 8 :]).max() <= tolerance * size or nodes >= most:
            break
        nodes *= 2
    kept = int(np.nonzero(np.abs(coefficients) > _SERIES_ROUNDING * size)[0].max()) + 1
    return SeriesBulk(left, right, density, center, radius, torch.from_numpy(coefficients[:kept].copy()))


@dataclass(frozen=True, eq=False)
class SeriesBulk:
    """Bulk given by a cosine series, see `series_bulk`.

    The angle is that of the singular value; at a hard edge it is twice the excess over pi/2.

    Attributes:
        left: Left edge of the bulk.
        right: Right edge of the bulk.
        density: Function that maps points to the density.
        center: Center of the singular values.
        radius: Half the length of their interval.
        coefficients: Coefficients of the cosine series of the mass per angle.
    """

    left: float
    right: float
    density: Callable[[Tensor], Tensor]
    center: float
    radius: float
    coefficients: Tensor

    @property
    def mass(self) -> float:
        """Share of all eigenvalues that are in the bulk: only the constant term contributes to the whole range."""
        return math.pi * float(self.coefficients[0])

    def angle(self, x: Tensor) -> Tensor:
        """Return the angles of points between the edges."""
        s, (low, high) = x.sqrt(), (self.center - self.radius, self.center + self.radius)
        t = 2 * torch.atan2((s - low).clamp_min(0).sqrt(), (high - s).clamp_min(0).sqrt())
        return 2 * t - math.pi if self.left == 0 else t

    def point(self, angle: Tensor) -> Tensor:
        """Return the points at some angles."""
        t = self._inner(angle)
        low = self.center - self.radius
        return (low + 2 * self.radius * (t / 2).sin().square()).square()

    def below(self, angle: Tensor) -> Tensor:
        """Return the mass below each angle, ``c_0 t + sum c_k sin(k t) / k``."""
        t = self._inner(angle)
        k = torch.arange(1, len(self.coefficients), dtype=torch.float64)
        total = self.coefficients[0] * t + _horner(self.coefficients[1:] / k, t).imag
        # The lower half of a mirrored law belongs to the mirror image.
        mass = 2 * total - self.mass if self.left == 0 else total
        return mass.clamp(0.0, self.mass)

    def slope(self, angle: Tensor) -> Tensor:
        """Return the mass per angle."""
        # The mirror image doubles the mass, and the angle runs twice as fast: the factors cancel.
        return self.coefficients[0] + _horner(self.coefficients[1:], self._inner(angle)).real

    def _inner(self, angle: Tensor) -> Tensor:
        return (angle + math.pi) / 2 if self.left == 0 else angle


def _horner(coefficients: Tensor, t: Tensor) -> Tensor:
    """Compute ``sum_{k >= 1} c_k exp(i k t)`` by Horner's rule, which is stable on the unit circle."""
    unit = torch.polar(torch.ones_like(t), t)
    total = torch.zeros_like(unit)
    for c in coefficients.flip(0).tolist():
        total = (total + c) * unit
    return total
