"""Selection of the scale of the penalties and of the ridge by exact leave-one-out errors."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from featlearn.adaptive._linear_solvers import System, leave_one_out
from featlearn.adaptive._solver import AdaptiveProblem, solve_from
from featlearn.adaptive._tangent_features import NetworkFeatures

FACTORS = (math.inf, 1.0, 0.1, 0.01, 0.001)
"""Candidate scales, in units of ``|theta|^2`` of lazy training; infinity is lazy training itself."""
SHIFTS = (0.0, *(10.0**power for power in range(-7, 1)))
"""Candidate values of ``n ridge``, in units of the mean diagonal of the kernel."""
_FEWEST = 10
_VALIDATED = 1000  # maximum number of samples whose errors are computed
_FOLDS = 3
_TOLERANCE = 1e-3  # of solutions that are only validated


@dataclass(frozen=True)
class RidgeAndScale:
    """Selected ridge and scale.

    Attributes:
        ridge: Ridge lambda.
        weight: Weight mu of the penalties.
        errors: Mean squared leave-one-out error of each factor; empty if the scale was given.
        system: Linear system of all samples.
    """

    ridge: float
    weight: float
    errors: dict[float, float]
    system: System


def select_ridge_and_scale(
    problem: AdaptiveProblem, ridge: float | str, scale: float | str, n_iter: int, generator: torch.Generator
) -> RidgeAndScale:
    """Select ridge and scale where they are ``"loo"``, on at most 1,000 samples.

    Args:
        problem: Problem of all samples, with features of a network.
        ridge: Ridge lambda, or ``"loo"``.
        scale: Weight mu of the penalties, or ``"loo"``.
        n_iter: Maximum number of steps per solution.
        generator: Generator of the validated samples and of the folds.
    """
    few, n, device = problem, len(problem.residual), problem.residual.device
    if n > _VALIDATED and (isinstance(ridge, str) or isinstance(scale, str)):
        few = _part(problem, torch.randperm(n, generator=generator)[:_VALIDATED].to(device))
    if isinstance(ridge, str):
        ridge = best_ridge(few.kernel(few.start()), few.residual, few.precision)
    problem, few = replace(problem, ridge=ridge), replace(few, ridge=ridge)
    system = problem.system()
    if not isinstance(scale, str):
        return RidgeAndScale(ridge, scale, {}, system)
    factor, errors = math.inf, dict[float, float]()
    if len(few.residual) >= _FEWEST:
        folds = torch.randperm(len(few.residual), generator=generator).to(device) % _FOLDS
        parts = [_part(few, (folds != fold).nonzero().squeeze(1)) for fold in range(_FOLDS)]
        factor, errors = validate_factors(few, parts, folds, n_iter)
    lazy = solve_from(problem, math.inf, problem.start(), system, 1, 0.0)
    return RidgeAndScale(ridge, factor * lazy.objective if lazy.objective > 0 else math.inf, errors, system)


def best_ridge(kernel: Tensor, residual: Tensor, precision: float) -> float:
    """Return the ridge lambda with the least leave-one-out error of lazy training."""
    unit = float(kernel.diagonal().mean())
    errors = leave_one_out(kernel, residual, [unit * shift for shift in SHIFTS], precision).square().mean((1, 2))
    return SHIFTS[int(errors.argmin())] * unit / len(residual)


def validate_factors(
    problem: AdaptiveProblem, parts: Sequence[AdaptiveProblem], folds: Tensor, n_iter: int
) -> tuple[float, dict[float, float]]:
    """Return the best factor and the mean squared leave-one-out error of each, under an M that has not seen the sample.

    Leaving a sample out of the solve is not enough, since M depends on its label. So the samples of each fold are left
    out of the solve one by one, under an M that was learned from the samples outside the fold. Scales are tried from
    weak to strong adaptation, each starting from the previous solution. Lazy training is kept unless the best factor is
    better by more than the standard error of the difference.

    Args:
        problem: Problem of all samples.
        parts: Problems of the samples outside each fold.
        folds: Fold of each sample, shape ``(n,)``.
        n_iter: Maximum number of steps per solution.
    """
    n = len(problem.residual)
    shift = n * problem.ridge
    squares = {factor: torch.zeros(n, dtype=torch.float64, device=problem.residual.device) for factor in FACTORS}
    for fold, part in enumerate(parts):
        # The same n ridge: the solve with all samples but one is validated.
        inside = replace(part, ridge=shift / len(part.residual))
        system = inside.system(warn=False)
        transforms = inside.start()
        lazy = solve_from(inside, math.inf, transforms, system, n_iter, _TOLERANCE)
        inside_fold = folds == fold
        for factor in FACTORS:
            if math.isfinite(factor) and lazy.objective > 0:
                solution = solve_from(inside, factor * lazy.objective, transforms, system, n_iter, _TOLERANCE)
                transforms = solution.transforms
            residuals = leave_one_out(problem.kernel(transforms), problem.residual, [shift], problem.precision)[0]
            squares[factor][inside_fold] = residuals[inside_fold].square().mean(1)
    errors = {factor: float(values.mean()) for factor, values in squares.items()}
    best = min(errors, key=lambda factor: (errors[factor], -factor))
    gain = squares[math.inf] - squares[best]
    return (best if float(gain.mean()) > float(gain.std()) / math.sqrt(n) else math.inf), errors


def _part(problem: AdaptiveProblem, rows: Tensor) -> AdaptiveProblem:
    """Return the problem of some samples."""
    assert isinstance(problem.features, NetworkFeatures)
    c = problem.residual.shape[1]
    places = (rows[:, None] * c + torch.arange(c, device=rows.device)).reshape(-1)
    plain = None if problem.plain is None else problem.plain[places][:, places]
    return replace(problem, features=problem.features.part(rows), residual=problem.residual[rows], plain=plain)
