"""The spectral paper's bounds: when a network of proportional width trains to zero loss with an unchanged bulk."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from featlearn.errors import InputError
from featlearn.linalg import gaussian_mean, hermite_coefficients

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
