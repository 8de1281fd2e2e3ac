"""Regression tasks with Gaussian inputs of any covariance, or inputs uniform on a sphere.

References:
    Beaglehole, Mitliagkas & Agarwala, "Feature learning as alignment", https://openreview.net/forum?id=JXCe2ZcUXr (NFA
    paper).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from featlearn._utils.rng import Seed, as_generator
from featlearn._utils.validation import check_number
from featlearn.datasets._base import RegressionTask, Target, check_sizes, orthonormal_columns
from featlearn.errors import InputError


def covariance_with(eigenvalues: Sequence[float] | Tensor, generator: Seed = None) -> Tensor:
    """Create a covariance with given eigenvalues in a random basis.

    Args:
        eigenvalues: Eigenvalues, d positive numbers.
        generator: Generator or integer seed of the Haar-distributed basis. None is seed 0.

    Returns:
        Covariance, shape ``(d, d)``, in float64.

    Raises:
        InputError: The eigenvalues are not positive and finite.

    Example:
        >>> import torch
        >>> from featlearn.datasets import covariance_with, gaussian_task
        >>> covariance = covariance_with([4.0, 1.0, 0.25])
        >>> [round(value, 4) for value in torch.linalg.eigvalsh(covariance).tolist()]
        [0.25, 1.0, 4.0]
        >>> task = gaussian_task(lambda X: X[:, :1], n=10, d=3, covariance=covariance)
        >>> task.X.shape
        torch.Size([10, 3])
    """
    values = torch.as_tensor(eigenvalues, dtype=torch.float64)
    if values.ndim != 1 or not len(values) or not (values > 0).all() or not torch.isfinite(values).all():
        raise InputError(f"eigenvalues must be one or more positive numbers, got {eigenvalues!r}")
    q = orthonormal_columns(len(values), len(values), as_generator(generator, "covariance"))
    covariance: Tensor = (q * values) @ q.mT
    return 0.5 * (covariance + covariance.mT)


def decaying_covariance(d: int, decay: float, generator: Seed = None) -> Tensor:
    """Create a covariance with eigenvalues ``1 / (1 + k^decay)``, k = 0 ... d-1 (NFA paper, appendix H).

    A decay of 0 gives the identity, the first spectrum of the paper.

    Args:
        d: Number of coordinates.
        decay: Exponent of the spectrum, 0 or more; 0, 1 and 2 in the paper.
        generator: Generator or integer seed of the Haar-distributed basis. None is seed 0.

    Returns:
        Covariance, shape ``(d, d)``, in float64.

    Raises:
        InputError: The decay is negative.

    Example:
        >>> import torch
        >>> from featlearn.datasets import decaying_covariance
        >>> covariance = decaying_covariance(4, decay=1.0)
        >>> [round(value, 4) for value in torch.linalg.eigvalsh(covariance).tolist()]  # 1/4, 1/3, 1/2, 1
        [0.25, 0.3333, 0.5, 1.0]
    """
    check_number("decay", decay, 0)
    if decay == 0:
        return torch.eye(d, dtype=torch.float64)
    return covariance_with(1 / (1 + torch.arange(d, dtype=torch.float64) ** decay), generator)


def draw_gaussian(n: int, d: int, covariance: Tensor | None, generator: torch.Generator) -> Tensor:
    """Draw ``(n, d)`` rows of N(0, covariance) in float64; None stands for the identity."""
    X = torch.randn(n, d, generator=generator, dtype=torch.float64)
    return X if covariance is None else X @ torch.linalg.cholesky(covariance).mT


@dataclass(frozen=True, eq=False)
class Scaled:
    """Function times a number.

    Attributes:
        function: Function of ``(..., d)`` inputs with values of shape ``(..., 1)``.
        scale: Factor of the function.
    """

    function: Target
    scale: float

    def __call__(self, X: Tensor) -> Tensor:
        """Return ``scale * function(X)``."""
        return self.scale * self.function(X)


def scaled_task(
    target: Target, X: Tensor, X_test: Tensor, dtype: torch.dtype | None = None, covariance: Tensor | None = None
) -> RegressionTask:
    """Create a task with labels of a target, scaled to standard deviation 1 (NFA paper, appendix J).

    Training labels are divided by their standard deviation (over n, without centering); test labels and the ``target``
    of the task have the same factor.

    Args:
        target: Function of ``(n, d)`` inputs with values of shape ``(n, 1)``.
        X: Training inputs, shape ``(n, d)``, in float64.
        X_test: Test inputs, shape ``(n_test, d)``, in float64.
        dtype: Type to which inputs and labels are rounded. None is torch's default.
        covariance: Covariance of the inputs, shape ``(d, d)``. None stands for the identity.

    Returns:
        The task.

    Raises:
        InputError: The target returns another shape, or constant or infinite labels.
    """
    values = target(X)
    if values.shape != (len(X), 1):
        raise InputError(f"target must return labels of shape ({len(X)}, 1), got {tuple(values.shape)}")
    std = float(values.std(correction=0))
    if not (math.isfinite(std) and std > 1e-12 * float(values.abs().max())):
        raise InputError("target must be finite and not constant on the training inputs, got labels without a scale")
    scaled = Scaled(target, 1 / std)
    dtype = torch.get_default_dtype() if dtype is None else dtype
    X, y, X_test, y_test = (values.to(dtype) for values in (X, scaled(X), X_test, scaled(X_test)))
    return RegressionTask(X, y, X_test, y_test, scaled, scaled.scale, covariance)


def gaussian_task(
    target: Target,
    n: int,
    d: int,
    n_test: int = 0,
    generator: Seed = None,
    dtype: torch.dtype | None = None,
    covariance: Tensor | float | None = None,
) -> RegressionTask:
    """Create a task with Gaussian inputs and labels of any target, scaled to standard deviation 1.

    Numbers are drawn in float64 and then rounded, so that a task has the same points in every dtype.

    Args:
        target: Function of ``(n, d)`` inputs with values of shape ``(n, 1)``; it is called in float64.
        n: Number of training points, at least 2.
        d: Number of input coordinates.
        n_test: Number of test points.
        generator: Generator or integer seed. None is seed 0.
        dtype: Type of inputs and labels. None is torch's default.
        covariance: Covariance of the inputs, positive definite, shape ``(d, d)``, such as from `covariance_with`; a
            number is the exponent of `decaying_covariance` in a basis drawn with the points. None is the identity.

    Returns:
        The task.

    Raises:
        InputError: An argument is not allowed, or the target is constant or not finite.

    Example:
        >>> task = gaussian_task(lambda X: X[:, :1] * X[:, 1:2], n=100, d=5, n_test=20)
        >>> task.X.shape, task.y_test.shape
        (torch.Size([100, 5]), torch.Size([20, 1]))
    """
    check_sizes(n, n_test)
    generator = as_generator(generator, "gaussian")
    if isinstance(covariance, (int, float)):
        covariance = None if covariance == 0 else decaying_covariance(d, covariance, generator)
    elif covariance is not None:
        covariance = covariance.detach().to("cpu", torch.float64)
        symmetric = covariance.shape == (d, d) and torch.allclose(covariance, covariance.mT)
        if not symmetric or int(torch.linalg.cholesky_ex(covariance).info):
            shape = tuple(covariance.shape)
            raise InputError(
                f"covariance must be symmetric and positive definite of shape ({d}, {d}), got shape {shape}"
            )
    # Test points are drawn last: their number does not change the training points.
    X, X_test = (draw_gaussian(m, d, covariance, generator) for m in (n, n_test))
    return scaled_task(target, X, X_test, dtype, covariance)


def sphere_task(
    target: Target, n: int, d: int, n_test: int = 0, generator: Seed = None, dtype: torch.dtype | None = None
) -> RegressionTask:
    """Create a task with inputs uniform on the sphere of radius ``sqrt(d)`` (NFA paper, sec. 4.2, theorem 9).

    The covariance is the identity, and labels are scaled to standard deviation 1.

    Args:
        target: Function of ``(n, d)`` inputs with values of shape ``(n, 1)``; it is called in float64.
        n: Number of training points, at least 2.
        d: Number of input coordinates.
        n_test: Number of test points.
        generator: Generator or integer seed. None is seed 0.
        dtype: Type of inputs and labels. None is torch's default.

    Returns:
        The task.

    Raises:
        InputError: An argument is not allowed, or the target is constant or not finite.

    Example:
        >>> from featlearn.datasets import sphere_task
        >>> task = sphere_task(lambda X: X[:, :1] ** 2, n=100, d=4, n_test=20)
        >>> task.X.shape, round(float(task.X[0].norm()), 4)
        (torch.Size([100, 4]), 2.0)
    """
    check_sizes(n, n_test)
    generator = as_generator(generator, "sphere")
    X, X_test = (draw_gaussian(m, d, None, generator) for m in (n, n_test))
    X, X_test = (points * (math.sqrt(d) / points.norm(dim=1, keepdim=True)) for points in (X, X_test))
    return scaled_task(target, X, X_test, dtype)
