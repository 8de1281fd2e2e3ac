from __future__ import annotations

import itertools
import math

import pytest
import torch

from featlearn.errors import InputError
from featlearn.theory._free_probability import (
    alternating_trace,
    kreweras_complement,
    matrix_moments,
    noncrossing_partitions,
)
from featlearn.theory._quadratic_alignment import (
    expected_derivatives,
    isotropic_numerator,
    numerator_terms,
    predict_quadratic,
    readout_moments,
)


def crosses(p) -> bool:
    for a, b in itertools.combinations(p, 2):
        for i, j in itertools.combinations(sorted(a), 2):
            if any(i < k < j for k in b) and any(k < i or k > j for k in b):
                return True
    return False


def all_partitions(points):
    if not points:
        yield []
        return
    for rest in all_partitions(points[1:]):
        yield [[points[0]], *rest]
        for i in range(len(rest)):
            yield [*rest[:i], [points[0], *rest[i]], *rest[i + 1 :]]


@pytest.mark.parametrize("n", range(1, 8))
def test_noncrossing_partitions_against_all_of_them(n: int) -> None:
    wanted = {frozenset(map(frozenset, p)) for p in all_partitions(list(range(n))) if not crosses(p)}
    result = noncrossing_partitions(n)
    assert len(result) == math.comb(2 * n, n) // (n + 1)
    assert {frozenset(map(frozenset, p)) for p in result} == wanted


@pytest.mark.parametrize("n", range(1, 6))
def test_the_complement_is_the_coarsest_that_does_not_cross(n: int) -> None:
    """On the interleaved points 0 0' 1 1' ...: by brute force over all partitions of the primed ones."""
    for partition in noncrossing_partitions(n):
        fits = []
        for other in noncrossing_partitions(n):
            both = [[2 * i for i in b] for b in partition] + [[2 * i + 1 for i in b] for b in other]
            if not crosses(both):
                fits.append(other)
        coarsest = min(fits, key=len)
        assert {frozenset(b) for b in kreweras_complement(partition)} == {frozenset(b) for b in coarsest}
        assert len(partition) + len(coarsest) == n + 1


def free_pair(d: int, seed: int):
    g = torch.Generator().manual_seed(seed)
    x = torch.randn(2 * d, d, generator=g, dtype=torch.float64) / math.sqrt(d)
    a = torch.diag(torch.rand(d, generator=g, dtype=torch.float64) + 0.1)
    b = x.mT @ x
    q, _ = torch.linalg.qr(torch.randn(d, d, generator=g, dtype=torch.float64))
    r = q @ torch.diag(torch.rand(d, generator=g, dtype=torch.float64) ** 2) @ q.mT
    return a, b, r


@pytest.mark.parametrize("word", ["aab", "aa", "abab", "ab", "bbb", "aabb", "ababa"])
def test_traces_of_large_rotated_matrices(word: str) -> None:
    """Matrices in random positions are free up to terms of 1/d: the mean of ten draws, with its standard error."""
    d, gaps, sizes = 300, [], []
    for seed in range(10):
        a, b, r = free_pair(d, seed)
        letters = [{"a": a, "b": b}[c] for c in word]
        product = torch.eye(d, dtype=torch.float64)
        for m in letters:
            product = product @ m @ r
        powers = {k: float(torch.linalg.matrix_power(r, k).trace()) / d for k in range(1, 6)}
        predicted = alternating_trace(matrix_moments(letters), lambda w, p=powers: p[len(w)], len(word))
        gaps.append(predicted - float(product.trace()) / d)
        sizes.append(predicted)
    gap, size = torch.tensor(gaps), sum(sizes) / 10
    assert abs(float(gap.mean())) < 4 * float(gap.std()) / math.sqrt(10) + size / d
    assert float(gap.std()) < 0.05 * size  # or the test could not fail


def printed(a, b, m):
    """The closed forms of the formula sheet, typed."""
    tr = lambda t: float(t.trace()) / len(t)  # noqa: E731
    eye = torch.eye(len(a), dtype=torch.float64)
    ab, bb = a - tr(a) * eye, b - tr(b) * eye
    m1, m2, m3, m4 = m
    ta, tb = tr(a), tr(b)
    num = ta**2 * tb * m3 + 2 * ta * m2 * m1 * tr(ab @ bb) + tb * m1 * m2 * tr(ab @ ab) + m1**3 * tr(ab @ ab @ bb)
    den1 = tr(a @ a) * m1**2 + ta**2 * m2 - ta**2 * m1**2
    den2 = (
        m1**4 * tr(ab @ bb @ ab @ bb)
        + 2 * m1**2 * (m2 - m1**2) * tr(ab @ bb) ** 2
        + 2 * m1**2 * m2 * (tb * tr(ab @ ab @ bb) + ta * tr(ab @ bb @ bb))
        + 4 * ta * tb * m3 * m1 * tr(ab @ bb)
        + ta**2 * tb**2 * m4
        + ta**2 * tr(bb @ bb) * m2**2
        + tb**2 * tr(ab @ ab) * m2**2
    )
    return num, den1, den2


@pytest.mark.parametrize("seed", range(3))
def test_the_engine_derives_the_printed_formulas(seed: int) -> None:
    a, b, _ = free_pair(12, seed)
    m = (1.3, 2.1, 4.7, 11.9)

    def of_r(word):
        return m[len(word) - 1]

    num, den1, den2 = printed(a, b, m)
    assert alternating_trace(matrix_moments([a, a, b]), of_r, 3) == pytest.approx(num, rel=1e-12)
    assert alternating_trace(matrix_moments([a, a]), of_r, 2) == pytest.approx(den1, rel=1e-12)
    assert alternating_trace(matrix_moments([a, b, a, b]), of_r, 4) == pytest.approx(den2, rel=1e-12)


@pytest.mark.parametrize(("d", "k"), [(1, 1), (2, 1), (2, 3), (3, 2)])
def test_moments_of_r_by_sampling(d: int, k: int) -> None:
    g = torch.Generator().manual_seed(d * 10 + k)
    n = 400_000
    a = torch.randn(n, k, generator=g, dtype=torch.float64)
    w = torch.randn(n, k, d, generator=g, dtype=torch.float64) / math.sqrt(k)
    r = w.mT @ (a.square()[:, :, None] * w)
    power = torch.eye(d, dtype=torch.float64).expand(n, d, d)
    for p, wanted in enumerate(readout_moments(d, k), start=1):
        power = power @ r
        values = power.diagonal(dim1=1, dim2=2).mean(1)
        error = float(values.std()) / math.sqrt(n)
        # Tails are heavy: the fourth moment's own error is itself uncertain.
        assert abs(float(values.mean()) - wanted) < 5 * error, p


def test_the_limit_is_reached() -> None:
    exact, limit = readout_moments(40_000, 20_000), readout_moments(1, None, ratio=2.0)
    assert exact == pytest.approx(limit, rel=1e-3)


def test_predicted_and_observed_rho() -> None:
    g = torch.Generator().manual_seed(0)
    X = torch.randn(600, 200, generator=g, dtype=torch.float64)
    y = X[:, 0] * X[:, 1] + 0.5 * X[:, 2] ** 2
    result = predict_quadratic(X, y, width=400, networks=12, seed=1)
    assert result.rho == pytest.approx(result.observed_mean, abs=5 * result.observed_error + 0.01)
    assert 0.1 < result.rho < 0.999


@pytest.mark.parametrize("k", [1, 3])
def test_expected_derivatives_by_sampling(k: int) -> None:
    g = torch.Generator().manual_seed(k)
    X, y = torch.randn(6, 3, generator=g, dtype=torch.float64), torch.randn(6, generator=g, dtype=torch.float64)
    n = 200_000
    a = torch.randn(n, k, generator=g, dtype=torch.float64)
    w = torch.randn(n, k, 3, generator=g, dtype=torch.float64) / math.sqrt(k)
    h = torch.einsum("nkd,sd->nsk", w, X)
    slopes = 2 * a[:, None] * h  # df/dh
    # Output zero: the error of half the summed squares is -y.
    moved = torch.einsum("s,nsk,sd->nkd", y, slopes, X)
    ptk = torch.einsum("nsk,nsl->nkl", slopes, slopes)
    nfm, agop = moved.mT @ moved, moved.mT @ ptk @ moved
    for values, wanted in zip((nfm, agop), expected_derivatives(X, y, k), strict=True):
        error = values.std(0) / math.sqrt(n)
        assert ((values.mean(0) - wanted).abs() < 5 * error).all()


def test_the_isotropic_numerator_is_the_general_one_without_b() -> None:
    g = torch.Generator().manual_seed(3)
    A = torch.randn(12, 20, generator=g, dtype=torch.float64)
    A = A @ A.mT
    moments = readout_moments(12, 30)
    identity = torch.eye(12, dtype=torch.float64)
    derived = alternating_trace(matrix_moments([A, A, identity]), lambda word: moments[len(word) - 1], 3)
    assert isotropic_numerator(A, moments) == pytest.approx(derived, rel=1e-12)
    with pytest.raises(InputError, match="square"):
        isotropic_numerator(A[:3], moments)


def test_mean_and_covariance_of_the_numerator() -> None:
    """Against networks drawn at random; the covariance falls like 1/k, and E[P^2] tends to E[P]^2."""
    g = torch.Generator().manual_seed(3)
    X = torch.randn(90, 60, generator=g, dtype=torch.float64)
    y = X[:, 0] * X[:, 1] + X[:, 2]
    c, b = X.mT @ (y[:, None] * X), X.mT @ X
    for k in (60, 600):
        result = numerator_terms(X, y, k)
        nfms, agops = [], []
        for _ in range(400):
            a = torch.randn(k, generator=g, dtype=torch.float64)
            w = torch.randn(k, 60, generator=g, dtype=torch.float64) / math.sqrt(k)
            r = w.mT @ (a.square()[:, None] * w)
            nfms.append(4 * c @ r @ c)
            agops.append(16 * c @ r @ b @ r @ c)
        nfm, agop = torch.stack(nfms), torch.stack(agops)
        totals = (nfm * agop).sum((1, 2))
        error = float(totals.std()) / 20
        # Freeness holds up to terms of 1/d.
        assert abs(float(totals.mean()) - result.total) < 4 * error + result.total / 60
        sampled = float((nfm.mean(0) * agop.mean(0)).sum())
        assert result.mean == pytest.approx(sampled, rel=0.05)
    narrow, wide, widest = (numerator_terms(X, y, k) for k in (60, 600, 6000))
    shares = [t.covariance / t.total for t in (narrow, wide, widest)]
    assert shares[0] > shares[1] > shares[2] > 0
    assert shares[1] / shares[2] == pytest.approx(10, rel=0.3)
    assert widest.mean == pytest.approx(widest.mean_of_squared_mean, rel=0.05)
    assert narrow.mean > 1.5 * narrow.mean_of_squared_mean


def test_bad_arguments() -> None:
    X, y = torch.randn(5, 3), torch.randn(5)
    for wrong in ((X, y[:4], 3), (X, y, 0), (X[0], y, 3), (X * math.nan, y, 3), (X, 0 * y, 3)):
        with pytest.raises(InputError):
            predict_quadratic(*wrong)
    with pytest.raises(InputError, match="ratio"):
        readout_moments(3, None)
    with pytest.raises(InputError, match="the same size"):
        matrix_moments([torch.ones(2, 2), torch.ones(3, 3)])
    with pytest.raises(InputError, match="length must be an integer of at least 1"):
        alternating_trace(lambda w: 1.0, lambda w: 1.0, 0)
