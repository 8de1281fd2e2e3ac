"""Networks of the papers, and how they start."""

from featlearn.lab.nets.activations import activation_module
from featlearn.lab.nets.initialisation import SubtractInitial, scale_weights, subtract_initial
from featlearn.lab.nets.mlp import mlp

__all__ = ["SubtractInitial", "activation_module", "mlp", "scale_weights", "subtract_initial"]
