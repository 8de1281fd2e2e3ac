"""Alignment of infinitely wide networks at initialization.

References:
    Beaglehole, Mitliagkas & Agarwala, "Feature learning as alignment", https://openreview.net/forum?id=JXCe2ZcUXr,
    section 4.2 and appendix E.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from featlearn._utils.rng import Seed, as_generator
from featlearn._utils.validation import check_int, check_number
from featlearn.errors import InputError
from featlearn.linalg import cosine
from featlearn.linalg.matrices import as_float64

Function = Callable[[Tensor], Tensor]
Kernel = Callable[[Tensor, Tensor, Tensor], Tensor]
_REACH = 9.5  # the normal density is 1e-20 there
_STEP = 0.2
_NODES = 1024


@dataclass(frozen=True)
class Activation:
    """Dual kernels of an activation in an infinitely wide layer.

    Kernels are functions of the covariance ``(q_ii, q_ij, q_jj)`` of two pre-activations.

    Attributes:
        kernel: Kernel ``E[phi(u) phi(v)]``.
        slope_kernel: Kernel ``E[phi'(u) phi'(v)]``.
    """

    kernel: Kernel
    slope_kernel: Kernel


def _relu(q11: Tensor, q12: Tensor, q22: Tensor) -> Tensor:
    """Return the kernel of Cho and Saul, ``sqrt(q11 q22) (sin t + (pi - t) cos t) / (2 pi)``, with the angle t."""
    size = (q11 * q22).sqrt()
    t = _angle(q12, size)
    return size * (t.sin() + (math.pi - t) * t.cos()) / (2 * math.pi)


def _step(q11: Tensor, q12: Tensor, q22: Tensor) -> Tensor:
    size = (q11 * q22).sqrt()
    # The derivative of ReLU is 0 at 0.
    return torch.where(size > 0, (math.pi - _angle(q12, size)) / (2 * math.pi), 0.0)


def _angle(q12: Tensor, size: Tensor) -> Tensor:
    return (q12 / size.clamp_min(torch.finfo(size.dtype).tiny)).clamp(-1, 1).arccos()


def _erf(q11: Tensor, q12: Tensor, q22: Tensor) -> Tensor:
    return 2 / math.pi * (2 * q12 / ((1 + 2 * q11) * (1 + 2 * q22)).sqrt()).clamp(-1, 1).arcsin()


def _erf_slope(q11: Tensor, q12: Tensor, q22: Tensor) -> Tensor:
    return 4 / math.pi / ((1 + 2 * q11) * (1 + 2 * q22) - 4 * q12.square()).sqrt()


def _cdf(q11: Tensor, q12: Tensor, q22: Tensor) -> Tensor:
    """Return the kernel of the normal distribution function, ``P(w < u, w' < v)`` for independent normal w, w'."""
    return 0.25 + (q12 / ((1 + q11) * (1 + q22)).sqrt()).clamp(-1, 1).arcsin() / (2 * math.pi)


def _normal_integral(q11: Tensor, q12: Tensor, q22: Tensor) -> Tensor:
    """Return the kernel of ``x Phi(x) + phi(x)``, the antiderivative of the distribution function."""
    determinant = (1 + q11) * (1 + q22) - q12.square()
    return q12 * _cdf(q11, q12, q22) + determinant.sqrt() / (2 * math.pi)


def _gelu(q11: Tensor, q12: Tensor, q22: Tensor) -> Tensor:
    """Return the kernel of ``x Phi(x)``, from Stein's identity, with ``E[phi(u) phi(v)] = 1 / (2 pi sqrt(D))``."""
    square = q12.square()
    determinant = (1 + q11) * (1 + q22) - square
    rest = q11 * q22 - square + square / (1 + q11) + square / (1 + q22)
    return q12 * _cdf(q11, q12, q22) + rest / (2 * math.pi * determinant.sqrt())


def _gelu_slope(q11: Tensor, q12: Tensor, q22: Tensor) -> Tensor:
    """Return the kernel of ``Phi(x) + x phi(x)``."""
    determinant = (1 + q11) * (1 + q22) - q12.square()
    rest = 1 / (1 + q11) + 1 / (1 + q22) + 1 / determinant
    return _cdf(q11, q12, q22) + q12 * rest / (2 * math.pi * determinant.sqrt())


def by_quadrature(phi: Function, slope: Function) -> Activation:
    """Return the kernels of a function and its derivative by quadrature."""
    return Activation(lambda a, b, c: pair_mean(phi, a, b, c), lambda a, b, c: pair_mean(slope, a, b, c))


def _tanh_slope(x: Tensor) -> Tensor:
    return 1 - x.tanh().square()


def _sigmoid_slope(x: Tensor) -> Tensor:
    return x.sigmoid() * (-x).sigmoid()


def _silu_slope(x: Tensor) -> Tensor:
    return x.sigmoid() * (1 + x * (-x).sigmoid())


_LINEAR = Activation(lambda a, b, c: b, lambda a, b, c: torch.ones_like(b))

ACTIVATIONS = {
    "relu": Activation(_relu, _step),
    "tanh": by_quadrature(torch.tanh, _tanh_slope),
    "gelu": Activation(_gelu, _gelu_slope),
    "silu": by_quadrature(F.silu, _silu_slope),
    "softplus": by_quadrature(F.softplus, torch.sigmoid),
    "sigmoid": by_quadrature(torch.sigmoid, _sigmoid_slope),
    "erf": Activation(_erf, _erf_slope),
    "quadratic": Activation(lambda a, b, c: a * c + 2 * b.square(), lambda a, b, c: 4 * b),
    "identity": _LINEAR,
    "linear": _LINEAR,
    "normal-integral": Activation(_normal_integral, _cdf),
}
"""Activations of `featlearn.models`, "linear" for "identity", and "normal-integral", ``x Phi(x) + phi(x)``.

The derivative of "normal-integral" is the normal distribution function. "tanh", "silu", "softplus" and "sigmoid" have
no closed form and use quadrature.
"""


def as_activation(activation: str | tuple[Function, Function]) -> Activation:
    """Return the kernels of an activation by its name, or of a function and its derivative by quadrature."""
    if isinstance(activation, str):
        if activation not in ACTIVATIONS:
            names = ", ".join(map(repr, ACTIVATIONS))
            raise InputError(f"activation must be (phi, derivative) or one of {names}; got {activation!r}.")
        return ACTIVATIONS[activation]
    if not isinstance(activation, tuple) or len(activation) != 2 or not all(callable(f) for f in activation):
        raise InputError(f"activation must be a name or a pair (phi, derivative) of functions, got {activation!r}.")
    return by_quadrature(*activation)


def pair_mean(function: Function, q11: Tensor, q12: Tensor, q22: Tensor) -> Tensor:
    """Compute ``E[f(u) f(v)]`` over centered Gaussian (u, v), elementwise, by a product of midpoint rules.

    The midpoint rule converges exponentially for analytic functions. Its step is 0.2 standard deviations, or less for
    large variances, where a Gauss-Hermite rule fails: 96 nodes have an error of 3% for tanh' at variance 10. The result
    is exact to about 1e-10 for tanh, sigmoid and similar functions up to variances of about 200. A jump, as in the
    derivative of ReLU, causes errors of about 1e-3: use its closed form. Time: 96^2 values of the function per entry of
    variance up to 2, up to 1024^2 for large variances.

    Args:
        function: Smooth elementwise function.
        q11: Variances of u.
        q12: Covariances of u and v.
        q22: Variances of v.

    Returns:
        The expectations, of the broadcast shape.
    """
    together = torch.broadcast_tensors(q11, q12, q22)  # type: ignore[no-untyped-call]
    shape = together[0].shape
    a, b, c = (q.to(torch.float64).reshape(-1) for q in together)
    # Entries of similar variance share a rule.
    largest = torch.maximum(a, c).sqrt()
    order = largest.argsort(descending=True)
    means = torch.empty_like(a)
    first = 0
    while first < len(a):
        z, w = _midpoints(float(largest[order[first]]))
        count = max(1, 2**21 // len(z) ** 2)
        places = order[first : first + count]
        s11, s12, s22 = (q[places, None] for q in (a, b, c))
        root = s11.sqrt()
        u = root * z
        share = torch.where(root > 0, s12 / root.clamp_min(torch.finfo(torch.double).tiny), 0.0)
        rest = (s22 - share.square()).clamp_min(0).sqrt()
        v = share[:, :, None] * z[:, None] + rest[:, :, None] * z
        means[places] = ((function(u) * w)[:, :, None] * function(v) * w).sum((1, 2))
        first += count
    return means.reshape(shape)


def _midpoints(deviation: float) -> tuple[Tensor, Tensor]:
    """Return a midpoint rule for N(0, 1), fine enough for functions of a variable with a given standard deviation."""
    step = min(_STEP, 0.3 / deviation if deviation > 0 else _STEP)
    half = min(math.ceil(_REACH / step), _NODES // 2)
    z = (torch.arange(-half, half, dtype=torch.float64) + 0.5) * (_REACH / half)
    w = torch.exp(-z.square() / 2)
    return z, w / w.sum()


@dataclass(frozen=True, eq=False)
class WideAlignment:
    """Correlation of the derivatives of the centered NFM and AGOP at the start of training.

    Attributes:
        rho: Correlation ``cos(X^T Y P Y X, X^T Y P^2 Y X)``.
        ptk: Expected pre-activation tangent kernel P up to a factor, shape ``(n, n)``.
    """

    rho: float
    ptk: Tensor


def derivative_correlation(X: Any, y: Any, ptk: Any) -> float:
    """Compute ``cos(X^T Y P Y X, X^T Y P^2 Y X)`` for a first layer, squared loss and zero outputs.

    Args:
        X: Inputs of the layer, shape ``(n, d)``.
        y: Labels, shape ``(n,)``.
        ptk: Pre-activation tangent kernel P, shape ``(n, n)``.

    Returns:
        The correlation.

    Example:
        >>> import torch
        >>> from featlearn.theory import derivative_correlation
        >>> _ = torch.manual_seed(0)
        >>> X, y = torch.randn(30, 5), torch.randn(30)
        >>> round(derivative_correlation(X, y, torch.eye(30)), 4)  # P^2 = P
        1.0
        >>> round(derivative_correlation(X, y, X @ X.T), 4)
        0.9942

    References:
        Beaglehole, Mitliagkas & Agarwala, "Feature learning as alignment", https://openreview.net/forum?id=JXCe2ZcUXr,
        equation 7.
    """
    x, labels, p = as_float64(X), as_float64(y).flatten(), as_float64(ptk)
    if x.ndim != 2 or len(x) != len(labels) or p.shape != (len(x), len(x)):
        raise InputError(
            f"X must have shape (n, d), y (n,), ptk (n, n), got {tuple(x.shape)}, ({len(labels)},), {tuple(p.shape)}."
        )
    if not (torch.isfinite(x).all() and torch.isfinite(labels).all() and torch.isfinite(p).all()):
        raise InputError("X, y and ptk must be finite, got NaN or infinite entries.")
    moved = labels[:, None] * x
    once = p @ moved
    return cosine(moved.mT @ once, once.mT @ once)


def sphere_alignment(
    d: int,
    n: int,
    activation: str | tuple[Function, Function] = "normal-integral",
    target: Callable[[Tensor], Tensor] | None = None,
    *,
    seed: Seed = None,
) -> WideAlignment:
    """Compute rho of an infinitely wide two-layer network on the sphere of radius sqrt(d).

    It tends to 1 as d grows with n between d and d^2, if the target has a linear part: P is close to a multiple of the
    projection ``1 1^T``. Time: n^2 d, and a quadrature per pair of points for activations without a closed form.

    Args:
        d: Input dimension, at least 1.
        n: Number of points, at least 1.
        activation: "relu", "tanh", "gelu", "silu", "softplus", "sigmoid", "erf", "quadratic", "identity" or "linear",
            "normal-integral" (whose derivative is the normal distribution function), or a pair (phi, derivative) of
            smooth functions.
        target: Function from inputs of shape ``(n, d)`` to labels of shape ``(n,)``. Default: the first coordinate.
        seed: Generator or seed of the points. Default: seed 0.

    Returns:
        The correlation and the kernel.

    Example:
        >>> from featlearn.theory import sphere_alignment
        >>> for d in (10, 50, 200):
        ...     print(d, round(sphere_alignment(d, n=2 * d, activation="relu", seed=0).rho, 3))
        10 0.994
        50 0.997
        200 0.999

    References:
        Beaglehole, Mitliagkas & Agarwala, "Feature learning as alignment", https://openreview.net/forum?id=JXCe2ZcUXr,
        theorem 9.
    """
    check_int("d", d)
    check_int("n", n)
    generator = as_generator(seed, "sphere")
    x = torch.randn(n, d, generator=generator, dtype=torch.float64)
    x *= d**0.5 / x.norm(dim=1, keepdim=True)
    y = x[:, 0] if target is None else as_float64(target(x)).flatten()
    q = (x @ x.mT / d).clamp(-1, 1).fill_diagonal_(1.0)
    one = torch.ones((), dtype=torch.float64)
    ptk = as_activation(activation).slope_kernel(one, q, one)
    return WideAlignment(derivative_correlation(x, y, ptk), ptk)


def predict_depth(
    X: Any,
    y: Any,
    hidden: int = 2,
    activation: str | tuple[Function, Function] = "relu",
    *,
    width: int | None = None,
    variance: float = 1.0,
) -> WideAlignment:
    r"""Predict rho of the first layer of a deep network to first order, with E[P] instead of P.

    In the limit of infinite width ``E[P] = prod_l E[phi'(u_l) phi'(v_l)]`` over the hidden layers, with covariances
    ``q_1 = variance x.x' / d`` and ``q_(l+1) = E[phi(u_l) phi(v_l)]`` (twice that for ReLU, which keeps their size; rho
    does not depend on it). The quadratic network of two hidden layers is exact at finite width, with ``q = x.x'`` and
    ``p = q_ii q_jj``: ``k (k - 1) q (p + 2 q^2) + 3 k (9 p q + 6 q^3)``, up to a factor. Expectations are closed forms
    for "relu", "gelu", "erf", "quadratic", "identity" and "normal-integral", and by quadrature otherwise, which takes
    seconds per layer for a few hundred points.

    Args:
        X: Inputs, shape ``(n, d)``.
        y: Labels, shape ``(n,)``.
        hidden: Number of hidden layers, at least 1.
        activation: "relu", "tanh", "gelu", "silu", "softplus", "sigmoid", "erf", "quadratic", "identity" or "linear",
            "normal-integral" (whose derivative is the normal distribution function), or a pair (phi, derivative) of
            smooth functions.
        width: Width of both hidden layers, for the quadratic network with two. Default: the limit.
        variance: Variance of the weights times the number of inputs of a layer, above 0.

    Returns:
        The correlation and the kernel.

    Example:
        >>> import torch
        >>> from featlearn.theory import predict_depth
        >>> _ = torch.manual_seed(0)
        >>> X = torch.randn(40, 10)
        >>> for hidden in (1, 2, 3):
        ...     print(hidden, round(predict_depth(X, X[:, 0], hidden).rho, 3))
        1 0.998
        2 0.99
        3 0.98
        >>> for activation in ("tanh", "gelu", "softplus"):
        ...     print(activation, round(predict_depth(X, X[:, 0], 2, activation).rho, 3))
        tanh 0.999
        gelu 0.993
        softplus 1.0

    References:
        Beaglehole, Mitliagkas & Agarwala, "Feature learning as alignment", https://openreview.net/forum?id=JXCe2ZcUXr,
        appendix E.
    """
    x, labels = as_float64(X), as_float64(y)
    if x.ndim != 2 or not len(x):
        raise InputError(f"X must have shape (n, d), got shape {tuple(x.shape)}.")
    check_int("hidden", hidden)
    check_number("variance", variance, above=0)
    if width is not None:
        if activation != "quadratic" or hidden != 2 or width < 1:
            raise InputError("width must be None, or at least 1 with activation='quadratic' and hidden=2.")
        q = x @ x.mT
        p = q.diagonal()[:, None] * q.diagonal()
        ptk = width * (width - 1) * q * (p + 2 * q.square()) + 3 * width * (9 * p * q + 6 * q**3)
        ptk = ptk / ptk.diagonal().mean()
        return WideAlignment(derivative_correlation(x, labels, ptk), ptk)
    kernels = as_activation(activation)
    q = variance * (x @ x.mT) / x.shape[1]
    ptk = torch.ones_like(q)
    rows, columns = torch.triu_indices(len(q), len(q))
    for layer in range(hidden):
        size = q.diagonal().clamp_min(0)
        # The kernels are symmetric; and rounding can raise a correlation above 1.
        first, second = size[rows], size[columns]
        limit = (first * second).sqrt()
        pairs = q[rows, columns].clamp(-limit, limit)
        ptk = ptk * _symmetric(kernels.slope_kernel(first, pairs, second), rows, columns, len(q))
        if layer + 1 < hidden:
            scale = variance * (2.0 if activation == "relu" else 1.0)
            q = scale * _symmetric(kernels.kernel(first, pairs, second), rows, columns, len(q))
    return WideAlignment(derivative_correlation(x, labels, ptk), ptk)


def _symmetric(values: Tensor, rows: Tensor, columns: Tensor, n: int) -> Tensor:
    matrix = values.new_empty(n, n)
    matrix[rows, columns] = values
    matrix[columns, rows] = values
    return matrix
