"""featlearn: measure, predict and use feature learning."""

import importlib
import logging
from importlib.metadata import version
from typing import TYPE_CHECKING, Any

from featlearn.errors import FeatlearnError, InputError, RunStoreError, UnsupportedModelError

if TYPE_CHECKING:
    from featlearn import runs, spectra, theory
    from featlearn.adaptive import AdaptiveTangentRegressor
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
    from featlearn.rfm import RFMClassifier, RFMRegressor, load_tabular, make_tabular, save_tabular
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
    "load_tabular",
    "make_tabular",
    "save_tabular",
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

# Whose public names are ours as well.
_OWNERS = ("features", "kernels", "numerics", "optim", "rfm", "spectra", "training", "adaptive")
_PACKAGES = (
    "adaptive", "capture", "dashboard", "features", "html", "kernels", "lab", "layers", "numerics", "optim", "plots",
    "rfm", "runs", "spectra", "theory", "training",
)  # fmt: skip


def __getattr__(name: str) -> Any:
    """Import a public name, or a package, when it is first used: ``featlearn --help`` need not wait for torch."""
    if name in _PACKAGES:
        return importlib.import_module(f"featlearn.{name}")
    if name in __all__:
        for owner in _OWNERS:
            module = importlib.import_module(f"featlearn.{owner}")
            if name in module.__all__:
                value = getattr(module, name)
                globals()[name] = value
                return value
    raise AttributeError(f"module 'featlearn' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__, *_PACKAGES})


logging.getLogger("featlearn").addHandler(logging.NullHandler())
