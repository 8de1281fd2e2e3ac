"""Errors of rows left out, held-out errors and merged rows, against machines fitted again and again."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest
import rfm_oracles as oracles
import torch
from torch import Tensor

from featlearn.rfm import _hyperparameter_search, _hyperparameters
from featlearn.rfm._dense_solver import KernelSolver
from featlearn.rfm._hyperparameter_search import (
    FoldView,
    GridPoint,
    Hyperparameters,
    kernel_scale,
    line_search,
    line_search_single,
    search_downhill,
    search_grid,
    tune,
)
from featlearn.rfm.iteration import Settings
from featlearn.rfm.kernels import Kernel, make_kernel
from featlearn.rfm.recursion import learn
from featlearn.rfm.training_rows import HeldOut, TrainingRows, distinct_rows, merge_rows

LAPLACE = make_kernel("laplace")
BANDWIDTH = 2.0


def rows_of(n: int, d: int = 3, outputs: int = 2, seed: int = 0) -> tuple[Tensor, Tensor, Tensor]:
    """Rows, targets with a mean far from zero, and weights from 0.2 to 3, about 1 in the mean."""
    source = torch.Generator().manual_seed(seed)
    x = torch.randn(n, d, generator=source, dtype=torch.float64)
    noise = torch.randn(n, outputs, generator=source, dtype=torch.float64)
    y = 3.0 + torch.stack([x[:, 0] * x[:, c % d] for c in range(outputs)], dim=1) + 0.3 * noise
    w = 0.2 + 2.8 * torch.rand(n, generator=source, dtype=torch.float64)
    return x, y, w / w.mean()


def naive_fit(
    kernel: Kernel, x: Tensor, y: Tensor, w: Tensor, shift: float, intercept: bool, z: Tensor, bandwidth: float
) -> Tensor:
    """Predictions at z of weighted kernel ridge regression with the penalty ``shift``, by its definition."""
    mean = (w[:, None] * y).sum(0) / w.sum() if intercept else torch.zeros_like(y[0])
    alpha = oracles.ridge_coefficients(oracles.matrix(kernel, x, x, bandwidth), y - mean, w, shift)
    return oracles.matrix(kernel, z, x, bandwidth) @ alpha + mean


def naive_left_out(
    kernel: Kernel, problem: TrainingRows, shift: float, bandwidth: float = BANDWIDTH, u: Tensor | None = None
) -> Tensor:
    """Residuals of one fit for each row or fold, which it has not seen; the penalty stays that of all rows."""
    u = problem.x if u is None else u
    folds = torch.arange(len(problem)) if problem.folds is None else problem.folds
    k = oracles.matrix(kernel, u, u, bandwidth)
    residuals = torch.empty_like(problem.targets)
    for fold in folds.unique():
        out = folds == fold
        y, w = problem.targets[~out], problem.weights[~out]
        mean = (w[:, None] * y).sum(0) / w.sum() if problem.intercept else 0.0
        alpha = oracles.ridge_coefficients(k[~out][:, ~out], y - mean, w, shift)
        residuals[out] = problem.targets[out] - (k[out][:, ~out] @ alpha + mean)
    return residuals


def naive_error(
    kernel: Kernel, problem: TrainingRows, views: Sequence[FoldView], shift: float, bandwidth: float = BANDWIDTH
) -> tuple[float, Tensor]:
    """The error of all rows that a view judges, and their residuals; NaN in the others."""
    residuals = torch.full_like(problem.targets, torch.nan)
    for view in views:
        residuals[view.rows] = naive_left_out(kernel, problem, shift, bandwidth, view.u)[view.rows]
    squares = total = 0.0
    for i, row in enumerate(residuals.tolist()):
        if not math.isnan(row[0]):
            total += float(problem.weights[i])
            squares += float(problem.weights[i]) * sum(entry**2 for entry in row)
            squares += 0.0 if problem.spread is None else float(problem.spread[i].sum())
    return squares / total, residuals


def all_rows(problem: TrainingRows) -> list[FoldView]:
    return [FoldView(problem.x, torch.ones(len(problem), dtype=torch.bool))]


def by_eigenvalues(
    kernel: Kernel, problem: TrainingRows, views: Sequence[FoldView], shift: float, bandwidth: float = BANDWIDTH
) -> Hyperparameters:
    return tune(problem, kernel, views, [bandwidth], torch.tensor([shift], dtype=torch.float64), relative=False)


def by_cholesky(
    kernel: Kernel, problem: TrainingRows, views: Sequence[FoldView], shift: float, bandwidth: float = BANDWIDTH
) -> Hyperparameters:
    return line_search(problem, kernel, views, Hyperparameters(bandwidth, shift), 2.0, 1)


WAYS = [by_eigenvalues, by_cholesky]
LEFT_OUT = {
    "single rows": None,
    "folds": torch.tensor([0, 1, 2, 1, 0, 2] * 5),
    "folds of very different sizes": torch.tensor([0] * 20 + [1] + [2] * 9),
    "numbers of folds with a gap": torch.tensor([0, 3] * 15),
}


@pytest.mark.parametrize("fast", WAYS)
@pytest.mark.parametrize("intercept", [True, False])
@pytest.mark.parametrize("left_out", LEFT_OUT)
@pytest.mark.parametrize("weighted", [True, False])
def test_residuals_of_rows_left_out_are_those_of_fits_without_them(fast, intercept, left_out, weighted) -> None:
    x, y, w = rows_of(30)
    problem = TrainingRows(x, y, w if weighted else torch.ones(30, dtype=torch.float64), LEFT_OUT[left_out],
                      intercept=intercept)  # fmt: skip
    for shift in (1e-3, 1.0):
        result = fast(LAPLACE, problem, all_rows(problem), shift)
        error, residuals = naive_error(LAPLACE, problem, all_rows(problem), shift)
        # condition numbers are up to 1e5 here: rounding is about 1e-11
        torch.testing.assert_close(result.residuals, residuals, rtol=1e-8, atol=1e-8)
        assert result.error == pytest.approx(error, rel=1e-9)
        assert (result.bandwidth, result.shift) == (BANDWIDTH, shift)
        assert result.judged.all()


@pytest.mark.parametrize("name", ["gaussian", "quadratic", "exp", "lpq"])
@pytest.mark.parametrize("fast", WAYS)
def test_other_kernels_leave_out_likewise(name: str, fast) -> None:
    kernel = make_kernel(name, norm=1.3, exponent=0.8) if name == "lpq" else make_kernel(name)
    problem = TrainingRows(*rows_of(25))
    result = fast(kernel, problem, all_rows(problem), 0.1)
    torch.testing.assert_close(result.residuals, naive_left_out(kernel, problem, 0.1), rtol=1e-8, atol=1e-8)


@pytest.mark.parametrize("n", [511, 513, 1100])
def test_strips_of_the_gram_matrix_join_without_a_seam(n: int) -> None:
    """The factor is filled in strips of 512 rows; the definition's inverse knows of none."""
    x, y, w = rows_of(n, outputs=1)
    problem = TrainingRows(x, y, w)
    distances = (x.square().sum(1)[:, None] + x.square().sum(1) - 2 * x @ x.T).clamp_min(0).fill_diagonal_(0).sqrt()
    inverse = torch.linalg.inv(torch.exp(-distances / BANDWIDTH) + 0.1 * torch.diag(1 / w))
    missed = inverse @ problem.right_sides() / inverse.diagonal()[:, None]
    result = by_cholesky(LAPLACE, problem, all_rows(problem), 0.1)
    torch.testing.assert_close(result.residuals, problem.residuals(missed), rtol=1e-7, atol=1e-7)


# -- several M ---------------------------------------------------------------------------------------------------------


def seen_by_three(problem: TrainingRows) -> list[FoldView]:
    """Three metrics, one of them of rank 2; each judges rows or folds of its own, and some are judged by none."""
    roots = [torch.eye(3, dtype=torch.float64), oracles.numbers(3, 3, seed=1), oracles.numbers(3, 2, seed=2)]
    units = torch.arange(len(problem)) % 7 if problem.folds is None else problem.folds
    masks = [units == 0, (units == 2) | (units == 3), units == 5]
    return [FoldView(problem.x @ root, mask) for root, mask in zip(roots, masks, strict=True) if mask.any()]


VIEWED = {
    "single rows": None,
    "folds": torch.arange(30) // 3 % 6,
    "folds of very different sizes": torch.tensor([0] * 12 + [2] + [3] * 4 + [1] * 13),
}


@pytest.mark.parametrize("fast", WAYS)
@pytest.mark.parametrize("intercept", [True, False])
@pytest.mark.parametrize("left_out", VIEWED)
def test_each_row_is_left_out_under_the_metric_that_judges_it(fast, intercept: bool, left_out: str) -> None:
    x, y, w = rows_of(30)
    problem = TrainingRows(
        x, y, w, VIEWED[left_out], intercept=intercept, spread=torch.stack([0.2 * w.flip(0), 0.1 * w], 1)
    )
    views = seen_by_three(problem)
    assert len(views) > 1
    for shift in (1e-3, 1.0):
        error, residuals = naive_error(LAPLACE, problem, views, shift)
        result = fast(LAPLACE, problem, views, shift)
        judged = ~residuals[:, 0].isnan()
        assert 0 < judged.sum() < 30
        assert torch.equal(result.judged, judged)
        torch.testing.assert_close(result.residuals[judged], residuals[judged], rtol=1e-8, atol=1e-8)
        assert result.error == pytest.approx(error, rel=1e-9)


def test_rows_that_nobody_judges_do_not_count() -> None:
    x, y, w = rows_of(12)
    spread = torch.rand(12, 2, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    problem, judged = TrainingRows(x, y, w, spread=spread), torch.arange(12) % 3 == 1
    residuals = oracles.numbers(12, 2, seed=3)
    wanted = (w[judged] @ residuals[judged].square().sum(1) + spread[judged].sum()) / w[judged].sum()
    assert problem.error(residuals, judged) == pytest.approx(float(wanted), rel=1e-12)
    residuals[~judged] = 1e6
    assert problem.error(residuals, judged) == pytest.approx(float(wanted), rel=1e-12)
    assert problem.error(residuals, torch.ones(12, dtype=torch.bool)) == problem.error(residuals) > 1e6


def test_first_rows_of_a_view() -> None:
    view = FoldView(oracles.numbers(9, 2, seed=0), torch.arange(9) % 2 == 0, oracles.numbers(3, 2, seed=1))
    few = view.first(4)
    assert torch.equal(few.u, view.u[:4])
    assert few.rows.tolist() == [True, False, True, False]
    assert few.held_u is view.held_u


# -- the least error ---------------------------------------------------------------------------------------------------


BANDWIDTHS, SHIFTS = [0.5, 2.0, 8.0], torch.tensor([1e-4, 1e-2, 1.0, 100.0], dtype=torch.float64)


@pytest.mark.parametrize("left_out", ["single rows", "folds"])
@pytest.mark.parametrize("several", [True, False])
@pytest.mark.parametrize("relative", [True, False])
def test_tune_takes_the_least_of_all_errors(left_out: str, several: bool, relative: bool) -> None:
    x, y, w = rows_of(30)
    problem = TrainingRows(x, y, w, VIEWED[left_out])
    views = seen_by_three(problem) if several else all_rows(problem)
    errors = {
        (bandwidth, shift): naive_error(LAPLACE, problem, views, shift, bandwidth)[0]
        for bandwidth, shift in itertools.product(BANDWIDTHS, SHIFTS.tolist())
    }
    best = min(errors, key=errors.__getitem__)
    result = tune(problem, LAPLACE, views, BANDWIDTHS, SHIFTS, relative)  # the kernel is 1 on its diagonal
    assert (result.bandwidth, result.shift) == (best[0], pytest.approx(best[1], rel=1e-12))
    assert result.error == pytest.approx(errors[best], rel=1e-9)


@pytest.mark.parametrize("ends", [(0, 0), (2, 0), (0, 3), (2, 3)])
def test_tune_finds_the_least_error_wherever_it_is_in_the_grid(ends: tuple[int, int]) -> None:
    """The best of the test before, as the first or last of both lists."""
    problem = TrainingRows(*rows_of(30))
    views = seen_by_three(problem)
    one = tune(problem, LAPLACE, views, BANDWIDTHS, SHIFTS, False)
    bandwidths = [bandwidth for bandwidth in BANDWIDTHS if bandwidth != one.bandwidth]
    shifts = [shift for shift in SHIFTS.tolist() if shift != one.shift]
    bandwidths.insert(ends[0], one.bandwidth)
    shifts.insert(ends[1], one.shift)
    result = tune(problem, LAPLACE, views, bandwidths, torch.tensor(shifts, dtype=torch.float64), False)
    assert (result.bandwidth, result.shift) == (one.bandwidth, one.shift)
    assert torch.equal(result.residuals, one.residuals)


def test_only_rows_that_are_judged_choose() -> None:
    """Half of the targets are noise: the others choose another ridge than all together."""
    x, y, w = rows_of(30)
    noisy = torch.arange(30) % 2 == 0
    y[noisy] += 4 * oracles.numbers(15, 2, seed=8)
    problem = TrainingRows(x, y, w)
    shifts = torch.logspace(-4, 2, 13, dtype=torch.float64)
    chosen = []
    for rows in (noisy, ~noisy, noisy | ~noisy):
        views = [FoldView(x, rows)]
        errors = [naive_error(LAPLACE, problem, views, shift)[0] for shift in shifts.tolist()]
        result = tune(problem, LAPLACE, views, [BANDWIDTH], shifts, False)
        assert result.shift == shifts[int(np.argmin(errors))]
        chosen.append(result.shift)
    assert len(set(chosen)) > 1  # or the example shows nothing


def test_relative_shifts_are_units_of_the_kernels_diagonal() -> None:
    kernel = make_kernel("quadratic")
    x, y, _ = rows_of(30)
    problem = TrainingRows(x, y, torch.ones(30, dtype=torch.float64))
    one = torch.tensor([0.01], dtype=torch.float64)
    for bandwidth in (BANDWIDTH, 5.0):
        result = tune(problem, kernel, all_rows(problem), [bandwidth], one)
        unit = float(((x @ x.T).diagonal() / bandwidth**2).square().mean())
        assert result.shift == pytest.approx(0.01 * unit, rel=1e-12)
        assert result.error == pytest.approx(
            naive_error(kernel, problem, all_rows(problem), result.shift, bandwidth)[0], rel=1e-9
        )
    assert tune(problem, kernel, all_rows(problem), [BANDWIDTH], one, relative=False).shift == 0.01


def test_relative_shifts_of_rows_that_are_all_zero() -> None:
    """The kernel is 0 on its diagonal: nothing is a unit, and shifts stay positive."""
    _, y, _ = rows_of(10)
    problem = TrainingRows(torch.zeros(10, 3, dtype=torch.float64), y, torch.ones(10, dtype=torch.float64))
    result = tune(problem, make_kernel("quadratic"), all_rows(problem), [1.0], SHIFTS)
    assert result.shift > 0
    others = (10 * problem.mean - y) / 9
    torch.testing.assert_close(result.residuals, y - others, rtol=1e-9, atol=1e-9)


def naive_grid(problem: TrainingRows, views: Sequence[FoldView], bandwidths: Sequence[float]) -> Tensor:
    """Errors of all bandwidths and shifts, by fits without the rows."""
    grid = [
        [naive_error(LAPLACE, problem, views, shift, bandwidth)[0] for shift in SHIFTS.tolist()]
        for bandwidth in bandwidths
    ]
    return torch.tensor(grid, dtype=torch.float64)


@pytest.mark.parametrize("left_out", ["single rows", "folds"])
@pytest.mark.parametrize("several", [True, False])
@pytest.mark.parametrize("place", [0, 1, 3])
@pytest.mark.parametrize("first", [0, 1, 2])
def test_downhill_from_anywhere_leads_to_the_least_error(left_out: str, several: bool, place: int, first: int) -> None:
    problem = TrainingRows(*rows_of(30), VIEWED[left_out])
    views = seen_by_three(problem) if several else all_rows(problem)
    errors = naive_grid(problem, views, BANDWIDTHS)
    starts = [
        GridPoint(Hyperparameters(bandwidth, 1.0, 1.0 - (number == first)), place)
        for number, bandwidth in enumerate(BANDWIDTHS)
    ]
    result = search_downhill(problem, LAPLACE, views, BANDWIDTHS, SHIFTS, starts)
    visited = [number for number, point in enumerate(result) if math.isfinite(point.choice.error)]
    assert first in visited
    assert len(visited) > 1
    for number in visited:
        assert result[number].place == int(errors[number].argmin())
        assert result[number].choice.error == pytest.approx(float(errors[number].min()), rel=1e-9)
        assert result[number].choice.bandwidth == BANDWIDTHS[number]
    best = min(result, key=lambda point: point.choice.error)
    assert best.choice.error == pytest.approx(float(errors.min()), rel=1e-9)
    exhaustive = search_grid(problem, LAPLACE, views, BANDWIDTHS, SHIFTS)
    for number in visited:
        torch.testing.assert_close(
            result[number].choice.residuals, exhaustive[number].choice.residuals, rtol=1e-8, atol=1e-8
        )


def test_downhill_avoids_ridges_with_a_singular_kernel() -> None:
    """Rows that are equal, with ridges below rounding: larger ridges are found, without a warning."""
    x, y, _ = rows_of(10)
    problem = TrainingRows(torch.cat([x, x]), torch.cat([y, y]), torch.ones(20, dtype=torch.float64))
    shifts = torch.tensor([-1e-3, 1e-2, 1.0], dtype=torch.float64)
    (point,) = search_downhill(
        problem, LAPLACE, all_rows(problem), [BANDWIDTH], shifts, [GridPoint(Hyperparameters(BANDWIDTH, 1.0), 1)]
    )
    assert point.place == 1
    (point,) = search_downhill(
        problem, LAPLACE, all_rows(problem), [BANDWIDTH], shifts[:1], [GridPoint(Hyperparameters(BANDWIDTH, 1.0), 0)]
    )
    assert point.choice.error == math.inf


# -- held-out rows -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("intercept", [True, False])
@pytest.mark.parametrize("fast", WAYS)
def test_held_out_rows_judge_by_their_own_weights(intercept: bool, fast) -> None:
    x, y, w = rows_of(30)
    test_rows, wanted, their_weights = rows_of(12, seed=1)
    root = oracles.numbers(3, 3, seed=4)
    problem = TrainingRows(x, y, w, held_out=HeldOut(test_rows, wanted, their_weights), intercept=intercept)
    views = [FoldView(x @ root, torch.ones(30, dtype=torch.bool), test_rows @ root)]
    errors = {}
    for shift in (1e-3, 1e-1, 10.0):
        residuals = wanted - naive_fit(LAPLACE, x @ root, y, w, shift, intercept, test_rows @ root, BANDWIDTH)
        errors[shift] = float((their_weights * residuals.square().sum(1)).sum() / their_weights.sum())
        result = fast(LAPLACE, problem, views, shift)
        torch.testing.assert_close(result.residuals, residuals, rtol=1e-8, atol=1e-8)
        assert result.error == pytest.approx(errors[shift], rel=1e-9)
        assert result.judged is None
    best = min(errors, key=errors.__getitem__)
    shifts = torch.tensor(list(errors), dtype=torch.float64)
    assert tune(problem, LAPLACE, views, [BANDWIDTH], shifts, relative=False).shift == best


# -- walking -----------------------------------------------------------------------------------------------------------


STEP = 10**0.5
WALKS = {
    "single rows": (None, False),
    "single rows, several metrics": (None, True),
    "folds": (VIEWED["folds"], False),
    "folds, several metrics": (VIEWED["folds"], True),
}


@pytest.mark.parametrize("case", [*WALKS, "held out"])
def test_walks_go_downhill_and_stay_in_the_valley(case: str) -> None:
    x, _, w = rows_of(30)
    y = 3 + x[:, :2] + oracles.numbers(30, 2, seed=7)  # noise, so that neither no ridge nor a large one is best
    problem = TrainingRows(x, y, w)
    if case == "held out":
        test_rows, _, their_weights = rows_of(20, seed=1)
        wanted = 3 + test_rows[:, :2] + oracles.numbers(20, 2, seed=17)
        problem = replace(problem, held_out=HeldOut(test_rows, wanted, their_weights))
        views = [FoldView(x, torch.ones(30, dtype=torch.bool), test_rows)]

        def error(shift: float) -> float:
            missed = (wanted - naive_fit(LAPLACE, x, y, w, shift, True, test_rows, BANDWIDTH)).square().sum(1)
            return float(their_weights @ missed / their_weights.sum())
    else:
        folds, several = WALKS[case]
        problem = replace(problem, folds=folds)
        views = seen_by_three(problem) if several else all_rows(problem)

        def error(shift: float) -> float:
            return naive_error(LAPLACE, problem, views, shift)[0]

    errors = [error(0.1 * STEP**k) for k in range(-6, 7)]
    best = int(np.argmin(errors))
    assert 1 < best < 11  # or there is no valley
    assert errors == sorted(errors[:best], reverse=True) + sorted(errors[best:])  # one valley
    for start in range(13):
        result = line_search(problem, LAPLACE, views, Hyperparameters(BANDWIDTH, 0.1 * STEP ** (start - 6)), STEP, 20)
        assert result.shift == pytest.approx(0.1 * STEP ** (best - 6), rel=1e-12)
        assert result.error == pytest.approx(errors[best], rel=1e-9)
        assert result.bandwidth == BANDWIDTH
    for start in (0, best, 12):
        for tries in (1, 2, 3, 4):
            result = line_search(
                problem, LAPLACE, views, Hyperparameters(BANDWIDTH, 0.1 * STEP ** (start - 6)), STEP, tries
            )
            moved = round(math.log(result.shift / 0.1, STEP)) + 6 - start
            assert result.error == pytest.approx(errors[start + moved], rel=1e-9)
            # A try may be lost on the wrong side, and only one; the start is a try.
            least = 0 if start == best else max(0, min(abs(best - start), tries - 2))
            assert least <= abs(moved) <= min(abs(best - start), tries - 1)
            assert moved * (best - start) >= 0


@pytest.mark.parametrize("tries", [1, 2, 4])
@pytest.mark.parametrize("several", [True, False])
def test_walks_factor_no_more_than_they_may(tries: int, several: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    factor, tried = KernelSolver.factor, []

    def counted(self: KernelSolver, shift: Tensor, *options: bool) -> None:
        tried.append(shift)
        factor(self, shift, *options)

    monkeypatch.setattr(KernelSolver, "factor", counted)
    problem = TrainingRows(*rows_of(30))
    views = seen_by_three(problem) if several else all_rows(problem)
    for start in (1e-5, 0.3, 1e4):
        tried.clear()
        line_search(problem, LAPLACE, views, Hyperparameters(BANDWIDTH, start), STEP, tries)
        assert len(tried) <= tries * len(views)
        torch.testing.assert_close(tried[0].sort().values, (start / problem.weights).sort().values)


def test_a_start_that_is_told_keeps_no_error_of_its_own() -> None:
    """What few rows said of it is not what all rows say."""
    problem = TrainingRows(*rows_of(30))
    start = Hyperparameters(BANDWIDTH, 0.1, -1.0, torch.zeros(3, 2), torch.ones(3, dtype=torch.bool))
    result = line_search(problem, LAPLACE, all_rows(problem), start, STEP, 1)
    assert result.error == pytest.approx(naive_error(LAPLACE, problem, all_rows(problem), 0.1)[0], rel=1e-9)
    assert len(result.residuals) == len(result.judged) == 30


def test_scale_of_rows() -> None:
    x, _, _ = rows_of(40)
    pairs = torch.nn.functional.pdist(x)
    assert kernel_scale(LAPLACE, x) == pytest.approx(float(pairs.median()), rel=1e-9)
    assert kernel_scale(make_kernel("lpq", norm=1.0), x) == pytest.approx(
        float(torch.nn.functional.pdist(x, p=1.0).median()), rel=1e-9
    )
    assert kernel_scale(make_kernel("quadratic"), x) == pytest.approx(float(x.norm() / 40**0.5), rel=1e-12)
    assert kernel_scale(LAPLACE, torch.ones(5, 2)) == kernel_scale(make_kernel("exp"), torch.zeros(5, 2)) == 1.0


# -- merged rows -------------------------------------------------------------------------------------------------------


def repeated(n: int = 20, seed: int = 0) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Rows of which many are equal, with targets and weights of their own."""
    source = np.random.default_rng(seed)
    x = source.normal(size=(n, 3))[source.integers(n, size=4 * n)]
    return x, x[:, :2] + source.normal(size=(4 * n, 2)), source.uniform(0.2, 3.0, 4 * n)


def as_problem(merged, intercept: bool = True) -> TrainingRows:
    x, y, w, folds, spread = (None if array is None else torch.from_numpy(array) for array in merged)
    return TrainingRows(x, y, w, folds, intercept=intercept, spread=spread)


def left_out(problem: TrainingRows, shift: float) -> Tensor:
    residuals = by_cholesky(LAPLACE, problem, all_rows(problem), shift).residuals
    assert residuals is not None
    return residuals


@pytest.mark.parametrize("intercept", [True, False])
def test_merged_rows_have_the_same_minimizer(intercept: bool) -> None:
    x, y, w = repeated()
    merged = merge_rows(x, y, w)
    assert len(merged[0]) == len(np.unique(x, axis=0)) == 20
    problem = as_problem(merged, intercept)
    test_rows = torch.from_numpy(np.random.default_rng(9).normal(size=(7, 3)))
    assert problem.total == pytest.approx(w.sum(), rel=1e-14)
    alone = naive_fit(LAPLACE, problem.x, problem.targets, problem.weights, 0.3, intercept, test_rows, BANDWIDTH)
    whole = naive_fit(LAPLACE, *map(torch.from_numpy, (x, y, w)), 0.3, intercept, test_rows, BANDWIDTH)
    torch.testing.assert_close(alone, whole, rtol=1e-8, atol=1e-8)


def test_error_of_merged_rows_is_that_of_the_rows_one_by_one() -> None:
    x, y, w = repeated()
    problem = as_problem(merge_rows(x, y, w))
    residuals = left_out(problem, 0.3)
    predicted = problem.targets - residuals
    place = {tuple(row): i for i, row in enumerate(problem.x.tolist())}
    one_by_one = sum(
        weight * float((torch.from_numpy(target) - predicted[place[tuple(row)]]).square().sum())
        for row, target, weight in zip(x.tolist(), y, w, strict=True)
    )
    assert problem.error(residuals) == pytest.approx(one_by_one / w.sum(), rel=1e-12)
    assert problem.error(residuals) > 1.5 * TrainingRows(problem.x, problem.targets, problem.weights).error(residuals)


def test_equal_rows_of_one_fold_merge_and_those_of_two_stay_apart() -> None:
    x, y, w = repeated()
    folds = np.random.default_rng(3).integers(4, size=len(x))
    merged = merge_rows(x, y, w, folds)
    assert merged[3] is not None
    assert len(merged[0]) == len(np.unique(np.column_stack([x, folds]), axis=0)) > len(np.unique(x, axis=0))
    # Leaving a fold of merged rows out is leaving out its original rows: same predictions, so the same error.
    shift, total = 0.3, 0.0
    for fold in range(4):
        out = folds == fold
        train = (torch.from_numpy(a[~out]) for a in (x, y, w))
        predicted = naive_fit(LAPLACE, *train, shift, True, torch.from_numpy(x[out]), BANDWIDTH)
        total += float((torch.from_numpy(w[out]) * (torch.from_numpy(y[out]) - predicted).square().sum(1)).sum())
    problem = as_problem(merged)
    assert problem.error(left_out(problem, shift)) == pytest.approx(total / w.sum(), rel=1e-8)


def test_without_equal_rows_merging_is_an_order() -> None:
    x, y, w = (a.numpy() for a in rows_of(30))
    rows, targets, weights, _, spread = merge_rows(x, y, w)
    order = [x.tolist().index(row) for row in rows.tolist()]
    assert sorted(order) == list(range(30))
    assert (weights == w[order]).all()
    assert targets == pytest.approx(y[order], rel=1e-15)  # w y / w may be the next number
    assert spread == pytest.approx(0, abs=1e-29)


def test_rows_of_a_problem_keep_what_belongs_to_them() -> None:
    problem = as_problem(merge_rows(*repeated(), folds=np.arange(80) % 3))
    rows = torch.tensor([4, 0, 7])
    part = problem.subset(rows)
    for name in ("x", "targets", "weights", "folds", "spread"):
        assert torch.equal(getattr(part, name), getattr(problem, name)[rows])
    assert part.intercept == problem.intercept


# -- order of rows -----------------------------------------------------------------------------------------------------


def test_order_depends_on_values_alone() -> None:
    rows = np.random.default_rng(0).normal(size=(300, 4))
    rows = np.concatenate([rows, rows[:50]])
    order, groups = distinct_rows(rows)
    for seed in range(3):
        shuffled = rows[np.random.default_rng(seed).permutation(350)]
        other, other_groups = distinct_rows(shuffled)
        assert (shuffled[other] == rows[order]).all()
        assert (other_groups == groups).all()


@pytest.mark.parametrize("columns", [1, 3])
def test_equal_rows_are_neighbors_among_many(columns: int) -> None:
    rows = np.random.default_rng(0).integers(60, size=(50_000, columns)).astype(float)
    order, groups = distinct_rows(rows)
    assert sorted(order) == list(range(50_000))
    ordered = rows[order]
    changes = (ordered[1:] != ordered[:-1]).any(axis=1)
    assert (np.diff(groups) == changes).all()
    assert groups[0] == 0
    assert groups[-1] + 1 == len(np.unique(rows, axis=0))


def test_both_zeros_are_one() -> None:
    rows = np.array([[0.0, 1.0], [2.0, 2.0], [-0.0, 1.0], [0.0, -1.0]])
    _, groups = distinct_rows(rows)
    assert groups.max() + 1 == 3


def test_the_first_rows_are_as_good_as_drawn_at_random() -> None:
    """Over 200 tables, the mean place of a sorted table's first tenth is that of random rows: no trend is left."""
    source = np.random.default_rng(0)
    shares = []
    for _ in range(200):
        table = source.normal(size=(200, 3))
        table = table[table[:, 0].argsort()]
        order, _ = distinct_rows(table)
        shares.append(order[:20].mean() / 199)
    # A mean of 20 uniform places has a deviation of 0.289 / sqrt(20) = 0.065, that of 200 such means 0.0046.
    assert np.mean(shares) == pytest.approx(0.5, abs=0.02)
    assert np.std(shares) == pytest.approx(0.062, abs=0.015)


def test_transposed_and_read_only_tables() -> None:
    rows = np.random.default_rng(0).normal(size=(4, 50)).T  # not contiguous
    rows.flags.writeable = False
    assert (distinct_rows(rows)[0] == distinct_rows(np.ascontiguousarray(rows))[0]).all()


# -- single precision --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("left_out", ["single rows", "folds"])
@pytest.mark.parametrize("start", [1e-3, 0.1, 10.0])
def test_float32_finds_the_ridge_of_float64(left_out: str, start: float) -> None:
    x, y, w = rows_of(30)
    problem = TrainingRows(x, y + oracles.numbers(30, 2, seed=7), w, VIEWED[left_out])
    search = problem, LAPLACE, seen_by_three(problem), Hyperparameters(BANDWIDTH, start), STEP, 4
    result, expected = line_search_single(*search), line_search(*search)
    assert result is not None
    assert result.shift == pytest.approx(expected.shift, rel=1e-12)
    error, _ = naive_error(LAPLACE, problem, search[2], result.shift)
    assert result.error == pytest.approx(error, rel=1e-5)
    assert result.residuals.dtype == torch.float64
    torch.testing.assert_close(result.residuals, expected.residuals, rtol=1e-4, atol=1e-4)


def test_float32_gives_up_where_its_rounding_errors_matter() -> None:
    """A smooth kernel with a tiny ridge: the last pivots are rounding errors in float32."""
    problem, kernel = TrainingRows(*rows_of(200)), make_kernel("gaussian")
    search = problem, kernel, all_rows(problem), Hyperparameters(4.0, 1e-7), STEP, 3
    assert line_search_single(*search) is None
    assert math.isfinite(line_search(*search).error)


@pytest.mark.parametrize("accurate", [True, False])
def test_many_rows_are_validated_in_float32_if_it_is_accurate(accurate: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_hyperparameters, "TUNING_ROWS", 25)
    monkeypatch.setattr(_hyperparameters, "SINGLE_ROWS", 30)
    x, y, w = rows_of(60)
    settings = Settings(LAPLACE, bandwidth=3.0, ridge=1e-3, n_iter=2)
    result = learn(TrainingRows(x, y, w), settings).history
    monkeypatch.setattr(_hyperparameters, "SINGLE_ROWS", 2000)
    expected = learn(TrainingRows(x, y, w), settings).history
    assert [line.error for line in result] == pytest.approx([line.error for line in expected], rel=1e-4)
    assert [line.error for line in result] != [line.error for line in expected]
    if not accurate:
        monkeypatch.setattr(_hyperparameters, "SINGLE_ROWS", 30)
        monkeypatch.setattr(_hyperparameter_search, "PIVOT_ERROR", 1e-12)
        again = learn(TrainingRows(x, y, w), settings).history
        assert [line.error for line in again] == [line.error for line in expected]
