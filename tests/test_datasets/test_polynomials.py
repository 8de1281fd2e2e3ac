import math
import pickle

import pytest
import torch

from featlearn.datasets import (
    chain_monomial,
    covariance_with,
    gaussian_task,
    high_rank_task,
    polynomial,
    polynomial_task,
    sphere_task,
)
from featlearn.errors import InputError


def normal(n, d, seed=0):
    return torch.randn(n, d, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def autograd_egop(target, X):
    X = X.clone().requires_grad_(True)
    (gradient,) = torch.autograd.grad(target(X).sum(), X)
    return gradient.mT @ gradient / len(X)


def test_a_polynomial_is_the_sum_of_its_terms():
    X = normal(6, 4)
    terms = {(0, 1): 2.0, (2, 2, 2): -0.5, (): 3, (3,): 1.0}
    expected = 2 * X[:, 0] * X[:, 1] - 0.5 * X[:, 2] ** 3 + 3 + X[:, 3]
    torch.testing.assert_close(polynomial(X, terms), expected[:, None])
    assert polynomial(X[0], terms).shape == (1,)
    ring = {(i, (i + 1) % 4): 1.0 for i in range(4)}
    torch.testing.assert_close(polynomial(X, ring), chain_monomial(X, 4))


def test_polynomial_task():
    terms = {(0, 1): 1.0, (2,): 2.0}
    task = polynomial_task(terms, 100, 5, 20, generator=2, dtype=torch.float64)
    terms[(3,)] = 9.0  # the task keeps its own
    assert float(task.y.std(correction=0)) == pytest.approx(1)
    torch.testing.assert_close(task.y_test, task.scale * polynomial(task.X_test, {(0, 1): 1.0, (2,): 2.0}))
    torch.testing.assert_close(pickle.loads(pickle.dumps(task)).target(task.X), task.y)
    assert torch.equal(polynomial_task({(0,): 1.0}, 100, 5, generator=2, dtype=torch.float64).X, task.X)


def test_high_rank_polynomial_and_its_egop():
    task = high_rank_task(128, 16, n_test=30, generator=1, dtype=torch.float64)
    form = task.target.function
    assert form.matrix.shape == (16, 16)
    assert torch.linalg.matrix_rank(form.matrix) == 16
    torch.testing.assert_close(task.y, task.scale * (task.X @ form.matrix.mT).square().sum(1, keepdim=True))
    assert float(task.y.std(correction=0)) == pytest.approx(1)
    # The gradient is linear, so points with the covariance exactly give the expectation without noise.
    covariance = covariance_with(torch.arange(1.0, 17), 4)
    whitened = math.sqrt(32) * torch.linalg.qr(normal(32, 16))[0]
    X = whitened @ torch.linalg.cholesky(covariance).mT
    torch.testing.assert_close(autograd_egop(form, X), form.egop(covariance))
    torch.testing.assert_close(autograd_egop(form, whitened), form.egop())
    assert high_rank_task(10, 16, rank=3).target.function.matrix.shape == (3, 16)


def test_labels_of_the_high_rank_polynomial_are_not_centered():
    task = high_rank_task(4000, 64, generator=0)
    assert float(task.y.mean()) == pytest.approx(math.sqrt(64) / 2, rel=0.1)


def test_gaussian_inputs_of_any_spectrum():
    values = torch.tensor([4.0, 1.0, 0.25])
    covariance = covariance_with(values, 1)
    torch.testing.assert_close(torch.linalg.eigvalsh(covariance), values.double().sort().values)
    task = gaussian_task(chain, 100_000, 3, generator=5, dtype=torch.float64, covariance=covariance)
    torch.testing.assert_close(task.X.mT @ task.X / 100_000, covariance, atol=0.06, rtol=0)
    assert torch.equal(task.covariance, covariance)
    decaying = gaussian_task(chain, 10, 3, covariance=1.0)
    torch.testing.assert_close(torch.linalg.eigvalsh(decaying.covariance), 1 / torch.tensor([3.0, 2, 1]).double())
    assert gaussian_task(chain, 10, 3, covariance=0.0).covariance is None


def chain(X):
    return chain_monomial(X, 3)


def test_points_on_the_sphere():
    task = sphere_task(chain, 20_000, 6, 10, generator=1, dtype=torch.float64)
    for X in (task.X, task.X_test):
        torch.testing.assert_close(X.norm(dim=1), torch.full((len(X),), math.sqrt(6), dtype=torch.float64))
    torch.testing.assert_close(task.X.mT @ task.X / 20_000, torch.eye(6).double(), atol=0.05, rtol=0)
    torch.testing.assert_close(task.X.mean(0), torch.zeros(6).double(), atol=0.05, rtol=0)
    torch.testing.assert_close(task.target(task.X), task.y)
    assert torch.equal(sphere_task(chain, 20_000, 6, generator=1, dtype=torch.float64).X, task.X)


@pytest.mark.parametrize(
    "call",
    [
        lambda: polynomial(torch.zeros(2, 3), {}),
        lambda: polynomial(torch.zeros(2, 3), {(3,): 1.0}),
        lambda: polynomial(torch.zeros(2, 3), {(-1,): 1.0}),
        lambda: polynomial_task({(0, "1"): 1.0}, 9, 3),
        lambda: polynomial_task({0: 1.0}, 9, 3),
        lambda: polynomial_task({(0,): math.nan}, 9, 3),
        lambda: polynomial_task({(): 3.0}, 9, 3),  # constant
        lambda: high_rank_task(9, 3, rank=0),
        lambda: covariance_with([1.0, 0.0]),
        lambda: covariance_with([]),
        lambda: gaussian_task(chain, 9, 3, covariance=torch.eye(4)),
        lambda: gaussian_task(chain, 9, 3, covariance=-torch.eye(3)),
        lambda: gaussian_task(chain, 9, 3, covariance=torch.eye(3).roll(1, 0)),
        lambda: gaussian_task(chain, 9, 3, covariance=-1.0),
        lambda: gaussian_task(lambda X: X, 9, 3),
        lambda: gaussian_task(lambda X: X[:, :1] / 0, 9, 3),
        lambda: sphere_task(chain, 1, 3),
    ],
)
def test_bad_arguments(call):
    with pytest.raises(InputError):
        call()
