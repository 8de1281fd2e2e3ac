"""Comparison of a fitted power law with lognormal, exponential and truncated tails.

References:
    Clauset, Shalizi & Newman (2009), "Power-law distributions in empirical data", https://arxiv.org/abs/0706.1062.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import NDArray
from scipy.optimize import minimize
from scipy.special import erfcx, log_ndtr

from featlearn._utils.public_names import RenamedAttribute
from featlearn.errors import InputError
from featlearn.spectra._power_law import PowerLawFit

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
