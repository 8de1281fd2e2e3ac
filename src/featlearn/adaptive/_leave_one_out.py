"""Selection of the scale of the penalties and of the ridge by exact leave-one-out errors."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from featlearn.adaptive._linear_solvers import System
from featlearn.adaptive._solver import AdaptiveProblem, AdaptiveSolution, solve_from
from featlearn.adaptive._tangent_features import NetworkFeatures
from featlearn.linalg.leave_one_out import RIDGE_SHIFTS, leave_one_out

FACTORS = (math.inf, 1.0, 0.1, 0.01, 0.001)
"""Candidate scales, in units of the largest squared singular value of the change that lazy training makes to a
matrix; infinity is lazy training itself."""
_FEWEST = 10
_VALIDATED, _ROWS = 1000, 1500  # maximum numbers of samples whose errors are computed, and of rows of their kernel
_FEWEST_OF_MANY = 100
_FOLDS = 3
_ROUNDS = 2
_TOLERANCE = 1e-3  # of solutions that are only validated

Errors = dict[tuple[float, float], Tensor]
"""Squared error of each sample, by factor and shift."""


@dataclass(frozen=True)
class RidgeAndScale:
    """Selected ridge and scale.

    Attributes:
        ridge: Ridge lambda.
        weight: Weight mu of the penalties.
        errors: Mean squared leave-one-out error of each factor with its best ridge; empty if the scale was given.
        system: Linear system of all samples.
    """

    ridge: float
    weight: float
    errors: dict[float, float]
    system: System


def select_ridge_and_scale(
    problem: AdaptiveProblem, ridge: float | str, scale: float | str, n_iter: int, generator: torch.Generator
) -> RidgeAndScale:
    """Select ridge and scale where they are ``"loo"``, on at most 1,000 samples, and on fewer for many outputs.

    Args:
        problem: Problem of all samples, with features of a network.
        ridge: Ridge lambda, or ``"loo"``.
        scale: Weight mu of the penalties, or ``"loo"``.
        n_iter: Maximum number of steps per solution.
        generator: Generator of the validated samples and of the folds.
    """
    few, n, device = problem, len(problem.residual), problem.residual.device
    most = max(_FEWEST_OF_MANY, min(_VALIDATED, _ROWS // problem.residual.shape[1]))
    if n > most and (isinstance(ridge, str) or isinstance(scale, str)):
        few = _part(problem, torch.randperm(n, generator=generator)[:most].to(device))
    kernel = few.kernel(few.start()) if isinstance(ridge, str) else None
    unit = 0.0 if kernel is None else float(kernel.diagonal().mean()) / len(few.residual)
    ridges = [unit * shift for shift in RIDGE_SHIFTS] if isinstance(ridge, str) else [ridge]
    if kernel is not None:
        ridge = _best_ridge(kernel, few, ridges)
    assert not isinstance(ridge, str)
    if not isinstance(scale, str):
        problem = replace(problem, ridge=ridge)
        return RidgeAndScale(ridge, scale, {}, problem.system())
    factor, errors = math.inf, dict[float, float]()
    if len(few.residual) >= _FEWEST and few.penalties:
        folds = torch.randperm(len(few.residual), generator=generator).to(device) % _FOLDS
        parts = [_part(few, (folds != fold).nonzero().squeeze(1)) for fold in range(_FOLDS)]
        factor, ridge, errors = validate(few, parts, folds, ridge, ridges, n_iter)
    problem = replace(problem, ridge=ridge)
    system = problem.system()
    lazy = solve_from(problem, math.inf, problem.start(), system, 1, 0.0)
    return RidgeAndScale(ridge, factor * unit_of_scale(problem, lazy), errors, system)


def unit_of_scale(problem: AdaptiveProblem, lazy: AdaptiveSolution) -> float:
    """Return the largest squared singular value of the change that lazy training makes to an adapted matrix."""
    matrices = lazy.matrices
    sizes = [
        float(matrices[name].abs().max() if problem.diagonal else torch.linalg.matrix_norm(matrices[name], 2).max())
        for name in problem.penalties
    ]
    return max(sizes, default=0.0) ** 2 or math.inf


def _best_ridge(kernel: Tensor, problem: AdaptiveProblem, ridges: Sequence[float]) -> float:
    """Return the ridge lambda with the least leave-one-out error of lazy training."""
    n = len(problem.residual)
    errors = leave_one_out(kernel, problem.residual, [n * r for r in ridges], problem.precision, problem.intercept)
    return ridges[int(errors.square().mean((1, 2)).argmin())]


def validate(
    problem: AdaptiveProblem,
    parts: Sequence[AdaptiveProblem],
    folds: Tensor,
    ridge: float,
    ridges: Sequence[float],
    n_iter: int,
) -> tuple[float, float, dict[float, float]]:
    """Return the best factor, its ridge, and the mean squared leave-one-out error of each factor with its best ridge.

    Leaving a sample out of the solve is not enough, since M depends on its label. So the samples of each fold are left
    out of the solve one by one, under an M that was learned from the samples outside the fold. Given M, all ridges are
    tried; if another ridge is better than that under which M was learned, M is learned once more under it.

    Args:
        problem: Problem of all samples.
        parts: Problems of the samples outside each fold.
        folds: Fold of each sample, shape ``(n,)``.
        ridge: Ridge lambda to begin with.
        ridges: Candidates.
        n_iter: Maximum number of steps per solution.
    """
    best: Errors = {}
    learned = ridge
    for _ in range(_ROUNDS):
        squares = _squares(problem, parts, folds, learned, ridges, n_iter)
        for key, values in squares.items():
            if key not in best or key[1] == learned:
                best[key] = values
        factor, chosen = min(best, key=lambda key: (float(best[key].mean()), -key[0]))
        if chosen == learned or math.isinf(factor):
            break
        learned = chosen
    errors = {f: min(float(values.mean()) for key, values in best.items() if key[0] == f) for f in FACTORS}
    return factor, chosen, errors


def _squares(
    problem: AdaptiveProblem,
    parts: Sequence[AdaptiveProblem],
    folds: Tensor,
    learned: float,
    ridges: Sequence[float],
    n_iter: int,
) -> Errors:
    """Return the squared error of each sample for each factor and ridge, with M learned under one ridge."""
    n = len(problem.residual)
    shifts = [n * ridge for ridge in ridges]
    squares = {
        (factor, ridge): torch.zeros(n, dtype=torch.float64, device=folds.device)
        for factor in FACTORS
        for ridge in ridges
    }
    for fold, part in enumerate(parts):
        # The same n ridge: the solve with all samples but one is validated.
        inside = replace(part, ridge=n * learned / len(part.residual))
        system = inside.system(warn=False)
        transforms = inside.start()
        lazy = solve_from(inside, math.inf, transforms, system, n_iter, _TOLERANCE)
        unit = unit_of_scale(inside, lazy)
        outside = folds == fold
        for factor in FACTORS:
            if math.isfinite(factor * unit):
                transforms = solve_from(inside, factor * unit, transforms, system, n_iter, _TOLERANCE).transforms
            kernel = problem.kernel(transforms)
            residuals = leave_one_out(kernel, problem.residual, shifts, problem.precision, problem.intercept)
            for ridge, errors in zip(ridges, residuals, strict=True):
                squares[factor, ridge][outside] = errors[outside].square().mean(1)
    return squares


def _part(problem: AdaptiveProblem, rows: Tensor) -> AdaptiveProblem:
    """Return the problem of some samples."""
    assert isinstance(problem.features, NetworkFeatures)
    c = problem.residual.shape[1]
    places = (rows[:, None] * c + torch.arange(c, device=rows.device)).reshape(-1)
    constant = None if problem.constant is None else problem.constant[places][:, places]
    return replace(problem, features=problem.features.part(rows), residual=problem.residual[rows], constant=constant)
