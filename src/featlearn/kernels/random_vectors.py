"""Output vectors that are differentiated for tangent kernels: unit vectors, or random ones."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from featlearn._utils.rng import Seed, as_generator
from featlearn._utils.validation import check_int
from featlearn.errors import InputError

_MOST_GROUPS = 8  # kernels in memory for a standard error


@dataclass(frozen=True)
class Sketch:
    """Random output vectors: signs over ``m^{1/2}``, so that ``E sum_s v_s v_s^T = I``.

    Attributes:
        vectors: Number m of vectors.
        seed: Seed of the signs; the same seed gives the same vectors for every batch and every model.
    """

    vectors: int
    seed: int = 0

    def draw(self, count: int) -> Iterator[Tensor]:
        """Yield the vectors, shape (count,), for a number of outputs."""
        generator = torch.Generator().manual_seed(self.seed)
        for _ in range(self.vectors):
            bits = torch.randint(0, 2, (count,), generator=generator)
            yield (2.0 * bits - 1.0) / math.sqrt(self.vectors)


def unit_vectors(output: Tensor, outputs: str | int) -> Iterator[Tensor]:
    """Yield the unit vectors of the outputs of a model, the same for every sample, shaped like the output.

    Args:
        output: Output of the model, samples first.
        outputs: ``"trace"`` or ``"full"`` for all outputs, or the index of one.

    Raises:
        InputError: The index is not below the number of outputs.
    """
    n, count = output.shape[0], output[0].numel()
    if isinstance(outputs, int) and outputs >= count:
        raise InputError(f"outputs must be below {count}, the number of outputs, got {outputs}.")
    for c in [outputs] if isinstance(outputs, int) else range(count):
        v = torch.zeros_like(output, memory_format=torch.contiguous_format)
        v.view(n, -1)[:, c] = 1
        yield v


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
