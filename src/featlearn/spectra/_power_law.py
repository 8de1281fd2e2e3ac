"""Fit power-law tails (Clauset, Shalizi and Newman 2009), and compare them with lognormal and exponential ones."""

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
from featlearn.plots import tail_plot
from featlearn.spectra._ranks import positive_eigenvalues

Array = NDArray[np.float64]

_FLAT = 1e-6  # curvature, in units of the mean log, below which a lognormal is a power law


def compare(fit: PowerLawFit, other: Literal["lognormal", "exponential"]) -> TailComparison:
    r"""Likelihood ratio of the fitted power law against another law, on the same tail (Clauset et al., section 5).

    ``R = sum_i (ln p(x_i) - ln q(x_i))``, where q is the lognormal or exponential restricted to ``x >= x_min`` and
    fitted by maximum likelihood. R > 0 favors the power law. The sign can be trusted if the p-value of Vuong's test,
    ``erfc(|R| / (s sqrt(2 m)))`` with s the standard deviation of the m terms, is small.

    A power law is a limit of lognormals, of ``mu -> -inf`` with ``sigma^2 / |mu|`` fixed. So R is never positive
    for the lognormal; where the tail is no lighter than a power law the limit itself is the best lognormal, the
    ratio is then 0 with p-value 1, and its parameters are NaN.

    Args:
        fit: What `power_law` returned.
        other: ``"lognormal"`` or ``"exponential"``.
    """
    y = np.log(fit.tail / fit.x_min)
    power = math.log(fit.alpha - 1) - math.log(fit.x_min) - fit.alpha * y
    if other == "exponential":
        rate = 1 / float((fit.tail - fit.x_min).mean())
        return _vuong(other, power, math.log(rate) - rate * (fit.tail - fit.x_min), {"rate": rate})
    if other == "lognormal":
        return _lognormal(fit, y, power)
    raise InputError(f'a tail can be compared with "lognormal" or "exponential", got {other!r}')


@dataclass(frozen=True)
class TailComparison:
    """Outcome of `compare`.

    Attributes:
        other: Name of the other law.
        ratio: Log likelihood ratio R; positive favors the power law.
        normalized: ``R / (s sqrt m)``, standard normal if neither law is nearer.
        p_value: Two-sided p-value of `normalized`.
        parameters: Of the other law.
    """

    other: str
    ratio: float
    normalized: float
    p_value: float
    parameters: dict[str, float]

    normalised = RenamedAttribute("normalized")
    favours = RenamedAttribute("favors")

    @property
    def favors(self) -> str:
        """The law that is significantly nearer at the 5% level, or ``"neither"``."""
        if self.p_value >= 0.05:
            return "neither"
        return "power law" if self.ratio > 0 else self.other


def _vuong(other: str, power: Array, rival: Array, parameters: dict[str, float]) -> TailComparison:
    terms = power - rival
    spread = float(terms.std()) * math.sqrt(terms.size)
    normalized = float(terms.sum()) / spread if spread > 0 else 0.0
    return TailComparison(other, float(terms.sum()), normalized, math.erfc(abs(normalized) / math.sqrt(2)), parameters)


def _lognormal(fit: PowerLawFit, y: Array, power: Array) -> TailComparison:
    """With y = ln(x / x_min) the tail is a normal law cut at zero, of density exp(eta y - kappa y^2 / 2) / Z.

    The likelihood is concave in (eta, kappa), and kappa = 0 is the power law, so that the search cannot be lost on
    the ridge along which mu and sigma run away together.
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
    found = minimize(loss, np.array([-0.5, 0.5]), jac=True, method="L-BFGS-B", bounds=bounds, options=options)
    eta, kappa = (float(p) for p in found.x)
    if kappa <= 2 * _FLAT:
        return TailComparison("lognormal", 0.0, 0.0, 1.0, {"mu": math.nan, "sigma": math.nan})
    z = y / unit
    rival = eta * z - kappa / 2 * z * z - _log_normalizer(eta, kappa) - math.log(unit) - y - math.log(fit.x_min)
    parameters = {"mu": math.log(fit.x_min) + unit * eta / kappa, "sigma": unit / math.sqrt(kappa)}
    return _vuong("lognormal", power, rival, parameters)


def _log_normalizer(eta: float, kappa: float) -> float:
    """``ln int_0^inf exp(eta y - kappa y^2 / 2) dy``, by whichever form does not overflow or cancel."""
    if eta <= 0:
        return 0.5 * math.log(math.pi / (2 * kappa)) + math.log(float(erfcx(-eta / math.sqrt(2 * kappa))))
    root = eta / math.sqrt(kappa)
    return 0.5 * math.log(2 * math.pi / kappa) + root * root / 2 + float(log_ndtr(root))


_LEAST = 10
_PROBES = 48  # order statistics that give a first lower bound of a distance


def power_law(
    eigenvalues: Any,
    *,
    x_min: float | None = None,
    min_tail: int = _LEAST,
    bootstrap: int = 0,
    confidence: float = 0.95,
    generator: Seed = None,
) -> PowerLawFit:
    r"""Fit ``rho(x) ~ x^-alpha`` to the eigenvalues from x_min on, by maximum likelihood.

    ``alpha = 1 + m / sum ln(x / x_min)`` over the m eigenvalues that are at least x_min, with standard error
    ``(alpha - 1) / sqrt m``. Without x_min, every eigenvalue that leaves a tail of ``min_tail`` is tried, and the one
    of the least Kolmogorov-Smirnov distance is taken (the smallest of equals). The distance is that of Clauset's
    own code and of the ``powerlaw`` package, ``max_j |j/m - F(x_j)|`` for j = 0 ... m-1 (the package keeps alpha below
    3 unless told otherwise; nothing is kept here).

    The bootstrap draws twice. Resampling the eigenvalues gives the interval of alpha. Drawing from the fit, power
    law above x_min and the eigenvalues themselves below, gives the p-value: the share of draws that are further
    from their own fit than the eigenvalues from theirs. Below 0.1 the power law is to be doubted. Each draw chooses
    its own x_min, unless x_min was given. Eigenvalues of one matrix repel each other and are not independent draws,
    so that both are a guide and no more.

    Args:
        eigenvalues: Of a positive semi-definite matrix; zeros are left out and counted in ``zeros``.
        x_min: Start of the tail; chosen if None.
        min_tail: Least size of a tail, 10 or more.
        bootstrap: Number of draws; 0 for none.
        confidence: Level of the interval.
        generator: Generator or seed of the bootstrap.
    """
    values, zeros = positive_eigenvalues(eigenvalues)
    if min_tail < _LEAST:
        raise InputError(f"min_tail must be at least {_LEAST}, got {min_tail}: alpha's error would be above 30%")
    if values.size < min_tail:
        raise InputError(
            f"a tail needs at least {min_tail} positive eigenvalues, got {values.size} (and {zeros} zeros): "
            "with fewer, alpha's standard error is above 30% of alpha - 1 and any x_min fits"
        )
    if bootstrap < 0:
        raise InputError(f"bootstrap must be a number of draws, got {bootstrap}")
    if not 0 < confidence < 1:
        raise InputError(f"confidence must be between 0 and 1, got {confidence}")
    if x_min is not None and not (math.isfinite(x_min) and x_min > 0):
        raise InputError(f"x_min must be positive and finite, got {x_min!r}")
    found = _choose(values, min_tail) if x_min is None else _at(values, x_min, min_tail)
    if found is None:
        raise InputError(
            f"no tail of at least {min_tail} eigenvalues "
            + ("that differ from one another" if x_min is None else f"that differ starts at x_min={x_min:g}")
            + f": the {values.size} positive ones run from {values[0]:g} to {values[-1]:g}"
        )
    alpha, distance, index, chosen = found
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
    """A fitted tail.

    Attributes:
        alpha: Exponent of the density.
        standard_error: Of alpha, given x_min.
        x_min: Where the tail starts.
        distance: Kolmogorov-Smirnov distance of the tail from its fit.
        n_tail: Number of eigenvalues in the tail.
        zeros: Number of eigenvalues that were left out as zero.
        eigenvalues: The positive ones, ascending.
        interval: Percentile interval of alpha, with a bootstrap.
        p_value: Of the goodness of fit, with a bootstrap.
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
        """The eigenvalues from x_min on."""
        return self.eigenvalues[self.eigenvalues.size - self.n_tail :]

    @property
    def weighted_alpha_paper(self) -> float:
        """``alpha * lambda_max``: the spectral paper's weighted alpha (appendix A.2); it depends on the scale."""
        return self.alpha * float(self.eigenvalues[-1])

    @property
    def weighted_alpha_log(self) -> float:
        """``alpha * log10(lambda_max)``: the weighted alpha of Martin and Mahoney."""
        return self.alpha * math.log10(float(self.eigenvalues[-1]))

    @cached_property
    def log_alpha_norm(self) -> float:
        """``log10 sum lambda^alpha`` over all the positive eigenvalues."""
        logs = self.alpha * np.log10(self.eigenvalues)
        return float(logs[-1] + np.log10((10 ** (logs - logs[-1])).sum()))  # the power itself may overflow

    def plot(self, title: str | None = None) -> Figure:
        """The share of eigenvalues above x, with the fitted line."""
        return tail_plot(self.eigenvalues, self.x_min, self.alpha, standard_error=self.standard_error, title=title)


_Found = tuple[float, float, int, float]
"""Exponent, distance, index of the first eigenvalue of the tail, x_min."""


def _at(values: Array, x_min: float, least: int) -> _Found | None:
    """The fit from a given x_min on; None if there is no tail to speak of."""
    index = int(np.searchsorted(values, x_min))
    m = values.size - index
    if m < least or values[-1] == values[index]:
        return None
    logs = np.log(values[index:] / x_min)
    rate = m / float(logs.sum())
    ranks = np.searchsorted(values, values[index:]) - index
    return 1 + rate, float(np.abs(ranks / m + np.expm1(-rate * logs)).max()), index, float(x_min)


def _choose(values: Array, least: int) -> _Found | None:
    """The fit of the least distance over all x_min, without the distances that cannot be the least.

    A distance is a maximum over the tail, so that its maximum over a few order statistics is a lower bound. In the
    order of these bounds the distances are computed in full, until a bound exceeds the best of them: exact, and
    mostly a few hundred tails instead of all.
    """
    logs = np.log(values)
    logs -= logs[-1]  # sums of small numbers keep their digits
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
    probes[:, 0] = n - 1  # the first of a tail has distance zero; the last is worth a look
    exponents = rates[:, None] * (logs[starts][:, None] - logs[probes])
    bounds = np.abs((ranks[probes] - starts[:, None]) / m[:, None] + np.exp(exponents) - 1).max(1)
    shares = ranks / n
    best, index = math.inf, -1
    for k in np.argsort(bounds, kind="stable").tolist():
        if bounds[k] > best:
            break
        start, size = int(starts[k]), int(m[k])
        shift = 1 + start / size  # ranks are counted from the start of the tail: (rank - start) / m
        for stride in (16, 1):  # a sixteenth of the tail mostly settles it
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
    """The fit with the interval of alpha and the p-value."""
    values, n = fit.eigenvalues, fit.eigenvalues.size
    body = values[: n - fit.n_tail]

    def uniform() -> Array:
        numbers: Array = torch.rand(n, dtype=torch.float64, generator=generator).numpy()
        return numbers

    def refit(sample: Array) -> _Found | None:
        sample.sort()
        # With x_min given the size of the tail varies, and a few less than the least are still a tail.
        return _choose(sample, least) if free else _at(sample, fit.x_min, 2)

    resampled = [refit(values[(uniform() * n).astype(np.intp)]) for _ in range(draws)]
    alphas = [found[0] for found in resampled if found is not None]
    simulated = []
    for _ in range(draws):
        sample = fit.x_min * (1 - uniform()) ** (-1 / (fit.alpha - 1))
        if body.size:
            below = uniform() * n < body.size
            sample[below] = body[(uniform()[below] * body.size).astype(np.intp)]
        found = refit(sample)
        if found is not None:
            simulated.append(found[1])
    tails = (50 * (1 - confidence), 50 * (1 + confidence))
    low, high = np.percentile(alphas, tails).tolist()
    return replace(fit, interval=(low, high), p_value=float(np.mean(np.array(simulated) >= fit.distance)))
