"""Adaptation of all features together, in closed form.

References:
    LeJeune & Alemohammad (2023), "An adaptive tangent feature perspective of neural networks",
    https://arxiv.org/abs/2308.15478,
    theorem 1.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

import numpy as np
import torch
from torch import Tensor

from featlearn.adaptive._effective_penalty import minimizers
from featlearn.adaptive._linear_solvers import solved
from featlearn.adaptive._penalties import PENALTIES, Array, Penalty, PenaltyPair
from featlearn.adaptive._penalty_search import least_of_one, reach
from featlearn.adaptive._solver import AdaptiveProblem, AdaptiveSolution
from featlearn.adaptive._tangent_features import sums
from featlearn.errors import InputError


def solve_whole(problem: AdaptiveProblem, penalties: Mapping[str, PenaltyPair], weight: float) -> AdaptiveSolution:
    r"""Solve a problem in which M transforms all features together.

    M is the identity but for the direction of the change beta, which it multiplies by s. Given s, the minimum over
    theta is ``r^T (s^2 K_0 + n ridge I)^{-1} r``, so s minimizes this plus ``weight w(s)``. Without a ridge beta is
    that of lazy training, and ``s`` minimizes ``weight w(s) + |beta|^2 / s^2``; with a ridge it is that of lazy
    training with the ridge ``ridge / s^2``.

    Time: an eigendecomposition of ``n c`` rows if there is a ridge, a Cholesky factorization otherwise.

    Args:
        problem: Problem; its transformations are not used.
        penalties: Penalties of all matrices, whose first ones must be the same.
        weight: Weight mu of the penalty.
    """
    kinds = {pair[0] for pair in penalties.values()}
    if len(kinds) > 1:
        raise InputError('penalty must be the same for all layers with structure="whole", which has one M.')
    (penalty,) = kinds
    if not penalty.anchored:
        raise InputError(f'penalty must have its minimum at 1 with structure="whole", got {penalty.name!r}.')
    kernel = problem.kernel(problem.start())
    system = problem.system()
    s, coefficients = 1.0, solved(kernel, system)
    if math.isfinite(weight) and not penalty.fixed:
        if system.shift:
            s = _best_factor(kernel, system.residual, system.shift, penalty, weight)
            coefficients = solved(s**2 * kernel, system)
        else:
            size = math.sqrt(max(0.0, float(system.residual @ coefficients)) / weight)
            s = float(minimizers(penalty, PENALTIES["indicator"], np.array([size]))[0][0])
            coefficients = coefficients / s**2
    cost = 0.0 if math.isinf(weight) else weight * float(penalty(s))
    objective = float(system.residual @ coefficients) + cost
    beta = s**2 * coefficients
    square = float(beta @ (kernel @ beta))
    shaped = beta.reshape(problem.residual.shape)
    scale = (s**2 - 1) / square if square > 0 else 0.0
    parts = sums(problem.features, shaped)
    return AdaptiveSolution({}, shaped, parts, objective, [objective], True, weight, s, scale)


def _best_factor(kernel: Tensor, residual: Tensor, shift: float, penalty: Penalty, weight: float) -> float:
    """Return the s with the least ``r^T (s^2 K + shift I)^{-1} r + weight w(s)``."""
    values, vectors = torch.linalg.eigh(kernel)
    sizes, squares = (t.cpu().numpy() for t in (values.clamp_min(0), (vectors.mT @ residual).square()))

    def objective(y: Array, _: Array) -> Array:
        factors = np.exp(2 * y)[..., None]
        misfits: Array = (squares / (factors * sizes + shift)).sum(-1)
        return misfits + weight * penalty(np.exp(y))

    top = math.sqrt(float(squares.sum()) / shift / weight)
    high = np.log(reach(penalty, np.array([top]), 0.0, penalty.name))
    return float(np.exp(least_of_one(objective, np.array([top]), np.zeros(1), high)[0]))
