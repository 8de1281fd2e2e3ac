import pickle

import pytest
import torch

from featlearn.datasets import linear_task
from featlearn.errors import InputError


def test_the_papers_sizes_and_labels():
    task = linear_task(n_test=7, dtype=torch.float64)
    assert task.X.shape == (5000, 10)
    assert task.y.shape == (5000, 5)
    assert task.matrix.shape == (5, 10)
    torch.testing.assert_close(task.y, task.X @ task.matrix.mT)
    torch.testing.assert_close(task.y_test, task.X_test @ task.matrix.mT)
    torch.testing.assert_close(pickle.loads(pickle.dumps(task)).target(task.X), task.y)
    assert float(task.matrix.std()) == pytest.approx(1, abs=0.3)


def test_noise_and_seeds():
    clean, noisy = (linear_task(4000, noise=noise, n_test=3, generator=1) for noise in (0.0, 0.5))
    assert torch.equal(clean.X, noisy.X)
    assert torch.equal(clean.y_test, noisy.y_test)
    assert float((noisy.y - clean.y).std()) == pytest.approx(0.5, rel=0.03)
    assert torch.equal(linear_task(4000, generator=1).y, clean.y)
    assert not torch.equal(linear_task(4000, generator=2).matrix, clean.matrix)


@pytest.mark.parametrize("change", [{"n": 1}, {"d": 0}, {"c": 0}, {"noise": -0.1}, {"n_test": -1}])
def test_bad_arguments(change):
    with pytest.raises(InputError):
        linear_task(**change)
