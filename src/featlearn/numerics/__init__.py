"""Numerical building blocks that know nothing of networks."""

from featlearn.numerics.linalg import corrupt, cosine, pearson, principal_angles, psd_power

__all__ = ["corrupt", "cosine", "pearson", "principal_angles", "psd_power"]
