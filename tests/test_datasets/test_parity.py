import math
import pickle

import pytest
import torch

from featlearn.datasets._base import ClassificationTask
from featlearn.datasets._parity import parity, parity_task
from featlearn.errors import InputError


def test_points_are_on_the_cube_and_labels_are_products():
    task = parity_task(400, n_test=50, d=20, k=3, generator=0)
    assert isinstance(task, ClassificationTask)
    assert (task.X.shape, task.X_test.shape, task.classes) == ((400, 20), (50, 20), 2)
    for X, y in ((task.X, task.y), (task.X_test, task.y_test)):
        torch.testing.assert_close(X.abs(), torch.full_like(X, 1 / math.sqrt(20)))
        product = X[:, task.support[0]] * X[:, task.support[1]] * X[:, task.support[2]]
        assert torch.equal(y == 1, product > 0)
        assert y.dtype == torch.int64
    assert list(task.support) == sorted(set(task.support))
    # Signs and classes are balanced, to five standard deviations.
    assert abs(float(task.X.sign().mean())) < 5 / math.sqrt(8000)
    assert abs(float(task.y.double().mean()) - 0.5) < 5 * 0.5 / math.sqrt(400)


def test_fewer_coordinates_tell_nothing_and_other_supports_do_not_fit():
    task = parity_task(20_000, n_test=0, d=8, k=3, generator=1)
    signs, labels = task.X.sign(), 2.0 * task.y - 1
    for i in range(8):
        for j in range(i):
            assert abs(float((signs[:, i] * signs[:, j] * labels).mean())) < 0.04
    assert torch.equal(parity(task.X, task.support), task.y)
    wrong = [i for i in range(8) if i not in task.support][:3]
    assert abs(float((parity(task.X, wrong) == task.y).double().mean()) - 0.5) < 0.02


def test_the_support_is_random_and_covers_all_coordinates():
    supports = [parity_task(2, 0, d=6, k=2, generator=seed).support for seed in range(60)]
    assert {i for support in supports for i in support} == set(range(6))
    assert len(set(supports)) > 10


def test_a_long_support_does_not_vanish():
    # 1/sqrt(2500) to the power 400 is 0 in every dtype.
    assert 60 < int(parity_task(200, 0, d=2500, k=400, generator=0).y.sum()) < 140


def test_noise_flips_training_labels_alone():
    clean, noisy = (parity_task(20_000, 50, d=10, k=2, noise=e, generator=3) for e in (0.0, 0.2))
    assert torch.equal(clean.X, noisy.X)
    assert torch.equal(clean.y_test, noisy.y_test)
    assert float((clean.y != noisy.y).double().mean()) == pytest.approx(0.2, abs=0.015)
    assert set(noisy.y.tolist()) == {0, 1}
    assert noisy.noise == 0.2


def test_seeds_dtypes_and_pickle():
    state = torch.get_rng_state()
    a, b, c = (parity_task(10, n_test=m, d=30, generator=g) for m, g in ((0, 7), (4, 7), (4, 8)))
    assert torch.equal(a.X, b.X)
    assert a.support == b.support
    assert not torch.equal(b.X, c.X)
    double = parity_task(10, d=30, generator=7, dtype=torch.float64)
    assert double.X.dtype == torch.float64
    assert torch.equal(double.X.sign(), a.X.double().sign())
    assert torch.equal(torch.get_rng_state(), state)
    assert pickle.loads(pickle.dumps(b)).support == b.support


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"n": 1}, "n must be an integer of at least 2, got 1"),
        ({"n": 5, "k": 0}, "k must be an integer from 1 to 50, got 0"),
        ({"n": 5, "d": 4, "k": 5}, "k must be an integer from 1 to 4, got 5"),
        ({"n": 5, "noise": 0.6}, "0.6"),
        ({"n": 5, "noise": math.nan}, "nan"),
    ],
)
def test_bad_arguments(settings, words):
    with pytest.raises(InputError, match=words):
        parity_task(**settings)
