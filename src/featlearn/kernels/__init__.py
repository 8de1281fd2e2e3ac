"""Tangent and conjugate kernels of a network, and their alignment with labels."""

from featlearn._utils.public_names import renamed_names
from featlearn.kernels._ck_ptk import ck, ck_by_layer, ptk
from featlearn.kernels._ntk import ntk
from featlearn.kernels._ntk_operator import ntk_operator
from featlearn.kernels._path_average import AverageKernel, average_ntk
from featlearn.kernels.alignment import centered_alignment, centered_kernel, kernel_target_alignment, label_kernel
from featlearn.kernels.lazy_regressor import LazyRegressor

__all__ = [
    "AverageKernel",
    "LazyRegressor",
    "average_ntk",
    "centered_alignment",
    "centered_kernel",
    "ck",
    "ck_by_layer",
    "kernel_target_alignment",
    "label_kernel",
    "ntk",
    "ntk_operator",
    "ptk",
]

__getattr__ = renamed_names(__name__, {"centred_alignment": "centered_alignment", "centred_kernel": "centered_kernel"})
