"""Lazy regression: against equation (6) written out, its limits, and scikit-learn's checks."""

from __future__ import annotations

import copy

import numpy as np
import pytest
import torch
from sklearn.base import clone
from sklearn.exceptions import ConvergenceWarning
from sklearn.model_selection import cross_val_score
from sklearn.utils.estimator_checks import parametrize_with_checks
from torch import Tensor, nn

import featlearn as fl
from featlearn.kernels import LazyRegressor, ntk
from featlearn.models import mlp

generator = torch.Generator().manual_seed(0)
X = torch.randn(40, 6, generator=generator, dtype=torch.float64).numpy()
Z = torch.randn(9, 6, generator=generator, dtype=torch.float64).numpy()
Y = np.stack([np.sin(X[:, 0]), X[:, 1] * X[:, 2]], axis=1)


def factory(features: int, outputs: int, source: torch.Generator) -> nn.Module:
    return mlp([features, 30, outputs], activation="tanh", bias=True, generator=source)


@parametrize_with_checks([LazyRegressor(random_state=0, ridge=1e-3)])
def test_scikit_learn(estimator, check) -> None:
    check(estimator)


def tangents(model: nn.Module, points: np.ndarray) -> Tensor:
    """Gradients of each output in all parameters, (n c, parameters)."""
    values = [value for x in torch.as_tensor(points) for value in model(x[None])[0]]
    parameters = list(model.parameters())
    grads = [torch.autograd.grad(value, parameters, retain_graph=True) for value in values]
    return torch.stack([torch.cat([g.reshape(-1) for g in result]) for result in grads])


@pytest.mark.parametrize("ridge", [0.0, 1e-3])
def test_equation_6_of_several_outputs(ridge: float) -> None:
    model = factory(6, 2, torch.Generator().manual_seed(1)).double()
    result = LazyRegressor(model, ridge=ridge).fit(X, Y)
    train, test = tangents(model, X), tangents(model, Z)
    with torch.no_grad():
        residual = torch.as_tensor(Y) - model(torch.as_tensor(X))
        system = train @ train.T + len(X) * ridge * torch.eye(len(train), dtype=torch.float64)
        step = train.T @ torch.linalg.solve(system, residual.reshape(-1))
        expected = (model(torch.as_tensor(Z)) + (test @ step).reshape(-1, 2)).numpy()
    assert result.predict(Z) == pytest.approx(expected, rel=1e-7, abs=1e-9)
    assert result.rank_ == 80
    if not ridge:
        assert result.predict(X) == pytest.approx(Y, abs=1e-8)
        assert result.training_residual_ < 1e-9


def test_a_repeated_sample_with_two_labels_gets_their_mean() -> None:
    points, labels = np.concatenate([X, X[:1]]), np.concatenate([Y[:, 0], [5.0]])
    result = LazyRegressor(factory, random_state=0).fit(points, labels)
    assert result.rank_ == 40
    assert result.predict(X[:1])[0] == pytest.approx((Y[0, 0] + 5.0) / 2, abs=1e-8)
    assert result.predict(X[1:]) == pytest.approx(Y[1:, 0], abs=1e-8)
    assert result.training_residual_ > 0.01


def test_fewer_parameters_than_samples_is_least_squares() -> None:
    model = nn.Linear(6, 1).double()
    result = LazyRegressor(model).fit(X, Y[:, 0])
    design = np.concatenate([X, np.ones((40, 1))], axis=1)
    expected = np.concatenate([Z, np.ones((9, 1))], axis=1) @ np.linalg.lstsq(design, Y[:, 0], rcond=None)[0]
    assert result.rank_ == 7
    assert result.predict(Z) == pytest.approx(expected, abs=1e-10)


def test_the_error_says_what_rounding_does() -> None:
    model = factory(6, 1, torch.Generator().manual_seed(1))
    near = np.concatenate([X, X + 1e-3])  # neighbors make the kernel nearly singular
    labels = np.concatenate([Y[:, 0], Y[:, 0]])
    exact = LazyRegressor(model, tolerance=0.0).fit(near, labels)
    with pytest.warns(ConvergenceWarning, match="condition number"):
        rough = LazyRegressor(model, dtype="float32", tolerance=0.0).fit(near, labels)
    values, error = rough.predict(Z, return_error=True)
    gap = np.abs(values - exact.predict(Z))
    assert error.shape == gap.shape == (9,)
    assert (gap <= error).all()
    small = exact.predict(Z, return_error=True)[1]
    assert (small < 1e-6 * error).all()


def test_as_scikit_learn_users_expect() -> None:
    result = LazyRegressor(factory, random_state=3, ridge=1e-4)
    scores = cross_val_score(result, X, Y[:, 0], cv=3)
    assert scores.shape == (3,)
    again = clone(result)
    assert again.fit(X, Y[:, 0]).predict(Z) == pytest.approx(result.fit(X, Y[:, 0]).predict(Z))
    assert result.predict(Z).shape == (9,)
    assert result.fit(X, Y).predict(Z).shape == (9, 2)
    assert result.fit(X.tolist(), Y[:, :1].tolist()).predict(Z).shape == (9, 1)


def test_the_module_is_copied_and_its_kernel_is_ours() -> None:
    model = factory(6, 1, torch.Generator().manual_seed(1)).double()
    before = copy.deepcopy(model.state_dict())
    result = LazyRegressor(model).fit(X, Y[:, 0])
    with torch.no_grad():
        for p in model.parameters():
            p.zero_()
    assert all(torch.equal(before[name], value) for name, value in result.model_.state_dict().items())
    kernel = ntk(result.model_, torch.as_tensor(X))
    assert result.eigenvalues_ == pytest.approx(torch.linalg.eigvalsh(kernel).numpy(), rel=1e-9, abs=1e-9)


def test_bad_input() -> None:
    y = Y[:, 0]
    for options, message in (
        ({"ridge": -1.0}, "ridge must be"),
        ({"dtype": "float16"}, "dtype must be"),
        ({"tolerance": 1.0}, "tolerance must be"),
        ({"model": "mlp"}, "model must be a module, a factory"),
        ({"model": lambda a, b, c: None}, "the factory must return a module"),
        ({"model": nn.Linear(6, 3)}, "as many outputs as labels, 1, got 3"),
    ):
        with pytest.raises(fl.InputError, match=message):
            LazyRegressor(**options).fit(X, y)
    dead = nn.Sequential(nn.Linear(6, 3), nn.ReLU(), nn.Linear(3, 1, bias=False))
    with torch.no_grad():
        dead[0].bias.fill_(-100.0)
    with pytest.raises(fl.InputError, match="tangent kernel is zero"):
        LazyRegressor(dead).fit(X, y)
