"""Bounds of the spectral paper: how little early training changes, and when wide networks train to zero loss."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from featlearn.errors import InputError
from featlearn.linalg import gaussian_mean, hermite_coefficients
from featlearn.linalg.matrices import as_float64

Function = Callable[[Tensor], Tensor]


@dataclass(frozen=True)
class Assumption:
    """What a theorem asks for.

    Attributes:
        text: In words.
        holds: Whether it holds; None where it cannot be told from what is known.
    """

    text: str
    holds: bool | None


@dataclass(frozen=True)
class NTKFloor:
    """The least eigenvalue of the tangent kernel at the start, in the limit (spectral paper, 11).

    Attributes:
        bound: ``a_sigma - sum_{k <= 2} eta_k^2``, with eta_k the Hermite coefficients of the activation's derivative.
        second_moment: ``a_sigma = E sigma'(xi)^2``.
        coefficients: eta_0, eta_1, eta_2.
    """

    bound: float
    second_moment: float
    coefficients: tuple[float, float, float]

    @property
    def alpha(self) -> float:
        """``sqrt(bound) / 2``, the alpha of theorem 5.2: ``lambda_min >= 4 alpha^2``."""
        return math.sqrt(self.bound) / 2


def ntk_floor(derivative: Function, kinks: Sequence[float] = ()) -> NTKFloor:
    r"""Lower bound of ``lambda_min`` of the first layer's tangent kernel at the start (spectral paper, 11).

    What the kernel has beyond its parts of degree 0, 1 and 2 in the inputs is close to a multiple of the identity, and
    that multiple is the energy of ``sigma'`` in its Hermite coefficients from degree 3 on. It vanishes for polynomials
    of degree up to 3; the paper's remark that a nonlinear sigma is enough is too short.

    Args:
        derivative: ``sigma'``, of the normalized activation.
        kinks: Where it is not smooth.

    >>> ntk_floor(lambda x: (x > 0).to(x.dtype), kinks=[0.0]).bound > 0.01
    True
    """
    second = gaussian_mean(lambda x: derivative(x).square(), kinks)
    eta = hermite_coefficients(derivative, 2, kinks)
    bound = second - float(eta.square().sum())
    bound = bound if bound > 1e-12 * second else 0.0  # what rounding leaves of nothing
    return NTKFloor(bound, second, (float(eta[0]), float(eta[1]), float(eta[2])))


@dataclass(frozen=True)
class GlobalConvergence:
    """What theorem 5.2 of the spectral paper says of gradient descent on the first layer.

    Attributes:
        largest_rate: eta must be below ``min(alpha^2 n / 2, n / (4 lambda_sigma^2 (1 + sqrt(gamma_1))^2))``.
        alpha: ``sqrt(lambda_min bound) / 2``.
        n: Training points.
        beta: ``2 lambda_sigma (1 + sqrt(gamma_1))``, which bounds the Jacobian (29).
        assumptions: What it rests on, and whether it holds.
    """

    largest_rate: float
    alpha: float
    n: int
    beta: float
    assumptions: tuple[Assumption, ...]

    def decay(self, rate: float) -> float:
        """``1 - eta alpha^2 / (2 n)``, by which the root of the summed squares falls a step at least (12)."""
        if not 0 < rate < self.largest_rate:
            raise InputError(f"the rate must be between 0 and {self.largest_rate:.3g}, got {rate!r}")
        return 1 - rate * self.alpha**2 / (2 * self.n)

    def least_width(self, initial_loss: float) -> float:
        """``(8 beta l(W_0) / alpha^2)^2``: from this h on the Jacobian keeps ``sigma_min >= alpha`` along the path.

        The theorem's threshold gamma* times d, made explicit from its proof: W stays within ``R = 4 l(W_0) / alpha``
        and the Jacobian is ``2 beta / sqrt h``-Lipschitz (30), so that ``2 alpha - 2 beta R / sqrt h >= alpha``. It is
        infinite where the floor is zero, and far beyond the widths at which training is seen to converge.

        Args:
            initial_loss: ``|y - f(X)|``, not squared and not divided by n.
        """
        if not self.alpha:
            return math.inf
        return (8 * self.beta * initial_loss / self.alpha**2) ** 2

    def path_length(self, initial_loss: float) -> float:
        """``4 l(W_0) / alpha``, the most that all steps together move W, Frobenius (14).

        Args:
            initial_loss: ``|y - f(X)|``, not squared and not divided by n.
        """
        return 4 * initial_loss / self.alpha


def global_convergence(
    derivative: Function,
    n: int,
    d: int,
    width: int,
    *,
    readout: Tensor | None = None,
    kinks: Sequence[float] = (),
) -> GlobalConvergence:
    """The rates at which gradient descent on the first layer converges, with what that rests on (theorem 5.2).

    Args:
        derivative: ``sigma'`` of the normalized activation.
        n: Training points.
        d: Input dimension.
        width: h.
        readout: Second-layer weights v, if known.
        kinks: Where ``sigma'`` is not smooth.
    """
    if min(n, d, width) < 1:
        raise InputError(f"n, d and width must be at least 1, got {n}, {d} and {width}")
    floor = ntk_floor(derivative, kinks)
    grid = derivative(torch.linspace(-8, 8, 4001, dtype=torch.float64)).abs()
    lipschitz = float(grid.max())
    if not lipschitz:
        raise InputError("sigma' is zero everywhere from -8 to 8: a constant activation does not train")
    gamma = n / d
    rate = min(floor.alpha**2 * n / 2, n / (4 * lipschitz**2 * (1 + math.sqrt(gamma)) ** 2))
    # Beyond four standard deviations the slope of a growing activation is still growing.
    bounded_slope = bool(grid.max() <= 1.5 * grid[1000:3001].max())
    bounded = None if readout is None else bool(readout.abs().max() <= 1)
    return GlobalConvergence(
        rate,
        floor.alpha,
        n,
        2 * lipschitz * (1 + math.sqrt(gamma)),
        (
            Assumption(f"the floor of the tangent kernel is positive (bound {floor.bound:.3g})", floor.bound > 0),
            Assumption("sigma' is bounded: activations that grow faster than linearly are not covered", bounded_slope),
            Assumption("second-layer weights are at most 1 in size", bounded),
            Assumption("inputs are independent standard Gaussian vectors", None),
            Assumption("the width is beyond a threshold that the theorem does not tell; see least_width", None),
        ),
    )  # fmt: skip


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
