"""Faults found in how iterates are judged: each test says what a user would have met."""

from __future__ import annotations

import numpy as np
import pytest
import rfm_oracles as oracles
import torch
from sklearn.exceptions import ConvergenceWarning

from featlearn.errors import InputError, SingularKernelError
from featlearn.rfm import RFMRegressor, _hyperparameters
from featlearn.rfm.iteration import Settings
from featlearn.rfm.kernels import make_kernel
from featlearn.rfm.recursion import learn
from featlearn.rfm.training_rows import TrainingRows


def problem_of(n: int, **options) -> TrainingRows:
    x = oracles.numbers(n, 3, seed=0)
    return TrainingRows(x, x[:, :1] * x[:, 1:2], torch.ones(n, dtype=torch.float64), **options)


@pytest.mark.parametrize("iteration", [0, 1])
def test_the_best_iterate_has_its_line_when_only_a_fold_fails(iteration: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """`history_.loc[best_iteration_]` was a KeyError; a failure at the first iteration left no history at all."""
    learn_metric, fits = _hyperparameters.learn_metric, []

    def failing(*arguments, **options):
        fits.append(arguments)
        if len(fits) == 5 * iteration + 2:  # the second of five folds
            raise SingularKernelError("the kernel matrix is not positive definite")
        return learn_metric(*arguments, **options)

    settings = Settings(make_kernel("laplace"), bandwidth=3.0, ridge=1e-3, n_iter=3, patience=None)
    whole = learn(problem_of(40), settings).history
    assert whole[1].error < whole[0].error  # or the failing iterate would not be the best
    monkeypatch.setattr(_hyperparameters, "learn_metric", failing)
    with pytest.warns(ConvergenceWarning):
        result = learn(problem_of(40), settings)
    assert result.history
    assert [line.error for line in result.history] == [line.error for line in whole[: len(result.history)]]
    assert result.best < len(result.history)
    assert result.error == result.history[result.best].error


def test_a_window_without_a_row_that_judges_is_said() -> None:
    """Of 5,000 rows every fifth judges: a window of three may have none. It was an IndexError."""
    rows = np.random.default_rng(0).normal(size=(5000, 3))
    model = RFMRegressor(n_iter=4, patience=None, subset=3, centers=20)
    with pytest.raises(InputError, match=r"got 3 rows of which none is validated\. Pass a larger subset, or None"):
        model.fit(rows, rows[:, 0] * rows[:, 1])
    model.set_params(subset=30).fit(rows, rows[:, 0] * rows[:, 1])
    assert np.isfinite(model.history_.error).all()


def test_a_tiny_fold_does_not_judge_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Folds of a user may differ in size: so many judge that they hold enough rows, whatever their number."""
    monkeypatch.setattr(_hyperparameters, "_ENOUGH", 20)
    folds = torch.tensor([0] + [1] * 30 + [2] * 30)
    settings = Settings(make_kernel("laplace"), bandwidth=3.0, ridge=1e-3, n_iter=1)
    result = learn(problem_of(61, folds=folds), settings)
    assert result.unseen is not None
    assert len(result.unseen.residuals) >= 20
