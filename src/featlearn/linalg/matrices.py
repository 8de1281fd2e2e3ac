"""Comparisons, powers and rotations of matrices, in float64.

A matrix may carry leading block dimensions, ``(blocks, k, k)``: it then stands for a block-diagonal
matrix, and every function here works on the blocks alone.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

from featlearn._utils.rng import Seed, as_generator
from featlearn.errors import InputError


def as_float64(array: Any) -> Tensor:
    """A detached float64 tensor of anything array-like, on the device it is on."""
    if isinstance(array, Tensor):
        return array.detach().to(torch.float64)
    return torch.from_numpy(np.array(array, dtype=np.float64))  # torch makes float32 of Python's floats


def _pair(a: Any, b: Any) -> tuple[Tensor, Tensor]:
    first, second = as_float64(a), as_float64(b)
    if first.shape != second.shape:
        raise InputError(
            "only arrays of one shape can be compared: "
            f"the first is {tuple(first.shape)}, the second {tuple(second.shape)}"
        )
    return first.reshape(-1), second.reshape(-1)


def _cosine(first: Tensor, second: Tensor) -> float:
    first, second = (a / a.abs().amax() if a.numel() else a for a in (first, second))  # squares stay in range
    norms = first.norm() * second.norm()
    return float((first @ second / norms).clamp(-1.0, 1.0)) if norms > 0 else float("nan")


def cosine(a: Any, b: Any) -> float:
    """Cosine of two arrays of one shape, ``<a, b> / (|a| |b|)``.

    For two feature matrices this is the correlation rho of the NFA paper (equation NFC).
    It is NaN when either array is zero.

    >>> cosine([[1.0, 0.0], [0.0, 1.0]], [[2.0, 0.0], [0.0, 0.0]])
    0.7071067811865475
    """
    first, second = _pair(a, b)
    return _cosine(first, second)


def pearson(a: Any, b: Any) -> float:
    """Pearson correlation of the entries of two arrays of one shape: the cosine after each mean is removed.

    It is NaN when either array is constant.
    """
    first, second = _pair(a, b)
    return _cosine(_centered(first), _centered(second))


def _centered(a: Tensor) -> Tensor:
    """The array without its mean; what rounding leaves of a constant counts as zero."""
    rest = a - a.mean()
    return rest if a.numel() and rest.abs().amax() > 8 * torch.finfo(a.dtype).eps * a.abs().amax() else a * 0


def symmetric_eigh(matrix: Any, what: str = "the matrix") -> tuple[Tensor, Tensor]:
    """Eigenvalues (ascending) and eigenvectors of a symmetric matrix or stack, in float64, checked."""
    a = as_float64(matrix)
    if a.ndim < 2 or a.shape[-1] != a.shape[-2]:
        raise InputError(f"{what} must be square in its last two dimensions, got shape {tuple(a.shape)}")
    if not torch.isfinite(a).all():
        raise InputError(f"{what} has NaN or infinite entries")
    skew = (a - a.mT).abs().max() if a.numel() else a.new_zeros(())
    if skew > 1e-6 * a.abs().max():
        raise InputError(f"{what} must be symmetric: it differs from its transpose by up to {float(skew):.2g}")
    values, vectors = torch.linalg.eigh((a + a.mT) / 2)
    return values, vectors


def psd_power(matrix: Any, power: float) -> Tensor:
    """Power of a positive semi-definite matrix, ``V diag(lambda^power) V^T``.

    Eigenvalues below ``k * eps * lambda_max`` are rounding, not signal, and count as exactly zero: the
    square root would raise them from 1e-16 to 1e-8. A negative power is taken on the range alone
    (the pseudo-inverse).

    Args:
        matrix: Symmetric positive semi-definite, ``(k, k)`` or ``(blocks, k, k)``.
        power: Any real number.
    """
    values, vectors = symmetric_eigh(matrix)
    if values.numel() == 0:
        return as_float64(matrix).clone()
    top = values.amax(-1, keepdim=True).clamp_min(0)
    if (values < -1e-6 * top.clamp_min(values.abs().amax(-1, keepdim=True))).any():
        raise InputError(
            "the matrix must be positive semi-definite: its eigenvalues run "
            f"from {float(values.min()):.3g} to {float(values.max()):.3g}"
        )
    floor = values.shape[-1] * torch.finfo(values.dtype).eps * top
    kept = values > floor
    powers = torch.where(kept, torch.where(kept, values, 1.0) ** power, 0.0)
    return (vectors * powers.unsqueeze(-2)) @ vectors.mT


def principal_angles(u: Any, v: Any) -> Tensor:
    """Principal angles (radians, ascending) between the column spaces of ``u`` and ``v``.

    Angles below 45 degrees come from sines and the others from cosines (Bjorck and Golub), because
    ``arccos`` cannot tell an angle of 1e-9 from zero.

    Args:
        u: ``(k, p)``, columns need not be orthonormal but must be independent.
        v: ``(k, q)``.

    Returns:
        ``min(p, q)`` angles.
    """
    first, second = as_float64(u), as_float64(v)
    for name, a in (("u", first), ("v", second)):
        if a.ndim != 2 or a.shape[0] < a.shape[1]:
            raise InputError(f"{name} must be (k, p) with p <= k columns, got shape {tuple(a.shape)}")
    if first.shape[0] != second.shape[0]:
        raise InputError(f"u and v must have as many rows: {first.shape[0]} and {second.shape[0]}")
    if first.shape[1] < second.shape[1]:
        first, second = second, first
    q1, q2 = torch.linalg.qr(first)[0], torch.linalg.qr(second)[0]
    overlap = q1.mT @ q2
    cosines = torch.linalg.svdvals(overlap).clamp(max=1.0)
    sines = torch.linalg.svdvals(q2 - q1 @ overlap).clamp(max=1.0).flip(0)
    return torch.where(cosines**2 > 0.5, torch.asin(sines), torch.acos(cosines))


def corrupt(matrix: Any, generator: Seed = None) -> Tensor:
    """A matrix with the same eigenvalues and random eigenvectors (figure 1 of the NFA paper).

    Replacing K by ``corrupt(K)`` keeps its spectrum and destroys its alignment with the weights; what is
    left of the correlation was never alignment.

    Args:
        matrix: Symmetric, ``(k, k)`` or ``(blocks, k, k)``.
        generator: Generator or seed of the Haar-distributed rotation.
    """
    values, vectors = symmetric_eigh(matrix)
    source = as_generator(generator, "corrupt")
    gaussian = torch.randn(vectors.shape, generator=source, dtype=torch.float64)
    q, r = torch.linalg.qr(gaussian.to(vectors.device))
    # QR alone is not Haar: the sign of each column of R must be given back to Q.
    q = q * r.diagonal(dim1=-2, dim2=-1).sign().unsqueeze(-2)
    rotated: Tensor = (q * values.unsqueeze(-2)) @ q.mT
    return (rotated + rotated.mT) / 2
