"""Eigenvalues as a user gives them, checked; ranks and entropy of a spectrum."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from featlearn.errors import InputError

__all__ = [
    "clean_eigenvalues",
    "effective_rank",
    "eigenvalue_vector",
    "positive_eigenvalues",
    "spectral_entropy",
    "stable_rank",
]


def eigenvalue_vector(eigenvalues: Any, what: str = "eigenvalues") -> NDArray[np.float64]:
    """Eigenvalues as a float64 vector in the order given, finite and at least one."""
    if isinstance(eigenvalues, Tensor):
        array = eigenvalues.detach().to("cpu", torch.float64).numpy()
    else:
        array = np.asarray(eigenvalues, dtype=np.float64)
    if array.ndim != 1:
        raise InputError(f"{what} must be a vector, got shape {array.shape}: pass one spectrum at a time")
    if not array.size:
        raise InputError(f"{what} must be a vector that is not empty: there are no eigenvalues")
    if not np.isfinite(array).all():
        raise InputError(f"{int((~np.isfinite(array)).sum())} of {array.size} {what} are NaN or infinite")
    return array


def positive_eigenvalues(eigenvalues: Any, what: str = "eigenvalues") -> tuple[NDArray[np.float64], int]:
    """The positive eigenvalues of a positive semi-definite matrix, ascending, and how many count as zero.

    Rounding is what is below ``n * eps * lambda_max`` or no larger than the most negative eigenvalue; a negative
    one beyond ``1e-6 * lambda_max`` is no rounding and is refused.
    """
    array = eigenvalue_vector(eigenvalues, what)
    low, high = float(array.min()), float(np.abs(array).max())
    if low < -1e-6 * high:
        raise InputError(
            f"{what} must not be negative, got down to {low:.3g} (largest {float(array.max()):.3g}): tails and "
            "ranks are of W^T W or of a kernel; square singular values, or take absolute values, if that is meant"
        )
    floor = max(array.size * np.finfo(np.float64).eps * high, -low)
    kept = np.sort(array[array > floor])
    return kept, array.size - kept.size


def clean_eigenvalues(eigenvalues: Any, what: str = "eigenvalues") -> NDArray[np.float64]:
    """All the eigenvalues of a positive semi-definite matrix, ascending, those that are rounding exactly zero."""
    values, zeros = positive_eigenvalues(eigenvalues, what)
    return np.concatenate([np.zeros(zeros), values])


def stable_rank(eigenvalues: Any) -> float:
    """``sum lambda / lambda_max``, which is ``|W|_F^2 / |W|^2`` for the eigenvalues of ``W^T W``.

    >>> stable_rank([2.0, 1.0, 1.0, 0.0])
    2.0
    """
    values = _nonzero(eigenvalues)
    return float(values.sum() / values[-1])


def spectral_entropy(eigenvalues: Any, *, normalised: bool = False) -> float:
    """``-sum p ln p`` with ``p = lambda / sum lambda``, in nats.

    Args:
        eigenvalues: Of a positive semi-definite matrix.
        normalised: Divide by ``ln(rank)``, its largest value (Martin and Mahoney); of rank one it is 0.
    """
    values = _nonzero(eigenvalues)
    p = values / values.sum()
    entropy = max(0.0, -float((p * np.log(p)).sum()))
    if not normalised:
        return entropy
    return entropy / math.log(len(p)) if len(p) > 1 else 0.0


def effective_rank(eigenvalues: Any) -> float:
    """``exp`` of the entropy: the number of equal eigenvalues that would be as spread (Roy and Vetterli 2007)."""
    return math.exp(spectral_entropy(eigenvalues))


def _nonzero(eigenvalues: Any) -> NDArray[np.float64]:
    values, zeros = positive_eigenvalues(eigenvalues)
    if not values.size:
        raise InputError(f"all {zeros} eigenvalues are zero: a zero matrix has no stable rank and no entropy")
    return values
