"""Numerical building blocks that know nothing of networks."""

from featlearn.numerics.gaussian import (
    ActivationConstants,
    activation_constants,
    gaussian_mean,
    hermite,
    hermite_coefficients,
)
from featlearn.numerics.krylov import Eigenpairs, Estimate, frobenius_norm, hutchpp_trace, top_eigenpairs
from featlearn.numerics.linalg import corrupt, cosine, pearson, principal_angles, psd_power
from featlearn.numerics.progress import progress_bar
from featlearn.numerics.seeds import Seed, as_generator

__all__ = [
    "ActivationConstants",
    "Eigenpairs",
    "Estimate",
    "Seed",
    "activation_constants",
    "as_generator",
    "corrupt",
    "cosine",
    "frobenius_norm",
    "gaussian_mean",
    "hermite",
    "hermite_coefficients",
    "hutchpp_trace",
    "pearson",
    "principal_angles",
    "progress_bar",
    "psd_power",
    "top_eigenpairs",
]
