"""Limiting laws of tangent kernels of random networks, and of conjugate kernels of very wide ones.

References:
    Fan & Wang (2020), "Spectra of the conjugate kernel and neural tangent kernel for linear-width neural networks",
    https://arxiv.org/abs/2005.11879.

    Wang & Zhu (2021), "Deformed semicircle law and concentration of nonlinear random matrices for ultra-wide neural
    networks", https://arxiv.org/abs/2109.09304.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Literal

import torch
from torch import Tensor

from featlearn._utils.validation import check_option
from featlearn.errors import InputError
from featlearn.linalg.gaussian_quadrature import activation_constants, gaussian_mean
from featlearn.spectra._conjugate_kernel_law import LINEAR, Activation, layer_arguments, slope_of
from featlearn.spectra._kernel_equations import layers_law, semicircle_law
from featlearn.spectra._laws import Law, marchenko_pastur


def tangent_kernel_law(
    activation: Activation | Sequence[Activation],
    n: int,
    width: int | Sequence[int],
    d: int,
    *,
    trained: Literal["all", "first"] = "all",
) -> Law:
    """Return the limiting law of the neural tangent kernel (n x n) of a random network with L hidden layers.

    The network is ``f(x) = w^T x_L``, ``x_l = sigma(W_l x_{l-1}) / sqrt(width_l)``, ``x_0 = x / sqrt d``, with standard
    normal weights and inputs (the NTK parametrization; `featlearn.models.ntk_mlp`), and the kernel that of all
    weights, ``W_1 ... W_L`` and w. The activation is centered and normalized under N(0, 1) by this function. With
    ``b_l = E[sigma_l'(z)]``, ``a_l = E[sigma_l'(z)^2]`` and ``K_l = X_l^T X_l`` the kernel has the spectrum of

        r I + sum_{l=0}^{L} q_l K_l,  q_l = prod_{k>l} b_k^2,  r = sum_{l<L} (prod_{k>l} a_k - prod_{k>l} b_k^2).

    The K_l depend on each other; their sum is removed layer by layer, from the top. With ``g_l = n / width_l``
    (``g_0 = n / d``, ``b_0 = 0``) the Stieltjes transform m at ``z + r`` solves

        c_L = 1,  c_{l-1} = q_{l-1} + b_l^2 p_l,  p_l = c_l / (1 + c_l g_l T_l),  1/m = -z + sum_l (1 - b_l^2) p_l,
        T_0 = m,  T_l = (1 - b_l^2) m + b_l^2 T_{l-1} / (1 + c_{l-1} g_{l-1} T_{l-1}).

    If n exceeds the number of directions that the layers span, ``d + width`` for one hidden layer, the law has an atom
    at r. For d < n it can have several bulks. Edges are accurate to about 1e-12, unless a bulk has only just split or
    comes close to the atom. Time: 0.2 to 0.5 seconds for one to four hidden layers, 1 second for eight.

    An activation with a second Hermite coefficient (softplus, ReLU) causes spikes beyond this law.

    Args:
        activation: Activation function; or a sequence of them, one per layer. It must be differentiable by autograd.
        n: Number of samples, positive.
        width: Width of the hidden layer, positive; or a sequence of widths, one per hidden layer.
        d: Dimension of the inputs, positive.
        trained: Weights whose kernel is taken. "all" is the whole tangent kernel; "first" the part of ``W_1``, whose
            law is Marchenko-Pastur: that of ``q_0 K_0 + (prod a_k - prod b_k^2) I``.

    Returns:
        The law of the eigenvalues of the kernel.

    Raises:
        InputError: If a size is not positive, there is not one activation per width, an activation is constant, or
            ``trained="first"`` and an activation has no linear part, so that the law is a single atom.
        FeatlearnError: If the computed law does not integrate to one.

    References:
        Fan & Wang (2020), https://arxiv.org/abs/2005.11879, theorem 3.7.

        Wang, Engel, Sarwate, Dumitriu & Chiang (2022), https://arxiv.org/abs/2211.06506, equation 5.

    Example:
        >>> import torch
        >>> from featlearn.spectra import tangent_kernel_law
        >>> left, right = tangent_kernel_law(torch.tanh, n=1000, width=750, d=500).edges
        >>> round(left, 3), round(right, 3)
        (0.249, 13.76)
    """
    widths, activations = layer_arguments(activation, n, width, d)
    check_option("trained", trained, ("all", "first"))
    squares, moments = zip(*(_derivative_constants(one) for one in activations), strict=True)
    name = f"the tangent kernel with squared slopes {list(squares)}, n={n}, widths={widths}, d={d}"
    # Products over the layers above l = 0 ... L - 1.
    linear = [math.prod(squares[layer:]) for layer in range(len(widths))]
    diagonal = [math.prod(moments[layer:]) for layer in range(len(widths))]
    if trained == "first":
        if not linear[0] > 0:
            raise InputError(
                f"activation must have a linear part for trained='first', got slope 0: all eigenvalues tend to "
                f"{diagonal[0]:g}, and there is no density."
            )
        return marchenko_pastur(d, n, variance=linear[0]).shifted(diagonal[0] - linear[0])
    rest = sum(a - b for a, b in zip(diagonal, linear, strict=True))
    return layers_law(squares, n, [d, *widths], [*linear, 1.0], name).shifted(rest)


def _derivative_constants(activation: Activation) -> tuple[float, float]:
    """Return ``E[sigma']^2`` and ``E[sigma'^2]`` of the normalized activation."""
    if not callable(activation):
        raise InputError(f"activation must be callable, got {type(activation).__name__}.")

    def squared_derivative(z: Tensor) -> Tensor:
        points = z.clone().requires_grad_()
        with torch.enable_grad():
            (derivative,) = torch.autograd.grad(activation(points).sum(), points)
        return derivative.square()

    constants = activation_constants(activation)
    moment = gaussian_mean(squared_derivative) / constants.std**2
    slope = abs(constants.slope)
    if slope > 1 - LINEAR:
        return 1.0, 1.0
    return (slope**2 if slope > 1e-8 else 0.0), moment


def deformed_semicircle(activation_or_slope: Activation | float, n: int, d: int) -> Law:
    """Return the limiting law of the fluctuation ``sqrt(h / n) (K - E[K | X])`` of a very wide conjugate kernel.

    The width h is much larger than the number n of samples, and ``K = sigma(W X / sqrt d)^T sigma(W X / sqrt d) / h``
    (n x n) as in `featlearn.spectra.conjugate_kernel_law`. In the limit of ``h / n`` the conjugate kernel is its
    expectation over W, and its difference from it is that of a sample covariance matrix with many samples: with the
    semicircle law mu_s on [-2, 2] and mu_0 the Marchenko-Pastur law of ratio n/d,

        mu = mu_s boxtimes ((1 - b^2) + b^2 mu_0),

    the law of ``P^(1/2) S P^(1/2)`` with a Wigner matrix S and ``P = (1 - b^2) I + b^2 X^T X / d``. It is symmetric
    about zero, so that half of the eigenvalues are negative. The transform solves, with ``g = n / d``,

        B = (1 - b^2) m + b^2 m p,  1/m = -z - (1 - b^2) B - b^2 B p,  p = 1 / (1 - g b^2 B m).

    At finite widths the distance from the law is of the order ``sqrt(n / h)``. Edges are accurate to about 1e-12.
    Time: about 0.1 seconds.

    Args:
        activation_or_slope: Activation function, or the slope b of the normalized activation, between -1 and 1.
        n: Number of samples, positive.
        d: Dimension of the inputs, positive.

    Returns:
        The law. It has an atom, at zero, only if the activation is linear and n > d.

    Raises:
        InputError: If a size is not positive, the slope is not between -1 and 1, or the activation is linear and n = d.
        FeatlearnError: If the computed law does not integrate to one. This happens for slopes within about 1e-4 of -1
            or 1, where the density has a peak at zero that is too narrow to resolve.

    References:
        Wang & Zhu (2021), https://arxiv.org/abs/2109.09304.

    Example:
        >>> import torch
        >>> from featlearn.spectra import deformed_semicircle
        >>> [round(edge, 3) for edge in deformed_semicircle(torch.tanh, n=1000, d=500).edges]
        [-3.606, 3.606]
        >>> [round(edge, 3) for edge in deformed_semicircle(0.0, n=1000, d=500).edges]  # no linear part: Wigner's law
        [-2.0, 2.0]
    """
    layer_arguments(activation_or_slope, n, 1, d)
    slope = slope_of(activation_or_slope)
    square = 1.0 if abs(slope) > 1 - LINEAR else slope * slope
    if square == 1 and n == d:
        raise InputError(
            f"n and d must not be equal for a linear activation, got {n}: a density that is infinite at zero is not "
            "supported. Change one of the sizes by one."
        )
    return semicircle_law(square, n, d, f"the deformed semicircle of slope {slope:g}, n={n}, d={d}")
