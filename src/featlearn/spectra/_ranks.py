"""Eigenvalues of weights and kernels, their ranks and entropy, and norms of a change."""

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
    r"""Norms of ``trained - initial``, each divided by ``scale``, and relative to the same norm of ``initial``.

    The Frobenius norm, the operator norm and the 2-to-infinity norm (the largest norm of a row) of the spectral
    paper's equation (16), where weights are divided by ``scale = sqrt(d)`` and kernels by nothing. By (17) they
    descend: ``two_to_infinity <= operator <= frobenius``. Operator norms of large matrices are found by Lanczos'
    method, to rounding.

    Args:
        initial: (rows, columns).
        trained: Of the same shape.
        scale: What the norms of the change are divided by; the relative ones do not depend on it.
    """
    before, after = as_float64(initial).cpu(), as_float64(trained).cpu()
    if before.shape != after.shape or before.ndim != 2 or not before.numel():
        raise InputError(
            "initial and trained must be matrices of one shape that are not empty, "
            f"got {tuple(before.shape)} and {tuple(after.shape)}"
        )
    for name, a in (("initial", before), ("trained", after)):
        if not torch.isfinite(a).all():
            raise InputError(f"the {name} matrix has NaN or infinite entries")
    if not (math.isfinite(scale) and scale > 0):
        raise InputError(f"scale must be positive and finite, got {scale!r}")
    change, base = _norms(after - before), _norms(before)
    relative = [c / b if b else (math.inf if c else 0.0) for c, b in zip(change, base, strict=True)]
    return ChangeNorms(*(c / scale for c in change), *relative)


@dataclass(frozen=True)
class ChangeNorms:
    """Outcome of `change_norms`.

    Attributes:
        frobenius: ``|trained - initial|_F / scale``.
        operator: ``|trained - initial| / scale``, the largest singular value.
        two_to_infinity: ``max_i |row i of trained - initial| / scale``.
        relative_frobenius: ``|trained - initial|_F / |initial|_F``; infinite for a change from zero.
        relative_operator: The same for the operator norm.
        relative_two_to_infinity: The same for the largest row.
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
    r"""Eigenvalues of ``W^T W / scale`` in float64, ascending.

    They come from the Gram matrix of the smaller side. Singular values would be exact to smaller ones, but take
    several times as long, and the difference is below ``eps lambda_max``: what is lost, a float32 weight never had,
    and it counts as zero wherever spectra are read.

    Args:
        weight: (h, d), or (groups, h, d) for a block-diagonal weight, whose spectrum is that of all the blocks.
        scale: What ``W^T W`` is divided by; h if None, as in `marchenko_pastur`.
        side: ``"columns"`` for the d eigenvalues of ``W^T W``, of which ``d - h`` are exact zeros if h < d;
            ``"rows"`` for the h ones of ``W W^T``, with ``h - d`` zeros if d < h; ``"smaller"`` for the min(h, d)
            that both share.

    >>> weight_eigenvalues([[3.0, 0.0, 0.0], [0.0, 2.0, 0.0]], scale=1).tolist()
    [0.0, 4.0, 9.0]
    """
    w = as_float64(weight).cpu()
    if w.ndim not in (2, 3) or not w.numel():
        raise InputError(
            f"a weight must be (h, d) or (groups, h, d) and not empty, got shape {tuple(w.shape)}: "
            "reshape a convolution to (out, in * kernel)"
        )
    if not torch.isfinite(w).all():
        raise InputError("the weight has NaN or infinite entries")
    sizes = {"rows": w.shape[-2], "columns": w.shape[-1], "smaller": min(w.shape[-2:])}
    if side not in sizes:
        raise InputError(f'side must be "columns", "rows" or "smaller", got {side!r}')
    divisor = w.shape[-2] if scale is None else scale
    if not (math.isfinite(divisor) and divisor > 0):
        raise InputError(f"scale must be positive and finite, got {scale!r}")
    blocks = w if w.ndim == 3 else w.unsqueeze(0)
    values = torch.from_numpy(gram_eigenvalues(blocks)) / divisor
    zeros = values.new_zeros((sizes[side] - sizes["smaller"]) * blocks.shape[0])
    return torch.cat([zeros, values])


_BLOCK = 1 << 19  # numbers that are float64 at a time: 4 MB; larger blocks were no faster


def gram_eigenvalues(weight: Tensor) -> NDArray[np.float64]:
    r"""The ``groups * min(h, d)`` eigenvalues that ``W^T W`` and ``W W^T`` share, in float64, ascending.

    The Gram matrix of the smaller side is summed over blocks of the larger one, so that beside the weight only a
    block and half a Gram matrix are in memory. An eigenvalue is exact to about ``eps lambda_max``: those below
    ``n eps lambda_max`` are rounding, and count as zero wherever spectra are read (`positive_eigenvalues`).

    SciPy's BLAS and LAPACK: on one thread its ``dsyrk`` took half the time of torch's product, which forms both
    triangles, and its ``dsyevr`` two thirds of ``torch.linalg.eigvalsh`` (both 3072 x 768).

    Args:
        weight: (groups, h, d) in any floating dtype, finite.
    """
    return np.sort(np.concatenate([_block_eigenvalues(w) for w in weight.detach()]))


def _block_eigenvalues(w: Tensor) -> NDArray[np.float64]:
    if w.stride(0) == 1:  # a transposed view: its memory is read along the rows it was stored in
        w = w.mT
    tall = w.shape[0] >= w.shape[1]
    larger, smaller = (0, 1) if tall else (1, 0)
    # Only the upper triangle is ever touched, so that half the pages of the zeros never exist.
    gram = np.zeros((w.shape[smaller], w.shape[smaller]), order="F")
    step = min(max(1, _BLOCK // w.shape[smaller]), w.shape[larger])
    # One buffer for all blocks: new ones would pile up on the allocator's heap.
    buffer = torch.empty(step * w.shape[smaller], dtype=torch.float64)
    for block in torch.split(w, step, dim=larger):
        columns = buffer[: block.numel()].view(block.shape).copy_(block).numpy().T  # Fortran's order, as BLAS wants it
        gram = dsyrk(1.0, columns, beta=1.0, c=gram, trans=0 if tall else 1, overwrite_c=1)
    values: NDArray[np.float64] = eigh(
        gram, lower=False, eigvals_only=True, driver="evr", overwrite_a=True, check_finite=False
    )
    return values.clip(min=0.0)


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


@renamed_arguments(normalised="normalized")
def spectral_entropy(eigenvalues: Any, *, normalized: bool = False) -> float:
    """``-sum p ln p`` with ``p = lambda / sum lambda``, in nats.

    Args:
        eigenvalues: Of a positive semi-definite matrix.
        normalized: Divide by ``ln(rank)``, its largest value (Martin and Mahoney); of rank one it is 0.
    """
    values = _nonzero(eigenvalues)
    p = values / values.sum()
    entropy = max(0.0, -float((p * np.log(p)).sum()))
    if not normalized:
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
