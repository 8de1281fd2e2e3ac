"""Tests of the layer map: its colors, its numbers, and that no text is cut or runs into another."""

from itertools import pairwise

import numpy as np
import pandas as pd
import pytest
import torch
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.colors import to_hex

from featlearn.errors import InputError
from featlearn.plots import layer_map

NAN = float("nan")
PARTS = ("attn.q", "attn.k", "attn.v", "attn.out", "mlp.c_fc", "mlp.c_proj")


def many(count):
    rng = np.random.default_rng(0)
    names = [f"transformer.encoder.h.{i // 6}.{PARTS[i % 6]}" for i in range(count)]
    columns = {
        "phase": rng.choice(["random-like", "bulk + spikes", "heavy tail"], count),
        "spikes": rng.integers(0, 1000, count),
        "stable rank / size": rng.random(count),
        "spectral norm": 10 ** rng.uniform(-5, 5, count),
    }
    return names, columns


def drawn(fig):
    canvas = FigureCanvasAgg(fig)
    canvas.draw()
    return canvas.get_renderer()


def colors(ax):
    """Hex color of each cell, column by column."""
    return [[to_hex(cell[0]) for cell in np.asarray(image.get_array())] for image in ax.images]


@pytest.mark.parametrize("count", [1, 8, 40, 50, 200, 1200])
def test_texts_are_whole_and_apart(count):
    names, columns = many(count)
    fig = layer_map(names, columns, title="A model")
    renderer = drawn(fig)
    ax = fig.axes[0]
    rows = [t.get_window_extent(renderer) for t in ax.get_yticklabels()]
    assert all(upper.y0 >= lower.y1 - 1 for upper, lower in pairwise(rows))
    heads = [t.get_window_extent(renderer) for t in ax.get_xticklabels()]
    assert all(a.x1 <= b.x0 for a, b in pairwise(heads))
    boxes = [*rows, *heads, *(t.get_window_extent(renderer) for t in ax.texts)]
    boxes += [legend.get_window_extent(renderer) for legend in fig.legends]
    width, height = fig.bbox.width, fig.bbox.height
    assert all(b.x0 >= 0 and b.x1 <= width and b.y0 >= 0 and b.y1 <= height for b in boxes)
    assert bool(ax.texts) == (count <= 40)
    assert bool(fig.legends) == (count > 40)
    assert fig.get_figheight() < 20
    if count <= 50:
        assert [t.get_text() for t in ax.get_yticklabels()] == names
    cells = {id(image): image.get_window_extent(renderer) for image in ax.images}
    for text in ax.texts:
        box = text.get_window_extent(renderer)
        assert any(c.x0 <= box.x0 and box.x1 <= c.x1 for c in cells.values()), text.get_text()


def test_many_rows_are_labeled_by_group():
    names, columns = many(200)
    labels = [t.get_text() for t in layer_map(names, columns).axes[0].get_yticklabels()]
    assert labels[:2] == ["transformer.encoder.h.0", "transformer.encoder.h.1"]
    assert len(labels) == 34
    plain = [f"layer{i}" for i in range(200)]  # no groups: every few rows
    labels = [t.get_text() for t in layer_map(plain, columns).axes[0].get_yticklabels()]
    assert 50 < len(labels) < 110
    assert labels[0] == "layer0"


def test_colors_go_from_the_least_to_the_largest_of_a_column():
    fig = layer_map(["a", "b", "c", "d"], {"x": [1.0, 2.0, 3.0, NAN], "y": torch.tensor([5.0, 5.0, 5.0, 5.0])})
    x, y = colors(fig.axes[0])
    light = [sum(int(color[i : i + 2], 16) for i in (1, 3, 5)) for color in x]
    assert light[0] > light[1] > light[2]
    assert x[3] == "#ededed"
    assert len(set(y)) == 1
    texts = [t.get_text() for t in fig.axes[0].texts]
    assert texts == ["1", "2", "3", "–", "5", "5", "5", "5"]
    assert [t.get_text() for t in fig.axes[0].get_xticklabels()] == ["x\n1 … 3", "y\n5"]


def test_colors_of_wide_ranges_are_logarithmic():
    values = [1.0, 10.0, 100.0]
    (log,) = colors(layer_map("abc", {"x": values}).axes[0])
    (even,) = colors(layer_map("abc", {"x": [0.0, 1.0, 2.0]}).axes[0])
    assert log == even
    (linear,) = colors(layer_map("abc", {"x": [0.0, 10.0, 100.0]}).axes[0])
    assert linear[1] != even[1]


def test_texts_have_their_colors():
    frame = pd.DataFrame({"phase": ["good", "bad", None, "good"], "n": pd.array([1, None, 3, 10**7], dtype="Int64")})
    ax = layer_map(list("abcd"), frame, colors={"good": "#00ff00"}).axes[0]
    phase, _ = colors(ax)
    assert phase[0] == phase[3] == "#00ff00"
    assert phase[2] == "#ededed"
    assert phase[1] not in ("#00ff00", "#ededed")
    assert [t.get_text() for t in ax.texts] == ["good", "bad", "–", "good", "1", "–", "3", "1.0e+07"]


def test_infinite_numbers_have_the_color_of_the_largest():
    ax = layer_map(list("abc"), {"x": [1.0, 2.0, float("inf")]}).axes[0]
    (x,) = colors(ax)
    assert x[1] == x[2]
    assert [t.get_text() for t in ax.texts][2] == "∞"


@pytest.mark.parametrize(
    ("names", "columns", "message"),
    [
        ([], {"x": []}, "must not be empty, got 0 names and 1 columns"),
        (["a"], {}, "must not be empty, got 1 names and 0 columns"),
        (["a"], {"x": [1.0, 2.0]}, "'x' must have one value per layer, 1; got 2"),
        (["a"], {"x": [object()]}, "'x' must have numbers or texts, got object"),
    ],
)
def test_bad_arguments(names, columns, message):
    with pytest.raises(InputError, match=message):
        layer_map(names, columns)
