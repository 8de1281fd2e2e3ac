import math
import pickle

import pytest
import torch

from featlearn.datasets import chain_monomial, chain_monomial_egop, chain_monomial_task, decaying_covariance
from featlearn.errors import InputError


def autograd_egop(target, X):
    X = X.clone().requires_grad_(True)
    (gradient,) = torch.autograd.grad(target(X).sum(), X)
    return gradient.mT @ gradient / len(X)


def normal(n, d, seed=0):
    return torch.randn(n, d, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def test_value_is_the_sum_written_in_the_paper():
    X = normal(7, 9)
    for r in (2, 3, 4, 5, 9):
        # The paper counts k from 1 and takes indices modulo r.
        expected = sum(X[:, k % r] * X[:, (k + 1) % r] for k in range(1, r + 1))
        torch.testing.assert_close(chain_monomial(X, r), expected[:, None])
    assert chain_monomial(X[0], 5).shape == (1,)


@pytest.mark.parametrize("r", [2, 3, 4, 5, 6, 8])
def test_egop_against_autograd_over_points_with_exact_moments(r):
    # The gradient is linear, so any points with covariance exactly I give the expectation without noise.
    d = 10
    X = math.sqrt(2 * d) * torch.linalg.qr(normal(2 * d, d))[0]
    torch.testing.assert_close(autograd_egop(lambda x: chain_monomial(x, r), X), chain_monomial_egop(d, r))


def test_egop_special_cases_and_spectrum():
    assert torch.equal(chain_monomial_egop(2, 2), 4 * torch.eye(2).double())
    assert torch.equal(chain_monomial_egop(3, 3), (torch.eye(3) + torch.ones(3, 3)).double())
    opposite = torch.eye(4).roll(2, 0)
    assert torch.equal(chain_monomial_egop(4, 4), 2 * (torch.eye(4) + opposite).double())
    egop = chain_monomial_egop(32, 5)
    assert set(egop[:5, :5].flatten().tolist()) == {0.0, 1.0, 2.0}
    assert egop[5:].abs().max() == 0
    assert egop[:, 5:].abs().max() == 0
    for r, rank in ((5, 5), (6, 6), (8, 6)):
        expected = torch.tensor([4 * math.cos(2 * math.pi * k / r) ** 2 for k in range(r)], dtype=torch.float64)
        values = torch.linalg.eigvalsh(chain_monomial_egop(r, r))
        torch.testing.assert_close(values, expected.sort().values, atol=1e-12, rtol=1e-12)
        assert torch.linalg.matrix_rank(chain_monomial_egop(r, r)) == rank


def test_egop_by_monte_carlo_under_a_decaying_covariance():
    d, n = 8, 200_000
    covariance = decaying_covariance(d, 1.0, 3)
    torch.testing.assert_close(
        torch.linalg.eigvalsh(covariance), 1 / torch.arange(d, 0, -1).double(), atol=1e-12, rtol=1e-12
    )
    assert (covariance - covariance.diag().diag()).abs().max() > 0.05  # the basis is not the standard one
    X = normal(n, d) @ torch.linalg.cholesky(covariance).mT
    exact = chain_monomial_egop(d, 5, covariance)
    torch.testing.assert_close(autograd_egop(chain_monomial, X), exact, atol=0.02, rtol=0)
    assert (exact - chain_monomial_egop(d, 5)).abs().max() > 0.5


@pytest.mark.parametrize("decay", [0.0, 2.0])
def test_task_labels_scale_and_target_agree(decay):
    task = chain_monomial_task(400, 12, n_test=50, generator=1, dtype=torch.float64, covariance_decay=decay)
    assert task.y.shape == (400, 1)
    assert task.y_test.shape == (50, 1)
    assert float(task.y.std(correction=0)) == pytest.approx(1, abs=1e-12)
    torch.testing.assert_close(task.target(task.X), task.y)
    torch.testing.assert_close(task.target(task.X_test), task.y_test)
    torch.testing.assert_close(task.scale * chain_monomial(task.X), task.y)
    assert float(task.y_test.std()) != pytest.approx(1, abs=1e-3)  # the training scale, not its own
    assert (task.covariance is None) == (decay == 0)
    assert pickle.loads(pickle.dumps(task)).target(task.X).equal(task.target(task.X))


def test_variance_of_the_target_is_r():
    for r, variance in ((2, 4), (3, 3), (5, 5)):
        task = chain_monomial_task(200_000, 5, r, generator=0)
        assert 1 / task.scale**2 == pytest.approx(variance, rel=0.03)


def test_task_inputs_follow_the_covariance():
    task = chain_monomial_task(100_000, 6, covariance_decay=1.0, generator=5, dtype=torch.float64)
    torch.testing.assert_close(task.X.mT @ task.X / 100_000, task.covariance, atol=0.02, rtol=0)


def test_task_seeds():
    state = torch.get_rng_state()
    a, b = (chain_monomial_task(10, 6, n_test=m, generator=7) for m in (0, 4))
    assert torch.equal(a.X, b.X)
    assert torch.equal(a.y, b.y)
    assert not torch.equal(a.X, chain_monomial_task(10, 6, generator=8).X)
    double = chain_monomial_task(10, 6, generator=7, dtype=torch.float64)
    assert torch.equal(double.X.float(), a.X)
    generator = torch.Generator().manual_seed(0)
    first, second = (chain_monomial_task(10, 6, generator=generator).X for _ in range(2))
    assert not torch.equal(first, second)  # a generator advances
    assert torch.equal(torch.get_rng_state(), state)


@pytest.mark.parametrize(
    "call",
    [
        lambda: chain_monomial(torch.zeros(3, 4), 5),
        lambda: chain_monomial_egop(5, 1),
        lambda: chain_monomial_egop(5, 5, torch.eye(4)),
        lambda: chain_monomial_task(1, 5),
        lambda: chain_monomial_task(5, 5, covariance_decay=-1.0),
        lambda: chain_monomial_task(5, 5, generator="0"),
    ],
)
def test_bad_arguments(call):
    with pytest.raises(InputError):
        call()
