import math

import pytest
import torch

from featlearn.datasets import reversing_task
from featlearn.errors import InputError
from featlearn.linalg import cosine

F64 = torch.float64


def test_consistent_reading_obeys_the_appendix():
    task = reversing_task(0.25, 60, 40, noise=0.0, generator=3, dtype=F64)
    assert task.first.shape == task.second.shape == (60, 40)
    gram = task.first.mT @ task.first
    inverse = torch.linalg.inv(gram)
    torch.testing.assert_close(task.second.mT @ task.second, inverse @ inverse)
    # What the construction is for: the AGOP's own term is the identity, the NFM's is not.
    torch.testing.assert_close(gram @ (task.second.mT @ task.second) @ gram, torch.eye(40, dtype=F64))
    assert cosine(gram @ gram, torch.eye(40, dtype=F64)) < 0.5
    assert task.n_first == 15
    assert torch.equal(task.X, torch.cat([task.first[:15], task.second[:45]]))
    assert torch.equal(task.y[:15], torch.full((15, 1), 1 + 1e-5, dtype=F64))
    assert torch.equal(task.y[15:], torch.full((45, 1), 1e-5, dtype=F64))


@pytest.mark.parametrize(("balance", "d"), [(0.25, 60), (0.5, 60), (0.75, 12)])
def test_pseudo_inverse_reading_obeys_the_appendix_where_there_is_room(balance, d):
    task = reversing_task(balance, 60, d, reading="pseudo-inverse", noise=0.0, generator=3, dtype=F64)
    assert len(task.first) == task.n_first == round(60 * balance)
    assert len(task.second) == 60 - task.n_first
    inverse = torch.linalg.pinv(task.first.mT @ task.first, rtol=1e-10)
    torch.testing.assert_close(task.second.mT @ task.second, inverse @ inverse)
    assert torch.equal(task.X, torch.cat([task.first, task.second]))


def test_pseudo_inverse_reading_without_room_keeps_the_largest_singular_values():
    task = reversing_task(0.75, 60, 60, reading="pseudo-inverse", noise=0.0, generator=3, dtype=F64)
    s = torch.linalg.svdvals(task.first)
    assert len(s) == 45
    torch.testing.assert_close(torch.linalg.svdvals(task.second), (1 / s[:15] ** 2).flip(0))
    assert (task.X.shape, reversing_task(1.0, 8, 8, reading="pseudo-inverse").X.shape) == ((60, 60), (8, 8))


def test_the_law_of_the_first_kind():
    task = reversing_task(1.0, 200_000, 3, generator=0, spread=0.5, dtype=F64)
    covariance = torch.ones(3, 3, dtype=F64) + 0.5 * torch.eye(3, dtype=F64)
    torch.testing.assert_close(task.first.mT @ task.first / 200_000, covariance, atol=0.03, rtol=0)
    rest = task.X - task.first
    assert float(rest.std()) == pytest.approx(0.01, rel=0.01)
    assert task.n_first == len(task.X)


def test_seeds_and_types():
    state = torch.get_rng_state()
    a, b = (reversing_task(balance, 20, 10, generator=1) for balance in (0.1, 0.9))
    assert torch.equal(a.first, b.first)
    assert torch.equal(a.second, b.second)
    assert a.X.dtype == torch.get_default_dtype()
    assert not torch.equal(a.first, reversing_task(0.1, 20, 10, generator=2).first)
    assert torch.equal(torch.get_rng_state(), state)
    assert reversing_task(1e-9, 20, 10).n_first == 1  # at least one, or all labels would be the offset


@pytest.mark.parametrize(
    "change",
    [
        {"reading": "pseudo"},
        {"balance": 0.0},
        {"balance": 1.1},
        {"d": 21},
        {"n": 1},
        {"spread": 0.0},
        {"noise": -1.0},
        {"offset": math.inf},
    ],
)
def test_bad_arguments(change):
    with pytest.raises(InputError):
        reversing_task(**{"balance": 0.5, "n": 20, "d": 10, **change})
