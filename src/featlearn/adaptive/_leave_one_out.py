"""How strongly features should adapt, and the ridge, by exact leave-one-out errors."""

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
"""Scales to choose from, in units of ``|theta|^2`` of lazy training; infinite is lazy training itself."""
SHIFTS = (0.0, *(10.0**power for power in range(-7, 1)))
"""``n ridge`` to choose from, in units of the kernel's mean diagonal."""
_FEWEST = 10
_JUDGED = 1000  # samples whose errors tell scales apart
_FOLDS = 3
_TOLERANCE = 1e-3  # of descents that are only judged


@dataclass(frozen=True)
class RidgeAndScale:
    """What was chosen.

    Attributes:
        ridge: lambda.
        weight: mu.
        errors: Mean squared leave-one-out error of each factor; empty where nobody asked.
        system: How the constraints of all samples are solved.
    """

    ridge: float
    weight: float
    errors: dict[float, float]
    system: System


def select_ridge_and_scale(
    problem: AdaptiveProblem, ridge: float | str, scale: float | str, n_iter: int, generator: torch.Generator
) -> RidgeAndScale:
    """Ridge and scale, where they are ``"loo"``, judged on some of the samples at the most.

    Args:
        problem: All samples, with features of a network.
        ridge: lambda, or ``"loo"``.
        scale: mu, or ``"loo"``.
        n_iter: Steps of a descent at the most.
        generator: Of the samples that are judged, and of folds.
    """
    few, n, device = problem, len(problem.residual), problem.residual.device
    if n > _JUDGED and (isinstance(ridge, str) or isinstance(scale, str)):
        few = _part(problem, torch.randperm(n, generator=generator)[:_JUDGED].to(device))
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
        factor, errors = judge_factors(few, parts, folds, n_iter)
    lazy = solve_from(problem, math.inf, problem.start(), system, 1, 0.0)
    return RidgeAndScale(ridge, factor * lazy.objective if lazy.objective > 0 else math.inf, errors, system)


def best_ridge(kernel: Tensor, residual: Tensor, precision: float) -> float:
    """The lambda with the least leave-one-out error of lazy training."""
    unit = float(kernel.diagonal().mean())
    errors = leave_one_out(kernel, residual, [unit * shift for shift in SHIFTS], precision).square().mean((1, 2))
    return SHIFTS[int(errors.argmin())] * unit / len(residual)


def judge_factors(
    problem: AdaptiveProblem, parts: Sequence[AdaptiveProblem], folds: Tensor, n_iter: int
) -> tuple[float, dict[float, float]]:
    """The best factor and the mean squared leave-one-out error of each, which tells the truth about M.

    Leaving a sample out of the solve is not enough: M has seen its label. So each fold's samples are left out of the
    solve one by one, under an M that was learned from the samples outside the fold. Scales go from weak to strong, and
    each descent starts where the one before ended. Lazy training is kept unless the best factor is better by more than
    the standard error of the difference.

    Args:
        problem: All samples.
        parts: The same for the samples outside each fold.
        folds: The fold of each sample, (n,).
        n_iter: Steps of a descent at the most.
    """
    n = len(problem.residual)
    shift = n * problem.ridge
    squares = {factor: torch.zeros(n, dtype=torch.float64, device=problem.residual.device) for factor in FACTORS}
    for fold, part in enumerate(parts):
        # The same n ridge: what is judged is the solve with all samples but one.
        inside = replace(part, ridge=shift / len(part.residual))
        system = inside.system(warn=False)
        transforms = inside.start()
        lazy = solve_from(inside, math.inf, transforms, system, n_iter, _TOLERANCE)
        own = folds == fold
        for factor in FACTORS:
            if math.isfinite(factor) and lazy.objective > 0:
                found = solve_from(inside, factor * lazy.objective, transforms, system, n_iter, _TOLERANCE)
                transforms = found.transforms
            missed = leave_one_out(problem.kernel(transforms), problem.residual, [shift], problem.precision)[0]
            squares[factor][own] = missed[own].square().mean(1)
    errors = {factor: float(values.mean()) for factor, values in squares.items()}
    best = min(errors, key=lambda factor: (errors[factor], -factor))
    gain = squares[math.inf] - squares[best]
    return (best if float(gain.mean()) > float(gain.std()) / math.sqrt(n) else math.inf), errors


def _part(problem: AdaptiveProblem, rows: Tensor) -> AdaptiveProblem:
    """The problem of some samples."""
    assert isinstance(problem.features, NetworkFeatures)
    c = problem.residual.shape[1]
    places = (rows[:, None] * c + torch.arange(c, device=rows.device)).reshape(-1)
    plain = None if problem.plain is None else problem.plain[places][:, places]
    return replace(problem, features=problem.features.part(rows), residual=problem.residual[rows], plain=plain)
