"""Comparisons, powers and rotations of matrices, in float64.

A matrix can have a leading dimension of blocks, ``(blocks, k, k)``; it then represents a block-diagonal matrix.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import scipy.linalg
import torch
from torch import Tensor

from featlearn._utils.rng import Seed, as_generator
from featlearn.errors import InputError


def as_float64(array: Any) -> Tensor:
    """Return an array-like object as a detached float64 tensor, on its device."""
    if isinstance(array, Tensor):
        return array.detach().to(torch.float64)
    return torch.from_numpy(np.array(array, dtype=np.float64))  # torch would convert floats of Python to float32


def _pair(a: Any, b: Any) -> tuple[Tensor, Tensor]:
    first, second = as_float64(a), as_float64(b)
    if first.shape != second.shape:
        raise InputError(f"a and b must have the same shape, got {tuple(first.shape)} and {tuple(second.shape)}.")
    return first.reshape(-1), second.reshape(-1)


def _cosine(first: Tensor, second: Tensor) -> float:
    first, second = (a / a.abs().amax() if a.numel() else a for a in (first, second))  # squares stay in range
    norms = first.norm() * second.norm()
    return float((first @ second / norms).clamp(-1.0, 1.0)) if norms > 0 else float("nan")


def cosine(a: Any, b: Any) -> float:
    """Compute the cosine of two arrays of the same shape, ``<a, b> / (|a| |b|)``.

    Args:
        a: First array or tensor.
        b: Second array or tensor, of the same shape.

    Returns:
        The cosine, between -1 and 1; NaN if an array is zero. For two feature matrices it is the correlation rho.

    Example:
        >>> import featlearn as fl
        >>> identity, first_axis = [[1.0, 0.0], [0.0, 1.0]], [[2.0, 0.0], [0.0, 0.0]]
        >>> round(fl.cosine(identity, first_axis), 4)
        0.7071

    References:
        Beaglehole, Mitliagkas & Agarwala, "Feature learning as alignment", https://openreview.net/forum?id=JXCe2ZcUXr,
        equation (NFC).
    """
    first, second = _pair(a, b)
    return _cosine(first, second)


def pearson(a: Any, b: Any) -> float:
    """Compute the Pearson correlation of the entries of two arrays: the cosine after subtracting each mean.

    Args:
        a: First array or tensor.
        b: Second array or tensor, of the same shape.

    Returns:
        The correlation, between -1 and 1; NaN if an array is constant.

    Example:
        >>> import featlearn as fl
        >>> round(fl.pearson([1.0, 2.0, 3.0], [5.0, 7.0, 9.0]), 4)
        1.0
        >>> round(fl.cosine([1.0, 2.0, 3.0], [5.0, 7.0, 9.0]), 4)  # without subtracting the means
        0.9875
    """
    first, second = _pair(a, b)
    return _cosine(_centered(first), _centered(second))


def _centered(a: Tensor) -> Tensor:
    """Subtract the mean of an array; rounding errors of a constant become exactly zero."""
    rest = a - a.mean()
    return rest if a.numel() and rest.abs().amax() > 8 * torch.finfo(a.dtype).eps * a.abs().amax() else a * 0


def symmetric_eigh(matrix: Any, what: str = "the matrix") -> tuple[Tensor, Tensor]:
    """Return the ascending eigenvalues and the eigenvectors of a symmetric matrix or stack in float64, or raise."""
    a = as_float64(matrix)
    if a.ndim < 2 or a.shape[-1] != a.shape[-2]:
        raise InputError(f"{what} must be square in its last two dimensions, got shape {tuple(a.shape)}.")
    if not torch.isfinite(a).all():
        raise InputError(f"{what} must be finite, got NaN or infinite entries.")
    skew = (a - a.mT).abs().max() if a.numel() else a.new_zeros(())
    if skew > 1e-6 * a.abs().max():
        raise InputError(f"{what} must be symmetric, but differs from its transpose by up to {float(skew):.2g}.")
    values, vectors = torch.linalg.eigh((a + a.mT) / 2)
    return values, vectors


def psd_power(matrix: Any, power: float) -> Tensor:
    """Compute a power of a positive semi-definite matrix, ``V diag(lambda^power) V^T``.

    Eigenvalues below ``k * eps * lambda_max`` are rounding errors and count as exactly zero: the square root would
    raise them from 1e-16 to 1e-8. A negative power is taken on the range of the matrix (pseudo-inverse).

    Args:
        matrix: Symmetric positive semi-definite matrix, shape ``(k, k)`` or ``(blocks, k, k)``.
        power: Exponent, any real number.

    Returns:
        The power, a float64 tensor of the same shape.

    Raises:
        InputError: If the matrix is not symmetric, not finite or has a negative eigenvalue.

    Example:
        >>> import torch, featlearn as fl
        >>> root = fl.psd_power(torch.tensor([[5.0, 4.0], [4.0, 5.0]]), 0.5)
        >>> [[round(value, 4) for value in row] for row in root.tolist()]
        [[2.0, 1.0], [1.0, 2.0]]
        >>> [[round(value, 4) for value in row] for row in (root @ root).tolist()]
        [[5.0, 4.0], [4.0, 5.0]]
    """
    values, vectors = symmetric_eigh(matrix)
    if values.numel() == 0:
        return as_float64(matrix).clone()
    top = values.amax(-1, keepdim=True).clamp_min(0)
    if (values < -1e-6 * top.clamp_min(values.abs().amax(-1, keepdim=True))).any():
        raise InputError(
            "matrix must be positive semi-definite, but its eigenvalues range "
            f"from {float(values.min()):.3g} to {float(values.max()):.3g}."
        )
    floor = values.shape[-1] * torch.finfo(values.dtype).eps * top
    kept = values > floor
    powers = torch.where(kept, torch.where(kept, values, 1.0) ** power, 0.0)
    return (vectors * powers.unsqueeze(-2)) @ vectors.mT


def principal_angles(u: Any, v: Any) -> Tensor:
    """Compute the principal angles between the column spaces of two matrices.

    Angles below 45 degrees are computed from sines and the others from cosines, because ``arccos`` does not resolve
    angles below 1e-8.

    Args:
        u: First matrix, shape ``(k, p)``. Columns must be linearly independent, but not orthonormal.
        v: Second matrix, shape ``(k, q)``, with independent columns.

    Returns:
        ``min(p, q)`` angles in radians, ascending.

    Raises:
        InputError: If a matrix has more columns than rows, or the numbers of rows differ.

    Example:
        >>> import torch, featlearn as fl
        >>> plane = torch.eye(3)[:, :2]
        >>> line = torch.tensor([[1.0], [0.0], [1.0]])
        >>> [round(angle, 1) for angle in fl.principal_angles(plane, line).rad2deg().tolist()]
        [45.0]

    References:
        Björck & Golub (1973), "Numerical methods for computing angles between linear subspaces",
        https://doi.org/10.1090/S0025-5718-1973-0348991-3.
    """
    first, second = as_float64(u), as_float64(v)
    for name, a in (("u", first), ("v", second)):
        if a.ndim != 2 or a.shape[0] < a.shape[1]:
            raise InputError(f"{name} must have shape (k, p) with p <= k columns, got shape {tuple(a.shape)}.")
    if first.shape[0] != second.shape[0]:
        raise InputError(f"u and v must have the same number of rows, got {first.shape[0]} and {second.shape[0]}.")
    if first.shape[1] < second.shape[1]:
        first, second = second, first
    q1, q2 = torch.linalg.qr(first)[0], torch.linalg.qr(second)[0]
    overlap = q1.mT @ q2
    cosines = torch.linalg.svdvals(overlap).clamp(max=1.0)
    sines = torch.linalg.svdvals(q2 - q1 @ overlap).clamp(max=1.0).flip(0)
    return torch.where(cosines**2 > 0.5, torch.asin(sines), torch.acos(cosines))


def corrupt(matrix: Any, generator: Seed = None) -> Tensor:
    """Return a matrix with the same eigenvalues and random eigenvectors.

    Replacing K by ``corrupt(K)`` keeps its spectrum and destroys its alignment with the weights; the remaining
    correlation is not due to alignment.

    Args:
        matrix: Symmetric matrix, shape ``(k, k)`` or ``(blocks, k, k)``.
        generator: Generator or seed of the Haar-distributed rotation. Default: seed 0.

    Returns:
        The rotated matrix, a float64 tensor of the same shape.

    Example:
        >>> import torch, featlearn as fl
        >>> K = torch.diag(torch.tensor([4.0, 2.0, 1.0]))
        >>> rotated = fl.corrupt(K, generator=0)
        >>> [round(value, 4) for value in torch.linalg.eigvalsh(rotated).tolist()]
        [1.0, 2.0, 4.0]
        >>> round(fl.cosine(K, rotated), 2)
        0.78

    References:
        Beaglehole, Mitliagkas & Agarwala, "Feature learning as alignment", https://openreview.net/forum?id=JXCe2ZcUXr,
        figure 1.
    """
    values, vectors = symmetric_eigh(matrix)
    source = as_generator(generator, "corrupt")
    gaussian = torch.randn(vectors.shape, generator=source, dtype=torch.float64)
    q, r = torch.linalg.qr(gaussian.to(vectors.device))
    # Q alone is not Haar-distributed: each column needs the sign of the diagonal entry of R.
    q = q * r.diagonal(dim1=-2, dim2=-1).sign().unsqueeze(-2)
    rotated: Tensor = (q * values.unsqueeze(-2)) @ q.mT
    return (rotated + rotated.mT) / 2


def eigh_in_place(matrix: Tensor) -> tuple[Tensor, Tensor]:
    """Compute eigenvalues and eigenvectors of a symmetric matrix, which is overwritten.

    On the CPU the memory is that of the matrix and of the eigenvectors; `torch.linalg.eigh` takes three more matrices.

    Args:
        matrix: Symmetric matrix in float64, shape ``(k, k)``.

    Returns:
        Eigenvalues in ascending order, shape ``(k,)``, and eigenvectors in columns, shape ``(k, k)``.
    """
    if matrix.device.type != "cpu":
        values, vectors = torch.linalg.eigh(matrix)
        return values, vectors
    # The transpose of a symmetric matrix is the column-major array that LAPACK takes without a copy.
    pair = scipy.linalg.eigh(matrix.contiguous().numpy().T, overwrite_a=True, check_finite=False, driver="evr")
    return torch.from_numpy(pair[0]), torch.from_numpy(pair[1])


def kernel_matrix(kernel: Tensor) -> Tensor:
    """Return a kernel of all outputs as a matrix, with the outputs of a sample side by side.

    Args:
        kernel: Kernel of shape (n, m, c, d).

    Returns:
        Matrix of shape (n c, m d).
    """
    n, m, c, d = kernel.shape
    return kernel.permute(0, 2, 1, 3).reshape(n * c, m * d)
