"""Leading singular subspaces of two weights and of their difference, and the angles between them."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import torch
from torch import Tensor

from featlearn.linalg.matrices import principal_angles
from featlearn.spectra._singular_vectors import leading_vectors

_CHANCE = 4.0  # standard deviations of the overlap of random subspaces, below which directions are new
_OLD = 0.5  # overlap from which on directions are old


@dataclass(frozen=True, eq=False)
class SideOverlap:
    """Leading singular subspaces of one side, of rows or of columns.

    Attributes:
        angles: Principal angles between the subspaces of both weights in radians, ascending.
        overlap: Mean squared cosine of the leading directions of the difference with the subspace of the base.
        chance: Expected value of `overlap` for random directions.
        deviation: Standard deviation of `overlap` for random directions.
    """

    angles: Tensor = field(repr=False)
    overlap: float
    chance: float
    deviation: float

    @property
    def largest_angle(self) -> float:
        """Largest principal angle in degrees."""
        return math.degrees(float(self.angles[-1]))


@dataclass(frozen=True, eq=False)
class Subspaces:
    """Leading singular subspaces of two weights and of their difference.

    Attributes:
        size: Number of leading directions of each weight.
        choice: Origin of `size`, such as "spikes of the base".
        changed: Number of leading directions of the difference.
        left: Subspaces of the left singular vectors (outputs).
        right: Subspaces of the right singular vectors (inputs).
    """

    size: int
    choice: str
    changed: int
    left: SideOverlap
    right: SideOverlap

    @property
    def directions(self) -> str:
        """Kind of the directions of the difference: "old" are the leading ones of the base, "new", or "partly old".

        Empty if random directions would overlap by a half: then the leading directions are too many to decide.
        """
        sides = (self.left, self.right)
        if max(side.chance for side in sides) > _OLD:
            return ""
        if all(side.overlap > _OLD for side in sides):
            return "old"
        new = all(side.overlap <= side.chance + _CHANCE * side.deviation for side in sides)
        return "new" if new else "partly old"


def compare_subspaces(
    trained: Tensor, base: Tensor, difference: Tensor, size: int, choice: str, changed: int
) -> Subspaces:
    """Compare the leading singular subspaces of two weights, and those of their difference.

    The overlap of the q leading directions V of the difference with the k leading ones U of the base is
    ``|U^T V|_F^2 / q``: 1 if the change stays within them, ``k / n`` on average for random directions of n dimensions.

    Args:
        trained: Weight of shape ``(groups, h, d)``, not zero.
        base: Weight of the same shape before the change, not zero.
        difference: Their difference, not zero.
        size: Number k of leading directions of both weights.
        choice: Origin of `size`, for the report.
        changed: Number q of leading directions of the difference.
    """
    pairs = [_leading_pairs(w, k) for w, k in ((trained, size), (base, size), (difference, changed))]
    left, right = (_side(*(pair[i] for pair in pairs)) for i in (0, 1))
    return Subspaces(pairs[1][0].shape[1], choice, pairs[2][0].shape[1], left, right)


def _side(trained: Tensor, base: Tensor, difference: Tensor) -> SideOverlap:
    n, k = base.shape
    q = difference.shape[1]
    overlap = float((base.mT @ difference).square().sum()) / q
    chance = k / n
    deviation = math.sqrt(2 * chance * (1 - chance) / ((n + 2) * q))
    return SideOverlap(principal_angles(trained, base), min(overlap, 1.0), chance, deviation)


def _leading_pairs(blocks: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """Return the leading left and right singular vectors of a block-diagonal matrix, as columns."""
    groups, h, d = blocks.shape
    found: list[tuple[float, int, Tensor, Tensor]] = []
    for i, stored in enumerate(blocks):
        if not stored.any():
            continue
        block = stored.double()
        values, vectors = leading_vectors(block, min(count, h, d))
        kept = values > max(h, d) * torch.finfo(values.dtype).eps * values[0]
        images = block @ vectors[:, kept] / values[kept]
        found += [(float(s), i, images[:, j], vectors[:, j]) for j, s in enumerate(values[kept])]
    found = sorted(found, key=lambda triple: -triple[0])[:count]
    left = blocks.new_zeros((groups * h, len(found)), dtype=torch.float64)
    right = blocks.new_zeros((groups * d, len(found)), dtype=torch.float64)
    for j, (_, i, u, v) in enumerate(found):
        left[i * h : (i + 1) * h, j] = u
        right[i * d : (i + 1) * d, j] = v
    return left, right
