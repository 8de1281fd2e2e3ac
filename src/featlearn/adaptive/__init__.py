"""Adaptive tangent features: a network's gradients at its start, transformed as the labels ask for."""

from featlearn.adaptive.adapt import adapt
from featlearn.adaptive.effective import effective_joint_penalty, effective_penalty, joint_penalty, penalty_curves
from featlearn.adaptive.estimator import AdaptiveTangentRegressor
from featlearn.adaptive.penalties import PENALTIES, Penalty, power
from featlearn.adaptive.solver import AdaptiveSolution

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
