"""How far a few steps can move the first layer, its kernels and its outputs (spectral paper, section 5.1)."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from featlearn.errors import InputError
from featlearn.linalg import gaussian_mean
from featlearn.linalg.matrices import as_float64
from featlearn.theory._convergence_bounds import Assumption

EARLY_EXPONENTS = {"weights": -0.5, "ck": -1.0, "ntk": -1.0, "outputs": -0.5}
"""Powers of n with which the changes fall at fixed ratios n/d and h/d and a fixed rate (lemmas 5.1 and B.2)."""

_GRID = torch.linspace(-8, 8, 4001, dtype=torch.float64)


@dataclass(frozen=True)
class EarlyPhase:
    """Upper bounds of what t steps change, for the given data and weights, with no constant left open.

    Attributes:
        weights: Of ``|W_t - W_0|_F``.
        ck: Of ``|K_t - K_0|_F`` of the conjugate kernel.
        ntk: Of ``|K_t - K_0|_F`` of the first layer's tangent kernel; infinite where sigma'' is.
        outputs: Of ``|f_t(x) - f_0(x)|`` at any x with ``|x|^2 = d``.
        loss: Of ``|y - f_t(X)|``.
        assumptions: What the bounds rest on, and whether it holds.
    """

    weights: float
    ck: float
    ntk: float
    outputs: float
    loss: float
    assumptions: tuple[Assumption, ...]


def early_phase(
    X: Any,
    y: Any,
    weight: Any,
    readout: Any,
    activation: Callable[[Tensor], Tensor],
    *,
    rate: float,
    steps: int,
    kinks: Sequence[float] = (),
) -> EarlyPhase:
    r"""Bounds of the early phase of ``f(x) = v^T sigma(W x / sqrt d) / sqrt h``, first layer trained (lemma 5.1, B.2).

    The paper's constants are not told; its proof gives them. With ``S = |X| / sqrt d`` (spectral norm), s and c the
    largest ``|sigma'|`` and ``|sigma''|``, and ``b = s |v|_inf S``, the Jacobian J of the outputs in W is never larger
    than b, so a step moves W by ``rate b |y - f| / n`` at the most, and the loss grows by ``1 + rate b^2 / n`` at most:

        ``|W_t - W_0|_F <= |y - f_0| / b ((1 + rate b^2 / n)^t - 1)  =: m``

    Features change by ``D = s S m``, the conjugate kernel by ``(2 |Phi_0| + D) D / h``, J by
    ``c |v|_inf S max |x_i| / sqrt d m / sqrt h =: e``, the tangent kernel by ``(2 |J_0| + e) e``, and an output by
    ``s |v| / sqrt h m``. For Gaussian data and weights these are of order ``n^-1/2``, ``1/n``, ``1/n``, ``n^-1/2``
    (`EARLY_EXPONENTS`). ReLU has no sigma'': its tangent kernel is not covered, and in the Frobenius norm falls more
    slowly, as the paper's figure 28 shows.

    Args:
        X: ``(n, d)``.
        y: ``(n,)``.
        weight: ``W_0``, ``(h, d)``.
        readout: v, ``(h,)``.
        activation: sigma.
        rate: eta, for half the mean squared error (2).
        steps: t.
        kinks: Where sigma' jumps.
    """
    x, w, v, labels = as_float64(X), as_float64(weight), as_float64(readout).flatten(), as_float64(y).flatten()
    if x.ndim != 2 or w.ndim != 2 or x.shape[1] != w.shape[1] or len(v) != len(w) or len(labels) != len(x):
        raise InputError(
            f"X must be (n, d), y (n,), weight (h, d) and readout (h,), got {tuple(x.shape)}, {len(labels)}, "
            f"{tuple(w.shape)} and {len(v)}"
        )
    if not all(bool(torch.isfinite(t).all()) for t in (x, w, v, labels)):
        raise InputError("X, y, weight or readout has NaN or infinite entries")
    if not (rate > 0 and math.isfinite(rate)) or steps < 0:
        raise InputError(f"rate must be above 0 and steps at least 0, got {rate!r} and {steps!r}")
    n, d = x.shape
    h = len(w)
    slope, curvature = _largest_derivatives(activation, kinks)
    inputs, hidden = x / math.sqrt(d), x @ w.mT / math.sqrt(d)
    features = activation(hidden)
    loss = float((labels - features @ v / math.sqrt(h)).norm())
    size, largest = float(torch.linalg.matrix_norm(inputs, 2)), float(v.abs().max())
    jacobian = slope * largest * size
    growth = (1 + rate * jacobian**2 / n) ** steps
    moved = loss / jacobian * (growth - 1) if jacobian else 0.0
    of_features = slope * size * moved
    ck = (2 * float(torch.linalg.matrix_norm(features, 2)) + of_features) * of_features / h
    longest = float(inputs.norm(dim=1).max())
    of_jacobian = curvature * largest * size * longest * moved / math.sqrt(h) if moved else 0.0
    mean = gaussian_mean(activation, kinks)
    ntk = (2 * _jacobian_norm(activation, inputs, hidden, v) + of_jacobian) * of_jacobian
    return EarlyPhase(
        moved, ck, ntk, slope * float(v.norm()) / math.sqrt(h) * moved, loss * growth,
        (
            Assumption("half the mean squared error, full batches, the second layer fixed", None),
            Assumption(f"|sigma'| is at most {slope:.3g} beyond the grid from -8 to 8", None),
            Assumption("sigma'' is bounded: otherwise nothing is said of the tangent kernel", math.isfinite(curvature)),
            Assumption(f"sigma has mean 0 under N(0, 1), for the rates (it has {mean:.3g})", abs(mean) < 1e-6),
        ),
    )  # fmt: skip


def _largest_derivatives(activation: Callable[[Tensor], Tensor], kinks: Sequence[float]) -> tuple[float, float]:
    grid = _GRID.clone().requires_grad_()
    (first,) = torch.autograd.grad(activation(grid).sum(), grid, create_graph=True)
    slope = float(first.detach().abs().max())
    if kinks:
        return slope, math.inf
    if not first.requires_grad:
        return slope, 0.0
    (second,) = torch.autograd.grad(first.sum(), grid)
    return slope, float(second.abs().max())


def _jacobian_norm(activation: Callable[[Tensor], Tensor], inputs: Tensor, hidden: Tensor, v: Tensor) -> float:
    """``|J_0|``, by the largest eigenvalue of ``J_0 J_0^T``, the first layer's tangent kernel (5)."""
    points = hidden.clone().requires_grad_()
    (slopes,) = torch.autograd.grad(activation(points).sum(), points)
    scaled = slopes * v
    kernel = (inputs @ inputs.mT) * (scaled @ scaled.mT) / len(v)
    return math.sqrt(max(0.0, float(torch.linalg.eigvalsh(kernel)[-1])))
