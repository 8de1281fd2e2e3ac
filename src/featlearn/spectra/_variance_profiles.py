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
from scipy.optimize import brentq

from featlearn.errors import InputError
from featlearn.linalg.matrices import as_float64
from featlearn.spectra._tracy_widom import tracy_widom_sf

Array = NDArray[np.float64]

_NO_NOISE = 1e8  # eigenvalue over the edge, from which on noise does not move a signal
_TINY = 1e-13
_MOST_STEPS = 200
_RANGE = (-36.0, 36.0)  # logarithm of u / (1 - u) at an edge
_AT_ONCE = 1 << 19  # numbers of an array of resolvents


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
        return float(self.signals([eigenvalue])[0, 0])

    def overlaps(self, eigenvalue: float) -> tuple[float, float]:
        """Return the squared cosines of the left and right singular vector of a spike with those of its signal.

        Args:
            eigenvalue: Eigenvalue of ``W^T W``.
        """
        left, right = self.signals([eigenvalue])[0, 1:].tolist()
        return left, right

    def signals(self, eigenvalues: Any) -> Array:
        """Return strength and squared cosines, left and right, of the signals of several spikes; NaN within the bulk.

        With the resolvents ``p = s/h tr (s^2 - W W^T)^-1`` and ``q = s/d tr (s^2 - W^T W)^-1`` at the singular value s
        of the spike and ``D = p q``, the strength is ``theta = 1 / sqrt D`` and the squared cosines are
        ``-2 p / (theta^2 D')`` and ``-2 q / (theta^2 D')``.

        Args:
            eigenvalues: Eigenvalues of ``W^T W``, shape ``(k,)``.

        Returns:
            One row per eigenvalue, shape ``(k, 3)``.
        """
        z = np.asarray(eigenvalues, float)
        result = np.full((z.size, 3), np.nan)
        far = z > _NO_NOISE * self.edge
        result[far] = np.stack([np.sqrt(z[far]), np.ones(far.sum()), np.ones(far.sum())], axis=1)
        near = np.flatnonzero((z > self.edge) & ~far)
        step = max(1, _AT_ONCE // (self.rows.size + self.columns.size))
        for first in range(0, near.size, step):
            part = near[first : first + step]
            result[part] = _signals(self.rows, self.columns, z[part])
        return result


def variance_profile(rows: Any, columns: Any) -> Profile:
    """Compute the right edge of the law of a matrix with independent entries of variances ``row_i column_j``.

    Time: ``O(rows + columns)`` for each of some fifty evaluations of a sum.

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
    s, t = _edge(a, b)
    u, v = s / (1 + s), t / (1 + t)
    value, first, second = _derivatives(a, s)
    _, first_b, second_b = _derivatives(b, t)
    slope = first / first_b
    bend = (second - second_b * slope**2) / first_b
    z = value / (u * v)
    curvature = z * (second / value - (first / value) ** 2 + 1 / u**2 - bend / v + (slope / v) ** 2)
    # The resolvent trace is -sum_j 1 / (z (1 - c_j v)), and u leaves the axis by i sqrt(2 (edge - x) / curvature).
    density = first_b * slope / z * math.sqrt(2 / curvature)
    p, q = (
        (x.size - y.size + (1 + w) * float((1 / (1 + w * (1 - y))).sum())) / x.size
        for x, y, w in ((r, a, s), (c, b, t))
    )
    size = top_r * top_c
    return Profile(r, c, z * size, density ** (-2 / 3) * size, math.sqrt(z * size / (p * q)))


# The factors a and b have the largest entry 1. The functions below use s = u / (1 - u) instead of u, so that
# 1 - a u = (1 + s (1 - a)) / (1 + s) is exact next to the pole u = 1, where the edge of a single large row is.


def _sums(a: Array, s: float) -> tuple[float, float]:
    """Return ``A = sum a u / (1 - a u)``, which is ``sum a s / (1 + s (1 - a))``, and its derivative in s."""
    shares = a / (1 + s * (1 - a))
    return s * float(shares.sum()), float((shares * shares / a).sum())


def _derivatives(a: Array, s: float) -> tuple[float, float, float]:
    """Return ``A`` and its first two derivatives in u."""
    inverse = (1 + s) / (1 + s * (1 - a))  # 1 / (1 - a u)
    u = s / (1 + s)
    return u * float((a * inverse).sum()), float((a * inverse**2).sum()), 2 * float((a**2 * inverse**3).sum())


def _invert(b: Array, value: float, start: float) -> tuple[float, float]:
    """Return the t with ``sum b t / (1 + t (1 - b)) = value``, and the derivative of the sum there.

    The sum increases with t and is concave: Newton's method increases to the solution from the left, and a step from
    the right leads to its left.

    Args:
        b: Factors, the largest of which is 1.
        value: Value of the sum, positive.
        start: Guess of t.
    """
    least = value / float(b.sum())  # a term is at most b t
    t = max(start, least)
    for _ in range(_MOST_STEPS):
        total, slope = _sums(b, t)
        step = max((value - total) / slope, least - t)
        t += step
        if abs(step) <= _TINY * t:
            break
    return t, slope


def _edge(a: Array, b: Array) -> tuple[float, float]:
    """Return s and t at the edge, where ``log z = log A(s) - log u - log v`` with ``B(t) = A(s)`` is least."""
    guess = 1.0

    def gradient(x: float) -> float:
        nonlocal guess
        s = math.exp(x)
        value, slope = _sums(a, s)
        guess, slope_b = _invert(b, value, guess)
        return s * slope / value - 1 / (1 + s) - s * slope / (slope_b * guess * (1 + guess))

    x = float(brentq(gradient, *_RANGE, xtol=1e-13, rtol=1e-14))
    s = math.exp(x)
    return s, _invert(b, _sums(a, s)[0], guess)[0]


def _signals(rows: Array, columns: Array, z: Array) -> Array:
    """Return `Profile.signals` of eigenvalues to the right of the edge.

    The averages solve ``z u = sum c / (1 - c v)``, ``z v = sum r / (1 - r u)``, whose right-hand sides are increasing
    and convex: Newton's method increases from zero to the least solution, which is the one that vanishes for large z.
    """
    top_r, top_c = float(rows.max()), float(columns.max())
    a, b = rows / top_r, columns / top_c
    scaled = z / (top_r * top_c)
    u = v = np.zeros(z.size)
    for _ in range(_MOST_STEPS):
        of_a, of_b = 1 / (1 - a * u[:, None]), 1 / (1 - b * v[:, None])
        of_u, of_v = of_a @ a - scaled * v, of_b @ b - scaled * u
        by_u, by_v = of_a**2 @ a**2, of_b**2 @ b**2
        determinant = scaled**2 - by_u * by_v
        step_u, step_v = (scaled * of_v + by_v * of_u) / determinant, (scaled * of_u + by_u * of_v) / determinant
        u, v = u + step_u, v + step_v
        if not ((step_u > _TINY * u) | (step_v > _TINY * v)).any():
            break
    of_a, of_b = 1 / (1 - a * u[:, None]), 1 / (1 - b * v[:, None])
    by_u, by_v = of_a**2 @ a**2, of_b**2 @ b**2
    determinant = scaled**2 - by_u * by_v
    p, q = of_a.mean(1), of_b.mean(1)  # times 1 / sqrt z
    # d log(p q) / dz, with u' and v' from the equations; D' = 2 sqrt z dD/dz.
    change_u, change_v = -(scaled * u + by_v * v) / determinant, -(scaled * v + by_u * u) / determinant
    change = of_a**2 @ a / a.size * change_u / p + of_b**2 @ b / b.size * change_v / q - 1 / scaled
    # theta^2 = z / (p q), and -2 p / (theta^2 D') = -p / sqrt z / (sqrt z d log D / dz) with p of this function.
    left, right = (np.clip(-x / (scaled * change), 0.0, 1.0) for x in (p, q))
    return np.stack([np.sqrt(z / (p * q)), left, right], axis=1)
