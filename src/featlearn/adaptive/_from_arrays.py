"""Adaptive features for gradients, or any features, that are given as arrays."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from typing import Any

import torch
from torch import Tensor

from featlearn._utils.validation import check_int, check_number, check_option
from featlearn.adaptive._penalties import as_pair
from featlearn.adaptive._solver import AdaptiveProblem, AdaptiveSolution, solve
from featlearn.adaptive._tangent_features import GivenFeatures
from featlearn.errors import InputError

STRUCTURES = ("layers", "diagonal")


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
    """Minimize ``|theta|^2 + scale Omega(M)`` so that ``features M theta = residual`` (tangent features paper, eq. 1).

    Args:
        features: A table (n, P), which M transforms as a whole (Theorem 1); or matrices of gradients, (n, k_out, k_in)
            or (n, c, k_out, k_in), by name, each with its own ``M_out`` and ``M_in`` (Theorem 2).
        residual: (n,) or (n, c): labels less the outputs at the start.
        penalty: w, or a pair for the input and the output side, see `featlearn.adaptive.PENALTIES`.
        structure: ``"layers"``, or ``"diagonal"`` for an M that multiplies every feature by its own number.
        scale: mu, the weight of the penalties; the paper has 1.
        ridge: lambda: the constraints become ``|features M theta - residual|^2 / (n ridge)`` in the objective.
        last: Names of matrices whose output side stays as it is, or one name.
        n_iter: Steps at the most.
        tolerance: Relative fall of the objective that ends the descent.
        restarts: Random starts, besides M = I.
        generator: Of the random starts.
        allow_unanchored: Whether penalties may be least elsewhere than at 1.
    """
    penalties = as_pair(penalty, allow_unanchored)
    check_numbers(scale=scale, ridge=ridge, n_iter=n_iter, tolerance=tolerance, restarts=restarts)
    if not isinstance(generator, torch.Generator | None):
        raise InputError(f"generator must be a torch.Generator, got {type(generator).__name__}")
    check_option("structure", structure, STRUCTURES)
    target = _finite(residual, "residual")
    if target.ndim not in (1, 2):
        raise InputError(f"residual must be (n,) or (n, c), got shape {tuple(target.shape)}")
    if not target.numel():
        raise InputError(f"residual is empty: it has shape {tuple(target.shape)}")
    target = target.reshape(len(target), -1)
    n, c = target.shape
    whole = not isinstance(features, Mapping)
    given = {"features": features} if whole else dict(features)
    if not given:
        raise InputError("features must hold at least one matrix")
    gradients = {}
    for name, values in given.items():
        a = _finite(values, name)
        shaped = a[:, None, None] if whole and a.ndim == 2 else a[:, None] if a.ndim == 3 else a
        if a.ndim not in ((2,) if whole else (3, 4)) or tuple(shaped.shape[:2]) != (n, c) or not a.numel():
            raise InputError(
                f"{name!r} has shape {tuple(a.shape)} for residuals of shape {(n, c)}: expected (n, P) for a table "
                "and residuals (n,), or (n, k_out, k_in) or (n, c, k_out, k_in) by name"
            )
        gradients[name] = shaped
    fixed = frozenset([last] if isinstance(last, str) else last)
    if unknown := fixed - set(given):
        raise InputError(f"last= names {', '.join(map(repr, unknown))}, which is none of {', '.join(map(repr, given))}")
    problem = AdaptiveProblem(
        GivenFeatures(gradients),
        target,
        penalties,
        ridge=ridge,
        diagonal=structure == "diagonal",
        last=frozenset(gradients) if whole else fixed,
    )
    return solve(problem, scale, n_iter=n_iter, tolerance=tolerance, restarts=restarts, generator=generator)


def check_numbers(*, scale: float, ridge: float, n_iter: int, tolerance: float, restarts: int) -> None:
    """Raise for numbers out of range."""
    if scale != math.inf:  # infinite for features that stay
        check_number("scale", scale, above=0)
    check_number("ridge", ridge, 0)
    check_number("tolerance", tolerance, 0, below=1)
    check_int("n_iter", n_iter)
    check_int("restarts", restarts, 0)


def _finite(values: Any, name: str) -> Tensor:
    try:
        found = torch.as_tensor(values, dtype=torch.float64).detach()
    except (TypeError, ValueError, RuntimeError) as error:
        raise InputError(f"{name!r} must be an array of numbers, got {type(values).__name__} ({error})") from error
    if not torch.isfinite(found).all():
        raise InputError(f"{name!r} has NaN or infinite entries")
    return found
