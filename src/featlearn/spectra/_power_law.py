"""Power-law fits of tails, and their comparison with lognormal and exponential tails.

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
from typing import Any, Literal

import numpy as np
import torch
from matplotlib.figure import Figure
from numpy.typing import NDArray
from scipy.optimize import minimize
from scipy.special import erfcx, log_ndtr

from featlearn._utils.public_names import RenamedAttribute
from featlearn._utils.rng import Seed, as_generator
from featlearn.errors import InputError
from featlearn.linalg.ranks import positive_eigenvalues
from featlearn.plots import tail_plot

Array = NDArray[np.float64]

_BEYOND, _NODES = 8.0, 600  # the grid of the truncated law ends at so many logarithms above the largest eigenvalue
_FLAT = 1e-6  # curvature, in units of the mean log, below which a lognormal counts as a power law


def compare(fit: PowerLawFit, other: Literal["lognormal", "exponential", "truncated"]) -> TailComparison:
    """Compute the likelihood ratio of a fitted power law against another law, on the same tail.

    ``R = sum_i (ln p(x_i) - ln q(x_i))``, where q is the lognormal, exponential or truncated law restricted to
    ``x >= x_min`` and fitted by maximum likelihood. R > 0 favors the power law. The sign is significant if the p-value
    of Vuong's test, ``erfc(|R| / (s sqrt(2 m)))`` with s the standard deviation of the m terms, is small.

    A power law is the limit of lognormals with ``mu -> -inf`` and ``sigma^2 / |mu|`` fixed. Therefore R is never
    positive for the lognormal. If the tail is as heavy as a power law, or heavier, this limit is the best lognormal:
    the ratio is then 0, its p-value is 1, and the parameters are NaN.

    The truncated power law has the density ``x^-a exp(-rate x)``. It contains the power law, so that R is never
    positive, and the p-value is that of a likelihood-ratio test: half the probability that a chi-squared variable of
    one degree of freedom exceeds ``-2 R``, because the rate is at the end of its range.

    Args:
        fit: Power law, from `power_law`.
        other: Name of the other law, ``"lognormal"``, ``"exponential"`` or ``"truncated"``.

    Returns:
        The ratio, its p-value and the parameters of the other law.

    Raises:
        InputError: If `other` is none of these names.

    References:
        Clauset, Shalizi & Newman (2009), https://arxiv.org/abs/0706.1062, section 5.

    Example:
        >>> from featlearn.spectra import compare, power_law
        >>> fit = power_law([((i + 0.5) / 300) ** (-1 / 1.5) for i in range(300)])  # a power law of exponent 2.5
        >>> compare(fit, "exponential").favors
        'power law'
    """
    y = np.log(fit.tail / fit.x_min)
    power = math.log(fit.alpha - 1) - math.log(fit.x_min) - fit.alpha * y
    if other == "exponential":
        rate = 1 / float((fit.tail - fit.x_min).mean())
        return _vuong(other, power, math.log(rate) - rate * (fit.tail - fit.x_min), {"rate": rate})
    if other == "lognormal":
        return _lognormal(fit, y, power)
    if other == "truncated":
        return _truncated(fit, y, power)
    raise InputError(f"other must be 'lognormal', 'exponential' or 'truncated', got {other!r}.")


@dataclass(frozen=True)
class TailComparison:
    """Likelihood ratio of a power law against another law: the result of `compare`.

    Attributes:
        other: Name of the other law.
        ratio: Log likelihood ratio R; positive values favor the power law.
        normalized: Normalized ratio ``R / (s sqrt m)``, standard normal if both laws fit equally well.
        p_value: Two-sided p-value of `normalized`.
        parameters: Parameters of the other law by name: ``rate`` of the exponential, ``mu`` and ``sigma`` of the
            lognormal, ``alpha`` and ``rate`` of the truncated power law.
    """

    other: str
    ratio: float
    normalized: float
    p_value: float
    parameters: dict[str, float]

    @property
    def favors(self) -> str:
        """Name of the law that fits significantly better at the 5% level, or ``"neither"``."""
        if self.p_value >= 0.05:
            return "neither"
        return "power law" if self.ratio > 0 else self.other


for _old, _new in (("normalised", "normalized"), ("favours", "favors")):  # British names of earlier versions
    _attribute = RenamedAttribute(_new)
    _attribute.__set_name__(TailComparison, _old)
    setattr(TailComparison, _old, _attribute)


def _vuong(other: str, power: Array, rival: Array, parameters: dict[str, float]) -> TailComparison:
    terms = power - rival
    spread = float(terms.std()) * math.sqrt(terms.size)
    normalized = float(terms.sum()) / spread if spread > 0 else 0.0
    return TailComparison(other, float(terms.sum()), normalized, math.erfc(abs(normalized) / math.sqrt(2)), parameters)


def _lognormal(fit: PowerLawFit, y: Array, power: Array) -> TailComparison:
    """Compare the fit with the lognormal law of maximum likelihood.

    With y = ln(x / x_min) the tail is a normal law truncated at zero, of density exp(eta y - kappa y^2 / 2) / Z. The
    likelihood is concave in (eta, kappa), and kappa = 0 is the power law, so that the search does not diverge along the
    ridge on which mu and sigma grow together.
    """
    unit = float(y.mean())
    first, second = 1.0, float(np.square(y / unit).mean())

    def loss(parameters: Array) -> tuple[float, Array]:
        eta, kappa = (float(p) for p in parameters)
        log_z = _log_normalizer(eta, kappa)
        mean = (eta + math.exp(-log_z)) / kappa
        square = (eta * mean + 1) / kappa
        return log_z - eta * first + kappa / 2 * second, np.array([mean - first, (second - square) / 2])

    bounds = [(None, None), (_FLAT, None)]
    options = {"ftol": 1e-15, "gtol": 1e-10, "maxiter": 1000}
    optimum = minimize(loss, np.array([-0.5, 0.5]), jac=True, method="L-BFGS-B", bounds=bounds, options=options)
    eta, kappa = (float(p) for p in optimum.x)
    if kappa <= 2 * _FLAT:
        return TailComparison("lognormal", 0.0, 0.0, 1.0, {"mu": math.nan, "sigma": math.nan})
    z = y / unit
    rival = eta * z - kappa / 2 * z * z - _log_normalizer(eta, kappa) - math.log(unit) - y - math.log(fit.x_min)
    parameters = {"mu": math.log(fit.x_min) + unit * eta / kappa, "sigma": unit / math.sqrt(kappa)}
    return _vuong("lognormal", power, rival, parameters)


def _truncated(fit: PowerLawFit, y: Array, power: Array) -> TailComparison:
    """Compare the fit with the power law with an exponential cut-off of maximum likelihood.

    The likelihood of the density ``exp(-alpha y - rate x) / Z`` is concave in (alpha, rate): no start is better than
    another one.
    """
    x = np.exp(y)
    m, logs, excess = y.size, float(y.mean()), float((x - 1).mean())
    grid = np.linspace(0.0, float(y.max()) + _BEYOND, _NODES)
    points = np.expm1(grid) / excess
    weights = np.full(_NODES, grid[1])
    weights[[0, -1]] /= 2

    def loss(parameters: Array) -> tuple[float, Array]:
        alpha, rate = parameters  # the rate is in units of 1 / excess, so that both are of order one
        terms = (1 - alpha) * grid - rate * points
        top = float(terms.max())
        density = np.exp(terms - top) * weights
        total = float(density.sum())
        value = alpha * logs + rate + top + math.log(total)
        return value, np.array([logs - float(density @ grid) / total, 1 - float(density @ points) / total])

    bounds = [(None, None), (0.0, None)]
    options = {"ftol": 1e-13, "gtol": 1e-9, "maxiter": 1000}
    start = np.array([fit.alpha, excess / x[-1]])
    best = minimize(loss, start, jac=True, method="L-BFGS-B", bounds=bounds, options=options)
    ratio = min(0.0, float(power.sum()) + m * (float(best.fun) + math.log(fit.x_min)))
    p_value = math.erfc(math.sqrt(-ratio)) / 2 if ratio < 0 else 1.0
    parameters = {"alpha": float(best.x[0]), "rate": float(best.x[1]) / excess / fit.x_min}
    return TailComparison("truncated", ratio, -math.sqrt(-2 * ratio), p_value, parameters)


def _log_normalizer(eta: float, kappa: float) -> float:
    """Compute ``ln int_0^inf exp(eta y - kappa y^2 / 2) dy`` without overflow or cancellation."""
    if eta <= 0:
        return 0.5 * math.log(math.pi / (2 * kappa)) + math.log(float(erfcx(-eta / math.sqrt(2 * kappa))))
    root = eta / math.sqrt(kappa)
    return 0.5 * math.log(2 * math.pi / kappa) + root * root / 2 + float(log_ndtr(root))


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
