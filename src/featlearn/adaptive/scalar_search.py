"""Minima of functions of one or two positive numbers, for many such functions at once."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from featlearn.adaptive.penalties import Array
from featlearn.errors import InputError

__all__ = ["convex_root", "least_of_one", "least_of_two", "reach"]

_ONE, _TWO = 257, 41
_FINE_ONE, _FINE_TWO = 9, 7
_SHRINK_ONE, _SHRINK_TWO = 0.5, 0.7
_WIDTH = 1e-10
_FARTHEST = 2.0**80


def convex_root(a: float, b: float, q: Array) -> Array:
    """The t >= 0 with ``t^a (1 + t)^b = q``; for a = 0 zero where q <= 1.

    ``a u + b log(1 + e^u) = log q`` with ``u = log t`` is increasing and convex, so that Newton's steps come down
    to the root from the right, after the first one, from wherever they start.
    """
    q = np.asarray(q, dtype=np.float64)
    if a == 0:
        return np.maximum(0.0, q ** (1 / b) - 1)
    positive = q > 0
    target = np.log(np.where(positive, q, 1.0))
    u = target / np.where(target > 0, a + b, a)
    for _ in range(60):
        slope = a + b / (1 + np.exp(-np.clip(u, -700, 700)))
        step = (a * u + b * np.logaddexp(0.0, u) - target) / slope
        u = u - step
        if np.abs(step).max(initial=0.0) <= 1e-15 * (1 + np.abs(u).max(initial=0.0)):
            break
    return np.where(positive, np.exp(u), 0.0)


def reach(penalty: Callable[[Array], Array], v: Array, other: float, name: str) -> Array:
    """A number z >= 2 for each v, beyond which ``w(z) + v^2 / z^2`` is not least.

    There the penalty alone is more than the whole at some smaller number; ``v^2``, the whole at 1, would be no bound to
    search within: a slow penalty reaches it far beyond all numbers.

    Args:
        penalty: w, with 0 for its least value.
        v: Sizes.
        other: What else there is to pay, for a second factor that stays at 1.
        name: How to call the penalty.
    """
    z = np.full(v.shape, 2.0)
    least = penalty(np.ones_like(v)) + v**2
    while True:
        cost = penalty(z)
        least = np.minimum(least, cost + (v / z) ** 2)
        short = ~(cost > least + other)
        if not short.any():
            return z
        if z.max() > _FARTHEST:
            raise InputError(
                f"the penalty {name!r} stays below {float((least + other)[short].max()):.3g} however far features "
                "move, so that nothing is least: it must grow without bound"
            )
        z = np.where(short, 2 * z, z)


def least_of_one(function: Callable[[Array], Array], low: Array, high: Array) -> Array:
    """The y in [low, high] with the least value, one for each entry, for functions of (m, points) arrays.

    A grid finds the deepest valley, then ever finer grids around the best point find its ground.
    """
    grid = np.linspace(low, high, _ONE, axis=1)
    rows = np.arange(len(low))
    best: Array = grid[rows, np.argmin(function(grid), axis=1)]
    width = (high - low) / (_ONE - 1)
    offsets = np.linspace(-1.0, 1.0, _FINE_ONE)
    while width.max(initial=0.0) > _WIDTH:
        grid = np.clip(best[:, None] + width[:, None] * offsets, low[:, None], high[:, None])
        best = grid[rows, np.argmin(function(grid), axis=1)]
        width = width * _SHRINK_ONE
    return best


def least_of_two(
    function: Callable[[Array, Array], Array], low: tuple[Array, Array], high: tuple[Array, Array]
) -> tuple[Array, Array]:
    """As `least_of_one` in two variables, for functions of two (m, points) arrays."""
    rows = np.arange(len(low[0]))
    unit = np.linspace(0.0, 1.0, _TWO)
    first, second = (part.ravel() for part in np.meshgrid(unit, unit))
    grids = [a[:, None] + (b - a)[:, None] * part for a, b, part in zip(low, high, (first, second), strict=True)]
    place = np.argmin(function(grids[0], grids[1]), axis=1)
    best = [grid[rows, place] for grid in grids]
    widths = [(b - a) / (_TWO - 1) for a, b in zip(low, high, strict=True)]
    offsets = np.linspace(-1.5, 1.5, _FINE_TWO)
    first, second = (part.ravel() for part in np.meshgrid(offsets, offsets))
    while max(float(w.max(initial=0.0)) for w in widths) > _WIDTH:
        grids = [
            np.clip(at[:, None] + w[:, None] * part, a[:, None], b[:, None])
            for at, w, part, a, b in zip(best, widths, (first, second), low, high, strict=True)
        ]
        place = np.argmin(function(grids[0], grids[1]), axis=1)
        best = [grid[rows, place] for grid in grids]
        widths = [w * _SHRINK_TWO for w in widths]
    return best[0], best[1]
