"""Limiting law of a matrix whose entries have variances that vary by row and column, on a grid.

References:
    Couillet & Hachem (2014), "Analysis of the limiting spectral measure of large random matrices of the separable
    covariance type", https://arxiv.org/abs/1310.8094.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]
Complex = NDArray[np.complex128]

_POINTS = 120  # of each of two grids
_LOWEST = 1e-8  # smallest point of the grid, over the edge
_ATOMS, _SINGLE = 28, 12  # factors of variances are averaged in so many groups, but for the largest ones
_NOTHING, _FAR = (
    1e-5,
    0.02,
)  # density, over the largest, that counts as none; left edge, over the right, of a narrow law
_CLOSEST = 1e-9  # distance from the real axis, over the edge
_LOWER, _NEWTON = 4.0, 4  # factor of the distance from one stage to the next, and steps of each


@dataclass(frozen=True, eq=False)
class GridLaw:
    """Law of the eigenvalues of the smaller side, with linear interpolation on a grid.

    Attributes:
        x: Points in ascending order, from 0 to the right edge.
        density: Density at the points.
        mass: Share of the eigenvalues below each point.
    """

    x: Array
    density: Array
    mass: Array

    def pdf(self, x: Any) -> Array:
        """Return the density at some points."""
        result: Array = np.interp(x, self.x, self.density, left=0.0, right=0.0)
        return result

    def cdf(self, x: Any) -> Array:
        """Return the share of the eigenvalues below some points."""
        result: Array = np.interp(x, self.x, self.mass, left=0.0, right=1.0)
        return result


def grid_law(rows: Array, columns: Array, edge: float) -> GridLaw:
    """Compute the law of ``W^T W`` for independent entries of variances ``row_i column_j``.

    The averages of the resolvents solve ``z u = sum_j c_j / (1 - c_j v)`` and ``z v = sum_i r_i / (1 - r_i u)``.
    Newton's method follows the solution from far above the real axis down to it, for all points at once. Time: about
    ``240 x 40 x 80`` complex operations. Shares below a point have an error below 0.005.

    Args:
        rows: Factors of the variances by row, not negative.
        columns: Factors of the variances by column, not negative.
        edge: Right edge of the law, see `featlearn.spectra.variance_profile`.

    Returns:
        The law of the eigenvalues of the smaller side, among them zeros if rows or columns are zero.
    """
    of_rows, of_columns = _grouped(rows), _grouped(columns)
    # Points are dense at the right edge, where the density has a square root, and on all scales below it.
    angle = math.pi / 2 * (np.arange(_POINTS) + 0.5) / _POINTS
    x = edge * np.sort(np.concatenate([np.sin(angle) ** 2, np.geomspace(_LOWEST, 0.5, _POINTS)]))
    by_columns = columns.size <= rows.size
    density = _density(x, edge, of_rows, of_columns, by_columns)
    first = float(x[density > _NOTHING * density.max()][0])
    if first > _FAR * edge:
        # The law of a matrix with one side much larger is narrow, with a square root at its left edge too.
        low = first - (edge - first) / _POINTS
        x = np.concatenate([[0.99 * low], low + (edge - low) * np.sin(angle) ** 2])
        density = _density(x, edge, of_rows, of_columns, by_columns)
    positive = min((rows > 0).sum(), (columns > 0).sum()) / min(rows.size, columns.size)
    x, density = np.concatenate([x, [edge]]), np.concatenate([density, [0.0]])
    mass = np.concatenate([[0.0], np.cumsum((density[1:] + density[:-1]) / 2 * np.diff(x))])
    return GridLaw(x, density, 1 - positive + positive * mass / mass[-1])


Groups = tuple[Array, Array]
"""Factors of variances, and how many rows or columns have each."""


def _density(x: Array, edge: float, of_rows: Groups, of_columns: Groups, by_columns: bool) -> Array:
    """Return the density of the eigenvalues of one side at some points."""
    height = 4.0 * edge
    z: Complex = (x + 1j * height).astype(np.complex128)
    (r, many_r), (c, many_c) = of_rows, of_columns
    u, v = (many_c * c).sum() / z, (many_r * r).sum() / z
    while True:
        for _ in range(_NEWTON):
            u, v = _newton(z, u, v, of_rows, of_columns)
        if height <= _CLOSEST * edge:
            break
        height = max(height / _LOWER, _CLOSEST * edge)
        z = (x + 1j * height).astype(np.complex128)
    factors, many, average = (c, many_c, v) if by_columns else (r, many_r, u)
    trace = (many / (z[:, None] * (1 - factors * average[:, None]))).sum(1)
    result: Array = np.maximum(-trace.imag, 0.0) / (math.pi * many.sum())
    return result


def _newton(z: Complex, u: Complex, v: Complex, of_rows: Groups, of_columns: Groups) -> tuple[Complex, Complex]:
    """Make a step of Newton's method; where it would leave the domain of the solution, one of simple iteration.

    -u and -v are transforms of measures on the positive half line: the imaginary parts of u, v, z u, z v are negative.
    """
    (r, many_r), (c, many_c) = of_rows, of_columns
    rest_r, rest_c = 1 - r * u[:, None], 1 - c * v[:, None]
    from_v, from_u = (many_c * c / rest_c).sum(1), (many_r * r / rest_r).sum(1)
    f, g = z * u - from_v, z * v - from_u
    f_v, g_u = -(many_c * (c / rest_c) ** 2).sum(1), -(many_r * (r / rest_r) ** 2).sum(1)
    determinant = z * z - f_v * g_u
    new_u, new_v = u - (f * z - f_v * g) / determinant, v - (g * z - g_u * f) / determinant
    inside = (new_u.imag < 0) & (new_v.imag < 0) & ((z * new_u).imag < 0) & ((z * new_v).imag < 0)
    return np.where(inside, new_u, from_v / z), np.where(inside, new_v, from_u / z)


def _grouped(factors: Array) -> Groups:
    """Return averages of neighboring factors, and how many each stands for; the largest stay single."""
    falling = np.sort(factors)[::-1]
    if falling[0] == falling[-1]:
        return falling[:1], np.array([float(falling.size)])
    cuts = np.arange(1, min(_SINGLE, falling.size))
    if falling.size > _SINGLE:
        cuts = np.concatenate([cuts, np.unique(np.geomspace(_SINGLE, falling.size, _ATOMS + 1).astype(int))[:-1]])
    parts = np.split(falling, cuts)
    return np.array([part.mean() for part in parts]), np.array([float(part.size) for part in parts])
