"""The iterations and who judges them, against algorithm 1 of the FACT paper written out with autograd."""

from __future__ import annotations

import itertools
import math
import warnings
from dataclasses import replace

import numpy as np
import pytest
import rfm_oracles as oracles
import torch
from sklearn.exceptions import ConvergenceWarning
from torch import Tensor

from featlearn.errors import SingularKernelError
from featlearn.rfm import _hyperparameters
from featlearn.rfm import recursion as machine_module
from featlearn.rfm.iteration import Settings, predict_rows
from featlearn.rfm.kernels import Kernel, make_kernel
from featlearn.rfm.recursion import FittedRFM, Iteration, iterates, learn
from featlearn.rfm.training_rows import HeldOut, TrainingRows

EYE = torch.eye(3, dtype=torch.float64)
UPDATES = ["fact", "fact-geometric", "nfa"]
KERNELS = {
    "laplace": make_kernel("laplace"),
    "gaussian": make_kernel("gaussian"),
    "exponential": make_kernel("exponential", exponent=1.4),
    "lpq": make_kernel("lpq", norm=1.5, exponent=1.2),
    "quadratic": make_kernel("quadratic"),
    "polynomial": make_kernel("polynomial", degree=3, offset=0.5),
    "exp": make_kernel("exp"),
}
FIXED = Settings(KERNELS["laplace"], "fact", bandwidth=3.0, ridge=1e-3, n_iter=3, patience=None)


def problem_of(n: int = 40, weighted: bool = True, seed: int = 0, **options) -> TrainingRows:
    source = torch.Generator().manual_seed(seed)
    x = torch.randn(n, 3, generator=source, dtype=torch.float64)
    noise = torch.randn(n, 2, generator=source, dtype=torch.float64)
    y = torch.stack([1.0 + x[:, 0] * x[:, 1], torch.sin(2 * x[:, 0])], dim=1) + 0.1 * noise
    w = 0.3 + 2 * torch.rand(n, generator=source, dtype=torch.float64)
    return TrainingRows(x, y, w if weighted else torch.ones_like(w), **options)


class Naive:
    """Algorithm 1 with fixed bandwidths and penalties, in the order of the paper; gradients come from autograd."""

    def __init__(self, problem: TrainingRows, settings: Settings, metric: Tensor | None = None) -> None:
        self.problem, self.settings = problem, settings
        self.metric = torch.eye(problem.x.shape[1], dtype=torch.float64) if metric is None else metric

    def kernel(self, x: Tensor, z: Tensor, bandwidth: float) -> Tensor:
        root = oracles.power(self.metric, 0.5)
        return oracles.matrix(self.settings.kernel, x @ root, z @ root, bandwidth)

    def solve(self, bandwidth: float, shift: float) -> None:
        x, y, w = self.problem.x, self.problem.targets, self.problem.weights
        self.bandwidth = bandwidth
        self.mean = (w[:, None] * y).sum(0) / w.sum() if self.problem.intercept else torch.zeros_like(y[0])
        self.alpha = oracles.ridge_coefficients(self.kernel(x, x, bandwidth), y - self.mean, w, shift)

    def predict(self, z: Tensor) -> Tensor:
        return self.kernel(z, self.problem.x, self.bandwidth) @ self.alpha + self.mean

    def fact(self) -> Tensor:
        fact = torch.einsum("nc,ncd,ne->de", self.alpha, self._gradients(), self.problem.x)
        return fact.diagonal().diag() if self.settings.diagonal else fact

    def _gradients(self) -> Tensor:
        points = self.problem.x.clone().requires_grad_()
        outputs = self.predict(points).unbind(1)
        return torch.stack([torch.autograd.grad(f.sum(), points, retain_graph=True)[0] for f in outputs], dim=1)

    def update(self) -> None:
        if self.settings.update == "nfa":
            gradients, w = self._gradients(), self.problem.weights
            agop = torch.einsum("n,ncd,nce->de", w, gradients, gradients) / w.sum()
            agop = agop.diagonal().diag() if self.settings.diagonal else agop
            new = oracles.power(agop, self.settings.power)
        elif self.settings.update == "fact":
            new = oracles.power(self.fact() @ self.fact().T, 0.5)
        else:
            new = oracles.power(self.fact() @ self.metric @ self.metric.T @ self.fact().T, 0.25)
        if not new.trace() > 0:
            return
        unit = {"trace": new.trace() / len(new), "max": new.max(), None: 1.0}[self.settings.rescale]
        self.metric = new / unit


def windows_of(size: int, n: int, iterations: int) -> list[list[list[int]]]:
    """Two an iteration, one after the other on a circle of rows."""
    circle = [[(size * start + k) % n for k in range(size)] for start in range(2 * iterations)]
    return [circle[2 * i : 2 * i + 2] for i in range(iterations)]


def predictions(machine: FittedRFM, kernel: Kernel, z: Tensor) -> Tensor:
    """Of a fitted machine, by the definition of its attributes."""
    root = oracles.power(oracles.as_matrix(machine.metric), 0.5)
    return oracles.matrix(kernel, z @ root, machine.centers @ root, machine.fit.bandwidth) @ machine.fit.alpha + (
        machine.mean
    )


def assert_near(result: Tensor, wanted: Tensor, relative: float = 1e-8) -> None:
    assert result.shape == wanted.shape
    assert float((result - wanted).norm()) <= relative * float(wanted.norm())


# -- algorithm 1 -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("update", UPDATES)
@pytest.mark.parametrize("diagonal", [False, True])
@pytest.mark.parametrize("rescale", ["trace", "max", None])
@pytest.mark.parametrize("name", KERNELS)
def test_algorithm_1(update: str, diagonal: bool, rescale: str | None, name: str) -> None:
    problem, test_rows = problem_of(), problem_of(9, seed=1).x
    settings = Settings(KERNELS[name], update, 0.5, rescale, 3.0, 1e-2, 2, diagonal, judge=False)
    result = learn(problem, settings)
    naive = Naive(problem, settings)
    for _ in range(2):
        naive.solve(3.0, 1e-2 * problem.total)
        naive.update()
    naive.solve(3.0, 1e-2 * problem.total)
    assert result.metric.ndim == (1 if diagonal else 2)
    assert_near(oracles.as_matrix(result.metric), naive.metric)
    assert_near(result.fit.alpha, naive.alpha)
    assert_near(predictions(result, settings.kernel, test_rows), naive.predict(test_rows))
    assert result.best == 2
    assert result.ridge == pytest.approx(1e-2, rel=1e-14)
    assert result.fit.shift == pytest.approx(1e-2 * problem.total, rel=1e-14)


@pytest.mark.parametrize("power", [0.25, 1.0])
def test_power_of_agop_without_intercept(power: float) -> None:
    problem = problem_of(intercept=False)
    settings = Settings(KERNELS["laplace"], "nfa", power, "trace", 3.0, 1e-2, 1, judge=False)
    naive = Naive(problem, settings)
    naive.solve(3.0, 1e-2 * problem.total)
    naive.update()
    result = learn(problem, settings)
    assert_near(result.metric, naive.metric)
    assert (result.mean == 0).all()


@pytest.mark.parametrize("update", UPDATES)
def test_iterates_one_after_the_other(update: str) -> None:
    problem, test_rows = problem_of(), problem_of(9, seed=1).x
    settings = replace(FIXED, update=update)
    naive = Naive(problem, settings)
    result = list(iterates(problem, settings))
    assert len(result) == 4
    for number, (metric, fit) in enumerate(result):
        if number:
            naive.update()
        naive.solve(3.0, 1e-3 * problem.total)
        assert_near(metric, naive.metric)
        assert_near(fit.alpha, naive.alpha)
        assert_near(predict_rows(problem, settings.kernel, metric, fit, test_rows), naive.predict(test_rows))
        assert fit.condition > 1
    kept = learn(problem, replace(settings, judge=False))
    assert torch.equal(kept.metric, result[-1][0])
    assert torch.equal(kept.fit.alpha, result[-1][1].alpha)


# -- errors of iterates ------------------------------------------------------------------------------------------------


class NaiveJudge:
    """An M for each fold, learned from scratch on the rows outside; its rows are left out of solves on all others."""

    def __init__(self, problem: TrainingRows, settings: Settings, count: int | None = None) -> None:
        self.problem, self.settings = problem, settings
        self.folds = torch.arange(len(problem)) % 5 if problem.folds is None else problem.folds
        numbers = range(int(self.folds.max()) + 1 if count is None else count)
        self.metrics = [torch.eye(problem.x.shape[1], dtype=torch.float64) for _ in numbers]

    def residuals(self, rows: list[int], bandwidth: float, shift: float) -> dict[int, Tensor]:
        """Of each row that is judged."""
        x, y, w = self.problem.x, self.problem.targets, self.problem.weights
        result = {}
        for fold, metric in enumerate(self.metrics):
            k = Naive(self.problem, self.settings, metric).kernel(x, x, bandwidth)
            judged = [row for row in rows if self.folds[row] == fold]
            for unit in [[row] for row in judged] if self.problem.folds is None else [judged]:
                rest = [row for row in rows if row not in unit]
                mean = (w[rest, None] * y[rest]).sum(0) / w[rest].sum() if self.problem.intercept else 0.0
                alpha = oracles.ridge_coefficients(k[rest][:, rest], y[rest] - mean, w[rest], shift)
                result |= dict(zip(unit, y[unit] - mean - k[unit][:, rest] @ alpha, strict=True))
        return result

    def error(self, rows: list[int], bandwidth: float, shift: float) -> float:
        residuals = self.residuals(rows, bandwidth, shift)
        squares = sum(float(self.problem.weights[row] * missed.square().sum()) for row, missed in residuals.items())
        return squares / sum(float(self.problem.weights[row]) for row in residuals)

    def learn(self, windows: list[list[int]], bandwidth: float, ridge: float) -> None:
        for fold, metric in enumerate(self.metrics):
            learned = []
            for rows in windows:
                others = torch.tensor([row for row in rows if self.folds[row] != fold])
                naive = Naive(self.problem.subset(others), self.settings, metric)
                naive.solve(bandwidth, ridge * float(self.problem.weights[rows].sum()))
                naive.update()
                learned.append(naive.metric)
            self.metrics[fold] = sum(learned) / len(learned)

    def errors(self, lines: tuple[Iteration, ...], windows: list[list[list[int]]] | None = None) -> list[float]:
        """Of all iterations, with the bandwidths and ridges that a history tells."""
        result = []
        for i, line in enumerate(lines):
            seen = [list(range(len(self.problem)))] if windows is None else windows[i]
            result.append(self.error(seen[0], line.bandwidth, line.ridge * float(self.problem.weights[seen[0]].sum())))
            self.learn(seen, line.bandwidth, line.ridge)
        return result


FOLDS = {"no folds": None, "three folds": torch.arange(40) // 14, "folds with a gap": torch.arange(40) % 3 * 2}


@pytest.mark.parametrize(("update", "fixed"), [*((update, True) for update in UPDATES), ("fact", False)])
@pytest.mark.parametrize("folds", FOLDS)
def test_errors_are_of_rows_that_neither_solve_nor_m_has_seen(update: str, fixed: bool, folds: str) -> None:
    problem = problem_of(folds=FOLDS[folds])
    settings = replace(FIXED, update=update)
    if not fixed:
        settings = replace(settings, bandwidth=None, ridge=None)
    result = learn(problem, settings)
    assert len(result.history) == 4
    wanted = NaiveJudge(problem, settings).errors(result.history)
    assert [line.error for line in result.history] == pytest.approx(wanted, rel=1e-8)
    assert result.best == int(np.argmin(wanted))
    assert result.error == min(line.error for line in result.history)


SPECIAL = {
    "diagonal": ({"diagonal": True}, {}),
    "no intercept": ({}, {"intercept": False}),
    "folds, no intercept": ({}, {"intercept": False, "folds": FOLDS["three folds"]}),
    "max": ({"rescale": "max"}, {}),
    "not rescaled": ({"rescale": None, "update": "nfa"}, {}),
    "polynomial": ({"kernel": KERNELS["polynomial"], "ridge": 1e-2}, {}),
    "lpq": ({"kernel": KERNELS["lpq"], "ridge": 1e-2}, {}),
}


@pytest.mark.parametrize("special", SPECIAL)
def test_folds_learn_as_the_machine_does(special: str) -> None:
    reported, of_problem = SPECIAL[special]
    settings, problem = replace(FIXED, n_iter=2, **reported), problem_of(30, **of_problem)
    if problem.folds is not None:
        problem = replace(problem, folds=problem.folds[:30])
    result = learn(problem, settings)
    wanted = NaiveJudge(problem, settings).errors(result.history)
    assert [line.error for line in result.history] == pytest.approx(wanted, rel=1e-8)


@pytest.mark.parametrize("intercept", [True, False])
def test_before_m_learns_it_is_plain_leave_one_out(intercept: bool) -> None:
    problem = problem_of(intercept=intercept)
    k = oracles.matrix(FIXED.kernel, problem.x, problem.x, 3.0)
    missed = oracles.left_out_errors(k, problem.targets, problem.weights, 1e-3, intercept)
    wanted = float(problem.weights @ missed.square().sum(1) / problem.total)
    for settings in (replace(FIXED, n_iter=1), replace(FIXED, n_iter=0), replace(FIXED, update="none")):
        first = learn(problem, settings).history[0]
        assert first.error == pytest.approx(wanted, rel=1e-8)


def test_m_that_has_seen_a_row_would_judge_it_too_kindly() -> None:
    """Why there are folds: on noise, leaving rows out of the solve alone finds what is not there."""
    problem = noise(60)
    result = learn(problem, replace(FIXED, n_iter=3))
    last = learn(problem, replace(FIXED, n_iter=3, judge=False))
    root = oracles.power(last.metric, 0.5)
    k = oracles.matrix(FIXED.kernel, problem.x @ root, problem.x @ root, 3.0)
    kind = float(oracles.left_out_errors(k, problem.targets, problem.weights, 1e-3, True).square().mean())
    assert kind < 0.8 * result.history[3].error


def test_few_rows_are_folds_of_their_own() -> None:
    """Of four rows each is a fold: M learns from the other three."""
    problem = problem_of(4)
    settings = replace(FIXED, ridge=1e-2, n_iter=1)
    result = learn(problem, settings)
    wanted = NaiveJudge(problem, settings, 4).errors(result.history)
    assert [line.error for line in result.history] == pytest.approx(wanted, rel=1e-8)


def test_merged_targets_count_in_the_error_of_an_iterate() -> None:
    problem = problem_of()
    spread = torch.full_like(problem.targets, 0.5 / problem.targets.shape[1])
    settings = replace(FIXED, n_iter=1)
    plain, merged = learn(problem, settings), learn(replace(problem, spread=spread), settings)
    apart = 0.5 * 40 / problem.total
    for before, after in zip(plain.history, merged.history, strict=True):
        assert after.error == pytest.approx(before.error + apart, rel=1e-12)


@pytest.mark.parametrize("tuning_rows", [500, 20])
def test_held_out_rows_judge_iterates(tuning_rows: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_hyperparameters, "TUNING_ROWS", tuning_rows)
    test_rows = problem_of(15, seed=1)
    problem = problem_of(held_out=HeldOut(test_rows.x, test_rows.targets, test_rows.weights))
    result = learn(problem, FIXED)
    naive = Naive(problem, FIXED)
    for line in result.history:
        if line.iteration:
            naive.update()
        naive.solve(3.0, 1e-3 * problem.total)
        missed = test_rows.targets - naive.predict(test_rows.x)
        error = float(test_rows.weights @ missed.square().sum(1)) / test_rows.total
        assert line.error == pytest.approx(error, rel=1e-8)
        if line.iteration == result.best:
            assert result.unseen is not None
            assert_near(result.unseen.residuals, missed)
            assert torch.equal(result.unseen.targets, test_rows.targets)
            assert torch.equal(result.unseen.weights, test_rows.weights)
    assert len(result.history) == 4


# -- bandwidth and ridge -----------------------------------------------------------------------------------------------


def median_distance(x: Tensor, metric: Tensor) -> float:
    """Of an odd number of pairs."""
    u = x @ oracles.power(metric, 0.5)
    distances = sorted(math.dist(a, b) for a, b in itertools.combinations(u.tolist(), 2))
    assert len(distances) % 2
    return distances[len(distances) // 2]


def best_of_grid(judge: NaiveJudge, rows: list[int], scale: float) -> tuple[float, float]:
    """Bandwidth and penalty with the least error of rows that neither M nor solve has seen."""
    grid = [(multiple * scale, shift) for multiple in (2.0, 4.0, 8.0) for shift in _hyperparameters.SHIFTS.tolist()]
    return min(grid, key=lambda place: judge.error(rows, *place))


@pytest.mark.parametrize("folds", [None, torch.arange(19) % 4])
@pytest.mark.parametrize("grid_rows", [150, 0])
def test_bandwidth_and_ridge_are_the_best_at_every_iteration(
    folds: Tensor | None, grid_rows: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(_hyperparameters, "GRID_ROWS", grid_rows)
    problem = problem_of(19, weighted=False, folds=folds)
    settings = replace(FIXED, bandwidth=None, ridge=None, n_iter=2)
    result = learn(problem, settings)
    judge, naive, rows = NaiveJudge(problem, settings), Naive(problem, settings), list(range(19))
    for line in result.history:
        bandwidth, shift = best_of_grid(judge, rows, median_distance(problem.x, naive.metric))
        assert line.bandwidth == pytest.approx(bandwidth, rel=1e-8)
        assert line.ridge * 19 == pytest.approx(shift, rel=1e-8)
        judge.learn([rows], bandwidth, shift / float(problem.weights[rows].sum()))
        naive.solve(bandwidth, shift)
        naive.update()
    assert len({(line.bandwidth, line.ridge) for line in result.history}) == 3


@pytest.mark.parametrize("given", ["bandwidth", "ridge"])
def test_what_is_given_is_not_chosen(given: str) -> None:
    problem = problem_of(19, weighted=False)
    settings = replace(FIXED, n_iter=1, bandwidth=None, ridge=None)
    settings = replace(settings, **{given: {"bandwidth": 3.0, "ridge": 1e-2}[given]})
    result = learn(problem, settings)
    judge = NaiveJudge(problem, settings)
    for line, metric in zip(result.history, (EYE, result.metric), strict=True):
        if given == "bandwidth":
            assert line.bandwidth == 3.0
            candidates = [(3.0, shift) for shift in _hyperparameters.SHIFTS.tolist()]
        else:
            assert line.ridge == pytest.approx(1e-2, rel=1e-14)
            scale = median_distance(problem.x, metric)
            candidates = [(multiple * scale, 1e-2 * problem.total) for multiple in (2.0, 4.0, 8.0)]
            assert any(line.bandwidth == pytest.approx(bandwidth, rel=1e-8) for bandwidth, _ in candidates)
        errors = [judge.error(list(range(19)), *place) for place in candidates]
        assert line.error == pytest.approx(min(errors), rel=1e-8)
        judge.learn([list(range(19))], line.bandwidth, line.ridge)
    assert result.best == 1  # or its metric is not that of the second line


def test_without_a_judge_bandwidth_and_ridge_are_still_the_best_to_leave_rows_out() -> None:
    """Under the one M there is, which has seen them."""
    problem = problem_of(19, weighted=False)
    settings = replace(FIXED, bandwidth=None, ridge=None, n_iter=1, judge=False)
    result = learn(problem, settings)
    metric = EYE
    for line in result.history:
        judge = NaiveJudge(problem, settings)
        judge.metrics = [metric] * 5
        bandwidth, shift = best_of_grid(judge, list(range(19)), median_distance(problem.x, metric))
        assert (line.bandwidth, line.ridge * 19) == pytest.approx((bandwidth, shift), rel=1e-8)
        assert math.isnan(line.error)
        metric = result.metric
    assert len(result.history) == 2


# -- stopping and keeping ----------------------------------------------------------------------------------------------


def noise(n: int = 50) -> TrainingRows:
    """Targets that no feature explains: learning M cannot help for long."""
    source = torch.Generator().manual_seed(5)
    x, y = (torch.randn(n, c, generator=source, dtype=torch.float64) for c in (6, 1))
    return TrainingRows(x, y, torch.ones(n, dtype=torch.float64))


def valley() -> TrainingRows:
    """A table on which a later iterate is best, though not the last."""
    source = torch.Generator().manual_seed(0)
    x = torch.randn(60, 4, generator=source, dtype=torch.float64)
    y = x[:, :1] * x[:, 1:2] + 0.5 * torch.randn(60, 1, generator=source, dtype=torch.float64)
    return TrainingRows(x, y, torch.ones(60, dtype=torch.float64))


@pytest.mark.parametrize("patience", [1, 2, 3])
@pytest.mark.parametrize("table", [noise, valley])
def test_iterations_stop_when_patience_is_at_an_end(patience: int, table) -> None:
    settings = replace(FIXED, n_iter=10)
    whole = [line.error for line in learn(table(), settings).history]
    assert len(whole) == 11
    best = stop = 0  # the rule, written out
    for i, error in enumerate(whole):
        best = i if error < whole[best] else best
        stop = i
        if i - best >= patience:
            break
    result = learn(table(), replace(settings, patience=patience))
    assert (result.best, len(result.history)) == (best, stop + 1)
    assert len(result.history) < 11  # or the example shows nothing
    assert [line.error for line in result.history] == whole[: stop + 1]


def test_the_best_iterate_is_kept_whole() -> None:
    settings = replace(FIXED, n_iter=8)
    result = learn(valley(), settings)
    assert 0 < result.best < 8
    up_to_best = learn(valley(), replace(settings, n_iter=result.best))
    assert torch.equal(result.metric, up_to_best.metric)
    assert torch.equal(result.fit.alpha, up_to_best.fit.alpha)
    assert result.error == result.history[result.best].error == min(line.error for line in result.history)
    unjudged = learn(valley(), replace(settings, n_iter=result.best, judge=False))
    assert torch.equal(result.metric, unjudged.metric)
    assert torch.equal(result.fit.alpha, unjudged.fit.alpha)


def test_the_bandwidth_and_ridge_kept_are_those_of_the_best_iterate() -> None:
    result = learn(valley(), Settings(KERNELS["laplace"], n_iter=8, patience=None))
    line = result.history[result.best]
    assert result.fit.bandwidth == line.bandwidth
    assert result.ridge == line.ridge
    assert result.fit.condition == line.condition
    assert len({(line.bandwidth, line.ridge) for line in result.history}) > 1


def test_nobody_judges() -> None:
    problem = problem_of()
    result = learn(problem, replace(FIXED, judge=False, patience=1))
    assert result.best == 3
    assert len(result.history) == 4
    assert all(math.isnan(line.error) for line in result.history)
    assert math.isnan(result.error)
    assert result.unseen is None


def test_lines_come_one_by_one() -> None:
    seen: list[Iteration] = []
    result = learn(problem_of(), Settings(KERNELS["laplace"], n_iter=2, patience=None), seen.append)
    assert tuple(seen) == result.history
    assert [line.iteration for line in seen] == [0, 1, 2]
    assert seen[0].effective_rank == pytest.approx(3.0)
    assert all(line.rows == 40 and line.seconds > 0 and line.condition > 1 for line in seen)


@pytest.mark.parametrize("settings", [{"n_iter": 0}, {"update": "none"}])
def test_without_updates_it_is_kernel_regression(settings: dict) -> None:
    result = learn(problem_of(), replace(FIXED, **settings))
    naive = Naive(problem_of(), FIXED)
    naive.solve(3.0, 1e-3 * problem_of().total)
    assert torch.equal(result.metric, EYE)
    assert_near(result.fit.alpha, naive.alpha)
    assert len(result.history) == 1


@pytest.mark.parametrize("intercept", [True, False])
def test_a_constant_function_has_no_features(intercept: bool) -> None:
    # Zeros leave no rounding; see test_found.py for other constants.
    problem = replace(problem_of(intercept=intercept), targets=torch.zeros(40, 2, dtype=torch.float64))
    for settings in (Settings(KERNELS["laplace"]), FIXED, replace(FIXED, judge=False)):
        result = learn(problem, settings)  # a warning would be an error
        assert torch.equal(result.metric, EYE)
        assert (result.fit.alpha == 0).all()
        assert len(result.history) == 1
        assert len(list(iterates(problem, FIXED))) == 1


def test_a_fold_that_sees_nothing_but_zeros_keeps_its_m() -> None:
    """Only rows of the first fold say something: without them there is no M to learn."""
    problem = problem_of(30, intercept=False)
    problem = replace(problem, targets=problem.targets * (torch.arange(30) % 5 == 0)[:, None])
    result = learn(problem, FIXED)
    wanted = NaiveJudge(problem, FIXED).errors(result.history)
    assert [line.error for line in result.history] == pytest.approx(wanted, rel=1e-8)
    assert len(result.history) == 4


def test_a_failed_solve_leaves_the_best_iterate_before_it(monkeypatch: pytest.MonkeyPatch) -> None:
    settings = replace(FIXED, n_iter=5)
    whole = learn(problem_of(), settings)
    fit, fits = machine_module.fit_rows, []

    def failing(*arguments, **options):
        fits.append(arguments)
        if len(fits) == 3:
            raise SingularKernelError("the kernel matrix is not positive definite")
        return fit(*arguments, **options)

    monkeypatch.setattr(machine_module, "fit_rows", failing)
    with pytest.warns(ConvergenceWarning, match="iteration 2 failed"):
        result = learn(problem_of(), settings)
    errors = [line.error for line in whole.history[:2]]
    assert [line.error for line in result.history] == errors
    assert result.best == int(np.argmin(errors))
    assert result.error == min(errors)
    assert torch.equal(result.metric, learn(problem_of(), replace(settings, n_iter=result.best)).metric)
    fits[:] = [()] * 2
    with pytest.raises(SingularKernelError):  # nothing to fall back on
        learn(problem_of(), settings)


@pytest.mark.parametrize("place", ["select", "update_metric", "update"])
@pytest.mark.parametrize("iteration", [0, 1, 2])
def test_ctrl_c_keeps_the_best_iteration(place: str, iteration: int, monkeypatch: pytest.MonkeyPatch) -> None:
    settings = replace(FIXED, n_iter=3)
    whole = learn(problem_of(), settings)
    owner = machine_module if place == "update_metric" else _hyperparameters.LeaveOneOutValidator
    function, calls = getattr(owner, place), []

    def interrupted(*arguments, **options):
        calls.append(arguments)
        if len(calls) == iteration + 1:
            raise KeyboardInterrupt
        return function(*arguments, **options)

    monkeypatch.setattr(owner, place, interrupted)
    if place == "select" and iteration == 0:
        with pytest.raises(KeyboardInterrupt):  # nothing to keep
            learn(problem_of(), settings, interruptible=True)
        return
    with pytest.warns(ConvergenceWarning, match=f"interrupted in iteration {iteration}: the best iteration is kept"):
        result = learn(problem_of(), settings, interruptible=True)
    calls.clear()
    with pytest.raises(KeyboardInterrupt):  # as the command line and grid searches expect it
        learn(problem_of(), settings)
    errors = [line.error for line in whole.history[: len(result.history)]]
    assert [line.error for line in result.history] == errors
    assert result.best == int(np.argmin(errors))
    assert torch.equal(result.metric, learn(problem_of(), replace(settings, n_iter=result.best)).metric)


def test_no_iteration_starts_that_would_exceed_the_time_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = itertools.count()  # one second per look: an iteration takes a second, with another one before it
    monkeypatch.setattr(machine_module.time, "perf_counter", lambda: float(next(clock)))
    whole = learn(problem_of(), replace(FIXED, n_iter=5))
    for limit, iterations in ((1e-9, 1), (3.9, 1), (4.0, 2), (6.0, 3), (100.0, 6)):
        result = learn(problem_of(), replace(FIXED, n_iter=5, time_limit=limit))
        assert [line.error for line in result.history] == [line.error for line in whole.history[:iterations]]
        assert result.error == min(line.error for line in result.history)


# -- rows that judge ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("enough", "count"), [(1, 1), (8, 1), (9, 2), (16, 2), (24, 3), (25, 4), (33, 5), (99, 5)])
def test_the_first_folds_are_enough(enough: int, count: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of five with 8 rows each."""
    monkeypatch.setattr(_hyperparameters, "_ENOUGH", enough)
    problem, settings = problem_of(), replace(FIXED, n_iter=1)
    result = learn(problem, settings)
    wanted = NaiveJudge(problem, settings, count).errors(result.history)
    assert [line.error for line in result.history] == pytest.approx(wanted, rel=1e-8)
    assert result.unseen is not None
    assert len(result.unseen.residuals) == 8 * count


def test_the_first_folds_of_those_given_are_enough(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_hyperparameters, "_ENOUGH", 11)
    problem, settings = problem_of(folds=torch.arange(40) % 4), replace(FIXED, n_iter=2)
    for tuning_rows in (500, 25):
        monkeypatch.setattr(_hyperparameters, "TUNING_ROWS", tuning_rows)
        result = learn(problem, settings)
        wanted = NaiveJudge(problem, settings, 2).errors(result.history)
        assert [line.error for line in result.history] == pytest.approx(wanted, rel=1e-8)


@pytest.mark.parametrize(("n", "judged"), [(1000, 1000), (1250, 1000), (1251, 1001), (2600, 1040)])
def test_a_thousand_rows_judge(n: int, judged: int) -> None:
    """Whole fifths, so many that they are a thousand rows at the least."""
    problem = problem_of(n)
    result = learn(problem, replace(FIXED, n_iter=0))
    assert result.unseen is not None
    assert len(result.unseen.residuals) == judged
    folds = torch.arange(n) % 5
    assert torch.equal(result.unseen.targets, problem.targets[folds < round(judged / n * 5)])
    if n < 2000:  # where no M is learned there is nothing to save
        alone = learn(problem, replace(FIXED, update="none")).unseen
        assert alone is not None
        assert len(alone.residuals) == n


@pytest.mark.parametrize("case", ["all rows", "first folds", "folds", "many rows", "windows"])
def test_unseen_rows_are_those_behind_the_error(case: str, monkeypatch: pytest.MonkeyPatch) -> None:
    problem, settings, count, windows = problem_of(), FIXED, None, None
    if case == "first folds":
        monkeypatch.setattr(_hyperparameters, "_ENOUGH", 16)
        count = 2
    elif case == "folds":
        problem = replace(problem, folds=FOLDS["three folds"])
    elif case == "many rows":
        monkeypatch.setattr(_hyperparameters, "TUNING_ROWS", 10)
    elif case == "windows":
        settings = replace(settings, subset=23, ridge=1e-2)
        windows = windows_of(23, 40, 4)
    result = learn(problem, settings)
    best = result.history[result.best]
    judge = NaiveJudge(problem, settings, count)
    judge.errors(result.history[: result.best], windows)
    rows = list(range(40)) if windows is None else windows[result.best][0]
    residuals = judge.residuals(rows, 3.0, best.ridge * float(problem.weights[rows].sum()))
    judged = [row for row in rows if row in residuals]
    unseen = result.unseen
    assert unseen is not None
    assert_near(unseen.residuals, torch.stack([residuals[row] for row in judged]))
    assert torch.equal(unseen.targets, problem.targets[judged])
    assert torch.equal(unseen.weights, problem.weights[judged])
    assert result.best > 0  # or M has not learned
    error = float(unseen.weights @ unseen.residuals.square().sum(1) / unseen.weights.sum())
    assert result.error == pytest.approx(error, rel=1e-12)


# -- many rows ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("folds", FOLDS)
def test_cholesky_factors_judge_as_eigenvalues_do(folds: str, monkeypatch: pytest.MonkeyPatch) -> None:
    problem, settings = problem_of(folds=FOLDS[folds]), FIXED
    few = learn(problem, settings)
    monkeypatch.setattr(_hyperparameters, "TUNING_ROWS", 25)
    many = learn(problem, settings)
    wanted = NaiveJudge(problem, settings).errors(many.history)
    assert [line.error for line in many.history] == pytest.approx(wanted, rel=1e-8)
    assert [line.error for line in few.history] == pytest.approx(wanted, rel=1e-8)
    assert torch.equal(few.metric, many.metric)


@pytest.mark.parametrize("enough", [1000, 17])
def test_few_rows_choose_and_the_ridge_walks_on_all(enough: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Bandwidth and ridge come from solves on the first rows; then the ridge goes downhill on the errors of all."""
    monkeypatch.setattr(_hyperparameters, "TUNING_ROWS", 15)
    monkeypatch.setattr(_hyperparameters, "_ENOUGH", enough)
    problem = problem_of(34, weighted=False)
    settings = replace(FIXED, bandwidth=None, ridge=None, n_iter=2)
    result = learn(problem, settings)
    judge, naive = NaiveJudge(problem, settings, 5 if enough == 1000 else 3), Naive(problem, settings)
    rows, few, moves = list(range(34)), list(range(15)), []
    for line in result.history:
        bandwidth, shift = best_of_grid(judge, few, median_distance(problem.x, naive.metric))
        assert line.bandwidth == pytest.approx(bandwidth, rel=1e-8)
        shifts = [shift * 10 ** (k / 2) for k in range(-3, 4)]
        errors = [judge.error(rows, bandwidth, at) for at in shifts]
        place, left = 3, 3  # four are tried, the start among them
        for way in (-1, 1):
            while left and (place - 3) * way >= 0:
                left -= 1
                if errors[place + way] >= errors[place]:
                    break
                place += way
        moves.append(place - 3)
        assert line.ridge * 34 == pytest.approx(shifts[place], rel=1e-8)
        assert line.error == pytest.approx(errors[place], rel=1e-8)
        judge.learn([rows], bandwidth, shifts[place] / float(problem.weights[rows].sum()))
        naive.solve(bandwidth, shifts[place])
        naive.update()
    assert any(moves)  # or nothing walks


WINDOWS = windows_of(20, 50, 6)


def test_windows_go_round_in_a_circle() -> None:
    problem = problem_of(10)
    windows = [[rows.tolist() for _, rows in machine_module._windows(problem, 4, i)] for i in range(2)]
    assert windows == [[[0, 1, 2, 3], [4, 5, 6, 7]], [[8, 9, 0, 1], [2, 3, 4, 5]]]
    assert machine_module._windows(problem, 10, 1) == machine_module._windows(problem, None, 1) == [(problem, None)]
    assert all(torch.equal(part.x, problem.x[rows]) for part, rows in machine_module._windows(problem, 4, 1))


@pytest.mark.parametrize("update", UPDATES)
@pytest.mark.parametrize("diagonal", [False, True])
def test_iterations_on_subsets(update: str, diagonal: bool) -> None:
    """Each M is the mean of what the next two windows have learned; the last solve sees all rows."""
    problem, test_rows = problem_of(50), problem_of(9, seed=1).x
    settings = replace(FIXED, update=update, ridge=1e-2, n_iter=5, subset=20, judge=False, diagonal=diagonal)
    result = learn(problem, settings)
    metric = EYE
    for both in WINDOWS[:5]:
        learned = []
        for window in both:
            naive = Naive(problem.subset(torch.tensor(window)), settings, metric)
            naive.solve(3.0, 1e-2 * naive.problem.total)
            naive.update()
            learned.append(naive.metric)
        metric = sum(learned) / 2
    naive = Naive(problem, settings, metric)
    naive.solve(3.0, 1e-2 * problem.total)
    assert_near(oracles.as_matrix(result.metric), metric)
    assert_near(predictions(result, settings.kernel, test_rows), naive.predict(test_rows))
    assert [line.rows for line in result.history] == [20] * 5 + [50]
    assert [line.ridge for line in result.history] == pytest.approx([1e-2] * 6, rel=1e-14)
    assert len(result.centers) == 50


@pytest.mark.parametrize("folds", [None, torch.arange(50) % 3])
@pytest.mark.parametrize("tuning_rows", [500, 12])
@pytest.mark.parametrize("chosen", [False, True])
def test_errors_on_subsets(
    folds: Tensor | None, tuning_rows: int, chosen: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of rows of the window, under an M that has seen their fold in no window."""
    monkeypatch.setattr(_hyperparameters, "TUNING_ROWS", tuning_rows)
    problem = problem_of(50, folds=folds)
    settings = replace(FIXED, ridge=1e-2, n_iter=5, subset=20)
    if chosen:
        settings = replace(settings, ridge=None, bandwidth=None)
    result = learn(problem, settings)
    wanted = NaiveJudge(problem, settings).errors(result.history, WINDOWS)
    assert [line.error for line in result.history] == pytest.approx(wanted, rel=1e-7)
    assert [line.rows for line in result.history] == [20] * 6
    # The last solve sees all rows, with the penalty that was chosen, or with the ridge that was given.
    best = result.history[result.best]
    window = problem.weights[WINDOWS[result.best][0]].sum()
    shift = float(best.ridge * window) if chosen else 1e-2 * problem.total
    naive = Naive(problem, settings, result.metric)
    naive.solve(best.bandwidth, shift)
    assert_near(result.fit.alpha, naive.alpha)
    assert result.ridge == pytest.approx(shift / problem.total, rel=1e-12)
    assert result.error == best.error


def test_windows_in_which_a_fold_is_missing() -> None:
    """At the end of the circle: 13 rows have folds 0 1 2 3 4 0 1 2 3 4 0 1 2, and then again 0."""
    problem, windows = problem_of(13), windows_of(5, 13, 4)
    assert {row % 5 for row in windows[1][0]} == {0, 1, 2}
    settings = replace(FIXED, ridge=1e-1, subset=5, n_iter=3)
    result = learn(problem, settings)
    wanted = NaiveJudge(problem, settings).errors(result.history, windows)
    assert [line.error for line in result.history] == pytest.approx(wanted, rel=1e-8)


# -- the last solve ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("chosen", [False, True])
def test_rows_that_were_held_out_come_back_for_the_last_solve(chosen: bool) -> None:
    whole = problem_of(50)
    kept, out = torch.arange(40), torch.arange(40, 50)
    held = HeldOut(whole.x[out], whole.targets[out], whole.weights[out])
    settings = replace(FIXED, ridge=None if chosen else 1e-2, n_iter=2)
    problem = replace(whole.subset(kept), held_out=held)
    result = learn(problem, settings, refit=whole)
    best = result.history[result.best]
    shift = best.ridge * problem.total if chosen else 1e-2 * whole.total
    naive = Naive(whole, settings, result.metric)
    naive.solve(3.0, shift)
    assert_near(result.fit.alpha, naive.alpha)
    assert_near(result.mean, naive.mean)
    assert torch.equal(result.centers, whole.x)
    assert result.ridge == pytest.approx(shift / whole.total, rel=1e-12)
    assert result.error == best.error
    assert result.unseen is not None
    assert torch.equal(result.unseen.targets, held.targets)
    alone = learn(problem, settings)
    assert torch.equal(alone.metric, result.metric)
    assert len(alone.fit.alpha) == 40


@pytest.mark.parametrize("sampling", ["uniform", "leverage"])
@pytest.mark.parametrize("judge", [True, False])
def test_centers_carry_the_last_solve(sampling: str, judge: bool) -> None:
    """The fit to all rows that is least among functions of the centers alone."""
    problem, test_rows = problem_of(60), problem_of(9, seed=1).x
    settings = replace(FIXED, ridge=1e-2, n_iter=2, centers=25, center_sampling=sampling, subset=30, judge=judge)
    result = learn(problem, settings)
    assert [line.rows for line in result.history] == [30] * 3
    assert torch.equal(result.metric, learn(problem, replace(settings, centers=None)).metric)
    places = [problem.x.tolist().index(row) for row in result.centers.tolist()]
    assert len(set(places)) == 25
    root = oracles.power(result.metric, 0.5)
    u, c = problem.x @ root, result.centers @ root
    k, within = oracles.matrix(settings.kernel, u, c, 3.0), oracles.matrix(settings.kernel, c, c, 3.0)
    normal = k.T @ (problem.weights[:, None] * k) + 1e-2 * problem.total * within
    alpha = torch.linalg.solve(normal, k.T @ (problem.weights[:, None] * (problem.targets - problem.mean)))
    wanted = oracles.matrix(settings.kernel, test_rows @ root, c, 3.0) @ alpha + problem.mean
    assert_near(predictions(result, settings.kernel, test_rows), wanted, 1e-5)  # steps of a conjugate gradient
    assert result.ridge == pytest.approx(1e-2, rel=1e-12)
    assert torch.equal(learn(problem, settings).centers, result.centers)
    assert not torch.equal(learn(problem, replace(settings, seed=1)).centers, result.centers)


def test_all_rows_as_centers_are_the_direct_solve() -> None:
    problem, test_rows = problem_of(), problem_of(9, seed=1).x
    direct = learn(problem, replace(FIXED, ridge=1e-2))
    result = learn(problem, replace(FIXED, ridge=1e-2, centers=40))
    assert torch.equal(result.metric, direct.metric)
    assert [line.error for line in result.history] == [line.error for line in direct.history]
    assert_near(predictions(result, FIXED.kernel, test_rows), predictions(direct, FIXED.kernel, test_rows), 1e-5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_numbers_of_a_machine_are_of_its_type(dtype: torch.dtype) -> None:
    exact = problem_of()
    problem = TrainingRows(exact.x.to(dtype), exact.targets.to(dtype), exact.weights.to(dtype))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        result = learn(problem, Settings(KERNELS["laplace"], n_iter=2))
    assert result.unseen is not None
    for tensor in (result.metric, result.fit.alpha, result.centers, result.mean, result.unseen.residuals):
        assert tensor.dtype == dtype
    wanted = learn(exact, Settings(KERNELS["laplace"], n_iter=2))
    assert result.history[0].error == pytest.approx(wanted.history[0].error, rel=1e-3)


# -- fixed points ------------------------------------------------------------------------------------------------------


def at_rest(name: str, directions: list[list[float]], diagonal: bool = False) -> tuple[Tensor, Tensor]:
    """M after so many updates without rescaling that it rests, and FACT of its solution, both by autograd."""
    x = problem_of(60).x
    targets = (x @ torch.tensor(directions, dtype=torch.float64).T).sin()
    problem = TrainingRows(x, targets, torch.ones(60, dtype=torch.float64))
    settings = Settings(KERNELS[name], "fact-geometric", 0.5, None, 2.0, 1e-2, 250, diagonal, judge=False)
    result = learn(problem, settings)
    naive = Naive(problem, settings, oracles.as_matrix(result.metric))
    naive.solve(2.0, 1e-2 * 60)
    fact = naive.fact()
    naive.update()
    assert_near(naive.metric, oracles.as_matrix(result.metric), 1e-9)
    return naive.metric, fact


@pytest.mark.parametrize("name", ["quadratic", "polynomial", "exp"])
def test_without_rescaling_m_comes_to_rest_where_it_is_its_own_fact(name: str) -> None:
    """Of inner products, with targets that need every direction (FACT paper, section 4.2)."""
    metric, fact = at_rest(name, [[1.0, 0.0, 0.2], [0.5, 1.0, 0.0], [0.0, 0.3, 1.0]])
    assert float(torch.linalg.eigvalsh(metric)[0]) > 0.1  # of full rank
    assert_near(fact, metric, 1e-8)


def test_of_a_radial_kernel_m_rests_at_the_size_of_fact_and_not_at_fact() -> None:
    """FACT may be negative in directions that hurt; the update's root forgets the sign."""
    metric, fact = at_rest("gaussian", [[1.0, 0.5, 0.0]], diagonal=True)
    assert float(fact.diagonal().min()) < -0.1
    assert_near(fact.abs(), metric, 1e-8)
