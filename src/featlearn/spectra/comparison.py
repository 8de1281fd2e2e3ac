"""Is a tail a power law, or rather a lognormal or an exponential? Likelihood ratios on the same tail."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import NDArray
from scipy.optimize import minimize
from scipy.special import erfcx, log_ndtr

from featlearn.errors import InputError
from featlearn.spectra.tails import PowerLawFit

__all__ = ["TailComparison", "compare"]

Array = NDArray[np.float64]

_FLAT = 1e-6  # curvature, in units of the mean log, below which a lognormal is a power law


def compare(fit: PowerLawFit, other: Literal["lognormal", "exponential"]) -> TailComparison:
    r"""Likelihood ratio of the fitted power law against another law, on the same tail (Clauset et al., section 5).

    ``R = sum_i (ln p(x_i) - ln q(x_i))``, where q is the lognormal or exponential restricted to ``x >= x_min`` and
    fitted by maximum likelihood. R > 0 favours the power law. The sign can be trusted if the p-value of Vuong's test,
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
        ratio: Log likelihood ratio R; positive favours the power law.
        normalised: ``R / (s sqrt m)``, standard normal if neither law is nearer.
        p_value: Two-sided p-value of `normalised`.
        parameters: Of the other law.
    """

    other: str
    ratio: float
    normalised: float
    p_value: float
    parameters: dict[str, float]

    @property
    def favours(self) -> str:
        """The law that is significantly nearer at the 5% level, or ``"neither"``."""
        if self.p_value >= 0.05:
            return "neither"
        return "power law" if self.ratio > 0 else self.other


def _vuong(other: str, power: Array, rival: Array, parameters: dict[str, float]) -> TailComparison:
    terms = power - rival
    spread = float(terms.std()) * math.sqrt(terms.size)
    normalised = float(terms.sum()) / spread if spread > 0 else 0.0
    return TailComparison(other, float(terms.sum()), normalised, math.erfc(abs(normalised) / math.sqrt(2)), parameters)


def _lognormal(fit: PowerLawFit, y: Array, power: Array) -> TailComparison:
    """With y = ln(x / x_min) the tail is a normal law cut at zero, of density exp(eta y - kappa y^2 / 2) / Z.

    The likelihood is concave in (eta, kappa), and kappa = 0 is the power law, so that the search cannot be lost on
    the ridge along which mu and sigma run away together.
    """
    unit = float(y.mean())
    first, second = 1.0, float(np.square(y / unit).mean())

    def loss(parameters: Array) -> tuple[float, Array]:
        eta, kappa = (float(p) for p in parameters)
        log_z = _log_normaliser(eta, kappa)
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
    rival = eta * z - kappa / 2 * z * z - _log_normaliser(eta, kappa) - math.log(unit) - y - math.log(fit.x_min)
    parameters = {"mu": math.log(fit.x_min) + unit * eta / kappa, "sigma": unit / math.sqrt(kappa)}
    return _vuong("lognormal", power, rival, parameters)


def _log_normaliser(eta: float, kappa: float) -> float:
    """``ln int_0^inf exp(eta y - kappa y^2 / 2) dy``, by whichever form does not overflow or cancel."""
    if eta <= 0:
        return 0.5 * math.log(math.pi / (2 * kappa)) + math.log(float(erfcx(-eta / math.sqrt(2 * kappa))))
    root = eta / math.sqrt(kappa)
    return 0.5 * math.log(2 * math.pi / kappa) + root * root / 2 + float(log_ndtr(root))
