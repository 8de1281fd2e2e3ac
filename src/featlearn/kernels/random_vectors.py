"""Random output vectors of tangent kernels."""

from __future__ import annotations

import torch

from featlearn._utils.rng import Seed, as_generator
from featlearn._utils.validation import check_int
from featlearn.errors import InputError
from featlearn.kernels.per_sample_gradients import Sketch

_MOST_GROUPS = 8  # kernels in memory for a standard error


def make_sketch(sketches: int | None, outputs: str | int, generator: Seed) -> Sketch | None:
    """Return the random output vectors of a tangent kernel; None to differentiate every output.

    Args:
        sketches: Number of vectors, as in `ntk`.
        outputs: Outputs, as in `ntk`.
        generator: Generator or seed of the vectors.

    Raises:
        InputError: The number is invalid, or the outputs are not summed.
    """
    if sketches is None:
        return None
    check_int("sketches", sketches, optional=True)
    if outputs != "trace":
        raise InputError(f'sketches estimate the trace over outputs and need outputs="trace", got {outputs!r}.')
    seed = torch.randint(2**62, (1,), generator=as_generator(generator, "sketch"))
    return Sketch(sketches, int(seed))


def groups_of(vectors: int) -> int:
    """Return the number of equal groups of vectors for a standard error: at most eight if possible.

    Args:
        vectors: Number of vectors.
    """
    return max((n for n in range(2, _MOST_GROUPS + 1) if vectors % n == 0), default=vectors)
