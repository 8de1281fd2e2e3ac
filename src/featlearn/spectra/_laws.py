"""Limiting laws of eigenvalues: bulks of compact support and an atom.

A bulk is given in closed form (Marchenko-Pastur) or as a cosine series (`featlearn.spectra._series_bulk`).

References:
    Wang, Engel, Sarwate, Dumitriu & Chiang (2022), https://arxiv.org/abs/2211.06506 (the spectral paper).
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, Protocol

import torch
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
    """Distribution of eigenvalues: bulks from left to right, and an atom, usually at zero.

    Every method takes a number or an array and returns a float64 tensor of the same shape, on the CPU.

    Attributes:
        bulks: Intervals of the continuous part, from left to right.
        atom: Mass of the atom; 0 if there is none.
        mean: Mean of the whole law, including the atom.
        atom_at: Position of the atom.
    """

    bulks: tuple[Bulk, ...]
    atom: float
    mean: float
    atom_at: float = 0.0

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
            The shares, a float64 tensor of the shape of `x`. They increase by `atom` at `atom_at`.

        Raises:
            InputError: If `x` contains NaN.
        """
        points = _points(x)
        total = self.atom * (points >= self.atom_at).to(torch.float64)
        for bulk in self.bulks:
            total = total + bulk.below(bulk.angle(points.clamp(bulk.left, bulk.right)))
        return total.clamp(0.0, 1.0)

    def shifted(self, offset: float) -> Law:
        """Return the law of the eigenvalues of ``K + offset I``, where this is the law of K.

        Args:
            offset: Number added to every eigenvalue.

        Returns:
            The law, with bulks, atom and mean moved by the offset.

        Example:
            >>> from featlearn.spectra import marchenko_pastur
            >>> marchenko_pastur(400, 100).shifted(0.5).edges
            (0.75, 2.75)
        """
        bulks = tuple(_ShiftedBulk(bulk, offset) for bulk in self.bulks)
        return Law(bulks, self.atom, self.mean + offset, self.atom_at + offset)

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
        x = torch.full_like(shares, self.atom_at)
        within = self.atom > 0 and self.bulks[0].left < self.atom_at
        if within:  # an atom inside of a bulk: remove it from the shares, and restore it below
            original, below = shares, float(self.cdf(self.atom_at)) - self.atom
            shares = torch.where(shares > below, (shares - self.atom).clamp_min(below), shares)
        start = 0.0 if within else self.atom
        for i, bulk in enumerate(self.bulks):
            last = i + 1 == len(self.bulks)
            here = (shares > start) | (shares == 0) if start == 0 else shares > start
            here &= torch.ones_like(here) if last else shares <= start + bulk.mass
            x[here] = _invert(bulk, (shares[here] - start).clamp(0.0, bulk.mass))
            start += bulk.mass
        if within:
            x[(original > below) & (original <= below + self.atom)] = self.atom_at
            shares = original
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


@dataclass(frozen=True)
class _ShiftedBulk:
    """Bulk moved by an offset."""

    bulk: Bulk
    offset: float

    @property
    def left(self) -> float:
        return self.bulk.left + self.offset

    @property
    def right(self) -> float:
        return self.bulk.right + self.offset

    @property
    def mass(self) -> float:
        return self.bulk.mass

    def density(self, x: Tensor) -> Tensor:
        return self.bulk.density(self._back(x))

    def angle(self, x: Tensor) -> Tensor:
        return self.bulk.angle(self._back(x))

    def point(self, angle: Tensor) -> Tensor:
        return self.bulk.point(angle) + self.offset

    def below(self, angle: Tensor) -> Tensor:
        return self.bulk.below(angle)

    def slope(self, angle: Tensor) -> Tensor:
        return self.bulk.slope(angle)

    def _back(self, x: Tensor) -> Tensor:
        # Rounding must not move a point beyond an edge.
        return (x - self.offset).clamp(self.bulk.left, self.bulk.right)
