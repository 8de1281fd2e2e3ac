from __future__ import annotations

import itertools
import math
import warnings
from collections import Counter

import pytest
import torch

from featlearn.datasets import reversing_task
from featlearn.errors import InputError
from featlearn.theory import (
    alternating_trace,
    expected_trace,
    matrix_moments,
    numerator_terms,
    predict_quadratic,
    readout_moments,
)


def normal_moment(power: int) -> int:
    return 0 if power % 2 else math.prod(range(1, power, 2))


def enumerated(letters: list[torch.Tensor], k: int) -> float:
    """E tr[c_0 R c_1 R ...] / d by the sum over every index of every factor, with moments of single normals."""
    d, n = len(letters[0]), len(letters)
    total = 0.0
    for neurons in itertools.product(range(k), repeat=n):
        of_a = math.prod(normal_moment(2 * m) for m in Counter(neurons).values())
        # R_j has the indices p[2j] and p[2j + 1]; letter j lies between p[2j - 1] and p[2j].
        for p in itertools.product(range(d), repeat=2 * n):
            of_w = math.prod(map(normal_moment, Counter((neurons[i // 2], p[i]) for i in range(2 * n)).values()))
            if of_w:
                total += of_a * of_w * math.prod(float(c[p[2 * j - 1], p[2 * j]]) for j, c in enumerate(letters))
    return total / (d * k**n)


@pytest.mark.parametrize(
    ("n", "d", "k"), [(1, 3, 2), (2, 3, 1), (2, 3, 3), (3, 2, 1), (3, 2, 3), (4, 2, 1), (4, 2, 2), (4, 1, 5)]
)
@pytest.mark.parametrize("symmetric", [True, False])
def test_exact_traces_against_every_index(n: int, d: int, k: int, symmetric: bool) -> None:
    g = torch.Generator().manual_seed(10 * n + d)
    letters = [torch.randn(d, d, generator=g, dtype=torch.float64) for _ in range(n)]
    if symmetric:
        letters = [c + c.mT for c in letters]
        letters = [letters[i % 2] for i in range(n)]  # equal letters, as in A R B R A R B R
    assert expected_trace(letters, k) == pytest.approx(enumerated(letters, k), rel=1e-10, abs=1e-12)


@pytest.mark.parametrize(("d", "k"), [(1, 1), (5, 2), (7, 30), (30, 7)])
def test_exact_traces_of_identities_are_the_moments(d: int, k: int) -> None:
    traces = [expected_trace([torch.eye(d)] * p, k) for p in (1, 2, 3, 4)]
    assert traces == pytest.approx(readout_moments(d, k), rel=1e-12)


def test_free_probability_is_the_limit_of_exact_traces() -> None:
    """The difference falls like 1/d at constant d/k and constant spectra."""
    gaps = []
    for d in (50, 200):
        g = torch.Generator().manual_seed(0)
        a = torch.diag(torch.linspace(0.2, 2, d, dtype=torch.float64))
        q, _ = torch.linalg.qr(torch.randn(d, d, generator=g, dtype=torch.float64))
        b = q @ torch.diag(torch.linspace(1, 3, d, dtype=torch.float64)) @ q.mT
        limit = readout_moments(d, None, ratio=2.0)
        free = alternating_trace(matrix_moments([a, b, a, b]), lambda word, m=limit: m[len(word) - 1], 4)
        gaps.append(expected_trace([a, b, a, b], d // 2) / free - 1)
    assert 0 < gaps[1] < 0.1
    assert gaps[0] / gaps[1] == pytest.approx(4, rel=0.2)


def data(name: str, d: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Inputs and labels by spectrum: white with n = 4d, decaying with n = d, steep with n = d/2."""
    g = torch.Generator().manual_seed(0)
    n, power = {"white": (4 * d, 0.0), "decaying": (d, 1.0), "steep": (d // 2, 2.0)}[name]
    z = torch.randn(n, d, generator=g, dtype=torch.float64)
    noise = torch.randn(n, generator=g, dtype=torch.float64)
    y = {"white": z[:, 0] * z[:, 1], "decaying": z[:, 0] + 0.5 * z[:, 2] ** 2, "steep": noise}[name]
    return z / (1 + torch.arange(1, d + 1, dtype=torch.float64) ** power).sqrt(), y


def simulated(X: torch.Tensor, y: torch.Tensor, k: int, networks: int) -> torch.Tensor:
    """rho of networks f = a^T (W x)^2, from the gradient of each and the gradients of its outputs."""
    g = torch.Generator().manual_seed(k)
    d = X.shape[1]
    a = torch.randn(networks, 1, k, generator=g, dtype=torch.float64)
    w = torch.randn(networks, k, d, generator=g, dtype=torch.float64) / math.sqrt(k)
    slopes = 2 * a * (X @ w.mT)  # df/dh, (networks, n, k)
    change = slopes.mT @ (y[:, None] * X)  # minus the gradient of half the summed squares, for zero outputs
    nfm = change.mT @ change
    agop = change.mT @ (slopes.mT @ slopes) @ change
    return (nfm * agop).sum((1, 2)) / (nfm.square().sum((1, 2)) * agop.square().sum((1, 2))).sqrt()


@pytest.mark.parametrize("ratio", [0.25, 1, 2, 4, 8])
@pytest.mark.parametrize("name", ["white", "decaying", "steep"])
def test_rho_of_narrow_and_wide_networks(name: str, ratio: float) -> None:
    """Within two standard errors of 200 networks, at every d/k; the mean is taken over 800 to leave room for chance."""
    d = 24
    X, y = data(name, d)
    k = round(d / ratio)
    values = simulated(X, y, k, 800)
    result = predict_quadratic(X, y, k)
    error = float(values.std()) / math.sqrt(200)
    assert abs(result.rho - float(values.mean())) < 2 * error
    assert result.spread == pytest.approx(float(values.std()), rel=0.35)
    assert result.rho_error == pytest.approx(result.spread / math.sqrt(result.draws))
    assert result.rho_error < 0.002
    # The ratio of expectations, free or exact, is not the mean of the ratio.
    assert abs(result.free_rho - float(values.mean())) > 4 * error
    assert abs(result.ratio_of_means - float(values.mean())) > 4 * error


def test_data_that_few_directions_dominate() -> None:
    """Reversing data at d/k = 1/4: free probability is off by a fifth."""
    task = reversing_task(0.3, 64, 64, generator=0, dtype=torch.float64)
    X, y = task.X, task.y.flatten()
    values = simulated(X, y, 256, 200)
    result = predict_quadratic(X, y, 256, draws=500)
    error = math.hypot(float(values.std()) / math.sqrt(200), result.rho_error)
    assert abs(result.rho - float(values.mean())) < 3 * error
    assert abs(result.free_rho - result.rho) > 0.1


def test_few_points_and_scales() -> None:
    """Directions without data do not count, and rho is free of scale."""
    g = torch.Generator().manual_seed(0)
    X, y = torch.randn(5, 30, generator=g, dtype=torch.float64), torch.randn(5, generator=g, dtype=torch.float64)
    values = simulated(X, y, 10, 800)
    result = predict_quadratic(X, y, 10)
    assert result.rho == pytest.approx(float(values.mean()), abs=4 * float(values.std()) / math.sqrt(800))
    for scaled in (predict_quadratic(1e-60 * X, y, 10), predict_quadratic(1e60 * X, 1e60 * y, 10)):
        assert scaled.rho == pytest.approx(result.rho, abs=1e-9)
        assert scaled.free_rho == pytest.approx(result.free_rho, rel=1e-9)
    single = predict_quadratic(X[:, :1], y, 10)  # 1 x 1 matrices
    assert single.rho == pytest.approx(1)


def test_both_forms_of_the_traces_agree() -> None:
    """Matrices of size k are used for k < d, and of size d otherwise: rho changes little from one to the other."""
    X, y = data("white", 20)
    below, at = (predict_quadratic(X, y, k, draws=4000, tolerance=0) for k in (19, 20))
    assert below.draws == at.draws == 4000
    assert abs(below.rho - at.rho) < 4 * math.hypot(below.rho_error, at.rho_error)


def test_seeds_and_streams() -> None:
    X, y = data("white", 12)
    first, again, other = (predict_quadratic(X, y, 6, networks=3, seed=s) for s in (1, 1, 2))
    assert first == again
    assert first.rho != other.rho
    assert first.observed != other.observed
    assert predict_quadratic(X, y, 6, networks=3, seed=1, draws=2).observed == first.observed
    assert predict_quadratic(X, y, 6, draws=300, tolerance=0).draws == 300
    assert predict_quadratic(X, y, 6, tolerance=1.0).draws < 300


def test_the_free_formula_on_request() -> None:
    X, y = data("white", 12)
    moments = readout_moments(12, 6)
    sampled = predict_quadratic(X, y, 6)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        free = predict_quadratic(X, y, 6, moments=moments, method="free")
        wide = predict_quadratic(X, y, 2000, moments=readout_moments(12, 2000))
    assert free.rho == free.free_rho == free.ratio_of_means == sampled.free_rho
    assert (free.method, free.draws, free.rho_error) == ("free", 0, 0.0)
    assert wide.rho == pytest.approx(predict_quadratic(X, y, 2000).rho, abs=0.005)
    with pytest.warns(UserWarning, match=r"biased for d=12 and width=6 .* use method='sampled'"):
        predict_quadratic(X, y, 6, moments=moments)
    with pytest.raises(InputError, match="moments must be None with method='sampled'"):
        predict_quadratic(X, y, 6, moments=moments, method="sampled")
    with pytest.raises(InputError, match="method must be"):
        predict_quadratic(X, y, 6, method="exact")  # type: ignore[arg-type]


@pytest.mark.parametrize("k", [3, 40])
def test_the_total_of_the_numerator_by_sampling(k: int) -> None:
    g = torch.Generator().manual_seed(1)
    X, y = torch.randn(9, 4, generator=g, dtype=torch.float64), torch.randn(9, generator=g, dtype=torch.float64)
    c, b = X.mT @ (y[:, None] * X), X.mT @ X
    count = 400_000 if k == 3 else 50_000
    v = torch.randn(count, k, 1, generator=g) * torch.randn(count, k, 4, generator=g) / math.sqrt(k)
    r = (v.mT @ v).double()
    half = c @ r
    values = 64 * ((half @ c) * (half @ b @ half.mT)).sum((1, 2))
    error = float(values.std()) / math.sqrt(count)
    assert error < 0.05 * float(values.mean())
    assert abs(float(values.mean()) - numerator_terms(X, y, k).total) < 4 * error


def test_bad_arguments() -> None:
    eye, X, y = torch.eye(2), torch.randn(5, 3), torch.randn(5)
    for letters in ([], [eye] * 6, [eye, torch.eye(3)], [torch.ones(2, 3)], [torch.ones(2)]):
        with pytest.raises(InputError, match="1 to 5 square matrices"):
            expected_trace(letters, 3)
    with pytest.raises(InputError, match="width"):
        expected_trace([eye], 0)
    with pytest.raises(InputError, match="draws"):
        predict_quadratic(X, y, 3, draws=1)
    with pytest.raises(InputError, match="tolerance"):
        predict_quadratic(X, y, 3, tolerance=-1.0)
    with pytest.raises(InputError, match="all zero"):
        predict_quadratic(0 * X, y, 3)
