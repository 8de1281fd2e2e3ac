"""Kernels of infinitely wide fully connected networks.

References:
    Lee, Bahri, Novak, Schoenholz, Pennington & Sohl-Dickstein (2018), https://arxiv.org/abs/1711.00165.
    Jacot, Gabriel & Hongler (2018), https://arxiv.org/abs/1806.07572, theorem 1.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from featlearn._utils.memory import check_fits
from featlearn._utils.validation import check_int, check_number
from featlearn.errors import InputError
from featlearn.linalg.gaussian_quadrature import activation_constants, gaussian_means
from featlearn.linalg.matrices import as_float64
from featlearn.theory._dual_kernels import Activation, Function, as_activation

_COPIES = 8.0  # float64 matrices of the size of a kernel in memory


@dataclass(frozen=True, eq=False)
class InfiniteKernels:
    """Kernels of an infinitely wide network, from `infinite_kernels`.

    Attributes:
        nngp: Covariance of one output over random networks, shape ``(n, m)`` in float64.
        ntk: Tangent kernel of one output, of the same shape; with several outputs, the kernel of each, and zero
            between them.
    """

    nngp: Tensor
    ntk: Tensor


def infinite_kernels(
    X: Any,
    Z: Any = None,
    hidden: int = 1,
    activation: str | tuple[Function, Function] = "relu",
    *,
    weight_variance: float = 1.0,
    bias_variance: float = 0.0,
    normalized: bool = False,
) -> InfiniteKernels:
    r"""Compute the NNGP and tangent kernels of an infinitely wide fully connected network at initialization.

    The network is in the NTK parameterization, ``h = s_w W x / sqrt(k_in) + s_b b`` with standard normal W and b, as
    `featlearn.models.ntk_mlp` for ``s_w = 1`` and ``s_b = 0``, and all parameters are trained. With
    ``T(q) = E[phi(u) phi(v)]`` and ``T'(q) = E[phi'(u) phi'(v)]`` over pre-activations of covariance q,

        q_1 = s_w^2 x.x' / d + s_b^2,            Theta_1 = q_1,
        q_(l+1) = s_w^2 T(q_l) + s_b^2,          Theta_(l+1) = q_(l+1) + s_w^2 Theta_l T'(q_l).

    The kernels of one network of width k differ from these by about ``1/sqrt(k)``. Closed forms for "relu", "gelu",
    "erf", "quadratic", "identity" and "normal-integral", and quadrature otherwise, which takes seconds per layer for a
    few hundred points. Time: ``n m (d + hidden)``; memory: a few kernels.

    Args:
        X: Inputs, shape ``(n, d)``.
        Z: Other inputs, shape ``(m, d)``, for the kernels of X against Z. None is X against itself.
        hidden: Number of hidden layers; 0 is a linear model.
        activation: "relu", "tanh", "gelu", "silu", "softplus", "sigmoid", "erf", "quadratic", "identity" or "linear",
            "normal-integral" (whose derivative is the normal distribution function), or a pair (phi, derivative) of
            smooth functions.
        weight_variance: Variance ``s_w^2``, above 0. 2 keeps the size of ReLU networks.
        bias_variance: Variance ``s_b^2``; 0 is a network without biases.
        normalized: Whether the activation is centered and normalized under N(0, 1), as in `featlearn.models.ntk_mlp`
            by default.

    Returns:
        Both kernels.

    Raises:
        InputError: The inputs have other shapes, or are not finite, or an argument is invalid.

    Example:
        >>> import torch, featlearn as fl
        >>> from featlearn.theory import infinite_kernels
        >>> X = torch.randn(20, 10, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
        >>> limit = infinite_kernels(X, hidden=2, activation="relu").ntk
        >>> for width in (64, 1024):
        ...     widths = [10, width, width, 1]
        ...     net = fl.models.ntk_mlp(widths, activation="relu", normalized=False, generator=0, dtype=torch.float64)
        ...     print(width, round(float((fl.ntk(net, X) - limit).norm() / limit.norm()), 2))
        64 0.36
        1024 0.1

    References:
        Jacot, Gabriel & Hongler (2018), https://arxiv.org/abs/1806.07572, theorem 1.
    """
    x = _points(X, "X")
    z = x if Z is None else _points(Z, "Z")
    if x.shape[1] != z.shape[1]:
        raise InputError(f"X and Z must have the same number of columns, got {x.shape[1]} and {z.shape[1]}.")
    check_int("hidden", hidden, 0)
    check_number("weight_variance", weight_variance, above=0)
    check_number("bias_variance", bias_variance, 0)
    check_fits(_COPIES * 8.0 * len(x) * len(z), f"kernels of {len(x):,} x {len(z):,} points", "pass fewer points")
    kernels = _normalized(as_activation(activation)) if normalized else as_activation(activation)

    def covariance(products: Tensor) -> Tensor:
        return weight_variance * products + bias_variance

    first = covariance(x.square().mean(1))
    second = covariance(z.square().mean(1))
    q = covariance(x @ z.mT / x.shape[1])
    theta = q
    for _ in range(hidden):
        pairs = _within(q, first, second)
        moved = kernels.slope_kernel(first[:, None], pairs, second[None])
        q = covariance(kernels.kernel(first[:, None], pairs, second[None]))
        first, second = (covariance(kernels.kernel(size, size, size)) for size in (first, second))
        theta = q + weight_variance * theta * moved
    return InfiniteKernels(q, theta)


def _points(X: Any, name: str) -> Tensor:
    x = as_float64(X)
    if x.ndim != 2 or not len(x) or not x.shape[1]:
        raise InputError(f"{name} must have shape (n, d), got shape {tuple(x.shape)}.")
    if not torch.isfinite(x).all():
        raise InputError(f"{name} must be finite, got NaN or infinite entries.")
    return x


def _within(q: Tensor, first: Tensor, second: Tensor) -> Tensor:
    """Return covariances that rounding has not made larger than the variances allow."""
    limit = (first[:, None] * second[None]).sqrt()
    return q.clamp(-limit, limit)


def _normalized(activation: Activation) -> Activation:
    """Return the kernels of an activation with mean 0 and variance 1 under N(0, 1)."""
    phi, constants = activation.function, activation_constants(activation.function)

    def kernel(a: Tensor, b: Tensor, c: Tensor) -> Tensor:
        means = (gaussian_means(phi, a.sqrt()), gaussian_means(phi, c.sqrt()))
        centered = activation.kernel(a, b, c) - constants.mean * (means[0] + means[1]) + constants.mean**2
        return centered / constants.std**2

    def slope_kernel(a: Tensor, b: Tensor, c: Tensor) -> Tensor:
        return activation.slope_kernel(a, b, c) / constants.std**2

    return Activation(kernel, slope_kernel, lambda x: (phi(x) - constants.mean) / constants.std)
