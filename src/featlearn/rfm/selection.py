"""Bandwidth and ridge by exact leave-one-out errors: eigendecompositions on few rows, Cholesky factors on all."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from featlearn.rfm.gram import Gram
from featlearn.rfm.kernels import Kernel
from featlearn.rfm.problem import Problem

__all__ = ["Choice", "View", "kernel_scale", "tune", "walk"]


@dataclass(frozen=True, eq=False)
class View:
    """Rows as one M sees them, and which of them it may judge.

    Attributes:
        u: The problem's rows, transformed by the root of M.
        rows: Which of them M has not seen, ``(n,)`` of booleans: only these are judged.
        held_u: The held-out rows, transformed; None if there are none.
    """

    u: Tensor
    rows: Tensor
    held_u: Tensor | None = None

    def first(self, count: int) -> View:
        """The same with the first rows only."""
        return View(self.u[:count], self.rows[:count], self.held_u)


@dataclass(frozen=True, eq=False)
class Choice:
    """Bandwidth and ridge, and how good they are.

    Attributes:
        bandwidth: L.
        shift: ``n lambda``: the solve is ``K + shift W^{-1}``.
        error: Mean squared error of the rows judged; NaN where nobody asked.
        residuals: Errors row by row, ``(n, c)``, or of the held-out rows; None where nobody asked.
        judged: The rows that the residuals belong to, ``(n,)`` of booleans; None for held-out rows.
    """

    bandwidth: float
    shift: float
    error: float = math.nan
    residuals: Tensor | None = None
    judged: Tensor | None = None


def kernel_scale(kernel: Kernel, u: Tensor) -> float:
    """A bandwidth of order one: the median distance of two rows, or the root mean square norm of a row."""
    if not kernel.radial:
        return float(u.square().sum(1).mean().sqrt()) or 1.0
    few = u[:500]
    first, second = torch.triu_indices(len(few), len(few), 1, device=u.device)
    distances = kernel.pairs(few, few)[first, second]
    distances = distances[distances > 0]
    return float(distances.median()) ** (1.0 / kernel.norm) if len(distances) else 1.0


def tune(
    problem: Problem,
    kernel: Kernel,
    views: Sequence[View],
    bandwidths: Sequence[float],
    shifts: Tensor,
    relative: bool = True,
) -> Choice:
    r"""The bandwidth and ridge with the least error, exactly, by an eigendecomposition a bandwidth and view.

    With ``W^{1/2} K W^{1/2} = Q diag(e) Q^T``, the inverse at every ridge is ``W^{1/2} Q diag(1 / (e + n lambda))
    Q^T W^{1/2}``: its diagonal and its products with the targets cost ``n^2`` a ridge.

    Args:
        problem: Rows and targets; meant for some hundred rows.
        kernel: The kernel.
        views: Which M judges which rows; each row is judged by one at the most.
        bandwidths: To choose from.
        shifts: ``n lambda`` to choose from.
        relative: Whether the shifts are meant for a kernel with a mean of 1 on its diagonal.

    Time: about ``10 n^3`` for each bandwidth and view. Memory: four n x n matrices.
    """
    best: Choice | None = None
    pairs = [_self_pairs(kernel, view.u) for view in views]
    for bandwidth in bandwidths:
        scaled = shifts
        if relative:
            diagonal = kernel.values_(pairs[0].diagonal().clone(), bandwidth)
            scaled = shifts * (float(diagonal.mean()) or 1.0)
        # (shifts, rows, outputs): a few hundred rows each
        residuals = [
            _residuals_by_shift(problem, kernel, view, of_view, bandwidth, scaled)
            for view, of_view in zip(views, pairs, strict=True)
        ]
        for place, shift in enumerate(scaled.tolist()):
            choice = _judged(problem, views, [of_view[place] for of_view in residuals], bandwidth, shift)
            if best is None or choice.error < best.error:
                best = choice
    assert best is not None
    return best


def _self_pairs(kernel: Kernel, u: Tensor) -> Tensor:
    pairs = kernel.pairs(u, u)
    return pairs.fill_diagonal_(0.0) if kernel.radial else pairs


def _residuals_by_shift(
    problem: Problem, kernel: Kernel, view: View, pairs: Tensor, bandwidth: float, shifts: Tensor
) -> Tensor:
    roots = problem.weights.sqrt()[:, None]
    k = kernel.values_(pairs.clone(), bandwidth)
    values, vectors = torch.linalg.eigh(k.mul_(roots).mul_(roots.mT))
    values = values.clamp_min(0)
    turned = vectors.mT @ (roots * problem.right_sides())
    held = None if view.held_u is None else kernel.matrix(view.held_u, view.u, bandwidth)
    squares = roots.square() * vectors.square()
    found = []
    for shift in shifts.tolist():
        inverse = 1.0 / (values + shift)
        solved = roots * (vectors @ (inverse[:, None] * turned))
        if held is not None:
            assert problem.held_out is not None
            found.append(problem.held_out.targets - (held @ problem.coefficients(solved) + problem.mean))
        elif problem.folds is None:
            found.append(problem.residuals(solved / (squares @ inverse)[:, None]))
        else:
            found.append(problem.residuals(_folds_missed(solved, vectors, inverse, roots, problem.folds, view.rows)))
    return torch.stack(found)


def _folds_missed(
    solved: Tensor, vectors: Tensor, inverse: Tensor, roots: Tensor, folds: Tensor, judged: Tensor
) -> Tensor:
    """What `featlearn.rfm.gram.Gram.missed` computes for folds, from an eigendecomposition; judged folds only."""
    result = torch.zeros_like(solved)
    for fold in sorted(set(folds[judged].tolist())):
        rows = (folds == fold).nonzero().squeeze(1)
        part = roots[rows] * vectors[rows]
        result[rows] = torch.linalg.solve((part * inverse) @ part.mT, solved[rows])
    return result


def _judged(
    problem: Problem, views: Sequence[View], residuals: Sequence[Tensor], bandwidth: float, shift: float
) -> Choice:
    """One choice from the residuals of all views, each with the rows that it may judge."""
    if problem.held_out is not None:
        return Choice(bandwidth, shift, problem.error(residuals[0]), residuals[0])
    together = torch.zeros_like(residuals[0])
    judged = torch.zeros_like(views[0].rows)
    for view, of_view in zip(views, residuals, strict=True):
        together[view.rows] = of_view[view.rows]
        judged |= view.rows
    return Choice(bandwidth, shift, problem.error(together, judged), together, judged)


def walk(problem: Problem, kernel: Kernel, views: Sequence[View], start: Choice, step: float, tries: int) -> Choice:
    """Follow the ridge downhill from a start, on the errors of all rows.

    Args:
        problem: Rows and targets.
        kernel: The kernel.
        views: Which M judges which rows.
        start: Where to begin; its bandwidth is kept.
        step: Factor from one ridge to the next.
        tries: Ridges tried at the most; with 1 the start is judged and kept.

    Time: ``2 n^3 / 3`` for each view and try. Memory: an n x n matrix for each view.
    """
    grams = [Gram(kernel, view.u, start.bandwidth) for view in views]

    def at(shift: float) -> Choice:
        residuals = []
        for gram, view in zip(grams, views, strict=True):
            gram.factor(shift / problem.weights)
            solved = gram.solve(problem.right_sides())
            if view.held_u is not None:
                assert problem.held_out is not None
                predicted = kernel.matrix(view.held_u, view.u, start.bandwidth) @ problem.coefficients(solved)
                residuals.append(problem.held_out.targets - (predicted + problem.mean))
            else:
                residuals.append(problem.residuals(gram.missed(solved, problem.folds, view.rows)))
        return _judged(problem, views, residuals, start.bandwidth, shift)

    best = at(start.shift)
    left = tries - 1
    for factor in (1.0 / step, step):
        first = best
        while left:
            left -= 1
            other = at(best.shift * factor)
            if not other.error < best.error:
                break
            best = other
        if best is not first:  # the error falls on one side only
            break
    return best
