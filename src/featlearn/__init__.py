"""featlearn: measure, predict and use feature learning."""

import logging
from importlib.metadata import version
from typing import TYPE_CHECKING

from featlearn._utils.public_names import lazy_names, renamed_names
from featlearn.errors import FeatlearnError as FeatlearnError
from featlearn.errors import InputError as InputError
from featlearn.errors import RunStoreError as RunStoreError
from featlearn.errors import UnsupportedModelError as UnsupportedModelError

if TYPE_CHECKING:  # type checkers do not read the table below; a test compares the two
    from featlearn import adaptive as adaptive
    from featlearn import capture as capture
    from featlearn import dashboard as dashboard
    from featlearn import datasets as datasets
    from featlearn import features as features
    from featlearn import kernels as kernels
    from featlearn import layers as layers
    from featlearn import linalg as linalg
    from featlearn import models as models
    from featlearn import optim as optim
    from featlearn import plots as plots
    from featlearn import reports as reports
    from featlearn import rfm as rfm
    from featlearn import runs as runs
    from featlearn import spectra as spectra
    from featlearn import theory as theory
    from featlearn import training as training
    from featlearn.adaptive import AdaptiveTangentClassifier as AdaptiveTangentClassifier
    from featlearn.adaptive import AdaptiveTangentRegressor as AdaptiveTangentRegressor
    from featlearn.adaptive import linearize as linearize
    from featlearn.features import FeatureAccumulator as FeatureAccumulator
    from featlearn.features import LayerFeatures as LayerFeatures
    from featlearn.features import NotMeasuredError as NotMeasuredError
    from featlearn.features import Report as Report
    from featlearn.features import egop as egop
    from featlearn.features import probe as probe
    from featlearn.kernels import AverageKernel as AverageKernel
    from featlearn.kernels import LazyClassifier as LazyClassifier
    from featlearn.kernels import LazyRegressor as LazyRegressor
    from featlearn.kernels import average_ntk as average_ntk
    from featlearn.kernels import centered_alignment as centered_alignment
    from featlearn.kernels import ck as ck
    from featlearn.kernels import kernel_target_alignment as kernel_target_alignment
    from featlearn.kernels import label_kernel as label_kernel
    from featlearn.kernels import ntk as ntk
    from featlearn.kernels import ntk_diagonal as ntk_diagonal
    from featlearn.kernels import ntk_operator as ntk_operator
    from featlearn.kernels import ptk as ptk
    from featlearn.linalg import corrupt as corrupt
    from featlearn.linalg import cosine as cosine
    from featlearn.linalg import frobenius_norm as frobenius_norm
    from featlearn.linalg import hutchpp_trace as hutchpp_trace
    from featlearn.linalg import pearson as pearson
    from featlearn.linalg import principal_angles as principal_angles
    from featlearn.linalg import psd_power as psd_power
    from featlearn.linalg import top_eigenpairs as top_eigenpairs
    from featlearn.optim import SLO as SLO
    from featlearn.optim import AdaptiveSLO as AdaptiveSLO
    from featlearn.rfm import RFMClassifier as RFMClassifier
    from featlearn.rfm import RFMRegressor as RFMRegressor
    from featlearn.rfm import load_tabular as load_tabular
    from featlearn.rfm import make_tabular as make_tabular
    from featlearn.rfm import save_tabular as save_tabular
    from featlearn.spectra import weight_spectra as weight_spectra
    from featlearn.training import Monitor as Monitor

# Public name -> the package that has it; None is a package. Imported when first used, so that `featlearn --help` does
# not wait for torch.
_HOMES: dict[str, str | None] = {
    # measure a model
    "FeatureAccumulator": "features",
    "LayerFeatures": "features",
    "NotMeasuredError": "features",
    "Report": "features",
    "egop": "features",
    "probe": "features",
    # kernels
    "AverageKernel": "kernels",
    "LazyClassifier": "kernels",
    "LazyRegressor": "kernels",
    "average_ntk": "kernels",
    "centered_alignment": "kernels",
    "ck": "kernels",
    "kernel_target_alignment": "kernels",
    "label_kernel": "kernels",
    "ntk": "kernels",
    "ntk_diagonal": "kernels",
    "ntk_operator": "kernels",
    "ptk": "kernels",
    # learning with adapted tangent features
    "AdaptiveTangentClassifier": "adaptive",
    "AdaptiveTangentRegressor": "adaptive",
    "linearize": "adaptive",
    # spectra of weights
    "weight_spectra": "spectra",
    # train, and watch features being learned
    "AdaptiveSLO": "optim",
    "SLO": "optim",
    "Monitor": "training",
    # kernel machines that learn features
    "RFMClassifier": "rfm",
    "RFMRegressor": "rfm",
    "load_tabular": "rfm",
    "make_tabular": "rfm",
    "save_tabular": "rfm",
    # compare and transform matrices
    "corrupt": "linalg",
    "cosine": "linalg",
    "frobenius_norm": "linalg",
    "hutchpp_trace": "linalg",
    "pearson": "linalg",
    "principal_angles": "linalg",
    "psd_power": "linalg",
    "top_eigenpairs": "linalg",
    # packages
    "adaptive": None,
    "capture": None,
    "dashboard": None,
    "datasets": None,
    "features": None,
    "kernels": None,
    "layers": None,
    "linalg": None,
    "models": None,
    "optim": None,
    "plots": None,
    "reports": None,
    "rfm": None,
    "runs": None,
    "spectra": None,
    "theory": None,
    "training": None,
}

__all__ = ["FeatlearnError", "InputError", "RunStoreError", "UnsupportedModelError", *_HOMES]

__version__ = version("featlearn")

__getattr__, __dir__ = lazy_names(__name__, _HOMES)
__getattr__ = renamed_names(__name__, {"centred_alignment": "centered_alignment"}, __getattr__)

logging.getLogger("featlearn").addHandler(logging.NullHandler())
