"""Bandwidth and ridge by exact leave-one-out errors, from eigendecompositions on few rows."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from featlearn.rfm.kernels import Kernel
from featlearn.rfm.problem import Problem

__all__ = ["Solution", "kernel_scale", "predict_rows", "tune"]


@dataclass(frozen=True, eq=False)
class Solution:
    """A fitted kernel machine for one M.

    Attributes:
        alpha: Coefficients, ``(n, c)``.
        bandwidth: L.
        shift: ``n lambda``: the solve is ``K + shift W^{-1}``.
        error: Mean squared error on what was left or held out; NaN where nobody asked.
        residuals: Errors row by row, ``(n, c)`` or of the held-out rows; None where nobody asked.
        condition: Estimated condition number of the solve.
    """

    alpha: Tensor
    bandwidth: float
    shift: float
    error: float
    residuals: Tensor | None
    condition: float


def kernel_scale(kernel: Kernel, u: Tensor) -> float:
    """A bandwidth of order one: the median distance of two rows, or the root mean square norm of a row."""
    if not kernel.radial:
        return float(u.square().sum(1).mean().sqrt()) or 1.0
    few = u[:500]
    first, second = torch.triu_indices(len(few), len(few), 1, device=u.device)
    distances = kernel.pairs(few, few)[first, second]
    distances = distances[distances > 0]
    return float(distances.median()) ** (1.0 / kernel.norm) if len(distances) else 1.0


def predict_rows(kernel: Kernel, u: Tensor, fitted: Tensor, solution: Solution, mean: Tensor) -> Tensor:
    """``k(u, fitted) alpha + mean`` for rows that were not fitted."""
    return kernel.matrix(u, fitted, solution.bandwidth) @ solution.alpha + mean


def tune(
    problem: Problem,
    kernel: Kernel,
    u: Tensor,
    held_u: Tensor | None,
    bandwidths: Sequence[float],
    shifts: Tensor,
    relative: bool = True,
) -> Solution:
    r"""The bandwidth and ridge with the least error, exactly, by one eigendecomposition a bandwidth.

    With ``W^{1/2} K W^{1/2} = Q diag(e) Q^T``, the inverse at every ridge is ``W^{1/2} Q diag(1 / (e + n lambda))
    Q^T W^{1/2}``: its diagonal and its products with the targets cost ``n^2`` a ridge.

    Args:
        problem: Rows and targets; meant for 1,500 rows at most.
        kernel: The kernel.
        u: The problem's rows, transformed by the root of M.
        held_u: Its held-out rows, transformed; None if there are none.
        bandwidths: To choose from.
        shifts: ``n lambda`` to choose from.
        relative: Whether the shifts are meant for a kernel with a mean of 1 on its diagonal.

    Time: about ``10 n^3`` for each bandwidth. Memory: four n x n matrices.
    """
    pairs = kernel.pairs(u, u)
    if kernel.radial:
        pairs.fill_diagonal_(0.0)
    roots = problem.weights.sqrt()[:, None]
    right = problem.right_sides()
    best: Solution | None = None
    for bandwidth in bandwidths:
        k = kernel.values_(pairs.clone(), bandwidth)
        size = (float(k.diagonal().mean()) or 1.0) if relative else 1.0
        held = None if held_u is None else kernel.matrix(held_u, u, bandwidth)
        values, vectors = torch.linalg.eigh(k.mul_(roots).mul_(roots.mT))
        values = values.clamp_min(0)
        turned = vectors.mT @ (roots * right)
        squares = roots.square() * vectors.square() if problem.folds is None else None
        for shift in (shifts * size).tolist():
            inverse = 1.0 / (values + shift)
            solved = roots * (vectors @ (inverse[:, None] * turned))
            alpha = problem.coefficients(solved)
            if problem.held_out is not None:
                assert held is not None
                residuals = problem.held_out.targets - (held @ alpha + problem.mean)
            else:
                residuals = problem.residuals(_missed(solved, vectors, inverse, roots, squares, problem.folds))
            error = problem.error(residuals)
            if best is None or error < best.error:
                condition = float((values[-1] + shift) / (values[0] + shift))
                best = Solution(alpha, bandwidth, shift, error, residuals, condition)
    assert best is not None
    return best


def _missed(
    solved: Tensor, vectors: Tensor, inverse: Tensor, roots: Tensor, squares: Tensor | None, folds: Tensor | None
) -> Tensor:
    """What `featlearn.rfm.gram.Gram.missed` computes, from an eigendecomposition."""
    if folds is None:
        assert squares is not None
        return solved / (squares @ inverse)[:, None]
    result = torch.empty_like(solved)
    for fold in range(int(folds.max()) + 1):
        rows = (folds == fold).nonzero().squeeze(1)
        part = roots[rows] * vectors[rows]
        result[rows] = torch.linalg.solve((part * inverse) @ part.mT, solved[rows])
    return result
