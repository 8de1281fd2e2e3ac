"""Tests of the conjugate-kernel law against its integral equation, limits and simulation."""

from __future__ import annotations

import math
from collections.abc import Callable
from itertools import pairwise

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from scipy.optimize import brentq

from featlearn.errors import InputError
from featlearn.linalg import activation_constants
from featlearn.spectra import Law, conjugate_kernel_law, marchenko_pastur

TANH = 0.964608689374

CASES = [
    (TANH, 1000, 750, 500),
    (0.6, 300, 700, 900),
    (0.6, 500, 500, 200),  # hard edge
    (TANH, 1000, 20000, 200),  # two bulks
    (TANH, 1000, 750, 5),  # two bulks and an atom
    (0.856, 5000, 2500, 1000),  # two bulks that have only just merged
    (1.0, 300, 400, 200),  # linear
    (-1.0, 200, 400, 200),  # linear, hard edge
]


def population(slope: float, n: int, d: int) -> tuple[np.ndarray, np.ndarray]:
    """Return the nodes t and weights of the population law, by the midpoint rule in x = m - r cos(angle)."""
    ratio = n / d
    left, right = (1 - math.sqrt(ratio)) ** 2, (1 + math.sqrt(ratio)) ** 2
    angle = math.pi * (np.arange(4000) + 0.5) / 4000
    x = (left + right) / 2 - (right - left) / 2 * np.cos(angle)
    density = np.sqrt((x - left) * (right - x)) / (2 * math.pi * ratio * x)
    weights = density * (right - left) / 2 * np.sin(angle) * math.pi / 4000
    x, weights = np.append(x, 0.0), np.append(weights, max(0.0, 1 - d / n))
    return 1 - slope**2 + slope**2 * x, weights


def stieltjes(z: complex, slope: float, n: int, width: int, d: int) -> complex:
    """Compute m by damped iteration of the companion v = 1 / (-z + g int t/(1 + t v) dmu) in the upper half plane.

    The solution is unique there. The equation for m itself, m = int dmu(t) / (t (1 - g - g z m) - z), has other
    attracting fixed points.
    """
    t, weights = population(slope, n, d)
    g, v = n / width, 1j
    for _ in range(5000):
        following = 1 / (-z + g * (weights * t / (1 + t * v)).sum())
        if abs(following - v) < 1e-14 * abs(v):
            break
        v = (v + following) / 2
    m = (v + (1 - g) / z) / g
    assert abs((weights / (t * (1 - g - g * z * m) - z)).sum() - m) < 1e-12 * abs(m)
    return complex(m)


def integral(law: Law, function: Callable[[np.ndarray], np.ndarray]) -> complex:
    """Integrate over the law: the density by the midpoint rule in the angle of the singular value, and the atom."""
    total = law.atom * complex(function(np.zeros(1))[0])
    for left, right in law.intervals:
        low, high = math.sqrt(left) if left else -math.sqrt(right), math.sqrt(right)
        angle = math.pi * (np.arange(6000) + 0.5) / 6000
        s = np.abs((low + high) / 2 - (high - low) / 2 * np.cos(angle))
        weights = law.pdf(s**2).numpy() * s * (2 if left else 1) * (high - low) / 2 * np.sin(angle) * math.pi / 6000
        total += (weights * function(s**2)).sum()
    return complex(total)


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("z", [0.5 + 0.5j, 2 + 0.3j, -0.2 + 0.1j, 8 + 1j])
def test_transform_of_the_law_solves_the_integral_equation(case, z) -> None:
    law = conjugate_kernel_law(*case)
    assert integral(law, lambda x: 1 / (x - z)) == pytest.approx(stieltjes(z, *case), rel=1e-9)


def scanned_edges(slope: float, n: int, width: int, d: int) -> list[float]:
    """Find the zeros of z' = 1 - g int t^2 / (tau - t)^2 dmu by a scan of tau = -1/v off the population's support."""
    t, weights = population(slope, n, d)
    g = n / width

    def rise(tau: float) -> float:
        return 1 - g * (weights * t**2 / (tau - t) ** 2).sum()

    atom, low_end, high_end = t[-1], t[:-1].min(), t[:-1].max()
    ends = sorted({-1e3, 0.0, low_end, high_end, 1e3} | ({atom} if n > d else set()))
    edges = []
    for low, high in pairwise(ends):
        if low == low_end:
            continue
        near = np.geomspace(1e-7, 0.5, 400) * (high - low)
        scan = np.concatenate([low + near, (high - near)[::-1]])
        signs = np.sign([rise(tau) for tau in scan])
        for i in np.nonzero(np.diff(signs))[0]:
            tau = brentq(rise, scan[i], scan[i + 1], xtol=1e-14)
            edges.append(tau + g * (weights * t * tau / (tau - t)).sum())
    return sorted(e for e in edges if e > 1e-6)


@pytest.mark.parametrize("case", CASES)
def test_edges_are_the_critical_points_of_the_integral_form(case) -> None:
    law = conjugate_kernel_law(*case)
    edges = [edge for interval in law.intervals for edge in interval if edge > 0]
    assert edges == pytest.approx(scanned_edges(*case), rel=1e-6)
    for left, right in law.intervals:
        gap = 1e-4 * (right - left)
        assert float(law.pdf(left - gap)) == float(law.pdf(right + gap)) == 0
        assert float(law.pdf(left + gap)) > 0 < float(law.pdf(right - gap))


@pytest.mark.parametrize("case", CASES)
def test_mass_mean_and_quantiles(case) -> None:
    law = conjugate_kernel_law(*case)
    _, n, width, d = case
    rank = min(n, width, d) if abs(case[0]) == 1 else min(n, width)
    assert law.atom == pytest.approx(1 - rank / n)
    assert float(law.cdf(law.edges[1])) == pytest.approx(1.0, abs=1e-10)
    shares = torch.linspace(0, 1, 201, dtype=torch.float64)
    x = law.quantile(shares)
    above = shares > law.atom
    torch.testing.assert_close(law.cdf(x)[above], shares[above], rtol=0, atol=1e-10)
    assert integral(law, np.ones_like).real == pytest.approx(1.0, abs=1e-9)
    assert integral(law, lambda y: y).real == pytest.approx(law.mean, abs=1e-9)
    for x in law.quantile([0.3 + 0.7 * law.atom, 0.9]).tolist():
        below = integral(law, lambda y, x=x: y <= x)  # a jump: the midpoint rule is good to one node
        assert float(law.cdf(x)) == pytest.approx(below.real, abs=1e-3)


def test_no_linear_part_is_marchenko_pastur() -> None:
    plain = marchenko_pastur(700, 300)
    for slope in (0.0, 1e-5, 1e-3):
        law = conjugate_kernel_law(slope, 300, 700, 200)
        assert law.edges == pytest.approx(plain.edges, rel=1e-5)
        x = torch.linspace(*plain.edges, 50, dtype=torch.float64)
        torch.testing.assert_close(law.cdf(x), plain.cdf(x), atol=1e-5, rtol=0)


@pytest.mark.parametrize(
    "case", [(0.666, 5829, 5830, 4), (1 - 1e-8, 407, 2111, 407), (1 - 2e-6, 981, 75, 981), (0.9, 2, 3, 10**5)]
)
def test_extreme_sizes_keep_their_mass(case) -> None:
    law = conjugate_kernel_law(*case)
    assert law.atom + sum(bulk.mass for bulk in law.bulks) == pytest.approx(1.0, abs=1e-8)


def test_endless_width_is_the_population_law() -> None:
    law, data = conjugate_kernel_law(0.8, 100, 10**10, 300), marchenko_pastur(300, 100)
    assert law.edges == pytest.approx([0.36 + 0.64 * e for e in data.edges], rel=1e-3)
    x = torch.linspace(*data.edges, 50, dtype=torch.float64)
    torch.testing.assert_close(law.cdf(0.36 + 0.64 * x), data.cdf(x), atol=1e-4, rtol=0)


def test_formula_sheet() -> None:
    left, right = conjugate_kernel_law(torch.tanh, 1000, 750, 500).edges
    assert right == pytest.approx(9.177, abs=5e-4)
    assert left == pytest.approx(0.0035, abs=6e-5)


@pytest.mark.parametrize(
    ("function", "n", "width", "d"),
    [
        (torch.tanh, 500, 375, 250),
        (torch.tanh, 400, 2000, 80),
        (F.softplus, 600, 450, 300),
        (torch.relu, 300, 600, 450),
    ],
)
def test_simulation(function, n: int, width: int, d: int) -> None:
    law, values = conjugate_kernel_law(function, n, width, d), simulated(function, n, width, d, unit=True)
    assert distance(law, values) < 3 * math.log(n) / n
    if function is torch.tanh:  # the others have spikes
        assert float(values[-1]) == pytest.approx(law.edges[1], rel=4 * n ** (-2 / 3))


def test_gaussian_inputs_converge_to_the_law() -> None:
    """The lengths of Gaussian inputs vary, which blurs the narrow bulk of the rest of tanh by a distance like 1/d."""
    errors = []
    for d in (80, 160):
        sizes = (5 * d, 25 * d, d)
        law = conjugate_kernel_law(torch.tanh, *sizes)
        assert len(law.bulks) == 2
        errors.append(distance(law, simulated(torch.tanh, *sizes, unit=False)))
    assert 0.35 < errors[1] / errors[0] < 0.65  # d = 80, 160, 320 gave .05, .026, .012


def simulated(function, n: int, width: int, d: int, *, unit: bool) -> torch.Tensor:
    """Return eigenvalues of the conjugate kernel of a random layer; inputs are Gaussian or scaled to length sqrt(d)."""
    source = torch.Generator().manual_seed(3)
    w, x = (torch.randn(a, b, generator=source, dtype=torch.float64) for a, b in ((width, d), (d, n)))
    if unit:
        x = x / x.norm(dim=0) * math.sqrt(d)
    constants = activation_constants(function)
    features = ((function(w @ x / math.sqrt(d)) - constants.mean) / constants.std) / math.sqrt(width)
    values = torch.linalg.eigvalsh(features.mT @ features)
    values[values.abs() < 1e-10] = 0.0
    return values


def distance(law: Law, values: torch.Tensor) -> float:
    """Return the largest difference of the distribution functions."""
    grid = torch.linspace(0, law.edges[1] * 1.05, 1000, dtype=torch.float64)
    return float((torch.searchsorted(values, grid, right=True) / len(values) - law.cdf(grid)).abs().max())


def test_bad_input_is_refused() -> None:
    with pytest.raises(InputError, match=r"between -1 and 1 .*got 1\.1"):
        conjugate_kernel_law(1.1, 10, 10, 10)
    with pytest.raises(InputError, match="between -1 and 1"):
        conjugate_kernel_law(math.nan, 10, 10, 10)
    with pytest.raises(InputError, match="width must be"):
        conjugate_kernel_law(0.5, 10, 0, 10)
    with pytest.raises(InputError, match="activation_or_slope must be a callable or the slope b as a number, got str"):
        conjugate_kernel_law("tanh", 10, 10, 10)
    with pytest.raises(InputError, match="n, width and d must not all be equal for a linear activation, got 10"):
        conjugate_kernel_law(1.0, 10, 10, 10)
