"""Sums over the entries of a matrix that its null model needs, from one pass: norms of rows and columns, and a mean."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

Array = NDArray[np.float64]

_CHANCE = 5.0  # critical value of the test for equal norms, in standard deviations
_BLOCK = 1 << 16  # entries at a time: all arrays of a block stay in a cache
_SAMPLED = 1 << 16  # entries of which the median is taken


@dataclass(frozen=True, eq=False)
class EntryStatistics:
    """Sums over the entries w of a block-diagonal matrix of shape ``(groups, h, d)``.

    Attributes:
        rows: Squared norm of each row, shape ``(groups, h)``.
        columns: Squared norm of each column, shape ``(groups, d)``.
        totals: Sum of the entries of each block.
        varying: ``"row norms vary"``, ``"column norms vary"``, ``"row and column norms vary"``, or an empty string.
    """

    rows: Array
    columns: Array
    totals: Array
    varying: str


def entry_statistics(weight: Tensor) -> EntryStatistics:
    """Compute the norms of rows and columns in float64, and test whether they vary more than chance allows.

    The test is an analysis of variance of ``t = w^2 / (w^2 + m)`` over rows and over columns, where m is the median of
    ``w^2``. t is bounded, so that a few huge entries, which make norms vary by chance, have little influence: entries
    of one distribution pass, whatever its tail. Norms vary if the variance between rows is more than 5 standard
    deviations above its expectation for rows of the same distribution.

    Time: ``O(entries)``, one pass. Memory: one block of rows.

    Args:
        weight: Block-diagonal matrix of shape ``(groups, h, d)`` in any floating dtype, on any device.
    """
    groups, h, d = weight.shape
    w = weight.detach()
    middle = _typical_square(w)
    rows, columns, totals = np.zeros((groups, h)), np.zeros((groups, d)), np.zeros(groups)
    bent_rows, bent_columns, bent_total = np.zeros((groups, h)), np.zeros((groups, d)), 0.0
    step = max(1, _BLOCK // d)
    buffer = np.empty((min(step, h), d))
    for group, block in enumerate(w):
        for first in range(0, h, step):
            part = block[first : first + step].double().cpu().numpy()
            here = slice(first, first + len(part))
            totals[group] += part.sum()
            squares = np.square(part, out=buffer[: len(part)])
            rows[group, here] = squares.sum(1)
            columns[group] += squares.sum(0)
            if middle > 0:
                bent = np.divide(squares, squares + middle, out=squares)
                bent_rows[group, here] = bent.sum(1)
                bent_columns[group] += bent.sum(0)
                bent_total += float(np.vdot(bent, bent))
    sides = [
        name
        for name, sums, inside in (("row", bent_rows, d), ("column", bent_columns, h))
        if _excess(sums, inside, bent_total) > _CHANCE
    ]
    return EntryStatistics(rows, columns, totals, f"{' and '.join(sides)} norms vary" if sides else "")


def _typical_square(w: Tensor) -> float:
    """Return the median of the squared entries, of the positive ones if most are zero; 0 if all are."""
    sampled = w.flatten()[:: max(1, w.numel() // _SAMPLED)].double().square()
    positive = sampled[sampled > 0]
    if not positive.numel():
        return 0.0
    return float(sampled.median() if 2 * positive.numel() > sampled.numel() else positive.median())


def _excess(sums: Array, inside: int, total: float) -> float:
    """Return the excess variance between rows over that of rows of one distribution, in standard deviations.

    Args:
        sums: Sum of each row.
        inside: Number of entries per row.
        total: Sum of the squares of all entries.
    """
    means = sums.ravel() / inside
    count = means.size
    if count < 2 or inside < 2:
        return 0.0
    within = (total - inside * float(np.square(means).sum())) / (count * (inside - 1))
    between = inside * float(np.square(means - means.mean()).sum()) / (count - 1)
    rounding = 1e-12 * total / (count * inside)
    if within <= rounding:  # all entries of a row have the same size
        return math.inf if between > rounding else 0.0
    return (between / within - 1) * math.sqrt((count - 1) / 2)
