from itertools import pairwise

import numpy as np
import pytest
import torch
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.colors import to_hex

from featlearn.errors import InputError
from featlearn.plots import PALETTE, layer_bars

NAN = float("nan")


def marks(ax, hollow):
    """Color and (value, row) of the dots of each measure."""
    return {
        to_hex(line.get_color()).upper(): np.column_stack(line.get_data())
        for line in ax.lines
        if line.get_marker() not in ("", "None", "|") and (line.get_fillstyle() == "none") == hollow
    }


def test_dots_stand_where_the_numbers_are():
    fig = layer_bars(["0", "2", "4"], {"NFC": torch.tensor([0.9, 0.8, 0.7]), "corrupted": [0.6, NAN, 0.5]})
    ax = fig.axes[0]
    full, hollow = marks(ax, False), marks(ax, True)
    np.testing.assert_allclose(full[PALETTE[0]][:, 0], [0.9, 0.8, 0.7], rtol=1e-6)
    np.testing.assert_allclose(full[PALETTE[1]][:, 0], [0.6, 0.5])
    # Rows are told from their middle, the first layer on top.
    assert full[PALETTE[0]][:, 1].round().tolist() == [0, 1, 2]
    assert full[PALETTE[1]][:, 1].round().tolist() == [0, 2]
    assert (full[PALETTE[0]][:, 1] < [0, 1, 2]).all()
    bottom, top = ax.get_ylim()
    assert bottom > top
    assert [t.get_text() for t in ax.get_yticklabels()] == ["0", "2", "4"]
    assert list(hollow) == [PALETTE[1]]
    assert hollow[PALETTE[1]][:, 1].round().tolist() == [1]
    assert [t.get_text() for t in ax.texts] == ["n/a"]
    assert [t.get_text() for t in fig.legends[0].get_texts()] == ["NFC", "corrupted"]


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        ([0.1, 0.9], (0, 1)),
        ([-0.01, 0.9], (-0.1, 1)),
        ([-0.93, 0.9], (-1, 1)),
        ([NAN, NAN], (0, 1)),
        ([0.5, 3.0], (0, 3)),
    ],
)
def test_range(values, expected):
    low, high = layer_bars(["a", "b"], {"NFC": values}).axes[0].get_xlim()
    width = expected[1] - expected[0]
    assert (low, high) == pytest.approx((expected[0] - 0.02 * width, expected[1] + 0.02 * width))


def test_given_range_and_words():
    fig = layer_bars(["a"], {"ratio": [0.2]}, limits=(0, 0.5), xlabel="ratio", title="Title")
    assert fig.axes[0].get_xlim()[1] == pytest.approx(0.51)
    assert fig.axes[0].get_xlabel() == "ratio"
    assert fig.get_suptitle() == "Title"
    assert not fig.legends
    two = layer_bars(["a"], {"one": [0.2], "two": [0.3]}, title="Title")
    assert two.legends[0].get_title().get_text() == "Title"


def test_error_bars():
    fig = layer_bars(["a", "b", "c"], {"NFC": [0.5, NAN, 0.7]}, errors={"NFC": [0.1, 0.1, NAN]})
    (container,) = fig.axes[0].containers
    (bars,) = container.lines[2]
    np.testing.assert_allclose([s[:, 0] for s in bars.get_segments()], [[0.4, 0.6]])


def test_sixty_long_names_fit_without_touching():
    names = [f"transformer.h.{i}.{part}" for i in range(15) for part in ("attn.c_attn", "attn.c_proj", "fc", "x")]
    values = {m: np.linspace(0, 1, 60) for m in ("NFC", "centered NFC", "corrupted")}
    fig = layer_bars(names, values, title="GPT-2")
    canvas = FigureCanvasAgg(fig)
    canvas.draw()
    renderer = canvas.get_renderer()
    boxes = [t.get_window_extent(renderer) for t in fig.axes[0].get_yticklabels()]
    assert len(boxes) == 60
    assert min(b.x0 for b in boxes) >= 0
    assert all(upper.y0 > lower.y1 for upper, lower in pairwise(boxes))
    legend = fig.legends[0].get_window_extent(renderer)
    assert legend.x0 >= 0
    assert legend.x1 <= fig.bbox.width
    assert legend.y0 > max(t.get_window_extent(renderer).y1 for t in fig.axes[0].get_xticklabels())


def test_a_very_long_name_keeps_both_ends():
    name = "encoder." + "inner." * 20 + "weight"
    text = layer_bars([name], {"NFC": [0.5]}).axes[0].get_yticklabels()[0].get_text()
    assert len(text) < 61
    assert text.startswith("encoder.")
    assert text.endswith("weight")


@pytest.mark.parametrize(
    ("names", "values", "errors", "message"),
    [
        ([], {"a": []}, None, "must not be empty, got 0 names and 1 measures"),
        (["x"], {}, None, "must not be empty, got 1 names and 0 measures"),
        (["x"], {"a": [1.0, 2.0]}, None, "'a' must have one number per layer"),
        (["x"], {"a": [1.0]}, {"a": [1.0, 2.0]}, "'a' must have one number per layer"),
        (["x"], {"a": [1.0]}, {"b": [1.0]}, "errors must be of measures in values"),
        (["x"], {str(i): [1.0] for i in range(8)}, None, "two figures"),
    ],
)
def test_bad_arguments(names, values, errors, message):
    with pytest.raises(InputError, match=message):
        layer_bars(names, values, errors)
