"""Tests that distinguish a heavy tail of a spectrum from a bulk with a few eigenvalues outside.

References:
    Martin & Mahoney (2021), "Implicit self-regularization in deep neural networks",
    https://arxiv.org/abs/1810.01075.

    Wang, Engel, Sarwate, Dumitriu & Chiang (2022), https://arxiv.org/abs/2211.06506, section 5.3 (the spectral paper).
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
from scipy.special import betaincc

from featlearn.spectra._power_law import PowerLawFit, TailComparison, compare, power_law
from featlearn.spectra._ranks import positive_eigenvalues

_STEEPEST = 6.0
_KOLMOGOROV = 1.358  # 5% point of sqrt(m) times the distance, m the size of the tail
_RATIO = 2.0
_GAP, _END = 0.01, 0.001


def tail_evidence(eigenvalues: Any) -> TailEvidence | None:
    """Fit a power law to the tail of a spectrum (`power_law`) and test it in five ways.

    1. Exponent: ``alpha < 6``. Steeper tails look like the end of any bulk (the bound of Martin and Mahoney).
    2. Fit: ``distance sqrt(n_tail) <= 1.358``, the 5% point of Kolmogorov's law.
    3. Heavier than exponential: a log likelihood ratio above 2, which is 4 in Akaike's criterion.
    4. No gap. For a power law the spacings ``s_i = i ln(lambda_i / lambda_(i+1))``, from the largest eigenvalue on, are
       independent and exponential (Rényi), so that the largest of m of them exceeds the share g of their sum with
       probability at most ``m (1 - g)^(m - 1)`` (Fisher 1929).
    5. Straight to its end. The distance of test 2 hardly depends on the few largest eigenvalues. As in test 4, the
       share ``(s_1 + ... + s_k) / sum s`` has a Beta(k, m - k) law; the p-value is the smallest over k up to m/2, times
       their number. It is small for a bulk with a few spikes of different sizes.

    A tail is not heavy if one of the tests 1 to 3 fails, if the p-value of test 4 is below 0.01 or that of test 5 below
    0.001, or if test 1 or 3 (with a ratio above 0) fails without the largest eigenvalue. Otherwise it can be a power
    law, or a stretched bulk with several spikes of different sizes: a few hundred eigenvalues do not distinguish them,
    and the spectral paper calls both heavy tails. The p-value of test 5 is an indication: in simulations with 200
    eigenvalues it is above 0.5 for 94% of the power-law tails that pass tests 1 to 3, and for 16% of the bulks with one
    to eight spikes.

    Args:
        eigenvalues: Eigenvalues of a positive semi-definite matrix, in any order.

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
    """Results of the tests for a heavy tail, from `tail_evidence`.

    Attributes:
        fit: Power law that was fitted to the tail.
        exponential: Comparison of the power law with an exponential tail.
        lognormal: Comparison of the power law with a lognormal tail, which is heavy, too, and has no influence on
            `heavy`.
        gap_p_value: p-value of the largest gap in the tail under the power law.
        end_p_value: p-value of the distance of the largest eigenvalues from the rest under the power law.
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
        """Failed tests, as text; empty if the tail is heavy."""
        fit, m = self.fit, self.fit.n_tail
        return tuple(
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
                ("it is heavy only because of its largest eigenvalue", not self.robust),
            )
            if failed
        )

    @property
    def heavy(self) -> bool:
        """True if no test fails, so that the tail counts as heavy."""
        return not self.objections
