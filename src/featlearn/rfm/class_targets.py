"""Classes as points of a simplex, and probabilities from where a model's outputs lie among them."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray
from scipy.optimize import minimize_scalar
from scipy.special import log_softmax

Array = NDArray[np.float64]


def simplex(classes: int) -> Array:
    """Corners of a regular simplex around the origin, ``(k, k - 1)``, all at distance 1; -1 and 1 for two classes.

    A class is one output less than one-hot targets need, and no class is nearer to another than the rest.
    """
    # The centered one-hot vectors, in an orthonormal basis (Helmert's) of the space that they span.
    basis = np.zeros((classes, classes - 1))
    for j in range(classes - 1):
        basis[: j + 1, j] = -1.0
        basis[j + 1, j] = j + 1.0
    basis /= np.linalg.norm(basis, axis=0)
    corners: Array = basis / np.linalg.norm(basis, axis=1, keepdims=True)
    return corners


def class_probabilities(scores: Array, sharpness: float) -> Array:
    """``softmax(sharpness * scores)``, a row a sample."""
    shares: Array = np.exp(log_softmax(sharpness * scores, axis=1))
    return shares


def fit_sharpness(scores: Array, shares: Array) -> float:
    """The sharpness under which the classes are likeliest (temperature scaling).

    One number cannot change which class is the likeliest. Scores must be those of rows left out of the fit: on the
    rows themselves a model looks surer than it is.

    Args:
        scores: ``(n, k)``.
        shares: Weight of each class in each row, ``(n, k)``.
    """
    # One row more, a typical one of unknown class, keeps the sharpness finite where all rows are classified rightly.
    scores = np.vstack([scores, np.sort(scores, axis=1).mean(0)])
    shares = np.vstack([shares, np.full(shares.shape[1], shares.sum() / len(shares) / shares.shape[1])])

    def loss(log_sharpness: float) -> float:
        return -float((shares * log_softmax(np.exp(log_sharpness) * scores, axis=1)).sum())

    return float(np.exp(minimize_scalar(loss, bounds=(-5.0, 5.0), method="bounded").x))
