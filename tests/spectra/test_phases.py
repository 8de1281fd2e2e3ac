"""Tests of phases: simulated spectra whose phase is known, edges, tails, and spectra without enough evidence."""

from __future__ import annotations

import math

import numpy as np
import pytest

from featlearn.errors import InputError
from featlearn.spectra import (
    bbp_threshold,
    conjugate_kernel_law,
    edge_scale,
    empirical_edge,
    marchenko_pastur,
    phase,
    tail_evidence,
)

H, D = 300, 200
LAW = marchenko_pastur(H, D)


def eigenvalues(w: np.ndarray) -> np.ndarray:
    return np.linalg.eigvalsh(w.T @ w / w.shape[0])


def noise(seed: int, shape: tuple[int, int] = (H, D)) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal(shape)


def spiked(strengths: list[float], seed: int, profile: np.ndarray | float = 1.0) -> np.ndarray:
    """Return a bulk with signals of some multiples of the threshold; the profile is the variance of each column."""
    draw = np.random.default_rng(seed)
    u, v = (np.linalg.qr(draw.standard_normal((n, len(strengths))))[0] for n in (H, D))
    signal = (u * strengths) @ v.T * bbp_threshold(H, D)
    return eigenvalues(draw.standard_normal((H, D)) * np.sqrt(profile) + signal)


def test_two_draws_of_one_law_are_invariant() -> None:
    names = [phase(eigenvalues(noise(s)), eigenvalues(noise(1000 + s))).name for s in range(60)]
    names += [phase(LAW, eigenvalues(noise(s))).name for s in range(60)]
    assert names.count("invariant bulk") >= 119  # one in a hundred may differ


def test_scale_does_not_matter() -> None:
    result = phase(eigenvalues(noise(0)), 0.3 * eigenvalues(noise(1)))
    assert result.name == "invariant bulk"
    assert result.evidence is not None
    assert result.evidence.scale == pytest.approx(0.3, rel=0.03)
    assert result.evidence.raw_distance > 0.2 > 0.05 > result.evidence.bulk_distance


@pytest.mark.parametrize("start", ["eigenvalues", "law"])
@pytest.mark.parametrize("strengths", [[2.0], [30.0], [2.0, 2.0, 2.0], [2.0, 4.0, 8.0, 16.0], [3.0] * 12])
def test_planted_signals_are_spikes(start: str, strengths: list[float]) -> None:
    initial = LAW if start == "law" else eigenvalues(noise(99))
    for seed in range(4):
        result = phase(initial, spiked(strengths, seed))
        assert result.name == "bulk + spikes", str(result)
        assert result.evidence is not None
        assert len(result.evidence.spikes) == len(strengths)


def test_a_signal_below_the_threshold_is_not_seen() -> None:
    assert [phase(LAW, spiked([0.7], seed)).name for seed in range(10)] == ["invariant bulk"] * 10


def test_a_spike_of_the_start_is_not_new_unless_it_grows() -> None:
    start = spiked([3.0], 0)
    kept = phase(start, spiked([3.0], 1))
    assert kept.name == "invariant bulk", str(kept)
    assert kept.evidence is not None
    assert len(kept.evidence.kept_spikes) == 1
    assert phase(start, spiked([6.0], 1)).name == "bulk + spikes"
    assert phase(start, spiked([3.0, 3.1], 1)).name == "bulk + spikes"


def test_heavy_entries_and_populations_are_heavy_tails() -> None:
    draw = np.random.default_rng(0)
    initial = eigenvalues(noise(0))
    spectra = [eigenvalues(draw.standard_cauchy((H, D))) for _ in range(10)]
    spectra += [draw.uniform(size=D) ** (-1 / 1.5) for _ in range(10)]  # alpha 2.5
    spectra += [eigenvalues(draw.standard_normal((H, D)) / np.sqrt(draw.uniform(size=D))) for _ in range(10)]  # alpha 2
    names = [phase(initial, values).name for values in spectra]
    assert names.count("heavy tail") >= 27  # 98% of such tails pass; three deviations of thirty


def test_a_stretched_bulk_with_spikes_of_many_sizes_is_a_heavy_tail_that_says_so() -> None:
    stretched = np.linspace(0.5, 1.8, D)
    results = [phase(LAW, spiked([2.0, 4.0, 8.0], seed, stretched)) for seed in range(20)]
    assert {r.name for r in results} == {"heavy tail"}
    assert all(r.evidence is not None and len(r.evidence.spikes) == 3 for r in results)
    # The reason names the alternative if the end of the tail is not straight.
    assert sum("or the bulk has stretched to" in r.reason for r in results) >= 15
    # One spike, or three that are far from all others, are not a tail.
    for strengths in ([4.0], [20.0, 40.0, 80.0]):
        assert {phase(LAW, spiked(strengths, seed, stretched)).name for seed in range(10)} == {"bulk + spikes"}


@pytest.mark.parametrize("rank", [1, 5, 20, 100])
@pytest.mark.parametrize("rest", [0.0, 0.03])
def test_low_rank_is_a_collapse(rank: int, rest: float) -> None:
    draw = np.random.default_rng(rank)
    low = draw.standard_normal((H, rank)) @ draw.standard_normal((rank, D)) / math.sqrt(rank)
    result = phase(eigenvalues(noise(0)), eigenvalues(low + rest * noise(1)))
    assert result.name == "rank collapse", str(result)
    assert result.evidence is not None
    assert result.evidence.collapsed == pytest.approx(1 - rank / D, abs=0.02)


def test_a_collapse_to_eigenvalues_of_many_sizes() -> None:
    """Weight decay leaves five directions; the others are of sizes from 1e-13 to 1e-7, as after a long decay."""
    rng = np.random.default_rng(0)
    before = eigenvalues(rng.normal(size=(128, 64)))
    kept, gone = np.array([0.003, 0.0033, 0.0088, 0.0099, 0.0117]), np.exp(rng.uniform(-30, -16, 59))
    result = phase(before, np.concatenate([gone, kept]))
    assert result.name == "rank collapse", str(result)
    assert result.evidence is not None
    assert result.evidence.collapsed == pytest.approx(59 / 64)
    # A power law of the same range has no such gap.
    heavy = (1 - rng.random(64)) ** -2.0
    assert phase(before, heavy).name != "rank collapse"


def test_a_zero_matrix_has_collapsed() -> None:
    result = phase(LAW, np.zeros(D))
    assert result.name == "rank collapse"
    with pytest.raises(InputError, match="All trained eigenvalues are zero: there is nothing to draw"):
        result.plot()


def test_a_bulk_of_another_shape_is_undecided() -> None:
    result = phase(LAW, eigenvalues(noise(0, (2000, D))))
    assert result.name == "undecided"
    assert "changed its shape" in result.reason


def test_thin_evidence_is_undecided() -> None:
    few = phase([1.0, 2.0, 3.0], [1.0, 2.0, 3.0])
    assert (few.name, few.evidence) == ("undecided", None)
    assert "has 3 positive eigenvalues, at least 50 are required" in few.reason
    orthogonal = phase(np.ones(D), eigenvalues(noise(0)))
    assert orthogonal.name == "undecided"
    assert "all equal" in orthogonal.reason
    assert phase(np.ones(D), np.ones(D)).name == "undecided"
    assert phase(eigenvalues(noise(0)), np.ones(D)).name == "undecided"


def test_zeros_and_sizes() -> None:
    wide = marchenko_pastur(100, 200)
    values = np.linalg.eigvalsh(noise(0, (100, 200)).T @ noise(0, (100, 200)) / 100)
    with_zeros, without = phase(wide, values), phase(wide, values[100:], size=200)
    assert with_zeros.name == without.name == "invariant bulk"
    assert with_zeros.evidence is not None
    assert without.evidence is not None
    assert with_zeros.evidence.zeros == without.evidence.zeros == (100, 100)
    # Other numbers of eigenvalues, but the same ratio of sizes.
    assert phase(eigenvalues(noise(0, (150, 100))), eigenvalues(noise(1))).name == "invariant bulk"


def test_text_and_plot() -> None:
    result = phase(LAW, spiked([3.0], 0))
    assert str(result) == f"bulk + spikes: {result.reason}"
    assert result.reason.startswith("1 new eigenvalue (")
    assert len(result.plot().axes) == 2


@pytest.mark.parametrize(
    ("initial", "trained", "options", "message"),
    [
        (LAW, [], {}, "trained eigenvalues must be a vector that is not empty"),
        (LAW, np.ones((60, 60)), {}, "vector"),
        (LAW, [1.0, math.nan], {}, "1 of 2 trained eigenvalues are NaN"),
        ([1.0, math.inf], np.ones(60), {}, "1 of 2 initial eigenvalues"),
        (LAW, [1.0, -1.0], {}, "trained eigenvalues must not be negative"),
        (np.zeros(60), np.ones(60), {}, "all 60 initial eigenvalues are zero"),
        (LAW, np.ones(60), {"size": 59}, "size must be at least the number of eigenvalues, 60, got 59"),
        (LAW, np.ones(60), {"margin": -1.0}, "margin"),
    ],
)
def test_bad_input(initial, trained, options, message: str) -> None:
    with pytest.raises(InputError, match=message):
        phase(initial, trained, **options)


@pytest.mark.parametrize(
    ("law", "draw", "size"),
    [
        (LAW, lambda seed: eigenvalues(noise(seed)), D),
        (
            conjugate_kernel_law(0.964608689374, 200, 600, 400),
            lambda seed: eigenvalues(
                np.tanh(noise(seed, (600, 400)) @ noise(seed + 500, (400, 200)) / 20) / 0.62792873
            ),
            200,
        ),
    ],
    ids=["Marchenko-Pastur", "conjugate kernel"],
)
def test_the_edge_is_found_without_the_law(law, draw, size: int) -> None:
    results = [empirical_edge(draw(seed)) for seed in range(20)]
    assert all(r is not None for r in results)
    scale = edge_scale(law, size)
    errors = np.array([(r.edge - law.edges[1]) / scale for r in results if r is not None])
    assert abs(errors.mean()) < 1
    assert errors.std() < 1.5
    assert np.mean([r.scale for r in results if r is not None]) == pytest.approx(scale, rel=0.15)


def test_edges_need_eigenvalues_and_may_be_missing() -> None:
    with pytest.raises(InputError, match="at least 50 positive values for an edge, got 39"):
        empirical_edge(np.arange(1.0, 40.0))
    two = np.concatenate([np.linspace(1, 2, 100), np.linspace(50, 51, 60)])
    result = empirical_edge(two)
    assert result is None or result.spikes.size == 0  # sixty of them are a second bulk, not spikes


def test_tail_evidence_of_exact_power_laws_and_bulks() -> None:
    shares = (np.arange(300) + 0.5) / 300
    tail = tail_evidence(shares ** (-1 / 1.5))
    assert tail is not None
    assert tail.heavy
    assert tail.objections == ()
    assert tail.fit.alpha == pytest.approx(2.5, abs=0.1)
    bulk = tail_evidence(LAW.quantile(shares).numpy())
    assert bulk is not None
    assert not bulk.heavy
    one = tail_evidence([*LAW.quantile(shares).tolist(), 1e4])
    assert one is not None
    assert not one.heavy
    assert tail_evidence(np.ones(20)) is None
    assert tail_evidence([1.0, 2.0]) is None
