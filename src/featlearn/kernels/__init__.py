"""Tangent and conjugate kernels of a network, and their alignment with labels."""

from typing import TYPE_CHECKING

from featlearn._utils.public_names import lazy_names, renamed_names

if TYPE_CHECKING:  # type checkers do not read the table below; a test compares the two
    from featlearn.kernels._ck_ptk import ck as ck
    from featlearn.kernels._ck_ptk import ck_by_layer as ck_by_layer
    from featlearn.kernels._ck_ptk import ptk as ptk
    from featlearn.kernels._ntk import ntk as ntk
    from featlearn.kernels._ntk_diagonal import ntk_diagonal as ntk_diagonal
    from featlearn.kernels._ntk_operator import ntk_operator as ntk_operator
    from featlearn.kernels._path_average import AverageKernel as AverageKernel
    from featlearn.kernels._path_average import average_ntk as average_ntk
    from featlearn.kernels.alignment import centered_alignment as centered_alignment
    from featlearn.kernels.alignment import centered_kernel as centered_kernel
    from featlearn.kernels.alignment import kernel_target_alignment as kernel_target_alignment
    from featlearn.kernels.alignment import label_kernel as label_kernel
    from featlearn.kernels.lazy_regressor import LazyClassifier as LazyClassifier
    from featlearn.kernels.lazy_regressor import LazyRegressor as LazyRegressor

# Public names and their modules, imported on first use: a monitor measures kernels without loading scikit-learn.
_HOMES = {
    "AverageKernel": "_path_average",
    "LazyClassifier": "lazy_regressor",
    "LazyRegressor": "lazy_regressor",
    "average_ntk": "_path_average",
    "centered_alignment": "alignment",
    "centered_kernel": "alignment",
    "ck": "_ck_ptk",
    "ck_by_layer": "_ck_ptk",
    "kernel_target_alignment": "alignment",
    "label_kernel": "alignment",
    "ntk": "_ntk",
    "ntk_diagonal": "_ntk_diagonal",
    "ntk_operator": "_ntk_operator",
    "ptk": "_ck_ptk",
}

__all__ = [*_HOMES]

__getattr__, __dir__ = lazy_names(__name__, _HOMES)
__getattr__ = renamed_names(
    __name__, {"centred_alignment": "centered_alignment", "centred_kernel": "centered_kernel"}, __getattr__
)
