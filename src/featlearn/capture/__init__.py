"""Forward and backward passes of a model, with the inputs and output gradients of each layer.

Only this package calls the model. One forward pass records each layer's inputs ``x`` and the place of its
pre-activations ``h``; each backward pass then gives ``J = df/dh`` of all layers at once.
"""

from featlearn._utils.public_names import renamed_names
from featlearn.capture._data import (
    Batch,
    Forward,
    as_batch,
    as_tensors,
    batches,
    few_rows,
    map_tensors,
    preserved_loader,
    rows_of,
    sliceable,
)
from featlearn.capture._hooks import Capture
from featlearn.capture._model_copies import copied, initial_model, matching_layers
from featlearn.capture._model_state import (
    at_rest,
    check_parameters,
    check_shaped,
    check_training_mode,
    preserved_rng,
    without_autocast,
)
from featlearn.capture._session import ModelSession
from featlearn.capture._shared_rows import Owners, Profile, output_signs, row_profiles, shared_layers
from featlearn.capture._trace import Call, Sizes, Trace
from featlearn.capture._whole_copies import WholeCopy, is_sharded
from featlearn.errors import VectorizationError

__all__ = [
    "Batch",
    "Call",
    "Capture",
    "Forward",
    "ModelSession",
    "Owners",
    "Profile",
    "Sizes",
    "Trace",
    "VectorizationError",
    "WholeCopy",
    "as_batch",
    "as_tensors",
    "at_rest",
    "batches",
    "check_parameters",
    "check_shaped",
    "check_training_mode",
    "copied",
    "few_rows",
    "initial_model",
    "is_sharded",
    "map_tensors",
    "matching_layers",
    "output_signs",
    "preserved_loader",
    "preserved_rng",
    "row_profiles",
    "rows_of",
    "shared_layers",
    "sliceable",
    "without_autocast",
]

__getattr__ = renamed_names(__name__, {"VectorisationError": "VectorizationError"})
