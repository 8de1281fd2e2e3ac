"""Effective penalties: minima over one or two positive scalars, for many problems at once.

References:
    LeJeune & Alemohammad (2023), "An adaptive tangent feature perspective of neural networks",
    https://arxiv.org/abs/2308.15478,
    section 3.2.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from featlearn.adaptive._penalties import (
    NEAR_ZERO,
    PENALTIES,
    Array,
    Penalty,
    PenaltyLike,
    as_penalty,
    warn_if_misaligned,
)
from featlearn.adaptive._penalty_search import least_of_one, searched_minimizers
from featlearn.errors import InputError


def effective_penalty(penalty: PenaltyLike, v: Any, *, allow_unanchored: bool = False) -> Array:
    """Compute the effective penalty ``w~(v) = min_{z >= 1} w(z) + v^2 / z^2``.

    ``(z-1)^2`` gives ``(z-1)(2z-1)`` with ``z^4 - z^3 = v^2``; ``|z-1|`` gives ``v^2``, and ``1.5 (2 v^2)^{1/3} - 1``
    from ``2 v^2 = 1`` on; ``z^2`` (not anchored, minimized over all z > 0) gives ``2 |v|``. As a function of ``v^2`` it
    is increasing and concave, and it is ``v^2 + o(v^2)`` at zero (proposition 3).

    Args:
        penalty: Penalty w: a name such as "square", "absolute" or "power:1.5", a `Penalty`, or a function of an array.
        v: Singular values, an array of any shape; the sign is ignored.
        allow_unanchored: Whether the penalty can have its minimum elsewhere than at 1.

    Returns:
        The effective penalty of each entry.

    Example:
        >>> from featlearn.adaptive import effective_penalty
        >>> effective_penalty("absolute", [0.5, 2.0]).round(4).tolist()
        [0.25, 2.0]
        >>> effective_penalty("square", [0.5, 2.0]).round(4).tolist()
        [0.2114, 1.8686]
        >>> effective_penalty("indicator", [0.5, 2.0]).round(4).tolist()  # v^2: no adaptation
        [0.25, 4.0]

    References:
        LeJeune & Alemohammad (2023), "An adaptive tangent feature perspective of neural networks",
        https://arxiv.org/abs/2308.15478,
        section 3.2.
    """
    return effective_joint_penalty(penalty, "indicator", v, allow_unanchored=allow_unanchored)


def effective_joint_penalty(
    first: PenaltyLike, second: PenaltyLike, v: Any, *, allow_unanchored: bool = False
) -> Array:
    """Compute the effective joint penalty ``min_{s1, s2 >= 1} w1(s1) + w2(s2) + v^2 / (s1 s2)^2``.

    Theorem 2 gives this penalty to the singular values of the change of a matrix. It needs ``w(e^x)`` convex for ``x >=
    0``, which for ``|z - 1|^p`` is p >= 1; otherwise a warning is given, since other singular vectors can cost less:
    for p = 1/2 and singular values 3.5 and 2.1 this function gives 4.37854, and a pair of rotated matrices has 4.35904.
    With "indicator" on one side the penalty is exact for all p.

    Two squares give ``(s-1)(3s-2)`` with ``s^5 (s-1) = v^2``. A square and an absolute value (third curve of figure 2)
    give that of the square alone up to ``v = (1 + sqrt 3)/(2 sqrt 2)``, then ``s(4s-5)`` with ``4 s^5 (s-1)^3 = v^2``.

    Args:
        first: Penalty w1 of the inputs: a name, a `Penalty`, or a function of an array.
        second: Penalty w2 of the outputs, given like the first.
        v: Singular values, an array of any shape; the sign is ignored.
        allow_unanchored: Whether the penalties can have their minimum elsewhere than at 1.

    Returns:
        The effective penalty of each entry.

    Example:
        >>> from featlearn.adaptive import effective_joint_penalty, effective_penalty
        >>> effective_joint_penalty("square", "square", [0.5, 2.0]).round(4).tolist()
        [0.1871, 1.2896]
        >>> effective_penalty("square", [0.5, 2.0]).round(4).tolist()  # one side alone saves less
        [0.2114, 1.8686]
    """
    w1, w2 = as_penalty(first, allow_unanchored), as_penalty(second, allow_unanchored)
    warn_if_misaligned(w1, w2)
    v = _sizes(v)
    s1, s2 = minimizers(w1, w2, v)
    return w1(s1) + w2(s2) + _quotient(v, s1 * s2)


def joint_penalty(first: PenaltyLike, second: PenaltyLike, v: Any, *, allow_unanchored: bool = False) -> Array:
    """Compute the joint penalty ``(w1 + w2)(v) = min_{1 <= z <= v} w1(z) + w2(v / z)`` for v >= 1.

    A square and an absolute value give ``(v-1)^2`` up to ``v = (1 + sqrt 3)/2``, then ``z(3z-4)`` with
    ``2 z^2 (z-1) = v``. Two powers p >= 1 give ``2 (sqrt v - 1)^p``, because ``(e^y - 1)^p`` is convex in y.

    Args:
        first: Penalty w1: a name, a `Penalty`, or a function of an array.
        second: Penalty w2, given like the first.
        v: Products of two factors, an array of numbers of at least 1.
        allow_unanchored: Whether the penalties can have their minimum elsewhere than at 1.

    Returns:
        The joint penalty of each entry.

    Raises:
        InputError: If an entry is below 1 and both penalties are anchored.

    Example:
        >>> from featlearn.adaptive import joint_penalty
        >>> joint_penalty("square", "square", [1.0, 4.0]).round(4).tolist()  # 2 (sqrt v - 1)^2
        [0.0, 2.0]
    """
    w1, w2 = as_penalty(first, allow_unanchored), as_penalty(second, allow_unanchored)
    v = _sizes(v)
    anchored = w1.anchored and w2.anchored
    if anchored and (v < 1).any():
        raise InputError(f"v must be at least 1, got {float(v.min()):.6g}.")
    if w1.fixed or w2.fixed:
        return w1(v) if w2.fixed else w2(v)
    z = _joint_share(w1, w2, v)
    with np.errstate(divide="ignore", invalid="ignore"):
        return w1(z) + w2(np.where(z > 0, v / z, w2.rest))


def minimizers(w1: Penalty, w2: Penalty, v: Any) -> tuple[Array, Array]:
    """Return the minimizers ``s1, s2`` of `effective_joint_penalty` for each entry (lemma 5, equation 3).

    Closed forms are used for powers p >= 1 (squares, absolute values) with the indicator or the same power, for a
    square with an absolute value, and for ``z^2``; otherwise a grid is searched and refined.
    """
    v = _sizes(v)
    ones = np.ones_like(v)
    if w1.fixed and w2.fixed:
        return ones, ones
    if w1.fixed:
        s2, s1 = minimizers(w2, w1, v)
        return s1, s2
    p, q = w1.exponent or 0.0, w2.exponent or 0.0
    if p >= 1 and (w2.fixed or p == q):
        # p t^{p-1} (1+t)^b = 2 v^2, with b = 3 for one side and 5 for two that share it equally
        s = 1 + convex_root(p - 1, 3 if w2.fixed else 5, 2 * v**2 / p)
        return s, ones if w2.fixed else s
    if {p, q} == {1.0, 2.0}:
        square, absolute = _square_and_absolute(v)
        return (square, absolute) if p == 2 else (absolute, square)
    if w1 == PENALTIES["norm"] and (w2.fixed or w2 == w1):
        s = v ** (1 / 2 if w2.fixed else 1 / 3)
        return s, ones if w2.fixed else s
    flat = v.ravel()
    s1, s2 = searched_minimizers(w1, w2, flat)
    return s1.reshape(v.shape), s2.reshape(v.shape)


def penalty_curves(v: Any) -> dict[str, Array]:
    """Compute the curves of figure 2: three effective penalties, and ``v^2``, which bounds them.

    Args:
        v: Singular values, shape ``(k,)``.

    Returns:
        The curves by name, each of shape ``(k,)``.

    Example:
        >>> import numpy as np
        >>> from featlearn.adaptive import penalty_curves
        >>> for name, curve in penalty_curves(np.array([0.5, 2.0])).items():
        ...     print(name, curve.round(3).tolist())
        v^2 [0.25, 4.0]
        square [0.211, 1.869]
        absolute [0.25, 2.0]
        square and absolute [0.211, 1.539]

    References:
        LeJeune & Alemohammad (2023), "An adaptive tangent feature perspective of neural networks",
        https://arxiv.org/abs/2308.15478,
        figure 2.
    """
    v = _sizes(v)
    return {
        "v^2": v**2,
        "square": effective_penalty("square", v),
        "absolute": effective_penalty("absolute", v),
        "square and absolute": effective_joint_penalty("square", "absolute", v),
    }


def _square_and_absolute(v: Array) -> tuple[Array, Array]:
    alone = v <= (1 + np.sqrt(3)) / (2 * np.sqrt(2))
    first = 1 + np.where(alone, convex_root(1, 3, v**2), convex_root(3, 5, v**2 / 4))
    return first, np.where(alone, 1.0, np.maximum(1.0, 2 * first * (first - 1)))


def _joint_share(w1: Penalty, w2: Penalty, v: Array) -> Array:
    """Return the minimizer z of `joint_penalty`."""
    p, q = w1.exponent or 0.0, w2.exponent or 0.0
    if (p >= 1 and p == q) or (w1 == w2 == PENALTIES["norm"]):
        return np.sqrt(v)
    if {p, q} == {1.0, 2.0}:
        square = np.where(v <= (1 + np.sqrt(3)) / 2, v, 1 + convex_root(1, 2, v / 2))
        return square if p == 2 else v / square
    flat = np.maximum(v.ravel(), NEAR_ZERO)
    top = np.log(flat)
    low, high = (0 * top, top) if w1.anchored and w2.anchored else (np.full_like(top, np.log(NEAR_ZERO)), top + 28.0)
    y = least_of_one(lambda y, top: w1(np.exp(y)) + w2(np.exp(top - y)), top, low, high)
    return np.exp(y).reshape(v.shape)


def _quotient(v: Array, s: Array) -> Array:
    """Return ``v^2 / s^2``, and 0 where v is 0."""
    return np.where(v > 0, (v / np.where(v > 0, s, 1.0)) ** 2, 0.0)


def _sizes(v: Any) -> Array:
    sizes = np.abs(np.asarray(v, dtype=np.float64))
    if not np.isfinite(sizes).all():
        raise InputError("v must be finite, got NaN or infinite entries.")
    return sizes


def convex_root(a: float, b: float, q: Array) -> Array:
    """Solve ``t^a (1 + t)^b = q`` for t >= 0; for a = 0 the result is zero where q <= 1.

    ``a u + b log(1 + e^u) = log q`` with ``u = log t`` is increasing and convex, so Newton steps approach the root from
    the right after the first one, from any start.
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
