"""Inputs with a known law, Gaussian with any spectrum or uniform on a sphere, for targets that are functions."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from featlearn._utils.rng import Seed, as_generator
from featlearn.datasets._base import RegressionTask, check_sizes, orthonormal_columns
from featlearn.errors import InputError


def covariance_with(eigenvalues: Sequence[float] | Tensor, generator: Seed = None) -> Tensor:
    """A covariance with given eigenvalues in a random basis.

    Args:
        eigenvalues: d positive numbers.
        generator: Source of the Haar-distributed basis.

    Returns:
        ``(d, d)`` in float64.
    """
    values = torch.as_tensor(eigenvalues, dtype=torch.float64)
    if values.ndim != 1 or not len(values) or not (values > 0).all() or not torch.isfinite(values).all():
        raise InputError(f"eigenvalues must be one or more positive numbers, got {eigenvalues!r}")
    q = orthonormal_columns(len(values), len(values), as_generator(generator, "covariance"))
    covariance: Tensor = (q * values) @ q.mT
    return 0.5 * (covariance + covariance.mT)


def decaying_covariance(d: int, decay: float, generator: Seed = None) -> Tensor:
    """A covariance with eigenvalues ``1 / (1 + k^decay)``, k = 0 ... d-1, in a random basis (NFA appendix H).

    A decay of 0 stands for the identity, the paper's first spectrum.

    Args:
        d: Number of coordinates.
        decay: Exponent, 0 or more; the paper has 0, 1 and 2.
        generator: Source of the Haar-distributed basis.

    Returns:
        ``(d, d)`` in float64.
    """
    if not decay >= 0:
        raise InputError(f"the decay of the data spectrum must be 0 or more, got {decay}")
    if decay == 0:
        return torch.eye(d, dtype=torch.float64)
    return covariance_with(1 / (1 + torch.arange(d, dtype=torch.float64) ** decay), generator)


def draw_gaussian(n: int, d: int, covariance: Tensor | None, generator: torch.Generator) -> Tensor:
    """``(n, d)`` rows of N(0, covariance) in float64; None stands for the identity."""
    X = torch.randn(n, d, generator=generator, dtype=torch.float64)
    return X if covariance is None else X @ torch.linalg.cholesky(covariance).mT


@dataclass(frozen=True, eq=False)
class Scaled:
    """A function times a number.

    Attributes:
        function: Of ``(..., d)`` inputs, with values ``(..., 1)``.
        scale: The number.
    """

    function: Callable[[Tensor], Tensor]
    scale: float

    def __call__(self, X: Tensor) -> Tensor:
        """``scale * function(X)``."""
        return self.scale * self.function(X)


def scaled_task(
    target: Callable[[Tensor], Tensor],
    X: Tensor,
    X_test: Tensor,
    dtype: torch.dtype | None = None,
    covariance: Tensor | None = None,
) -> RegressionTask:
    """Labels of a target at given points, scaled to standard deviation 1 (NFA paper, appendix J).

    Training labels are divided by their own standard deviation (over n, without centering); test labels and the
    task's ``target`` carry the same factor.

    Args:
        target: Function of ``(n, d)`` inputs with values ``(n, 1)``.
        X: Training inputs, in float64.
        X_test: Test inputs, in float64.
        dtype: To which inputs and labels are rounded; torch's default if None.
        covariance: Of the inputs; None stands for the identity.
    """
    values = target(X)
    if values.shape != (len(X), 1):
        raise InputError(f"the target must return a column of {len(X)} labels, got shape {tuple(values.shape)}")
    std = float(values.std(correction=0))
    if not (math.isfinite(std) and std > 1e-12 * float(values.abs().max())):
        raise InputError("the target is constant or not finite on the training inputs: its labels have no scale")
    scaled = Scaled(target, 1 / std)
    dtype = torch.get_default_dtype() if dtype is None else dtype
    return RegressionTask(
        X=X.to(dtype),
        y=scaled(X).to(dtype),
        X_test=X_test.to(dtype),
        y_test=scaled(X_test).to(dtype),
        target=scaled,
        scale=scaled.scale,
        covariance=covariance,
    )


def gaussian_task(
    target: Callable[[Tensor], Tensor],
    n: int,
    d: int,
    n_test: int = 0,
    generator: Seed = None,
    dtype: torch.dtype | None = None,
    covariance: Tensor | float | None = None,
) -> RegressionTask:
    """Gaussian inputs with labels of any target, scaled to standard deviation 1.

    Numbers are drawn in float64 and then rounded, so that a task has the same points in every dtype.

    Args:
        target: Function of ``(n, d)`` inputs with values ``(n, 1)``; it is called in float64.
        n: Number of training points.
        d: Number of input coordinates.
        n_test: Number of test points.
        generator: Generator or integer seed.
        dtype: Of inputs and labels; torch's default if None.
        covariance: ``(d, d)`` positive definite, see `covariance_with`; a number is the exponent of
            `decaying_covariance` in a basis drawn with the points; None is the identity.
    """
    check_sizes(n, n_test)
    generator = as_generator(generator, "gaussian")
    if isinstance(covariance, (int, float)):
        covariance = None if covariance == 0 else decaying_covariance(d, covariance, generator)
    elif covariance is not None:
        covariance = _checked(covariance, d)
    # Test points are drawn after the training points, so that asking for some leaves the others as they are.
    X, X_test = (draw_gaussian(m, d, covariance, generator) for m in (n, n_test))
    return scaled_task(target, X, X_test, dtype, covariance)


def _checked(covariance: Tensor, d: int) -> Tensor:
    full = covariance.detach().to("cpu", torch.float64)
    if full.shape != (d, d) or not torch.allclose(full, full.mT) or int(torch.linalg.cholesky_ex(full).info):
        raise InputError(f"covariance must be ({d}, {d}), symmetric and positive definite: {tuple(full.shape)}")
    return full


def sphere_task(
    target: Callable[[Tensor], Tensor],
    n: int,
    d: int,
    n_test: int = 0,
    generator: Seed = None,
    dtype: torch.dtype | None = None,
) -> RegressionTask:
    """Inputs uniform on the sphere of radius ``sqrt(d)``, with labels of any target (NFA paper, 4.2, theorem 9).

    The covariance is the identity. Arguments are those of `gaussian_task`.
    """
    check_sizes(n, n_test)
    generator = as_generator(generator, "sphere")
    X, X_test = (_on_sphere(draw_gaussian(m, d, None, generator)) for m in (n, n_test))
    return scaled_task(target, X, X_test, dtype)


def _on_sphere(X: Tensor) -> Tensor:
    radius: Tensor = X.norm(dim=1, keepdim=True)
    return X * (math.sqrt(X.shape[1]) / radius)
