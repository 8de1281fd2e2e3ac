"""A bulk whose density is known point by point: its mass by a cosine series."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from scipy.fft import dct
from torch import Tensor

__all__ = ["SeriesBulk", "series_bulk"]

_FIRST, _LAST = 64, 2**15  # numbers of nodes
_ROUNDING = 1e-14


def series_bulk(density: Callable[[Tensor], Tensor], left: float, right: float) -> SeriesBulk:
    """The bulk of a density between two edges, where it vanishes like a square root.

    In the singular value, ``sqrt(x) = c - r cos t``, the mass per angle is smooth and even in t, so that its cosine
    series converges geometrically and is integrated term by term; nodes are doubled until it has converged. The
    singular value, and not x, because edges near zero are common and x has its pole there.

    A left edge of exactly 0 means a hard edge, where the density grows like ``1/sqrt(x)``: mirrored at zero, the
    singular values fill ``-sqrt(b) ... sqrt(b)``, whose two edges are square roots again.

    Args:
        density: Maps a float64 tensor of points strictly between the edges to the density.
        left: Left edge.
        right: Right edge.
    """
    low = -math.sqrt(right) if left == 0 else math.sqrt(left)
    centre, radius = (low + math.sqrt(right)) / 2, (math.sqrt(right) - low) / 2
    nodes = _FIRST
    while True:
        t = math.pi * (np.arange(nodes) + 0.5) / nodes
        s = torch.from_numpy(centre - radius * np.cos(t)).abs()
        # A mirrored law has the density |s| f(s^2) on either side, any other 2 s f(s^2).
        per_angle = density(s.square()) * s * (1 if left == 0 else 2) * radius * torch.from_numpy(np.sin(t))
        coefficients = np.asarray(dct(per_angle.numpy(), type=2)) / nodes
        coefficients[0] /= 2
        size = np.abs(coefficients).max()
        if np.abs(coefficients[-nodes // 8 :]).max() <= 1e-13 * size or nodes >= _LAST:
            break
        nodes *= 2
    kept = int(np.nonzero(np.abs(coefficients) > _ROUNDING * size)[0].max()) + 1
    return SeriesBulk(left, right, density, centre, radius, torch.from_numpy(coefficients[:kept].copy()))


@dataclass(frozen=True, eq=False)
class SeriesBulk:
    """See `series_bulk`. The angle is that of the singular value; at a hard edge it is twice what exceeds pi/2."""

    left: float
    right: float
    density: Callable[[Tensor], Tensor]
    centre: float
    radius: float
    coefficients: Tensor

    @property
    def mass(self) -> float:
        """The constant term alone has an integral over the whole range."""
        return math.pi * float(self.coefficients[0])

    def angle(self, x: Tensor) -> Tensor:
        """Angle of points between the edges."""
        s, (low, high) = x.sqrt(), (self.centre - self.radius, self.centre + self.radius)
        t = 2 * torch.atan2((s - low).clamp_min(0).sqrt(), (high - s).clamp_min(0).sqrt())
        return 2 * t - math.pi if self.left == 0 else t

    def point(self, angle: Tensor) -> Tensor:
        """Point of an angle."""
        t = self._inner(angle)
        low = self.centre - self.radius
        return (low + 2 * self.radius * (t / 2).sin().square()).square()

    def below(self, angle: Tensor) -> Tensor:
        """Mass below an angle: ``c_0 t + sum c_k sin(k t) / k``."""
        t = self._inner(angle)
        k = torch.arange(1, len(self.coefficients), dtype=torch.float64)
        total = self.coefficients[0] * t + _horner(self.coefficients[1:] / k, t).imag
        # The lower half of a mirrored law is the mirror's.
        mass = 2 * total - self.mass if self.left == 0 else total
        return mass.clamp(0.0, self.mass)

    def slope(self, angle: Tensor) -> Tensor:
        """Mass per angle."""
        # The mirror doubles the mass, and the angle moves twice as fast: the two cancel.
        return self.coefficients[0] + _horner(self.coefficients[1:], self._inner(angle)).real

    def _inner(self, angle: Tensor) -> Tensor:
        return (angle + math.pi) / 2 if self.left == 0 else angle


def _horner(coefficients: Tensor, t: Tensor) -> Tensor:
    """``sum_{k >= 1} c_k exp(i k t)``; on the unit circle Horner's rule loses no digits."""
    unit = torch.polar(torch.ones_like(t), t)
    total = torch.zeros_like(unit)
    for c in coefficients.flip(0).tolist():
        total = (total + c) * unit
    return total
