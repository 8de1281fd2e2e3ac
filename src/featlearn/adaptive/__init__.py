"""Adaptive tangent features: the gradients of a network at initialization, transformed to fit the labels.

References:
    LeJeune & Alemohammad (2023), "An adaptive tangent feature perspective of neural networks",
    https://arxiv.org/abs/2308.15478.
"""

from featlearn.adaptive._effective_penalty import (
    effective_joint_penalty,
    effective_penalty,
    joint_penalty,
    penalty_curves,
)
from featlearn.adaptive._estimator import AdaptiveTangentClassifier, AdaptiveTangentRegressor
from featlearn.adaptive._from_arrays import adapt
from featlearn.adaptive._penalties import PENALTIES, Penalty, power
from featlearn.adaptive._solver import AdaptiveSolution
from featlearn.adaptive.linearized import LinearizedModel, linearize

__all__ = [
    "PENALTIES",
    "AdaptiveSolution",
    "AdaptiveTangentClassifier",
    "AdaptiveTangentRegressor",
    "LinearizedModel",
    "Penalty",
    "adapt",
    "effective_joint_penalty",
    "effective_penalty",
    "joint_penalty",
    "linearize",
    "penalty_curves",
    "power",
]
