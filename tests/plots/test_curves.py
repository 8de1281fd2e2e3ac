from __future__ import annotations

import numpy as np
import pytest

from featlearn.errors import InputError
from featlearn.plots import save_figure, step_curves

STEPS = np.arange(0, 101, 10)


def test_a_panel_a_number_and_a_curve_a_layer(tmp_path) -> None:
    panels = {
        "loss": {"": (STEPS, np.exp(-STEPS / 30))},
        "NFC": {"net.0": (STEPS, STEPS / 200), "net.2": (STEPS, STEPS / 100)},
    }
    fig = step_curves(panels, log_scale=("loss",), bounded=("NFC",), title="a run")
    first, second = fig.axes
    assert first.get_yscale() == "log"
    assert second.get_ylim()[1] == pytest.approx(1.02)
    assert [text.get_text() for text in fig.legends[0].get_texts()] == ["net.0", "net.2"]
    np.testing.assert_array_equal(second.lines[1].get_ydata(), STEPS / 100)
    colors = [line.get_color() for line in second.lines[:2]]
    assert len(set(colors)) == 2
    assert save_figure(fig, tmp_path / "a.png").stat().st_size > 5000


def test_log_spaced_steps_get_a_log_axis() -> None:
    steps = np.array([0, 1, 2, 3, 4, 6, 7, 10, 13, 18, 24, 32, 100, 1000, 5000])
    assert step_curves({"NFC": {"a": (steps, steps * 0.0)}}).axes[0].get_xscale() == "symlog"
    assert step_curves({"NFC": {"a": (STEPS, STEPS * 0.0)}}).axes[0].get_xscale() == "linear"


def test_many_layers_are_shaded_by_depth_and_only_the_ends_are_named() -> None:
    panel = {f"h.{i}": (STEPS, STEPS + i) for i in range(30)}
    fig = step_curves({"NFC": panel})
    assert [text.get_text() for text in fig.legends[0].get_texts()] == ["h.0", "h.29"]


def test_what_is_not_finite_is_left_out_and_a_loss_of_zero_has_no_log() -> None:
    values = np.where(STEPS == 50, np.nan, 1.0 - STEPS / 100)
    fig = step_curves({"loss": {"": (STEPS, values)}}, log_scale=("loss",))
    assert len(fig.axes[0].lines[0].get_xdata()) == 10
    assert fig.axes[0].get_yscale() == "linear"


def test_nothing_to_draw() -> None:
    for panels in ({}, {"NFC": {}}):
        with pytest.raises(InputError, match="at least one curve: no numbers were recorded"):
            step_curves(panels)
