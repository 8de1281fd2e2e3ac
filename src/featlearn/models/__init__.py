"""Networks of the papers, and their initialization."""

from featlearn._utils.public_names import renamed_names
from featlearn.linalg.activations import NormalizedActivation, activation_module, normalized_activation
from featlearn.models._convolutional import small_cnn, vgg11
from featlearn.models._gpt import GPT, gpt
from featlearn.models.initialization import SubtractInitial, scale_weights, subtract_initial
from featlearn.models.mlp import Scale, mlp, ntk_mlp

__all__ = [
    "GPT",
    "NormalizedActivation",
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

__getattr__ = renamed_names(
    __name__, {"NormalisedActivation": "NormalizedActivation", "normalised_activation": "normalized_activation"}
)
