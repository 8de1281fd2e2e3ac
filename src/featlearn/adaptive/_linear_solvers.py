"""Linear systems of kernels: with a ridge, or as constraints, which may contradict each other."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from sklearn.exceptions import ConvergenceWarning
from torch import Tensor

from featlearn.errors import InputError

_CONTRADICTION = 1e-6
_EXACT = torch.finfo(torch.float64).eps


@dataclass(frozen=True)
class System:
    """How ``(K + shift I) c = r`` is to be solved for kernels with one range.

    Every invertible M leaves the range of the kernel as it is, so that what the features can fit is known from the
    first kernel: labels are projected onto it once, and the constraints hold together from then on.

    Attributes:
        residual: r, flat, or what of it can be fitted.
        shift: ``n ridge``.
        basis: Orthonormal basis of the kernel's range, if that is not everything; None otherwise.
        misfit: Share of r that no features can fit.
    """

    residual: Tensor
    shift: float
    basis: Tensor | None = None
    misfit: float = 0.0

    @staticmethod
    def of(kernel: Tensor, residual: Tensor, ridge: float, precision: float = _EXACT, warn: bool = True) -> System:
        """The system of the initial kernel.

        Args:
            kernel: ``K_0``, (n c, n c).
            residual: r, (n, c).
            ridge: lambda.
            precision: To which the kernel is known.
            warn: Whether to warn of labels that cannot be fitted.
        """
        flat, shift = residual.reshape(-1), len(residual) * ridge
        top = float(kernel.diagonal().max())
        if not top > 0:
            raise InputError("the tangent kernel is zero on these samples: no parameter has a gradient (dead units?)")
        floor = len(flat) * precision
        if shift > floor * top:
            return System(flat, shift)
        factor, info = torch.linalg.cholesky_ex(kernel)
        if not int(info) and float(factor.diagonal().min()) ** 2 > 10 * floor * top:
            return System(flat, 0.0)
        values, vectors = torch.linalg.eigh(kernel)
        kept = values > floor * float(values[-1])
        if kept.all():
            return System(flat, 0.0)
        basis = vectors[:, kept]
        fitted = basis @ (basis.mT @ flat)
        misfit = float((flat - fitted).norm() / flat.norm()) if flat.any() else 0.0
        if misfit > _CONTRADICTION and warn:
            warnings.warn(
                f"the labels cannot be fitted: {len(flat)} of them depend on {int(kept.sum())} independent features "
                f"(equal samples with different labels, or more labels than parameters), and {misfit:.1%} of them is "
                "left; the nearest labels that can be are taken; set ridge= to choose otherwise",
                ConvergenceWarning,
                stacklevel=3,
            )
        return System(fitted, 0.0, basis, misfit)


def solved(kernel: Tensor, system: System) -> Tensor:
    """c, flat."""
    if system.basis is not None:
        q = system.basis
        return q @ _solved(q.mT @ kernel @ q, q.mT @ system.residual)
    if system.shift:
        kernel = kernel.clone()
        kernel.diagonal().add_(system.shift)
    return _solved(kernel, system.residual)


def leave_one_out(kernel: Tensor, residual: Tensor, shifts: Sequence[float], precision: float = _EXACT) -> Tensor:
    """What is missed of each sample's labels if it is left out of the solve, (shifts, n, c), exactly.

    ``e_i = [G_ii]^{-1} c_i`` with ``G = (K + shift I)^{-1}`` and its c x c blocks on the diagonal, which are those of
    all the outputs of a sample. A shift below rounding stands for the limit of none.
    """
    n, c = residual.shape
    least = 10 * len(kernel) * precision * float(kernel.diagonal().max())
    found = []
    if len(shifts) == 1:
        shifted = kernel.clone()
        shifted.diagonal().add_(max(shifts[0], least))
        factor, info = torch.linalg.cholesky_ex(shifted)
        if not int(info):
            inverse = torch.cholesky_inverse(factor)
            own = torch.arange(n, device=kernel.device)
            blocks = inverse.reshape(n, c, n, c)[own, :, own]
            solution = (inverse @ residual.reshape(-1)).reshape(n, c, 1)
            missed: Tensor = torch.linalg.solve(blocks, solution)
            return missed.squeeze(2).unsqueeze(0)
    values, vectors = torch.linalg.eigh(kernel)
    turned = vectors.mT @ residual.reshape(-1)
    by_sample = vectors.reshape(n, c, -1)
    for shift in shifts:
        inverse = 1 / (values.clamp_min(0) + max(shift, least))
        blocks = (by_sample * inverse) @ by_sample.mT
        solution = (vectors @ (inverse * turned)).reshape(n, c, 1)
        found.append(torch.linalg.solve(blocks, solution).squeeze(2))
    return torch.stack(found)


def _solved(kernel: Tensor, right: Tensor) -> Tensor:
    factor, info = torch.linalg.cholesky_ex(kernel)
    found: Tensor
    if not int(info):
        found = torch.cholesky_solve(right[:, None], factor)[:, 0]
        if torch.isfinite(found).all():
            return found
    # Only penalties that let features vanish bring a kernel here.
    values, vectors = torch.linalg.eigh(kernel)
    kept = values > len(values) * _EXACT * values[-1]
    found = vectors[:, kept] @ ((vectors[:, kept].mT @ right) / values[kept])
    return found
