"""Rank of the difference of two weights: the directions beyond its own noise."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from featlearn.spectra._gram_eigenvalues import GramMatrix
from featlearn.spectra._profile_null import ProfileNull, profile_null

Array = NDArray[np.float64]

_HALF = 0.5  # share of the directions that a low rank has at most
_JUMP = 10.0  # ratio of neighboring eigenvalues that separates a signal from the rest


@dataclass(frozen=True)
class DifferenceRank:
    """Number of directions of a matrix beyond its noise.

    Attributes:
        rank: Number of directions beyond the noise; 0 if the matrix is like noise.
        share: Share of the energy (sum of squared entries) in these directions.
        exact: Whether all other eigenvalues are zero up to errors of float64.
    """

    rank: int
    share: float
    exact: bool


def difference_rank(difference: Tensor, eigenvalues: Array, null: ProfileNull) -> DifferenceRank:
    """Count the directions of a matrix that stand out from the noise in it.

    They are the spikes of `profile_null`, whose search starts from noise with all of the energy. It misses a signal of
    many directions of equal size in a small matrix, none of which is beyond such noise. A jump in the eigenvalues is
    therefore tried, too: the directions before it are a signal if the last of them is beyond the noise that remains
    without them, and nothing else is.

    Args:
        difference: Matrix of shape ``(groups, h, d)``, not zero.
        eigenvalues: Eigenvalues of its smaller side, ascending, with exact zeros.
        null: Noise with its row and column norms.

    Returns:
        The number of directions and their share of the energy.
    """
    falling = eigenvalues[::-1]
    most = int(_HALF * falling.size)
    # Eigenvalues near the errors of float64 are resolved in part: a jump down to them counts, not one among them.
    floor = falling.size * np.finfo(float).eps * falling[0]
    ratios = falling[:most] / np.maximum(falling[1 : most + 1], floor)
    before = int(ratios.argmax()) + 1 if most else 0
    jump = bool(most) and bool(ratios[before - 1] >= _JUMP)
    positive = int((falling > 0).sum())
    rank = len(null.spikes)
    if positive <= most:
        rank = before if jump else positive
    elif jump and before > rank:
        rest = profile_null(_without_leading(difference, float(np.sqrt(falling[before - 1] * falling[before]))))
        if not rest.spikes and falling[before - 1] > rest.limit:
            rank = before
    return DifferenceRank(rank, float(falling[:rank].sum() / falling.sum()), rank == positive)


def _without_leading(blocks: Tensor, threshold: float) -> Tensor:
    """Return a matrix without its components whose eigenvalue is above a threshold."""
    parts = []
    for block in blocks.double():
        gram = GramMatrix(block)
        vectors = torch.from_numpy(gram.leading_vectors(0, int((gram.eigenvalues > threshold).sum())))
        tall = block.shape[0] >= block.shape[1]
        parts.append(block - ((block @ vectors) @ vectors.mT if tall else vectors @ (vectors.mT @ block)))
    return torch.stack(parts)
