"""Encode classes as corners of a simplex, and compute class probabilities from the outputs of a model."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray
from scipy.linalg import helmert
from scipy.optimize import minimize_scalar
from scipy.special import log_softmax

Array = NDArray[np.float64]


def simplex(classes: int) -> Array:
    """Return the corners of a regular simplex around the origin, all at distance 1; -1 and 1 for two classes.

    Compared with one-hot targets there is one output less, and all classes have the same distance from each other.

    Args:
        classes: Number of classes k, at least 2.

    Returns:
        Corner of each class, shape ``(k, k - 1)``.
    """
    # The centered one-hot vectors, in Helmert's orthonormal basis of the space that they span.
    basis: Array = np.ascontiguousarray(0.0 - helmert(classes).T)
    basis /= np.linalg.norm(basis, axis=1, keepdims=True)
    return basis


def fit_sharpness(scores: Array, shares: Array) -> float:
    """Return the sharpness that maximizes the likelihood of the classes (temperature scaling).

    The sharpness does not change the most probable class. Scores must belong to rows left out of the fit; on training
    rows, probabilities would be overconfident.

    Args:
        scores: Score of each class for each row, shape ``(n, k)``.
        shares: Weight of each class in each row, shape ``(n, k)``.

    Returns:
        The sharpness, between ``exp(-5)`` and ``exp(5)``.
    """
    # An additional row of unknown class keeps the sharpness finite if all rows are classified correctly.
    scores = np.vstack([scores, np.sort(scores, axis=1).mean(0)])
    shares = np.vstack([shares, np.full(shares.shape[1], shares.sum() / len(shares) / shares.shape[1])])

    def loss(log_sharpness: float) -> float:
        return -float((shares * log_softmax(np.exp(log_sharpness) * scores, axis=1)).sum())

    return float(np.exp(minimize_scalar(loss, bounds=(-5.0, 5.0), method="bounded").x))
