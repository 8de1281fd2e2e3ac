"""Eigenpairs against a whole decomposition; estimates against the truth over many seeds."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from scipy.sparse.linalg import LinearOperator, aslinearoperator
from torch import Tensor

from featlearn.errors import InputError
from featlearn.linalg._krylov import Estimate, frobenius_norm, hutchpp_trace, top_eigenpairs

N = 200
Array = NDArray[np.float64]


def rotated(values: Array, seed: int = 0) -> Array:
    """A symmetric matrix with given eigenvalues and random eigenvectors."""
    n = len(values)
    q = np.linalg.qr(np.random.default_rng(seed).standard_normal((n, n)))[0]
    matrix = (q * values) @ q.T
    return (matrix + matrix.T) / 2


def with_leading(*leading: float) -> Array:
    """A spectrum from 0 to 1 with some eigenvalues in the place of the smallest."""
    values = np.linspace(0, 1, N)
    values[: len(leading)] = leading
    return values


SPECTRA = {
    "separated": with_leading(5, 4, 3, 2),
    "bulk alone": with_leading(),
    "decaying": np.exp(-0.2 * np.arange(N)),
    "close": with_leading(*(2 + 1e-9 * np.arange(5))),
    "repeated": with_leading(*[3.0] * 20),
    "repeated and small": np.exp(-0.5 * np.maximum(np.arange(N) - 12, 0) - 4.0 * (np.arange(N) > 5)),
    "negative": -np.linspace(1, 2, N),
    "nothing above zero": -np.linspace(0, 1, N),
    "the largest size is negative": with_leading(-9, -8, 3, 2),
    "low rank": np.concatenate([[3.0, 2.0, -1.0], np.zeros(N - 3)]),
    "identity": np.ones(N),
    "zero": np.zeros(N),
}


@pytest.mark.parametrize("k", [1, 6, 22, N // 2, N])
@pytest.mark.parametrize("name", list(SPECTRA))
def test_eigenpairs_of_every_spectrum(name: str, k: int) -> None:
    matrix = rotated(SPECTRA[name])
    result = top_eigenpairs(aslinearoperator(matrix), k, tolerance=1e-8)
    expected = np.sort(SPECTRA[name])[::-1][:k]
    scale = np.abs(SPECTRA[name]).max()
    assert np.abs(result.values.numpy() - expected).max() <= 1e-10 * scale
    assert result.vectors.shape == (N, k)
    assert torch.allclose(result.vectors.mT @ result.vectors, torch.eye(k, dtype=torch.float64), atol=1e-12)
    residual = matrix @ result.vectors.numpy() - result.vectors.numpy() * result.values.numpy()
    assert np.allclose(np.linalg.norm(residual, axis=0), result.residuals.numpy(), atol=1e-14 * max(scale, 1))
    assert result.residuals.max() <= 2e-8 * scale


@pytest.mark.parametrize("n", [1, 2, 3])
def test_tiny_operators(n: int) -> None:
    matrix = rotated(np.arange(n) - 1.0)
    for k in range(1, n + 1):
        result = top_eigenpairs(matrix, k)
        assert np.allclose(result.values, np.arange(n)[::-1][:k] - 1.0, atol=1e-12)
    operator = aslinearoperator(matrix)
    trace, norm = hutchpp_trace(operator, n), frobenius_norm(operator, n)
    assert trace == Estimate(pytest.approx(np.trace(matrix), abs=1e-12), 0.0, n)
    assert norm == Estimate(pytest.approx(np.linalg.norm(matrix)), 0.0, n)


def test_products_are_counted_and_seeds_repeat() -> None:
    matrix, calls = rotated(SPECTRA["separated"]), 0

    def product(v: Array) -> Array:
        nonlocal calls
        calls += 1 if v.ndim == 1 else v.shape[1]
        return matrix @ v

    def operator() -> LinearOperator:
        return LinearOperator((N, N), matvec=product, matmat=product, dtype=np.float64)

    functions: list[Callable[[], int]] = [
        lambda: top_eigenpairs(operator(), 4).matvecs,
        lambda: hutchpp_trace(operator(), 20).matvecs,
        lambda: frobenius_norm(operator(), 20).matvecs,
        lambda: frobenius_norm(operator(), N + 5).matvecs,
    ]
    for function in functions:
        before = calls
        assert function() == calls - before
    assert hutchpp_trace(matrix, 20).matvecs == 20
    first, second = (top_eigenpairs(matrix, 4, generator=3) for _ in range(2))
    assert torch.equal(first.vectors, second.vectors)
    assert hutchpp_trace(matrix, 20, 3) == hutchpp_trace(matrix, 20, 3) != hutchpp_trace(matrix, 20, 4)
    generator = torch.Generator().manual_seed(0)
    assert hutchpp_trace(matrix, 20, generator) != hutchpp_trace(matrix, 20, generator)


# --- estimates ------------------------------------------------------------------------------------

SEEDS = 600


def over_seeds(estimate: Callable[..., Estimate], matrix: Array, samples: int) -> tuple[Array, Array]:
    result = [estimate(matrix, samples, seed) for seed in range(SEEDS)]
    return np.array([e.value for e in result]), np.array([e.standard_error for e in result])


SLOW, INDEFINITE = rotated(1 / np.arange(1.0, 61)), rotated(np.linspace(-1, 2, 60))


@pytest.mark.parametrize("matrix", [SLOW, INDEFINITE], ids=["slow decay", "indefinite"])
@pytest.mark.parametrize("samples", [8, 24])
def test_estimates_have_no_bias_and_an_honest_error(matrix: Array, samples: int) -> None:
    # 4.9 standard errors of the mean: a false alarm in one of a million sets of seeds.
    values, errors = over_seeds(hutchpp_trace, matrix, samples)
    assert abs(values.mean() - np.trace(matrix)) <= 4.9 * values.std() / SEEDS**0.5
    assert np.sqrt((errors**2).mean()) == pytest.approx(values.std(), rel=0.3)
    values, errors = over_seeds(frobenius_norm, matrix, samples)
    assert abs((values**2).mean() - (matrix**2).sum()) <= 4.9 * (values**2).std() / SEEDS**0.5
    assert np.sqrt((errors**2).mean()) == pytest.approx(values.std(), rel=0.3)


def test_low_rank_is_exact() -> None:
    values = np.zeros(N)
    values[:4] = [4, 3, -2, 1]
    matrix = rotated(values)
    # A third of the products spans the range.
    for seed in range(5):
        trace, norm = hutchpp_trace(matrix, 12, seed), frobenius_norm(matrix, 12, seed)
        assert trace.value == pytest.approx(6.0, rel=1e-12)
        assert norm.value == pytest.approx(30**0.5, rel=1e-12)
        assert trace.standard_error < 1e-12
        assert norm.standard_error < 1e-12
    assert hutchpp_trace(np.zeros((9, 9)), 5) == Estimate(0.0, 0.0, 5)
    assert frobenius_norm(np.zeros((9, 9)), 5) == Estimate(0.0, 0.0, 5)


def root_mean_square(estimate: Callable[[int], float], truth: float) -> float:
    return float(np.sqrt(np.mean([(estimate(seed) - truth) ** 2 for seed in range(200)])))


def test_errors_fall_faster_than_those_of_random_vectors_alone() -> None:
    matrix = rotated(1 / np.arange(1.0, 301))
    trace, square = float(np.trace(matrix)), float((matrix**2).sum())

    def plain(samples: int, seed: int, power: int) -> float:
        signs = np.random.default_rng(seed).choice([-1.0, 1.0], (300, samples))
        moved = matrix @ signs
        return float(((signs if power == 1 else moved) * moved).sum() / samples)

    ratios = []
    for few, many in [(12, 96)]:
        for ours, theirs, truth in [
            (lambda m, s: hutchpp_trace(matrix, m, s).value, lambda m, s: plain(m, s, 1), trace),
            (lambda m, s: frobenius_norm(matrix, m, s).value ** 2, lambda m, s: plain(m, s, 2), square),
        ]:
            errors = [root_mean_square(lambda s, m=m, f=f: f(m, s), truth) for f in (ours, theirs) for m in (few, many)]
            ratios.append((errors[0] / errors[1], errors[2] / errors[3]))
            assert errors[1] < errors[3] / 2
    for ours_falls, theirs_falls in ratios:
        assert theirs_falls == pytest.approx(8**0.5, rel=0.25)
        assert ours_falls > 7  # eightfold samples: at least about eightfold


def test_bad_input() -> None:
    matrix = rotated(with_leading(2))
    for k in (0, N + 1, True, 1.5):
        with pytest.raises(InputError, match="k must be an integer from 1 to 200"):
            top_eigenpairs(matrix, k)
    with pytest.raises(InputError, match="tolerance must be a finite number above 0 and below 1"):
        top_eigenpairs(matrix, 1, tolerance=0)
    with pytest.raises(InputError, match=r"of 3 eigenvalues have converged to 1e-08"):
        top_eigenpairs(matrix, 3, max_iterations=1)
    with pytest.raises(InputError, match="must be symmetric"):
        top_eigenpairs(matrix + np.triu(np.ones((N, N)), 1), 3)
    with pytest.raises(InputError, match="must be symmetric"):
        frobenius_norm(matrix + np.triu(np.ones((N, N)), 1), 30)
    huge = LinearOperator((5000, 5000), matvec=lambda v: v, dtype=np.float64)
    with pytest.raises(InputError, match="k must be less than half of the size of the matrix, 5000"):
        top_eigenpairs(huge, 4000)
    nothing = LinearOperator((N, N), matvec=lambda v: v * np.nan, dtype=np.float64)
    for function in (top_eigenpairs, hutchpp_trace, frobenius_norm):
        with pytest.raises(InputError, match="NaN"):
            function(nothing, 6)
        with pytest.raises(InputError, match="square"):
            function(matrix[:5], 3)
        with pytest.raises(InputError, match="square"):
            function(matrix[0], 3)
        with pytest.raises(InputError, match="NaN"):
            function(Tensor(matrix) * float("nan"), 6)
    for samples in (3, 0, True, 6.0):
        with pytest.raises(InputError, match="samples must be an integer of at least 4"):
            hutchpp_trace(matrix, samples)
