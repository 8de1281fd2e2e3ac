"""The hall of the house: only this package calls a model."""

from featlearn.capture.batches import Batch, Forward, batches, few_rows, rows_of, sliceable
from featlearn.capture.capture import Call, Capture, Trace
from featlearn.capture.jacobian import VectorisationError
from featlearn.capture.models import initial_model
from featlearn.capture.state import check_training_mode
from featlearn.capture.subject import Subject

__all__ = [
    "Batch",
    "Call",
    "Capture",
    "Forward",
    "Subject",
    "Trace",
    "VectorisationError",
    "batches",
    "check_training_mode",
    "few_rows",
    "initial_model",
    "rows_of",
    "sliceable",
]
