"""Alignment of infinitely wide networks at initialization.

References:
    Beaglehole, Mitliagkas & Agarwala, "Feature learning as alignment", https://openreview.net/forum?id=JXCe2ZcUXr,
    section 4.2 and appendix E.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from featlearn._utils.rng import Seed, as_generator
from featlearn._utils.validation import check_int, check_number
from featlearn.errors import InputError
from featlearn.linalg import cosine
from featlearn.linalg.matrices import as_float64
from featlearn.theory._dual_kernels import Function, as_activation


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
