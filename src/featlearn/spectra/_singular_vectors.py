"""Leading singular vectors of weights and eigenvectors of kernels, and their alignment with given directions.

References:
    Wang, Engel, Sarwate, Dumitriu & Chiang (2022), https://arxiv.org/abs/2211.06506, figure 2 (the spectral paper).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from scipy.sparse.linalg import eigsh, svds
from torch import Tensor

from featlearn.errors import InputError
from featlearn.linalg.matrices import as_float64, principal_angles

_DENSE = 256  # side up to which the whole decomposition is computed, in milliseconds


def leading_vectors(matrix: Any, k: int = 1) -> tuple[Tensor, Tensor]:
    """Compute the k largest singular values of a matrix and the right singular vectors.

    For a symmetric matrix, such as a kernel, the vectors are the eigenvectors with the largest absolute eigenvalues.
    For large matrices only the leading vectors are computed, by Lanczos' method from a fixed start.

    Args:
        matrix: Matrix of shape ``(rows, columns)``.
        k: Number of vectors, from 1 to the smaller side of the matrix.

    Returns:
        Singular values in descending order, shape ``(k,)``, and vectors as columns, shape ``(columns, k)``, in float64
        on the CPU. The sign of a vector is arbitrary.

    Raises:
        InputError: If `matrix` is not a matrix, is empty or not finite, or `k` is out of range.

    Example:
        >>> from featlearn.spectra import leading_vectors
        >>> values, vectors = leading_vectors([[0.0, 2.0], [0.0, 0.0], [1.0, 0.0]])
        >>> values.tolist(), vectors.abs().tolist()
        ([2.0], [[0.0], [1.0]])
    """
    a = as_float64(matrix).cpu()
    if a.ndim != 2 or not a.numel():
        raise InputError(f"matrix must have shape (rows, columns) and not be empty, got shape {tuple(a.shape)}.")
    if not torch.isfinite(a).all():
        raise InputError("matrix must be finite, got NaN or infinite entries.")
    smaller = min(a.shape)
    if not 1 <= k <= smaller:
        raise InputError(f"k must be from 1 to the smaller side of the matrix, {smaller}, got {k}.")
    if smaller <= _DENSE or 4 * k > smaller or not a.any():
        _, values, vectors = torch.linalg.svd(a, full_matrices=False)
        return values[:k], vectors[:k].mT.contiguous()
    array = a.numpy()
    # Not a constant vector, which is an eigenvector of a centered kernel with eigenvalue zero.
    start = np.random.default_rng(0).standard_normal(smaller)
    if a.shape[0] == a.shape[1] and torch.equal(a, a.mT):
        values, vectors = eigsh(array, k, which="LM", v0=start)
        order = np.argsort(-np.abs(values), kind="stable")
        return torch.from_numpy(np.abs(values[order])), torch.from_numpy(vectors[:, order].copy())
    _, values, rows = svds(array, k, v0=start)
    order = np.argsort(-values, kind="stable")
    return torch.from_numpy(values[order]), torch.from_numpy(rows[order].T.copy())


def leading_alignment(matrix: Any, directions: Any, k: int = 1) -> LeadingAlignment:
    """Measure the alignment of the k leading vectors of a weight or kernel with given directions.

    The alignment is ``|<u_i, beta>| / |beta|``: for a weight (h, d) the right singular vectors are compared with
    signals in input space, for a kernel (n, n) the eigenvectors with labels. For centered labels pass
    ``centered_kernel(K)`` as the matrix.

    Args:
        matrix: Weight of shape ``(rows, columns)``, or symmetric kernel.
        directions: One direction of shape ``(columns,)``, or q directions of shape ``(columns, q)``, linearly
            independent.
        k: Number of leading vectors, from 1 to the smaller side of the matrix.

    Returns:
        The overlaps, projections and principal angles.

    Raises:
        InputError: If the matrix is empty or not finite, `k` is out of range, or the directions have another length,
            are not finite or linearly dependent.

    References:
        Wang, Engel, Sarwate, Dumitriu & Chiang (2022), https://arxiv.org/abs/2211.06506, figure 2.

    Example:
        >>> from featlearn.spectra import leading_alignment
        >>> leading_alignment([[0.0, 2.0], [0.0, 0.0], [1.0, 0.0]], [0.0, 5.0]).overlaps.tolist()
        [1.0]
    """
    values, vectors = leading_vectors(matrix, k)
    return subspace_alignment(vectors, directions, values=values)


def subspace_alignment(vectors: Any, directions: Any, *, values: Any = None) -> LeadingAlignment:
    """Measure the alignment of orthonormal vectors with given directions, as `leading_alignment` does.

    Args:
        vectors: Vectors with orthonormal columns, shape ``(d, k)``, the leading one first.
        directions: One direction of shape ``(d,)``, or q directions of shape ``(d, q)``, linearly independent but not
            necessarily orthogonal.
        values: Singular values or eigenvalues of the vectors, copied to the result. None copies none.

    Returns:
        The overlaps, projections and principal angles.

    Raises:
        InputError: If the vectors are not orthonormal, or the directions have another length, are not finite or
            linearly dependent.

    Example:
        >>> from featlearn.spectra import subspace_alignment
        >>> result = subspace_alignment([[1.0, 0.0], [0.0, 1.0], [0.0, 0.0]], [3.0, 0.0, 4.0])
        >>> round(float(result.projections), 6)
        0.6
    """
    u, given = as_float64(vectors).cpu(), as_float64(directions).cpu()
    beta = given.unsqueeze(1) if given.ndim == 1 else given
    if u.ndim != 2 or beta.ndim != 2 or u.shape[0] != beta.shape[0]:
        raise InputError(
            f"directions must have one entry for each of the {u.shape[0]} entries of a leading vector, "
            f"got shape {tuple(given.shape)}."
        )
    if not torch.isfinite(beta).all():
        raise InputError("directions must be finite, got NaN or infinite entries.")
    norms = beta.norm(dim=0)
    if not norms.all() or torch.linalg.matrix_rank(beta / norms) < beta.shape[1]:
        raise InputError(
            "directions must be linearly independent and not zero. Remove directions that the others span."
        )
    skew = float((u.mT @ u - torch.eye(u.shape[1], dtype=torch.float64)).abs().max())
    if not skew < 1e-6:
        raise InputError(
            f"vectors must have orthonormal columns, got a Gram matrix that differs from the identity by {skew:.2g}. "
            "Use torch.linalg.qr."
        )
    overlaps = (u.mT @ (beta / norms)).abs().clamp(max=1.0)
    projections = overlaps.norm(dim=0).clamp(max=1.0)
    if given.ndim == 1:
        overlaps, projections = overlaps[:, 0], projections[0]
    return LeadingAlignment(
        None if values is None else as_float64(values), overlaps, projections, principal_angles(u, beta)
    )


@dataclass(frozen=True, eq=False)
class LeadingAlignment:
    """Alignment of leading vectors with directions: the result of `leading_alignment` and `subspace_alignment`.

    Attributes:
        values: The k leading singular values. None if they were not passed to `subspace_alignment`.
        overlaps: Overlaps ``|<u_i, beta_j>| / |beta_j|``, shape ``(k,)`` for one direction and ``(k, q)`` for several.
        projections: Length of the projection of each unit direction on the span of the k vectors: a number for one
            direction, shape ``(q,)`` for several.
        angles: Principal angles between the two spans in radians, ascending, shape ``(min(k, q),)``.
    """

    values: Tensor | None
    overlaps: Tensor
    projections: Tensor
    angles: Tensor
