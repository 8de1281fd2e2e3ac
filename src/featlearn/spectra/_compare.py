"""Comparison of two spectra: quantiles, Kolmogorov-Smirnov distance, and histograms.

References:
    Wang, Engel, Sarwate, Dumitriu & Chiang (2022), https://arxiv.org/abs/2211.06506, figure 1 (the spectral paper).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from featlearn.errors import InputError
from featlearn.linalg.ranks import clean_eigenvalues, eigenvalue_vector, positive_eigenvalues
from featlearn.spectra._laws import Law

Array = NDArray[np.float64]

_MOST_BINS = 100
_FENCE = 3.0  # interquartile ranges above the upper quartile: Tukey's fence for far outliers


def qq(initial: Any, trained: Any, *, points: int | None = None) -> Quantiles:
    """Compute the quantiles of two spectra at the same shares ``(i - 1/2) / points``, for a Q-Q plot.

    If a spectrum has as many eigenvalues as points, its quantiles are the sorted eigenvalues; otherwise they are
    interpolated. Zero eigenvalues are included, so that a share has the same meaning in both spectra.

    Args:
        initial: Eigenvalues of the first spectrum in any order, or a law.
        trained: Eigenvalues of the second spectrum, in any order.
        points: Number of shares, at least 1. None uses the number of eigenvalues, that of the smaller spectrum if they
            differ.

    Returns:
        The shares and the quantiles of both spectra.

    Raises:
        InputError: If `points` is smaller than 1, or a spectrum is empty, not a vector, not finite or negative.
            Negative eigenvalues are allowed if the law has some.

    References:
        Wang, Engel, Sarwate, Dumitriu & Chiang (2022), https://arxiv.org/abs/2211.06506, insets of figure 1.

    Example:
        >>> from featlearn.spectra import qq
        >>> qq([3.0, 1.0], [2.0, 4.0]).trained.tolist()
        [2.0, 4.0]
    """
    after = _cleaned(trained, "trained eigenvalues", initial)
    before = None if isinstance(initial, Law) else clean_eigenvalues(initial, "initial eigenvalues")
    count = points if points is not None else min(after.size, before.size if before is not None else after.size)
    if count < 1:
        raise InputError(f"points must be at least 1, got {points}.")
    shares = (np.arange(count) + 0.5) / count
    first = initial.quantile(shares).numpy() if before is None else _quantiles(before, shares)
    return Quantiles(shares, first, _quantiles(after, shares))


@dataclass(frozen=True, eq=False)
class Quantiles:
    """Quantiles of two spectra at the same shares: the result of `qq`.

    Attributes:
        shares: Shares of the eigenvalues below each quantile, ascending.
        initial: Quantiles of the first spectrum or law, ascending.
        trained: Quantiles of the second spectrum, ascending.
    """

    shares: Array
    initial: Array
    trained: Array


def ks_distance(first: Any, second: Any) -> float:
    """Compute the Kolmogorov-Smirnov distance ``max_x |F(x) - G(x)|`` of two spectra, or of a spectrum and a law.

    Zero eigenvalues are included: the atom of a law corresponds to eigenvalues that are zero up to rounding.
    Eigenvalues of one matrix repel each other, so two draws of the same law have a distance of the order ``log(n) / n``
    instead of ``n^(-1/2)``, and tables of the Kolmogorov-Smirnov test do not apply.

    Args:
        first: Eigenvalues of the first spectrum, in any order.
        second: Eigenvalues of the second spectrum in any order, or a law.

    Returns:
        The distance, between 0 and 1.

    Raises:
        InputError: If `first` is a law, or a spectrum is empty, not a vector, not finite or negative. Negative
            eigenvalues are allowed if the law has some.

    Example:
        >>> from featlearn.spectra import ks_distance
        >>> ks_distance([1.0, 2.0, 3.0, 4.0], [2.5, 3.0, 4.0, 5.0])
        0.5
    """
    if isinstance(first, Law):
        raise InputError("first must be a vector of eigenvalues, got a law. Pass the law as the second argument.")
    values = _cleaned(first, "eigenvalues", second)
    if not isinstance(second, Law):
        other = clean_eigenvalues(second)
        points = np.concatenate([values, other])
        return float(np.abs(_share(values, points) - _share(other, points)).max())
    points = np.unique(np.append(values, second.atom_at))
    at = second.cdf(points).numpy()
    below = np.where(points == second.atom_at, at - second.atom, at)  # a law is discontinuous only at its atom
    gaps = (np.abs(_share(values, points) - at), np.abs(_share(values, points, "left") - below))
    return float(np.max(gaps))


def _cleaned(eigenvalues: Any, what: str, law: Any) -> Array:
    """Return eigenvalues, ascending. They may be negative only if those of the law that they are compared with are."""
    if not isinstance(law, Law) or law.edges[0] >= 0:
        return clean_eigenvalues(eigenvalues, what)
    result: Array = np.sort(eigenvalue_vector(eigenvalues, what))
    return result


def histogram(eigenvalues: Any, *, bins: int | Any | None = None, log: bool = False) -> Histogram:
    """Compute a histogram of the positive eigenvalues, in bins that are robust to spikes.

    The width of the bins is that of Freedman and Diaconis, ``2 IQR / n^(1/3)``. A few eigenvalues far outside the bulk
    would require very many bins: above 100, the bins end at the last eigenvalue within three interquartile ranges of
    the upper quartile, and the eigenvalues above are returned as `beyond`. Densities are shares of all eigenvalues: the
    sum of density times width, and the shares of `beyond` and `zeros`, add up to one. The density of a law can be drawn
    on top.

    Args:
        eigenvalues: Eigenvalues of a positive semi-definite matrix, in any order.
        bins: Number of bins, or their ascending edges. None chooses the number.
        log: Whether the bins have equal ratios and cover all positive eigenvalues, for heavy tails. Ignored if `bins`
            are edges.

    Returns:
        Edges, counts and densities of the bins, and the eigenvalues outside of them.

    Raises:
        InputError: If `bins` is a number below 1, or not at least two ascending edges, or the eigenvalues are empty,
            not a vector, not finite or negative.

    Example:
        >>> from featlearn.spectra import histogram
        >>> histogram([0.0, 1.0, 2.0, 3.0], bins=[0.5, 1.5, 3.5]).density.tolist()
        [0.25, 0.25]
    """
    values, zeros = positive_eigenvalues(eigenvalues)
    total = values.size + zeros
    if bins is None or isinstance(bins, (int, np.integer)):
        edges = _edges(values, None if bins is None else int(bins), log)
    else:
        edges = np.asarray(bins, dtype=np.float64)
        if edges.ndim != 1 or edges.size < 2 or not (np.diff(edges) > 0).all():
            raise InputError(f"bins must be a number or at least two ascending edges, got shape {edges.shape}.")
    counts = np.histogram(values, edges)[0]
    return Histogram(edges, counts, counts / (total * np.diff(edges)), values[values > edges[-1]], zeros)


@dataclass(frozen=True, eq=False)
class Histogram:
    """Histogram of a spectrum: the result of `histogram`.

    Attributes:
        edges: Edges of the bins, one more than bins.
        counts: Number of eigenvalues in each bin.
        density: Density of each bin, ``counts / (all eigenvalues * width)``.
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
    """Return the share of the ascending values that are at most each point, or below it for the side "left"."""
    result: Array = np.searchsorted(values, points, side=side) / values.size
    return result


def _edges(values: Array, bins: int | None, log: bool) -> Array:
    edges: Array
    if bins is not None and bins < 1:
        raise InputError(f"bins must be at least 1, got {bins}.")
    if not values.size:
        return np.array([0.0, 1.0])
    x = np.log(values) if log else values
    low, high = np.quantile(x, [0.25, 0.75]).tolist()
    width = 2 * (high - low) / np.cbrt(x.size)
    far = not log and x[-1] - x[0] > _MOST_BINS * width
    top = float(x[x <= high + _FENCE * (high - low)][-1] if far else x[-1])
    if top == x[0]:  # equal values: one bin around them
        half = 0.5 if log else 0.5 * float(values[0])
        edges = np.array([x[0] - half, x[0] + half])
    else:
        count = bins if bins is not None else min(_MOST_BINS, int(np.ceil((top - x[0]) / width)) if width else 10)
        edges = np.linspace(x[0], top, count + 1)
    if not log:
        return edges
    edges = np.exp(edges)
    edges[0], edges[-1] = min(edges[0], values[0]), max(edges[-1], values[-1])  # rounding of exp
    return edges
