"""Figure 4 of the NFA paper at its own setting."""

from __future__ import annotations

import pytest
import torch

import featlearn as fl
from featlearn.papers.nfa.slo_alignment import SLOAlignment, slo_alignment
from featlearn.plots import save_figure


def check_large_scale(result: SLOAlignment) -> None:
    """Published: GD has UC-NFC .6 and a ratio of .003; SLO .90 to .96 and .97."""
    gd, slo = result.run("GD", 1.0), result.run("SLO", 1.0)
    assert gd.nfc <= 0.70
    assert gd.centered_ratio <= 0.05
    assert slo.nfc >= 0.88
    assert slo.centered_ratio >= 0.95
    assert slo.egop_cosine >= gd.egop_cosine + 0.25
    assert gd.history.final_loss < 1e-3  # both fit: GD by other means than features
    assert slo.history.final_loss < 0.2


@pytest.fixture(scope="module")
def large() -> SLOAlignment:
    return slo_alignment((1.0,), (0.03,), seed=0)


def test_at_scale_one_a_speed_limit_makes_features(large: SLOAlignment) -> None:
    check_large_scale(large)


def test_the_result_can_be_read(large: SLOAlignment, tmp_path: object) -> None:
    table = large.table()
    assert list(table.method) == ["GD", "SLO"]
    assert table.nfc[1] == large.run("SLO", 1.0).nfc
    assert len(large.runs[0].history.loss) == 600
    with pytest.raises(fl.InputError, match="there are GD from 1, SLO from 1"):
        large.run("SLO", 0.5)
    figure = large.plot()
    words = " ".join(text.get_text() for ax in figure.get_axes() for text in [ax.title, *ax.texts])
    assert "EGOP of the task" in words
    assert f"{large.run('SLO', 1.0).egop_cosine:.2f}" in words
    assert save_figure(figure, f"{tmp_path}/figure.png").stat().st_size > 10_000


def test_both_methods_start_from_one_network_and_seeds_are_seeds() -> None:
    a, b = (slo_alignment((1.0, 0.1), (0.03, 0.1), n=32, width=16, steps=3, seed=5) for _ in range(2))
    assert a.run("GD", 1.0).history.loss[0] == a.run("SLO", 1.0).history.loss[0]
    assert all(torch.equal(x.nfm, y.nfm) for x, y in zip(a.runs, b.runs, strict=True))


def test_a_rate_for_each_scale() -> None:
    with pytest.raises(fl.InputError, match="2 scales and 1 rates"):
        slo_alignment((1.0, 0.1), (0.1,))


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(4))
def test_the_whole_figure(seed: int) -> None:
    result = slo_alignment(seed=seed)
    check_large_scale(result)
    for run in result.runs:
        if run.method == "SLO":
            assert run.nfc >= 0.88
            assert run.centered_ratio >= 0.95
    ratios = [run.centered_ratio for run in result.runs if run.method == "GD"]
    assert ratios == sorted(ratios)  # small scales learn features by themselves
    assert ratios[-1] > 0.95
