"""Tests that varying norms of rows and columns are not classified as spikes or heavy tails."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import pytest
import safetensors.torch
import torch
from torch import Tensor, nn

from featlearn.spectra import bbp_threshold, marchenko_pastur, phase, profile_null, weight_eigenvalues, weight_spectra
from featlearn.spectra._entry_statistics import entry_statistics
from featlearn.spectra._gram_eigenvalues import gram_eigenvalues
from featlearn.spectra._norm_null import against_norms, parallel_rows, varying_norms
from featlearn.training._measurement import _spectrum_numbers

SIGNALS = ("bulk + spikes", "heavy tail")


def draw(seed: int, *shape: int) -> Tensor:
    return torch.from_numpy(np.random.default_rng(seed).normal(size=shape))


def scaled(seed: int, h: int, d: int, rows: float = 0.0, columns: float = 0.0) -> Tensor:
    scales = (rows * draw(seed + 1000, h, 1)).exp() * (columns * draw(seed + 2000, 1, d)).exp()
    return scales * draw(seed, h, d)


def spiked(seed: int, h: int, d: int, strength: float, rows: int | None = None, columns: int | None = None) -> Tensor:
    u, v = torch.zeros(h).double(), torch.zeros(d).double()
    u[:rows], v[:columns] = 1.0, draw(seed + 7, d)[:columns]
    return draw(seed, h, d) + strength * bbp_threshold(h, d) * torch.outer(u / u.norm(), v / v.norm())


@pytest.mark.parametrize("sd", [0.3, 1.0])
@pytest.mark.parametrize("side", ["rows", "columns"])
@pytest.mark.parametrize(("h", "d"), [(200, 200), (256, 64), (60, 300)])
def test_norms_alone_are_no_signal(h: int, d: int, side: str, sd: float) -> None:
    """Of 20 such matrices without a signal, 9 had spikes or tails for a log-sd of .3, and 20 for 1."""
    result = weight_spectra({f"m{seed}.weight": scaled(seed, h, d, **{side: sd}) for seed in range(10)})
    wrong = [name for name, spectrum in result.items() if spectrum.phase_name in SIGNALS]
    assert not wrong
    reasons = [s.phase.reason for s in result.values() if "norms vary" in s.phase.reason]
    assert reasons
    assert all(f"{side[:-1]} norms vary" in reason for reason in reasons)


def test_both_sides_sparse_rows_and_large_rows() -> None:
    random = np.random.default_rng(0)
    kept = torch.from_numpy(random.random((200, 150)) < random.uniform(0.02, 1, size=(200, 1)))
    large = draw(3, 200, 150)
    large[:4] *= 4
    result = weight_spectra(
        {
            "both.weight": scaled(0, 200, 150, 0.5, 0.5),
            "sparse.weight": draw(2, 200, 150) * kept * (1 + 3 * (torch.arange(200) < 5))[:, None],
            "large.weight": large,
            "experts": torch.stack([draw(4, 60, 60), 0.2 * draw(5, 60, 60), 5 * draw(6, 60, 60)]),
        }
    )
    assert {s.phase_name for s in result.values()} <= {"random-like", "undecided"}
    assert "row and column norms vary" in result["both"].phase.reason
    assert "row norms vary" in result["large"].phase.reason
    assert result["large"].spikes == ()
    assert result["large"].plot().axes


@pytest.mark.parametrize("seed", range(3))
def test_equal_norms_and_signals_keep_their_phase(seed: int) -> None:
    """The phase is the same as from the eigenvalues alone."""
    h, d = 240, 120
    cauchy = torch.from_numpy(np.random.default_rng(seed).standard_cauchy((h, d)))
    left, right = (torch.linalg.qr(draw(seed + k, n, d))[0] for k, n in ((1, h), (2, d)))
    powers = torch.from_numpy((1 - np.random.default_rng(seed).random(d)) ** -0.5)
    matrices = {
        "noise": (draw(seed, h, d), "random-like"),
        "mean": (draw(seed, h, d) + 0.3, "random-like"),
        "spike": (spiked(seed, h, d, 2.0), "bulk + spikes"),
        "two rows": (spiked(seed, h, d, 4.0, rows=2), "bulk + spikes"),
        "five rows": (spiked(seed, h, d, 2.5, rows=5), "bulk + spikes"),
        "five columns": (spiked(seed, h, d, 2.5, columns=5), "bulk + spikes"),
        "a corner": (spiked(seed, h, d, 3.0, rows=12, columns=12), "bulk + spikes"),
        "cauchy": (cauchy, "heavy tail"),
        "power law": ((left * powers.sqrt()) @ right.mT, "heavy tail"),
    }
    for name, (weight, wanted) in matrices.items():
        assert weight_spectra({"w.weight": weight})["w"].phase_name == wanted, name


@pytest.mark.parametrize("shape", [(64, 4000), (4000, 64), (128, 300)])
def test_a_weak_mean_is_named(shape: tuple[int, int]) -> None:
    """Noise hides most of a weak mean: the component is constant only as far as theory predicts for such a signal."""
    for seed in range(3):
        mean = 1.7 * bbp_threshold(*shape) / math.sqrt(shape[0] * shape[1])
        (spike,) = profile_null(draw(seed, *shape) + mean).spikes
        assert spike.is_mean
        assert spike.left_overlap * spike.right_overlap < 0.5
        (spike,) = profile_null(spiked(seed, *shape, 1.7)).spikes
        assert not spike.is_mean


def test_large_entries_at_the_same_places_are_not_parallel_rows() -> None:
    for seed in range(10):
        generator = torch.Generator().manual_seed(seed)
        sizes = torch.exp(torch.randn(1, 60, 500, generator=generator, dtype=torch.float64))
        sizes[:, :8, :25] *= 20  # eight large rows with their entries at the same columns
        weight = sizes * (2 * torch.randint(0, 2, sizes.shape, generator=generator) - 1)
        assert not parallel_rows(weight, entry_statistics(weight))
        weight[:, 1, 25:] += 40 * weight[:, 0, 25:]
        assert parallel_rows(weight, entry_statistics(weight))


def test_a_spike_that_is_mostly_one_row() -> None:
    """The eigenvalue is hardly larger than the squared norm of that row, but other rows are parallel to it."""
    for seed in range(5):
        v = draw(seed + 7, 150)
        weight = draw(seed, 200, 150)
        weight[:3] += 3 * bbp_threshold(200, 150) * torch.outer(torch.tensor([0.96, 0.25, 0.1]).double(), v / v.norm())
        assert weight_spectra({"w.weight": weight})["w"].phase_name == "bulk + spikes"
        weight[1:3] = draw(seed + 8, 2, 150)  # without parallel rows, only the norm is left
        assert weight_spectra({"w.weight": weight})["w"].phase_name in ("undecided", "random-like")


def test_a_spike_survives_varying_norms() -> None:
    for seed in range(3):
        weight = scaled(seed, 200, 200, rows=0.3) + 6 * (spiked(seed, 200, 200, 1.0) - draw(seed, 200, 200))
        assert "row" in varying_norms(weight[None])
        assert weight_spectra({"w.weight": weight})["w"].phase_name == "bulk + spikes"


def test_every_source_and_kind(tmp_path: Path) -> None:
    rows = (0.8 * draw(1, 96, 1)).exp().float()
    conv = nn.Conv2d(12, 96, 3)
    depthwise = nn.Conv1d(128, 128, 64, groups=2)
    linear = nn.Linear(80, 96, dtype=torch.bfloat16)
    with torch.no_grad():
        conv.weight.copy_(draw(2, 96, 12, 3, 3) * rows[:, :, None, None])
        depthwise.weight.copy_(draw(3, 128, 64, 64) * (0.8 * draw(4, 128, 1, 1)).exp())
        linear.weight.copy_(draw(5, 96, 80) * rows)
    model = nn.ModuleDict({"conv": conv, "grouped": depthwise, "linear": linear})
    safetensors.torch.save_file(model.state_dict(), tmp_path / "model.safetensors")
    torch.save(model.state_dict(), tmp_path / "model.pt")
    for source in (model, model.state_dict(), tmp_path / "model.safetensors", tmp_path / "model.pt"):
        result = weight_spectra(source)
        for name, spectrum in result.items():
            assert spectrum.phase_name in ("undecided", "random-like"), (name, str(spectrum))
            assert "norms vary" in spectrum.phase.reason
            assert "norms vary" in result.table(["reason"])["reason"][name]


@pytest.mark.parametrize("sd", [0.3, 1.0])
def test_scaled_rows_of_an_orthogonal_matrix(sd: float) -> None:
    """The spectrum shows only the norms."""
    for seed in range(10):
        weight = torch.linalg.qr(draw(seed, 200, 128))[0].mT * (sd * draw(seed + 1, 128, 1)).exp()
        assert weight_spectra({"w.weight": weight})["w"].phase_name == "undecided"


def test_against_a_start() -> None:
    """Rows that grow by different factors are not a new direction."""
    start = {"w.weight": draw(0, 200, 120), "s.weight": draw(1, 200, 120)}
    trained = {
        "w.weight": start["w.weight"] * (0.6 * draw(2, 200, 1)).exp(),
        "s.weight": start["s.weight"] + spiked(3, 200, 120, 2.0) - draw(3, 200, 120),
    }
    result = weight_spectra(trained, initial=start)
    assert phase(result["w"].initial, result["w"].eigenvalues).name in SIGNALS  # by the eigenvalues alone
    assert result["w"].phase_name == "undecided"
    assert "row norms vary" in result["w"].phase.reason
    assert result["s"].phase_name == "bulk + spikes"


def test_the_phase_of_the_monitor() -> None:
    """The eigenvalues of the monitor are divided by the number of rows."""
    before = draw(0, 200, 120)
    for after, wanted in (
        (before * (0.6 * draw(2, 200, 1)).exp(), "undecided"),
        (before + 3 * (spiked(3, 200, 120, 1.0) - draw(3, 200, 120)), "bulk + spikes"),
    ):
        values = [weight_eigenvalues(w, side="smaller").numpy() for w in (before, after)]
        numbers, result = _spectrum_numbers(*values, "w", lambda after=after: after[None])
        assert result is not None
        assert result.name == wanted
        assert (numbers["w.spikes"] > 0) == (wanted == "bulk + spikes")
        bare, alone = _spectrum_numbers(*values, "w")
        assert alone is not None
        assert alone.name in SIGNALS
        assert bare["w.top"] == numbers["w.top"]


@pytest.mark.parametrize("unit", [1e-30, 1e-18, 1e18, 1e30])
def test_the_unit_does_not_matter(unit: float) -> None:
    result = weight_spectra({"w.weight": unit * scaled(0, 100, 300, rows=0.5)})["w"]
    assert "row norms vary" in result.phase.reason
    result = weight_spectra({"w.weight": unit * spiked(0, 100, 300, 2.0, rows=5)})["w"]
    assert result.phase_name == "bulk + spikes"


# -- the parts ---------------------------------------------------------------------------------------------------------


def test_norms_vary_beyond_chance_only() -> None:
    random = np.random.default_rng(0)
    for seed in range(20):
        for weight in (
            draw(seed, 1, 100, 50),
            draw(seed, 4, 30, 30),
            torch.from_numpy(random.standard_cauchy((1, 100, 50))),
            torch.from_numpy(random.standard_t(2, size=(1, 50, 200))),
            torch.from_numpy((random.random((1, 80, 80)) < 0.05) * random.normal(size=(1, 80, 80))),
            torch.from_numpy(random.choice([-1.0, 1.0], size=(1, 60, 60))),
        ):
            assert varying_norms(weight) == ""
        assert varying_norms(scaled(seed, 200, 200, rows=0.1)[None]) == "row norms vary"
        assert varying_norms(scaled(seed, 200, 200, columns=0.1)[None]) == "column norms vary"
    for constant in (torch.zeros(1, 5, 5), torch.ones(1, 5, 5), torch.ones(1, 1, 9), torch.ones(1, 9, 1)):
        assert varying_norms(constant) == ""
    assert varying_norms(torch.arange(1.0, 6.0)[None, :, None].expand(1, 5, 5)) == "row norms vary"
    # Matrices with more than one block of rows.
    large = scaled(0, 3000, 700, rows=0.05)[None]
    assert varying_norms(large) == "row norms vary"
    assert varying_norms(draw(0, 1, 3000, 700)) == ""


def test_eigenvalues_with_random_signs() -> None:
    """They are those of a copy with the same entries up to sign, drawn again for the same seed only."""
    weight = torch.diag(torch.arange(1.0, 6.0))[None]  # signs do not change the eigenvalues of a diagonal matrix
    assert gram_eigenvalues(weight, signs=torch.Generator().manual_seed(0)).tolist() == [1, 4, 9, 16, 25]
    constant = torch.full((1, 300, 200), 0.1).half()
    values = [gram_eigenvalues(constant, signs=torch.Generator().manual_seed(seed)) for seed in (1, 1, 2)]
    assert np.array_equal(values[0], values[1])
    assert not np.array_equal(values[0], values[2])
    energy = float(constant.double().square().sum())
    assert values[0].sum() == pytest.approx(energy, rel=1e-12)
    edge = marchenko_pastur(300, 200, variance=energy / 60_000, scale=1).edges[1]
    assert values[0][-1] == pytest.approx(edge, rel=0.05)


def test_a_matrix_is_made_only_if_it_is_needed() -> None:
    def never() -> Tensor:
        raise AssertionError("make_weight was called")

    values = weight_eigenvalues(draw(0, 200, 100), scale=1).numpy()
    result = phase(weight_eigenvalues(draw(1, 200, 100), scale=1).numpy(), values)
    assert result.name == "invariant bulk"
    assert against_norms(result, never) is result
    with pytest.warns(DeprecationWarning, match="against_norms.found=.... is deprecated: use phase="):
        assert against_norms(found=result, make_weight=never) is result  # type: ignore[call-arg]
