"""Alignment of wide networks at the start of training: on the sphere, and with depth (NFA paper, 4.2 and E)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from featlearn.errors import InputError
from featlearn.numerics import Seed, as_generator, cosine
from featlearn.numerics.linalg import as_float64
from featlearn.theory.dual_kernels import Function, as_activation

__all__ = ["WideAlignment", "derivative_correlation", "predict_depth", "sphere_alignment"]


@dataclass(frozen=True, eq=False)
class WideAlignment:
    """Correlation of the first derivatives of the centred NFM and AGOP at the start.

    Attributes:
        rho: ``cos(X^T Y P Y X, X^T Y P^2 Y X)``.
        ptk: The expected pre-activation tangent kernel P, ``(n, n)``, up to a factor.
    """

    rho: float
    ptk: Tensor


def derivative_correlation(X: Any, y: Any, ptk: Any) -> float:
    """``cos(X^T Y P Y X, X^T Y P^2 Y X)`` for a first layer, squared loss and zero outputs (NFA paper, 7).

    Args:
        X: Inputs of the layer, ``(n, d)``.
        y: Labels, ``(n,)``.
        ptk: P, ``(n, n)``.
    """
    x, labels, p = as_float64(X), as_float64(y).flatten(), as_float64(ptk)
    if x.ndim != 2 or len(x) != len(labels) or p.shape != (len(x), len(x)):
        raise InputError(
            f"X must be (n, d), y (n,) and the kernel (n, n), got {tuple(x.shape)}, {len(labels)}, {tuple(p.shape)}"
        )
    if not (torch.isfinite(x).all() and torch.isfinite(labels).all() and torch.isfinite(p).all()):
        raise InputError("X, y or the kernel has NaN or infinite entries")
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
    """Rho of an infinitely wide two-layer network on the sphere of radius sqrt(d) (NFA paper, theorem 9).

    It tends to 1 as d grows with n between d and d^2, if the target has a linear part: P is close to a multiple of
    ``1 1^T``, a projection.

    Args:
        d: Input dimension.
        n: Points.
        activation: A name of `featlearn.theory.dual_kernels.ACTIVATIONS`, or (phi, derivative).
        target: ``target(X) -> (n,)``; None is ``x_1``, of length one.
        seed: Of the points.

    Time: n^2 (d + a quadrature, for activations without a closed form).
    """
    if d < 1 or n < 1:
        raise InputError(f"d and n must be at least 1, got {d} and {n}")
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
    r"""Rho of the first layer of a deep network, to first order: with E[P] in place of P (NFA paper, appendix E).

    In the limit of infinite width ``E[P] = prod_l E[phi'(u_l) phi'(v_l)]`` over the hidden layers, with covariances
    ``q_1 = variance x.x' / d`` and ``q_(l+1) = E[phi(u_l) phi(v_l)]`` (twice that for ReLU, which keeps their size; rho
    does not depend on it). The quadratic network of two hidden layers is exact at finite width, with ``q = x.x'`` and
    ``p = q_ii q_jj``: ``k (k - 1) q (p + 2 q^2) + 3 k (9 p q + 6 q^3)``, up to a factor.

    Args:
        X: ``(n, d)``.
        y: ``(n,)``.
        hidden: Number of hidden layers.
        activation: A name, or (phi, derivative).
        width: Of both hidden layers, for the quadratic network of two; None is the limit.
        variance: Of the weights, times the number of inputs of a layer.
    """
    x, labels = as_float64(X), as_float64(y)
    if x.ndim != 2 or not len(x):
        raise InputError(f"X must be (n, d), got shape {tuple(x.shape)}")
    if hidden < 1 or not variance > 0:
        raise InputError(f"hidden must be at least 1 and variance above 0, got {hidden} and {variance}")
    if width is not None:
        if activation != "quadratic" or hidden != 2 or width < 1:
            raise InputError("a finite width is known for the quadratic network of two hidden layers alone, from 1 on")
        q = x @ x.mT
        p = q.diagonal()[:, None] * q.diagonal()
        ptk = width * (width - 1) * q * (p + 2 * q.square()) + 3 * width * (9 * p * q + 6 * q**3)
        ptk = ptk / ptk.diagonal().mean()
        return WideAlignment(derivative_correlation(x, labels, ptk), ptk)
    kernels = as_activation(activation)
    q = variance * (x @ x.mT) / x.shape[1]
    ptk = torch.ones_like(q)
    for layer in range(hidden):
        size = q.diagonal().clamp_min(0)
        rows, columns = size[:, None].expand_as(q), size.expand_as(q)
        # Rounding may put a correlation of 1 beyond it.
        limit = (rows * columns).sqrt()
        q = q.clamp(-limit, limit)
        ptk = ptk * kernels.slope_kernel(rows, q, columns)
        if layer + 1 < hidden:
            q = variance * kernels.kernel(rows, q, columns) * (2.0 if activation == "relu" else 1.0)
    return WideAlignment(derivative_correlation(x, labels, ptk), ptk)
