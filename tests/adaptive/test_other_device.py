"""Estimators of a network that is not on the CPU compute where it is, and give the same numbers."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import featlearn as fl
from other_device import DEVICE, OtherDevice, OtherTensor, moved

rng = np.random.default_rng(0)
X, Z = rng.standard_normal((24, 3)), rng.standard_normal((5, 3))
Y = np.stack([np.tanh(2 * X[:, 0]), X[:, 1] * X[:, 2]], axis=1)


def net(outputs: int) -> nn.Module:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(3, 12), nn.LayerNorm(12), nn.Tanh(), nn.Linear(12, outputs)).double()


def test_the_device_refuses_what_a_gpu_refuses() -> None:
    with OtherDevice():
        test_rows = torch.ones(3, device=DEVICE)
        assert isinstance(test_rows, OtherTensor)
        assert test_rows.device == DEVICE
        assert (2 * test_rows + torch.tensor(1.0)).sum().item() == 9.0
        assert test_rows.cpu().numpy().tolist() == [1.0, 1.0, 1.0]
        with pytest.raises(RuntimeError, match="same device"):
            test_rows + torch.ones(3)
        with pytest.raises((TypeError, RuntimeError), match="numpy"):
            test_rows.numpy()


ESTIMATORS: dict[str, Callable[[Any], Any]] = {
    "lazy": lambda model: fl.LazyRegressor(model, ridge=1e-3),
    "lazy, batches": lambda model: fl.LazyRegressor(model, ridge=1e-3, batch_size=7),
    "adaptive": lambda model: fl.AdaptiveTangentRegressor(model, n_iter=5, tolerance=0.5, random_state=0),
    "adaptive, restarts": lambda model: fl.AdaptiveTangentRegressor(
        model, scale=0.1, ridge=1e-3, n_iter=5, restarts=1, tolerance=0.5, random_state=0
    ),
    "adaptive, diagonal": lambda model: fl.AdaptiveTangentRegressor(
        model, structure="diagonal", scale=0.1, ridge=1e-3, n_iter=5, tolerance=0.5
    ),
    "adaptive, without a ridge": lambda model: fl.AdaptiveTangentRegressor(
        model, scale=1.0, ridge=0.0, n_iter=5, tolerance=0.5
    ),
}


@pytest.mark.parametrize("outputs", [1, 2])
@pytest.mark.parametrize("name", ESTIMATORS)
def test_labels_and_kernels_follow_the_network(name: str, outputs: int) -> None:
    y = Y[:, 0] if outputs == 1 else Y
    here = ESTIMATORS[name](net(outputs)).fit(X, y)
    elsewhere = moved(net(outputs))
    with OtherDevice():
        test_rows = ESTIMATORS[name](elsewhere).fit(X, y)
        assert test_rows.X_fit_.device == DEVICE
        assert next(test_rows.model_.parameters()).device == DEVICE
        result = test_rows.predict(Z)
        kernel = None if "lazy" in name else (test_rows.adapted_kernel(Z), test_rows.adapted_kernel(Z, X))
        errors = test_rows.predict(Z, return_error=True)[1] if "lazy" in name else None
    np.testing.assert_allclose(result, here.predict(Z), rtol=1e-7, atol=1e-9)
    np.testing.assert_allclose(test_rows.dual_coef_, here.dual_coef_, rtol=1e-6, atol=1e-9)
    if kernel is not None:
        for mine, wanted in zip(kernel, (here.adapted_kernel(Z), here.adapted_kernel(Z, X)), strict=True):
            np.testing.assert_allclose(mine, wanted, rtol=1e-7, atol=1e-9)
        for layer, change in here.coefficients_.items():
            np.testing.assert_allclose(test_rows.coefficients_[layer], change, rtol=1e-6, atol=1e-9)
    if errors is not None:
        np.testing.assert_allclose(errors, here.predict(Z, return_error=True)[1], rtol=1e-5)


def test_a_factory_may_make_the_network_elsewhere() -> None:
    with OtherDevice():
        result = fl.LazyRegressor(lambda *_: moved(net(1)), ridge=1e-3).fit(X, Y[:, 0]).predict(Z)
    wanted = fl.LazyRegressor(lambda *_: copy.deepcopy(net(1)), ridge=1e-3).fit(X, Y[:, 0]).predict(Z)
    np.testing.assert_allclose(result, wanted, rtol=1e-7, atol=1e-9)
