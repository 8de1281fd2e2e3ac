"""Eigenvalues of weights and kernels, their ranks and entropy, and norms of a change.

References:
    Wang, Engel, Sarwate, Dumitriu & Chiang (2022), https://arxiv.org/abs/2211.06506, eqs. 16 and 17 (the spectral
    paper).

    Martin & Mahoney (2021), "Implicit self-regularization in deep neural networks",
    https://arxiv.org/abs/1810.01075.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray
from scipy.linalg import eigh
from scipy.linalg.blas import dsyrk
from torch import Tensor

from featlearn._utils.public_names import renamed_arguments
from featlearn.errors import InputError
from featlearn.linalg.matrices import as_float64
from featlearn.spectra._singular_vectors import leading_vectors


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
    change, base = _norms(after - before), _norms(before)
    relative = [c / b if b else (math.inf if c else 0.0) for c, b in zip(change, base, strict=True)]
    return ChangeNorms(*(c / scale for c in change), *relative)


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


def _norms(a: Tensor) -> tuple[float, float, float]:
    return float(a.norm()), float(leading_vectors(a)[0]), float(a.norm(dim=1).max())


def weight_eigenvalues(
    weight: Any, *, scale: float | None = None, side: Literal["columns", "rows", "smaller"] = "columns"
) -> Tensor:
    """Compute the eigenvalues of ``W^T W / scale`` in float64.

    The eigenvalues are those of the Gram matrix of the smaller side. Singular values would resolve smaller eigenvalues,
    but take several times as long. The difference is below ``eps lambda_max``, which is beyond the precision of a
    float32 weight and counts as zero in all functions of this package.

    Args:
        weight: Weight of shape ``(h, d)``, or ``(groups, h, d)`` for a block-diagonal weight, whose spectrum consists
            of those of all blocks.
        scale: Divisor of ``W^T W``, positive. None divides by h, as in `marchenko_pastur`.
        side: ``"columns"`` for the d eigenvalues of ``W^T W``, including ``d - h`` exact zeros if h < d; ``"rows"`` for
            the h eigenvalues of ``W W^T``, including ``h - d`` zeros if d < h; ``"smaller"`` for the min(h, d)
            eigenvalues that both share.

    Returns:
        The eigenvalues, a float64 vector on the CPU, ascending.

    Raises:
        InputError: If `weight` has another shape, is empty or not finite, `scale` is not positive and finite, or `side`
            is none of the three names.

    Example:
        >>> from featlearn.spectra import weight_eigenvalues
        >>> weight_eigenvalues([[3.0, 0.0, 0.0], [0.0, 2.0, 0.0]], scale=1).tolist()
        [0.0, 4.0, 9.0]
    """
    w = as_float64(weight).cpu()
    if w.ndim not in (2, 3) or not w.numel():
        raise InputError(
            f"weight must have shape (h, d) or (groups, h, d) and not be empty, got shape {tuple(w.shape)}. "
            "Reshape a convolution to (out, in * kernel)."
        )
    if not torch.isfinite(w).all():
        raise InputError("weight must be finite, got NaN or infinite entries.")
    sizes = {"rows": w.shape[-2], "columns": w.shape[-1], "smaller": min(w.shape[-2:])}
    if side not in sizes:
        raise InputError(f"side must be 'columns', 'rows' or 'smaller', got {side!r}.")
    divisor = w.shape[-2] if scale is None else scale
    if not (math.isfinite(divisor) and divisor > 0):
        raise InputError(f"scale must be positive and finite, got {scale!r}.")
    blocks = w if w.ndim == 3 else w.unsqueeze(0)
    values = torch.from_numpy(gram_eigenvalues(blocks)) / divisor
    zeros = values.new_zeros((sizes[side] - sizes["smaller"]) * blocks.shape[0])
    return torch.cat([zeros, values])


_BLOCK = 1 << 19  # numbers per float64 block: 4 MB; larger blocks are not faster


def gram_eigenvalues(weight: Tensor) -> NDArray[np.float64]:
    """Compute the ``groups * min(h, d)`` eigenvalues that ``W^T W`` and ``W W^T`` share, in float64.

    The Gram matrix of the smaller side is summed over blocks of the larger one, so that in addition to the weight only
    one block and half a Gram matrix are in memory. An eigenvalue has an error of about ``eps lambda_max``: those below
    ``n eps lambda_max`` are rounding errors and count as zero in all functions of this package
    (`positive_eigenvalues`).

    SciPy's BLAS and LAPACK are faster: on one thread ``dsyrk`` took half the time of torch's product, which forms both
    triangles, and ``dsyevr`` two thirds of ``torch.linalg.eigvalsh`` (both 3072 x 768).

    Args:
        weight: Weight of shape ``(groups, h, d)`` in any floating dtype, finite.

    Returns:
        The eigenvalues, ascending.
    """
    return np.sort(np.concatenate([_block_eigenvalues(w) for w in weight.detach()]))


def _block_eigenvalues(w: Tensor) -> NDArray[np.float64]:
    if w.stride(0) == 1:  # a transposed view: read its memory along the stored rows
        w = w.mT
    tall = w.shape[0] >= w.shape[1]
    larger, smaller = (0, 1) if tall else (1, 0)
    # Only the upper triangle is written, so that half of the zero pages are never allocated.
    gram = np.zeros((w.shape[smaller], w.shape[smaller]), order="F")
    step = min(max(1, _BLOCK // w.shape[smaller]), w.shape[larger])
    # One buffer for all blocks: new ones would accumulate on the heap.
    buffer = torch.empty(step * w.shape[smaller], dtype=torch.float64)
    for block in torch.split(w, step, dim=larger):
        columns = buffer[: block.numel()].view(block.shape).copy_(block).numpy().T  # Fortran order for BLAS
        gram = dsyrk(1.0, columns, beta=1.0, c=gram, trans=0 if tall else 1, overwrite_c=1)
    values: NDArray[np.float64] = eigh(
        gram, lower=False, eigvals_only=True, driver="evr", overwrite_a=True, check_finite=False
    )
    return values.clip(min=0.0)


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
