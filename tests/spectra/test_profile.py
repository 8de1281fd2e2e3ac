"""The null of one matrix: edge, spikes and law of noise with the norms of its rows and columns."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from scipy.integrate import solve_ivp
from scipy.special import airy

from featlearn.errors import InputError
from featlearn.spectra import ks_distance, marchenko_pastur, profile_null, tracy_widom_sf, variance_profile
from featlearn.spectra._entry_statistics import entry_statistics
from featlearn.spectra._gram_eigenvalues import GramMatrix
from featlearn.spectra._profile_law import grid_law
from featlearn.spectra._profile_null import _Components


def scales(rng: np.random.Generator, n: int, spread: float) -> np.ndarray:
    return np.exp(2 * spread * rng.normal(size=n))


def noise(rng: np.random.Generator, h: int, d: int, rows: float = 0.0, columns: float = 0.0) -> np.ndarray:
    return np.sqrt(np.outer(scales(rng, h, rows), scales(rng, d, columns))) * rng.normal(size=(h, d))


def planted(rng: np.random.Generator, w: np.ndarray, strengths: list[float]) -> np.ndarray:
    u, v = (np.linalg.qr(rng.normal(size=(n, len(strengths))))[0] for n in w.shape)
    return w + (u * strengths) @ v.T


# --- Tracy-Widom ------------------------------------------------------------------------------------------------------


def test_tracy_widom_against_painleve() -> None:
    """F_1 = exp(-(1/2) int (q + (x - s) q^2)) with the Hastings-McLeod solution q'' = s q + 2 q^3."""
    ai, derivative = airy(6.0)[:2]

    def slope(s: float, y: np.ndarray) -> list[float]:
        q, dq, _, square, _ = y
        return [dq, s * q + 2 * q**3, -square, -q * q, -q]

    # y = q, q', int (x - s) q^2, int q^2, int q; the integrals start at their small values beyond 6.
    start = [ai, derivative, 0.0, 0.0, 0.0]
    points = np.array([4.0, 2.0, 0.98, 0.0, -1.27, -2.0])
    solution = solve_ivp(slope, (6.0, -2.0), start, t_eval=points, rtol=1e-12, atol=1e-15)
    f1 = np.exp(-(solution.y[4] + solution.y[2]) / 2)
    np.testing.assert_allclose(1 - tracy_widom_sf(points), f1, atol=2e-6)


def test_tracy_widom_far_out() -> None:
    values = tracy_widom_sf([4.9, 4.999, 5.001, 5.1, 8.0, 20.0, 1e4])
    assert (np.diff(values) <= 0).all()
    assert values[2] == pytest.approx(values[1], rel=0.01)
    assert 0 < values[5] < 1e-25
    assert values[6] == 0
    assert tracy_widom_sf(-20.0) == 1


# --- edge -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("h", "d"), [(400, 100), (100, 400), (50, 50), (1000, 3)])
def test_equal_variances_are_marchenko_pastur(h: int, d: int) -> None:
    variance, theta = 0.3, 1.7 * math.sqrt(0.3) * (h * d) ** 0.25
    profile = variance_profile(np.full(h, 3.0), np.full(d, variance / 3))
    assert profile.edge == pytest.approx(marchenko_pastur(h, d, variance=variance, scale=1.0).edges[1], rel=1e-10)
    johnstone = variance * (math.sqrt(h) + math.sqrt(d)) * (1 / math.sqrt(h) + 1 / math.sqrt(d)) ** (1 / 3)
    assert profile.scale == pytest.approx(johnstone, rel=1e-8)
    assert profile.threshold == pytest.approx(math.sqrt(variance) * (h * d) ** 0.25, rel=1e-6)
    # The spike and its vectors, from the closed form of Benaych-Georges and Nadakuditi.
    square = theta**2 / variance
    spike = variance * (square + h) * (square + d) / square
    assert profile.strength(spike) == pytest.approx(theta, rel=1e-8)
    left, right = profile.overlaps(spike)
    assert left == pytest.approx(1 - h * (d + square) / (square * (square + h)), rel=1e-6)
    assert right == pytest.approx(1 - d * (h + square) / (square * (square + d)), rel=1e-6)
    assert math.isnan(profile.strength(0.9 * profile.edge))
    assert np.isnan(profile.overlaps(0.9 * profile.edge)).all()


@pytest.mark.parametrize("spread", [(0.3, 0.0), (1.0, 0.0), (0.7, 1.0)])
def test_the_edge_is_where_the_equations_lose_stability(spread: tuple[float, float]) -> None:
    """To the right of the edge plain iteration converges to a real solution, to the left it does not."""
    rng = np.random.default_rng(0)
    r, c = scales(rng, 120, spread[0]), scales(rng, 80, spread[1])
    profile = variance_profile(r, c)

    def converges(z: float) -> bool:
        u = v = 0.0
        for _ in range(20_000):
            new_u, new_v = (c / (1 - c * v)).sum() / z, (r / (1 - r * u)).sum() / z
            if not (0 <= new_u < 1 / r.max() and 0 <= new_v < 1 / c.max()):
                return False
            if abs(new_u - u) < 1e-15 * new_u:
                return True
            u, v = new_u, new_v
        return False

    assert converges(profile.edge * (1 + 1e-4))
    assert not converges(profile.edge * (1 - 1e-4))


def test_scales_do_not_matter() -> None:
    rng = np.random.default_rng(1)
    r, c = scales(rng, 60, 0.5), scales(rng, 90, 0.5)
    one, other = variance_profile(r, c), variance_profile(1e-20 * r, 1e8 * c)
    assert other.edge == pytest.approx(1e-12 * one.edge, rel=1e-9)
    assert other.scale == pytest.approx(1e-12 * one.scale, rel=1e-6)
    # Rows and columns of zeros change nothing but the number of rows a signal is spread over.
    assert variance_profile([*r, 0.0, 0.0], c).edge == pytest.approx(one.edge, rel=1e-12)


@pytest.mark.parametrize("wrong", [[], [0.0, 0.0], [-1.0, 2.0], [math.nan, 1.0], [[1.0]]])
def test_wrong_factors(wrong: list) -> None:
    with pytest.raises(InputError, match="rows must be a vector"):
        variance_profile(wrong, [1.0])


# --- law --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("h", "d"), [(400, 100), (100, 400), (200, 200)])
def test_the_grid_law_of_equal_variances(h: int, d: int) -> None:
    profile = variance_profile(np.ones(h), np.ones(d))
    law, exact = grid_law(profile.rows, profile.columns, profile.edge), marchenko_pastur(max(h, d), min(h, d), scale=1)
    x = np.linspace(0, 1.1 * profile.edge, 300)[1:]
    np.testing.assert_allclose(law.cdf(x), exact.cdf(x), atol=5e-3)
    assert law.cdf(exact.quantile([0.1, 0.5, 0.9])).tolist() == pytest.approx([0.1, 0.5, 0.9], abs=5e-3)


@pytest.mark.parametrize("spread", [(0.3, 0.0), (0.0, 1.0), (0.5, 0.5)])
@pytest.mark.parametrize(("h", "d"), [(200, 200), (512, 128), (100, 1000)])
def test_eigenvalues_follow_the_grid_law(spread: tuple[float, float], h: int, d: int) -> None:
    rng = np.random.default_rng(0)
    w = noise(rng, h, d, *spread)
    null = profile_null(w)
    values = np.linalg.svd(w, compute_uv=False) ** 2
    assert null.distance(values) < 5 / min(h, d)
    plain = marchenko_pastur(max(h, d), min(h, d), variance=float((w**2).mean()), scale=1)
    assert null.distance(values) < 0.5 * ks_distance(values, plain)


@pytest.mark.parametrize("spread", [(0.0, 0.0), (0.3, 0.0), (0.7, 0.7), (0.0, 1.0)])
@pytest.mark.parametrize(("h", "d"), [(300, 200), (1024, 256), (200, 200), (64, 2000)])
def test_the_grid_law_has_the_moments_of_noise(spread: tuple[float, float], h: int, d: int) -> None:
    """E tr W^T W = sum r sum c, and E tr (W^T W)^2 = sum r^2 (sum c)^2 + (sum r)^2 sum c^2 up to 1/n."""
    rng = np.random.default_rng(0)
    r, c = scales(rng, h, spread[0]), scales(rng, d, spread[1])
    law = grid_law(r, c, variance_profile(r, c).edge)
    middle, share = (law.x[1:] + law.x[:-1]) / 2, np.diff(law.mass)
    n = min(h, d)
    assert middle @ share == pytest.approx(r.sum() * c.sum() / n, rel=0.01)
    second = ((r**2).sum() * c.sum() ** 2 + r.sum() ** 2 * (c**2).sum()) / n
    assert middle**2 @ share == pytest.approx(second, rel=0.015)


@pytest.mark.parametrize("spread", [(0.3, 0.0), (1.0, 0.0), (0.7, 1.0)])
def test_signals_against_plain_iteration(spread: tuple[float, float]) -> None:
    rng = np.random.default_rng(0)
    r, c = scales(rng, 90, spread[0]), scales(rng, 60, spread[1])
    profile = variance_profile(r, c)

    def resolvents(z: float) -> tuple[float, float]:
        u = v = 0.0
        for _ in range(20_000):
            u, v = (c / (1 - c * v)).sum() / z, (r / (1 - r * u)).sum() / z
        return (1 / (1 - r * u)).mean() / math.sqrt(z), (1 / (1 - c * v)).mean() / math.sqrt(z)

    z = profile.edge * np.array([1.01, 1.3, 20.0])
    for x, (strength, left, right) in zip(z, profile.signals(z), strict=True):
        p, q = resolvents(x)
        assert strength == pytest.approx(1 / math.sqrt(p * q), rel=1e-10)
        s, step = math.sqrt(x), 1e-5
        slope = (math.prod(resolvents((s + step) ** 2)) - math.prod(resolvents((s - step) ** 2))) / (2 * step)
        assert (left, right) == pytest.approx((-2 * p * p * q / slope, -2 * q * p * q / slope), rel=1e-4)
    assert np.isnan(profile.signals([0.9 * profile.edge])).all()
    assert profile.signals([1e12 * profile.edge])[0] == pytest.approx([1e6 * math.sqrt(profile.edge), 1, 1], rel=1e-12)


# --- sums and components ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_entry_statistics(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("featlearn.spectra._entry_statistics._BLOCK", 100)
    w = torch.randn(3, 17, 30, generator=torch.Generator().manual_seed(0), dtype=torch.float64).to(dtype)
    for blocks in (w, w.mT):
        result, exact = entry_statistics(blocks), blocks.double().numpy()
        np.testing.assert_allclose(result.rows, (exact**2).sum(2), rtol=1e-14)
        np.testing.assert_allclose(result.columns, (exact**2).sum(1), rtol=1e-14)
        np.testing.assert_allclose(result.totals, exact.sum((1, 2)), rtol=1e-12, atol=1e-12)
        assert result.varying == ""
    assert entry_statistics(torch.zeros(1, 4, 5)).varying == ""


@pytest.mark.parametrize("shape", [(300, 200), (50, 120), (40, 40), (1, 7), (7, 1), (2, 2)])
def test_gram_matrix(shape: tuple[int, int]) -> None:
    w = torch.randn(*shape, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    left, singular, right = np.linalg.svd(w.numpy(), full_matrices=False)
    n = min(shape)
    for scale in (1.0, 1e-120, 1e120):
        gram = GramMatrix(scale * w)
        np.testing.assert_allclose(gram.eigenvalues[::-1] / scale**2, singular**2, atol=1e-13 * singular[0] ** 2)
    exact = right.T if shape[0] >= shape[1] else left
    first, last = n // 3, n // 2 + 1
    overlaps = np.abs(np.sum(gram.leading_vectors(first, last) * exact[:, first:last], axis=0))
    np.testing.assert_allclose(overlaps, 1.0, atol=1e-9)


def test_norms_without_components() -> None:
    """A signal on a few rows and columns: the norms of the noise under it are those of the rest of the SVD."""
    rng = np.random.default_rng(0)
    for shape in ((120, 80), (80, 120)):
        w = rng.normal(size=shape)
        w[:20, :30] += 8 * np.outer(rng.normal(size=20), rng.normal(size=30))
        left, singular, right = np.linalg.svd(w, full_matrices=False)
        components = _Components(torch.from_numpy(w), None)
        for count in (1, 3, 10):
            part = (left[:, :count] * singular[:count]) @ right[:count]
            of_rows, of_columns = components.energies(count)
            np.testing.assert_allclose(of_rows, (part**2).sum(1), rtol=1e-9, atol=1e-9)
            np.testing.assert_allclose(of_columns, (part**2).sum(0), rtol=1e-9, atol=1e-9)


# --- spikes -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("spread", [(0.0, 0.0), (0.3, 0.0), (1.0, 0.0), (0.0, 1.0), (0.5, 0.5)])
def test_noise_has_no_spikes(spread: tuple[float, float]) -> None:
    rng = np.random.default_rng(0)
    shapes = [(60, 60), (200, 200), (512, 128), (100, 600)]
    found = [len(profile_null(noise(rng, h, d, *spread)).spikes) for h, d in shapes for _ in range(10)]
    assert sum(map(bool, found)) <= 2  # of 40; the level is 1%


@pytest.mark.parametrize("kind", ["sparse rows", "student", "large rows"])
def test_other_noise_has_no_spikes(kind: str) -> None:
    rng = np.random.default_rng(0)
    count = 0
    for _ in range(10):
        w = rng.standard_t(3, size=(300, 200)) if kind == "student" else rng.normal(size=(300, 200))
        if kind == "sparse rows":
            w *= rng.random((300, 200)) < rng.uniform(0.02, 1.0, size=(300, 1))
        if kind == "large rows":
            w[:5] *= 3
        count += bool(profile_null(w).spikes)
    assert count <= 1


@pytest.mark.parametrize(("rank", "strength"), [(1, 1.5), (3, 2.0), (8, 2.0), (30, 4.0)])
@pytest.mark.parametrize("rows", [0.0, 0.3])
def test_signals_are_found(rank: int, strength: float, rows: float) -> None:
    rng = np.random.default_rng(0)
    for _ in range(3):
        w = noise(rng, 300, 200, rows)
        r = (w**2).sum(1)
        threshold = variance_profile(r / r.sum() * 300, np.full(200, r.sum() / 300 / 200)).threshold
        null = profile_null(planted(rng, w, [strength * threshold] * rank))
        assert len(null.spikes) == rank
        top = null.spikes[0]
        assert all(spike.p_value <= 0.01 for spike in null.spikes)
        assert np.mean([spike.strength for spike in null.spikes]) == pytest.approx(strength * threshold, rel=0.12)
        assert 0 < top.left_overlap < 1
        assert not top.is_mean


def test_predicted_overlaps_are_those_of_the_signal() -> None:
    rng = np.random.default_rng(0)
    measured, predicted = [], []
    for _ in range(20):
        w = noise(rng, 400, 200, 0.3)
        u, v = rng.normal(size=400) / 20, rng.normal(size=200) / math.sqrt(200)
        u, v = u / np.linalg.norm(u), v / np.linalg.norm(v)
        signal = w + 100.0 * np.outer(u, v)
        left, _, right = np.linalg.svd(signal)
        measured.append(((left[:, 0] @ u) ** 2, (right[0] @ v) ** 2))
        (spike,) = profile_null(signal).spikes
        predicted.append((spike.left_overlap, spike.right_overlap))
    np.testing.assert_allclose(np.mean(predicted, 0), np.mean(measured, 0), atol=0.05)


def test_the_mean_is_named() -> None:
    rng = np.random.default_rng(0)
    (spike,) = profile_null(rng.uniform(0, 1, size=(300, 200))).spikes
    assert spike.is_mean
    assert spike.strength == pytest.approx(0.5 * math.sqrt(300 * 200), rel=0.02)


def test_blocks() -> None:
    rng = np.random.default_rng(0)
    blocks = np.stack([noise(rng, 100, 60), 5 * noise(rng, 100, 60), np.zeros((100, 60))])
    null = profile_null(blocks)
    assert len(null.profiles) == 2
    assert not null.spikes
    blocks[0] = planted(rng, blocks[0], [3 * (100 * 60) ** 0.25])
    (spike,) = profile_null(blocks).spikes
    assert spike.value < null.edge  # a spike of its block, though smaller than the noise of another


def test_wrong_arguments() -> None:
    for wrong in (torch.zeros(3, 3), torch.full((3, 3), math.nan), torch.ones(3), torch.ones(0, 3)):
        with pytest.raises(InputError, match="weight must"):
            profile_null(wrong)
    with pytest.raises(InputError, match="level"):
        profile_null(torch.eye(3), level=0.0)


def test_small_and_degenerate_matrices() -> None:
    for w in (torch.ones(1, 1), torch.ones(2, 5), torch.eye(4), torch.eye(3, 7)):
        null = profile_null(w)
        assert math.isfinite(null.edge)
