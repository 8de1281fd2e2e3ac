"""Which combinations of the outputs are differentiated: each one, or a random sketch of them."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from featlearn.errors import InputError

__all__ = ["EXACT_UP_TO", "GROUPS", "SKETCHES", "Outputs", "check_outputs", "cotangents", "plan_outputs"]

EXACT_UP_TO = 64
SKETCHES = 16
GROUPS = 4


@dataclass(frozen=True)
class Outputs:
    """How the sum over outputs is taken.

    Attributes:
        count: Scalar outputs a sample.
        sketches: Random output vectors a sample; 0 where each output is differentiated by itself.
        groups: Sums kept apart, from whose spread the standard error is estimated.
    """

    count: int
    sketches: int = 0
    groups: int = 1

    def scale(self, groups: int | None = None) -> float:
        """What a sum over ``groups`` groups (default all) must be divided by, besides the samples."""
        if not self.sketches:
            return 1.0
        return self.sketches / self.groups * (self.groups if groups is None else groups)


def check_outputs(outputs: str | int) -> None:
    """Refuse anything but "auto", "exact" and a number of sketches."""
    if outputs in ("auto", "exact"):
        return
    if not isinstance(outputs, int) or isinstance(outputs, bool) or outputs < 1:
        raise InputError(f'outputs must be "auto", "exact" or a number of random output vectors, got {outputs!r}')


def plan_outputs(outputs: str | int, count: int) -> Outputs:
    """Exact up to 64 outputs, otherwise 16 random vectors; or as the user says, in multiples of four."""
    if outputs == "exact" or (outputs == "auto" and count <= EXACT_UP_TO):
        return Outputs(count)
    sketches = SKETCHES if outputs == "auto" else int(outputs)
    if sketches <= GROUPS:
        return Outputs(count, sketches, sketches)
    # Groups of one size: a few vectors more cost less than a standard error that cannot be told.
    return Outputs(count, math.ceil(sketches / GROUPS) * GROUPS, GROUPS)


def cotangents(plan: Outputs, output: Tensor, generator: torch.Generator) -> Iterator[tuple[int, Tensor]]:
    """Vectors v, shaped like the output, and the group each belongs to: J is the gradient of <output, v>.

    Exact: v picks one output of every sample. Sketch: independent signs for every sample and output, so that
    ``E[v v^T] = I`` and the sum over outputs is unbiased (FORMULAS, section 1).
    """
    if not plan.sketches:
        for c in range(plan.count):
            v = torch.zeros_like(output, memory_format=torch.contiguous_format)
            v.view(output.shape[0], -1)[:, c] = 1
            yield 0, v
        return
    for s in range(plan.sketches):
        bits = torch.randint(0, 2, output.shape, generator=generator, dtype=torch.int8)
        yield s % plan.groups, bits.to(output.device, output.dtype).mul_(2).sub_(1)
