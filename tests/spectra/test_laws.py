"""Tests of the Marchenko-Pastur law against adaptive quadrature of the textbook density, and against simulation."""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
import pytest
import torch
from scipy.integrate import quad

from featlearn.errors import InputError
from featlearn.spectra import marchenko_pastur

SHAPES = [(400, 100), (100, 400), (300, 300), (1000, 999), (7, 5000), (5000, 7), (2, 1)]


def textbook_density(x: float, rows: float, columns: float, variance: float, scale: float) -> float:
    """Return the density of W^T W / rows from the literature, converted to another scale."""
    ratio, factor = columns / rows, rows / scale
    y = x / factor
    low, high = variance * (1 - math.sqrt(ratio)) ** 2, variance * (1 + math.sqrt(ratio)) ** 2
    if not low < y < high:
        return 0.0
    return math.sqrt((high - y) * (y - low)) / (2 * math.pi * variance * ratio * y) / factor


def integral(function: Callable[[float], float], left: float, right: float, end: float) -> float:
    """Integrate from the left edge by adaptive quadrature in x = m - r cos t, in which square-root edges are smooth."""
    radius, end = (right - left) / 2, min(max(left, end), right)
    stop = 2 * math.atan2(math.sqrt(end - left), math.sqrt(right - end))

    def integrand(t: float) -> float:
        return function(left + 2 * radius * math.sin(t / 2) ** 2) * radius * math.sin(t)

    # full_output suppresses warnings about rounding at the edges, which the tolerances of the tests cover.
    return quad(integrand, 0, stop, epsabs=1e-12, epsrel=1e-12, limit=500, full_output=1)[0]


def mass_below(x: float, rows: float, columns: float, variance: float, scale: float) -> float:
    left, right = (variance * (math.sqrt(rows) + s * math.sqrt(columns)) ** 2 / scale for s in (-1, 1))
    value = integral(lambda y: textbook_density(y, rows, columns, variance, scale), left, right, x)
    return value + (max(0.0, 1 - rows / columns) if x >= 0 else 0.0)


@pytest.mark.parametrize(("rows", "columns"), SHAPES)
@pytest.mark.parametrize(("variance", "scale"), [(1.0, None), (0.3, 50.0)])
def test_density_and_cdf_against_quadrature(rows: int, columns: int, variance: float, scale: float | None) -> None:
    law = marchenko_pastur(rows, columns, variance=variance, scale=scale)
    numbers = (rows, columns, variance, scale or rows)
    left, right = law.edges
    x = torch.linspace(left, right, 23, dtype=torch.float64)
    x = torch.cat([x, torch.tensor([-1.0, left / 2, right * 1.1, left + 1e-9 * right, right * (1 - 1e-9)])])
    for value, pdf, cdf in zip(x.tolist(), law.pdf(x).tolist(), law.cdf(x).tolist(), strict=True):
        if left * (1 + 1e-6) < value < right * (1 - 1e-6):  # the textbook form loses digits at the edges
            assert pdf == pytest.approx(textbook_density(value, *numbers), rel=1e-9)
        assert cdf == pytest.approx(mass_below(value, *numbers), abs=1e-10)


@pytest.mark.parametrize(("rows", "columns"), SHAPES)
def test_mean_and_total_mass(rows: int, columns: int) -> None:
    law = marchenko_pastur(rows, columns, variance=0.7, scale=11.0)
    mass, mean = (integral(lambda x, k=k: x**k * float(law.pdf(x)), *law.edges, law.edges[1]) for k in (0, 1))
    assert mass + law.atom == pytest.approx(1.0, abs=1e-10)
    assert mean == pytest.approx(law.mean, rel=1e-10)
    assert law.mean == pytest.approx(0.7 * rows / 11.0)
    assert float(law.cdf(law.edges[1])) == pytest.approx(1.0, abs=1e-12)


@pytest.mark.parametrize(("rows", "columns"), SHAPES)
def test_quantiles_invert_the_cdf(rows: int, columns: int) -> None:
    law = marchenko_pastur(rows, columns)
    shares = torch.cat([torch.linspace(0, 1, 301, dtype=torch.float64), torch.tensor([1e-9, 1 - 1e-9])])
    x = law.quantile(shares)
    above = shares > law.atom
    torch.testing.assert_close(law.cdf(x)[above], shares[above], rtol=0, atol=1e-12)
    assert (x[shares <= law.atom] == (0.0 if law.atom else law.edges[0])).all()
    assert float(law.quantile(1.0)) == law.edges[1]
    assert (x[:301].diff() >= 0).all()


def test_normalizations_of_the_docstring_against_simulation() -> None:
    h, d, n = 500, 300, 400
    draw = np.random.default_rng(0)
    w, x = draw.standard_normal((h, d)), draw.standard_normal((d, n))
    u = draw.uniform(-1, 1, (h, d)) / math.sqrt(d)
    cases = [
        (w.T @ w / 77, marchenko_pastur(h, d, scale=77)),
        (w @ w.T / 77, marchenko_pastur(d, h, scale=77)),
        (w.T @ w / h, marchenko_pastur(h, d)),
        (x.T @ x / d, marchenko_pastur(d, n)),
        (x @ x.T / n, marchenko_pastur(n, d)),
        (x @ x.T / d, marchenko_pastur(n, d, scale=d)),
        (u.T @ u, marchenko_pastur(h, d, variance=1 / (3 * d), scale=1)),
    ]
    for matrix, law in cases:
        values = np.linalg.eigvalsh(matrix)
        values[np.abs(values) < 1e-10] = 0.0
        size = len(values)
        grid = np.linspace(0, law.edges[1] * 1.05, 200)
        empirical = np.searchsorted(np.sort(values), grid, side="right") / size
        # Eigenvalues are rigid: the distance of the cdfs is of order log(n)/n, not n^-1/2.
        assert np.abs(empirical - law.cdf(grid).numpy()).max() < 2 * math.log(size) / size
        # The largest eigenvalue moves by n^-2/3.
        assert abs(values.max() / law.edges[1] - 1) < 3 * size ** (-2 / 3)


def test_shapes_and_kinds_of_input() -> None:
    law = marchenko_pastur(20, 10)
    x = np.linspace(0.2, 2, 6, dtype=np.float32).reshape(2, 3)
    for method in (law.pdf, law.cdf):
        assert method(x).shape == (2, 3)
        assert method(x).dtype == torch.float64
        assert method(1.0).shape == ()
        torch.testing.assert_close(method(torch.from_numpy(x)), method(x.tolist()))
    assert float(law.cdf(0.7)) == float(law.cdf(torch.tensor(0.7, dtype=torch.float64)))  # not rounded to float32
    assert law.cdf([]).shape == law.quantile([]).shape == (0,)
    assert law.cdf([-math.inf, math.inf]).tolist() == [0.0, 1.0]


def test_bad_numbers_are_refused() -> None:
    with pytest.raises(InputError, match="rows must be positive"):
        marchenko_pastur(0, 3)
    with pytest.raises(InputError, match="variance must be positive"):
        marchenko_pastur(3, 3, variance=math.nan)
    law = marchenko_pastur(3, 3)
    with pytest.raises(InputError, match=r"q must be between 0 and 1, got values from 1\.5"):
        law.quantile(1.5)
    with pytest.raises(InputError, match="NaN"):
        law.pdf(math.nan)
