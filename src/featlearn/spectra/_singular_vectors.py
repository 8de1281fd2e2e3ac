"""Leading singular vectors of weights and eigenvectors of kernels, and what they are aligned with."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from scipy.sparse.linalg import eigsh, svds
from torch import Tensor

from featlearn.errors import InputError
from featlearn.linalg.matrices import as_float64, principal_angles

_DENSE = 256  # up to this size a whole decomposition takes milliseconds


def leading_vectors(matrix: Any, k: int = 1) -> tuple[Tensor, Tensor]:
    """The k largest singular values of a matrix, descending, and its right singular vectors as columns.

    Of a symmetric matrix, such as a kernel, these are the eigenvectors, by the size of their eigenvalues. Large
    matrices are not decomposed whole: Lanczos' method finds the leading vectors alone, from a start that is always
    the same.

    Args:
        matrix: (rows, columns).
        k: How many, at most the smaller side.

    Returns:
        Values (k,) and vectors (columns, k), in float64 on the CPU; the sign of a vector means nothing.
    """
    a = as_float64(matrix).cpu()
    if a.ndim != 2 or not a.numel():
        raise InputError(f"the matrix must be (rows, columns) and not empty, got shape {tuple(a.shape)}")
    if not torch.isfinite(a).all():
        raise InputError("the matrix has NaN or infinite entries")
    smaller = min(a.shape)
    if not 1 <= k <= smaller:
        raise InputError(f"k must be from 1 to the smaller side of the matrix, {smaller}, got {k}")
    if smaller <= _DENSE or 4 * k > smaller or not a.any():
        _, values, vectors = torch.linalg.svd(a, full_matrices=False)
        return values[:k], vectors[:k].mT.contiguous()
    array = a.numpy()
    # Not a constant vector: of a centered kernel that is an eigenvector of eigenvalue zero.
    start = np.random.default_rng(0).standard_normal(smaller)
    if a.shape[0] == a.shape[1] and torch.equal(a, a.mT):
        found, vectors = eigsh(array, k, which="LM", v0=start)
        order = np.argsort(-np.abs(found), kind="stable")
        return torch.from_numpy(np.abs(found[order])), torch.from_numpy(vectors[:, order].copy())
    _, found, rows = svds(array, k, v0=start)
    order = np.argsort(-found, kind="stable")
    return torch.from_numpy(found[order]), torch.from_numpy(rows[order].T.copy())


def leading_alignment(matrix: Any, directions: Any, k: int = 1) -> LeadingAlignment:
    r"""How the k leading vectors of a weight or kernel are aligned with directions that are known.

    ``|<u_i, beta>| / |beta|`` (spectral paper, figure 2): for a weight (h, d) the right singular vectors against
    signals in the space of its inputs; for a kernel (n, n) the eigenvectors against labels. For labels without their
    mean pass ``centered_kernel(K)`` and centered labels.

    Args:
        matrix: (rows, columns), or a symmetric kernel.
        directions: (columns,), or (columns, q) for q directions.
        k: Number of leading vectors.
    """
    values, vectors = leading_vectors(matrix, k)
    return subspace_alignment(vectors, directions, values=values)


def subspace_alignment(vectors: Any, directions: Any, *, values: Any = None) -> LeadingAlignment:
    """What `leading_alignment` gives, for orthonormal vectors that are already known.

    Args:
        vectors: (d, k) with orthonormal columns, the leading one first.
        directions: (d,) or (d, q); they need not be orthogonal, but independent.
        values: Singular values or eigenvalues that belong to the vectors, handed through.
    """
    u, given = as_float64(vectors).cpu(), as_float64(directions).cpu()
    beta = given.unsqueeze(1) if given.ndim == 1 else given
    if u.ndim != 2 or beta.ndim != 2 or u.shape[0] != beta.shape[0]:
        raise InputError(
            f"directions must have one entry for each of the {u.shape[0]} entries of a leading vector, "
            f"got shape {tuple(given.shape)}"
        )
    if not torch.isfinite(beta).all():
        raise InputError("directions have NaN or infinite entries")
    norms = beta.norm(dim=0)
    if not norms.all() or torch.linalg.matrix_rank(beta / norms) < beta.shape[1]:
        raise InputError("directions must be independent and not zero: leave out those that the others span")
    skew = float((u.mT @ u - torch.eye(u.shape[1], dtype=torch.float64)).abs().max())
    if not skew < 1e-6:
        raise InputError(f"vectors must have orthonormal columns, these are off by {skew:.2g}: use torch.linalg.qr")
    overlaps = (u.mT @ (beta / norms)).abs().clamp(max=1.0)
    projections = overlaps.norm(dim=0).clamp(max=1.0)
    if given.ndim == 1:
        overlaps, projections = overlaps[:, 0], projections[0]
    return LeadingAlignment(
        None if values is None else as_float64(values), overlaps, projections, principal_angles(u, beta)
    )


@dataclass(frozen=True, eq=False)
class LeadingAlignment:
    """Outcome of `leading_alignment`.

    Attributes:
        values: The k leading singular values.
        overlaps: ``|<u_i, beta_j>| / |beta_j|``, (k,) for one direction and (k, q) for several.
        projections: Length of a unit direction's projection on the span of the k vectors: a number, or (q,).
        angles: Principal angles between the two spans (radians, ascending), ``min(k, q)`` of them.
    """

    values: Tensor | None
    overlaps: Tensor
    projections: Tensor
    angles: Tensor
