"""The hall of the house: only this package calls a model."""

from featlearn.capture.batches import Batch, Forward, as_batch, batches, few_rows, map_tensors, rows_of, sliceable
from featlearn.capture.capture import Call, Capture, Trace
from featlearn.capture.jacobian import VectorisationError
from featlearn.capture.models import initial_model
from featlearn.capture.state import check_training_mode, preserved_rng
from featlearn.capture.subject import Subject

__all__ = [
    "Batch",
    "Call",
    "Capture",
    "Forward",
    "Subject",
    "Trace",
    "VectorisationError",
    "as_batch",
    "batches",
    "check_training_mode",
    "few_rows",
    "initial_model",
    "map_tensors",
    "preserved_rng",
    "rows_of",
    "sliceable",
]
