"""Tests that distinguish a heavy tail of a spectrum from a bulk with a few eigenvalues outside.

References:
    Martin & Mahoney (2021), "Implicit self-regularization in deep neural networks",
    https://arxiv.org/abs/1810.01075.

    Wang, Engel, Sarwate, Dumitriu & Chiang (2022), https://arxiv.org/abs/2211.06506, section 5.3 (the spectral paper).
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
from scipy.special import betainc, betaincc

from featlearn.linalg.ranks import positive_eigenvalues
from featlearn.spectra._power_law import PowerLawFit, power_law
from featlearn.spectra._tail_comparison import TailComparison, compare

_STEEPEST = 6.0
_KOLMOGOROV = 1.358  # 5% point of sqrt(m) times the distance, m the size of the tail
_RATIO = 2.0
_GAP, _END, _SHORT = 0.01, 0.001, 0.005
_CUT_OFF = 1e-4  # eigenvalues of heavy-tailed entries are not independent, and deviate from a power law by more


def tail_evidence(eigenvalues: Any, *, x_min: float | None = None) -> TailEvidence | None:
    """Fit a power law to the tail of a spectrum (`power_law`) and test it in seven ways.

    1. Exponent: ``alpha < 6``. Steeper tails look like the end of any bulk (the bound of Martin and Mahoney).
    2. Fit: ``distance sqrt(n_tail) <= 1.358``, the 5% point of Kolmogorov's law.
    3. Heavier than exponential: a log likelihood ratio above 2, which is 4 in Akaike's criterion.
    4. No gap. For a power law the spacings ``s_i = i ln(lambda_i / lambda_(i+1))``, from the largest eigenvalue on, are
       independent and exponential (Rényi), so that the largest of m of them exceeds the share g of their sum with
       probability at most ``m (1 - g)^(m - 1)`` (Fisher 1929).
    5. Straight to its end. The distance of test 2 hardly depends on the few largest eigenvalues. As in test 4, the
       share ``(s_1 + ... + s_k) / sum s`` has a Beta(k, m - k) law; the p-value is the smallest over k up to m/2, times
       their number. It is small for a bulk with a few spikes of different sizes.

    6. Not too short. The same shares can be too small: the largest eigenvalues crowd together, as at the edge of a
       stretched bulk (correlated data).
    7. No better law: neither the power law with an exponential cut-off nor the lognormal law fits significantly better
       (`compare`).

    A tail is not heavy if one of the tests 1 to 3 fails, if the p-value of test 4 is below 0.01, that of test 5 below
    0.001, that of test 6 below 0.005, that of the cut-off below 0.0001 or that of the lognormal law below 0.05, or if
    test 1 or 3 (with a ratio above 0) fails without the largest eigenvalue. Otherwise it can be a power law, or a
    stretched bulk with several spikes of different sizes: a few hundred eigenvalues do not distinguish them, and the
    spectral paper calls both heavy tails. The p-value of test 5 is an indication: in simulations with 200 eigenvalues
    it is above 0.5 for 94% of the power-law tails that pass tests 1 to 3, and for 16% of the bulks with one to eight
    spikes.

    Args:
        eigenvalues: Eigenvalues of a positive semi-definite matrix, in any order.
        x_min: Start of the tail, if it is known, such as the edge of noise. None chooses it.

    Returns:
        The results of the tests. None if there are fewer than 11 positive eigenvalues, or all but the largest are
        equal.

    Raises:
        InputError: If the eigenvalues are empty, not a vector, not finite or negative.

    References:
        Martin & Mahoney (2021), https://arxiv.org/abs/1810.01075.

    Example:
        >>> from featlearn.spectra import tail_evidence
        >>> tail = tail_evidence([((i + 0.5) / 300) ** (-1 / 1.5) for i in range(300)])  # a power law of exponent 2.5
        >>> tail.heavy, round(tail.fit.alpha, 1)
        (True, 2.5)
    """
    values, _ = positive_eigenvalues(eigenvalues)
    if values.size < 11 or values[0] == values[-2]:
        return None
    fit = power_law(values, x_min=x_min)
    rest = power_law(values[:-1], x_min=x_min)
    falling = fit.tail[::-1]
    spacings = np.arange(1, falling.size) * np.log(falling[:-1] / falling[1:])
    largest = float(spacings.max() / spacings.sum())
    gap = min(1.0, spacings.size * math.pow(1 - largest, spacings.size - 1))
    k = np.arange(1, max(1, spacings.size // 2) + 1)
    shares = np.cumsum(spacings)[: k.size] / spacings.sum()
    straight, short = (
        min(1.0, k.size * float(side(k, spacings.size - k, shares.clip(0, 1)).min())) for side in (betaincc, betainc)
    )
    exponential = compare(fit, "exponential")
    robust = rest.alpha < _STEEPEST and compare(rest, "exponential").ratio > 0
    return TailEvidence(fit, exponential, compare(fit, "lognormal"), gap, straight, robust, short)


@dataclass(frozen=True, eq=False)
class TailEvidence:
    """Results of the tests for a heavy tail, from `tail_evidence`.

    Attributes:
        fit: Power law that was fitted to the tail.
        exponential: Comparison of the power law with an exponential tail.
        lognormal: Comparison of the power law with a lognormal tail.
        gap_p_value: p-value of the largest gap in the tail under the power law.
        end_p_value: p-value of the distance of the largest eigenvalues from the rest under the power law.
        robust: Whether the tail is heavy without its largest eigenvalue.
        short_p_value: p-value of the closeness of the largest eigenvalues to each other under the power law.
    """

    fit: PowerLawFit
    exponential: TailComparison
    lognormal: TailComparison
    gap_p_value: float
    end_p_value: float
    robust: bool
    short_p_value: float = 1.0

    @cached_property
    def truncated(self) -> TailComparison:
        """Comparison of the power law with one that has an exponential cut-off."""
        return compare(self.fit, "truncated")

    @cached_property
    def objections(self) -> tuple[str, ...]:
        """Failed tests, as text; empty if the tail is heavy."""
        fit, m, lognormal = self.fit, self.fit.n_tail, self.lognormal
        found = tuple(
            text
            for text, failed in (
                (f"alpha {fit.alpha:.1f} is {_STEEPEST:g} or more", fit.alpha >= _STEEPEST),
                (f"the power law does not fit (distance {fit.distance:.2f})", fit.distance * m**0.5 > _KOLMOGOROV),
                (
                    f"an exponential tail fits about as well (ratio {self.exponential.ratio:.1f})",
                    self.exponential.ratio <= _RATIO,
                ),
                (f"the tail has a gap (p {self.gap_p_value:.1g})", self.gap_p_value < _GAP),
                (f"its largest are too far from the rest (p {self.end_p_value:.1g})", self.end_p_value < _END),
                (f"its largest are too close together (p {self.short_p_value:.1g})", self.short_p_value < _SHORT),
                (f"a lognormal law fits better (p {lognormal.p_value:.1g})", lognormal.favors == "lognormal"),
                ("it is heavy only because of its largest eigenvalue", not self.robust),
            )
            if failed
        )
        if not found and self.truncated.p_value < _CUT_OFF:  # takes more time than all other tests
            found = (f"a power law with a cut-off fits better (p {self.truncated.p_value:.1g})",)
        return found

    @property
    def is_power_law(self) -> bool:
        """True if the tail is one of a power law from its start to its end, whether or not an exponential fits too."""
        gaps = self.gap_p_value >= _GAP and self.end_p_value >= _END and self.short_p_value >= _SHORT
        others = self.lognormal.favors != "lognormal" and self.truncated.p_value >= _SHORT
        return self.fit.alpha < _STEEPEST and gaps and others

    @property
    def heavy(self) -> bool:
        """True if no test fails, so that the tail counts as heavy."""
        return not self.objections
