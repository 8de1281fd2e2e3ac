"""The hall of the house: only this package calls a model."""

from featlearn.capture.batches import Batch, Forward, as_batch, batches, rows_of, run_forward, sliceable
from featlearn.capture.capture import Call, Capture, Trace
from featlearn.capture.state import check_training_mode, preserved, preserved_rng

__all__ = [
    "Batch",
    "Call",
    "Capture",
    "Forward",
    "Trace",
    "as_batch",
    "batches",
    "check_training_mode",
    "preserved",
    "preserved_rng",
    "rows_of",
    "run_forward",
    "sliceable",
]
