"""Verdicts on matrices whose truth is known; `benchmarks.spectra_verdicts` has more kinds and draws."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from scipy.integrate import quad
from scipy.optimize import minimize

from featlearn.spectra import bbp_threshold, compare, power_law, tail_evidence, weight_spectra

H, D = 300, 200


def verdict(w: np.ndarray, initial: np.ndarray | None = None):
    start = None if initial is None else {"w": torch.from_numpy(initial)}
    return weight_spectra({"w": torch.from_numpy(np.ascontiguousarray(w))}, initial=start)["w"]


def signal(rng: np.random.Generator, strengths) -> np.ndarray:
    left, right = (np.linalg.qr(rng.normal(size=(n, len(strengths))))[0] for n in (H, D))
    return (left * np.asarray(strengths)) @ right.T


def correlated(rng: np.random.Generator) -> np.ndarray:
    w = rng.normal(size=(H, D))
    for j in range(1, D):
        w[:, j] = 0.8 * w[:, j - 1] + 0.6 * w[:, j]
    return w


@pytest.mark.parametrize("seed", range(3))
def test_many_spikes(seed: int) -> None:
    """More than a tenth of the eigenvalues, with much and with little noise, and with the initial weights."""
    rng = np.random.default_rng(seed)
    noise = rng.normal(size=(H, D))
    strong = signal(rng, [3 * bbp_threshold(H, D)] * 30)
    for spectrum in (verdict(noise + strong), verdict(0.02 * noise + strong), verdict(noise + strong, noise)):
        assert spectrum.phase_name == "bulk + spikes", str(spectrum)
        assert len(spectrum.spikes) == 30
    assert "nearly of rank 30" in verdict(0.02 * noise + strong).phase.reason


@pytest.mark.parametrize("seed", range(3))
def test_a_collapse_does_not_depend_on_the_scale_of_the_start(seed: int) -> None:
    rng = np.random.default_rng(seed)
    start = rng.normal(size=(H, D))
    spike = signal(rng, [2 * bbp_threshold(H, D)])
    for scale in (0.05, 0.09, 0.11, 0.5):
        assert verdict(scale * start + spike, start).phase_name == "bulk + spikes"
    low = signal(rng, rng.uniform(20, 35, 40))
    for unit in (1e-3, 1.0, 1e3):
        assert verdict(unit * (1e-3 * start + low), start).phase_name == "rank collapse"
        assert verdict(unit * low).phase_name == "rank collapse"
    tail = signal(rng, np.sqrt((1 - rng.random(D)) ** -1.0))
    assert verdict(tail, start).phase_name == "heavy tail"


@pytest.mark.parametrize("seed", range(5))
def test_correlated_rows_are_not_a_heavy_tail(seed: int) -> None:
    w = correlated(np.random.default_rng(seed))
    spectrum = verdict(w)
    assert spectrum.phase_name != "heavy tail", str(spectrum)
    tail = tail_evidence(spectrum.eigenvalues)
    assert tail is not None
    assert any("close together" in text or "lognormal" in text for text in tail.objections)


def test_a_power_law_beyond_noise() -> None:
    rng = np.random.default_rng(0)
    found = 0
    for _ in range(10):
        left, values, right = np.linalg.svd(rng.normal(size=(H, D)), full_matrices=False)
        edge = (math.sqrt(H) + math.sqrt(D)) ** 2
        values[:40] = np.sort(np.sqrt(edge * (1 - rng.random(40)) ** (-1 / 2)))[::-1]  # alpha 3
        found += verdict((left * values) @ right).phase_name == "heavy tail"
    assert found >= 7


def test_the_mean_is_not_a_spike() -> None:
    rng = np.random.default_rng(0)
    spectrum = verdict(rng.uniform(0, 1, size=(H, D)))
    assert spectrum.phase_name == "random-like"
    assert spectrum.spikes == ()
    assert "mean of the entries" in spectrum.phase.reason
    row = weight_spectra({"w": torch.rand(H, D)}).table("all").loc["w"]
    assert row["spikes"] == 0
    assert row["spikes_mp"] == 1
    assert row["p_value"] < 1e-9


def test_columns_of_the_table() -> None:
    rng = np.random.default_rng(0)
    rows = np.exp(rng.normal(size=(H, 1)))
    noise = rows * rng.normal(size=(H, D))
    theta = 3 * weight_spectra({"w": torch.from_numpy(noise)})["w"].null.threshold
    for w, spikes in ((noise, 0), (noise + signal(rng, [theta]), 1)):
        row = weight_spectra({"w": torch.from_numpy(w)}).table("all").loc["w"]
        assert row["spikes"] == spikes
        assert row["spikes_mp"] > 10
        assert "norms vary" in row["reason"]
        assert (row["p_value"] < 0.01) == bool(spikes)
    assert row["strength"] == pytest.approx(theta, rel=0.1)
    assert row["noise_edge"] < row["spectral_norm"] ** 2


@pytest.mark.parametrize("size", [20, 30, 45])
def test_few_eigenvalues_have_a_verdict(size: int) -> None:
    rng = np.random.default_rng(0)
    noise = rng.normal(size=(2 * size, size))
    assert verdict(noise).phase_name == "random-like"
    left, right = rng.normal(size=2 * size), rng.normal(size=size)
    strength = 4 * bbp_threshold(2 * size, size)
    spiked = noise + strength * np.outer(left / np.linalg.norm(left), right / np.linalg.norm(right))
    spectrum = verdict(spiked)
    assert spectrum.phase_name == "bulk + spikes"
    assert len(spectrum.spikes) == 1


def test_truncated_power_law() -> None:
    rng = np.random.default_rng(0)
    pure = (1 - rng.random(400)) ** (-1 / 1.5)
    comparison = compare(power_law(pure, x_min=1.0), "truncated")
    assert -2 < comparison.ratio <= 0
    assert comparison.p_value > 0.02
    # Rejection sampling of x^-1.5 exp(-x / 5).
    drawn = (1 - rng.random(400_000)) ** (-1 / 0.5)
    cut = drawn[rng.random(drawn.size) < np.exp(-(drawn - 1) / 5)][:4000]
    comparison = compare(power_law(cut, x_min=1.0), "truncated")
    assert comparison.p_value < 1e-6
    assert comparison.favors == "truncated"

    def loss(parameters: np.ndarray) -> float:
        alpha, rate = parameters
        normalizer = quad(lambda x: x**-alpha * math.exp(-rate * x), 1, math.inf)[0]
        return float(alpha * np.log(cut).mean() + rate * cut.mean() + math.log(normalizer))

    best = minimize(loss, [1.5, 0.2], method="Nelder-Mead").x
    assert list(comparison.parameters.values()) == pytest.approx(best.tolist(), rel=0.02)


def test_the_summary_has_the_names_of_weightwatcher() -> None:
    rng = np.random.default_rng(0)
    matrices = {
        "tail": signal(rng, np.sqrt((1 - rng.random(D)) ** -2.0)),
        "noise": rng.normal(size=(H, D)),
        "zero": np.zeros((H, D)),
    }
    result = weight_spectra({name: torch.from_numpy(w) for name, w in matrices.items()})
    summary = result.summary()
    table = result.table("all")
    assert summary["matrices"] == 3
    assert summary["over-trained"] == ["tail"]
    assert summary["under-trained"] == ["noise"]
    norms = [np.linalg.norm(matrices[name]) ** 2 for name in ("tail", "noise")]
    assert summary["log_norm"] == pytest.approx(np.log10(norms).mean())
    tops = [np.linalg.norm(matrices[name], 2) ** 2 for name in ("tail", "noise")]
    assert summary["log_spectral_norm"] == pytest.approx(np.log10(tops).mean())
    assert summary["alpha_weighted"] == pytest.approx(table["weighted_alpha_log"].mean())
    assert summary["mp_softrank"] == pytest.approx(table["mp_softrank"].mean())
    assert table["mp_softrank"]["noise"] == pytest.approx(1.0, abs=0.1)
