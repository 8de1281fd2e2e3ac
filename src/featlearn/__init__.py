"""featlearn: measure, predict and use feature learning."""

import logging
from importlib.metadata import version

from featlearn import runs, spectra, theory
from featlearn.adaptive import AdaptiveTangentRegressor
from featlearn.errors import FeatlearnError, InputError, RunStoreError, UnsupportedModelError
from featlearn.features import FeatureAccumulator, LayerFeatures, NotMeasuredError, Report, egop, probe
from featlearn.kernels import (
    AverageKernel,
    LazyRegressor,
    average_ntk,
    centred_alignment,
    ck,
    kernel_target_alignment,
    label_kernel,
    ntk,
    ntk_operator,
    ptk,
)
from featlearn.numerics import (
    corrupt,
    cosine,
    frobenius_norm,
    hutchpp_trace,
    pearson,
    principal_angles,
    psd_power,
    top_eigenpairs,
)
from featlearn.optim import SLO, AdaptiveSLO
from featlearn.rfm import RFMClassifier, RFMRegressor, make_tabular
from featlearn.spectra import weight_spectra
from featlearn.training import Monitor

__all__ = [  # noqa: RUF022  # grouped by use
    # measure a model
    "FeatureAccumulator",
    "LayerFeatures",
    "Report",
    "egop",
    "probe",
    # kernels
    "AverageKernel",
    "LazyRegressor",
    "average_ntk",
    "centred_alignment",
    "ck",
    "kernel_target_alignment",
    "label_kernel",
    "ntk",
    "ntk_operator",
    "ptk",
    # predictions, and learning with adapted tangent features
    "AdaptiveTangentRegressor",
    "theory",
    # laws, tails and phases of spectra
    "spectra",
    "weight_spectra",
    # train, and watch features being learnt
    "AdaptiveSLO",
    "Monitor",
    "SLO",
    "runs",
    # kernel machines that learn features
    "RFMClassifier",
    "RFMRegressor",
    "make_tabular",
    # compare and transform matrices
    "corrupt",
    "cosine",
    "frobenius_norm",
    "hutchpp_trace",
    "pearson",
    "principal_angles",
    "psd_power",
    "top_eigenpairs",
    # errors
    "FeatlearnError",
    "InputError",
    "NotMeasuredError",
    "RunStoreError",
    "UnsupportedModelError",
]

__version__ = version("featlearn")

logging.getLogger("featlearn").addHandler(logging.NullHandler())
