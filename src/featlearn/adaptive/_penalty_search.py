"""Search for the minimizers of effective penalties that have no closed form, for many singular values at once."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise

import numpy as np
from scipy.optimize.elementwise import find_minimum

from featlearn.adaptive._penalties import NEAR_ZERO, Array, Penalty
from featlearn.errors import InputError

_ONE, _LINE, _SQUARE = 257, 2049, 193  # points of a grid, of one side alone, and of each of two sides
_WIDTH, _CLOSE = 1e-10, 1e-8  # of a minimum; the second one where the error of the objective is its square
_NARROWED, _KEPT = 0.3, 0.9  # factors of the width around a minimum, and around a point that moves
_MOST_STEPS = 120
_FARTHEST = 2.0**80
_OFFSETS = np.array([(i, j) for i in (-1.0, 0.0, 1.0) for j in (-1.0, 0.0, 1.0)])


def searched_minimizers(w1: Penalty, w2: Penalty, v: Array) -> tuple[Array, Array]:
    """Return the minimizers ``s1, s2`` of ``w1(s1) + w2(s2) + v^2 / (s1 s2)^2`` for each v, shape ``(m,)``.

    On a grid of ``log s1`` and ``log s2`` the candidates for any v are the vertices of the lower convex hull of the
    points ``(1 / (s1 s2)^2, w1 + w2)``. It is kept for later calls; a search by quadratic fits refines the vertex.

    Args:
        w1: Penalty of the first factor.
        w2: Penalty of the second factor, which is 1 if the penalty is fixed.
        v: Singular values.
    """
    if not v.size:
        return np.ones_like(v), np.ones_like(v)
    # Cost of the other side at 1, where it can stay.
    other1, other2 = (0.0 if w.anchored else float(w(1.0)) - w.least for w in (w2, w1))
    top = np.array([float(v.max())])
    high1 = float(reach(lambda z: w1(z) - w1.least, top, other1, w1.name)[0])
    high2 = 1.0 if w2.fixed else float(reach(lambda z: w2(z) - w2.least, top, other2, w2.name)[0])
    hull = _hull(w1, w2, high1, high2)
    place = np.searchsorted(hull.changes, v**2)
    y = _refined(hull, v, hull.points[place], hull.widths[place])
    rest = (w1.rest, 1.0 if w2.fixed else w2.rest)
    s = np.exp(y)
    return np.where(v > 0, s[:, 0], rest[0]), np.where(v > 0, s[:, 1], rest[1])


@dataclass(frozen=True, eq=False)
class _Hull:
    """Points that minimize the sum of two penalties and ``v^2 q`` on a grid, for some v.

    Attributes:
        penalties: Both penalties.
        points: Logarithms of both factors, shape ``(k, 2)``, in the order of v.
        widths: Distances to the neighbors in the grid, shape ``(k, 2)``.
        changes: Values of v^2 from which on the next point is better, shape ``(k - 1,)``.
        low: Smallest logarithms.
        high: Largest logarithms.
    """

    penalties: tuple[Penalty, Penalty]
    points: Array
    widths: Array
    changes: Array
    low: Array
    high: Array

    def costs(self, y: Array, v: Array) -> Array:
        """Return the objective at logarithms of shape ``(m, k, 2)``."""
        a, b = y[..., 0], y[..., 1]
        w1, w2 = self.penalties
        second = 0.0 if w2.fixed else w2(np.exp(b))
        return w1(np.exp(a)) + second + (v[:, None] * np.exp(-a - b)) ** 2


@lru_cache(maxsize=16)
def _hull(w1: Penalty, w2: Penalty, high1: float, high2: float) -> _Hull:
    count = _LINE if w2.fixed else _SQUARE
    sides = [_side(w1, high1, count), np.zeros(1) if w2.fixed else _side(w2, high2, count)]
    widths = [np.maximum(np.gradient(side) if len(side) > 1 else np.zeros(1), 0.0) for side in sides]
    first, second = (grid.ravel() for grid in np.meshgrid(*sides, indexing="ij"))
    wide = np.stack([grid.ravel() for grid in np.meshgrid(*widths, indexing="ij")], axis=1)
    cost = w1(np.exp(first)) + (0.0 if w2.fixed else w2(np.exp(second)))
    q = np.exp(-2 * (first + second))
    finite = np.flatnonzero(np.isfinite(cost))
    # From large q to small: only points that no other one beats in both.
    order = finite[np.lexsort((cost[finite], q[finite]))]
    lower = np.minimum.accumulate(cost[order])
    better = np.concatenate([[True], lower[1:] < lower[:-1]])
    order = order[better][::-1]
    kept: list[int] = []
    for i in order.tolist():
        while len(kept) > 1 and _change(cost, q, kept[-2], kept[-1]) >= _change(cost, q, kept[-1], i):
            kept.pop()
        kept.append(i)
    changes = np.array([_change(cost, q, a, b) for a, b in pairwise(kept)])
    points = np.stack([first, second], axis=1)[kept]
    low, high = (np.array([pick(side) for side in sides]) for pick in (np.min, np.max))
    return _Hull((w1, w2), points, wide[kept], changes, low, high)


def _change(cost: Array, q: Array, a: int, b: int) -> float:
    """Return the v^2 from which on point b, of smaller q, is better than point a."""
    return float((cost[b] - cost[a]) / (q[a] - q[b]))


def _side(w: Penalty, high: float, count: int) -> Array:
    """Return the grid of logarithms of one factor, dense at 1, from where an anchored penalty grows."""
    if w.anchored:
        side: Array = np.log(high) * np.linspace(0.0, 1.0, count) ** 2
        return side
    return np.linspace(np.log(NEAR_ZERO), np.log(high), 4 * count)


def _refined(hull: _Hull, v: Array, y: Array, width: Array) -> Array:
    """Return minimizers near given logarithms of shape ``(m, 2)``.

    Around each point, the function at nine points gives a quadratic, whose minimum is a tenth. The best of them is the
    next point; the width shrinks faster where it is the old one.
    """
    offsets = _OFFSETS[_OFFSETS[:, 1] == 0] if hull.penalties[1].fixed else _OFFSETS
    center = len(offsets) // 2
    rows = np.arange(len(v))
    for _ in range(_MOST_STEPS):
        stencil = np.clip(y[:, None] + width[:, None] * offsets, hull.low, hull.high)
        values = hull.costs(stencil, v)
        step = _vertex(values, offsets)
        tenth = np.clip(y + width * step, hull.low, hull.high)
        stencil = np.concatenate([stencil, tenth[:, None]], axis=1)
        values = np.concatenate([values, hull.costs(tenth[:, None], v)], axis=1)
        # The old point is kept unless another one is better.
        best = np.where(values.min(1) < values[:, center], values.argmin(1), center)
        y = stencil[rows, best]
        near = (best == center) | ((best == len(offsets)) & (np.abs(step).max(1) <= 1))
        width = width * np.where(near, _NARROWED, _KEPT)[:, None]
        if width.max() <= _CLOSE:
            break
    return y


def _vertex(values: Array, offsets: Array) -> Array:
    """Return the minimum of the quadratic through values at the offsets, shape ``(m, 2)``; zero if there is none."""
    x, z = offsets.T
    step = np.zeros((len(values), 2))
    if not z.any():
        bend, slope = values @ (1.5 * x**2 - 1), values @ x / 2
        step[:, 0] = np.where(bend > 0, -slope / np.where(bend > 0, 2 * bend, 1.0), 0.0)
    else:
        gx, gz, cross = values @ x / 6, values @ z / 6, values @ (x * z) / 4
        a, b = values @ (3 * x**2 - 2) / 6, values @ (3 * z**2 - 2) / 6
        determinant = 4 * a * b - cross**2
        bowl = (a > 0) & (b > 0) & (determinant > 0)
        scale = np.where(bowl, determinant, 1.0)
        step[:, 0] = np.where(bowl, (cross * gz - 2 * b * gx) / scale, 0.0)
        step[:, 1] = np.where(bowl, (cross * gx - 2 * a * gz) / scale, 0.0)
    step = np.where(np.isfinite(step), step, 0.0)
    return np.clip(step, -2.0, 2.0)


def reach(penalty: Callable[[Array], Array], v: Array, other: float, name: str) -> Array:
    """Return a number z >= 2 for each v such that ``w(z) + v^2 / z^2`` has its minimum below z.

    At z the penalty alone exceeds the objective at a smaller number. ``v^2``, the objective at 1, would not be a usable
    bound: a slowly growing penalty reaches it beyond the range of numbers.

    Args:
        penalty: Penalty w with minimum 0.
        v: Singular values.
        other: Cost of a second factor that stays at 1.
        name: Name of the penalty, for the message.
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
                f"penalty must grow without bound, but {name!r} stays below {float((least + other)[short].max()):.3g}."
            )
        z = np.where(short, 2 * z, z)


def least_of_one(function: Callable[[Array, Array], Array], v: Array, low: Array, high: Array) -> Array:
    """Return the y in [low, high] with the least value of an elementwise function of (y, v), for each entry of v.

    A grid locates the minimum, and a bracketing search refines it.

    Args:
        function: Elementwise function.
        v: Second argument, shape ``(m,)``.
        low: Lower bounds, shape ``(m,)``.
        high: Upper bounds, shape ``(m,)``.
    """
    grid = np.linspace(low, high, _ONE, axis=1)
    best: Array = grid[np.arange(len(low)), np.argmin(function(grid, v[:, None]), axis=1)]
    width = (high - low) / (_ONE - 1)

    def folded(y: Array, low: Array, high: Array) -> Array:
        # Mirrored at both ends, so that a minimum there is bracketed.
        return high - np.abs(high - low - np.abs(y - low))

    tolerances = {"xatol": _WIDTH, "xrtol": 0.0, "fatol": 0.0, "frtol": 0.0}
    bracket = best - width, best, best + width

    def objective(y: Array, v: Array, low: Array, high: Array) -> Array:
        return function(folded(y, low, high), v)

    search = find_minimum(objective, bracket, args=(v, low, high), tolerances=tolerances)
    converged = np.isin(search.status, (0, -2))  # -2: the function is flat to rounding
    return folded(np.where(converged, search.x, best), low, high)
