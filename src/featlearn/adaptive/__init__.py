"""Adaptive tangent features: a network's gradients at its start, transformed as the labels ask for."""

from featlearn.adaptive._effective_penalty import (
    effective_joint_penalty,
    effective_penalty,
    joint_penalty,
    penalty_curves,
)
from featlearn.adaptive._estimator import AdaptiveTangentRegressor
from featlearn.adaptive._from_arrays import adapt
from featlearn.adaptive._penalties import PENALTIES, Penalty, power
from featlearn.adaptive._solver import AdaptiveSolution

__all__ = [
    "PENALTIES",
    "AdaptiveSolution",
    "AdaptiveTangentRegressor",
    "Penalty",
    "adapt",
    "effective_joint_penalty",
    "effective_penalty",
    "joint_penalty",
    "penalty_curves",
    "power",
]
