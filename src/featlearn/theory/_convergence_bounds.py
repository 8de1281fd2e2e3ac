"""Bounds on the changes of early training, and on the convergence of wide networks.

References:
    Wang, Engel, Sarwate, Dumitriu & Chiang (2022), "Spectral evolution and invariance in linear-width neural
    networks", https://arxiv.org/abs/2211.06506,
    section 5 and appendix B.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from featlearn._utils.validation import check_int, check_number
from featlearn.errors import InputError
from featlearn.linalg import gaussian_mean, hermite_coefficients
from featlearn.theory._two_layer_start import two_layer_start

Function = Callable[[Tensor], Tensor]


@dataclass(frozen=True)
class Assumption:
    """Assumption of a theorem.

    Attributes:
        text: Statement of the assumption.
        holds: Whether it holds. None if this cannot be decided from the arguments.
    """

    text: str
    holds: bool | None


@dataclass(frozen=True)
class NTKFloor:
    """Lower bound of the least eigenvalue of the tangent kernel at initialization, in the limit.

    Attributes:
        bound: ``a_sigma - sum_{k <= 2} eta_k^2``, with the Hermite coefficients eta_k of the activation's derivative.
        second_moment: ``a_sigma = E sigma'(xi)^2``.
        coefficients: Hermite coefficients eta_0, eta_1, eta_2.

    References:
        Wang, Engel, Sarwate, Dumitriu & Chiang (2022), "Spectral evolution and invariance in linear-width neural
        networks", https://arxiv.org/abs/2211.06506,
        equation 11.
    """

    bound: float
    second_moment: float
    coefficients: tuple[float, float, float]

    @property
    def alpha(self) -> float:
        """Constant alpha of theorem 5.2, ``sqrt(bound) / 2``: ``lambda_min >= 4 alpha^2``."""
        return math.sqrt(self.bound) / 2


def ntk_floor(derivative: Function, kinks: Sequence[float] = ()) -> NTKFloor:
    r"""Compute a lower bound of the least eigenvalue of the first layer's tangent kernel at initialization.

    Beyond its parts of degree 0, 1 and 2 in the inputs, the kernel is close to a multiple of the identity; the factor
    is the energy of ``sigma'`` in its Hermite coefficients of degree 3 and above. It vanishes for polynomials of degree
    up to 3, so a nonlinear sigma, as the paper asks for, is not sufficient.

    Args:
        derivative: Derivative ``sigma'`` of the normalized activation.
        kinks: Points where the derivative is not smooth.

    Returns:
        The bound and the constants it consists of.

    Example:
        >>> import torch
        >>> from featlearn.linalg import activation_constants
        >>> from featlearn.theory import ntk_floor
        >>> scale = activation_constants(torch.relu).std
        >>> round(ntk_floor(lambda z: (z > 0).to(z.dtype) / scale, kinks=[0.0]).bound, 4)  # normalized ReLU
        0.2665
        >>> abs(round(ntk_floor(lambda z: 3 * z**2).bound, 4))  # zero for polynomials of degree up to 3
        0.0

    References:
        Wang, Engel, Sarwate, Dumitriu & Chiang (2022), "Spectral evolution and invariance in linear-width neural
        networks", https://arxiv.org/abs/2211.06506,
        equation 11.
    """
    second = gaussian_mean(lambda x: derivative(x).square(), kinks)
    eta = hermite_coefficients(derivative, 2, kinks)
    bound = second - float(eta.square().sum())
    bound = bound if bound > 1e-12 * second else 0.0  # a difference of rounding errors is zero
    return NTKFloor(bound, second, (float(eta[0]), float(eta[1]), float(eta[2])))


@dataclass(frozen=True)
class GlobalConvergence:
    """Convergence of gradient descent on the first layer of a wide network.

    Attributes:
        largest_rate: Upper bound of the learning rate, ``min(alpha^2 n / 2, n / (4 lambda_sigma^2 (1 +
            sqrt(gamma_1))^2))``.
        alpha: Constant ``sqrt(lambda_min bound) / 2``.
        n: Number of training points.
        beta: Bound of the Jacobian, ``2 lambda_sigma (1 + sqrt(gamma_1))`` (equation 29).
        assumptions: Assumptions of the theorem, and whether they hold.

    References:
        Wang, Engel, Sarwate, Dumitriu & Chiang (2022), "Spectral evolution and invariance in linear-width neural
        networks", https://arxiv.org/abs/2211.06506,
        theorem 5.2.
    """

    largest_rate: float
    alpha: float
    n: int
    beta: float
    assumptions: tuple[Assumption, ...]

    def decay(self, rate: float) -> float:
        """Return ``1 - eta alpha^2 / (2 n)``, an upper bound of the decay of the root loss per step (equation 12).

        Args:
            rate: Learning rate eta, above 0 and below `largest_rate`.

        Returns:
            The factor.
        """
        check_number("rate", rate, above=0, below=self.largest_rate)
        return 1 - rate * self.alpha**2 / (2 * self.n)

    def least_width(self, initial_loss: float) -> float:
        """Return the width from which the theorem holds, ``(8 beta l(W_0) / alpha^2)^2``.

        From this width on the Jacobian has ``sigma_min >= alpha`` along the path. It is the threshold gamma* of the
        theorem times d, made explicit from its proof: W stays within ``R = 4 l(W_0) / alpha`` and the Jacobian is
        ``2 beta / sqrt h``-Lipschitz (equation 30), so ``2 alpha - 2 beta R / sqrt h >= alpha``. It is infinite if the
        floor is zero, and far larger than widths at which training converges in practice.

        Args:
            initial_loss: Initial residual norm ``|y - f(X)|``, not squared and not divided by n.

        Returns:
            The width.
        """
        if not self.alpha:
            return math.inf
        return (8 * self.beta * initial_loss / self.alpha**2) ** 2

    def path_length(self, initial_loss: float) -> float:
        """Return ``4 l(W_0) / alpha``, an upper bound of the length of the path of W (equation 14).

        Args:
            initial_loss: Initial residual norm ``|y - f(X)|``, not squared and not divided by n.

        Returns:
            The length in the Frobenius norm.
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
    """Compute the learning rates at which gradient descent on the first layer converges, with the assumptions.

    Args:
        derivative: Derivative ``sigma'`` of the normalized activation.
        n: Number of training points, at least 1.
        d: Input dimension, at least 1.
        width: Width h, at least 1.
        readout: Second-layer weights v, shape ``(h,)``. Default: unknown.
        kinks: Points where ``sigma'`` is not smooth.

    Returns:
        The largest rate, the constants and the assumptions.

    Raises:
        InputError: If the derivative is zero everywhere.

    Example:
        >>> import torch
        >>> from featlearn.linalg import activation_constants
        >>> from featlearn.theory import global_convergence
        >>> scale = activation_constants(torch.tanh).std
        >>> result = global_convergence(lambda z: (1 - torch.tanh(z) ** 2) / scale, n=100, d=100, width=1000)
        >>> round(result.largest_rate, 4), round(result.decay(result.largest_rate / 2), 6)
        (0.9962, 0.99995)
        >>> for assumption in result.assumptions:
        ...     print(assumption.holds, assumption.text)
        True the floor of the tangent kernel is positive (bound 0.0797)
        True sigma' is bounded: activations that grow faster than linearly are not covered
        None second-layer weights are at most 1 in size
        None inputs are independent standard Gaussian vectors
        None the width exceeds a threshold that the theorem does not state; see least_width

    References:
        Wang, Engel, Sarwate, Dumitriu & Chiang (2022), "Spectral evolution and invariance in linear-width neural
        networks", https://arxiv.org/abs/2211.06506,
        theorem 5.2.
    """
    for name, value in (("n", n), ("d", d), ("width", width)):
        check_int(name, value)
    floor = ntk_floor(derivative, kinks)
    grid = derivative(torch.linspace(-8, 8, 4001, dtype=torch.float64)).abs()
    lipschitz = float(grid.max())
    if not lipschitz:
        raise InputError("derivative must not be zero everywhere from -8 to 8: a constant activation does not train.")
    gamma = n / d
    rate = min(floor.alpha**2 * n / 2, n / (4 * lipschitz**2 * (1 + math.sqrt(gamma)) ** 2))
    # The slope of an activation that grows faster than linearly still grows beyond four standard deviations.
    bounded_slope = bool(grid.max() <= 1.5 * grid[1000:3001].max())
    bounded = None if readout is None else bool(readout.abs().max() <= 1)
    return GlobalConvergence(
        rate, floor.alpha, n, 2 * lipschitz * (1 + math.sqrt(gamma)),
        (
            Assumption(f"the floor of the tangent kernel is positive (bound {floor.bound:.3g})", floor.bound > 0),
            Assumption("sigma' is bounded: activations that grow faster than linearly are not covered", bounded_slope),
            Assumption("second-layer weights are at most 1 in size", bounded),
            Assumption("inputs are independent standard Gaussian vectors", None),
            Assumption("the width exceeds a threshold that the theorem does not state; see least_width", None),
        ),
    )  # fmt: skip


EARLY_EXPONENTS = {"weights": -0.5, "ck": -1.0, "ntk": -1.0, "outputs": -0.5}
"""Exponents of n in the decay of the changes, at fixed ratios n/d and h/d and a fixed rate (lemmas 5.1 and B.2)."""


@dataclass(frozen=True)
class EarlyPhase:
    """Upper bounds of the changes of t steps, for given data and weights and with explicit constants.

    Attributes:
        weights: Bound of ``|W_t - W_0|_F``.
        ck: Bound of ``|K_t - K_0|_F`` of the conjugate kernel.
        ntk: Bound of ``|K_t - K_0|_F`` of the first layer's tangent kernel; infinite if sigma'' is unbounded.
        outputs: Bound of ``|f_t(x) - f_0(x)|`` at any x with ``|x|^2 = d``.
        loss: Bound of ``|y - f_t(X)|``.
        assumptions: Assumptions of the bounds, and whether they hold.
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
    r"""Bound the changes of early training of ``f(x) = v^T sigma(W x / sqrt d) / sqrt h`` with a fixed readout.

    The constants, which the paper leaves open, follow from its proof. With ``S = |X| / sqrt d`` (spectral norm), s and
    c the largest ``|sigma'|`` and ``|sigma''|``, and ``b = s |v|_inf S``, the norm of the Jacobian J of the outputs in
    W is at most b. A step moves W by at most ``rate b |y - f| / n``, and the loss grows by at most ``1 + rate b^2 /
    n``:

        |W_t - W_0|_F <= |y - f_0| / b ((1 + rate b^2 / n)^t - 1)  =: m

    Features change by ``D = s S m``, the conjugate kernel by ``(2 |Phi_0| + D) D / h``, J by
    ``c |v|_inf S max |x_i| / sqrt d m / sqrt h =: e``, the tangent kernel by ``(2 |J_0| + e) e``, and an output by
    ``s |v| / sqrt h m``. For Gaussian data and weights these are of order ``n^-1/2``, ``1/n``, ``1/n``, ``n^-1/2``
    (`EARLY_EXPONENTS`). ReLU has no sigma'': its tangent kernel is not covered, and its change in the Frobenius norm
    falls more slowly, as figure 28 of the paper shows.

    Args:
        X: Inputs, shape ``(n, d)``.
        y: Labels, shape ``(n,)``.
        weight: Initial weights ``W_0``, shape ``(h, d)``.
        readout: Readout weights v, shape ``(h,)``.
        activation: Activation sigma, an elementwise function of a tensor.
        rate: Learning rate eta for half the mean squared error, above 0.
        steps: Number t of steps, at least 0.
        kinks: Points where sigma' jumps.

    Returns:
        The bounds.

    Example:
        >>> import torch
        >>> from featlearn.theory import early_phase
        >>> _ = torch.manual_seed(0)
        >>> X, y, W, v = torch.randn(40, 20), torch.randn(40), torch.randn(60, 20, requires_grad=True), torch.ones(60)
        >>> bounds = early_phase(X, y, W, v, torch.tanh, rate=0.1, steps=1)
        >>> loss = (torch.tanh(X @ W.T / 20**0.5) @ v / 60**0.5 - y).square().mean() / 2
        >>> (gradient,) = torch.autograd.grad(loss, W)
        >>> round(0.1 * float(gradient.norm()), 3), round(bounds.weights, 3)
        (0.017, 0.053)

    References:
        Wang, Engel, Sarwate, Dumitriu & Chiang (2022), "Spectral evolution and invariance in linear-width neural
        networks", https://arxiv.org/abs/2211.06506,
        lemmas 5.1 and B.2.
    """
    start = two_layer_start(X, y, weight, readout, activation, kinks)
    check_number("rate", rate, above=0)
    check_int("steps", steps, 0)
    jacobian = start.jacobian_bound
    growth = (1 + rate * jacobian**2 / start.n) ** steps
    moved = start.loss / jacobian * (growth - 1) if jacobian else 0.0
    mean = gaussian_mean(activation, kinks)
    outputs = start.slope * float(start.readout.norm()) / math.sqrt(start.h) * moved
    smooth = math.isfinite(start.curvature)
    return EarlyPhase(
        moved, start.ck_change(moved), start.ntk_change(moved), outputs, start.loss * growth,
        (
            Assumption("half the mean squared error, full batches, the second layer fixed", None),
            Assumption(f"|sigma'| is at most {start.slope:.3g} beyond the grid from -8 to 8", None),
            Assumption("sigma'' is bounded: otherwise the tangent kernel is not covered", smooth),
            Assumption(f"sigma has mean 0 under N(0, 1), for the rates (it has {mean:.3g})", abs(mean) < 1e-6),
        ),
    )  # fmt: skip
