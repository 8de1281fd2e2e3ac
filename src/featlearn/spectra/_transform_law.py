"""Laws of eigenvalues from the equations of their Stieltjes transforms: transform, support, edges, density.

A law is described by a map ``u -> Phi(u, z)`` of a few complex unknowns, the first of which is the Stieltjes transform
``m(z)``. The map keeps the half planes of the unknowns, so that its fixed point is unique for Im z > 0 and follows z
continuously. The methods here find it on the real line and build a `Law` from it.
"""

from __future__ import annotations

import math
from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from featlearn.errors import FeatlearnError
from featlearn.spectra._laws import Bulk, Law
from featlearn.spectra._series_bulk import series_bulk

Array = NDArray[np.float64]
Complex = NDArray[np.complex128]

_MASS = 1e-6  # largest error of the total mass
_LEVELS, _STEPS, _LAST_STEPS = 30, 3, 12  # heights above the real line, steps of Newton's method at each, and on it
_LOW, _CLOSEST = 1e-5, 1e-11  # heights above the real line, over the distance from zero: of the last part, and the last
_NEAR = 1e-3  # largest relative change from the last height to the real line
_ROUNDING = 2e-15  # wrong sign of an imaginary part, over the size, that counts as rounding
_REAL = 1e-8  # imaginary part of m, over its size, that counts as none
_ERROR = 1e-6  # last relative step of a solution that is accepted: at an edge half the digits are noise
_CONVERGED = 1e-9  # step of Newton's method after which the next would be below rounding
_POINTS = 160  # points of each of the grids that search for bulks
_SECTIONS, _ROUNDS = 24, 12  # points per round and rounds of the search for an edge: 25^-12 of the bracket remains
_HALVINGS, _ROUGH = 24, 1.1  # rounds of the search for gaps; factor by which a density that is not smooth misses a mean
_SMALLEST = 1e-14  # smallest points of a grid, over the edge
_HIDDEN = 1e-6  # the same with an atom inside of a bulk, whose pole hides the density
_SERIES = 1e-11  # size of the last coefficients of the series of the density, over the largest
_NODES = (2**13, 2**15)  # largest number of nodes of the series, and if that misses some of the mass
_BLOCK = 2**13


class Equation(Protocol):
    """Fixed-point equation ``u = Phi(u, z)`` of a Stieltjes transform and further unknowns."""

    @property
    def signs(self) -> Array:
        """Sign of the imaginary part of each unknown in the upper half plane, shape ``(k,)``; that of m is 1."""

    @property
    def start(self) -> Array:
        """Values of the unknowns at infinity, shape ``(k,)``; that of m is ignored."""

    def step(self, u: Complex, z: Complex) -> tuple[Complex, Complex]:
        """Return ``Phi(u, z)``, shape ``(k, points)``, and its derivatives by u, shape ``(k, k, points)``."""


def transform(equation: Equation, x: Array, scale: float) -> Complex:
    """Solve an equation on the real line, as the limit from the upper half plane.

    Newton's method follows the solution from far above the real line down to it, for all points at once; where it would
    leave the half planes of the unknowns, a step of the map itself replaces it, which stays inside. Points at which the
    solution is not reached are repeated with smaller steps. Time: about 100 steps of k x k systems per point.

    Args:
        equation: Equation of k unknowns.
        x: Points on the real line, none of them an atom of the law.
        scale: Size of the largest eigenvalue.

    Returns:
        The solution, shape ``(k, points)``.

    Raises:
        FeatlearnError: If the equation is not solved at some point.
    """
    u, error = _descend(equation, x, scale, _LEVELS)
    for levels in (4 * _LEVELS, 16 * _LEVELS):
        (poor,) = np.nonzero(~(error < _ERROR))
        if not poor.size:
            break
        u[:, poor], error[poor] = _descend(equation, x[poor], scale, levels)
    if not np.isfinite(error).all():
        raise FeatlearnError(
            f"The equation of a limiting law was not solved at x = {float(x[np.argmax(error)]):g}. Please report this."
        )
    return u


def _descend(equation: Equation, x: Array, scale: float, levels: int) -> tuple[Complex, Array]:
    """Return the solution on the real line and its relative error.

    Where the real line is not reached from the last height, closer to an edge than rounding allows, return the solution
    at that height with the error 1.
    """
    last = _CLOSEST * np.maximum(np.abs(x), 1e-16 * scale)
    ratio = (last / (4 * scale)) ** (1 / levels)
    height: Array = np.full_like(x, 4 * scale)
    u = np.repeat(equation.start.astype(np.complex128)[:, None], x.size, axis=1)
    u[0] = -1 / (x + 1j * height)
    before, solved = u, np.ones(x.size, dtype=bool)
    for level in range(levels + 1):
        z = x + 1j * height * ratio**level
        if level > 1:
            u, before = _extrapolated(equation, before, u), u
        low = z.imag < _LOW * np.abs(x)
        error = np.full(x.size, np.inf)
        for _ in range(_LAST_STEPS if low.any() else _STEPS):
            u, error = _newton(equation, u, z, inside=True)
            if (error < _ERROR).all():
                break
        solved &= ~low | (error < _ERROR)
    # Above the real line a solution in the half planes is the right one, and rounding cannot hide on which side it is
    # until the last heights. Followed through these and down to the line, it must not jump.
    above = u
    for _ in range(_LAST_STEPS):
        u, error = _newton(equation, u, x.astype(np.complex128), inside=False)
        if (error < _CONVERGED).all():
            break
    right = (error < _ERROR) & (np.abs(u - above) < _NEAR * np.abs(above)).all(0)
    return np.where(right, u, above), np.where(solved, np.where(right, error, 1.0), np.inf)


def _extrapolated(equation: Equation, before: Complex, u: Complex) -> Complex:
    """Extend two solutions as a power of the height, exact near a hard edge; keep the last one if that is outside."""
    with np.errstate(divide="ignore", invalid="ignore", over="ignore"):
        new = u * (u / before)
        near = (np.abs(new) < 8 * np.abs(u)) & (np.abs(u) < 8 * np.abs(new))
    inside = (near & (equation.signs[:, None] * new.imag > 0)).all(0)
    return np.where(inside, new, u)


def _newton(equation: Equation, u: Complex, z: Complex, *, inside: bool) -> tuple[Complex, Array]:
    """Make a step of Newton's method; return the new unknowns and the relative size of the step."""
    image, derivative = equation.step(u, z)
    system = np.eye(len(u))[:, :, None] - derivative
    if len(u) == 2:
        (a, b), (c, d) = system
        e, f = image - u
        with np.errstate(divide="ignore", invalid="ignore", over="ignore"):
            move = np.stack([d * e - b * f, a * f - c * e]) / (a * d - b * c)
    else:
        move = np.linalg.solve(np.moveaxis(system, 2, 0), (image - u).T[:, :, None])[:, :, 0].T
    new = u + move
    if inside:
        valid = (np.isfinite(new) & (equation.signs[:, None] * new.imag >= -_ROUNDING * np.abs(new))).all(0)
        valid &= new[0].imag > 0
        new = np.where(valid, new, image)
    else:
        new = np.where(np.isfinite(new).all(0), new, u)
    with np.errstate(divide="ignore", invalid="ignore"):
        error = np.nan_to_num(np.abs(move) / np.abs(u), nan=0.0, posinf=0.0).max(0)
    return new, np.where(np.isfinite(move).all(0), error, np.inf)


class Density:
    """Density ``Im m / pi`` of an equation's law, as a function of ``x - offset``.

    Solutions at earlier points start Newton's method at later ones, which takes a tenth of the time of `transform`. On
    the real line, too, there is at most one solution with all unknowns in their open half planes, so that a start can
    fail but not mislead; `transform` replaces it where it fails. Threads may share a density.
    """

    def __init__(self, equation: Equation, scale: float, offset: float, closest: float) -> None:
        self._equation, self._scale, self._offset, self._closest = equation, scale, offset, closest
        self._solved: tuple[Array, Complex] = np.empty(0), np.empty((len(equation.signs), 0), dtype=np.complex128)

    def __call__(self, x: Tensor) -> Tensor:
        """Return the density at some points."""
        flat = x.reshape(-1).numpy() + self._offset
        flat = np.where(np.abs(flat) < self._closest, np.copysign(self._closest, flat), flat)
        blocks = [self._at(flat[i : i + _BLOCK]) for i in range(0, flat.size, _BLOCK)]
        return torch.from_numpy(np.concatenate(blocks) if blocks else flat.copy()).reshape(x.shape)

    def _at(self, x: Array) -> Array:
        points, solutions = self._solved
        u, failed = np.zeros((len(solutions), x.size), dtype=np.complex128), np.ones(x.size, dtype=bool)
        if points.size:
            u = np.stack([np.interp(x, points, row.real) + 1j * np.interp(x, points, row.imag) for row in solutions])
            error = np.full(x.size, np.inf)
            for _ in range(_LAST_STEPS):
                u, error = _newton(self._equation, u, x.astype(np.complex128), inside=False)
                if (error < _CONVERGED).all():
                    break
            signed, rounding = self._equation.signs[:, None] * u.imag, _REAL * np.abs(u)
            failed = ~((error < _CONVERGED) & (signed[0] > rounding[0]) & (signed >= -rounding).all(0))
        if failed.any():
            u[:, failed] = transform(self._equation, x[failed], self._scale)
        if points.size < _BLOCK:
            merged, order = np.unique(np.concatenate([points, x]), return_index=True)
            self._solved = merged, np.concatenate([solutions, u], axis=1)[:, order]
        return _positive(u[0])


def _density(equation: Equation, x: Array, scale: float) -> Array:
    return _positive(transform(equation, x, scale)[0])


def _positive(m: Complex) -> Array:
    """Return ``Im m / pi``, or zero where m is real up to rounding."""
    result: Array = np.where(m.imag > _REAL * np.abs(m), m.imag, 0.0) / math.pi
    return result


def law_of(equation: Equation, *, low: float, high: float, atom: float, mean: float, hard: bool, name: str) -> Law:
    """Build the law of an equation: find its bulks, refine their edges, expand the density of each.

    Args:
        equation: Equation of the Stieltjes transform.
        low: Lower bound of the support: zero for a law on the half line.
        high: Upper bound of the support.
        atom: Mass at zero.
        mean: Mean of the law.
        hard: Whether the density grows like ``1/sqrt(x)`` at zero.
        name: Name of the law with its arguments, for the error message.

    Returns:
        The law.

    Raises:
        FeatlearnError: If the computed law does not integrate to one.
    """
    scale = max(abs(low), abs(high))
    closest = (_HIDDEN if low < 0 < atom else _SMALLEST) * scale
    edges = _refined(equation, _brackets(equation, low, high, scale, closest, hard=hard), scale)
    # Bulks are parametrized by square roots: move a law with negative eigenvalues to the half line, and back.
    offset = 0.0 if low == 0 else 2 * low - high
    density = Density(equation, scale, offset, closest)
    bulks: tuple[Bulk, ...] = ()
    for most in _NODES:
        bulks = tuple(series_bulk(density, a - offset, b - offset, tolerance=_SERIES, most=most) for a, b in edges)
        total = atom + sum(bulk.mass for bulk in bulks)
        if abs(total - 1) <= _MASS:
            break
    else:
        raise FeatlearnError(f"The law of {name} integrates to {total:.9f} instead of 1. Please report these numbers.")
    law = Law(bulks, atom, mean - offset, 0.0 - offset)
    return law.shifted(offset) if offset else law


Bracket = tuple[float, float]
"""Point outside of a bulk and point inside of it, on either side of an edge. Equal if the edge is known."""


def _brackets(
    equation: Equation, low: float, high: float, scale: float, closest: float, *, hard: bool
) -> list[tuple[Bracket, Bracket]]:
    """Return brackets of the left and right edge of each bulk."""
    fixed, near = np.linspace(0, 1, _POINTS + 2)[1:-1], np.geomspace(closest, high, _POINTS + 1)[:-1]
    x = np.concatenate([high * fixed**2, near] if low == 0 else [low + (high - low) * fixed, near, -near])
    grid = x = np.unique(x)
    for _ in range(3):
        # A narrow bulk is between two points of a grid. From above, its mass is visible: put points at quantiles.
        grid = np.union1d(x, _quantiles(equation, grid, scale))
        grid = grid[np.abs(grid) >= closest]
    density = _density(equation, grid, scale)
    grid, density = _with_gaps(equation, grid, density, scale)
    (inside,) = np.nonzero(density > 0)
    if not inside.size:
        return []
    parts = np.split(inside, np.nonzero(np.diff(inside) > 1)[0] + 1)
    outer = np.concatenate([[low], grid, [high]])
    result = []
    for part in parts:
        first, last = int(part[0]), int(part[-1])
        left = (0.0, 0.0) if hard and first == inside[0] else (float(outer[first]), float(grid[first]))
        result.append((left, (float(outer[last + 2]), float(grid[last]))))
    return result


def _quantiles(equation: Equation, grid: Array, scale: float) -> Array:
    """Return points between which the law, smoothed over the distances of a grid, has the same mass."""
    width = np.gradient(grid)
    u = np.repeat(equation.start.astype(np.complex128)[:, None], grid.size, axis=1)
    u[0] = -1 / (grid + 4j * scale)
    for share in np.linspace(0, 1, _LEVELS):
        z = grid + 1j * (4 * scale) ** (1 - share) * width**share
        for _ in range(_STEPS):
            u, _ = _newton(equation, u, z, inside=True)
    mass = np.concatenate([[0.0], np.cumsum((u[0].imag[1:] + u[0].imag[:-1]) / 2 * np.diff(grid))])
    shares = (np.arange(_POINTS) + 0.5) / _POINTS
    result: Array = np.interp(shares * mass[-1], mass, grid)
    return result


def _with_gaps(equation: Equation, grid: Array, density: Array, scale: float) -> tuple[Array, Array]:
    """Halve the intervals of a grid between whose ends the density is not smooth: there may be a gap in them."""
    a, b, f_a, f_b = grid[:-1], grid[1:], density[:-1], density[1:]
    points, values = [grid], [density]
    for _ in range(_HALVINGS):
        kept = (f_a > 0) & (f_b > 0) & (b - a > 1e-13 * np.abs(b)) & (a * b > 0)
        a, b, f_a, f_b = a[kept], b[kept], f_a[kept], f_b[kept]
        middle = (a + b) / 2
        f = _density(equation, middle, scale)
        points.append(middle)
        values.append(f)
        mean = np.sqrt(f_a * f_b)
        rough = (f > _ROUGH * mean) | (f < mean / _ROUGH)
        if not rough.any():
            break
        a, middle, b, f_a, f, f_b = (part[rough] for part in (a, middle, b, f_a, f, f_b))
        a, b = np.concatenate([a, middle]), np.concatenate([middle, b])
        f_a, f_b = np.concatenate([f_a, f]), np.concatenate([f, f_b])
    x, order = np.unique(np.concatenate(points), return_index=True)
    return x, np.concatenate(values)[order]


def _refined(equation: Equation, bulks: list[tuple[Bracket, Bracket]], scale: float) -> list[tuple[float, float]]:
    """Locate the edges in their brackets, all at once: the density is positive on one side and zero on the other."""
    ends = np.array(bulks).reshape(-1, 2)
    rows = np.arange(len(ends))
    shares = np.linspace(0, 1, _SECTIONS + 2)
    for _ in range(_ROUNDS):
        points = ends[:, :1] + (ends[:, 1:] - ends[:, :1]) * shares
        inner = points[:, 1:-1]
        wide = np.abs(ends[:, 1] - ends[:, 0]) > 1e-15 * np.abs(ends).max(1)
        if not wide.any():
            break
        positive = np.zeros((len(ends), _SECTIONS + 2), dtype=bool)
        positive[:, -1] = True
        positive[wide, 1:-1] = _density(equation, inner[wide].reshape(-1), scale).reshape(-1, _SECTIONS) > 0
        first = positive.argmax(1)
        first = np.where(wide, first, 1)
        narrowed = np.stack([points[rows, first - 1], points[rows, first]], 1)
        ends = np.where(wide[:, None], narrowed, ends)
    middle = ends.mean(1).reshape(-1, 2)
    return [(float(left), float(right)) for left, right in middle]
