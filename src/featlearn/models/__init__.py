"""Networks of the papers, and how they start."""

from featlearn.linalg.activations import NormalisedActivation, activation_module, normalized_activation
from featlearn.models._convolutional import small_cnn, vgg11
from featlearn.models._gpt import GPT, gpt
from featlearn.models._ntk_mlp import Scale, ntk_mlp
from featlearn.models.initialization import SubtractInitial, scale_weights, subtract_initial
from featlearn.models.mlp import mlp

__all__ = [
    "GPT",
    "NormalisedActivation",
    "Scale",
    "SubtractInitial",
    "activation_module",
    "gpt",
    "mlp",
    "normalized_activation",
    "ntk_mlp",
    "scale_weights",
    "small_cnn",
    "subtract_initial",
    "vgg11",
]
