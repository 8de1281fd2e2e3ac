"""Matrices, operators and Gaussian expectations: numerical building blocks, independent of networks."""

from featlearn._utils.public_names import renamed_names
from featlearn.linalg._krylov import Eigenpairs, Estimate, frobenius_norm, hutchpp_trace, top_eigenpairs
from featlearn.linalg.activations import NormalizedActivation, activation_module, normalized_activation
from featlearn.linalg.gaussian_quadrature import (
    ActivationConstants,
    activation_constants,
    gaussian_mean,
    hermite,
    hermite_coefficients,
)
from featlearn.linalg.matrices import corrupt, cosine, pearson, principal_angles, psd_power

__all__ = [
    "ActivationConstants",
    "Eigenpairs",
    "Estimate",
    "NormalizedActivation",
    "activation_constants",
    "activation_module",
    "corrupt",
    "cosine",
    "frobenius_norm",
    "gaussian_mean",
    "hermite",
    "hermite_coefficients",
    "hutchpp_trace",
    "normalized_activation",
    "pearson",
    "principal_angles",
    "psd_power",
    "top_eigenpairs",
]

__getattr__ = renamed_names(
    __name__, {"NormalisedActivation": "NormalizedActivation", "normalised_activation": "normalized_activation"}
)
