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
_HIGH, _CLOSEST = 4.0, 1e-9  # first and last distance from the real axis, over the edge
_FACTOR, _MOST_STEPS = 32.0, 200  # largest factor from one distance to the next, and number of distances
_ROUNDING, _SAME = 1e-10, 1e-7
_NEWTON, _CONVERGED = 6, 1e-3  # steps of Newton's method at each distance, and its last step: the error is its square


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
    Newton's method follows the solution from far above the real axis down to it, for all points at once: some fifty
    steps of ``240 x 80`` complex operations, 4 ms. Shares below a point have an error below 0.002, by the grid and by
    the groups in which factors are averaged.

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
    """Return the density of the eigenvalues of one side at some points.

    Each point goes down to the real axis in steps of its own: a step that Newton's method does not finish is made again
    with the square root of its factor.
    """
    (r, many_r), (c, many_c) = of_rows, of_columns
    closest = _CLOSEST * edge
    height, factor = np.full(x.size, _HIGH * edge), np.full(x.size, _FACTOR)
    z: Complex = (x + 1j * height).astype(np.complex128)
    u, v = (many_c * c).sum() / z, (many_r * r).sum() / z  # accurate to 1 / _HIGH: a start for Newton's method
    u, v, _ = _solve(z, u, v, of_rows, of_columns)
    power_u, power_v = np.full((2, x.size), -1.0 + 0j)  # u and v are guessed to follow a power of z
    for _ in range(_MOST_STEPS):
        active = np.flatnonzero(height > closest)
        if not active.size:
            break
        lower = np.maximum(height[active] / factor[active], closest)
        below, ratio = x[active] + 1j * lower, np.log((x[active] + 1j * lower) / (x[active] + 1j * height[active]))
        guess_u, guess_v = u[active] * np.exp(power_u[active] * ratio), v[active] * np.exp(power_v[active] * ratio)
        new_u, new_v, done = _solve(below, guess_u, guess_v, of_rows, of_columns)
        moved, failed, ratio = active[done], active[~done], ratio[done]
        change_u, change_v = np.log(new_u[done] / u[moved]), np.log(new_v[done] / v[moved])
        known = np.abs(ratio) > _SAME
        power_u[moved], power_v[moved] = (np.where(known, change / ratio, 0.0) for change in (change_u, change_v))
        u[moved], v[moved], height[moved] = new_u[done], new_v[done], lower[done]
        factor[moved] = np.minimum(factor[moved] ** 1.5, _FACTOR)
        factor[failed] = np.sqrt(factor[failed])
    z = x + 1j * height
    factors, many, average = (c, many_c, v) if by_columns else (r, many_r, u)
    trace = (many / (z[:, None] * (1 - factors * average[:, None]))).sum(1)
    result: Array = np.maximum(-trace.imag, 0.0) / (math.pi * many.sum())
    return result


def _solve(
    z: Complex, u: Complex, v: Complex, of_rows: Groups, of_columns: Groups
) -> tuple[Complex, Complex, NDArray[np.bool_]]:
    """Make steps of Newton's method for the averages of the resolvents, and return where they have converged.

    -u and -v are transforms of measures on the positive half line: the imaginary parts of u, v, z u, z v are negative.
    """
    (r, many_r), (c, many_c) = of_rows, of_columns
    weights_r, weights_c = many_r * r, many_c * c
    last = np.full(z.size, np.inf)
    for _ in range(_NEWTON):
        of_r, of_c = 1 / (1 - r * u[:, None]), 1 / (1 - c * v[:, None])
        f, g = z * u - of_c @ weights_c, z * v - of_r @ weights_r
        f_v, g_u = -(of_c * of_c) @ (weights_c * c), -(of_r * of_r) @ (weights_r * r)
        determinant = z * z - f_v * g_u
        step_u, step_v = (f * z - f_v * g) / determinant, (g * z - g_u * f) / determinant
        u, v = u - step_u, v - step_v
        last = np.maximum(np.abs(step_u / u), np.abs(step_v / v))
        if (last < _CONVERGED).all():
            break
    # Where there is no density the imaginary parts vanish with the distance, up to rounding errors.
    inside = np.logical_and.reduce([w.imag < _ROUNDING * np.abs(w) for w in (u, v, z * u, z * v)])
    return u, v, inside & (last < _CONVERGED)


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
