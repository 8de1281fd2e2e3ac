"""Polynomial targets of Gaussian inputs: the chain monomial, polynomials by their terms, and a full-rank quadratic.

References:
    Beaglehole, Mitliagkas & Agarwala, "Feature learning as alignment", https://openreview.net/forum?id=JXCe2ZcUXr (NFA
    paper).
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from featlearn._utils.rng import Seed, as_generator
from featlearn._utils.validation import check_int
from featlearn.datasets._base import RegressionTask
from featlearn.datasets._gaussian_inputs import gaussian_task
from featlearn.errors import InputError
from featlearn.linalg.matrices import as_float64


def _check_chain(d: int, r: int) -> None:
    if not 2 <= r <= d:
        raise InputError(f"r must be from 2 to the number of coordinates, d={d}, got {r}")


def chain_monomial(X: Tensor, r: int = 5) -> Tensor:
    """Compute the chain monomial ``y(x) = sum_{k=1}^r x_{k mod r} x_{(k+1) mod r}`` (NFA paper, equation 2).

    It depends on the first ``r`` coordinates, as a ring. For standard normal inputs and r >= 3 its mean is 0 and its
    variance r; for r=2 both terms are equal, and the variance is 4.

    Args:
        X: Inputs, shape ``(..., d)`` with d >= r.
        r: Length of the chain, at least 2.

    Returns:
        Values, shape ``(..., 1)``, as from a network with one output.

    Raises:
        InputError: ``r`` is not from 2 to d.

    Example:
        >>> chain_monomial(torch.tensor([[1.0, 2.0, 3.0, 9.0]]), r=3)
        tensor([[11.]])
    """
    _check_chain(X.shape[-1], r)
    ring = X[..., :r]
    return (ring * ring.roll(-1, -1)).sum(-1, keepdim=True)


def chain_monomial_egop(d: int, r: int = 5, covariance: Tensor | None = None) -> Tensor:
    """Compute the exact expected gradient outer product of the chain monomial over ``x ~ N(0, covariance)``.

    The target is a quadratic form with the constant Hessian ``H_ij = [i = j+1 mod r] + [i = j-1 mod r]``; its gradient
    is ``H x``, and ``E[grad grad^T] = H covariance H``. For the identity and r >= 5 this is 2 on the diagonal, 1 at
    cyclic distance 2 and 0 elsewhere, with eigenvalues ``4 cos^2(2 pi k / r)``: the rank is r unless 4 divides r.
    Shorter chains overlap with themselves: r=2 gives 4I, r=3 gives I + 11^T, and r=4 has 2 on the diagonal and between
    opposite coordinates.

    Args:
        d: Number of input coordinates.
        r: Length of the chain, from 2 to d.
        covariance: Covariance of the inputs, shape ``(d, d)``. None is the identity.

    Returns:
        EGOP, shape ``(d, d)``, in float64, zero outside the first r rows and columns.

    Raises:
        InputError: ``r`` is not from 2 to d, or the covariance has another shape.

    Example:
        >>> from featlearn.datasets import chain_monomial_egop
        >>> chain_monomial_egop(4, r=3).tolist()
        [[2.0, 1.0, 1.0, 0.0], [1.0, 2.0, 1.0, 0.0], [1.0, 1.0, 2.0, 0.0], [0.0, 0.0, 0.0, 0.0]]
    """
    _check_chain(d, r)
    shift = torch.eye(r, dtype=torch.float64).roll(1, 0)
    hessian = torch.zeros(d, d, dtype=torch.float64)
    hessian[:r, :r] = shift + shift.mT
    if covariance is None:
        return hessian @ hessian
    if covariance.shape != (d, d):
        raise InputError(f"covariance must be of shape ({d}, {d}), got {tuple(covariance.shape)}")
    return hessian @ covariance.detach().to("cpu", torch.float64) @ hessian


def chain_monomial_task(
    n: int,
    d: int,
    r: int = 5,
    n_test: int = 0,
    generator: Seed = None,
    dtype: torch.dtype | None = None,
    covariance_decay: float = 0.0,
) -> RegressionTask:
    """Create a task with Gaussian inputs and chain-monomial labels (NFA paper, equation 2, appendix J).

    Training labels are divided by their standard deviation (over n, without centering); test labels and ``target`` have
    the same factor. Numbers are drawn in float64 and then rounded, so that a task has the same points in every dtype.

    Args:
        n: Number of training points, at least 2.
        d: Number of input coordinates.
        r: Length of the chain, from 2 to d.
        n_test: Number of test points.
        generator: Generator or integer seed. None is seed 0.
        dtype: Type of inputs and labels. None is torch's default.
        covariance_decay: Exponent of the data spectrum, as in `decaying_covariance`; 0 is isotropic.

    Returns:
        The task; its exact EGOP is ``task.scale**2 * chain_monomial_egop(d, r, task.covariance)``.

    Raises:
        InputError: An argument is not allowed.

    Example:
        >>> chain_monomial_task(100, 10, n_test=20).X.shape
        torch.Size([100, 10])
    """
    _check_chain(d, r)
    target = partial(chain_monomial, r=r)
    return gaussian_task(target, n, d, n_test, as_generator(generator, "chain_monomial"), dtype, covariance_decay)


Terms = Mapping[tuple[int, ...], float]
"""Coefficient of each monomial by its coordinates, with repetitions for powers."""


def polynomial(X: Tensor, terms: Terms) -> Tensor:
    """Compute the polynomial ``y(x) = sum_t c_t prod_{i in t} x_i``.

    Args:
        X: Inputs, shape ``(..., d)``.
        terms: Coefficient of each monomial by its coordinates: ``{(0, 1): 1.0, (2, 2, 2): -0.5, (): 3.0}`` is
            ``x_0 x_1 - x_2^3 / 2 + 3``.

    Returns:
        Values, shape ``(..., 1)``, as from a network with one output.

    Raises:
        InputError: There are no terms, or a term has other coordinates or a coefficient that is not finite.

    Example:
        >>> polynomial(torch.tensor([[2.0, 3.0, 5.0]]), {(0, 1): 1.0, (2, 2): 10.0, (): 0.5})
        tensor([[256.5000]])
    """
    _check_terms(terms, X.shape[-1])
    value = X.new_zeros(*X.shape[:-1], 1)
    for coordinates, coefficient in terms.items():
        value = value + coefficient * X[..., list(coordinates)].prod(-1, keepdim=True)
    return value


def _check_terms(terms: Terms, d: int) -> None:
    if not terms:
        raise InputError("terms must be one or more terms such as {(0, 1): 1.0}, got none")
    for coordinates, coefficient in terms.items():
        if not isinstance(coordinates, tuple) or not all(isinstance(i, int) and 0 <= i < d for i in coordinates):
            raise InputError(f"a key of terms must be a tuple of coordinates from 0 to {d - 1}, got {coordinates!r}")
        if not math.isfinite(coefficient):
            raise InputError(f"the coefficient of {coordinates!r} must be finite, got {coefficient!r}")


def polynomial_task(
    terms: Terms,
    n: int,
    d: int,
    n_test: int = 0,
    generator: Seed = None,
    dtype: torch.dtype | None = None,
    covariance: Tensor | float | None = None,
) -> RegressionTask:
    """Create a task with Gaussian inputs and labels of a `polynomial` (NFA paper, appendix J).

    Labels are scaled to standard deviation 1.

    Args:
        terms: Coefficient of each monomial by its coordinates, as in `polynomial`.
        n: Number of training points, at least 2.
        d: Number of input coordinates.
        n_test: Number of test points.
        generator: Generator or integer seed. None is seed 0.
        dtype: Type of inputs and labels. None is torch's default.
        covariance: Covariance of the inputs, shape ``(d, d)``, or the exponent of `decaying_covariance`. None is the
            identity.

    Returns:
        The task.

    Raises:
        InputError: An argument is not allowed.

    Example:
        >>> from featlearn.datasets import polynomial_task
        >>> task = polynomial_task({(0, 1): 1.0, (2,): 0.5}, n=100, d=5, n_test=20)  # x0 x1 + x2 / 2
        >>> task.X.shape, task.y_test.shape
        (torch.Size([100, 5]), torch.Size([20, 1]))
        >>> round(float(task.y.std(correction=0)), 4)
        1.0
    """
    _check_terms(terms, d)
    target = partial(polynomial, terms=dict(terms))
    return gaussian_task(target, n, d, n_test, as_generator(generator, "polynomial"), dtype, covariance)


@dataclass(frozen=True, eq=False)
class SquaredProjections:
    """Sum of squared projections, ``y(x) = sum_i (Q x)_i^2`` (NFA paper, appendix J, figure 7).

    Attributes:
        matrix: Projections Q, shape ``(rank, d)``, in float64.

    Example:
        >>> import torch
        >>> from featlearn.datasets import SquaredProjections
        >>> target = SquaredProjections(torch.tensor([[1.0, 0.0, 0.0], [0.0, 2.0, 0.0]], dtype=torch.float64))
        >>> target(torch.ones(1, 3)).tolist()
        [[5.0]]
        >>> target.egop().diagonal().tolist()
        [4.0, 64.0, 0.0]
    """

    matrix: Tensor

    def __call__(self, X: Tensor) -> Tensor:
        """Return the target at ``(..., d)`` inputs, shape ``(..., 1)``, in float64 and then rounded to their dtype."""
        projections = X.double() @ self.matrix.to(X.device).mT
        return projections.square().sum(-1, keepdim=True).to(X.dtype)

    def egop(self, covariance: Tensor | None = None) -> Tensor:
        """Compute the exact EGOP ``4 Q^T Q covariance Q^T Q`` over ``x ~ N(0, covariance)``.

        Args:
            covariance: Covariance of the inputs, shape ``(d, d)``. None is the identity.

        Returns:
            EGOP, shape ``(d, d)``, in float64.
        """
        form = self.matrix.mT @ self.matrix
        return 4 * (form @ form if covariance is None else form @ as_float64(covariance) @ form)


def high_rank_task(
    n: int,
    d: int,
    rank: int | None = None,
    n_test: int = 0,
    generator: Seed = None,
    dtype: torch.dtype | None = None,
    covariance: Tensor | float | None = None,
) -> RegressionTask:
    """Create the "high rank polynomial" task, ``y(x) = sum_i (Q x)_i^2`` (NFA paper, appendix J, figure 7).

    Q is standard normal, and n = d = 128 in the paper. Labels are scaled to standard deviation 1 and, as in the paper,
    not centered: their mean is about ``sqrt(d) / 2``.

    Args:
        n: Number of training points, at least 2.
        d: Number of input coordinates.
        rank: Number of rows of Q, at least 1. None is d, as in the paper.
        n_test: Number of test points.
        generator: Generator or integer seed. None is seed 0.
        dtype: Type of inputs and labels. None is torch's default.
        covariance: Covariance of the inputs, shape ``(d, d)``, or the exponent of `decaying_covariance`. None is the
            identity.

    Returns:
        The task; ``task.target.function`` is the `SquaredProjections`, and the exact EGOP of the labels is
        ``task.scale**2 * task.target.function.egop(task.covariance)``.

    Raises:
        InputError: An argument is not allowed.

    Example:
        >>> import torch
        >>> from featlearn.datasets import high_rank_task
        >>> task = high_rank_task(100, 10, rank=3)
        >>> egop = task.scale**2 * task.target.function.egop(task.covariance)
        >>> egop.shape, int(torch.linalg.matrix_rank(egop))
        (torch.Size([10, 10]), 3)
    """
    rows = check_int("rank", d if rank is None else rank, optional=True)
    generator = as_generator(generator, "high_rank")
    target = SquaredProjections(torch.randn(rows, d, generator=generator, dtype=torch.float64))
    return gaussian_task(target, n, d, n_test, generator, dtype, covariance)
