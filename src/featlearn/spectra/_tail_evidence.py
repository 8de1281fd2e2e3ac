"""Is the upper end of a spectrum a heavy tail, or a bulk with a few eigenvalues outside it?"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
from scipy.special import betaincc

from featlearn.spectra._power_law import PowerLawFit, TailComparison, compare, power_law
from featlearn.spectra._ranks import positive_eigenvalues

_STEEPEST = 6.0
_KOLMOGOROV = 1.358  # 5% point of sqrt(m) times the distance
_RATIO = 2.0
_GAP, _END = 0.01, 0.001


def tail_evidence(eigenvalues: Any) -> TailEvidence | None:
    r"""Fit a power law to the tail (`power_law`) and ask five questions of it.

    1. Is ``alpha < 6``? Steeper tails look like any bulk's end (the bound of Martin and Mahoney).
    2. Does it fit: ``distance sqrt(n_tail) <= 1.358``, the 5% point of Kolmogorov's law?
    3. Is it heavier than exponential: a log likelihood ratio above 2, which is 4 in Akaike's criterion?
    4. Is it without a gap? Of a power law ``s_i = i ln(lambda_i / lambda_(i+1))``, from the largest on, are
       independent and exponential (Renyi), so that the largest of m of them has more than the share g of their sum
       with probability at most ``m (1 - g)^(m - 1)`` (Fisher 1929).
    5. Is it straight to its end? The distance of 2 hardly sees the few largest. For the same reason as in 4 the share
       ``(s_1 + ... + s_k) / sum s`` has a Beta(k, m - k) law; the p-value is the least over k up to m/2, times
       their number. A bulk with a few spikes of different sizes has small ones.

    A tail is not heavy if one of 1 to 3 fails, if the p-value of 4 is below 0.01 or that of 5 below 0.001, or if 1 or 3
    (a ratio above 0) fails without its largest eigenvalue. What is left may be a power law, or a stretched bulk
    with several spikes of different sizes: a few hundred eigenvalues do not tell them apart, and the paper has one
    name for both. The p-value of 5 is the hint: in simulation at 200 eigenvalues, 94% of the power-law tails that pass
    1 to 3 have more than 0.5, and 16% of the bulks with one to eight spikes.

    Args:
        eigenvalues: Of a positive semi-definite matrix.

    Returns:
        The answers, or None if there are fewer than 11 positive eigenvalues or no two different ones.
    """
    values, _ = positive_eigenvalues(eigenvalues)
    if values.size < 11 or values[0] == values[-2]:
        return None
    fit = power_law(values)
    rest = power_law(values[:-1])
    falling = fit.tail[::-1]
    spacings = np.arange(1, falling.size) * np.log(falling[:-1] / falling[1:])
    largest = float(spacings.max() / spacings.sum())
    gap = min(1.0, spacings.size * math.pow(1 - largest, spacings.size - 1))
    k = np.arange(1, max(1, spacings.size // 2) + 1)
    shares = np.cumsum(spacings)[: k.size] / spacings.sum()
    straight = min(1.0, k.size * float(betaincc(k, spacings.size - k, shares.clip(0, 1)).min()))
    exponential = compare(fit, "exponential")
    robust = rest.alpha < _STEEPEST and compare(rest, "exponential").ratio > 0
    return TailEvidence(fit, exponential, compare(fit, "lognormal"), gap, straight, robust)


@dataclass(frozen=True, eq=False)
class TailEvidence:
    """Outcome of `tail_evidence`.

    Attributes:
        fit: The power law.
        exponential: Its comparison with an exponential tail.
        lognormal: Its comparison with a lognormal tail, which is heavy too and decides nothing.
        gap_p_value: Of the largest gap in the tail, were it a power law.
        end_p_value: Of the distance of the largest eigenvalues from the rest, were it a power law.
        robust: Whether the tail is heavy without its largest eigenvalue.
    """

    fit: PowerLawFit
    exponential: TailComparison
    lognormal: TailComparison
    gap_p_value: float
    end_p_value: float
    robust: bool

    @property
    def objections(self) -> tuple[str, ...]:
        """What speaks against a heavy tail, in words; empty if nothing does."""
        fit, m = self.fit, self.fit.n_tail
        return tuple(
            words
            for words, holds in (
                (f"alpha {fit.alpha:.1f} is {_STEEPEST:g} or more", fit.alpha >= _STEEPEST),
                (f"the power law does not fit (distance {fit.distance:.2f})", fit.distance * m**0.5 > _KOLMOGOROV),
                (
                    f"an exponential tail fits about as well (ratio {self.exponential.ratio:.1f})",
                    self.exponential.ratio <= _RATIO,
                ),
                (f"the tail has a gap (p {self.gap_p_value:.1g})", self.gap_p_value < _GAP),
                (f"its largest stand too far out (p {self.end_p_value:.1g})", self.end_p_value < _END),
                ("only the largest eigenvalue makes it heavy", not self.robust),
            )
            if holds
        )

    @property
    def heavy(self) -> bool:
        """Whether nothing speaks against a heavy tail."""
        return not self.objections
