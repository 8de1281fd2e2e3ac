"""Errors of rows left out, held-out errors and merged rows, against machines fitted again and again."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
import torch
from torch import Tensor

from featlearn.rfm.gram import Gram
from featlearn.rfm.kernels import Kernel, make_kernel
from featlearn.rfm.problem import HeldOut, Problem, distinct_rows, merge_rows
from featlearn.rfm.selection import kernel_scale, tune

LAPLACE = make_kernel("laplace")
BANDWIDTH = 2.0


def rows_of(n: int, d: int = 3, outputs: int = 2, seed: int = 0) -> tuple[Tensor, Tensor, Tensor]:
    """Rows, targets with a mean far from zero, and weights from 0.2 to 3."""
    source = torch.Generator().manual_seed(seed)
    x = torch.randn(n, d, generator=source, dtype=torch.float64)
    noise = torch.randn(n, outputs, generator=source, dtype=torch.float64)
    y = 3.0 + torch.stack([x[:, 0] * x[:, c % d] for c in range(outputs)], dim=1) + 0.3 * noise
    return x, y, 0.2 + 2.8 * torch.rand(n, generator=source, dtype=torch.float64)


def naive_kernel(kernel: Kernel, x: Tensor, z: Tensor, bandwidth: float = BANDWIDTH) -> Tensor:
    if kernel.name == "quadratic":
        return (x @ z.T / bandwidth**2) ** 2
    distances = (x[:, None] - z[None]).abs().pow(kernel.norm).sum(2).pow(1 / kernel.norm)
    return torch.exp(-((distances / bandwidth) ** kernel.exponent))


def naive_fit(kernel: Kernel, x: Tensor, y: Tensor, w: Tensor, shift: float, intercept: bool, z: Tensor) -> Tensor:
    """Predictions at z of weighted kernel ridge regression with the penalty ``shift``, by its definition."""
    mean = (w[:, None] * y).sum(0) / w.sum() if intercept else torch.zeros_like(y[0])
    alpha = torch.linalg.solve(naive_kernel(kernel, x, x) + shift * torch.diag(1 / w), y - mean)
    return naive_kernel(kernel, z, x) @ alpha + mean


def naive_left_out(kernel: Kernel, problem: Problem, shift: float) -> Tensor:
    """Residuals of one fit for each row or fold, which it has not seen; the penalty stays that of all rows."""
    n = len(problem)
    folds = torch.arange(n) if problem.folds is None else problem.folds
    residuals = torch.empty_like(problem.targets)
    for fold in folds.unique():
        out = folds == fold
        x, y, w = problem.x[~out], problem.targets[~out], problem.weights[~out]
        predicted = naive_fit(kernel, x, y, w, shift, problem.intercept, problem.x[out])
        residuals[out] = problem.targets[out] - predicted
    return residuals


def by_cholesky(kernel: Kernel, problem: Problem, shift: float) -> Tensor:
    gram = Gram(kernel, problem.x, BANDWIDTH)
    gram.factor(shift / problem.weights)
    return problem.residuals(gram.missed(gram.solve(problem.right_sides()), problem.folds))


def by_eigenvalues(kernel: Kernel, problem: Problem, shift: float) -> Tensor:
    shifts = torch.tensor([shift], dtype=torch.float64)
    residuals = tune(problem, kernel, problem.x, None, [BANDWIDTH], shifts, relative=False).residuals
    assert residuals is not None
    return residuals


LEFT_OUT = {
    "single rows": None,
    "folds": torch.tensor([0, 1, 2, 1, 0, 2] * 5),
    "folds of very different sizes": torch.tensor([0] * 20 + [1] + [2] * 9),
    "numbers of folds with a gap": torch.tensor([0, 3] * 15),
}


@pytest.mark.parametrize("fast", [by_cholesky, by_eigenvalues])
@pytest.mark.parametrize("intercept", [True, False])
@pytest.mark.parametrize("left_out", LEFT_OUT)
@pytest.mark.parametrize("weighted", [True, False])
def test_residuals_of_rows_left_out_are_those_of_fits_without_them(fast, intercept, left_out, weighted) -> None:
    x, y, w = rows_of(30)
    problem = Problem(x, y, w if weighted else torch.ones(30, dtype=torch.float64), LEFT_OUT[left_out],
                      intercept=intercept)  # fmt: skip
    for shift in (1e-3, 1.0):
        # condition numbers are up to 1e5 here: rounding is about 1e-11
        torch.testing.assert_close(
            fast(LAPLACE, problem, shift), naive_left_out(LAPLACE, problem, shift), rtol=1e-8, atol=1e-8
        )


@pytest.mark.parametrize("name", ["gaussian", "quadratic", "lpq"])
@pytest.mark.parametrize("fast", [by_cholesky, by_eigenvalues])
def test_other_kernels_leave_out_likewise(name: str, fast) -> None:
    kernel = make_kernel(name, norm=1.3, exponent=0.8) if name == "lpq" else make_kernel(name)
    problem = Problem(*rows_of(25))
    torch.testing.assert_close(fast(kernel, problem, 0.1), naive_left_out(kernel, problem, 0.1), rtol=1e-8, atol=1e-8)


@pytest.mark.parametrize("n", [511, 513, 1100])
def test_strips_of_the_gram_matrix_join_without_a_seam(n: int) -> None:
    """The factor is filled in strips of 512 rows; the definition's inverse knows of none."""
    x, y, w = rows_of(n, outputs=1)
    problem = Problem(x, y, w)
    inverse = torch.linalg.inv(naive_kernel(LAPLACE, x, x) + 0.1 * torch.diag(1 / w))
    missed = inverse @ problem.right_sides() / inverse.diagonal()[:, None]
    torch.testing.assert_close(by_cholesky(LAPLACE, problem, 0.1), problem.residuals(missed), rtol=1e-8, atol=1e-8)


@pytest.mark.parametrize("intercept", [True, False])
def test_held_out_rows_judge_by_their_own_weights(intercept: bool) -> None:
    x, y, w = rows_of(30)
    there, wanted, their_weights = rows_of(12, seed=1)
    problem = Problem(x, y, w, held_out=HeldOut(there, wanted, their_weights), intercept=intercept)
    shifts = torch.tensor([1e-3, 1e-1, 10.0], dtype=torch.float64)
    found = tune(problem, LAPLACE, x, there, [BANDWIDTH], shifts, relative=False)
    errors = {}
    for shift in shifts.tolist():
        missed = (wanted - naive_fit(LAPLACE, x, y, w, shift, intercept, there)).square().sum(1)
        errors[shift] = float((their_weights * missed).sum() / their_weights.sum())
    best = min(errors, key=errors.__getitem__)
    assert (found.shift, found.error) == (best, pytest.approx(errors[best], rel=1e-9))
    predicted = naive_kernel(LAPLACE, there, x) @ found.alpha + problem.mean
    torch.testing.assert_close(predicted, naive_fit(LAPLACE, x, y, w, best, intercept, there), rtol=1e-8, atol=1e-8)


@pytest.mark.parametrize("left_out", ["single rows", "folds"])
def test_tune_takes_the_least_of_all_errors(left_out: str) -> None:
    x, y, w = rows_of(30)
    problem = Problem(x, y, w, LEFT_OUT[left_out])
    bandwidths, shifts = [0.5, 2.0, 8.0], torch.tensor([1e-4, 1e-2, 1.0, 100.0], dtype=torch.float64)
    errors = {}
    for bandwidth, shift in itertools.product(bandwidths, shifts.tolist()):
        # A bandwidth is a scale of the rows.
        scaled = Problem(x * BANDWIDTH / bandwidth, y, w, LEFT_OUT[left_out])
        residuals = naive_left_out(LAPLACE, scaled, shift)
        errors[bandwidth, shift] = float((w[:, None] * residuals.square()).sum() / w.sum())
    best = min(errors, key=errors.__getitem__)
    found = tune(problem, LAPLACE, x, None, bandwidths, shifts)
    assert (found.bandwidth, found.shift) == best
    assert found.error == pytest.approx(errors[best], rel=1e-9)


def test_relative_shifts_are_units_of_the_kernels_diagonal() -> None:
    kernel = make_kernel("quadratic")
    x, y, w = rows_of(30)
    one = torch.tensor([0.01], dtype=torch.float64)
    found = tune(Problem(x, y, w), kernel, x, None, [BANDWIDTH], one)
    assert found.shift == pytest.approx(0.01 * float(naive_kernel(kernel, x, x).diagonal().mean()), rel=1e-12)
    assert tune(Problem(x, y, w), kernel, x, None, [BANDWIDTH], one, relative=False).shift == 0.01


def test_the_condition_number_is_that_of_the_weighted_system() -> None:
    x, y, _ = rows_of(30)
    found = tune(Problem(x, y, torch.ones(30, dtype=torch.float64)), LAPLACE, x, None, [BANDWIDTH],
                 torch.tensor([0.1], dtype=torch.float64))  # fmt: skip
    system = naive_kernel(LAPLACE, x, x) + 0.1 * torch.eye(30, dtype=torch.float64)
    assert found.condition == pytest.approx(float(torch.linalg.cond(system)), rel=1e-8)


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


def as_problem(merged, intercept: bool = True) -> Problem:
    x, y, w, spread = map(torch.from_numpy, (merged.x, merged.targets, merged.weights, merged.spread))
    folds = None if merged.folds is None else torch.from_numpy(merged.folds)
    return Problem(x, y, w, folds, intercept=intercept, spread=spread)


@pytest.mark.parametrize("intercept", [True, False])
def test_merged_rows_have_the_same_minimiser(intercept: bool) -> None:
    x, y, w = repeated()
    merged = merge_rows(x, y, w)
    assert len(merged.x) == len(np.unique(x, axis=0)) == 20
    problem = as_problem(merged, intercept)
    there = torch.from_numpy(np.random.default_rng(9).normal(size=(7, 3)))
    assert problem.total == pytest.approx(w.sum(), rel=1e-14)
    alone = naive_fit(LAPLACE, problem.x, problem.targets, problem.weights, 0.3, intercept, there)
    whole = naive_fit(LAPLACE, *map(torch.from_numpy, (x, y, w)), 0.3, intercept, there)
    torch.testing.assert_close(alone, whole, rtol=1e-8, atol=1e-8)


def test_error_of_merged_rows_is_that_of_the_rows_one_by_one() -> None:
    x, y, w = repeated()
    problem = as_problem(merge_rows(x, y, w))
    residuals = by_cholesky(LAPLACE, problem, 0.3)
    predicted = problem.targets - residuals
    place = {tuple(row): i for i, row in enumerate(problem.x.tolist())}
    one_by_one = sum(
        weight * float((torch.from_numpy(target) - predicted[place[tuple(row)]]).square().sum())
        for row, target, weight in zip(x.tolist(), y, w, strict=True)
    )
    assert problem.error(residuals) == pytest.approx(one_by_one / w.sum(), rel=1e-12)
    assert problem.error(residuals) > 1.5 * Problem(problem.x, problem.targets, problem.weights).error(residuals)


def test_equal_rows_of_one_fold_merge_and_those_of_two_stay_apart() -> None:
    x, y, w = repeated()
    folds = np.random.default_rng(3).integers(4, size=len(x))
    merged = merge_rows(x, y, w, folds)
    assert merged.folds is not None
    assert len(merged.x) == len(np.unique(np.column_stack([x, folds]), axis=0)) > len(np.unique(x, axis=0))
    # Leaving a fold of merged rows out is leaving out its original rows: same predictions, so the same error.
    shift, total = 0.3, 0.0
    for fold in range(4):
        out = folds == fold
        train = (torch.from_numpy(a[~out]) for a in (x, y, w))
        predicted = naive_fit(LAPLACE, *train, shift, True, torch.from_numpy(x[out]))
        total += float((torch.from_numpy(w[out]) * (torch.from_numpy(y[out]) - predicted).square().sum(1)).sum())
    problem = as_problem(merged)
    assert problem.error(by_cholesky(LAPLACE, problem, shift)) == pytest.approx(total / w.sum(), rel=1e-8)


def test_without_equal_rows_merging_is_an_order() -> None:
    x, y, w = (a.numpy() for a in rows_of(30))
    merged = merge_rows(x, y, w)
    order = [x.tolist().index(row) for row in merged.x.tolist()]
    assert sorted(order) == list(range(30))
    assert (merged.weights == w[order]).all()
    assert merged.targets == pytest.approx(y[order], rel=1e-15)  # w y / w may be the next number
    assert merged.spread == pytest.approx(0, abs=1e-29)


def test_rows_of_a_problem_keep_what_belongs_to_them() -> None:
    problem = as_problem(merge_rows(*repeated(), folds=np.arange(80) % 3))
    rows = torch.tensor([4, 0, 7])
    part = problem.part(rows)
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
def test_equal_rows_are_neighbours_among_many(columns: int) -> None:
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
