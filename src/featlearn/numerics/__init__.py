"""Numerical building blocks that know nothing of networks."""

from featlearn.numerics.linalg import corrupt, cosine, pearson, principal_angles, psd_power
from featlearn.numerics.progress import progress_bar
from featlearn.numerics.seeds import Seed, as_generator

__all__ = [
    "Seed",
    "as_generator",
    "corrupt",
    "cosine",
    "pearson",
    "principal_angles",
    "progress_bar",
    "psd_power",
]
