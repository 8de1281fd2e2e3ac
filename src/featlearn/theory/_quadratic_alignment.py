"""Alignment at the start of training of a quadratic network, predicted by free probability (NFA paper, section 4)."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from featlearn._utils.rng import Seed, as_generator
from featlearn.errors import InputError
from featlearn.linalg import cosine
from featlearn.linalg.matrices import as_float64
from featlearn.theory._free_probability import alternating_trace, matrix_moments


@dataclass(frozen=True)
class QuadraticPrediction:
    """Predicted correlation of the centered NFM and AGOP at the start of training.

    Attributes:
        rho: ``numerator / sqrt(nfm_square * agop_square)``.
        numerator: ``tr[A R A R B R]``, normalized, with ``A = (X^T Y X)^2`` and ``B = X^T X``.
        nfm_square: ``tr[A R A R]``.
        agop_square: ``tr[A R B R A R B R]``.
        moments: Of ``R = W^T diag(a^2) W``, the first four.
        observed: rho of networks drawn at random, one a seed.
    """

    rho: float
    numerator: float
    nfm_square: float
    agop_square: float
    moments: tuple[float, float, float, float]
    observed: tuple[float, ...] = ()

    @property
    def observed_mean(self) -> float:
        """Mean over the networks drawn; NaN without any."""
        return sum(self.observed) / len(self.observed) if self.observed else math.nan

    @property
    def observed_error(self) -> float:
        """Standard error of that mean."""
        if len(self.observed) < 2:
            return math.nan
        return float(torch.tensor(self.observed, dtype=torch.float64).std() / math.sqrt(len(self.observed)))


def readout_moments(d: int, width: int | None, ratio: float | None = None) -> tuple[float, float, float, float]:
    r"""``E tr[R^p] / d`` for p = 1 .. 4 of ``R = W^T diag(a^2) W``, with ``a ~ N(0, 1)`` and ``W ~ N(0, 1/k)``.

    Exact at finite sizes, by counting pairings of the Gaussian letters; in the limit of ``d/k = c`` they are 1, 1 + 3c,
    1 + 9c + 15c^2, 1 + 18c + 78c^2 + 105c^3.

    Args:
        d: Input dimension.
        width: k; None takes the limit.
        ratio: c of the limit.
    """
    if width is None:
        if ratio is None or not ratio >= 0:
            raise InputError(f"the limit needs ratio = d/k of at least 0, got {ratio!r}")
        c = ratio
        return 1.0, 1 + 3 * c, 1 + 9 * c + 15 * c**2, 1 + 18 * c + 78 * c**2 + 105 * c**3
    if d < 1 or width < 1:
        raise InputError(f"d and width must be at least 1, got {d} and {width}")
    k = float(width)
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
    r"""Predict rho of ``f = a^T (W x)^2`` at the start of training, on given data (NFA paper, 4.2 and appendix E).

    The second derivatives in time of the centered NFM and AGOP at zero are ``C R C`` and ``C R B R C`` up to factors,
    with ``C = X^T diag(y) X``, ``B = X^T X``, ``R = W^T diag(a^2) W``. R is free of C and B for large d and k, so that
    the traces in rho follow from the moments of R and the mixed moments of ``A = C^2`` and B by `alternating_trace`.
    The paper prints the outcome, with misprints in (11), (19) and (28).

    Args:
        X: ``(n, d)``.
        y: ``(n,)``.
        width: k.
        moments: The first four of R; None takes the exact expectations.
        networks: Networks to draw, to compare with.
        seed: Of these.
    """
    x, labels = as_float64(X), as_float64(y).flatten()
    if x.ndim != 2 or len(x) != len(labels) or not len(x):
        raise InputError(f"X must be (n, d) and y (n,), got {tuple(x.shape)} and {tuple(as_float64(y).shape)}")
    if not (torch.isfinite(x).all() and torch.isfinite(labels).all()):
        raise InputError("X or y has NaN or infinite entries")
    if width < 1:
        raise InputError(f"width must be at least 1, got {width}")
    if not labels.any():
        raise InputError("y is zero: there is nothing to align with")
    d = x.shape[1]
    c, b = x.mT @ (labels[:, None] * x), x.mT @ x
    a = c @ c
    a, b = a / (a.trace() / d), b / (b.trace() / d)  # rho has no scale, and powers of eight keep their range
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
        raise InputError(f"moments must be the first four of R, got {len(moments)}")
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
    """The two parts of rho's numerator (NFA paper, 9), as unnormalized traces with ``P = 4 X R X^T``.

    Attributes:
        mean: ``Tr(X^T Y E[P] Y X X^T Y E[P^2] Y X)``, exact.
        mean_of_squared_mean: The same with ``E[P]^2`` in place of ``E[P^2]``: what is left of it at infinite width.
        total: ``E Tr(X^T Y P Y X X^T Y P^2 Y X)``, by free probability.
    """

    mean: float
    mean_of_squared_mean: float
    total: float

    @property
    def covariance(self) -> float:
        """What the mean term leaves: the trace of the covariance of the two matrices; it vanishes with the width."""
        return self.total - self.mean


def numerator_terms(X: Any, y: Any, width: int) -> NumeratorTerms:
    r"""The mean and covariance terms of the numerator of rho, for the quadratic network (NFA paper, 9).

    ``E[R] = I`` and ``E[R B R] = (1 + 5/k) B + (3/k) Tr(B) I``, so that ``E[P] = 4 X X^T`` and
    ``E[P^2] = 16 X E[R B R] X^T``.

    Args:
        X: ``(n, d)``.
        y: ``(n,)``.
        width: k.
    """
    nfm, agop = expected_derivatives(X, y, width)
    _, at_infinity = expected_derivatives(X, y, 10**15)
    found = predict_quadratic(X, y, width)
    x, labels = as_float64(X), as_float64(y).flatten()
    d = x.shape[1]
    c, b = x.mT @ (labels[:, None] * x), x.mT @ x
    # The prediction is of A and B with a normalized trace of 1; A enters twice and B once, and d traces are summed.
    scale = (float((c @ c).trace()) / d) ** 2 * (float(b.trace()) / d) * d
    return NumeratorTerms(float((nfm * agop).sum()), float((nfm * at_infinity).sum()), 4 * 16 * scale * found.numerator)


def isotropic_numerator(A: Any, moments: Sequence[float]) -> float:
    r"""``tr[A R A R R]`` of data with ``X^T X = I``: ``tr[A]^2 tr[R^3] + tr[R] tr[R^2] tr[(A - tr[A])^2]``.

    Where the inputs are white, the numerator of rho has only these two terms (NFA paper, first version, section 4.2).
    Traces are divided by d.

    Args:
        A: ``(X^T Y X)^2``, ``(d, d)``.
        moments: Of R, the first four, as `readout_moments` gives them.
    """
    a = as_float64(A)
    if a.ndim != 2 or a.shape[0] != a.shape[1] or not a.numel():
        raise InputError(f"A must be a square matrix, got shape {tuple(a.shape)}")
    first, second, third, _ = _four(moments)
    mean = float(a.trace()) / len(a)
    spread = float((a @ a).trace()) / len(a) - mean**2
    return mean**2 * third + first * second * spread


def expected_derivatives(X: Any, y: Any, width: int) -> tuple[Tensor, Tensor]:
    r"""``E[W'^T W']`` and ``E[W'^T K W']`` at the start, over a and W (NFA paper, proposition 16, corrected).

    For ``f = a^T (W x)^2`` with ``a ~ N(0, 1)`` and ``W ~ N(0, 1/k)`` of output zero, half the sum of squared errors,
    and K without 1/n: ``4 C^2`` and ``16 [(1 + 5/k) C B C + (3/k) Tr(B) C^2]``. The printed second one drops terms.

    Args:
        X: ``(n, d)``.
        y: ``(n,)``.
        width: k.
    """
    x, labels = as_float64(X), as_float64(y).flatten()
    if x.ndim != 2 or len(x) != len(labels) or width < 1:
        raise InputError(f"X must be (n, d), y (n,) and width at least 1, got {tuple(x.shape)}, {len(labels)}, {width}")
    c, b = x.mT @ (labels[:, None] * x), x.mT @ x
    square = c @ c
    return 4 * square, 16 * ((1 + 5 / width) * c @ b @ c + 3 / width * b.trace() * square)
