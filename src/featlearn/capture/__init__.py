"""The hall of the house: only this package calls a model."""

from featlearn.capture.batches import Batch, Forward, as_batch, batches, first_rows, rows_of, run_forward, sliceable
from featlearn.capture.capture import Call, Capture, Trace
from featlearn.capture.state import (
    check_parameters,
    check_training_mode,
    preserved,
    preserved_rng,
    refresh_hooked_weights,
)

__all__ = [
    "Batch",
    "Call",
    "Capture",
    "Forward",
    "Trace",
    "as_batch",
    "batches",
    "check_parameters",
    "check_training_mode",
    "first_rows",
    "preserved",
    "preserved_rng",
    "refresh_hooked_weights",
    "rows_of",
    "run_forward",
    "sliceable",
]
