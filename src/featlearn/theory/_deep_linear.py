"""Deep linear networks with weight decay: balanced layers, their least norm, and their alignment.

References:
    Boix-Adsera, Mallinar, Simon & Belkin (2025), "FACT: the Features At Convergence Theorem for neural networks",
    https://arxiv.org/abs/2507.05644,
    section 3.1.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
import torch
from scipy.optimize import brentq
from torch import Tensor

from featlearn._utils.validation import check_int, check_number
from featlearn.errors import InputError
from featlearn.linalg import cosine, psd_power
from featlearn.linalg.matrices import as_float64


def balance(weights: Sequence[Any]) -> list[float]:
    """Compute the imbalance of neighboring layers, ``|W_{l+1}^T W_{l+1} - W_l W_l^T| / |W_l W_l^T|``.

    At every critical point of a loss of the product ``W_L ... W_1`` with weight decay it is zero: the gradients satisfy
    ``W_{l+1}^T dL/dW_{l+1} = dL/dW_l W_l^T``, and ``dL/dW = -lambda W`` there.

    Args:
        weights: Weight matrices from W_1 (next to the inputs) to W_L.

    Returns:
        One number per pair of neighbors.

    Example:
        >>> import torch
        >>> from featlearn.theory import balance, balanced_layers
        >>> [round(value, 4) for value in balance([torch.eye(2), 2.0 * torch.eye(2)])]
        [3.0]
        >>> layers = balanced_layers(torch.tensor([[4.0, 0.0], [3.0, 5.0]]), depth=3)
        >>> [round(value, 4) for value in balance(layers)]
        [0.0, 0.0]
    """
    layers = _checked(weights)
    result = []
    for below, above in pairwise(layers):
        inner = below @ below.mT
        result.append(float((above.mT @ above - inner).norm() / inner.norm().clamp_min(torch.finfo(torch.double).tiny)))
    return result


def balanced_layers(product: Any, depth: int, width: int | None = None) -> list[Tensor]:
    """Return layers of least total norm with a given product: ``W_l = U_l S^(1/L) V_l^T`` with matching bases.

    The least value is ``sum |W_l|^2 = L sum s^(2/L)`` over the singular values of the product; the layers are balanced.

    Args:
        product: Product ``W_L ... W_1``, shape ``(outputs, inputs)``.
        depth: Number L of layers, at least 1.
        width: Width of the hidden layers, at least the rank of the product. Default: the smaller side of the product.

    Returns:
        The weights from W_1 (next to the inputs) to W_L.

    Raises:
        InputError: If the product is not a matrix, or the width is less than its rank.

    Example:
        >>> import torch
        >>> from featlearn.theory import balanced_layers
        >>> first, second, third = balanced_layers(torch.diag(torch.tensor([8.0, 1.0])), depth=3)
        >>> [[abs(round(value, 4)) for value in row] for row in (third @ second @ first).tolist()]
        [[8.0, 0.0], [0.0, 1.0]]
        >>> round(sum(float(layer.square().sum()) for layer in (first, second, third)), 4)  # 3 * (8^(2/3) + 1)
        15.0
    """
    p = as_float64(product)
    if p.ndim != 2 or not p.numel():
        raise InputError(f"product must be a matrix, got shape {tuple(p.shape)}.")
    check_int("depth", depth)
    u, s, vt = torch.linalg.svd(p, full_matrices=False)
    hidden = len(s) if width is None else width
    rank = int((s > s.max() * max(p.shape) * torch.finfo(p.dtype).eps).sum())
    if hidden < rank:
        raise InputError(f"width must be at least the rank of product, {rank}, got {width}.")
    if depth == 1:
        return [p.clone()]
    few = min(hidden, len(s))
    root = s[:few] ** (1 / depth)
    first, last = p.new_zeros(hidden, p.shape[1]), p.new_zeros(p.shape[0], hidden)
    first[:few] = root[:, None] * vt[:few]
    last[:, :few] = u[:, :few] * root
    middle = p.new_zeros(hidden, hidden)
    middle[range(few), range(few)] = root
    return [first, *(middle.clone() for _ in range(depth - 2)), last]


def shrunk_map(target: Any, depth: int, weight_decay: float) -> Tensor:
    r"""Compute the product at the global minimum of ``|P - A|^2 / 2 + lambda/2 sum |W_l|^2``, for white inputs.

    It has the singular vectors of A, and each singular value s minimizes ``(s - a)^2 / 2 + lambda L/2 s^(2/L)``: a soft
    threshold for two layers, and for more a local minimum, if its value is less than that at zero.

    Args:
        target: Least-squares map A for inputs of covariance I, shape ``(outputs, inputs)``.
        depth: Number L of layers, at least 1.
        weight_decay: Weight decay lambda, at least 0.

    Returns:
        The product P, of the shape of the target.

    Example:
        >>> import torch
        >>> from featlearn.theory import shrunk_map
        >>> target = torch.diag(torch.tensor([3.0, 0.4]))
        >>> shrunk_map(target, depth=2, weight_decay=0.5).diagonal().tolist()  # soft threshold at 0.5
        [2.5, 0.0]
    """
    a = as_float64(target)
    check_int("depth", depth)
    check_number("weight_decay", weight_decay, 0)
    u, values, vt = torch.linalg.svd(a, full_matrices=False)
    shrunk = torch.tensor([_shrunk(float(v), depth, weight_decay) for v in values], dtype=torch.float64)
    result: Tensor = (u * shrunk) @ vt
    return result


def _shrunk(a: float, depth: int, weight_decay: float) -> float:
    if weight_decay == 0 or a == 0:
        return a
    if depth == 1:
        return a / (1 + weight_decay)
    if depth == 2:
        return max(0.0, a - weight_decay)
    power = 2.0 / depth

    def slope(s: float) -> float:
        return s - a + weight_decay * math.pow(s, power - 1)

    # The slope falls and then rises: its minimum is at 1 = lambda (1 - 2/L) s^(2/L - 2).
    lowest = (weight_decay * (1 - power)) ** (1 / (2 - power))
    if lowest >= a or slope(lowest) >= 0:
        return 0.0
    s = float(brentq(slope, lowest, a, xtol=1e-15, rtol=4 * np.finfo(float).eps))
    gain = a**2 / 2 - (s - a) ** 2 / 2 - weight_decay * depth / 2 * s**power
    return s if gain > 0 else 0.0


@dataclass(frozen=True)
class LinearAlignment:
    """Balance and alignment of a deep linear network.

    Attributes:
        balance: Imbalance of each pair of neighboring layers, from `featlearn.theory.balance`.
        agop_cosine: Cosine of ``AGOP^(1/L)`` with ``W_1^T W_1``; 1 for balanced layers.
        power: Power 1/L of the AGOP.
    """

    balance: tuple[float, ...]
    agop_cosine: float
    power: float


def linear_alignment(weights: Sequence[Any]) -> LinearAlignment:
    """Compare ``AGOP^(1/L)`` with the NFM of the first layer.

    The gradient of a linear network is its product P everywhere, so ``AGOP = P^T P``; for balanced layers this is
    ``(W_1^T W_1)^L``: the NFA holds with the power 1/L instead of 1/2.

    Args:
        weights: Weight matrices from W_1 (next to the inputs) to W_L.

    Returns:
        The balance of the layers and the cosine.

    Example:
        >>> import torch
        >>> from featlearn.theory import balanced_layers, linear_alignment
        >>> alignment = linear_alignment(balanced_layers(torch.diag(torch.tensor([8.0, 1.0])), depth=3))
        >>> round(alignment.power, 4), round(alignment.agop_cosine, 4)
        (0.3333, 1.0)
        >>> round(linear_alignment([torch.eye(2), torch.eye(2), torch.diag(torch.tensor([8.0, 1.0]))]).agop_cosine, 4)
        0.8575

    References:
        Boix-Adsera, Mallinar, Simon & Belkin (2025), "FACT: the Features At Convergence Theorem for neural networks",
        https://arxiv.org/abs/2507.05644,
        section 3.1 and figure 11.
    """
    layers = _checked(weights)
    product = layers[0]
    for layer in layers[1:]:
        product = layer @ product
    power = 1 / len(layers)
    agop = psd_power(product.mT @ product, power)
    return LinearAlignment(tuple(balance(layers)), cosine(agop, layers[0].mT @ layers[0]), power)


def _checked(weights: Sequence[Any]) -> list[Tensor]:
    layers = [as_float64(w) for w in weights]
    if not layers or any(w.ndim != 2 for w in layers):
        raise InputError("weights must be at least one matrix, from W_1 (next to the inputs) to W_L.")
    for below, above in pairwise(layers):
        if above.shape[1] != below.shape[0]:
            raise InputError(
                f"weights must match: a matrix of shape {tuple(below.shape)} has {below.shape[0]} outputs, "
                f"but the next one has {above.shape[1]} inputs."
            )
    return layers
