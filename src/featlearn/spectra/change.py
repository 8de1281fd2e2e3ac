"""How far a matrix has moved, and the spectrum of a weight."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from featlearn.errors import InputError
from featlearn.numerics.linalg import as_float64
from featlearn.spectra.gram import gram_eigenvalues
from featlearn.spectra.leading import leading_vectors

__all__ = ["ChangeNorms", "change_norms", "weight_eigenvalues"]


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
