"""Networks of the papers, and how they start."""

from featlearn.lab.nets.activations import NormalisedActivation, activation_module, normalised_activation
from featlearn.lab.nets.convolutional import small_cnn, vgg11
from featlearn.lab.nets.gpt import GPT, gpt
from featlearn.lab.nets.initialisation import SubtractInitial, scale_weights, subtract_initial
from featlearn.lab.nets.mlp import mlp
from featlearn.lab.nets.ntk_mlp import Scale, ntk_mlp

__all__ = [
    "GPT",
    "NormalisedActivation",
    "Scale",
    "SubtractInitial",
    "activation_module",
    "gpt",
    "mlp",
    "normalised_activation",
    "ntk_mlp",
    "scale_weights",
    "small_cnn",
    "subtract_initial",
    "vgg11",
]
