"""Norms of a matrix and of its change.

References:
    Wang, Engel, Sarwate, Dumitriu & Chiang (2022), https://arxiv.org/abs/2211.06506, eqs. 16 and 17 (the spectral
    paper).
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from featlearn.errors import InputError
from featlearn.linalg.matrices import as_float64
from featlearn.spectra._gram_eigenvalues import GramMatrix
from featlearn.spectra._singular_vectors import leading_vectors

_DENSE = 512  # smaller side up to which the whole Gram matrix is decomposed


def change_norms(initial: Any, trained: Any, *, scale: float = 1.0) -> ChangeNorms:
    """Compute norms of ``trained - initial``, divided by ``scale`` and relative to the norms of ``initial``.

    The norms are the Frobenius norm, the operator norm and the 2-to-infinity norm (the largest norm of a row). The
    spectral paper divides weights by ``scale = sqrt(d)``, and does not divide kernels. The norms are ordered:
    ``two_to_infinity <= operator <= frobenius``. Operator norms of large matrices are computed by Lanczos' method, to
    machine precision.

    Args:
        initial: Initial matrix, shape ``(rows, columns)``.
        trained: Matrix after training, of the same shape.
        scale: Divisor of the norms of the change, positive. Relative norms do not depend on it.

    Returns:
        The absolute and relative norms.

    Raises:
        InputError: If the arguments are not matrices of the same shape, are empty or not finite, or `scale` is not
            positive and finite.

    References:
        Wang, Engel, Sarwate, Dumitriu & Chiang (2022), https://arxiv.org/abs/2211.06506, eqs. 16 and 17.

    Example:
        >>> from featlearn.spectra import change_norms
        >>> norms = change_norms([[1.0, 0.0], [0.0, 1.0]], [[1.0, 0.0], [3.0, 5.0]])
        >>> norms.frobenius, norms.two_to_infinity
        (5.0, 5.0)
    """
    before, after = as_float64(initial).cpu(), as_float64(trained).cpu()
    if before.shape != after.shape or before.ndim != 2 or not before.numel():
        raise InputError(
            "initial and trained must be matrices of the same shape that are not empty, "
            f"got shapes {tuple(before.shape)} and {tuple(after.shape)}."
        )
    for name, a in (("initial", before), ("trained", after)):
        if not torch.isfinite(a).all():
            raise InputError(f"{name} must be finite, got NaN or infinite entries.")
    if not (math.isfinite(scale) and scale > 0):
        raise InputError(f"scale must be positive and finite, got {scale!r}.")
    change = matrix_norms(after - before)
    return ChangeNorms(*(c / scale for c in change), *relative_norms(change, matrix_norms(before)))


@dataclass(frozen=True)
class ChangeNorms:
    """Norms of the change of a matrix: the result of `change_norms`.

    Attributes:
        frobenius: Frobenius norm of the change, ``|trained - initial|_F / scale``.
        operator: Operator norm of the change (its largest singular value), ``|trained - initial| / scale``.
        two_to_infinity: Largest norm of a row of the change, ``max_i |row i of trained - initial| / scale``.
        relative_frobenius: Relative Frobenius norm, ``|trained - initial|_F / |initial|_F``; infinite if `initial` is
            zero and `trained` is not.
        relative_operator: Relative operator norm, ``|trained - initial| / |initial|``.
        relative_two_to_infinity: Largest norm of a row of the change, divided by the largest norm of a row of
            `initial`.
    """

    frobenius: float
    operator: float
    two_to_infinity: float
    relative_frobenius: float
    relative_operator: float
    relative_two_to_infinity: float


def matrix_norms(a: Tensor) -> tuple[float, float, float]:
    """Return the Frobenius norm, the operator norm and the largest norm of a row of a matrix."""
    # A decomposition of the Gram matrix is accurate for the largest value, and takes a fifth of the time of an SVD.
    operator = math.sqrt(GramMatrix(a).eigenvalues[-1]) if min(a.shape) <= _DENSE else float(leading_vectors(a)[0])
    return float(a.norm()), operator, float(a.norm(dim=1).max())


def relative_norms(change: tuple[float, ...], base: tuple[float, ...]) -> list[float]:
    """Return norms of a change over those of the initial matrix; infinite if that is zero and the change is not.

    Args:
        change: Norms of the change, from `matrix_norms`.
        base: Norms of the initial matrix.
    """
    return [c / b if b else (math.inf if c else 0.0) for c, b in zip(change, base, strict=True)]
