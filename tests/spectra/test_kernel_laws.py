"""Tests of the laws of deep conjugate kernels, tangent kernels and very wide layers.

Oracles solve the equations by damped iteration, with integrals over the law of the layer below instead of the algebra
of the fast path, or take edges from the minimum of a function on the real line.
"""

from __future__ import annotations

import math
import pickle
from collections.abc import Callable, Sequence

import numpy as np
import pytest
import torch
from scipy.optimize import brentq, minimize_scalar
from torch import Tensor

from featlearn import ck, ntk
from featlearn.errors import FeatlearnError, InputError
from featlearn.linalg import activation_constants, hermite, hermite_coefficients
from featlearn.models import ntk_mlp
from featlearn.spectra import (
    Law,
    conjugate_kernel_law,
    deformed_semicircle,
    ks_distance,
    marchenko_pastur,
    qq,
    spikes,
    tangent_kernel_law,
)
from featlearn.spectra._kernel_equations import layers_law

TANH = 0.964608689374
SIZES = (32, 64, 128)  # of very wide layers
Z = (0.5 + 0.4j, 3 + 0.3j, -0.2 + 0.1j, 12 + 1j)


def cubic(slope: float) -> Callable[[Tensor], Tensor]:
    """Return the normalized activation ``b h_1 + sqrt(1 - b^2) h_3``, for which E[sigma'^2] = 3 - 2 b^2."""

    def activation(z: Tensor) -> Tensor:
        values = hermite(z, 3)
        return slope * values[1] + math.sqrt(1 - slope**2) * values[3]

    return activation


def nodes(law: Law, count: int = 3000) -> tuple[np.ndarray, np.ndarray]:
    """Return points and weights of a law: the midpoint rule in the angle of the root of the distance from the atom."""
    points, weights = [np.array([law.atom_at])], [np.array([law.atom])]
    origin = law.atom_at if law.edges[0] >= law.atom_at else 2 * law.edges[0] - law.edges[1]
    angle = math.pi * (np.arange(count) + 0.5) / count
    for left, right in law.intervals:
        low, high = math.sqrt(max(left - origin, 0.0)), math.sqrt(right - origin)
        if low == 0:
            low = -high
        s = np.abs((low + high) / 2 - (high - low) / 2 * np.cos(angle))
        share = s * (1 if low == -high else 2) * (high - low) / 2 * np.sin(angle) * math.pi / count
        points.append(origin + s**2)
        weights.append(law.pdf(points[-1]).numpy() * share)
    return np.concatenate(points), np.concatenate(weights)


def transform(law: Law, z: complex) -> complex:
    x, weights = nodes(law)
    return complex((weights / (x - z)).sum())


def iterate(step: Callable[[np.ndarray], np.ndarray], start: np.ndarray) -> np.ndarray:
    """Iterate a map with damping until it stands still."""
    for _ in range(20_000):
        following = np.atleast_1d(step(start))
        if np.abs(following - start).max() < 1e-14 * np.abs(start).max():
            return following
        start = (start + following) / 2
    raise AssertionError("the oracle has not converged")


def least(
    excess: Callable[[float, float], float], pole: Callable[[float], float], between: tuple[float, float]
) -> float:
    """Return the right edge: the minimum over real s of the z, beyond the pole, at which s solves an equation."""

    def position(s: float) -> float:
        low, high = pole(s) * (1 + 1e-9), 2 * pole(s)
        if excess(low, s) * excess(1e9, s) > 0:
            return 1e9  # no solution beyond the pole
        while excess(low, s) * excess(high, s) > 0:
            high *= 2
        return brentq(excess, low, high, args=(s,), xtol=1e-14, rtol=1e-14)

    scan = np.linspace(*between, 400)
    best = int(np.argmin([position(s) for s in scan]))
    bounds = scan[max(best - 1, 0)], scan[min(best + 1, 399)]
    return float(minimize_scalar(position, bounds=bounds, method="bounded", options={"xatol": 1e-12}).fun)


# Deep conjugate kernels


@pytest.mark.parametrize(
    ("slopes", "n", "widths", "d"),
    [
        ([TANH, TANH], 1000, [750, 600], 500),
        ([0.6, 0.9], 300, [700, 300], 900),  # hard edge
        ([0.9, 0.5], 400, [300, 100], 200),  # atom
        ([TANH, TANH], 1000, [20000, 30000], 200),  # two bulks
        ([1.0, 0.8], 300, [200, 500], 400),  # a linear layer below
        ([0.8, 1.0], 300, [200, 500], 400),  # and above
    ],
)
def test_two_layers_solve_the_integral_equation_over_the_law_of_one(slopes, n, widths, d) -> None:
    law, below = conjugate_kernel_law(slopes, n, widths, d), conjugate_kernel_law(slopes[0], n, widths[0], d)
    x, weights = nodes(below)
    t, g = 1 - slopes[1] ** 2 + slopes[1] ** 2 * x, n / widths[1]
    for z in Z:
        v = iterate(lambda v, z=z: 1 / (-z + g * (weights * t / (1 + t * v)).sum()), np.array([1j]))[0]
        assert transform(law, z) == pytest.approx((v + (1 - g) / z) / g, rel=1e-8)
    # The right edge is the minimum of z over real v between -1/max(t) and zero.
    lowest = -1 / (1 - slopes[1] ** 2 + slopes[1] ** 2 * below.edges[1])
    found = minimize_scalar(
        lambda v: -1 / v + g * (weights * t / (1 + t * v)).sum(), (lowest * (1 - 1e-9), lowest / 1e3),
        (lowest * (1 - 1e-9), lowest / 1e3), method="bounded", options={"xatol": 1e-12},
    )  # fmt: skip
    assert law.edges[1] == pytest.approx(found.fun, rel=1e-8)


def test_one_width_in_a_list_is_the_same_law() -> None:
    one, listed = conjugate_kernel_law(torch.tanh, 100, 75, 50), conjugate_kernel_law([torch.tanh], 100, [75], 50)
    assert one.edges == listed.edges
    x = torch.linspace(0, 9, 50, dtype=torch.float64)
    assert torch.equal(one.pdf(x), listed.pdf(x))


@pytest.mark.parametrize(
    "case", [(TANH, 1000, 750, 500), (0.6, 500, 500, 200), (0.9, 1000, 750, 5), (1.0, 300, 400, 200)]
)
def test_general_solver_agrees_with_the_quartic(case) -> None:
    slope, n, width, d = case
    quartic, general = conjugate_kernel_law(*case), layers_law([slope**2], n, [d, width], [0.0, 1.0], "one layer")
    assert general.atom == pytest.approx(quartic.atom)
    assert np.array(general.intervals) == pytest.approx(np.array(quartic.intervals), rel=1e-11)
    x = quartic.quantile(torch.linspace(0, 1, 100, dtype=torch.float64))
    torch.testing.assert_close(general.cdf(x), quartic.cdf(x), rtol=0, atol=1e-11)
    torch.testing.assert_close(general.pdf(x[5:-5]), quartic.pdf(x[5:-5]), rtol=1e-7, atol=1e-9)


def test_layers_without_linear_part_and_endless_layers_drop_out() -> None:
    x = torch.linspace(0.01, 8, 100, dtype=torch.float64)
    forgotten = conjugate_kernel_law([0.9, 0.0], 300, [200, 700], 100)
    torch.testing.assert_close(forgotten.cdf(x), marchenko_pastur(700, 300).cdf(x), rtol=0, atol=1e-10)
    # An endless linear layer changes nothing, above or below.
    one = conjugate_kernel_law(0.7, 300, 400, 200)
    for slopes, widths in (([1.0, 0.7], [10**11, 400]), ([0.7, 1.0], [400, 10**11])):
        torch.testing.assert_close(conjugate_kernel_law(slopes, 300, widths, 200).cdf(x), one.cdf(x), rtol=0, atol=1e-4)


def test_linear_layers_are_a_product_of_matrices() -> None:
    """A product of three Gaussian matrices: moments 1, 1 + g, by the recursion m2' = m2 + g m1^2 per layer."""
    law = conjugate_kernel_law(1.0, 300, [450, 600], 900)
    x, weights = nodes(law)
    assert (weights * x**2).sum() == pytest.approx(1 + 300 / 900 + 300 / 450 + 300 / 600, rel=1e-9)
    with pytest.raises(InputError, match="At most two of the sizes"):
        conjugate_kernel_law(1.0, 300, [300, 300], 900)


# Tangent kernels


def tangent_constants(slopes: Sequence[float]) -> tuple[list[float], float]:
    """Return the weights q_l and r for activations `cubic`, written out for one and two layers."""
    b = [slope**2 for slope in slopes]
    a = [3 - 2 * square for square in b]
    if len(b) == 1:
        return [b[0], 1.0], a[0] - b[0]
    return [b[0] * b[1], b[1], 1.0], a[0] * a[1] - b[0] * b[1] + a[1] - b[1]


@pytest.mark.parametrize(
    ("slope", "n", "width", "d"),
    [
        (TANH, 1000, 750, 500),
        (0.6, 300, 700, 900),
        (0.8, 400, 100, 200),  # atom
        (0.9, 400, 250, 150),  # hard edge: d + width = n
        (1.0, 300, 400, 200),  # linear
        (TANH, 1000, 20000, 50),
    ],
)
def test_tangent_kernel_of_one_layer_solves_the_integral_equation(slope, n, width, d) -> None:
    law = tangent_kernel_law(cubic(slope), n, width, d)
    (q, _), rest = tangent_constants([slope])
    x, weights = nodes(marchenko_pastur(d, n))
    t, g = 1 - slope**2 + slope**2 * x, n / width
    assert law.atom_at == pytest.approx(rest)
    assert law.atom == pytest.approx(max(0, 1 - (d if slope == 1 else d + width) / n), abs=1e-12)
    for z in Z:
        s = iterate(lambda s, z=z: 1 + g * (weights * t / (q * x - z + t / s)).sum(), np.array([1.0 + 0j]))[0]
        m = (weights / (q * x - z + t / s)).sum()
        assert transform(law, z + rest) == pytest.approx(m, rel=1e-8)

    def excess(z: float, s: float) -> float:
        return 1 - s + g * (weights * t / (q * x - z + t / s)).sum()

    assert law.edges[1] == pytest.approx(least(excess, lambda s: (q * x + t / s).max(), (0.02, 0.999)) + rest, rel=1e-8)


def test_tangent_kernel_of_two_layers_solves_the_integral_equation() -> None:
    """The trace identity gives tr K_1 G, where the fast path has its own recursion."""
    slopes, n, widths, d = (0.9, 0.8), 300, (200, 450), 150
    law = tangent_kernel_law([cubic(b) for b in slopes], n, widths, d)
    (q0, q1, _), rest = tangent_constants(slopes)
    x, weights = nodes(marchenko_pastur(d, n))
    b1, b2 = (slope**2 for slope in slopes)
    g1, g2 = (n / width for width in widths)
    for z in Z:

        def step(s: np.ndarray, z: complex = z) -> np.ndarray:
            outer = -z + (1 - b2) / s[1]
            c = q1 + b2 / s[1]
            resolvent = 1 / (outer + (1 - b1) / s[0] + (q0 + b1 / s[0]) * x)
            m, first = (weights * resolvent).sum(), (weights * x * resolvent).sum()
            second = (1 - outer * m - q0 * first) / c
            return np.array([1 / c + g1 * ((1 - b1) * m + b1 * first), 1 + g2 * ((1 - b2) * m + b2 * second)])

        s = iterate(step, np.array([1.0 + 0j, 1.0 + 0j]))
        m = (weights / (-z + (1 - b2) / s[1] + (1 - b1) / s[0] + (q0 + b1 / s[0]) * x)).sum()
        assert transform(law, z + rest) == pytest.approx(m, rel=1e-8)


def test_moments_of_the_tangent_kernel() -> None:
    b, n, width, d = 0.8, 300, 200, 150
    law = tangent_kernel_law(cubic(b), n, width, d)
    (q, _), rest = tangent_constants([b])
    x, weights = nodes(law)
    mean = (weights * x).sum()
    assert mean == pytest.approx(law.mean, rel=1e-9)
    assert law.mean == pytest.approx(rest + q + 1)
    # tr K_0^2 = 1 + g_0, tr K_0 K_1 = 1 + b^2 g_0, tr K_1^2 = 1 + b^4 g_0 + g_1.
    spread = q**2 * n / d + 2 * q * b**2 * n / d + b**4 * n / d + n / width
    assert (weights * (x - mean) ** 2).sum() == pytest.approx(spread, rel=1e-9)


def test_tangent_kernel_of_a_linear_network() -> None:
    """``X^T (I + W^T W / h) X / d`` is a sample covariance matrix with a known population."""
    n, width, d = 300, 400, 200
    law = tangent_kernel_law(lambda z: 2 * z + 1, n, width, d)  # the normalization removes shift and scale
    assert (law.atom_at, law.atom) == (0.0, pytest.approx(1 / 3))
    a, weights = nodes(marchenko_pastur(width, d).shifted(1.0))
    found = minimize_scalar(
        lambda m: -1 / m + (weights * a / (1 + n / d * a * m)).sum(),
        bounds=(-d / n / a.max() * (1 - 1e-9), -1e-3), method="bounded", options={"xatol": 1e-12},
    )  # fmt: skip
    assert law.edges[1] == pytest.approx(found.fun, rel=1e-9)


def test_first_layer_alone_and_endless_width() -> None:
    n, d, b = 200, 100, 0.8
    first = tangent_kernel_law(cubic(b), n, 300, d, trained="first")
    data = marchenko_pastur(d, n)
    a = 3 - 2 * b**2
    assert first.edges == pytest.approx([a - b**2 + b**2 * edge for edge in data.edges], rel=1e-12)
    assert (first.atom, first.atom_at, first.mean) == pytest.approx((0.5, a - b**2, a))
    # With an endless layer K_1 is (1 - b^2) + b^2 K_0, and the whole kernel r + 1 - b^2 + 2 b^2 K_0.
    whole = tangent_kernel_law(cubic(b), n, 10**11, d)
    x = torch.linspace(*data.edges, 50, dtype=torch.float64)
    torch.testing.assert_close(whole.cdf(a + 1 - 2 * b**2 + 2 * b**2 * x), data.cdf(x), rtol=0, atol=1e-4)
    # Without a linear part the tangent kernel is that of the readout, moved by E[sigma'^2] = 3.
    plain = tangent_kernel_law(cubic(0.0), n, 300, d)
    assert plain.edges == pytest.approx([3 + edge for edge in marchenko_pastur(300, n).edges], rel=1e-9)
    with pytest.raises(InputError, match="must have a linear part"):
        tangent_kernel_law(cubic(0.0), n, 300, d, trained="first")


# Very wide layers


@pytest.mark.parametrize(
    ("slope", "n", "d"), [(TANH, 1000, 500), (0.5, 100, 1000), (1.0, 200, 100), (0.7, 1000, 100), (TANH, 100, 10)]
)
def test_deformed_semicircle_solves_the_integral_equation(slope, n, d) -> None:
    law = deformed_semicircle(slope, n, d)
    x, weights = nodes(marchenko_pastur(d, n))
    t = 1 - slope**2 + slope**2 * x
    for z in (0.3 + 0.5j, 2 + 0.3j, -4 + 0.5j):
        b = iterate(lambda b, z=z: (weights * t / (-z - t * b)).sum(), np.array([1j]))[0]
        assert transform(law, z) == pytest.approx((weights / (-z - t * b)).sum(), rel=1e-8)
    left, right = law.edges
    assert left == pytest.approx(-right, rel=1e-12)
    edge = least(lambda z, b: b - (weights * t / (-z - t * b)).sum(), lambda b: -b * t.max(), (-1.5, -0.01))
    assert right == pytest.approx(edge, rel=1e-8)
    y, masses = nodes(law)
    assert (masses * y**2).sum() == pytest.approx(1.0, rel=1e-8)
    assert (masses * y**4).sum() == pytest.approx(2 * (1 + slope**4 * n / d), rel=1e-8)


def test_no_linear_part_is_the_semicircle() -> None:
    law = deformed_semicircle(0.0, 100, 50)
    assert law.edges == pytest.approx((-2, 2), rel=1e-12)
    x = torch.linspace(-1.99, 1.99, 50, dtype=torch.float64)
    torch.testing.assert_close(law.pdf(x), (4 - x**2).sqrt() / (2 * math.pi))
    assert float(law.cdf(-2.5)) == 0
    assert float(law.cdf(0)) == pytest.approx(0.5)


def test_an_atom_inside_a_bulk_has_its_share_of_quantiles() -> None:
    law = deformed_semicircle(1.0, 200, 100)
    assert (law.atom, law.atom_at, len(law.bulks)) == (0.5, 0.0, 1)
    assert float(law.pdf(0.0)) == pytest.approx(float(law.pdf(1e-4)), rel=1e-4)
    shares = torch.linspace(0, 1, 101, dtype=torch.float64)
    x = law.quantile(shares)
    assert (x.diff() >= 0).all()
    assert (x[26:75] == 0).all()
    assert float(x[24]) < 0 < float(x[76])
    outer = torch.cat([shares[:25], shares[76:]])
    torch.testing.assert_close(law.cdf(law.quantile(outer)), outer, rtol=0, atol=1e-10)
    with pytest.raises(InputError, match="n and d must not be equal"):
        deformed_semicircle(1.0, 100, 100)
    # A peak too narrow for the series is not passed over.
    with pytest.raises(FeatlearnError, match="integrates to"):
        deformed_semicircle(1 - 1e-6, 100, 100)


# Simulations


def distance(law: Law, values: Tensor) -> float:
    """Return the mean distance of the eigenvalues from the quantiles of a law."""
    shares = (torch.arange(len(values), dtype=torch.float64) + 0.5) / len(values)
    return float((values.sort()[0] - law.quantile(shares)).abs().mean())


def falling(distances: Sequence[float], last: float) -> None:
    assert distances[0] > distances[1] > distances[2], distances
    assert distances[2] < last, distances


def kernels(n: int, widths: Sequence[int], d: int, outputs: int) -> tuple[Tensor, Tensor]:
    """Return eigenvalues of conjugate and tangent kernel of a random tanh network, the latter a mean over outputs.

    Readouts of +-1 keep the tangent kernel from varying as a whole with the norm of the readout.
    """
    init = ["normal"] * len(widths) + ["rademacher"]
    net = ntk_mlp([d, *widths, outputs], init=init, generator=n, dtype=torch.float64)
    X = torch.randn(n, d, generator=torch.Generator().manual_seed(n), dtype=torch.float64)
    tangent = ntk(net, X)
    assert isinstance(tangent, Tensor)
    return torch.linalg.eigvalsh(ck(net, X)), torch.linalg.eigvalsh(tangent / outputs)


@pytest.mark.parametrize(
    ("n", "widths", "d", "outputs", "last"),
    [(2, [1.5], 1, 1, (0.02, 0.04)), (2, [1, 1.5], 1, 16, (0.02, 0.1))],
    ids=["one layer", "two layers"],
)
def test_networks_approach_the_laws(n, widths, d, outputs, last) -> None:
    sizes = [(n * s, [round(w * s) for w in widths], d * s) for s in (50, 100, 200)]
    values = [kernels(*size, outputs) for size in sizes]
    laws = [conjugate_kernel_law(torch.tanh, *sizes[-1]), tangent_kernel_law(torch.tanh, *sizes[-1])]
    for i, law in enumerate(laws):
        falling([distance(law, one[i]) for one in values], last[i])
        assert float(values[-1][i][-1]) == pytest.approx(law.edges[1], rel=0.1)


def fluctuations(n: int, seed: int) -> Tensor:
    """Return eigenvalues of ``sqrt(h/n) (K - E K)``, h = n^2, d = n/2, with E K from the Hermite series of tanh."""
    constants = activation_constants(torch.tanh)
    squares = (hermite_coefficients(torch.tanh, 30) / constants.std).square().tolist()
    source = torch.Generator().manual_seed(seed)
    x = torch.randn(n // 2, n, generator=source, dtype=torch.float64)
    x = x / x.norm(dim=0)
    features = torch.tanh(torch.randn(n**2, n // 2, generator=source, dtype=torch.float64) @ x) / constants.std
    expected = sum(square * (x.mT @ x) ** k for k, square in enumerate(squares)).fill_diagonal_(1.0)
    return torch.linalg.eigvalsh(math.sqrt(n) * (features.mT @ features / n**2 - expected))


def test_fluctuations_of_wide_layers_approach_the_deformed_semicircle() -> None:
    law, draws = deformed_semicircle(torch.tanh, 2, 1), {n: [fluctuations(n, seed) for seed in range(4)] for n in SIZES}
    falling([sum(distance(law, values) for values in draws[n]) / 4 for n in SIZES], 0.04)
    spans = [float(values[-1] - values[0]) / 2 for values in draws[SIZES[-1]]]
    assert sum(spans) / 4 == pytest.approx(law.edges[1], rel=0.15)


# Supports that are hard to find


@pytest.mark.parametrize(
    ("law", "bulks"),
    [
        # A narrow gap between a high and a low bulk, where a coarse grid sees a falling density.
        (lambda: deformed_semicircle(TANH, 100, 10), 3),
        # Almost linear: other real solutions come close to that of the law near the left edge.
        (lambda: conjugate_kernel_law([0.8103579769, 0.9999594888], 1453, [1453, 20895], 20905), 1),
        # A hard edge, at which the coefficients of three layers vanish together.
        (lambda: conjugate_kernel_law([0.98725, 0.92085, 0.50368], 122, [64, 659, 122], 162), 1),
        # A layer without linear part in the middle.
        (lambda: tangent_kernel_law([cubic(0.9), cubic(0.0), cubic(0.7)], 120, [80, 90, 400], 50), 1),
        # All eigenvalues in a bulk of width 0.03 around 1.
        (lambda: conjugate_kernel_law(0.5, 10, [10**6, 10**6], 10**5), 1),
    ],
    ids=["gap", "almost linear", "hard", "restart", "narrow"],
)
def test_bulks_are_found_and_integrate_to_mass_and_mean(law, bulks) -> None:
    law = law()
    assert len(law.bulks) == bulks
    x, weights = nodes(law, 20_000)
    assert weights.sum() == pytest.approx(1.0, abs=1e-6)
    assert (weights * x).sum() == pytest.approx(law.mean, rel=1e-6, abs=1e-6)


# Interface


@pytest.mark.parametrize(
    "law",
    [
        lambda: conjugate_kernel_law(torch.tanh, 300, [150, 100], 200),
        lambda: tangent_kernel_law(torch.tanh, 400, 100, 200),
        lambda: deformed_semicircle(torch.tanh, 100, 10),
    ],
    ids=["deep", "tangent", "semicircle"],
)
def test_quantiles_invert_shares_and_laws_are_pickled(law) -> None:
    law = law()
    start = law.atom if law.edges[0] >= law.atom_at else 0.0
    shares = torch.linspace(start + 1e-3, 1, 60, dtype=torch.float64)
    torch.testing.assert_close(law.cdf(law.quantile(shares)), shares, rtol=0, atol=1e-10)
    left, right = law.edges
    assert float(law.pdf(left - 1e-3)) == float(law.pdf(right + 1e-3)) == 0 < float(law.pdf(right - 1e-3))
    copy = pickle.loads(pickle.dumps(law))
    assert torch.equal(copy.pdf(torch.tensor([1.0])), law.pdf(torch.tensor([1.0])))
    moved = law.shifted(2.5)
    assert (moved.mean, moved.atom_at) == pytest.approx((law.mean + 2.5, law.atom_at + 2.5))
    torch.testing.assert_close(moved.quantile(shares), law.quantile(shares) + 2.5)


def test_spectra_are_compared_with_laws_of_any_sign_and_atom() -> None:
    """Points at the quantiles of a law have a distance of half a point from it, also next to an atom."""
    shares = (np.arange(200) + 0.5) / 200
    for law in (deformed_semicircle(1.0, 200, 100), tangent_kernel_law(torch.tanh, 400, 100, 200)):
        assert law.atom > 0
        values = law.quantile(shares)
        assert ks_distance(values, law) == pytest.approx(1 / 400, abs=1e-9)
        assert qq(law, values).trained == pytest.approx(values.numpy())
        assert len(spikes(values, law)) == 0
        assert len(spikes(torch.cat([values, torch.tensor([2 * law.edges[1]])]), law)) == 1
    with pytest.raises(InputError, match="must not be negative"):
        ks_distance([-1.0, 1.0], marchenko_pastur(2, 1))
    with pytest.raises(InputError, match="must be finite"):
        ks_distance([-1.0, math.nan], deformed_semicircle(0.5, 2, 1))


def test_bad_input_is_refused() -> None:
    with pytest.raises(InputError, match="one activation per width and at least one width, got 3 and 2"):
        conjugate_kernel_law([0.5, 0.5, 0.5], 10, [10, 10], 10)
    with pytest.raises(InputError, match="got 0 and 0"):
        conjugate_kernel_law(0.5, 10, [], 10)
    with pytest.raises(InputError, match="width must be positive and finite, got -3"):
        tangent_kernel_law(torch.tanh, 10, [10, -3], 10)
    with pytest.raises(InputError, match="activation must be callable, got float"):
        tangent_kernel_law(0.5, 10, 10, 10)
    with pytest.raises(InputError, match="trained must be"):
        tangent_kernel_law(torch.tanh, 10, 10, 10, trained="second")
    with pytest.raises(InputError, match="between -1 and 1"):
        deformed_semicircle(1.5, 10, 10)
    with pytest.raises(InputError, match="d must be positive"):
        deformed_semicircle(0.5, 10, 0)
