"""Two spectra side by side: quantiles against quantiles, the distance of their distributions, and histograms."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from featlearn.errors import InputError
from featlearn.spectra._laws import Law
from featlearn.spectra._ranks import clean_eigenvalues, positive_eigenvalues

Array = NDArray[np.float64]

_MOST_BINS = 100
_FENCE = 3.0  # interquartile ranges above the upper quartile: Tukey's fence for what is far out


def qq(initial: Any, trained: Any, *, points: int | None = None) -> Quantiles:
    r"""Quantiles of two spectra at the same shares ``(i - 1/2) / points`` (insets of the spectral paper's figure 1).

    Of a spectrum with as many eigenvalues as points these are the eigenvalues in order; otherwise they are
    interpolated. Zeros count, so that a share means the same on both sides.

    Args:
        initial: Eigenvalues in any order, or a law.
        trained: Eigenvalues in any order.
        points: Number of shares; by default the number of eigenvalues, of the smaller set if they differ.

    >>> qq([3.0, 1.0], [2.0, 4.0]).trained.tolist()
    [2.0, 4.0]
    """
    after = clean_eigenvalues(trained, "trained eigenvalues")
    before = None if isinstance(initial, Law) else clean_eigenvalues(initial, "initial eigenvalues")
    count = points if points is not None else min(after.size, before.size if before is not None else after.size)
    if count < 1:
        raise InputError(f"points must be at least 1, got {points}")
    shares = (np.arange(count) + 0.5) / count
    first = initial.quantile(shares).numpy() if before is None else _quantiles(before, shares)
    return Quantiles(shares, first, _quantiles(after, shares))


@dataclass(frozen=True, eq=False)
class Quantiles:
    """Outcome of `qq`.

    Attributes:
        shares: Share of the eigenvalues that are below.
        initial: Quantiles of the first spectrum or law, ascending.
        trained: Quantiles of the second.
    """

    shares: Array
    initial: Array
    trained: Array


def ks_distance(first: Any, second: Any) -> float:
    r"""Kolmogorov-Smirnov distance ``max_x |F(x) - G(x)|`` of two spectra, or of a spectrum and a law.

    Zeros count: an atom of a law is met by as many eigenvalues that are zero up to rounding. Eigenvalues of one
    matrix repel each other, so that two draws of one law are at a distance of the order ``log(n) / n`` and not
    ``n^(-1/2)``: tables of the Kolmogorov-Smirnov test do not hold.

    Args:
        first: Eigenvalues in any order.
        second: Eigenvalues in any order, or a law.

    >>> ks_distance([1.0, 2.0, 3.0, 4.0], [2.5, 3.0, 4.0, 5.0])
    0.5
    """
    if isinstance(first, Law):
        raise InputError("the first spectrum must be eigenvalues, got a law: give the law as the second")
    values = clean_eigenvalues(first)
    if not isinstance(second, Law):
        other = clean_eigenvalues(second)
        points = np.concatenate([values, other])
        return float(np.abs(_share(values, points) - _share(other, points)).max())
    points = np.unique(np.append(values, 0.0))
    at = second.cdf(points).numpy()
    below = np.where(points == 0, 0.0, at)  # the law jumps at zero only
    gaps = (np.abs(_share(values, points) - at), np.abs(_share(values, points, "left") - below))
    return float(np.max(gaps))


def histogram(eigenvalues: Any, *, bins: int | Any | None = None, log: bool = False) -> Histogram:
    """A histogram of the positive eigenvalues, as a share of all, in bins that spikes do not spoil.

    The width of the bins is that of Freedman and Diaconis, ``2 IQR / n^(1/3)``. A few eigenvalues far out would ask
    for very many of them: if it is more than 100, the bins end at the last eigenvalue within three interquartile
    ranges of the upper quartile, and what is above is kept in `beyond`. The heights times the widths, `beyond` and
    `zeros` together make one, so that a law's density can be drawn on top.

    Args:
        eigenvalues: Of a positive semi-definite matrix.
        bins: Their number, or their edges, ascending.
        log: Bins of equal ratio over all the positive eigenvalues, for tails.
    """
    values, zeros = positive_eigenvalues(eigenvalues)
    total = values.size + zeros
    if bins is None or isinstance(bins, (int, np.integer)):
        edges = _edges(values, None if bins is None else int(bins), log)
    else:
        edges = np.asarray(bins, dtype=np.float64)
        if edges.ndim != 1 or edges.size < 2 or not (np.diff(edges) > 0).all():
            raise InputError(f"bins must be a number or at least two ascending edges, got shape {edges.shape}")
    counts = np.histogram(values, edges)[0]
    return Histogram(edges, counts, counts / (total * np.diff(edges)), values[values > edges[-1]], zeros)


@dataclass(frozen=True, eq=False)
class Histogram:
    """Outcome of `histogram`.

    Attributes:
        edges: Of the bins, one more than there are bins.
        counts: Eigenvalues in each bin.
        density: ``counts / (all eigenvalues * width)``.
        beyond: Eigenvalues above the last bin, ascending.
        zeros: Number of eigenvalues that count as zero.
    """

    edges: Array
    counts: NDArray[np.intp]
    density: Array
    beyond: Array
    zeros: int


def _quantiles(values: Array, shares: Array) -> Array:
    result: Array = np.quantile(values, shares, method="hazen")
    return result


def _share(values: Array, points: Array, side: Any = "right") -> Array:
    """Share of the (ascending) values that are at most the points; below them for the left side."""
    result: Array = np.searchsorted(values, points, side=side) / values.size
    return result


def _edges(values: Array, bins: int | None, log: bool) -> Array:
    edges: Array
    if bins is not None and bins < 1:
        raise InputError(f"bins must be at least 1, got {bins}")
    if not values.size:
        return np.array([0.0, 1.0])
    x = np.log(values) if log else values
    low, high = np.quantile(x, [0.25, 0.75]).tolist()
    width = 2 * (high - low) / np.cbrt(x.size)
    far = not log and x[-1] - x[0] > _MOST_BINS * width
    top = float(x[x <= high + _FENCE * (high - low)][-1] if far else x[-1])
    if top == x[0]:  # equal values: a bin around them
        half = 0.5 if log else 0.5 * float(values[0])
        edges = np.array([x[0] - half, x[0] + half])
    else:
        count = bins if bins is not None else min(_MOST_BINS, int(np.ceil((top - x[0]) / width)) if width else 10)
        edges = np.linspace(x[0], top, count + 1)
    if not log:
        return edges
    edges = np.exp(edges)
    edges[0], edges[-1] = min(edges[0], values[0]), max(edges[-1], values[-1])  # the exponential rounds
    return edges
