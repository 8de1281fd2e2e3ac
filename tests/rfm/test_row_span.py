"""Iterations in the span of the rows against iterations with all features."""

from __future__ import annotations

from dataclasses import replace

import pytest
import rfm_oracles as oracles
import torch
from torch import Tensor

from featlearn.rfm import recursion
from featlearn.rfm.iteration import Settings
from featlearn.rfm.kernels import Kernel, make_kernel
from featlearn.rfm.recursion import FittedRFM, learn
from featlearn.rfm.training_rows import HeldOut, TrainingRows

N, D = 40, 70
KERNELS = {"laplace": make_kernel("laplace"), "polynomial": make_kernel("polynomial"), "exp": make_kernel("exp")}
FOLDS = {"single rows": None, "folds": torch.arange(N) % 4}


def wide(constant: bool = True, **options) -> TrainingRows:
    """Rows with more features than rows, of which two are constant, centered as the estimators center them."""
    x = oracles.numbers(N, D, seed=0)
    if constant:
        x[:, [3, 60]] = 0.0
    y = torch.stack([x[:, 0] * x[:, 1], x[:, 2].sin()], 1) + 0.1 * oracles.numbers(N, 2, seed=1)
    return TrainingRows(x / 4, y, oracles.positive(N, seed=2), **options)


def with_all_features(problem: TrainingRows, settings: Settings, monkeypatch: pytest.MonkeyPatch) -> FittedRFM:
    with monkeypatch.context() as patch:
        patch.setattr(recursion, "span_of_rows", lambda *_: None)
        return learn(problem, settings)


def outputs(model: FittedRFM, kernel: Kernel, rows: Tensor) -> Tensor:
    root = oracles.power(model.metric, 0.5)
    k = oracles.matrix(kernel, rows @ root, model.centers @ root, model.fit.bandwidth)
    return k @ model.fit.alpha + model.mean


@pytest.mark.parametrize("name", KERNELS)
@pytest.mark.parametrize("update", ["fact", "fact-geometric", "nfa"])
@pytest.mark.parametrize("rescale", ["trace", None])
@pytest.mark.parametrize("left_out", FOLDS)
def test_the_span_of_the_rows_is_enough(name, update, rescale, left_out, monkeypatch) -> None:
    problem = wide(folds=FOLDS[left_out])
    settings = Settings(KERNELS[name], update, rescale=rescale, bandwidth=3.0, ridge=1e-2, n_iter=2, patience=None)
    expected = with_all_features(problem, settings, monkeypatch)
    for number in range(3):  # the last iteration is kept without validation
        kept = replace(settings, n_iter=number, judge=False)
        result, model = learn(problem, kept), with_all_features(problem, kept, monkeypatch)
        # The root of the AGOP raises an eigenvalue at the rounding floor, 1e-14 of the largest one, to 1e-7.
        assert oracles.relative_error(result.metric, model.metric) < (5e-7 if update == "nfa" else 1e-9)
        assert torch.equal(result.centers, problem.x)
        new = oracles.numbers(7, D, seed=5) / 4  # outside of the span
        assert (
            oracles.relative_error(outputs(result, settings.kernel, new), outputs(model, settings.kernel, new)) < 1e-8
        )
    result = learn(problem, settings)
    assert result.best == expected.best
    for line, wanted in zip(result.history, expected.history, strict=True):
        assert line.error == pytest.approx(wanted.error, rel=1e-8)
        assert line.effective_rank == pytest.approx(wanted.effective_rank, rel=5e-6)
        assert line.condition == pytest.approx(wanted.condition, rel=1e-6)
    used = D if not settings.kernel.radial else D - 2
    assert result.history[0].effective_rank == pytest.approx(used)
    if rescale == "trace" and result.best:
        assert float(result.metric.trace()) == pytest.approx(used)


@pytest.mark.parametrize("options", [{"subset": 25}, {"centers": 15}, {"update": "none"}], ids=str)
def test_windows_centers_and_selection_in_the_span(options: dict, monkeypatch: pytest.MonkeyPatch) -> None:
    settings = replace(Settings(KERNELS["laplace"], n_iter=2), **options)
    expected, result = with_all_features(wide(), settings, monkeypatch), learn(wide(), settings)
    assert oracles.relative_error(result.metric, expected.metric) < 1e-9
    assert torch.equal(result.centers, expected.centers)
    assert oracles.relative_error(result.fit.alpha, expected.fit.alpha) < 1e-6
    assert [line.bandwidth for line in result.history] == pytest.approx([line.bandwidth for line in expected.history])
    assert [line.ridge for line in result.history] == pytest.approx([line.ridge for line in expected.history])


def test_float32_in_the_span() -> None:
    exact = wide()
    problem = TrainingRows(exact.x.float(), exact.targets.float(), exact.weights.float())
    settings = Settings(KERNELS["laplace"], bandwidth=3.0, ridge=1e-2, n_iter=2, judge=False)
    result = learn(problem, settings)
    assert result.metric.dtype == result.centers.dtype == result.fit.alpha.dtype == torch.float32
    assert oracles.relative_error(result.metric, learn(exact, settings).metric) < 1e-4


def test_where_the_span_does_not_apply() -> None:
    problem, settings = wide(), Settings(KERNELS["laplace"])
    assert recursion.span_of_rows(problem, settings) is not None
    held = HeldOut(problem.x[:3], problem.targets[:3], problem.weights[:3])
    lpq = make_kernel("lpq", norm=1.5)
    for other, changed in [
        (replace(problem, held_out=held), settings),
        (replace(problem, x=problem.x[:, :N]), settings),
        *(
            (problem, replace(settings, **change))
            for change in ({"diagonal": True}, {"rescale": "max"}, {"kernel": lpq})
        ),
    ]:
        assert recursion.span_of_rows(other, changed) is None
