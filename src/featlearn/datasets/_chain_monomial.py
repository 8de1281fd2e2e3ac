"""The chain monomial: a target that reads a few coordinates of a Gaussian input, with an exact EGOP."""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor

from featlearn._utils.rng import Seed, as_generator
from featlearn.datasets._base import RegressionTask
from featlearn.datasets._gaussian_inputs import gaussian_task
from featlearn.errors import InputError


def _check_chain(d: int, r: int) -> None:
    if not 2 <= r <= d:
        raise InputError(f"the chain needs 2 <= r <= d coordinates, got r={r} with d={d}")


def chain_monomial(X: Tensor, r: int = 5) -> Tensor:
    """The chain monomial ``y(x) = sum_{k=1}^r x_{k mod r} x_{(k+1) mod r}`` (NFA paper, equation 2).

    It reads the first ``r`` coordinates in a ring. For standard normal inputs and r >= 3 its mean is 0 and
    its variance r (for r=2 the two terms are one and the same: variance 4).

    Args:
        X: ``(..., d)`` with d >= r.
        r: Length of the chain, at least 2.

    Returns:
        ``(..., 1)``, like a network with one output.

    >>> chain_monomial(torch.tensor([[1.0, 2.0, 3.0, 9.0]]), r=3)
    tensor([[11.]])
    """
    _check_chain(X.shape[-1], r)
    ring = X[..., :r]
    return (ring * ring.roll(-1, -1)).sum(-1, keepdim=True)


def chain_monomial_egop(d: int, r: int = 5, covariance: Tensor | None = None) -> Tensor:
    """Exact expected gradient outer product of the chain monomial over ``x ~ N(0, covariance)``.

    The target is a quadratic form with the constant Hessian ``H_ij = [i = j+1 mod r] + [i = j-1 mod r]``;
    its gradient is ``H x``, so ``E[grad grad^T] = H covariance H``. For the identity and r >= 5 that is 2 on
    the diagonal, 1 at cyclic distance 2 and 0 elsewhere, with eigenvalues ``4 cos^2(2 pi k / r)``: the rank
    is r unless 4 divides r. Shorter chains wrap onto themselves: r=2 gives 4I, r=3 gives I + 11^T, and r=4
    has 2 on the diagonal and between opposite coordinates.

    Args:
        d: Number of input coordinates.
        r: Length of the chain.
        covariance: ``(d, d)``, the identity by default.

    Returns:
        ``(d, d)`` in float64, zero outside the first r rows and columns.
    """
    _check_chain(d, r)
    shift = torch.eye(r, dtype=torch.float64).roll(1, 0)
    hessian = torch.zeros(d, d, dtype=torch.float64)
    hessian[:r, :r] = shift + shift.mT
    if covariance is None:
        return hessian @ hessian
    if covariance.shape != (d, d):
        raise InputError(f"covariance must be ({d}, {d}), got {tuple(covariance.shape)}")
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
    """Gaussian inputs with chain-monomial labels of standard deviation 1 (NFA paper, equation 2, appendix J).

    Training labels are divided by their own standard deviation (over n, without centering); test labels and
    ``target`` carry the same factor. Numbers are drawn in float64 and then rounded, so that a task has the
    same points in every dtype.

    Args:
        n: Number of training points.
        d: Number of input coordinates.
        r: Length of the chain.
        n_test: Number of test points.
        generator: Generator or integer seed.
        dtype: Of inputs and labels; torch's default if None.
        covariance_decay: Exponent of the data spectrum, see `decaying_covariance`; 0 is isotropic.

    Returns:
        The task; its exact EGOP is ``task.scale**2 * chain_monomial_egop(d, r, task.covariance)``.
    """
    _check_chain(d, r)
    target = partial(chain_monomial, r=r)
    return gaussian_task(target, n, d, n_test, as_generator(generator, "chain_monomial"), dtype, covariance_decay)
