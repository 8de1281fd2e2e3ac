"""Tracy-Widom law of the largest eigenvalue of a real random matrix.

References:
    Tracy & Widom (1996), "On orthogonal and symplectic matrix ensembles", https://arxiv.org/abs/solv-int/9509007.

    Ferrari & Spohn (2005), "A determinantal formula for the GOE Tracy-Widom distribution",
    https://arxiv.org/abs/math-ph/0505012.

    Bornemann (2010), "On the numerical evaluation of Fredholm determinants", https://arxiv.org/abs/0804.2543.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import numpy as np
from numpy.typing import NDArray
from scipy.integrate import quad
from scipy.special import airy

Array = NDArray[np.float64]

_NODES = 64
_REACH = 16.0  # the kernel is below 1e-18 beyond this distance from s, for s >= 0
_UNDERFLOW = 100.0
_LOW, _FAR = -8.0, 5.0  # the law is 1e-8 below the first point; beyond the second one term of the determinant suffices


def tracy_widom_sf(s: Any) -> Array:
    """Compute the probability that a Tracy-Widom variable of real matrices (beta = 1) exceeds s.

    The distribution function is the determinant ``det(1 - T)`` of the kernel ``T(x, y) = Ai((x + y)/2) / 2`` on
    ``(s, inf)``, computed by Gauss-Legendre quadrature to about 1e-13. Beyond ``s = 5`` the probability is the trace of
    T, with a relative error below 1e-5.

    Args:
        s: Points: a number or an array without NaN.

    Returns:
        Probabilities of the same shape.

    Example:
        >>> from featlearn.spectra import tracy_widom_sf
        >>> tracy_widom_sf([-1.27, 0.98, 2.02]).round(3).tolist()
        [0.5, 0.05, 0.01]
    """
    points = np.asarray(s, dtype=np.float64)
    result: Array = np.vectorize(_exceeds, otypes=[np.float64])(points)
    return result


@lru_cache(maxsize=4096)
def _exceeds(s: float) -> float:
    if s < _LOW:
        return 1.0
    if s > _UNDERFLOW:
        return 0.0
    if s > _FAR:
        return float(quad(lambda x: 0.5 * airy(x)[0], s, s + _REACH, epsabs=0.0, epsrel=1e-8)[0])
    nodes, weights = _quadrature()
    length = _REACH + max(0.0, -s)
    x, roots = s + length * (nodes + 1) / 2, np.sqrt(weights * length / 2)
    values, (rows, columns) = np.empty((_NODES, _NODES)), np.triu_indices(_NODES)
    values[rows, columns] = values[columns, rows] = airy((x[rows] + x[columns]) / 2)[0] / 2
    return float(1 - np.linalg.det(np.eye(_NODES) - roots[:, None] * values * roots))


@lru_cache(maxsize=1)
def _quadrature() -> tuple[Array, Array]:
    return np.polynomial.legendre.leggauss(_NODES)
