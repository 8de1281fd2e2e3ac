"""The iterations, against algorithm 1 of the FACT paper written out with autograd."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from sklearn.exceptions import ConvergenceWarning
from torch import Tensor

from featlearn.rfm import machine as machine_module
from featlearn.rfm.gram import SingularKernelError
from featlearn.rfm.kernels import Kernel, make_kernel
from featlearn.rfm.machine import Iteration, Machine, Settings, learn, solve_rows
from featlearn.rfm.problem import HeldOut, Problem
from featlearn.rfm.selection import tune

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


def problem_of(n: int = 40, d: int = 3, weighted: bool = True, seed: int = 0, **options) -> Problem:
    source = torch.Generator().manual_seed(seed)
    x = torch.randn(n, d, generator=source, dtype=torch.float64)
    noise = torch.randn(n, 2, generator=source, dtype=torch.float64)
    y = torch.stack([1.0 + x[:, 0] * x[:, 1], torch.sin(2 * x[:, 0])], dim=1) + 0.1 * noise
    w = 0.3 + 2 * torch.rand(n, generator=source, dtype=torch.float64)
    return Problem(x, y, w if weighted else torch.ones_like(w), **options)


def naive_kernel(kernel: Kernel, metric: Tensor, x: Tensor, z: Tensor, bandwidth: float) -> Tensor:
    """From the definition; where a distance is zero, so is its gradient."""
    values, vectors = torch.linalg.eigh(metric)
    u, v = (a @ (vectors * values.clamp_min(0).sqrt()) @ vectors.T for a in (x, z))
    if not kernel.radial:
        t = u @ v.T / bandwidth**2
        functions = {"quadratic": t**2, "exp": t.exp(), "polynomial": (kernel.offset + t) ** kernel.degree}
        return functions[kernel.name]
    steps = u[:, None] - v[None]
    same = (steps == 0).all(2)
    # The inner where keeps the backward pass away from the root of zero.
    powers = torch.where(same[:, :, None], torch.ones_like(steps), steps).abs().pow(kernel.norm).sum(2)
    return torch.where(same, 1.0, torch.exp(-(powers ** (kernel.exponent / kernel.norm)) / bandwidth**kernel.exponent))


class Naive:
    """Algorithm 1 with fixed bandwidths and penalties, in the order of the paper; gradients come from autograd."""

    def __init__(self, problem: Problem, settings: Settings) -> None:
        self.problem, self.settings = problem, settings
        self.metric = torch.eye(problem.x.shape[1], dtype=torch.float64)

    def solve(self, bandwidth: float, shift: float) -> None:
        x, y, w = self.problem.x, self.problem.targets, self.problem.weights
        self.bandwidth = bandwidth
        self.mean = (w[:, None] * y).sum(0) / w.sum() if self.problem.intercept else torch.zeros_like(y[0])
        k = naive_kernel(self.settings.kernel, self.metric, x, x, bandwidth)
        self.alpha = torch.linalg.solve(k + torch.diag(shift / w), y - self.mean)

    def predict(self, z: Tensor) -> Tensor:
        k = naive_kernel(self.settings.kernel, self.metric, z, self.problem.x, self.bandwidth)
        return k @ self.alpha + self.mean

    def update(self) -> None:
        x, w = self.problem.x, self.problem.weights
        points = x.clone().requires_grad_()
        outputs = self.predict(points).unbind(1)
        gradients = torch.stack([torch.autograd.grad(f.sum(), points, retain_graph=True)[0] for f in outputs], dim=1)
        agop = torch.einsum("n,ncd,nce->de", w, gradients, gradients) / w.sum()
        fact = torch.einsum("nc,ncd,ne->de", self.alpha, gradients, x)
        if self.settings.diagonal:
            agop, fact = agop.diagonal().diag(), fact.diagonal().diag()
        if self.settings.update == "nfa":
            new = power(agop, self.settings.power)
        elif self.settings.update == "fact":
            new = power(fact @ fact.T, 0.5)
        else:
            new = power(fact @ self.metric @ self.metric.T @ fact.T, 0.25)
        self.metric = new * len(new) / new.trace() if self.settings.rescale else new


def power(matrix: Tensor, exponent: float) -> Tensor:
    values, vectors = torch.linalg.eigh((matrix + matrix.T) / 2)
    return (vectors * values.clamp_min(0) ** exponent) @ vectors.T


def predictions(machine: Machine, kernel: Kernel, z: Tensor) -> Tensor:
    """Of a fitted machine, by the definition of its attributes."""
    metric = machine.metric.diag() if machine.metric.ndim == 1 else machine.metric
    k = naive_kernel(kernel, metric, z, machine.centers, machine.solution.bandwidth)
    return k @ machine.solution.alpha + machine.mean


def assert_near(found: Tensor, wanted: Tensor, relative: float = 1e-8) -> None:
    assert float((found - wanted).norm()) <= relative * float(wanted.norm())


@pytest.mark.parametrize("update", UPDATES)
@pytest.mark.parametrize("diagonal", [False, True])
@pytest.mark.parametrize("rescale", [True, False])
@pytest.mark.parametrize("name", KERNELS)
def test_algorithm_1(update: str, diagonal: bool, rescale: bool, name: str) -> None:
    problem, there = problem_of(), problem_of(9, seed=1).x
    settings = Settings(KERNELS[name], update, 0.5, rescale, 3.0, 1e-2, 2, diagonal, judge=False)
    found = learn(problem, settings)
    naive = Naive(problem, settings)
    for _ in range(2):
        naive.solve(3.0, 1e-2 * problem.total)
        naive.update()
    naive.solve(3.0, 1e-2 * problem.total)
    assert found.metric.ndim == (1 if diagonal else 2)
    assert_near(found.metric.diag() if diagonal else found.metric, naive.metric)
    assert_near(predictions(found, settings.kernel, there), naive.predict(there))
    assert found.best == 2
    assert found.ridge == pytest.approx(1e-2, rel=1e-14)


@pytest.mark.parametrize("power", [0.25, 1.0])
def test_power_of_agop_without_intercept(power: float) -> None:
    problem = problem_of(intercept=False)
    settings = Settings(KERNELS["laplace"], "nfa", power, True, 3.0, 1e-2, 1, judge=False)
    naive = Naive(problem, settings)
    naive.solve(3.0, 1e-2 * problem.total)
    naive.update()
    found = learn(problem, settings)
    assert_near(found.metric, naive.metric)
    assert (found.mean == 0).all()


def crossed_errors(problem: Problem, settings: Settings, folds: Tensor, lines: tuple[Iteration, ...]) -> list[float]:
    """Errors of machines that learn M from scratch without a fold, with the main machine's bandwidths and ridges."""
    squares = [0.0] * len(lines)
    for fold in folds.unique():
        out = folds == fold
        inside = Problem(problem.x[~out], problem.targets[~out], problem.weights[~out], intercept=problem.intercept)
        naive = Naive(inside, settings)
        for i, line in enumerate(lines):
            if i:
                naive.update()
            naive.solve(line.bandwidth, line.ridge * problem.total)
            missed = (problem.targets[out] - naive.predict(problem.x[out])).square().sum(1)
            squares[i] += float(problem.weights[out] @ missed)
    return [total / problem.total for total in squares]


@pytest.mark.parametrize("update", UPDATES)
@pytest.mark.parametrize("fixed", [True, False])
@pytest.mark.parametrize("own_folds", [True, False])
def test_iterates_are_judged_by_machines_that_have_not_seen_the_fold(update: str, fixed: bool, own_folds: bool) -> None:
    folds = torch.arange(40) // 14 if own_folds else None
    problem = problem_of(folds=folds)
    settings = Settings(KERNELS["laplace"], update, n_iter=3, patience=None)
    if fixed:
        settings = replace(settings, bandwidth=3.0, ridge=1e-3)
    found = learn(problem, settings)
    assert len(found.history) == 4
    wanted = crossed_errors(problem, settings, torch.arange(40) % 5 if folds is None else folds, found.history)
    # A ridge of 1e-6 on the kernel leaves a condition of 1e7, and a third M learnt through it that much rounding.
    assert [line.error for line in found.history] == pytest.approx(wanted, rel=1e-8)
    assert found.best == int(np.argmin(wanted))
    assert found.solution.error == min(line.error for line in found.history)
    # M = I has seen nothing: there the two are one, if the folds are.
    first, *others = found.history
    assert (first.loo_error == pytest.approx(first.error, rel=1e-8)) == own_folds
    assert all(line.loo_error != pytest.approx(line.error, rel=1e-3) for line in others)


def test_merged_targets_count_in_the_error_of_an_iterate() -> None:
    problem = problem_of()
    spread = torch.full((40,), 0.5, dtype=torch.float64)
    settings = Settings(KERNELS["laplace"], bandwidth=3.0, ridge=1e-3, n_iter=1)
    plain, merged = learn(problem, settings), learn(replace(problem, spread=spread), settings)
    apart = 0.5 * 40 / problem.total
    for name in ("error", "loo_error"):
        lines = zip(plain.history, merged.history, strict=True)
        assert all(getattr(m, name) == pytest.approx(getattr(p, name) + apart, rel=1e-12) for p, m in lines)


def test_held_out_rows_judge_iterates() -> None:
    there = problem_of(15, seed=1)
    problem = problem_of(held_out=HeldOut(there.x, there.targets, there.weights))
    settings = Settings(KERNELS["laplace"], "fact", bandwidth=3.0, ridge=1e-3, n_iter=3, patience=None)
    found = learn(problem, settings)
    naive = Naive(problem, settings)
    for line in found.history:
        if line.iteration:
            naive.update()
        naive.solve(3.0, 1e-3 * problem.total)
        error = float(there.weights @ (there.targets - naive.predict(there.x)).square().sum(1)) / there.total
        assert line.error == line.loo_error == pytest.approx(error, rel=1e-8)


# -- stopping and keeping ----------------------------------------------------------------------------------------------


def noise(n: int = 40, **options) -> Problem:
    """Targets that no feature explains: learning M cannot help for long."""
    source = torch.Generator().manual_seed(5)
    x, y = (torch.randn(n, c, generator=source, dtype=torch.float64) for c in (6, 1))
    return Problem(x, y, torch.ones(n, dtype=torch.float64), **options)


@pytest.mark.parametrize("patience", [1, 2, 3])
def test_iterations_stop_when_patience_is_at_an_end(patience: int) -> None:
    settings = Settings(KERNELS["laplace"], "fact", bandwidth=3.0, ridge=1e-3, n_iter=12)
    whole = [line.error for line in learn(noise(), replace(settings, patience=None)).history]
    assert len(whole) == 13
    best = stop = 0  # the rule, written out
    for i, error in enumerate(whole):
        best = i if error < whole[best] else best
        stop = i
        if i - best >= patience:
            break
    found = learn(noise(), replace(settings, patience=patience))
    assert (found.best, len(found.history)) == (best, stop + 1)
    assert len(found.history) < 13  # or the example shows nothing
    assert [line.error for line in found.history] == whole[: stop + 1]


def test_the_best_iterate_is_kept_whole() -> None:
    settings = Settings(KERNELS["laplace"], "fact", bandwidth=3.0, ridge=1e-3, n_iter=8, patience=None)
    found = learn(noise(), settings)
    assert 0 <= found.best < 8
    up_to_best = learn(noise(), replace(settings, n_iter=found.best))
    assert torch.equal(found.metric, up_to_best.metric)
    assert torch.equal(found.solution.alpha, up_to_best.solution.alpha)
    assert found.solution.error == found.history[found.best].error
    last = learn(noise(), replace(settings, judge=False))
    assert last.best == 8
    assert not torch.equal(last.metric, found.metric)


def test_lines_come_one_by_one() -> None:
    seen: list[Iteration] = []
    found = learn(problem_of(), Settings(KERNELS["laplace"], n_iter=2, patience=None), seen.append)
    assert tuple(seen) == found.history
    assert [line.iteration for line in seen] == [0, 1, 2]
    assert seen[0].effective_rank == pytest.approx(3.0)
    assert all(line.rows == 40 and line.seconds > 0 and line.condition > 1 for line in seen)


@pytest.mark.parametrize("settings", [{"n_iter": 0}, {"update": "none"}])
def test_without_updates_it_is_kernel_regression(settings: dict) -> None:
    found = learn(problem_of(), Settings(KERNELS["laplace"], bandwidth=3.0, ridge=1e-3, **settings))
    naive = Naive(problem_of(), Settings(KERNELS["laplace"]))
    naive.solve(3.0, 1e-3 * problem_of().total)
    assert torch.equal(found.metric, EYE)
    assert_near(found.solution.alpha, naive.alpha)
    assert len(found.history) == 1
    if "update" in settings:  # no M has seen anything: leaving one out is exact
        assert found.history[0].error == found.history[0].loo_error


def test_a_constant_function_has_no_features() -> None:
    # Zeros leave no rounding; see test_found.py for other constants.
    problem = replace(problem_of(), targets=torch.zeros(40, 2, dtype=torch.float64))
    found = learn(problem, Settings(KERNELS["laplace"]))
    assert torch.equal(found.metric, EYE)
    assert (found.solution.alpha == 0).all()
    assert len(found.history) == 1


def test_a_failed_solve_leaves_the_best_iterate_before_it(monkeypatch: pytest.MonkeyPatch) -> None:
    settings = Settings(KERNELS["laplace"], "fact", bandwidth=3.0, ridge=1e-3, n_iter=5, patience=None)
    whole = learn(problem_of(), settings)
    solve, solves = machine_module._solve, []

    def failing(problem, settings, metric, start=None):
        if len(problem) == 40:
            solves.append(metric)
            if len(solves) == 3:
                raise SingularKernelError("the kernel matrix is not positive definite")
        return solve(problem, settings, metric, start)

    monkeypatch.setattr(machine_module, "_solve", failing)
    with pytest.warns(ConvergenceWarning, match="iteration 2 failed"):
        found = learn(problem_of(), settings)
    assert [line.error for line in found.history] == [line.error for line in whole.history[:2]]
    assert found.best < 2
    solves[:] = [EYE] * 2
    with pytest.raises(SingularKernelError):  # nothing to fall back on
        learn(problem_of(), settings)


# -- many rows ---------------------------------------------------------------------------------------------------------


def test_windows_go_round_in_a_circle() -> None:
    windows = [machine_module._window(10, 4, i) for i in range(4)]
    assert [w.tolist() for w in windows] == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9, 0, 1], [2, 3, 4, 5]]
    assert machine_module._window(10, 10, 1) is machine_module._window(10, None, 1) is None


@pytest.mark.parametrize("update", UPDATES)
def test_iterations_on_subsets(update: str) -> None:
    """Each M is learnt on the next window alone; the last solve sees all rows."""
    problem, there = problem_of(50), problem_of(9, seed=1).x
    settings = Settings(KERNELS["laplace"], update, bandwidth=3.0, ridge=1e-2, n_iter=3, subset=20, judge=False)
    found = learn(problem, settings)
    metric = EYE
    for window in ([*range(20)], [*range(20, 40)], [*range(40, 50), *range(10)]):
        part = problem.part(torch.tensor(window))
        naive = Naive(part, settings)
        naive.metric = metric
        naive.solve(3.0, 1e-2 * part.total)
        naive.update()
        metric = naive.metric
    naive = Naive(problem, settings)
    naive.metric = metric
    naive.solve(3.0, 1e-2 * problem.total)
    assert_near(found.metric, metric)
    assert_near(predictions(found, settings.kernel, there), naive.predict(there))
    assert [line.rows for line in found.history] == [20] * 4
    assert len(found.centers) == 50
    assert found.judged is not None
    assert found.judged.tolist() == [*range(10, 30)]


def test_errors_on_subsets_are_of_machines_that_saw_neither_fold_nor_other_windows() -> None:
    problem = problem_of(50)
    settings = Settings(KERNELS["laplace"], "fact", bandwidth=3.0, ridge=1e-2, n_iter=1, subset=20)
    found = learn(problem, settings)
    folds, squares = torch.arange(50) % 5, 0.0
    first, second = torch.arange(20), torch.arange(20, 40)
    parts = problem.part(first), problem.part(second)
    for fold in range(5):
        inside = [problem.part(rows[folds[rows] != fold]) for rows in (first, second)]
        naive = Naive(inside[0], settings)
        naive.solve(3.0, 1e-2 * parts[0].total)
        naive.update()
        judge = Naive(inside[1], settings)
        judge.metric = naive.metric
        judge.solve(3.0, 1e-2 * parts[1].total)
        out = problem.part(second[folds[second] == fold])
        squares += float(out.weights @ (out.targets - judge.predict(out.x)).square().sum(1))
    assert found.history[1].error == pytest.approx(squares / parts[1].total, rel=1e-8)


def test_more_rows_than_eigendecompositions_see(monkeypatch: pytest.MonkeyPatch) -> None:
    """Bandwidth and ridge come from the first rows; then the ridge goes downhill on the errors of all."""
    problem = problem_of(60, weighted=False)
    settings = Settings(KERNELS["laplace"], "none")
    monkeypatch.setattr(machine_module, "TUNING_ROWS", 25)
    found = solve_rows(problem, settings, EYE)
    few = problem.part(torch.arange(25))
    scale = machine_module.kernel_scale(settings.kernel, problem.x)
    start = tune(few, settings.kernel, few.x, None, [m * scale for m in (1, 2, 4, 8)], machine_module.SHIFTS)
    assert found.bandwidth == start.bandwidth
    steps = found.shift / start.shift
    candidates = {
        step: tune(problem, settings.kernel, problem.x, None, [start.bandwidth],
                   torch.tensor([start.shift * step], dtype=torch.float64), relative=False)
        for step in (10**-0.5, 1.0, 10**0.5)
    }  # fmt: skip
    nearest = min(candidates, key=lambda step: abs(step - steps))
    assert steps == pytest.approx(nearest)
    best = candidates[nearest]
    assert found.error == pytest.approx(best.error, rel=1e-8)
    assert found.error == pytest.approx(min(c.error for c in candidates.values()), rel=1e-8)
    assert_near(found.alpha, best.alpha, 1e-7)


def test_rows_that_were_held_out_come_back_for_the_last_solve() -> None:
    whole = problem_of(50)
    kept, out = torch.arange(40), torch.arange(40, 50)
    held = HeldOut(whole.x[out], whole.targets[out], whole.weights[out])
    settings = Settings(KERNELS["laplace"], "fact", bandwidth=3.0, ridge=1e-2, n_iter=2)
    found = learn(replace(whole.part(kept), held_out=held), settings, refit=whole)
    naive = Naive(whole, settings)
    naive.metric = found.metric
    naive.solve(3.0, 1e-2 * whole.total)
    assert_near(found.solution.alpha, naive.alpha)
    assert torch.equal(found.mean, whole.mean)
    assert found.solution.error == found.history[found.best].error


# -- fixed points ------------------------------------------------------------------------------------------------------


def fact_at_rest(name: str, directions: list[list[float]], diagonal: bool = False) -> tuple[Tensor, Tensor]:
    """M after so many updates without rescaling that it rests, and FACT of its solution by autograd."""
    x = problem_of(60).x
    targets = (x @ torch.tensor(directions, dtype=torch.float64).T).sin()
    problem = Problem(x, targets, torch.ones(60, dtype=torch.float64))
    settings = Settings(KERNELS[name], "fact-geometric", 0.5, False, 2.0, 1e-2, 400, diagonal, judge=False)
    found = learn(problem, settings)
    assert_near(learn(problem, replace(settings, n_iter=401)).metric, found.metric, 1e-9)
    naive = Naive(problem, settings)
    naive.metric = found.metric.diag() if diagonal else found.metric
    naive.solve(2.0, 1e-2 * 60)
    points = x.clone().requires_grad_()
    outputs = naive.predict(points).unbind(1)
    gradients = torch.stack([torch.autograd.grad(f.sum(), points, retain_graph=True)[0] for f in outputs], dim=1)
    fact = torch.einsum("nc,ncd,ne->de", naive.alpha, gradients, x)
    return naive.metric, fact.diagonal().diag() if diagonal else fact


@pytest.mark.parametrize("name", ["quadratic", "polynomial", "exp"])
def test_without_rescaling_m_comes_to_rest_where_it_is_its_own_fact(name: str) -> None:
    """Of inner products, with targets that need every direction (FACT paper, section 4.2)."""
    metric, fact = fact_at_rest(name, [[1.0, 0.0, 0.2], [0.5, 1.0, 0.0], [0.0, 0.3, 1.0]])
    assert float(torch.linalg.eigvalsh(metric)[0]) > 0.1  # of full rank
    assert_near(fact, metric, 1e-8)


def test_of_a_radial_kernel_m_rests_at_the_size_of_fact_and_not_at_fact() -> None:
    """FACT may be negative in directions that hurt; the update's root forgets the sign."""
    metric, fact = fact_at_rest("gaussian", [[1.0, 0.5, 0.0]], diagonal=True)
    assert float(fact.diagonal().min()) < -0.1
    assert_near(fact.abs(), metric, 1e-8)
