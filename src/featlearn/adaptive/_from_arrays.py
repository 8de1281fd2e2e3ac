"""Adaptive features for gradients, or other features, given as arrays."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from typing import Any

import torch

from featlearn._utils.validation import check_int, check_number, check_option
from featlearn.adaptive._penalties import penalties_by_name
from featlearn.adaptive._solver import AdaptiveProblem, AdaptiveSolution, solve
from featlearn.adaptive._tangent_features import GivenFeatures, finite_tensor
from featlearn.adaptive._whole import solve_whole
from featlearn.errors import InputError

STRUCTURES = ("layers", "diagonal", "whole")


def adapt(
    features: Any,
    residual: Any,
    *,
    penalty: Any = "square",
    structure: str = "layers",
    scale: float = 1.0,
    ridge: float = 0.0,
    last: str | Collection[str] = (),
    n_iter: int = 1000,
    tolerance: float = 1e-10,
    restarts: int = 0,
    generator: torch.Generator | None = None,
    allow_unanchored: bool = False,
) -> AdaptiveSolution:
    """Minimize ``|theta|^2 + scale Omega(M)`` subject to ``features M theta = residual``.

    Args:
        features: Table of shape ``(n, P)``, which M transforms as a whole (theorem 1); or gradients by name, of shape
            ``(n, k_out, k_in)`` or ``(n, c, k_out, k_in)``, each with its own ``M_out`` and ``M_in`` (theorem 2).
        residual: Labels minus initial outputs, shape ``(n,)`` or ``(n, c)``.
        penalty: Penalty w, or a pair for the input and the output side: "square", "absolute", "power:1.5", "indicator",
            a `Penalty` or a function; or a mapping from glob patterns of names to these. Matrices that no pattern
            matches are not transformed.
        structure: "layers" for a transformation of each matrix; "diagonal" for an M that multiplies every feature by
            its own factor; "whole" for one M of all features together (theorem 1), in closed form.
        scale: Weight mu of the penalties, above 0. The paper uses 1; infinity keeps M = I.
        ridge: Ridge lambda, at least 0. If it is positive, the constraints become the term ``|features M theta -
            residual|^2 / (n ridge)`` of the objective.
        last: Name or names of matrices whose output side is not transformed.
        n_iter: Maximum number of steps.
        tolerance: Relative decrease of the objective below which the iteration stops.
        restarts: Number of random starts in addition to M = I.
        generator: Generator of the random starts. Default: seed 0.
        allow_unanchored: Whether penalties can have their minimum elsewhere than at 1.

    Returns:
        Transformations, coefficients and objective.

    Raises:
        InputError: If shapes do not match, or a number is out of range.

    Example:
        >>> import numpy as np
        >>> from featlearn.adaptive import adapt, effective_penalty
        >>> solution = adapt(np.eye(2), np.array([3.0, 0.0]), structure="diagonal")
        >>> solution.converged, round(solution.objective, 4)
        (True, 3.2441)
        >>> round(float(effective_penalty("square", 3.0)), 4)  # the minimum of |theta|^2 + (M - 1)^2 for one feature
        3.2441
        >>> round(adapt(np.eye(2), np.array([3.0, 0.0]), penalty="indicator").objective, 4)  # M = I
        9.0

    References:
        LeJeune & Alemohammad (2023), "An adaptive tangent feature perspective of neural networks",
        https://arxiv.org/abs/2308.15478,
        equation 1.
    """
    check_numbers(scale=scale, ridge=ridge, n_iter=n_iter, tolerance=tolerance, restarts=restarts)
    if not isinstance(generator, torch.Generator | None):
        raise InputError(f"generator must be a torch.Generator, got {type(generator).__name__}.")
    check_option("structure", structure, STRUCTURES)
    target = finite_tensor(residual, "residual")
    if target.ndim not in (1, 2) or not target.numel():
        raise InputError(f"residual must have shape (n,) or (n, c) and not be empty, got shape {tuple(target.shape)}.")
    target = target.reshape(len(target), -1)
    given = GivenFeatures.of(features)
    if tuple(target.shape) != (given.rows, given.outputs):
        raise InputError(
            f"residual must have one row per sample and one column per output of the features, "
            f"{(given.rows, given.outputs)}, got {tuple(target.shape)}."
        )
    names = list(given.shapes)
    fixed = frozenset([last] if isinstance(last, str) else last)
    if unknown := fixed - set(names):
        raise InputError(f"last must be one of {', '.join(map(repr, names))}, got {', '.join(map(repr, unknown))}.")
    fixed = fixed if isinstance(features, Mapping) else frozenset(names)
    one_sided = structure != "layers"
    pairs = penalties_by_name(penalty, names, fixed, allow_unanchored=allow_unanchored, one_sided=one_sided)
    problem = AdaptiveProblem.of(given, target, pairs, ridge=ridge, diagonal=structure == "diagonal")
    if structure == "whole":
        return solve_whole(problem, pairs, scale)
    return solve(problem, scale, n_iter=n_iter, tolerance=tolerance, restarts=restarts, generator=generator)


def check_numbers(*, scale: float, ridge: float, n_iter: int, tolerance: float, restarts: int) -> None:
    """Raise an error for numbers out of range."""
    if scale != math.inf:  # which keeps the features
        check_number("scale", scale, above=0)
    check_number("ridge", ridge, 0)
    check_number("tolerance", tolerance, 0, below=1)
    check_int("n_iter", n_iter)
    check_int("restarts", restarts, 0)
