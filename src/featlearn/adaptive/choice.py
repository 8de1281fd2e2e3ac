"""How strongly features should adapt, and the ridge, by exact leave-one-out errors."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from featlearn.adaptive.solver import AdaptiveProblem, solve_from
from featlearn.adaptive.systems import leave_one_out

__all__ = ["FACTORS", "FEWEST", "Judged", "best_ridge", "folds_of", "judge_factors"]

FACTORS = (math.inf, 1.0, 0.1, 0.01, 0.001)
"""Scales to choose from, in units of ``|theta|^2`` of lazy training; infinite is lazy training itself."""
SHIFTS = (0.0, *(10.0**power for power in range(-7, 1)))
"""``n ridge`` to choose from, in units of the kernel's mean diagonal."""
FEWEST = 10
_FOLDS = 3
_TOLERANCE = 1e-3  # of descents that are only judged


@dataclass(frozen=True)
class Judged:
    """The best factor, and the mean squared leave-one-out error of each."""

    factor: float
    errors: dict[float, float]


def best_ridge(kernel: Tensor, residual: Tensor, precision: float) -> float:
    """The lambda with the least leave-one-out error of lazy training."""
    unit = float(kernel.diagonal().mean())
    errors = leave_one_out(kernel, residual, [unit * shift for shift in SHIFTS], precision).square().mean((1, 2))
    return SHIFTS[int(errors.argmin())] * unit / len(residual)


def judge_factors(
    problem: AdaptiveProblem, parts: Sequence[AdaptiveProblem], folds: Tensor, factors: Sequence[float], n_iter: int
) -> Judged:
    """Leave-one-out errors of lazy training and of each factor, which tell the truth about M.

    Leaving a sample out of the solve is not enough: M has seen its label. So each fold's samples are left out of the
    solve one by one, under an M that was learnt from the samples outside the fold. Scales go from weak to strong, and
    each descent starts where the one before ended.

    Args:
        problem: All samples.
        parts: The same for the samples outside each fold.
        folds: The fold of each sample, (n,).
        factors: Scales in units of ``|theta|^2`` of lazy training.
        n_iter: Steps of a descent at the most.
    """
    n, c = problem.residual.shape
    shift = n * problem.ridge
    ordered = sorted(factors, reverse=True)
    totals = dict.fromkeys(ordered, 0.0)
    for fold, part in enumerate(parts):
        # The same n ridge: what is judged is the solve with all samples but one.
        inside = replace(part, ridge=shift / len(part.residual))
        system = inside.system(warn=False)
        transforms = inside.start()
        lazy = solve_from(inside, math.inf, transforms, system, n_iter, _TOLERANCE)
        for factor in ordered:
            if math.isfinite(factor) and lazy.objective > 0:
                found = solve_from(inside, factor * lazy.objective, transforms, system, n_iter, _TOLERANCE)
                transforms = found.transforms
            missed = leave_one_out(problem.kernel(transforms), problem.residual, [shift], problem.precision)[0]
            totals[factor] += float(missed[folds == fold].square().sum())
    errors = {factor: total / (n * c) for factor, total in totals.items()}
    return Judged(min(errors, key=lambda factor: (errors[factor], -factor)), errors)


def folds_of(n: int, generator: torch.Generator) -> Tensor:
    """The fold of each of n samples."""
    return torch.randperm(n, generator=generator) % min(_FOLDS, n)
