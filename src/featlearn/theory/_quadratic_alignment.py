"""Initial alignment of a quadratic network, predicted by free probability.

References:
    Beaglehole, Mitliagkas & Agarwala, "Feature learning as alignment", https://openreview.net/forum?id=JXCe2ZcUXr,
    section 4 and appendix E.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from featlearn._utils.rng import Seed, as_generator
from featlearn._utils.validation import check_int
from featlearn.errors import InputError
from featlearn.linalg import cosine
from featlearn.linalg.matrices import as_float64
from featlearn.theory._free_probability import alternating_trace, matrix_moments


@dataclass(frozen=True)
class QuadraticPrediction:
    """Predicted correlation of the centered NFM and AGOP at the start of training.

    Attributes:
        rho: ``numerator / sqrt(nfm_square * agop_square)``.
        numerator: Normalized trace ``tr[A R A R B R]`` with ``A = (X^T Y X)^2`` and ``B = X^T X``.
        nfm_square: Normalized trace ``tr[A R A R]``.
        agop_square: Normalized trace ``tr[A R B R A R B R]``.
        moments: First four moments of ``R = W^T diag(a^2) W``.
        observed: Correlations rho of random networks, one per network.
    """

    rho: float
    numerator: float
    nfm_square: float
    agop_square: float
    moments: tuple[float, float, float, float]
    observed: tuple[float, ...] = ()

    @property
    def observed_mean(self) -> float:
        """Mean of the observed correlations; NaN without any."""
        return sum(self.observed) / len(self.observed) if self.observed else math.nan

    @property
    def observed_error(self) -> float:
        """Standard error of the mean of the observed correlations; NaN with fewer than two."""
        if len(self.observed) < 2:
            return math.nan
        return float(torch.tensor(self.observed, dtype=torch.float64).std() / math.sqrt(len(self.observed)))


def readout_moments(d: int, width: int | None, ratio: float | None = None) -> tuple[float, float, float, float]:
    r"""Compute ``E tr[R^p] / d`` for p = 1 .. 4 of ``R = W^T diag(a^2) W``, with ``a ~ N(0, 1)`` and ``W ~ N(0, 1/k)``.

    The moments are exact at finite sizes, by counting pairings of the Gaussian letters. In the limit ``d/k = c`` they
    are 1, 1 + 3c, 1 + 9c + 15c^2 and 1 + 18c + 78c^2 + 105c^3.

    Args:
        d: Input dimension, at least 1.
        width: Width k, at least 1. None takes the limit.
        ratio: Ratio ``c = d/k`` of the limit. Ignored with a width.

    Returns:
        The first four moments.

    Example:
        >>> from featlearn.theory import readout_moments
        >>> readout_moments(d=10, width=None, ratio=1.0)  # the limit
        (1.0, 4.0, 25.0, 202.0)
        >>> [round(moment, 2) for moment in readout_moments(d=10, width=10)]
        [1.0, 4.5, 35.64, 415.26]
    """
    if width is None:
        if ratio is None or not ratio >= 0:
            raise InputError(f"ratio must be at least 0 if width is None, got {ratio!r}.")
        c = ratio
        return 1.0, 1 + 3 * c, 1 + 9 * c + 15 * c**2, 1 + 18 * c + 78 * c**2 + 105 * c**3
    check_int("d", d)
    k = float(check_int("width", width))
    p = d + 2.0
    second = (3 * p + k - 1) / k
    third = (15 * p * (d + 4) + 9 * (k - 1) * p + (k - 1) * (k - 2)) / k**2
    fourth = (
        105 * p * (d + 4) * (d + 6)
        + 60 * (k - 1) * p * (d + 4)
        + 18 * (k - 1) * p**2
        + 27 * (k - 1) * p
        + 18 * (k - 1) * (k - 2) * p
        + (k - 1) * (k - 2) * (k - 3)
    ) / k**3
    return 1.0, second, third, fourth


def predict_quadratic(
    X: Any,
    y: Any,
    width: int,
    *,
    moments: Sequence[float] | None = None,
    networks: int = 0,
    seed: Seed = None,
) -> QuadraticPrediction:
    r"""Predict rho of ``f = a^T (W x)^2`` at the start of training on given data.

    The second derivatives in time of the centered NFM and AGOP at zero are ``C R C`` and ``C R B R C`` up to factors,
    with ``C = X^T diag(y) X``, ``B = X^T X``, ``R = W^T diag(a^2) W``. R is asymptotically free of C and B for large d
    and k, so the traces in rho follow from the moments of R and the mixed moments of ``A = C^2`` and B by
    `alternating_trace`. The printed result has misprints in (11), (19) and (28).

    Args:
        X: Inputs, shape ``(n, d)``.
        y: Labels, shape ``(n,)``, not all zero.
        width: Width k of the network, at least 1.
        moments: First four moments of R. Default: the exact expectations of `readout_moments`.
        networks: Number of random networks to draw for comparison.
        seed: Generator or seed of the random networks. Default: seed 0.

    Returns:
        The prediction, with the correlations of the random networks.

    Example:
        >>> import torch
        >>> from featlearn.theory import predict_quadratic
        >>> _ = torch.manual_seed(0)
        >>> X = torch.randn(100, 20)
        >>> prediction = predict_quadratic(X, X[:, 0] * X[:, 1], width=200, networks=10, seed=0)
        >>> round(prediction.rho, 2), round(prediction.observed_mean, 2)
        (0.96, 0.97)

    References:
        Beaglehole, Mitliagkas & Agarwala, "Feature learning as alignment", https://openreview.net/forum?id=JXCe2ZcUXr,
        section 4.2 and appendix E.
    """
    x, labels = as_float64(X), as_float64(y).flatten()
    if x.ndim != 2 or len(x) != len(labels) or not len(x):
        raise InputError(f"X must have shape (n, d) and y (n,), got {tuple(x.shape)} and {tuple(as_float64(y).shape)}.")
    if not (torch.isfinite(x).all() and torch.isfinite(labels).all()):
        raise InputError("X and y must be finite, got NaN or infinite entries.")
    check_int("width", width)
    if not labels.any():
        raise InputError("y must not be zero everywhere: rho is not defined then.")
    d = x.shape[1]
    c, b = x.mT @ (labels[:, None] * x), x.mT @ x
    a = c @ c
    a, b = a / (a.trace() / d), b / (b.trace() / d)  # rho is scale-free, and the eighth powers stay in range
    m = readout_moments(d, width) if moments is None else _four(moments)

    def of_r(word: tuple[int, ...]) -> float:
        return float(m[len(word) - 1])

    numerator = alternating_trace(matrix_moments([a, a, b]), of_r, 3)
    nfm_square = alternating_trace(matrix_moments([a, a]), of_r, 2)
    agop_square = alternating_trace(matrix_moments([a, b, a, b]), of_r, 4)
    generator = as_generator(seed, "quadratic alignment")
    observed = tuple(_observed(c, b, width, generator) for _ in range(networks))
    return QuadraticPrediction(
        numerator / math.sqrt(nfm_square * agop_square), numerator, nfm_square, agop_square, m, observed
    )


def _four(moments: Sequence[float]) -> tuple[float, float, float, float]:
    if len(moments) != 4:
        raise InputError(f"moments must be the first four moments of R, got {len(moments)}.")
    first, second, third, fourth = (float(m) for m in moments)
    return first, second, third, fourth


def _observed(c: Tensor, b: Tensor, width: int, generator: torch.Generator) -> float:
    d = len(c)
    a = torch.randn(width, generator=generator, dtype=torch.float64)
    w = torch.randn(width, d, generator=generator, dtype=torch.float64) / math.sqrt(width)
    r = w.mT @ (a.square()[:, None] * w)
    return cosine(c @ r @ c, c @ r @ b @ r @ c)


@dataclass(frozen=True)
class NumeratorTerms:
    """Mean and covariance terms of the numerator of rho, as unnormalized traces with ``P = 4 X R X^T``.

    Attributes:
        mean: Exact value of ``Tr(X^T Y E[P] Y X X^T Y E[P^2] Y X)``.
        mean_of_squared_mean: The mean with ``E[P]^2`` instead of ``E[P^2]``: its limit for infinite width.
        total: ``E Tr(X^T Y P Y X X^T Y P^2 Y X)``, by free probability.

    References:
        Beaglehole, Mitliagkas & Agarwala, "Feature learning as alignment", https://openreview.net/forum?id=JXCe2ZcUXr,
        equation 9.
    """

    mean: float
    mean_of_squared_mean: float
    total: float

    @property
    def covariance(self) -> float:
        """Trace of the covariance of the two matrices: total minus mean; it vanishes for infinite width."""
        return self.total - self.mean


def numerator_terms(X: Any, y: Any, width: int) -> NumeratorTerms:
    r"""Compute the mean and covariance terms of the numerator of rho for the quadratic network.

    ``E[R] = I`` and ``E[R B R] = (1 + 5/k) B + (3/k) Tr(B) I``, so ``E[P] = 4 X X^T`` and
    ``E[P^2] = 16 X E[R B R] X^T``.

    Args:
        X: Inputs, shape ``(n, d)``.
        y: Labels, shape ``(n,)``.
        width: Width k of the network, at least 1.

    Returns:
        The terms.

    Example:
        >>> import torch
        >>> from featlearn.theory import numerator_terms
        >>> _ = torch.manual_seed(0)
        >>> X, y = torch.randn(50, 5), torch.randn(50)
        >>> for width in (10, 1000):
        ...     terms = numerator_terms(X, y, width)
        ...     print(width, round(terms.covariance / terms.total, 4))
        10 0.6533
        1000 0.0172

    References:
        Beaglehole, Mitliagkas & Agarwala, "Feature learning as alignment", https://openreview.net/forum?id=JXCe2ZcUXr,
        equation 9.
    """
    nfm, agop = expected_derivatives(X, y, width)
    _, at_infinity = expected_derivatives(X, y, 10**15)
    prediction = predict_quadratic(X, y, width)
    x, labels = as_float64(X), as_float64(y).flatten()
    d = x.shape[1]
    c, b = x.mT @ (labels[:, None] * x), x.mT @ x
    # The prediction is for A and B with normalized trace 1; A enters twice and B once, and the trace has d terms.
    scale = (float((c @ c).trace()) / d) ** 2 * (float(b.trace()) / d) * d
    total = 4 * 16 * scale * prediction.numerator
    return NumeratorTerms(float((nfm * agop).sum()), float((nfm * at_infinity).sum()), total)


def isotropic_numerator(A: Any, moments: Sequence[float]) -> float:
    r"""Compute ``tr[A R A R R]`` for white inputs, ``X^T X = I``.

    It is ``tr[A]^2 tr[R^3] + tr[R] tr[R^2] tr[(A - tr[A])^2]``, with traces divided by d.

    Args:
        A: Matrix ``(X^T Y X)^2``, shape ``(d, d)``.
        moments: First four moments of R, from `readout_moments`.

    Returns:
        The numerator of rho.

    Example:
        >>> import torch
        >>> from featlearn.theory import isotropic_numerator, readout_moments
        >>> moments = readout_moments(d=2, width=None, ratio=0.5)
        >>> round(isotropic_numerator(torch.eye(2), moments), 4), round(moments[2], 4)  # tr[R^3] for A = I
        (9.25, 9.25)

    References:
        Beaglehole, Mitliagkas & Agarwala, "Feature learning as alignment", https://openreview.net/forum?id=JXCe2ZcUXr,
        first version, section 4.2.
    """
    a = as_float64(A)
    if a.ndim != 2 or a.shape[0] != a.shape[1] or not a.numel():
        raise InputError(f"A must be a square matrix, got shape {tuple(a.shape)}.")
    first, second, third, _ = _four(moments)
    mean = float(a.trace()) / len(a)
    spread = float((a @ a).trace()) / len(a) - mean**2
    return mean**2 * third + first * second * spread


def expected_derivatives(X: Any, y: Any, width: int) -> tuple[Tensor, Tensor]:
    r"""Compute ``E[W'^T W']`` and ``E[W'^T K W']`` at the start, over a and W.

    For ``f = a^T (W x)^2`` with ``a ~ N(0, 1)`` and ``W ~ N(0, 1/k)``, zero outputs, half the sum of squared errors,
    and K without 1/n, they are ``4 C^2`` and ``16 [(1 + 5/k) C B C + (3/k) Tr(B) C^2]``. The paper omits terms of the
    second.

    Args:
        X: Inputs, shape ``(n, d)``.
        y: Labels, shape ``(n,)``.
        width: Width k of the network, at least 1.

    Returns:
        The two expectations, each of shape ``(d, d)``.

    Example:
        >>> import torch, featlearn as fl
        >>> from featlearn.theory import expected_derivatives
        >>> _ = torch.manual_seed(0)
        >>> X, y = torch.randn(50, 4), torch.randn(50)
        >>> nfm, agop = expected_derivatives(X, y, width=100)
        >>> nfm.shape, round(fl.cosine(nfm, agop), 3)
        (torch.Size([4, 4]), 0.961)

    References:
        Beaglehole, Mitliagkas & Agarwala, "Feature learning as alignment", https://openreview.net/forum?id=JXCe2ZcUXr,
        proposition 16, corrected.
    """
    x, labels = as_float64(X), as_float64(y).flatten()
    if x.ndim != 2 or len(x) != len(labels) or width < 1:
        raise InputError(
            f"X must have shape (n, d), y (n,), and width be at least 1, got {tuple(x.shape)}, {len(labels)}, {width}."
        )
    c, b = x.mT @ (labels[:, None] * x), x.mT @ x
    square = c @ c
    return 4 * square, 16 * ((1 + 5 / width) * c @ b @ c + 3 / width * b.trace() * square)
