import itertools

import numpy as np
import pytest
import torch

from featlearn.errors import InputError
from featlearn.plots._bars import feature_matrix_picture, importance_bars
from featlearn.plots.style import save_figure


def bars(ax):
    return [bar.get_width() for bar in ax.patches]


def texts(ax):
    return [text.get_text() for text in ax.texts]


def names(axis):
    return [label.get_text() for label in axis.get_ticklabels()]


def heat(fig):
    return next(ax for ax in fig.axes if ax.images)


def gram(d, scale=1.0):
    factor = np.random.default_rng(0).standard_normal((3, d))
    return scale * factor.T @ factor


def test_bars_are_sorted_and_labeled():
    (ax,) = importance_bars(["a", "b", "c", "d"], torch.tensor([0.1, 123456.789, float("nan"), -2.0])).axes
    assert names(ax.yaxis) == ["b", "a", "d", "c"]
    assert bars(ax) == pytest.approx([123456.789, 0.1, -2.0, 0.0])
    assert texts(ax) == ["1.23e+05", "0.1", "-2", "n/a"]
    bottom, top = ax.get_ylim()
    assert bottom > top  # the first row is on top
    assert ax.get_xlabel() == "importance"
    low, high = ax.get_xlim()
    assert low < -2
    assert high > 123456.789


def test_the_largest_are_shown_and_the_axis_says_so():
    values = np.arange(200.0)
    (ax,) = importance_bars([f"x{i}" for i in range(200)], values, title="all").axes
    assert bars(ax) == list(values[:-21:-1])
    assert names(ax.yaxis)[0] == "x199"
    assert ax.get_xlabel() == "importance, 20 largest of 200"
    assert len(bars(importance_bars(["a", "b"], [1, 2], top=1).axes[0])) == 1


def test_zeros_are_drawn(tmp_path):
    fig = importance_bars(["a", "b"], [0, 0])
    save_figure(fig, tmp_path / "a.png")
    assert texts(fig.axes[0]) == ["0", "0"]
    save_figure(feature_matrix_picture(np.zeros((3, 3))), tmp_path / "b.png")


def test_picture_sorts_by_the_diagonal_and_centers_colors():
    matrix = np.array([[1.0, -0.5, 0.0], [-0.5, 4.0, 2.0], [0.0, 2.0, 2.0]])
    fig = feature_matrix_picture(torch.tensor(matrix), ["a", "b", "c"], title="three")
    ax = heat(fig)
    order = [1, 2, 0]
    np.testing.assert_allclose(ax.images[0].get_array(), matrix[np.ix_(order, order)] / 4)
    assert (ax.images[0].norm.vmin, ax.images[0].norm.vmax) == (-1, 1)
    assert names(ax.xaxis) == names(ax.yaxis) == ["b", "c", "a"]
    right = next(ax for ax in fig.axes if ax.get_title() == "importance")
    assert bars(right) == [4, 2, 1]
    assert right.get_ylim() == ax.get_ylim() == (2.5, -0.5)  # a bar beside its row
    assert fig.get_suptitle() == "three"


def test_picture_of_many_features_shows_the_largest():
    matrix = gram(200)
    fig = feature_matrix_picture(matrix, [f"x{i}" for i in range(200)])
    order = np.argsort(-matrix.diagonal())[:30]
    ax = heat(fig)
    # The scale is that of the whole matrix.
    np.testing.assert_allclose(ax.images[0].get_array(), matrix[np.ix_(order, order)] / np.abs(matrix).max())
    assert names(ax.yaxis) == [f"x{i}" for i in order]
    assert ax.get_title() == "feature matrix, 30 largest of 200"
    # Too many to name: ranks at the heat map, names at the first bars.
    fig = feature_matrix_picture(matrix, [f"x{i}" for i in range(200)], top=100)
    ax, right = heat(fig), next(ax for ax in fig.axes if ax.get_title() == "importance, 20 largest of 100")
    assert ax.images[0].get_array().shape == (100, 100)
    assert not any(name.startswith("x") for name in names(ax.yaxis))
    assert names(right.yaxis) == [f"x{i}" for i in order[:20]]


@pytest.mark.parametrize(("d", "name"), [(1, "x"), (6, "x"), (30, "a very long name of a column in a table number ")])
def test_nothing_is_cut_off_or_overlaps(d, name):
    fig = feature_matrix_picture(gram(d, 12345.678), [f"{name}{i}" for i in range(d)], title="title")
    fig.draw_without_rendering()
    inside = fig.bbox
    for ax in fig.axes:
        box = ax.get_tightbbox()
        assert box.x0 >= inside.x0 - 1
        assert box.y0 >= inside.y0 - 1
        assert box.x1 <= inside.x1 + 1
        assert box.y1 <= inside.y1 + 1
    rows = [label.get_window_extent() for label in heat(fig).get_yticklabels()]
    assert all(upper.y0 >= lower.y1 - 1 for upper, lower in itertools.pairwise(rows))
    columns = [label.get_window_extent() for label in heat(fig).get_xticklabels()]
    assert all(one.x1 <= other.x0 + 1 for one, other in itertools.pairwise(columns))


def test_nan_entries_are_gray():
    matrix = gram(3)
    matrix[0, 1] = np.nan
    image = heat(feature_matrix_picture(matrix)).images[0]
    assert image.cmap(np.ma.masked_invalid([np.nan]))[0][:3] == pytest.approx([0xBD / 255] * 3)
    assert np.nanmax(np.ma.filled(image.get_array(), np.nan)) == pytest.approx(1)


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda: importance_bars(["a"], [1, 2]), r"got 1 for numbers of shape \(2,\)"),
        (lambda: importance_bars("ab", [1, 2]), "one name per feature, got 1"),
        (lambda: importance_bars([], []), "one name per feature, got 0"),
        (lambda: importance_bars(["a"], [[1]]), r"\(1, 1\)"),
        (lambda: importance_bars(["a"], [1], top=0), "top"),
        (lambda: feature_matrix_picture(np.ones((2, 3))), "square"),
        (lambda: feature_matrix_picture(np.ones(3)), "must be a matrix"),
        (lambda: feature_matrix_picture(np.eye(2), ["a"]), "one name per feature, got 1"),
        (lambda: feature_matrix_picture(np.eye(2), top=2.5), "top"),
    ],
)
def test_bad_arguments(call, words):
    with pytest.raises(InputError, match=words):
        call()
