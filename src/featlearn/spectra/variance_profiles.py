"""Right edge of noise whose entries have variances that vary by row and column.

A matrix ``D_1 G D_2`` with independent entries G and diagonal scales has no signal, but its spectrum is not that of the
Marchenko-Pastur law. Its limiting law has a sharp right edge too, which follows from the scales.

References:
    Ajanki, Erdos & Krueger (2017), "Universality for general Wigner-type matrices", https://arxiv.org/abs/1506.05098.

    Couillet & Hachem (2014), "Analysis of the limiting spectral measure of large random matrices of the separable
    covariance type", https://arxiv.org/abs/1310.8094.

    Benaych-Georges & Nadakuditi (2012), "The singular values and vectors of low rank perturbations of large rectangular
    random matrices", https://arxiv.org/abs/1103.2221.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray
from scipy.optimize import brentq, minimize_scalar

from featlearn.errors import InputError
from featlearn.linalg.matrices import as_float64
from featlearn.spectra.tracy_widom import tracy_widom_sf

Array = NDArray[np.float64]

_NO_NOISE = 1e8  # eigenvalue over the edge, from which on noise does not move a signal
_TINY = 1e-12


@dataclass(frozen=True)
class Profile:
    """Variances ``row_i column_j`` of independent entries, and the right edge of the eigenvalues of ``W^T W``.

    With ``A(u) = sum_i r_i u / (1 - r_i u)`` and ``B(v) = sum_j c_j v / (1 - c_j v)`` a point z to the right of the
    spectrum has ``z u v = A(u) = B(v)``, where -u and -v are the averages ``sum_j c_j G_jj`` and ``sum_i r_i G_ii`` of
    the two resolvents at z. z falls with u down to the edge, where ``dz/du = 0``: a minimum in one variable.

    Attributes:
        rows: Factors r of the variances, one per row.
        columns: Factors c of the variances, one per column.
        edge: Right edge of the law.
        scale: Tracy-Widom scale of the largest eigenvalue.
        threshold: Singular value of a delocalized signal of rank one, from which on it makes a spike (BBP).
    """

    rows: Array = field(repr=False)
    columns: Array = field(repr=False)
    edge: float
    scale: float
    threshold: float

    def p_value(self, eigenvalue: float) -> float:
        """Return the probability that the largest eigenvalue without a signal exceeds a value.

        Args:
            eigenvalue: Eigenvalue of ``W^T W``.
        """
        if eigenvalue > _NO_NOISE * self.edge:
            return 0.0  # the quotient could overflow
        return float(tracy_widom_sf((eigenvalue - self.edge) / self.scale))

    def scaled(self, factor: float) -> Profile:
        """Return the profile with all variances times a factor.

        Args:
            factor: Factor, positive.
        """
        sizes = (factor * self.edge, factor * self.scale, math.sqrt(factor) * self.threshold)
        return Profile(factor * self.rows, self.columns, *sizes)

    def strength(self, eigenvalue: float) -> float:
        """Return the singular value of the delocalized signal whose spike is at an eigenvalue; NaN within the bulk.

        Args:
            eigenvalue: Eigenvalue of ``W^T W``.
        """
        if not eigenvalue > self.edge:
            return math.nan
        if eigenvalue > _NO_NOISE * self.edge:
            return math.sqrt(eigenvalue)
        left, right = self._resolvents(eigenvalue)
        return 1 / math.sqrt(left * right)

    def overlaps(self, eigenvalue: float) -> tuple[float, float]:
        """Return the squared cosines of the left and right singular vector of a spike with those of its signal.

        They are ``-2 p / (theta^2 D')`` with ``D = p q`` and the resolvents ``p = s/h tr (s^2 - W W^T)^-1``,
        ``q = s/d tr (s^2 - W^T W)^-1`` at the singular value s; NaN within the bulk.

        Args:
            eigenvalue: Eigenvalue of ``W^T W``.
        """
        if not eigenvalue > self.edge:
            return math.nan, math.nan
        if eigenvalue > _NO_NOISE * self.edge:
            return 1.0, 1.0
        step = 1e-5 * (eigenvalue - self.edge)
        s, below, above = (math.sqrt(x) for x in (eigenvalue, eigenvalue - step, eigenvalue + step))
        products = [math.prod(self._resolvents(x)) for x in (below**2, above**2)]
        slope = (products[1] - products[0]) / (above - below)
        left, right = self._resolvents(s**2)
        squares = (-2 * p * left * right / slope for p in (left, right))  # theta^2 = 1 / (p q)
        return tuple(min(1.0, max(0.0, x)) for x in squares)  # type: ignore[return-value]

    def _resolvents(self, z: float) -> tuple[float, float]:
        """Return p and q of `overlaps` at an eigenvalue to the right of the edge."""
        u, v = _resolve(self.rows, self.columns, z)
        s = math.sqrt(z)
        return float((1 / (1 - self.rows * u)).mean()) / s, float((1 / (1 - self.columns * v)).mean()) / s


def variance_profile(rows: Any, columns: Any) -> Profile:
    """Compute the right edge of the law of a matrix with independent entries of variances ``row_i column_j``.

    Time: ``O(rows + columns)`` for each of a few hundred evaluations of a sum.

    Args:
        rows: Factors of the variances by row, not negative.
        columns: Factors of the variances by column, not negative.

    Returns:
        The profile with its edge.

    Raises:
        InputError: A factor is negative or not finite, or all are zero.

    Example:
        >>> import numpy as np
        >>> from featlearn.spectra import variance_profile
        >>> round(variance_profile(np.ones(400), np.ones(100)).edge, 6)  # Marchenko-Pastur: (20 + 10)^2
        900.0
    """
    r, c = (np.asarray(as_float64(x)) for x in (rows, columns))
    for name, x in (("rows", r), ("columns", c)):
        if x.ndim != 1 or not np.isfinite(x).all() or (x < 0).any() or not x.any():
            raise InputError(f"{name} must be a vector of finite numbers, at least 0 and not all 0.")
    top_r, top_c = float(r.max()), float(c.max())
    a, b = r[r > 0] / top_r, c[c > 0] / top_c

    def log_z(t: float) -> float:
        u = 1 / (1 + math.exp(-t))
        sum_a = _sum(a, u)
        return math.log(sum_a) - math.log(u) - math.log(_invert(b, sum_a))

    u = 1 / (1 + math.exp(-float(minimize_scalar(log_z, bounds=(-16, 24), method="bounded").x)))
    u = _polish(a, b, u)
    value, first, second = _derivatives(a, u)
    v = _invert(b, value)
    _, first_b, second_b = _derivatives(b, v)
    slope = first / first_b
    bend = (second - second_b * slope**2) / first_b
    z = value / (u * v)
    curvature = z * (second / value - (first / value) ** 2 + 1 / u**2 - bend / v + (slope / v) ** 2)
    # The resolvent trace is -sum_j 1 / (z (1 - c_j v)), and u leaves the axis by i sqrt(2 (edge - x) / curvature).
    density = first_b * slope / z * math.sqrt(2 / curvature)
    p, q = ((x.size - y.size + float((1 / (1 - y * w)).sum())) / x.size for x, y, w in ((r, a, u), (c, b, v)))
    size = top_r * top_c
    return Profile(r, c, z * size, density ** (-2 / 3) * size, math.sqrt(z * size / (p * q)))


def _sum(a: Array, u: float) -> float:
    """Return ``sum a u / (1 - a u)``."""
    return float((a * u / (1 - a * u)).sum())


def _derivatives(a: Array, u: float) -> tuple[float, float, float]:
    """Return ``sum a u / (1 - a u)`` and its first two derivatives in u."""
    rest = 1 - a * u
    return _sum(a, u), float((a / rest**2).sum()), 2 * float((a**2 / rest**3).sum())


def _invert(b: Array, value: float) -> float:
    """Return the v in (0, 1) with ``sum b v / (1 - b v) = value``, for b of largest entry 1."""
    # One entry is 1 and the others are at most 1, so that v/(1-v) is between value / size and value.
    low, high = value / b.size / (1 + value / b.size), value / (1 + value)
    low, high = low * (1 - _TINY), min(high * (1 + _TINY), 1 - 1e-16)
    return float(brentq(lambda v: _sum(b, v) - value, low, high, xtol=1e-16, rtol=1e-14))


def _polish(a: Array, b: Array, u: float) -> float:
    """Compute the minimum of z by Newton's method from a search in values, which has half the digits."""
    for _ in range(3):
        value, first, second = _derivatives(a, u)
        v = _invert(b, value)
        _, first_b, second_b = _derivatives(b, v)
        slope = first / first_b
        bend = (second - second_b * slope**2) / first_b
        gradient = first / value - 1 / u - slope / v
        curvature = second / value - (first / value) ** 2 + 1 / u**2 - bend / v + (slope / v) ** 2
        step = gradient / curvature
        if not (curvature > 0 and 0 < u - step < 1):
            break
        u -= step
    return u


def _resolve(rows: Array, columns: Array, z: float) -> tuple[float, float]:
    """Return u and v at a point z to the right of the edge: the smaller solution in u."""
    top_r, top_c = float(rows.max()), float(columns.max())
    a, b = rows / top_r, columns / top_c
    goal = math.log(z / (top_r * top_c))

    def excess(t: float) -> float:
        u = 1 / (1 + math.exp(-t))
        value = _sum(a, u)
        return math.log(value) - math.log(u) - math.log(_invert(b, value)) - goal

    low = minimize_scalar(excess, bounds=(-16, 24), method="bounded").x
    t = float(low)
    if excess(t) < 0:
        t = float(brentq(excess, -36.0, t, xtol=1e-12))
    u = 1 / (1 + math.exp(-t))
    return u / top_r, _invert(b, _sum(a, u)) / top_c
