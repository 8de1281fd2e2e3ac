"""Bulk of a spectrum, its edge, and the spikes beyond it."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from featlearn.errors import InputError
from featlearn.spectra._compare import ks_distance
from featlearn.spectra._laws import Law, marchenko_pastur
from featlearn.spectra._ranks import clean_eigenvalues, eigenvalue_vector, positive_eigenvalues

MOST_SPIKES = 0.1  # share beyond which one cannot speak of a bulk and of single eigenvalues outside it
Array = NDArray[np.float64]
LEAST_EIGENVALUES = 50
"""With 40, two draws of one law differ by more than `phase` allows in 4% of cases; with 50 in 0.5%."""
MARGIN = 5.0
"""In Tracy-Widom scales; one more than for a law, whose edge is not estimated."""
_SHARE = 0.4  # of the bulk that is fitted: with less the edge is noisy, with more a second power does not bend enough
_LEAST_FITTED = 40


def empirical_edge(eigenvalues: Any, *, margin: float = MARGIN) -> EmpiricalEdge | None:
    r"""Right edge of the bulk, its Tracy-Widom scale and the spikes beyond it, without a law.

    A density that ends like a square root puts the k-th largest eigenvalue of a real matrix near

        ``lambda_k = edge - scale t_k + curvature t_k^2``,  ``t_k = (3 pi (k - 3/4) / 2)^(2/3)``,

    (the mean positions of the Airy process; ``scale`` is that of `edge_scale`), where the last term is the first
    that a square root does not give. Least squares over the upper 40% of the bulk, and no fewer than 40, find the
    three numbers. A spike is what exceeds ``edge + margin * scale``. Spikes would spoil the fit, so they are left out
    of it: the answer is the largest number of eigenvalues, up to a tenth, that all exceed the threshold of the rest
    while no other does.

    Measured on Marchenko-Pastur of 50 to 500 columns: the edge is found to 0.6 to 1.1 scales and the scale to 10%. A
    false spike is seen in 6 of 2,760 matrices with up to twice as many rows as columns, and in 10 of 800 with eight
    times as many rows.

    Args:
        eigenvalues: Of a positive semi-definite matrix, at least 50 positive ones.
        margin: In units of the scale.

    Returns:
        The edge, or None if no number up to a tenth of the eigenvalues can be so left out: there is no edge.
    """
    values, _ = positive_eigenvalues(eigenvalues)
    if values.size < LEAST_EIGENVALUES:
        raise InputError(f"an edge needs at least {LEAST_EIGENVALUES} positive eigenvalues, got {values.size}")
    if not (math.isfinite(margin) and margin >= 0):
        raise InputError(f"margin must be a number of Tracy-Widom scales, at least 0, got {margin!r}")
    falling = values[::-1]
    # From the most that may be left out: with fewer, many equal spikes pass for the end of a longer bulk.
    for out in range(int(MOST_SPIKES * values.size), -1, -1):
        rest = falling[out:]
        edge, scale = _fit(rest[: min(max(int(_SHARE * rest.size), _LEAST_FITTED), rest.size)])
        threshold = edge + margin * scale
        if scale > 0 and int((falling > threshold).sum()) == out:
            return EmpiricalEdge(edge, scale, threshold, falling[:out].copy())
    return None


@dataclass(frozen=True, eq=False)
class EmpiricalEdge:
    """Outcome of `empirical_edge`.

    Attributes:
        edge: Where the bulk ends.
        scale: Tracy-Widom scale of the largest eigenvalue of the bulk.
        threshold: ``edge + margin * scale``.
        spikes: Eigenvalues beyond the threshold, the largest first.
    """

    edge: float
    scale: float
    threshold: float
    spikes: Array


def _fit(falling: Array) -> tuple[float, float]:
    """Edge and scale of the upper end of a bulk."""
    edge, scale = (_solver(falling.size) @ falling).tolist()
    return edge, scale


@lru_cache(maxsize=1024)
def _solver(size: int) -> Array:
    """What least squares multiply so many eigenvalues by, for edge and scale: the same for every spectrum."""
    t = (1.5 * math.pi * (np.arange(size) + 0.25)) ** (2 / 3)
    t /= t[-1]  # of one size, so that squares lose no digits
    solver: Array = np.linalg.pinv(np.stack([np.ones_like(t), -t, t * t], axis=1))[:2]
    solver[1] /= (1.5 * math.pi * (size - 0.75)) ** (2 / 3)
    return solver


def spikes(eigenvalues: Any, law: Law, *, size: int | None = None, margin: float = 4.0) -> Spikes:
    r"""Eigenvalues beyond the right edge of a law by more than chance allows.

    The largest eigenvalue of a random matrix exceeds the edge by a Tracy-Widom variable times `edge_scale`, which
    falls like ``size^(-2/3)``. A spike is what exceeds ``right + margin * edge_scale(law, size)``. For real matrices
    the variable is above 0.98 in 5% and above 2.02 in 1% of draws (Johnstone 2001).

    False alarms at the default margin of 4, measured on Marchenko-Pastur of the right variance with 1/4 to 8 times as
    many rows as columns: 3 of 23,000 matrices of 50 and 200 columns with Gaussian entries, 1 of 46,000 with uniform
    or random-sign entries, none of 720 with 800 columns. A margin of 2 alarms in 0.7% of Gaussian matrices. Heavier
    entries need more: Laplace ones alarm in 1.4% of the matrices of 50 columns and in 0.2% of those of 200, and
    Student's with 5 degrees of freedom in about a tenth at any size, as their largest entries are spikes of their own.

    Args:
        eigenvalues: In any order.
        law: What they would follow without a signal.
        size: Dimension of the matrix, zeros included; the number of eigenvalues if None. Needed if only the largest
            eigenvalues are given.
        margin: In units of the Tracy-Widom scale.
    """
    values = eigenvalue_vector(eigenvalues)
    if not (math.isfinite(margin) and margin >= 0):
        raise InputError(f"margin must be a number of Tracy-Widom scales, at least 0, got {margin!r}")
    count = values.size if size is None else size
    if count < values.size:
        raise InputError(f"size is the dimension of the matrix: at least {values.size} eigenvalues, got {size}")
    scale = edge_scale(law, count)
    threshold = law.edges[1] + margin * scale
    order = np.argsort(-values, kind="stable")
    indices = order[values[order] > threshold]
    return Spikes(indices, values[indices], threshold, law.edges[1], scale)


@dataclass(frozen=True, eq=False)
class Spikes:
    """Outcome of `spikes`, the largest first.

    Attributes:
        indices: Where they stand in the given eigenvalues.
        values: Their values.
        threshold: What they exceed.
        edge: Right edge of the law.
        scale: Tracy-Widom scale at the edge.
    """

    indices: NDArray[np.intp]
    values: NDArray[np.float64]
    threshold: float
    edge: float
    scale: float

    def __len__(self) -> int:
        return len(self.values)

    @property
    def scores(self) -> NDArray[np.float64]:
        """Distance from the edge in Tracy-Widom scales."""
        result: NDArray[np.float64] = (self.values - self.edge) / self.scale
        return result


def edge_scale(law: Law, size: int) -> float:
    r"""Scale of the fluctuations of the largest of ``size`` eigenvalues: ``(pi c size)^(-2/3)``.

    c is the coefficient of the density at the right edge, ``f(x) ~ c sqrt(right - x)``. For Marchenko-Pastur this
    is Johnstone's ``(sqrt h + sqrt d) (1/sqrt h + 1/sqrt d)^(1/3) / scale``.
    """
    if not size >= 1:
        raise InputError(f"size must be at least 1, got {size!r}")
    bulk = law.bulks[-1]
    # f / sqrt(right - x) is smooth: two points, extrapolated to the edge. Nearer ones would lose digits to rounding.
    gap = 1e-6 * (bulk.right - bulk.left)
    gaps = torch.tensor([gap, 2 * gap], dtype=torch.float64)
    near, far = (law.pdf(bulk.right - gaps) / gaps.sqrt()).tolist()
    return math.pow(math.pi * (2 * near - far) * size, -2 / 3)


def bbp_threshold(rows: float, columns: float, *, variance: float = 1.0) -> float:
    r"""Least singular value that a low-rank signal S needs to put a spike beyond the bulk of ``W + S``.

    W (rows x columns) has independent entries of the given variance: the threshold of Baik, Ben Arous and Peche is
    ``sqrt(variance) (rows columns)^(1/4)``. A signal of singular value ``theta`` beyond it shows up as the eigenvalue

        ``(theta^2 + variance rows)(theta^2 + variance columns) / theta^2``

    of ``(W + S)^T (W + S)`` (Benaych-Georges and Nadakuditi 2012); at the threshold this is the edge. In the other
    form, rows drawn with one covariance eigenvalue ``variance (1 + t)``, the threshold is ``t = sqrt(columns / rows)``.
    """
    for name, value in (("rows", rows), ("columns", columns), ("variance", variance)):
        if not (math.isfinite(value) and value > 0):
            raise InputError(f"{name} must be positive and finite, got {value!r}")
    return math.sqrt(variance * math.sqrt(rows * columns))


_ROUNDS = 10


def fit_marchenko_pastur(eigenvalues: Any, rows: int, columns: int) -> FittedBulk:
    r"""The Marchenko-Pastur law whose variance is that of the bulk, whatever stands outside it.

    The mean square of the entries is no estimate: one spike or a heavy tail inflates it. Instead each eigenvalue of
    the middle half, by rank, gives one, ``lambda_i / Q((i - 1/2) / n)`` with Q the quantile of the law of variance 1,
    and their median is taken. Spikes shift the ranks of the rest, so that what the law calls a spike, up to a tenth
    of the eigenvalues, is left out and the median taken again, until nothing changes. A signal of rank k leaves the
    bulk of a matrix with k rows and k columns less, so that is the law.

    Measured at 768 columns and as many rows, or four times as many, three draws of each: the variance is found to
    0.5% and 0.3%, with 0, 5 and 20 spikes of ten times the edge alike, where the mean square is up to 105% and 59% off.

    Args:
        eigenvalues: All those of the smaller side of a weight W, of ``W^T W`` or ``W W^T``, not divided by anything.
        rows: Of W, or of one of its blocks on the diagonal.
        columns: The same.
    """
    values = clean_eigenvalues(eigenvalues)
    if not values[-1] > 0:
        raise InputError(f"all {values.size} eigenvalues are zero: there is no bulk to fit a law to")
    larger, smaller = max(rows, columns), min(rows, columns)
    out, variance, law = 0, 0.0, None
    for _ in range(_ROUNDS):
        n = values.size - out
        taken = out * smaller / values.size  # by each block on the diagonal
        middle = slice(n // 4, n - n // 4)
        variance = float(np.median(values[middle] / _quantiles(larger - taken, smaller - taken, n)[middle]))
        if not variance > 0:
            return FittedBulk(None, 0.0, 1.0, 0)
        law = marchenko_pastur(larger - taken, smaller - taken, variance=variance, scale=1.0)
        beyond = min(len(spikes(values, law, margin=MARGIN)), int(MOST_SPIKES * values.size))
        if beyond == out:
            break
        out = beyond
    assert law is not None
    return FittedBulk(law, variance, ks_distance(values[: values.size - out], law), out)


@lru_cache(maxsize=32)  # layers of a model are alike
def _quantiles(rows: float, columns: float, count: int) -> NDArray[np.float64]:
    """Of the law of variance 1, at the shares ``(i - 1/2) / count``."""
    shares = (np.arange(count) + 0.5) / count
    found: NDArray[np.float64] = marchenko_pastur(rows, columns, scale=1.0).quantile(shares).numpy()
    return found


@dataclass(frozen=True)
class FittedBulk:
    """Outcome of `fit_marchenko_pastur`.

    Attributes:
        law: Of the eigenvalues of the smaller side; None if the middle of the spectrum is zero.
        variance: Of an entry.
        distance: Kolmogorov-Smirnov distance of the eigenvalues that were not left out.
        left_out: Number of eigenvalues that were.
    """

    law: Law | None
    variance: float
    distance: float
    left_out: int
