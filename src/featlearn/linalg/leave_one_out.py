"""Exact leave-one-out residuals of kernel ridge regression with several outputs per sample."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

RIDGE_SHIFTS = (0.0, *(10.0 ** (power / 2) for power in range(-14, 3)))
"""Candidate shifts of a kernel, in units of its mean diagonal."""

_EXACT = torch.finfo(torch.float64).eps


def leave_one_out(
    kernel: Tensor, residual: Tensor, shifts: Sequence[float], precision: float = _EXACT, intercept: bool = False
) -> Tensor:
    """Compute the exact leave-one-out residuals of each sample, shape ``(shifts, n, c)``.

    ``e_i = [G_ii]^{-1} c_i`` with ``G = (K + shift I)^{-1}``, ``c = G r`` and the c x c diagonal blocks of G, one per
    sample. If r are labels minus their mean, leaving sample i out changes the mean by ``r_i / (n - 1)``, and c_i by the
    contribution of this constant.

    Time: a Cholesky factorization and an inversion for one shift, an eigendecomposition for several.

    Args:
        kernel: Kernel K of all samples and outputs, shape ``(n c, n c)``.
        residual: Targets r, shape ``(n, c)``.
        shifts: Numbers to add to the diagonal. A shift below rounding stands for the limit of zero.
        precision: Relative precision of the kernel.
        intercept: Whether the targets are labels minus their mean over the samples.
    """
    n, c = residual.shape
    least = 10 * len(kernel) * precision * float(kernel.diagonal().max())
    if len(shifts) == 1:
        shifted = kernel.clone()
        shifted.diagonal().add_(max(shifts[0], least))
        factor, info = torch.linalg.cholesky_ex(shifted)
        if not int(info):
            inverse = torch.cholesky_inverse(factor)
            samples = torch.arange(n, device=kernel.device)
            by_sample = inverse.reshape(n, c, n, c)
            blocks = by_sample[samples, :, samples]
            solution = inverse @ _targets(residual, intercept)
            return _residuals(blocks, solution, residual).unsqueeze(0)
    values, vectors = torch.linalg.eigh(kernel)
    return leave_one_out_by_eigenvectors(values, vectors, residual, [max(s, least) for s in shifts], intercept)


def leave_one_out_by_eigenvectors(
    values: Tensor, vectors: Tensor, residual: Tensor, shifts: Sequence[float], intercept: bool = False
) -> Tensor:
    """Compute the residuals of `leave_one_out` from an eigendecomposition of the kernel.

    Args:
        values: Eigenvalues, shape ``(n c,)``.
        vectors: Eigenvectors in columns, shape ``(n c, n c)``.
        residual: Targets r, shape ``(n, c)``.
        shifts: Positive numbers to add to the diagonal.
        intercept: Whether the targets are labels minus their mean over the samples.
    """
    n, c = residual.shape
    rotated = vectors.mT @ _targets(residual, intercept)
    by_sample = vectors.reshape(n, c, -1)
    residuals = []
    for shift in shifts:
        inverse = 1 / (values.clamp_min(0) + shift)
        blocks = (by_sample * inverse) @ by_sample.mT
        residuals.append(_residuals(blocks, vectors @ (inverse[:, None] * rotated), residual))
    return torch.stack(residuals)


def _targets(residual: Tensor, intercept: bool) -> Tensor:
    """Return the flat targets as a column, followed by the constant of each output if there is an intercept."""
    n, c = residual.shape
    flat = residual.reshape(-1, 1)
    if not intercept:
        return flat
    return torch.cat([flat, torch.eye(c, dtype=flat.dtype, device=flat.device).repeat(n, 1)], dim=1)


def _residuals(blocks: Tensor, solution: Tensor, residual: Tensor) -> Tensor:
    """Return the residuals, shape ``(n, c)``, from the blocks of the inverse and its products with the targets."""
    n, c = residual.shape
    by_sample = solution.reshape(n, c, -1)
    coefficients = by_sample[:, :, :1]
    if solution.shape[1] > 1 and n > 1:
        coefficients = coefficients + by_sample[:, :, 1:] @ (residual / (n - 1)).unsqueeze(2)
    result: Tensor = torch.linalg.solve(blocks, coefficients)
    return result.squeeze(2)
