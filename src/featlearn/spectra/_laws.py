"""Limiting laws of eigenvalues: bulks of compact support and an atom at zero.

A bulk is given in closed form (Marchenko-Pastur) or as a cosine series.

References:
    Wang, Engel, Sarwate, Dumitriu & Chiang (2022), https://arxiv.org/abs/2211.06506 (the spectral paper).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import torch
from scipy.fft import dct
from torch import Tensor

from featlearn.errors import InputError
from featlearn.linalg.matrices import as_float64

_NEWTON_STEPS = 100  # bisection alone needs 53 steps, Newton's method about 8
_ROUNDING = 1e-15


def marchenko_pastur(rows: float, columns: float, *, variance: float = 1.0, scale: float | None = None) -> Law:
    """Return the Marchenko-Pastur law of the eigenvalues of ``W^T W / scale``, W with independent entries.

    The density is ``f(x) = sqrt((x - a)(b - x)) / (2 pi kappa x)`` between the edges
    ``a, b = variance (sqrt(rows) -+ sqrt(columns))^2 / scale``, with ``kappa = variance columns / scale``. If W has
    fewer rows than columns, the law has an atom ``1 - rows/columns`` at zero.

    The normalizations of the spectral paper, for W (h x d) and X (d x n) with entries of variance 1:

    - weights, ``W^T W / N`` (d x d): ``marchenko_pastur(h, d, scale=N)``; N = h is the default;
    - the other side, ``W W^T / N`` (h x h): ``marchenko_pastur(d, h, scale=N)``;
    - singular values of W: the square roots of the eigenvalues with ``scale=1``;
    - data, ``X^T X / d`` (n x n): ``marchenko_pastur(d, n)``; ``X X^T / n`` (d x d): ``marchenko_pastur(n, d)``;
      ``X X^T / d`` (d x d): ``marchenko_pastur(n, d, scale=d)``;
    - PyTorch's default layer, entries uniform on ``+-1/sqrt(d)``: ``variance=1/(3 d), scale=1`` for ``W^T W``.

    Args:
        rows: Number of rows of W, the dimension that is summed over; positive.
        columns: Number of columns of W, the size of ``W^T W``; positive.
        variance: Variance of an entry of W, positive.
        scale: Divisor of ``W^T W``, positive. None divides by `rows`.

    Returns:
        The law.

    Raises:
        InputError: If an argument is not positive and finite.

    References:
        Wang, Engel, Sarwate, Dumitriu & Chiang (2022), https://arxiv.org/abs/2211.06506.

    Example:
        >>> from featlearn.spectra import marchenko_pastur
        >>> marchenko_pastur(400, 100).edges
        (0.25, 2.25)
    """
    divisor = rows if scale is None else scale
    for name, value in (("rows", rows), ("columns", columns), ("variance", variance), ("scale", divisor)):
        if not (math.isfinite(value) and value > 0):
            raise InputError(f"{name} must be positive and finite, got {value!r}.")
    kappa = variance * columns / divisor
    left, right = (variance * (math.sqrt(rows) + sign * math.sqrt(columns)) ** 2 / divisor for sign in (-1, 1))
    bulk = _MarchenkoPasturBulk(left, right, min(rows / columns, 1.0), kappa)
    return Law((bulk,), max(0.0, 1 - rows / columns), variance * rows / divisor)


class Bulk(Protocol):
    """Interval of the support of a law, parametrized by an angle.

    The angle runs from 0 at the left edge to pi at the right edge. It removes the square roots of the density at the
    edges, so that the mass below is a smooth function of the angle.
    """

    @property
    def left(self) -> float:
        """Left edge of the bulk."""

    @property
    def right(self) -> float:
        """Right edge of the bulk."""

    @property
    def mass(self) -> float:
        """Share of all eigenvalues that are in the bulk."""

    def density(self, x: Tensor) -> Tensor:
        """Return the density at points strictly between the edges."""

    def angle(self, x: Tensor) -> Tensor:
        """Return the angles of points between the edges."""

    def point(self, angle: Tensor) -> Tensor:
        """Return the points at some angles: the inverse of `angle`."""

    def below(self, angle: Tensor) -> Tensor:
        """Return the mass of the bulk below each angle."""

    def slope(self, angle: Tensor) -> Tensor:
        """Return the derivative of `below`, the mass per angle."""


@dataclass(frozen=True)
class Law:
    """Distribution of eigenvalues on the half line: bulks from left to right, and an atom at zero.

    Every method takes a number or an array and returns a float64 tensor of the same shape, on the CPU.

    Attributes:
        bulks: Intervals of the continuous part, from left to right.
        atom: Mass at zero.
        mean: Mean of the whole law, including the atom.
    """

    bulks: tuple[Bulk, ...]
    atom: float
    mean: float

    @property
    def edges(self) -> tuple[float, float]:
        """Left edge of the first bulk and right edge of the last."""
        return self.bulks[0].left, self.bulks[-1].right

    @property
    def intervals(self) -> tuple[tuple[float, float], ...]:
        """Left and right edge of each bulk."""
        return tuple((bulk.left, bulk.right) for bulk in self.bulks)

    def pdf(self, x: Any) -> Tensor:
        """Return the density of the continuous part, which integrates to ``1 - atom``.

        Args:
            x: Points at which to evaluate the density: a number, array or tensor without NaN.

        Returns:
            The density, a float64 tensor of the shape of `x`; zero outside of the bulks and on their edges.

        Raises:
            InputError: If `x` contains NaN.
        """
        points = _points(x)
        density = torch.zeros_like(points)
        for bulk in self.bulks:
            inside = (points > bulk.left) & (points < bulk.right)
            density[inside] = bulk.density(points[inside])
        return density

    def cdf(self, x: Any) -> Tensor:
        """Return the share of the eigenvalues that are at most x.

        Args:
            x: Points at which to evaluate the distribution function: a number, array or tensor without NaN.

        Returns:
            The shares, a float64 tensor of the shape of `x`. They increase by `atom` at zero.

        Raises:
            InputError: If `x` contains NaN.
        """
        points = _points(x)
        total = self.atom * (points >= 0).to(torch.float64)
        for bulk in self.bulks:
            total = total + bulk.below(bulk.angle(points.clamp(bulk.left, bulk.right)))
        return total.clamp(0.0, 1.0)

    def quantile(self, q: Any) -> Tensor:
        """Return the smallest x with ``cdf(x) >= q``.

        Args:
            q: Shares between 0 and 1: a number, array or tensor.

        Returns:
            The quantiles, a float64 tensor of the shape of `q`. The quantile of 0 is the left edge of the support.

        Raises:
            InputError: If a share is NaN, or not between 0 and 1.

        Example:
            >>> from featlearn.spectra import marchenko_pastur
            >>> marchenko_pastur(400, 100).quantile([0.0, 1.0]).tolist()
            [0.25, 2.25]
        """
        shares = _points(q)
        if ((shares < 0) | (shares > 1)).any():
            raise InputError(
                f"q must be between 0 and 1, got values from {float(shares.min()):g} to {float(shares.max()):g}."
            )
        x = torch.zeros_like(shares)
        start = self.atom
        for i, bulk in enumerate(self.bulks):
            last = i + 1 == len(self.bulks)
            here = (shares > start) | (shares == 0) if start == 0 else shares > start
            here &= torch.ones_like(here) if last else shares <= start + bulk.mass
            x[here] = _invert(bulk, (shares[here] - start).clamp(0.0, bulk.mass))
            start += bulk.mass
        x[shares == 1] = self.edges[1]  # the masses add up to one up to rounding
        return x


def _points(x: Any) -> Tensor:
    points = as_float64(x).cpu()
    if torch.isnan(points).any():
        raise InputError("The arguments of a law must not contain NaN.")
    return points


def _invert(bulk: Bulk, target: Tensor) -> Tensor:
    """Return the points below which a bulk has the target masses, by Newton's method in the angle within a bracket."""
    angles = math.pi * target / bulk.mass
    unsolved = torch.arange(target.numel())
    angle, goal = angles.clone(), target
    low, high = torch.zeros_like(goal), torch.full_like(goal, math.pi)
    for _ in range(_NEWTON_STEPS):
        excess = bulk.below(angle) - goal
        angles[unsolved] = angle
        low, high = torch.where(excess <= 0, angle, low), torch.where(excess >= 0, angle, high)
        step = angle - excess / bulk.slope(angle).clamp_min(torch.finfo(torch.float64).tiny)
        # Near an edge the mass grows like the cube of the angle, and Newton's method may leave the bracket.
        angle = torch.where((step > low) & (step < high), step, (low + high) / 2)
        left = (excess.abs() > _ROUNDING) & (high - low > _ROUNDING)
        if not left.any():
            break
        unsolved, angle, goal, low, high = (a[left] for a in (unsolved, angle, goal, low, high))
    x = bulk.point(angles)
    return torch.where(target <= 0, bulk.left, torch.where(target >= bulk.mass, bulk.right, x))


@dataclass(frozen=True)
class _MarchenkoPasturBulk:
    """Bulk of a Marchenko-Pastur law, ``x = a cos^2(t/2) + b sin^2(t/2)``; the mass below is elementary."""

    left: float
    right: float
    mass: float
    kappa: float

    def density(self, x: Tensor) -> Tensor:
        return ((x - self.left) * (self.right - x)).sqrt() / (2 * math.pi * self.kappa * x)

    def angle(self, x: Tensor) -> Tensor:
        return 2 * torch.atan2((x - self.left).sqrt(), (self.right - x).sqrt())

    def point(self, angle: Tensor) -> Tensor:
        return self.left + (self.right - self.left) * (angle / 2).sin().square()

    def below(self, angle: Tensor) -> Tensor:
        # int sqrt((x-a)(b-x))/x dx = sqrt((x-a)(b-x)) + (a+b)/2 t - sqrt(ab) s, where tan(s/2) = sqrt(b/a) tan(t/2);
        # the usual form with arcsines of x would lose half the digits at the edges.
        a, b = self.left, self.right
        half = angle / 2
        inner = 2 * torch.atan2(math.sqrt(b) * half.sin(), math.sqrt(a) * half.cos())
        area = (b - a) / 2 * angle.sin() + (a + b) / 2 * angle - math.sqrt(a * b) * inner
        return (area / (2 * math.pi * self.kappa)).clamp(0.0, self.mass)

    def slope(self, angle: Tensor) -> Tensor:
        x, radius = self.point(angle), (self.right - self.left) / 2
        if self.left == 0:  # at a hard edge (r sin t)^2 / x is 0/0; its limit is finite
            return 2 * radius * (angle / 2).cos().square() / (2 * math.pi * self.kappa)
        return (radius * angle.sin()).square() / (2 * math.pi * self.kappa * x)


_FIRST, _LAST = 64, 2**15  # smallest and largest number of nodes
_SERIES_ROUNDING = 1e-14


def series_bulk(density: Callable[[Tensor], Tensor], left: float, right: float) -> SeriesBulk:
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
        if np.abs(coefficients[-nodes // 8 :]).max() <= 1e-13 * size or nodes >= _LAST:
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
