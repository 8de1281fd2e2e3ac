"""Checks of eigenvalues, and their ranks and entropy.

References:
    Wang, Engel, Sarwate, Dumitriu & Chiang (2022), https://arxiv.org/abs/2211.06506, eqs. 16 and 17 (the spectral
    paper).

    Martin & Mahoney (2021), "Implicit self-regularization in deep neural networks",
    https://arxiv.org/abs/1810.01075.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from featlearn._utils.public_names import renamed_arguments
from featlearn.errors import InputError


def eigenvalue_vector(eigenvalues: Any, what: str = "eigenvalues") -> NDArray[np.float64]:
    """Return eigenvalues as a float64 vector in their order, or raise if it is empty or not finite."""
    if isinstance(eigenvalues, Tensor):
        array = eigenvalues.detach().to("cpu", torch.float64).numpy()
    else:
        array = np.asarray(eigenvalues, dtype=np.float64)
    if array.ndim != 1:
        raise InputError(f"{what} must be a vector, got shape {array.shape}. Pass one spectrum at a time.")
    if not array.size:
        raise InputError(f"{what} must be a vector that is not empty, got no values.")
    if not np.isfinite(array).all():
        bad = int((~np.isfinite(array)).sum())
        raise InputError(f"{what} must be finite, but {bad} of {array.size} {what} are NaN or infinite.")
    return array


def positive_eigenvalues(eigenvalues: Any, what: str = "eigenvalues") -> tuple[NDArray[np.float64], int]:
    """Return the positive eigenvalues of a positive semi-definite matrix, ascending, and the number of zeros.

    Eigenvalues below ``n * eps * lambda_max``, or not larger than the absolute value of the most negative one, are
    rounding errors and count as zero. A negative eigenvalue beyond ``-1e-6 * lambda_max`` raises an error.
    """
    array = eigenvalue_vector(eigenvalues, what)
    low, high = float(array.min()), float(np.abs(array).max())
    if low < -1e-6 * high:
        raise InputError(
            f"{what} must not be negative, got values from {low:.3g} to {float(array.max()):.3g}. Pass eigenvalues of "
            "W^T W or of a kernel, squared singular values, or absolute values."
        )
    floor = max(array.size * np.finfo(np.float64).eps * high, -low)
    kept = np.sort(array[array > floor])
    return kept, array.size - kept.size


def clean_eigenvalues(eigenvalues: Any, what: str = "eigenvalues") -> NDArray[np.float64]:
    """Return all eigenvalues of a positive semi-definite matrix, ascending, with rounding errors set to zero."""
    values, zeros = positive_eigenvalues(eigenvalues, what)
    return np.concatenate([np.zeros(zeros), values])


def stable_rank(eigenvalues: Any) -> float:
    """Compute the stable rank ``sum lambda / lambda_max``.

    For the eigenvalues of ``W^T W`` this is ``|W|_F^2 / |W|^2``.

    Args:
        eigenvalues: Eigenvalues of a positive semi-definite matrix, in any order.

    Returns:
        The stable rank, at least 1 and at most the rank.

    Raises:
        InputError: If all eigenvalues are zero, or one is negative, NaN or infinite.

    Example:
        >>> from featlearn.spectra import stable_rank
        >>> stable_rank([2.0, 1.0, 1.0, 0.0])
        2.0
    """
    values = _nonzero(eigenvalues)
    return float(values.sum() / values[-1])


@renamed_arguments(normalised="normalized")
def spectral_entropy(eigenvalues: Any, *, normalized: bool = False) -> float:
    """Compute the entropy ``-sum p ln p`` of a spectrum, with ``p = lambda / sum lambda``.

    Args:
        eigenvalues: Eigenvalues of a positive semi-definite matrix, in any order.
        normalized: Whether to divide by ``ln(rank)``, the largest value (Martin and Mahoney). A matrix of rank one has
            entropy 0.

    Returns:
        The entropy in nats; between 0 and 1 if normalized.

    Raises:
        InputError: If all eigenvalues are zero, or one is negative, NaN or infinite.

    References:
        Martin & Mahoney (2021), https://arxiv.org/abs/1810.01075.

    Example:
        >>> from featlearn.spectra import spectral_entropy
        >>> spectral_entropy([3.0, 3.0, 0.0], normalized=True)
        1.0
    """
    values = _nonzero(eigenvalues)
    p = values / values.sum()
    entropy = max(0.0, -float((p * np.log(p)).sum()))
    if not normalized:
        return entropy
    return entropy / math.log(len(p)) if len(p) > 1 else 0.0


def effective_rank(eigenvalues: Any) -> float:
    """Compute the effective rank, the exponential of the entropy of a spectrum.

    It is the number of equal eigenvalues with the same entropy.

    Args:
        eigenvalues: Eigenvalues of a positive semi-definite matrix, in any order.

    Returns:
        The effective rank, at least 1 and at most the rank.

    Raises:
        InputError: If all eigenvalues are zero, or one is negative, NaN or infinite.

    References:
        Roy & Vetterli (2007), "The effective rank: a measure of effective dimensionality", EUSIPCO.

    Example:
        >>> from featlearn.spectra import effective_rank
        >>> round(effective_rank([5.0, 5.0, 5.0, 0.0]), 6)
        3.0
    """
    return math.exp(spectral_entropy(eigenvalues))


def _nonzero(eigenvalues: Any) -> NDArray[np.float64]:
    values, zeros = positive_eigenvalues(eigenvalues)
    if not values.size:
        raise InputError(f"eigenvalues must not all be zero, got {zeros} zeros: a zero matrix has no rank or entropy.")
    return values
