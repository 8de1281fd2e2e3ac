"""Initial alignment of a quadratic network, predicted from its data by sampling and by free probability.

References:
    Beaglehole, Mitliagkas & Agarwala, "Feature learning as alignment", https://openreview.net/forum?id=JXCe2ZcUXr,
    section 4 and appendix E.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from featlearn._utils.rng import Seed, as_generator
from featlearn._utils.validation import check_int, check_number, check_option
from featlearn.errors import InputError
from featlearn.linalg import cosine
from featlearn.linalg.matrices import as_float64
from featlearn.theory._finite_size_traces import expected_trace
from featlearn.theory._free_probability import alternating_trace, matrix_moments

_FIRST_BATCH = 32, 256
_FIRST_FLOPS = 2**31
_BATCH_ENTRIES = 2**22
_FREE_WIDTH = 512
_FREE_ERROR = 0.005
"""Free probability was within this of networks from width max(512, 4 d) on, if exact traces changed it less."""


@dataclass(frozen=True)
class QuadraticPrediction:
    """Predicted correlation of the centered NFM and AGOP at the start of training.

    Attributes:
        rho: Mean correlation over networks; with the method "free", ``numerator / sqrt(nfm_square * agop_square)``.
        numerator: Normalized trace ``tr[A R A R B R]`` with ``A = (X^T Y X)^2`` and ``B = X^T X``, both scaled to
            normalized trace 1: its exact expectation, or with the method "free" its limit.
        nfm_square: Normalized trace ``tr[A R A R]``, as for the numerator.
        agop_square: Normalized trace ``tr[A R B R A R B R]``, as for the numerator.
        moments: First four moments of ``R = W^T diag(a^2) W``.
        observed: Correlations rho of random networks, one per network.
        method: Method of rho, "sampled" or "free".
        rho_error: Standard error of rho from a finite number of draws; 0 with the method "free".
        spread: Standard deviation of the correlation over networks; NaN with the method "free".
        draws: Number of draws of R behind rho; 0 with the method "free".
        free_rho: Correlation by free probability, the formula of the paper; NaN if it is not defined.
    """

    rho: float
    numerator: float
    nfm_square: float
    agop_square: float
    moments: tuple[float, float, float, float]
    observed: tuple[float, ...] = ()
    method: Literal["sampled", "free"] = "free"
    rho_error: float = 0.0
    spread: float = math.nan
    draws: int = 0
    free_rho: float = math.nan

    @property
    def ratio_of_means(self) -> float:
        """Ratio ``numerator / sqrt(nfm_square * agop_square)`` of the traces, which is not the mean of the ratio."""
        return self.numerator / math.sqrt(self.nfm_square * self.agop_square)

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
    method: Literal["sampled", "free"] | None = None,
    draws: int = 2000,
    tolerance: float = 1e-3,
) -> QuadraticPrediction:
    r"""Predict rho of ``f = a^T (W x)^2`` at the start of training on given data.

    The readout is ``a ~ N(0, 1)`` and the weights are ``W ~ N(0, 1/k)``. The second derivatives in time of the centered
    NFM and AGOP at zero are ``C R C`` and ``C R B R C`` up to factors, with ``C = X^T diag(y) X``, ``B = X^T X``,
    ``R = W^T diag(a^2) W``, so that with ``A = C^2``

    ``rho = tr[A R A R B R] / sqrt(tr[A R A R] tr[A R B R A R B R])``.

    The method "sampled" averages rho over random draws of R, without training: an unbiased estimate of the mean over
    networks at every d and k. R is drawn in the row space of X only, and traces are computed with matrices of size
    min(k, rank X).

    The method "free" is the formula of the paper, with its misprints in (11), (19) and (28) corrected: R is
    asymptotically free of C and B for large d and k, so the three traces follow from the moments of R and the mixed
    moments of A and B by `alternating_trace`. It is a ratio of expectations, and the traces fluctuate: at d = 32, the
    squared coefficient of variation of ``tr[A R B R A R B R]`` is about 1 for k = 128 and above 10 for k = 32, in
    samples of 20,000. The mean of the ratio was larger than the ratio of the means by about 0.01 at d/k = 1/4, and by
    0.04 to 0.15 at d >= k. The bias vanishes for d << k, but slowly if few directions dominate A and B: on
    `featlearn.datasets.reversing_task`, it can be 0.04 at d = 128, k = 8192. Exact traces at finite size,
    `expected_trace`, do not reduce it, and corrections of second order in the variances diverge.

    Args:
        X: Inputs, shape ``(n, d)``.
        y: Labels, shape ``(n,)``, not all zero.
        width: Width k of the network, at least 1.
        moments: First four moments of R for the method "free". Default: the exact expectations of `readout_moments`.
        networks: Number of random networks to draw for comparison.
        seed: Generator or seed of the random networks, and, in a stream of its own, of the draws of R. Default: seed 0.
        method: "sampled" or "free". Default: "free" if moments are given, else "sampled".
        draws: Largest number of draws of R for the method "sampled", at least 2. Time per draw: k d^2 + d^3.
        tolerance: Standard error of rho at which the method "sampled" stops, at least 0.

    Returns:
        The prediction, with the correlations of the random networks.

    Raises:
        InputError: If an argument is invalid, or moments are given with the method "sampled".

    Warns:
        UserWarning: If moments select the method "free" where it is biased: for a width below 512 or 4 d, or where
            exact traces change the ratio by more than 0.005.

    Example:
        >>> import torch
        >>> from featlearn.theory import predict_quadratic
        >>> _ = torch.manual_seed(0)
        >>> X = torch.randn(100, 20)
        >>> y = X[:, 0] * X[:, 1]
        >>> prediction = predict_quadratic(X, y, width=8, networks=200, seed=0)
        >>> round(prediction.rho, 2), round(prediction.observed_mean, 2)
        (0.96, 0.96)
        >>> round(prediction.free_rho, 2)  # the formula of the paper, for d << k
        0.83
        >>> wide = predict_quadratic(X, y, width=2000)
        >>> round(wide.rho, 2), round(wide.free_rho, 2)
        (0.98, 0.98)

    References:
        Beaglehole, Mitliagkas & Agarwala, "Feature learning as alignment", https://openreview.net/forum?id=JXCe2ZcUXr,
        section 4.4 and appendix F.
    """
    x, labels = as_float64(X), as_float64(y).flatten()
    if x.ndim != 2 or len(x) != len(labels) or not len(x):
        raise InputError(f"X must have shape (n, d) and y (n,), got {tuple(x.shape)} and {tuple(as_float64(y).shape)}.")
    if not (torch.isfinite(x).all() and torch.isfinite(labels).all()):
        raise InputError("X and y must be finite, got NaN or infinite entries.")
    check_int("width", width)
    check_int("draws", draws, 2)
    check_number("tolerance", tolerance, 0)
    chosen = check_option("method", method or ("sampled" if moments is None else "free"), ("sampled", "free"))
    if chosen == "sampled" and moments is not None:
        raise InputError("moments must be None with method='sampled', which draws R. Pass method='free' to use them.")
    if not labels.any():
        raise InputError("y must not be zero everywhere: rho is not defined then.")
    d = x.shape[1]
    c, b = _label_and_input_squares(x, labels)
    a = c @ c
    m = readout_moments(d, width) if moments is None else _four(moments)

    def of_r(word: tuple[int, ...]) -> float:
        return float(m[len(word) - 1])

    words = ([a, a, b], [a, a], [a, b, a, b])
    free = _Traces(*(alternating_trace(matrix_moments(word), of_r, len(word)) for word in words))
    generator = as_generator(seed, "quadratic alignment")
    observed = tuple(_observed(c, b, width, generator) for _ in range(networks))
    if chosen == "free":
        if method is None:
            exact = _Traces(*(expected_trace(word, width) for word in words))
            _warn_of_bias(abs(free.ratio - exact.ratio), d, width)
        return QuadraticPrediction(free.ratio, *free, m, observed, "free", free_rho=free.ratio)
    values = _sample(c, b, width, draws, tolerance, as_generator(seed, "quadratic prediction"))
    spread, count = float(values.std()), len(values)
    exact = _Traces(*(expected_trace(word, width) for word in words))
    error = spread / math.sqrt(count)
    return QuadraticPrediction(
        float(values.mean()), *exact, m, observed, "sampled", error, spread, count, free_rho=free.ratio
    )


class _Traces(NamedTuple):
    numerator: float
    nfm_square: float
    agop_square: float

    @property
    def ratio(self) -> float:
        square = self.nfm_square * self.agop_square
        return self.numerator / math.sqrt(square) if square > 0 else math.nan


def _warn_of_bias(change: float, d: int, width: int) -> None:
    if width < max(_FREE_WIDTH, 4 * d) or not change <= _FREE_ERROR:
        warnings.warn(
            f"moments select method='free', a ratio of expectations that is biased for d={d} and width={width} on this "
            "data, since its traces fluctuate between networks; use method='sampled' for the mean over networks.",
            UserWarning,
            stacklevel=3,
        )


def _label_and_input_squares(x: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
    """Return ``X^T Y X`` and ``X^T X``, scaled: rho is scale-free, and the eighth powers stay in range."""
    x, labels = x / x.abs().max().clamp_min(torch.finfo(x.dtype).tiny), labels / labels.abs().max()
    c, b = x.mT @ (labels[:, None] * x), x.mT @ x
    if not c.any():
        raise InputError("X^T diag(y) X must not be zero: rho is not defined then. Check for inputs that are all zero.")
    d = x.shape[1]
    return c / (c.norm() / math.sqrt(d)), b / (b.trace() / d)


def _sample(c: Tensor, b: Tensor, width: int, draws: int, tolerance: float, generator: torch.Generator) -> Tensor:
    """Draw rho until its mean has a given standard error, in batches that double their total, shape ``(draws,)``."""
    # Only the row space of X matters, and the law of W is invariant under rotation.
    spectrum, vectors = torch.linalg.eigh(b)
    kept = spectrum > spectrum[-1] * len(b) * torch.finfo(b.dtype).eps
    spectrum, basis = spectrum[kept], vectors[:, kept]
    c = basis.mT @ c @ basis
    # Many draws where they are cheap: the standard error of few is itself uncertain.
    least, most = _FIRST_BATCH
    first = max(least, min(most, _FIRST_FLOPS // (width * len(c) ** 2)))
    values = c.new_empty(0)
    while len(values) < draws and (len(values) < 2 or float(values.std()) > tolerance * math.sqrt(len(values))):
        more = min(max(first, len(values)), draws - len(values))
        step = max(1, _BATCH_ENTRIES // (len(c) * max(len(c), width)))
        parts = [_rhos(c, spectrum, width, min(step, more - i), generator) for i in range(0, more, step)]
        values = torch.cat([values, *parts])
    return values


def _rhos(c: Tensor, spectrum: Tensor, width: int, count: int, generator: torch.Generator) -> Tensor:
    """Draw rho of some networks, for ``B = diag(spectrum)``."""
    d = len(c)
    a = torch.randn(count, width, 1, generator=generator, dtype=torch.float64)
    v = a * torch.randn(count, width, d, generator=generator, dtype=torch.float64) / math.sqrt(width * d)
    u = v @ c
    if width < d:  # traces of products of width x width matrices
        first, second = u @ u.mT, (v * spectrum) @ v.mT
        both = first @ second
        cross, squares = (both * first).sum((1, 2)), (both * both.mT).sum((1, 2))
    else:
        half = u.mT @ v  # C R
        first, second = half @ c, (half * spectrum) @ half.mT
        cross, squares = (first * second).sum((1, 2)), second.square().sum((1, 2))
    return cross / (first.square().sum((1, 2)) * squares).sqrt()


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
        total: Exact value of ``E Tr(X^T Y P Y X X^T Y P^2 Y X)``.

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
    ``E[P^2] = 16 X E[R B R] X^T``. The total is ``64 E Tr[A R A R B R]``, by `expected_trace`.

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
        10 0.7214
        1000 0.023

    References:
        Beaglehole, Mitliagkas & Agarwala, "Feature learning as alignment", https://openreview.net/forum?id=JXCe2ZcUXr,
        equation 9.
    """
    nfm, agop = expected_derivatives(X, y, width)
    _, at_infinity = expected_derivatives(X, y, 10**15)
    x, labels = as_float64(X), as_float64(y).flatten()
    c, b = x.mT @ (labels[:, None] * x), x.mT @ x
    total = 4 * 16 * len(b) * expected_trace([c @ c, c @ c, b], width)
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
