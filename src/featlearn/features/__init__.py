"""Feature matrices and correlations of the layers of a model."""

from featlearn.features.accumulator import FeatureAccumulator
from featlearn.features.cost import ProbeCost, probe_cost
from featlearn.features.egop import egop
from featlearn.features.layer_features import LayerFeatures, NotMeasuredError
from featlearn.features.measures import QUANTITIES
from featlearn.features.outputs import Outputs
from featlearn.features.probe import probe
from featlearn.features.report import Report
from featlearn.features.totals import in_processes

__all__ = [
    "QUANTITIES",
    "FeatureAccumulator",
    "LayerFeatures",
    "NotMeasuredError",
    "Outputs",
    "ProbeCost",
    "Report",
    "egop",
    "in_processes",
    "probe",
    "probe_cost",
]
