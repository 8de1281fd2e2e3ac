"""Bounds that keep spectra invariant in training, with explicit constants, and their check along a training.

References:
    Wang, Engel, Sarwate, Dumitriu & Chiang (2022), "Spectral evolution and invariance in linear-width neural
    networks", https://arxiv.org/abs/2211.06506, theorem 5.2, corollaries 5.3 and B.3.

    Oymak & Soltanolkotabi (2020), "Toward moderate overparameterization: global convergence guarantees for training
    shallow neural networks", https://arxiv.org/abs/1902.04674.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import pandas as pd
import torch
from torch import Tensor

from featlearn._utils.validation import check_int, check_number
from featlearn.errors import InputError
from featlearn.linalg.matrices import as_float64
from featlearn.theory._convergence_bounds import Assumption, early_phase
from featlearn.theory._two_layer_start import TwoLayerStart, two_layer_start

_ROUNDING = 1e-10  # relative excess over a bound that counts as rounding

Activation = Callable[[Tensor], Tensor]


@dataclass(frozen=True)
class InvarianceBounds:
    """Bounds of the changes of all of training, for given data and weights.

    Attributes:
        weights: Bound of ``|W_t - W_0|_F / sqrt d``.
        ck: Bound of ``|K_t - K_0|_F`` of the conjugate kernel.
        ntk: Bound of ``|K_t - K_0|_F`` of the first layer's tangent kernel.
        radius: Bound ``4 l(W_0) / alpha`` of ``|W_t - W_0|_F`` and of the length of the path.
        alpha: Half the least singular value of the Jacobian at W_0.
        largest_rate: Learning rate up to which the bounds are proven.
        assumptions: Assumptions of the bounds, and whether they hold.
    """

    weights: float
    ck: float
    ntk: float
    radius: float
    alpha: float
    largest_rate: float
    assumptions: tuple[Assumption, ...]

    @property
    def constant(self) -> float:
        """Constant R of corollary 5.3, the largest of the three bounds."""
        return max(self.weights, self.ck, self.ntk)

    @property
    def holds(self) -> bool:
        """Validity of the bounds: True if no assumption fails that is decidable from the arguments."""
        return all(assumption.holds is not False for assumption in self.assumptions)


def invariance_bounds(
    X: Any, y: Any, weight: Any, readout: Any, activation: Activation, *, rate: float, kinks: Sequence[float] = ()
) -> InvarianceBounds:
    r"""Bound the changes of all of training of ``f(x) = v^T sigma(W x / sqrt d) / sqrt h`` with a fixed readout.

    This is the constant R of corollary 5.3, which the paper leaves open, for given data and weights. Let s and c be the
    largest ``|sigma'|`` and ``|sigma''|``, ``S = |X| / sqrt d``, ``b = s |v|_inf S`` the bound of the Jacobian, ``L =
    c |v|_inf S max |x_i| / sqrt(d h)`` its Lipschitz constant, ``2 alpha`` its least singular value at W_0, and
    ``l = |y - f_0|``. Gradient descent on half the mean squared error has a residual that falls by

        |r_{t+1}|^2 <= |r_t|^2 - 2 rate/n |J^T r_t|^2 (1 - rate/n (L |r_t| + b^2) / 2).

    If ``rate <= n / (2 b^2)`` and ``L R <= alpha`` with ``R = 4 l / alpha``, the last factor is at least 1/2, and the
    least singular value stays above alpha within R of W_0. Hence ``|r_{t+1}| <= |r_t| - alpha/2 |W_{t+1} - W_t|_F``,
    the path is shorter than R, and for all t

        |W_t - W_0|_F / sqrt d <= R / sqrt d
        |CK_t - CK_0|_F <= (2 |Phi_0| + D) D / h,  D = s S R
        |NTK_t - NTK_0|_F <= (2 |J_0| + e) e,  e = L R.

    The paper has these for Gaussian data with high probability. ``L R <= alpha`` asks for widths far beyond those at
    which training converges in practice; then `holds` is False, the numbers remain, and nothing is proven.

    Args:
        X: Inputs, shape ``(n, d)``.
        y: Labels, shape ``(n,)``.
        weight: Initial weights ``W_0``, shape ``(h, d)``.
        readout: Readout weights v, shape ``(h,)``.
        activation: Activation sigma, an elementwise function of a tensor.
        rate: Learning rate for half the mean squared error, above 0.
        kinks: Points where sigma' jumps. With any, the bounds of the kernels are infinite.

    Returns:
        The bounds and their assumptions.

    Raises:
        InputError: If shapes do not match, an entry is not finite, or the rate is not positive.

    Example:
        >>> import torch
        >>> from featlearn.theory import invariance_bounds
        >>> generator = torch.Generator().manual_seed(0)
        >>> X, W = (torch.randn(rows, 10, generator=generator) for rows in (5, 2000))
        >>> v = torch.ones(2000)
        >>> y = torch.tanh(X @ W.T / 10**0.5) @ v / 2000**0.5 + 0.02
        >>> bounds = invariance_bounds(X, y, W, v, torch.tanh, rate=0.5)
        >>> bounds.holds, round(bounds.weights, 2), round(bounds.ck, 2), round(bounds.ntk, 2)
        (True, 0.33, 0.06, 0.08)

    References:
        Wang, Engel, Sarwate, Dumitriu & Chiang (2022), https://arxiv.org/abs/2211.06506, corollary 5.3.

        Oymak & Soltanolkotabi (2020), https://arxiv.org/abs/1902.04674, section 6.
    """
    check_number("rate", rate, above=0)
    start = two_layer_start(X, y, weight, readout, activation, kinks)
    alpha = _alpha(start)
    radius = 4 * start.loss / alpha if alpha else math.inf
    bound = start.jacobian_bound
    largest = start.n / (2 * bound**2) if bound else math.inf
    drift = start.jacobian_lipschitz * radius if start.curvature else 0.0
    finite = math.isfinite(radius) and math.isfinite(drift)
    return InvarianceBounds(
        radius / math.sqrt(start.inputs.shape[1]),
        start.ck_change(radius) if math.isfinite(radius) else math.inf,
        start.ntk_change(radius) if finite else math.inf,
        radius, alpha, largest,
        (
            Assumption("half the mean squared error, full batches, the second layer fixed", None),
            Assumption(f"|sigma'| is at most {start.slope:.3g} beyond the grid from -8 to 8", None),
            Assumption(f"the least singular value of the Jacobian is positive ({2 * alpha:.3g})", alpha > 0),
            Assumption(f"the rate is at most n / (2 b^2) = {largest:.3g}", rate <= largest),
            Assumption(f"the Jacobian changes by at most alpha = {alpha:.3g} (bound {drift:.3g})", drift <= alpha),
        ),
    )  # fmt: skip


def _alpha(start: TwoLayerStart) -> float:
    """Return half the least singular value of the Jacobian, or zero if it is rounding."""
    least, largest = float(start.tangent_eigenvalues[0]), float(start.tangent_eigenvalues[-1])
    return math.sqrt(least) / 2 if least > 1e-13 * largest else 0.0


@dataclass(frozen=True)
class EigenvalueBounds:
    """Bounds of the changes of eigenvalues in t steps.

    A bound holds for the root of the sum of squares of all changes (Hoffman & Wielandt), with eigenvalues in the same
    order, and therefore for each of them (Weyl).

    Attributes:
        weights: Bound for the eigenvalues of ``W^T W / h``.
        ck: Bound for those of the conjugate kernel.
        ntk: Bound for those of the first layer's tangent kernel; infinite if sigma'' is unbounded.
        assumptions: Assumptions of the bounds, and whether they hold.
    """

    weights: float
    ck: float
    ntk: float
    assumptions: tuple[Assumption, ...]


def eigenvalue_bounds(
    X: Any,
    y: Any,
    weight: Any,
    readout: Any,
    activation: Activation,
    *,
    rate: float,
    steps: int,
    kinks: Sequence[float] = (),
) -> EigenvalueBounds:
    """Bound the change of every eigenvalue of ``W^T W / h``, conjugate kernel and tangent kernel in t steps.

    For symmetric matrices ``|lambda_i(A) - lambda_i(B)| <= |A - B|`` (Weyl) and ``sum_i (lambda_i(A) -
    lambda_i(B))^2 <= |A - B|_F^2`` (Hoffman & Wielandt). The Frobenius norms are bounded as in
    `featlearn.theory.early_phase`; if W has moved by at most m, ``W^T W / h`` has changed by at most ``(2 |W_0| + m) m
    / h``. For Gaussian data and weights the bounds fall like 1/n, so that every eigenvalue keeps its place, as the
    corollary states.

    Args:
        X: Inputs, shape ``(n, d)``.
        y: Labels, shape ``(n,)``.
        weight: Initial weights ``W_0``, shape ``(h, d)``.
        readout: Readout weights v, shape ``(h,)``.
        activation: Activation sigma, an elementwise function of a tensor.
        rate: Learning rate for half the mean squared error, above 0.
        steps: Number t of steps, at least 0.
        kinks: Points where sigma' jumps.

    Returns:
        The bounds.

    Raises:
        InputError: If shapes do not match, an entry is not finite, or rate or steps are out of range.

    Example:
        >>> import torch
        >>> from featlearn.theory import eigenvalue_bounds
        >>> generator = torch.Generator().manual_seed(0)
        >>> X, W = (torch.randn(rows, 200, generator=generator) for rows in (400, 600))
        >>> bounds = eigenvalue_bounds(X, X[:, 0], W, torch.ones(600), torch.tanh, rate=0.1, steps=3)
        >>> round(bounds.weights, 4), round(bounds.ck, 4), round(bounds.ntk, 4)
        (0.0051, 0.0135, 0.0107)

    References:
        Wang, Engel, Sarwate, Dumitriu & Chiang (2022), https://arxiv.org/abs/2211.06506, corollary B.3.
    """
    early = early_phase(X, y, weight, readout, activation, rate=rate, steps=steps, kinks=kinks)
    start = two_layer_start(X, y, weight, readout, activation, kinks)
    return EigenvalueBounds(start.gram_change(early.weights), early.ck, early.ntk, early.assumptions)


@dataclass(frozen=True, eq=False)
class ConvergencePath:
    """Both sides of equations (12) to (14) at each step of a training.

    Each tensor has shape ``(steps + 1,)``, the first entry is the start.

    Attributes:
        loss: Left side of (12), ``l(W_t) = |y - f_t|``.
        loss_bound: Right side of (12), ``(1 - rate alpha^2 / (2 n))^t l(W_0)``.
        energy: Left side of (13), ``alpha/4 |W_0 - W_t|_F + l(W_t)``.
        energy_bound: Right side of (13), ``l(W_0)``.
        length: Left side of (14) up to step t, ``sum_{s < t} |W_{s+1} - W_s|_F``.
        length_bound: Right side of (14), ``4 l(W_0) / alpha``.
        alpha: Constant alpha.
    """

    loss: Tensor
    loss_bound: Tensor
    energy: Tensor
    energy_bound: Tensor
    length: Tensor
    length_bound: Tensor
    alpha: float

    @property
    def holds(self) -> dict[str, bool]:
        """Validity of each equation over all steps, by its number: "12", "13", "14"."""
        return {number: bool(holds.all()) for number, (_, _, holds) in self._sides().items()}

    def table(self) -> pd.DataFrame:
        """Return one row per step: both sides of each equation, and whether it holds."""
        columns: dict[str, Tensor] = {}
        for number, (left, right, holds) in self._sides().items():
            columns |= {f"({number}) left": left, f"({number}) right": right, f"({number}) holds": holds}
        return pd.DataFrame({name: values.numpy() for name, values in columns.items()}).rename_axis("step")

    def _sides(self) -> dict[str, tuple[Tensor, Tensor, Tensor]]:
        pairs = {
            "12": (self.loss, self.loss_bound),
            "13": (self.energy, self.energy_bound),
            "14": (self.length, self.length_bound),
        }
        return {number: (a, b, a <= b * (1 + _ROUNDING)) for number, (a, b) in pairs.items()}


def convergence_path(losses: Any, weights: Sequence[Any], *, n: int, rate: float, alpha: float) -> ConvergencePath:
    """Compute both sides of equations (12) to (14) along a recorded training of the first layer.

    Args:
        losses: Residual norms ``|y - f_t(X)|`` (neither squared nor divided by n) of the start and of each step.
        weights: Weights ``W_t`` of the start and of each step, each of shape ``(h, d)``.
        n: Number of training points, at least 1.
        rate: Learning rate for half the mean squared error, above 0.
        alpha: Constant alpha, above 0: that of `featlearn.theory.invariance_bounds` or
            `featlearn.theory.global_convergence`.

    Returns:
        Both sides, and whether the equations hold.

    Raises:
        InputError: If there is not one loss per weight matrix, or a number is out of range.

    Example:
        >>> import torch
        >>> from featlearn.theory import convergence_path
        >>> path = convergence_path([1.0, 0.5], [torch.zeros(1, 1), torch.ones(1, 1)], n=1, rate=1.0, alpha=1.0)
        >>> path.holds
        {'12': True, '13': True, '14': True}

    References:
        Wang, Engel, Sarwate, Dumitriu & Chiang (2022), https://arxiv.org/abs/2211.06506, theorem 5.2.
    """
    check_int("n", n)
    check_number("rate", rate, above=0)
    check_number("alpha", alpha, above=0)
    loss, matrices = as_float64(losses).flatten(), [as_float64(w) for w in weights]
    if not matrices or len(loss) != len(matrices):
        raise InputError(f"There must be one loss per weight matrix, got {len(loss)} and {len(matrices)}.")
    steps = torch.stack([(b - a).norm() for a, b in pairwise(matrices)] or [loss.new_zeros(())])
    length = torch.cat([loss.new_zeros(1), steps.cumsum(0)])[: len(loss)]
    moved = torch.stack([(w - matrices[0]).norm() for w in matrices])
    time = torch.arange(len(loss), dtype=torch.float64)
    factor = max(0.0, 1 - rate * alpha**2 / (2 * n))
    return ConvergencePath(
        loss, factor**time * loss[0], alpha / 4 * moved + loss, loss[0].expand_as(loss).clone(),
        length, (4 * loss[0] / alpha).expand_as(loss).clone(), float(alpha),
    )  # fmt: skip


def check_convergence(
    X: Any,
    y: Any,
    weight: Any,
    readout: Any,
    activation: Activation,
    *,
    rate: float,
    steps: int,
    alpha: float | None = None,
) -> ConvergencePath:
    """Train the first layer by gradient descent, and compare both sides of equations (12) to (14) at each step.

    The loss is half the mean squared error, in full batches and float64. Takes O(steps n h d), and stores all weights.

    Args:
        X: Inputs, shape ``(n, d)``.
        y: Labels, shape ``(n,)``.
        weight: Initial weights ``W_0``, shape ``(h, d)``.
        readout: Readout weights v, shape ``(h,)``, which are not trained.
        activation: Activation sigma, an elementwise function of a tensor.
        rate: Learning rate, above 0.
        steps: Number of steps, at least 0.
        alpha: Constant alpha, above 0. None is half the least singular value of the Jacobian at the start.

    Returns:
        Both sides, and whether the equations hold.

    Raises:
        InputError: If shapes do not match, a number is out of range, or the Jacobian at the start is singular.

    Example:
        >>> import torch
        >>> from featlearn.theory import check_convergence
        >>> generator = torch.Generator().manual_seed(0)
        >>> X, W = (torch.randn(rows, 20, generator=generator) for rows in (15, 300))
        >>> path = check_convergence(X, X[:, 0], W, torch.ones(300), torch.tanh, rate=5.0, steps=20)
        >>> path.holds
        {'12': True, '13': True, '14': True}

    References:
        Wang, Engel, Sarwate, Dumitriu & Chiang (2022), https://arxiv.org/abs/2211.06506, theorem 5.2.
    """
    check_number("rate", rate, above=0)
    check_int("steps", steps, 0)
    start = two_layer_start(X, y, weight, readout, activation, ())
    if alpha is None:
        alpha = _alpha(start)
        if not alpha:
            raise InputError("The Jacobian at the start must not be singular. Pass alpha, or use a wider network.")
    inputs, v, now = start.inputs, start.readout / math.sqrt(start.h), start.weight.clone()
    losses, weights = [], []
    for _ in range(steps + 1):
        hidden = (inputs @ now.mT).requires_grad_()
        with torch.enable_grad():
            output = start.activation(hidden) @ v
            residual = output - start.labels
            (gradient,) = torch.autograd.grad(residual.square().sum() / (2 * start.n), hidden)
        losses.append(float(residual.detach().norm()))
        weights.append(now)
        now = now - rate * gradient.mT @ inputs
    return convergence_path(losses, weights, n=start.n, rate=rate, alpha=alpha)
