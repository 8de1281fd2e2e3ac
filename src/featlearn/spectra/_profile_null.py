"""Null model of one matrix: noise with its own row and column norms, and the spikes beyond the edge of that noise.

Large rows look like spikes, and rows of many sizes like a heavy tail, without any signal. The edge of such noise is
that of `featlearn.spectra.variance_profile`.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property, lru_cache
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from scipy.optimize import brentq
from torch import Tensor

from featlearn.errors import InputError
from featlearn.spectra._entry_statistics import EntryStatistics, entry_statistics
from featlearn.spectra._gram_eigenvalues import GramMatrix
from featlearn.spectra._profile_law import GridLaw, grid_law
from featlearn.spectra._tracy_widom import tracy_widom_sf
from featlearn.spectra._variance_profiles import Profile, variance_profile

Array = NDArray[np.float64]

LEVEL = 0.01
"""Default largest p-value of a spike."""
_MOST = 0.5  # largest share of the eigenvalues that can be spikes
_MEAN = 0.5  # least squared overlap with a constant matrix of a component that is its mean, over that of a signal
_CHANCE = 100.0  # largest squared overlap of noise with a constant matrix, over that of a random direction
_LOOKED_AT = 8  # largest components among which the mean is looked for
_LARGE, _ROUNDS = 0.03, 8  # share of the energy above which spikes are taken out as components, and how often
_BLOCK = 1 << 18


@dataclass(frozen=True)
class Spike:
    """Eigenvalue of ``W^T W`` beyond the edge of the noise.

    Attributes:
        value: The eigenvalue.
        p_value: Probability that the largest eigenvalue of the noise is as large.
        strength: Singular value theta of the signal that makes the spike, if its vectors are delocalized; smaller than
            that of W, because noise adds to it.
        left_overlap: Predicted squared cosine of the left singular vector with that of the signal.
        right_overlap: Predicted squared cosine of the right singular vector with that of the signal.
        is_mean: Whether the component is the mean of all entries.
    """

    value: float
    p_value: float
    strength: float
    left_overlap: float
    right_overlap: float
    is_mean: bool = False


def _without_chance(factors: Array, others: Array) -> Array:
    """Return estimated factors of variances with less of the variance that sums of squared Gaussian entries have.

    Args:
        factors: Factors, each the sum over entries with the variances of `others`.
        others: Factors of the other side.
    """
    mean = float(factors.mean())
    chance = 2 * float((others**2).sum()) / float(others.sum()) ** 2 * mean**2
    return mean + math.sqrt(max(0.0, 1 - chance / max(float(factors.var()), chance))) * (factors - mean)


@dataclass(frozen=True, eq=False)
class ProfileNull:
    """Spikes of a matrix beyond the edge that its row and column norms explain: the result of `profile_null`.

    Attributes:
        profiles: Profile of the noise of each diagonal block.
        spikes: Spikes in descending order.
        level: Largest p-value of a spike.
    """

    profiles: tuple[Profile, ...] = field(repr=False)
    spikes: tuple[Spike, ...]
    level: float

    @cached_property
    def laws(self) -> tuple[GridLaw, ...]:
        """Law of the noise of each block, for comparison with all eigenvalues that are not spikes.

        A norm is an estimate from few entries: the factors are moved to their mean by the share of their variance that
        chance explains.
        """
        laws = []
        for profile in self.profiles:
            rows, columns = (
                _without_chance(profile.rows, profile.columns),
                _without_chance(profile.columns, profile.rows),
            )
            laws.append(grid_law(rows, columns, variance_profile(rows, columns).edge))
        return tuple(laws)

    @property
    def edge(self) -> float:
        """Right edge of the noise, the largest of all blocks."""
        return max(profile.edge for profile in self.profiles)

    @property
    def limit(self) -> float:
        """Value that the largest eigenvalue of the noise exceeds with the probability `level` at most."""
        score = _score(self.level / len(self.profiles))
        return max(profile.edge + score * profile.scale for profile in self.profiles)

    @property
    def threshold(self) -> float:
        """Singular value of a delocalized signal from which on it makes a spike, the largest of all blocks."""
        return max(profile.threshold for profile in self.profiles)

    def p_value(self, eigenvalue: float) -> float:
        """Return the probability that the noise has an eigenvalue as large.

        Args:
            eigenvalue: Eigenvalue of ``W^T W``.
        """
        return min(1.0, sum(profile.p_value(eigenvalue) for profile in self.profiles))

    def distance(self, eigenvalues: Any) -> float:
        """Return the Kolmogorov-Smirnov distance of the eigenvalues that are not spikes from the law of the noise.

        Args:
            eigenvalues: All eigenvalues of ``W^T W`` of the smaller side, without those of blocks that are zero.
        """
        rest = np.sort(np.asarray(eigenvalues, float))
        rest = rest[: rest.size - len(self.spikes)]
        below = np.mean([law.cdf(rest) for law in self.laws], axis=0)
        ranks = np.arange(rest.size)
        return float(np.maximum(np.abs(below - ranks / rest.size), np.abs(below - (ranks + 1) / rest.size)).max())


def profile_null(weight: Any, *, level: float = LEVEL, eigenvalues: Any = None) -> ProfileNull:
    """Find the eigenvalues of ``W^T W`` that the norms of the rows and columns of W do not explain.

    The noise has independent entries of variances ``r_i c_j``, which are estimated by the squared norms of rows and
    columns. A signal adds to the norms: the energy of the eigenvalues beyond the edge is taken out of them, until no
    further eigenvalue is beyond the edge. A spike has a p-value of at most `level` by the Tracy-Widom law at the edge
    (`variance_profile`). It is conservative, because the edge is that of the norms as they are: without a signal the
    largest eigenvalue is below it more often than the Tracy-Widom law says.

    A signal that is spread over many rows and columns is found from the BBP threshold on. One on a single row is not,
    because it is a row of a larger norm.

    Time: a few milliseconds, and the eigenvalues if they are not given.

    Args:
        weight: Matrix of shape ``(h, d)``, or block-diagonal ``(groups, h, d)``.
        level: Largest p-value of a spike, between 0 and 1.
        eigenvalues: All eigenvalues of ``W^T W`` of the smaller side of a matrix with one block. None computes them.

    Returns:
        The spikes, and the profiles of the noise.

    Raises:
        InputError: The weight is not a matrix, is zero or not finite, or `level` is out of range.

    Example:
        >>> import torch
        >>> from featlearn.spectra import profile_null
        >>> w = torch.randn(300, 200, generator=torch.Generator().manual_seed(0))
        >>> w *= torch.linspace(0.2, 3.0, 300)[:, None]  # rows of many sizes, and no signal
        >>> len(profile_null(w).spikes)
        0
        >>> w += 0.5 * torch.outer(torch.ones(300), torch.linspace(-1, 1, 200))
        >>> [round(spike.strength) for spike in profile_null(w).spikes]
        [74]
    """
    blocks = torch.as_tensor(weight).detach().cpu()
    if blocks.ndim == 2:
        blocks = blocks[None]
    if blocks.ndim != 3 or not blocks.numel():
        raise InputError(f"weight must have shape (h, d) or (groups, h, d), got shape {tuple(blocks.shape)}.")
    if not 0 < level < 1:
        raise InputError(f"level must be between 0 and 1, got {level!r}.")
    return null_of_blocks(blocks, [None] * len(blocks), entry_statistics(blocks), level=level, eigenvalues=eigenvalues)


def null_of_blocks(
    blocks: Tensor,
    grams: Sequence[GramMatrix | None],
    statistics: EntryStatistics,
    *,
    level: float = LEVEL,
    eigenvalues: Any = None,
) -> ProfileNull:
    """Compute `profile_null` of a matrix whose Gram matrices and norms are known.

    Args:
        blocks: Matrix of shape ``(groups, h, d)``.
        grams: Gram matrix of each block; None computes it if it is required.
        statistics: Norms of the rows and columns of all blocks.
        level: Largest p-value of a spike.
        eigenvalues: All eigenvalues of ``W^T W`` of the smaller side of a matrix with one block. None uses `grams`.
    """
    if not np.isfinite(statistics.rows).all():
        raise InputError("weight must be finite, got NaN or infinite entries.")
    filled = np.flatnonzero(statistics.rows.any(1)).tolist()
    if not filled:
        raise InputError("weight must not be zero: there is no spectrum to compare.")
    results = []
    for i in filled:
        components = _Components(blocks[i], grams[i], eigenvalues if len(blocks) == 1 else None)
        norms = statistics.rows[i], statistics.columns[i]
        results.append(_of_block(components, *norms, float(statistics.totals[i]), level / len(filled)))
    spikes = sorted((spike for _, found in results for spike in found), key=lambda spike: -spike.value)
    return ProfileNull(tuple(profile for profile, _ in results), tuple(spikes), level)


class _Components:
    """Singular components of a matrix, of which as many are computed as are asked for.

    Args:
        w: The matrix.
        gram: Its Gram matrix. None computes it when it is required.
        eigenvalues: Squared singular values. None takes those of the Gram matrix.
    """

    def __init__(self, w: Tensor, gram: GramMatrix | None, eigenvalues: Any = None) -> None:
        self.w = w.detach().cpu()
        self._tall = self.w if w.shape[0] >= w.shape[1] else self.w.mT
        self._known = gram
        known = self._gram.eigenvalues if eigenvalues is None else np.asarray(eigenvalues, float)
        self.values = np.sort(known)[::-1]
        """Squared singular values, descending."""
        self._energies = np.zeros(len(self._tall)), np.zeros(self._tall.shape[1])
        self._count = 0

    @property
    def _gram(self) -> GramMatrix:
        if self._known is None:
            self._known = GramMatrix(self.w)
        return self._known

    def energies(self, count: int) -> tuple[Array, Array]:
        """Return the squared norms of rows and columns of the sum of the leading components.

        Time: ``2 h d`` operations for each component that was not asked for before. A count never falls.

        Args:
            count: Number of components.
        """
        longer, shorter = self._energies
        if count > self._count:
            vectors = self._gram.leading_vectors(self._count, count)
            shorter += np.square(vectors) @ self.values[self._count : count]
            ours = torch.from_numpy(vectors)
            for block in _row_blocks(self._tall):
                longer[block] += (self._tall[block].double() @ ours).square().sum(1).numpy()
            self._count = count
        return (longer, shorter) if self._tall is self.w else (shorter, longer)

    def mean_component(self, overlaps: Array) -> int:
        """Return the index of the leading component that is the mean of all entries; -1 if there is none.

        The squared cosine of a component with a constant matrix is that of a signal in this direction: the product of
        its predicted squared cosines, left and right.

        Args:
            overlaps: Predicted product of each component to look at.
        """
        count = overlaps.size
        vectors = self._gram.leading_vectors(0, count)
        entries = sum(self._tall[block].double().sum(0) for block in _row_blocks(self._tall))
        sums = np.asarray(entries) @ vectors  # sum of the entries of W v
        size = self.w.numel()
        shares = (sums * vectors.sum(0)) ** 2 / self.values[:count] / size
        best = int(shares.argmax())
        return best if float(shares[best]) > max(_MEAN * float(overlaps[best]), _CHANCE / size) else -1


def _of_block(
    components: _Components, row_norms: Array, column_norms: Array, total: float, level: float
) -> tuple[Profile, list[Spike]]:
    """Return the profile of the noise of a matrix, and the spikes beyond its edge."""
    values = components.values
    h, d = row_norms.size, column_norms.size
    energy = float(row_norms.sum())
    whole = variance_profile(row_norms / math.sqrt(energy), column_norms / math.sqrt(energy))
    score = _score(level)
    taken, found = np.concatenate([[0.0], np.cumsum(values)]) / energy, 0
    while True:
        # The components took a row and a column each: the rest of the energy is in a smaller matrix.
        share = max(1 - float(taken[found]), 0.0) / ((1 - found / h) * (1 - found / d))
        beyond = int((values > share * (whole.edge + score * whole.scale)).sum())
        if beyond <= found or beyond > _MOST * values.size:
            break
        found = beyond
        if taken[found] > _LARGE:
            break
    profile = whole.scaled(share)
    for _ in range(_ROUNDS if taken[found] > _LARGE else 0):
        # A large signal hides which rows and columns the noise is on: take the norms of what is left without it.
        of_rows, of_columns = components.energies(found)
        profile = _profile_of_rest(row_norms, column_norms, of_rows, of_columns, found)
        beyond = int((values > profile.edge + score * profile.scale).sum())
        if beyond <= found or beyond > _MOST * values.size:
            break
        found = beyond
    mean = total / math.sqrt(h * d)
    signals = profile.signals(values[:found])
    is_large = found > 0 and abs(mean) > profile.threshold
    named = components.mean_component(signals[:_LOOKED_AT, 1:].prod(1)) if is_large else -1
    return profile, [
        Spike(value, profile.p_value(value), strength, left, right, i == named)
        for i, (value, (strength, left, right)) in enumerate(
            zip(values[:found].tolist(), signals.tolist(), strict=True)
        )
    ]


def _profile_of_rest(row_norms: Array, column_norms: Array, of_rows: Array, of_columns: Array, found: int) -> Profile:
    """Return the profile of a matrix without its leading components, from the squared norms of both."""
    rows, columns = (row_norms - of_rows).clip(min=0), (column_norms - of_columns).clip(min=0)
    total = math.sqrt(float(rows.sum()))
    if not total > 0:
        return variance_profile(row_norms, column_norms).scaled(np.finfo(float).tiny)
    # The components took a row and a column each: the rest is noise of a smaller matrix with the same profile.
    fewer_rows, fewer_columns = _thinned(rows, found), _thinned(columns, found)
    scale = float(fewer_rows.sum() * fewer_columns.sum())
    return variance_profile(fewer_rows * (total**2 / scale), fewer_columns)


def _thinned(factors: Array, count: int) -> Array:
    """Return fewer factors of the same distribution, without a number of them."""
    size = factors.size - count
    levels = (np.arange(size) + 0.5) / size * (factors.size - 1)
    result: Array = np.interp(levels, np.arange(factors.size), np.sort(factors))
    return result


def _row_blocks(w: Tensor) -> Iterator[slice]:
    step = max(1, _BLOCK // w.shape[1])
    return (slice(first, first + step) for first in range(0, len(w), step))


@lru_cache(maxsize=256)
def _score(level: float) -> float:
    """Return the point that a Tracy-Widom variable exceeds with a probability."""
    # In logarithms the law is nearly a line where the level is small, which takes few evaluations.
    return float(brentq(lambda s: math.log(float(tracy_widom_sf(s))) - math.log(level), -8.0, 40.0, xtol=1e-6))
