"""Tests of the figure of one matrix: both edges, spikes, and the tail beside it."""

import numpy as np
import pytest
from matplotlib.backends.backend_agg import FigureCanvasAgg

from featlearn.errors import InputError
from featlearn.plots import matrix_spectrum, save_figure

VALUES = np.sort(1 + np.random.default_rng(0).pareto(1.5, size=200))
BINS = np.histogram(VALUES, bins=np.geomspace(1, VALUES[-1], 20), density=True)[::-1]
EDGES = {"Marchenko-Pastur edge": 4.0, "edge of noise with its norms": 5.5}
REASON = "a power law of exponent 2.50 +- 0.10 fits the largest 200 of 200 eigenvalues; " * 4


def figure(**changes):
    given = {"edges": EDGES, "tail": (1.5, 2.5, 0.1), "log": True, "title": "layer: heavy tail", "text": REASON}
    return matrix_spectrum(BINS, VALUES, **(given | changes))


def test_both_edges_spikes_and_the_tail(tmp_path):
    fig = figure(spikes=[30.0, 50.0], density=([1.0, 3.0], [0.5, 0.1]))
    ax, tail = fig.axes
    words = [t.get_text() for t in ax.get_legend().get_texts()]
    assert words == ["eigenvalues", "noise", "Marchenko-Pastur edge 4", "edge of noise with its norms 5.5"]
    lines = {line.get_label(): line for line in ax.lines}
    assert [float(lines[f"{name} {x:g}"].get_xdata()[0]) for name, x in EDGES.items()] == [4.0, 5.5]
    assert len({str(lines[f"{name} {x:g}"]._dash_pattern) for name, x in EDGES.items()}) == 2
    assert [t.get_text() for t in ax.texts if t.get_text()] == ["50", "30"]
    assert [t.get_text() for t in tail.get_legend().get_texts()][1:] == [
        "power law, $\\alpha$ = 2.50 $\\pm$ 0.10",
        "$x_{\\min}$ = 1.5",
    ]
    line = next(line for line in tail.lines if str(line.get_label()).startswith("power"))
    x, y = line.get_data()
    assert np.log(y[-1] / y[0]) / np.log(x[-1] / x[0]) == pytest.approx(-1.5)
    save_figure(fig, tmp_path / "matrix.png")


@pytest.mark.parametrize("tail", [(1.5, 2.5, 0.1), None])
def test_texts_are_whole_and_lines_do_not_cross_the_legends(tail):
    fig = figure(tail=tail, spikes=[40.0])
    canvas = FigureCanvasAgg(fig)
    canvas.draw()
    renderer = canvas.get_renderer()
    boxes = [t.get_window_extent(renderer) for t in (fig._suptitle, fig._supxlabel)]
    for ax in fig.axes:
        legend = ax.get_legend().get_window_extent(renderer)
        assert legend.y0 >= ax.get_window_extent(renderer).y1 - 1  # above the axes
        boxes.append(legend)
    assert all(b.x0 >= 0 and b.x1 <= fig.bbox.width and b.y0 >= 0 and b.y1 <= fig.bbox.height for b in boxes)
    title, text = boxes[:2]
    assert all(legend.y1 <= title.y0 for legend in boxes[2:])
    assert text.y1 < min(ax.get_tightbbox(renderer).y0 for ax in fig.axes) + 1


def test_many_spikes_are_ticks():
    ax = figure(spikes=np.linspace(20, 60, 30)).axes[0]
    (ticks,) = [line for line in ax.lines if line.get_marker() == "|"]
    assert ticks.get_xdata().size == 30
    assert "30 eigenvalues beyond" in [t.get_text() for t in ax.get_legend().get_texts()]
    assert not ax.texts


def test_bad_arguments():
    with pytest.raises(InputError, match="alpha above 1"):
        figure(tail=(1.5, 0.5, 0.1))
    with pytest.raises(InputError, match="one edge more"):
        matrix_spectrum(([1.0, 2.0], [1.0, 2.0]), VALUES)
