"""Kernels that grow until the ridge is lost in their rounding."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from sklearn.exceptions import ConvergenceWarning

from featlearn.errors import SingularKernelError
from featlearn.rfm import RFMRegressor
from featlearn.rfm._dense_solver import KernelSolver
from featlearn.rfm.kernels import make_kernel

rng = np.random.default_rng(0)
X, Z = rng.standard_normal((50, 4)), rng.standard_normal((10, 4))
Y = np.sin(X[:, 0]) + X[:, 1] * X[:, 2]


def by_hand(iterations: int, bandwidth: float, ridge: float) -> tuple[np.ndarray, list[float]]:
    """Predictions of the exponential kernel with M = AGOP, without rescaling, and the largest kernel values."""
    unit = np.sqrt((Y**2).mean())
    m, largest = np.eye(4), []
    for _ in range(iterations + 1):
        kernel = np.exp(X @ m @ X.T / bandwidth**2)
        largest.append(kernel.max())
        alpha = np.linalg.solve(kernel + 50 * ridge * np.eye(50), Y / unit)
        used = m
        slopes = (kernel * alpha) @ (X @ m) / bandwidth**2
        m = slopes.T @ slopes / 50
    return unit * np.exp(Z @ used @ X.T / bandwidth**2) @ alpha, largest


def machine(iterations: int, bandwidth: float, ridge: float) -> RFMRegressor:
    return RFMRegressor(
        "exp", update="nfa", power=1.0, rescale=None, bandwidth=bandwidth, ridge=ridge, n_iter=iterations,
        validation=None, fit_intercept=False,
    )  # fmt: skip


def test_the_exponential_kernel_without_rescaling() -> None:
    expected, largest = by_hand(3, 2.0, 1e-3)
    assert max(largest) < 1e3
    assert machine(3, 2.0, 1e-3).fit(X, Y).predict(Z) == pytest.approx(expected, rel=1e-10)


def test_an_iteration_whose_ridge_is_lost_is_not_kept() -> None:
    """Bandwidth 1: after three updates the kernel has values of 1e40, and predictions were off by any factor."""
    _, largest = by_hand(3, 1.0, 1e-6)
    assert largest[3] > 1e30
    with pytest.warns(ConvergenceWarning, match="iteration .* failed"):
        result = machine(3, 1.0, 1e-6).fit(X, Y)
    kept = result.best_iteration_
    assert largest[kept] < 1e16 * 50e-6
    expected, _ = by_hand(kept, 1.0, 1e-6)
    assert result.predict(Z) == pytest.approx(expected, rel=1e-4)


def test_a_kernel_that_is_too_large_at_once_is_an_error() -> None:
    with pytest.raises(SingularKernelError, match=r"in whose rounding the ridge .* is lost. Pass rescale='trace'"):
        machine(1, 0.1, 1e-6).fit(X, Y)
    solver = KernelSolver(make_kernel("exp"), torch.full((2, 3), 10.0, dtype=torch.float64), 1.0)
    with pytest.raises(SingularKernelError, match="is lost"):
        solver.factor(torch.full((2,), 1e-3, dtype=torch.float64))
