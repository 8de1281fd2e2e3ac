"""Feature matrices and correlations of the layers of a model."""

from featlearn.errors import NotMeasuredError
from featlearn.features._accumulator import FeatureAccumulator
from featlearn.features._batch_sums import in_processes
from featlearn.features._cost import LayerCost, ProbeCost, layer_costs, probe_cost
from featlearn.features._egop import egop
from featlearn.features._feature_matrices import LayerFeatures
from featlearn.features._probe import probe
from featlearn.features._report import Report
from featlearn.features._shards import probe_shards
from featlearn.features.measurement_plan import QUANTITIES, Outputs

__all__ = [
    "QUANTITIES",
    "FeatureAccumulator",
    "LayerCost",
    "LayerFeatures",
    "NotMeasuredError",
    "Outputs",
    "ProbeCost",
    "Report",
    "egop",
    "in_processes",
    "layer_costs",
    "probe",
    "probe_cost",
    "probe_shards",
]
