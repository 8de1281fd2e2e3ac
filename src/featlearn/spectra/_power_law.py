"""Power-law fits of tails.

References:
    Clauset, Shalizi & Newman (2009), "Power-law distributions in empirical data", https://arxiv.org/abs/0706.1062.

    Martin & Mahoney (2021), "Implicit self-regularization in deep neural networks",
    https://arxiv.org/abs/1810.01075.

    Wang, Engel, Sarwate, Dumitriu & Chiang (2022), https://arxiv.org/abs/2211.06506, appendix A.2 (the spectral paper).
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numpy.typing import NDArray

from featlearn._utils.rng import Seed, as_generator
from featlearn.errors import InputError
from featlearn.linalg.ranks import positive_eigenvalues

if TYPE_CHECKING:
    from matplotlib.figure import Figure

Array = NDArray[np.float64]

_LEAST = 10
_PROBES = 48  # number of order statistics for the lower bound of a distance


def power_law(
    eigenvalues: Any,
    *,
    x_min: float | None = None,
    min_tail: int = _LEAST,
    bootstrap: int = 0,
    confidence: float = 0.95,
    generator: Seed = None,
) -> PowerLawFit:
    """Fit a power law ``rho(x) ~ x^-alpha`` to the eigenvalues from x_min on, by maximum likelihood.

    ``alpha = 1 + m / sum ln(x / x_min)`` over the m eigenvalues that are at least x_min, with the standard error
    ``(alpha - 1) / sqrt m``. If x_min is not given, every eigenvalue with a tail of at least ``min_tail`` eigenvalues
    is tried, and that with the smallest Kolmogorov-Smirnov distance is used (the smallest of equals). The distance is
    that of the code by Clauset et al. and of the ``powerlaw`` package, ``max_j |j/m - F(x_j)|`` for j = 0 ... m-1.
    Unlike in the package by default, alpha is not limited to 3.

    The bootstrap has two parts. Resampled eigenvalues give the interval of alpha. Samples from the fit, which is the
    power law above x_min and the eigenvalues themselves below, give the p-value: the share of samples whose distance
    from their fit is at least that of the eigenvalues. A p-value below 0.1 is evidence against the power law. x_min is
    chosen for each sample, unless it was given. Eigenvalues of one matrix repel each other and are not independent, so
    that interval and p-value are approximate.

    Args:
        eigenvalues: Eigenvalues of a positive semi-definite matrix, in any order. Zeros are left out.
        x_min: Start of the tail, positive. None chooses it.
        min_tail: Smallest number of eigenvalues in a tail, at least 10.
        bootstrap: Number of samples of each part of the bootstrap. 0 computes no interval and no p-value.
        confidence: Level of the interval of alpha, between 0 and 1.
        generator: Generator or seed of the bootstrap.

    Returns:
        The fitted power law.

    Raises:
        InputError: If an argument is out of range, there are fewer than `min_tail` positive eigenvalues, no tail of
            that size has different eigenvalues, or the eigenvalues are not a vector, not finite or negative.

    References:
        Clauset, Shalizi & Newman (2009), https://arxiv.org/abs/0706.1062, sections 3 and 4.

    Example:
        >>> from featlearn.spectra import power_law
        >>> fit = power_law([((i + 0.5) / 300) ** (-1 / 1.5) for i in range(300)])  # a power law of exponent 2.5
        >>> round(fit.alpha, 1), fit.n_tail
        (2.5, 300)
    """
    values, zeros = positive_eigenvalues(eigenvalues)
    if min_tail < _LEAST:
        raise InputError(
            f"min_tail must be at least {_LEAST}, got {min_tail}: the error of alpha would be above 30% of alpha - 1."
        )
    if values.size < min_tail:
        raise InputError(
            f"eigenvalues must have at least {min_tail} positive values for a tail, got {values.size} (and {zeros} "
            "zeros)."
        )
    if bootstrap < 0:
        raise InputError(f"bootstrap must be a number of samples, at least 0, got {bootstrap}.")
    if not 0 < confidence < 1:
        raise InputError(f"confidence must be between 0 and 1, got {confidence}.")
    if x_min is not None and not (math.isfinite(x_min) and x_min > 0):
        raise InputError(f"x_min must be positive and finite, got {x_min!r}.")
    tail = _choose(values, min_tail) if x_min is None else _at(values, x_min, min_tail)
    if tail is None:
        where = "" if x_min is None else f" from x_min={x_min:g} on"
        raise InputError(
            f"eigenvalues must have a tail of at least {min_tail} values that differ{where}, got {values.size} "
            f"positive values from {values[0]:g} to {values[-1]:g}."
        )
    alpha, distance, index, chosen = tail
    fit = PowerLawFit(
        alpha=alpha,
        standard_error=(alpha - 1) / math.sqrt(values.size - index),
        x_min=chosen,
        distance=distance,
        n_tail=values.size - index,
        zeros=zeros,
        eigenvalues=values,
    )
    if not bootstrap:
        return fit
    return _bootstrapped(fit, x_min is None, min_tail, bootstrap, confidence, as_generator(generator, "power_law"))


@dataclass(frozen=True, eq=False)
class PowerLawFit:
    """Power law of the tail of a spectrum: the result of `power_law`.

    Attributes:
        alpha: Exponent of the density.
        standard_error: Standard error of alpha for this x_min.
        x_min: Start of the tail.
        distance: Kolmogorov-Smirnov distance of the tail from its fit.
        n_tail: Number of eigenvalues in the tail.
        zeros: Number of eigenvalues that were left out as zero.
        eigenvalues: Positive eigenvalues, ascending.
        interval: Percentile interval of alpha. None without a bootstrap.
        p_value: p-value of the goodness of fit. None without a bootstrap.
    """

    alpha: float
    standard_error: float
    x_min: float
    distance: float
    n_tail: int
    zeros: int
    eigenvalues: Array = field(repr=False)
    interval: tuple[float, float] | None = None
    p_value: float | None = None

    @property
    def tail(self) -> Array:
        """Eigenvalues from x_min on, ascending."""
        return self.eigenvalues[self.eigenvalues.size - self.n_tail :]

    @property
    def weighted_alpha_paper(self) -> float:
        """Weighted alpha of the spectral paper (appendix A.2), ``alpha * lambda_max``. It depends on the scale."""
        return self.alpha * float(self.eigenvalues[-1])

    @property
    def weighted_alpha_log(self) -> float:
        """Weighted alpha of Martin and Mahoney, ``alpha * log10(lambda_max)``."""
        return self.alpha * math.log10(float(self.eigenvalues[-1]))

    @cached_property
    def log_alpha_norm(self) -> float:
        """Logarithm of the alpha norm, ``log10 sum lambda^alpha`` over all positive eigenvalues."""
        logs = self.alpha * np.log10(self.eigenvalues)
        return float(logs[-1] + np.log10((10 ** (logs - logs[-1])).sum()))  # the power itself can overflow

    def plot(self, title: str | None = None) -> Figure:
        """Draw the share of eigenvalues above x, with the fitted line.

        Args:
            title: Title of the figure. None draws no title.

        Returns:
            The figure.
        """
        from featlearn.plots import tail_plot

        return tail_plot(self.eigenvalues, self.x_min, self.alpha, standard_error=self.standard_error, title=title)


_Tail = tuple[float, float, int, float]
"""Exponent, distance, index of the first eigenvalue of the tail, x_min."""


def _at(values: Array, x_min: float, least: int) -> _Tail | None:
    """Fit the tail from a given x_min on. Return None if it is too small or all its eigenvalues are equal."""
    index = int(np.searchsorted(values, x_min))
    m = values.size - index
    if m < least or values[-1] == values[index]:
        return None
    logs = np.log(values[index:] / x_min)
    rate = m / float(logs.sum())
    ranks = np.searchsorted(values, values[index:]) - index
    return 1 + rate, float(np.abs(ranks / m + np.expm1(-rate * logs)).max()), index, float(x_min)


def _choose(values: Array, least: int) -> _Tail | None:
    """Fit the tail with the smallest distance over all x_min.

    The distance is a maximum over the tail, so that its maximum over a few order statistics is a lower bound. Distances
    are computed in the order of these bounds, until a bound exceeds the smallest distance: the result is exact, and
    usually a few hundred tails are computed instead of all.
    """
    logs = np.log(values)
    logs -= logs[-1]  # sums of small numbers lose fewer digits
    n = values.size
    ranks = np.searchsorted(values, values)  # equal eigenvalues share the rank of the first
    starts = np.unique(ranks)
    starts = starts[(n - starts >= least) & (logs[starts] < 0)]
    if not starts.size:
        return None
    m = n - starts
    sums = np.cumsum(logs[::-1])[::-1][starts] - m * logs[starts]
    rates = m / sums
    probes = starts[:, None] + (m[:, None] * np.linspace(0, 1, _PROBES, endpoint=False)).astype(np.intp)
    probes[:, 0] = n - 1  # the first of a tail has distance zero: probe the last instead
    exponents = rates[:, None] * (logs[starts][:, None] - logs[probes])
    bounds = np.abs((ranks[probes] - starts[:, None]) / m[:, None] + np.exp(exponents) - 1).max(1)
    shares = ranks / n
    best, index = math.inf, -1
    for k in np.argsort(bounds, kind="stable").tolist():
        if bounds[k] > best:
            break
        start, size = int(starts[k]), int(m[k])
        shift = 1 + start / size  # ranks are counted from the start of the tail: (rank - start) / m
        for stride in (16, 1):  # a sixteenth of the tail usually suffices
            gaps = logs[start::stride] - logs[start]
            gaps *= -rates[k]
            np.exp(gaps, out=gaps)
            gaps += shares[start::stride] * (n / size)
            distance = max(float(gaps.max()) - shift, shift - float(gaps.min()))
            if distance > best:
                break
        if distance < best or (distance == best and start < index):
            best, index = distance, start
    return _at(values, float(values[index]), least)


def _bootstrapped(
    fit: PowerLawFit, free: bool, least: int, draws: int, confidence: float, generator: torch.Generator
) -> PowerLawFit:
    """Return the fit with the interval of alpha and the p-value."""
    values, n = fit.eigenvalues, fit.eigenvalues.size
    body = values[: n - fit.n_tail]

    def uniform() -> Array:
        numbers: Array = torch.rand(n, dtype=torch.float64, generator=generator).numpy()
        return numbers

    def refit(sample: Array) -> _Tail | None:
        sample.sort()
        # For a given x_min the size of the tail varies, and tails slightly below the smallest size are accepted.
        return _choose(sample, least) if free else _at(sample, fit.x_min, 2)

    resampled = [refit(values[(uniform() * n).astype(np.intp)]) for _ in range(draws)]
    alphas = [tail[0] for tail in resampled if tail is not None]
    simulated = []
    for _ in range(draws):
        sample = fit.x_min * (1 - uniform()) ** (-1 / (fit.alpha - 1))
        if body.size:
            below = uniform() * n < body.size
            sample[below] = body[(uniform()[below] * body.size).astype(np.intp)]
        tail = refit(sample)
        if tail is not None:
            simulated.append(tail[1])
    low, high = np.percentile(alphas, (50 * (1 - confidence), 50 * (1 + confidence))).tolist()
    return replace(fit, interval=(low, high), p_value=float(np.mean(np.array(simulated) >= fit.distance)))
