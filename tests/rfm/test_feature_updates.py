"""AGOP, FACT and the updates of M against gradients by autograd and against their definitions."""

from __future__ import annotations

import pytest
import rfm_oracles as oracles
import torch
from torch import Tensor

from featlearn import InputError
from featlearn.rfm import feature_updates as updates
from featlearn.rfm import iteration
from featlearn.rfm._dense_solver import KernelSolver
from featlearn.rfm.feature_updates import agop, decompose_update, fact, next_metric, root_of
from featlearn.rfm.iteration import Settings, fit_rows
from featlearn.rfm.kernels import Kernel, make_kernel
from featlearn.rfm.training_rows import TrainingRows

BANDWIDTH = 2.5
D = 5


def metric_of(form: str, d: int = D) -> Tensor:
    """A metric: full, of low rank, or the diagonal of one."""
    if form == "diagonal":
        return oracles.positive(d, seed=11)
    factor = oracles.numbers(d, 2 if form == "low rank" else d, seed=12) / d**0.5
    return factor @ factor.T


def machine(kernel: Kernel, n: int, c: int, form: str, d: int = D) -> dict[str, Tensor]:
    """Rows, weights and the fitted machine of one case, and its slopes from a Gram matrix."""
    x = oracles.numbers(n, d, seed=n)
    x[n // 2] = x[1]  # a duplicate
    x = x - x.mean(0)
    root = root_of(metric_of(form, d))
    u = x @ oracles.as_matrix(root)
    weights = oracles.positive(n, seed=n + 1)
    targets = (u[:, :1] * u[:, 1:2]).tanh() + 0.3 * oracles.numbers(n, c, seed=n + 2)
    solver = KernelSolver(kernel, u, BANDWIDTH)
    solver.factor(1e-2 * weights.sum() / weights)
    alpha = solver.solve(targets)
    return {"x": x, "u": u, "root": root, "alpha": alpha, "weights": weights, "slopes": solver.slopes()}


def check(kernel: Kernel, given: dict[str, Tensor]) -> None:
    grads = oracles.gradients(kernel, given["x"], given["root"], given["alpha"], BANDWIDTH)
    expected_agop = oracles.agop_by_definition(grads, given["weights"])
    expected_fact = oracles.fact_by_definition(grads, given["x"], given["alpha"])
    if given["root"].ndim == 1:
        expected_agop, expected_fact = expected_agop.diagonal(), expected_fact.diagonal()
    slopes, u, root, alpha = (given[part] for part in ("slopes", "u", "root", "alpha"))
    assert oracles.relative_error(agop(kernel, slopes, u, root, alpha, given["weights"]), expected_agop) < 1e-10
    assert oracles.relative_error(fact(kernel, slopes, given["x"], u, root, alpha), expected_fact) < 1e-10


@pytest.mark.parametrize("n", [15, 70], ids=["shared products", "gradients"])  # d c is 20 for four outputs
@pytest.mark.parametrize("c", [1, 4])
@pytest.mark.parametrize("form", ["full", "diagonal", "low rank"])
@pytest.mark.parametrize("name", oracles.KERNELS)
def test_agop_and_fact_are_those_of_autograd(name: str, form: str, c: int, n: int) -> None:
    check(oracles.KERNELS[name], machine(oracles.KERNELS[name], n, c, form))


@pytest.mark.parametrize("name", ["laplace", "lpq 1.5 1.2", "polynomial 3"])
def test_agop_and_fact_over_strips_and_groups(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(updates, "_STACK", 600 * D * 3)  # four outputs in groups of three and one
    monkeypatch.setattr(updates, "row_blocks", lambda n, width: [slice(0, 250), slice(250, 251), slice(251, n)])
    check(oracles.KERNELS[name], machine(oracles.KERNELS[name], 600, 4, "full"))


@pytest.mark.parametrize("name", oracles.EUCLIDEAN)
def test_both_forms_of_agop_agree_at_any_size(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    kernel = oracles.KERNELS[name]
    given = machine(kernel, 40, 9, "full")
    assert D * 9 > 40
    arguments = (kernel, given["slopes"], given["u"], given["root"], given["alpha"], given["weights"])
    shared = agop(*arguments)
    by_outputs = sum(agop(*arguments[:4], column[:, None], arguments[5]) for column in given["alpha"].mT)
    assert oracles.relative_error(shared, by_outputs) < 1e-12


@pytest.mark.parametrize("name", oracles.EUCLIDEAN)
def test_fact_times_the_metric_is_symmetric(name: str) -> None:
    kernel = oracles.KERNELS[name]
    given = machine(kernel, 60, 2, "full")
    result = fact(kernel, given["slopes"], given["x"], given["u"], given["root"], given["alpha"])
    product = result @ metric_of("full").T
    assert oracles.relative_error(product, product.T) < 1e-12
    assert oracles.relative_error(result, result.T) > 1e-2


def update_metric(update: str, metric: Tensor, matrix: Tensor, power: float = 0.5) -> Tensor:
    return next_metric(update, metric, power, matrix)


@pytest.mark.parametrize("update", ["nfa", "fact", "fact-geometric"])
def test_only_the_matrix_of_the_update_is_computed(update: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def other(*arguments) -> Tensor:
        raise AssertionError("not asked for")

    x = oracles.numbers(20, D, seed=0)
    problem = TrainingRows(x, x[:, :1] * x[:, 1:2], torch.ones(20, dtype=torch.float64))
    metric = metric_of("full")
    fit, slopes = fit_rows(problem, make_kernel("laplace"), metric, 3.0, 0.1)
    monkeypatch.setattr(iteration, "fact" if update == "nfa" else "agop", other)
    assert iteration.update_metric(problem, Settings(make_kernel("laplace"), update), metric, fit, slopes) is not None


@pytest.mark.parametrize("power", [0.25, 0.5, 1.0])
def test_nfa_is_a_power_of_agop(power: float) -> None:
    matrix = metric_of("full")
    assert oracles.relative_error(update_metric("nfa", matrix, matrix, power), oracles.power(matrix, power)) < 1e-12
    diagonal = metric_of("diagonal")
    assert torch.equal(update_metric("nfa", diagonal, diagonal, power), diagonal**power)


def test_nfa_does_not_raise_rounding_to_a_root() -> None:
    matrix = metric_of("low rank")
    result = update_metric("nfa", matrix, matrix, 0.5)
    assert torch.linalg.eigvalsh(result)[:3].abs().max() < 1e-12  # and not the root of the rounding, 1e-8


def test_fact_and_geometric_are_their_definitions() -> None:
    metric, matrix = metric_of("full"), oracles.numbers(D, D, seed=13)
    assert oracles.relative_error(update_metric("fact", metric, matrix), oracles.power(matrix @ matrix.T, 0.5)) < 1e-10
    product = matrix @ metric
    geometric = update_metric("fact-geometric", metric, matrix)
    assert oracles.relative_error(geometric, oracles.power(product @ product.T, 0.25)) < 1e-10
    for update in ("nfa", "fact", "fact-geometric"):
        result = update_metric(update, metric, metric if update == "nfa" else matrix)
        assert torch.equal(result, result.T)
    line, start = oracles.numbers(D, seed=14), metric_of("diagonal")
    assert torch.equal(update_metric("fact", start, line), line.abs())
    whole = update_metric("fact-geometric", torch.diag(start), torch.diag(line))
    assert oracles.relative_error(torch.diag(update_metric("fact-geometric", start, line)), whole) < 1e-12


@pytest.mark.parametrize("name", oracles.SMOOTH)
def test_geometric_of_an_inner_product_is_a_root(name: str) -> None:
    kernel = oracles.KERNELS[name]
    given = machine(kernel, 60, 2, "full")
    metric = metric_of("full")
    result = fact(kernel, given["slopes"], given["x"], given["u"], given["root"], given["alpha"])
    product = result @ metric  # symmetric, and positive semi-definite as the slopes are a kernel
    assert torch.linalg.eigvalsh((product + product.T) / 2)[0] > -1e-12 * product.norm()
    assert oracles.relative_error(update_metric("fact-geometric", metric, result), oracles.power(product, 0.5)) < 1e-7


@pytest.mark.parametrize("form", ["full", "diagonal", "low rank"])
def test_both_updates_keep_a_fixed_point(form: str) -> None:
    metric = metric_of(form)
    for update in ("fact", "fact-geometric"):
        assert oracles.relative_error(update_metric(update, metric, metric), metric) < 1e-7
    squares = metric**2 if form == "diagonal" else metric @ metric
    assert oracles.relative_error(update_metric("nfa", metric, squares), metric) < 1e-7


def test_an_unknown_update_is_refused() -> None:
    with pytest.raises(InputError, match=r"must be one of 'fact', .*'agop'"):
        update_metric("agop", metric_of("full"), metric_of("full"))


def test_root_is_squared_to_the_metric() -> None:
    for form in ("full", "low rank"):
        root = root_of(metric_of(form))
        assert oracles.relative_error(root @ root, metric_of(form)) < 1e-12
    assert torch.allclose(root_of(metric_of("diagonal")) ** 2, metric_of("diagonal"))


@pytest.mark.parametrize("name", oracles.RADIAL)
def test_an_offset_of_the_features_changes_nothing(name: str) -> None:
    kernel = oracles.KERNELS[name]
    result = []
    raw = oracles.numbers(60, D, seed=20)
    targets = raw[:, :2].sin()
    root = root_of(metric_of("full"))
    for offset in (0.0, 1000.0):
        x = raw + offset
        x = x - x.mean(0)
        u = x @ root
        solver = KernelSolver(kernel, u, BANDWIDTH)
        solver.factor(torch.full((60,), 0.5, dtype=torch.float64))
        alpha = solver.solve(targets)
        slopes = solver.slopes()
        result.append((agop(kernel, slopes, u, root, alpha, torch.ones(60)), fact(kernel, slopes, x, u, root, alpha)))
    for here, test_rows in zip(*result, strict=True):
        assert oracles.relative_error(test_rows, here) < 1e-8


@pytest.mark.parametrize("name", oracles.RADIAL)
def test_rows_apart_only_where_the_metric_is_blind_have_no_slope(name: str) -> None:
    kernel = oracles.KERNELS[name]
    basis = torch.linalg.qr(oracles.numbers(D, D, seed=15))[0]
    root = basis[:, :3] @ basis[:, :3].T
    x = oracles.numbers(30, D, seed=16)
    x[5] = x[2] + 3.0 * basis[:, 4]
    x = x - x.mean(0)
    u, weights = x @ root, torch.ones(30, dtype=torch.float64)
    assert 0 < (u[5] - u[2]).abs().max() < 1e-14
    solver = KernelSolver(kernel, u, BANDWIDTH)
    solver.factor(0.1 * weights)
    alpha = solver.solve(oracles.numbers(30, 1, seed=17))
    slopes = solver.slopes()
    check(kernel, {"x": x, "u": u, "root": root, "alpha": alpha, "weights": weights, "slopes": slopes})


@pytest.mark.parametrize("update", ["fact", "fact-geometric", "nfa"])
@pytest.mark.parametrize("form", ["full", "diagonal"])
@pytest.mark.parametrize("scale", [1.0, 3.7])
def test_root_and_eigenvalues_come_with_the_next_metric(update: str, form: str, scale: float) -> None:
    metric, matrix = metric_of(form), metric_of(form)
    if form == "full":
        matrix = matrix if update == "nfa" else oracles.numbers(*matrix.shape, seed=3)
    result = decompose_update(update, metric, 0.7, matrix).scaled(scale)
    expected = scale * next_metric(update, metric, 0.7, matrix)
    assert oracles.relative_error(result.matrix, expected) < 1e-14
    whole = oracles.as_matrix(expected)
    assert oracles.relative_error(oracles.as_matrix(result.root), oracles.power(whole, 0.5)) < 1e-7
    assert oracles.relative_error(oracles.as_matrix(result.root) @ oracles.as_matrix(result.root), whole) < 1e-12
    values = torch.linalg.eigvalsh(whole)
    torch.testing.assert_close(result.eigenvalues.sort().values, values.clamp_min(0), rtol=1e-9, atol=1e-12)
    assert result.trace == pytest.approx(float(whole.trace()), rel=1e-12)
