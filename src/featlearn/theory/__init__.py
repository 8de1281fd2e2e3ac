"""Theory: what the papers' theorems predict, as functions to be held against measurement."""

from featlearn.theory.deep_linear import LinearAlignment, balance, balanced_layers, linear_alignment, shrunk_map
from featlearn.theory.invariance import Assumption, GlobalConvergence, NTKFloor, global_convergence, ntk_floor
from featlearn.theory.quadratic_networks import (
    QuadraticNetwork,
    Separation,
    SeparationData,
    least_norm_network,
    separation,
    separation_data,
)

__all__ = [
    "Assumption",
    "GlobalConvergence",
    "LinearAlignment",
    "NTKFloor",
    "QuadraticNetwork",
    "Separation",
    "SeparationData",
    "balance",
    "balanced_layers",
    "global_convergence",
    "least_norm_network",
    "linear_alignment",
    "ntk_floor",
    "separation",
    "separation_data",
    "shrunk_map",
]
