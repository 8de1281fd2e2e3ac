"""Linear systems of kernels, with a ridge or as constraints, which can contradict each other."""

from __future__ import annotations

import warnings
from dataclasses import dataclass

import torch
from sklearn.exceptions import ConvergenceWarning
from torch import Tensor

from featlearn.errors import InputError

_CONTRADICTION = 1e-6
_EXACT = torch.finfo(torch.float64).eps


@dataclass(frozen=True)
class System:
    """Linear system ``(K + shift I) c = r`` for kernels with the same range.

    An invertible M does not change the range of the kernel, so the first kernel determines what the features can fit:
    labels are projected onto its range once, and the constraints are consistent afterwards.

    Attributes:
        residual: Flat residual r, projected onto the range of the kernel if necessary.
        shift: ``n ridge``.
        basis: Orthonormal basis of the range of the kernel. None if the kernel has full rank.
        misfit: Share of r that no features can fit.
    """

    residual: Tensor
    shift: float
    basis: Tensor | None = None
    misfit: float = 0.0

    @staticmethod
    def of(kernel: Tensor, residual: Tensor, ridge: float, precision: float = _EXACT, warn: bool = True) -> System:
        """Return the system of the initial kernel.

        Args:
            kernel: Initial kernel ``K_0``, shape ``(n c, n c)``.
            residual: Residual r, shape ``(n, c)``.
            ridge: Ridge lambda.
            precision: Relative precision of the kernel.
            warn: Whether to warn about labels that cannot be fitted.
        """
        flat, shift = residual.reshape(-1), len(residual) * ridge
        top = float(kernel.diagonal().max())
        if not top > 0:
            raise InputError("X must have a nonzero tangent kernel, but no parameter has a gradient (dead units?).")
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
                f"the labels cannot be fitted: {len(flat)} labels depend on {int(kept.sum())} independent features "
                f"(equal samples with different labels, or more labels than parameters), which leaves {misfit:.1%}. "
                "The nearest labels that can be fitted are used. Set ridge= to fit approximately.",
                ConvergenceWarning,
                stacklevel=3,
            )
        return System(fitted, 0.0, basis, misfit)


def solved(kernel: Tensor, system: System) -> Tensor:
    """Return the flat coefficients c of a system."""
    if system.basis is not None:
        q = system.basis
        return q @ _solved(q.mT @ kernel @ q, q.mT @ system.residual)
    if system.shift:
        kernel = kernel.clone()
        kernel.diagonal().add_(system.shift)
    return _solved(kernel, system.residual)


def _solved(kernel: Tensor, right: Tensor) -> Tensor:
    factor, info = torch.linalg.cholesky_ex(kernel)
    solution: Tensor
    if not int(info):
        solution = torch.cholesky_solve(right[:, None], factor)[:, 0]
        if torch.isfinite(solution).all():
            return solution
    # Reached only with penalties under which features can vanish.
    values, vectors = torch.linalg.eigh(kernel)
    kept = values > len(values) * _EXACT * values[-1]
    solution = vectors[:, kept] @ ((vectors[:, kept].mT @ right) / values[kept])
    return solution
