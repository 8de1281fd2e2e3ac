import numpy as np
import pytest
import torch

from featlearn.errors import InputError
from featlearn.plots import matrix_row

EGOP = torch.tensor([[2.0, 0.0, 1.0], [0.0, 2.0, 0.0], [1.0, 0.0, 2.0]], dtype=torch.float64)
AGOP = torch.tensor([[4.0, -1.0, 0.0], [-1.0, 2.0, 0.0], [0.0, 0.0, 8.0]], requires_grad=True)


def panels(fig):
    return [ax for ax in fig.axes if ax.images]


def shown(ax):
    return np.asarray(ax.images[0].get_array())


def test_each_panel_is_divided_by_its_own_largest_entry():
    fig = matrix_row({"EGOP": EGOP, "AGOP": AGOP}, subtitles={"AGOP": "cosine with NFM 0.94"})
    first, second = panels(fig)
    np.testing.assert_allclose(shown(first), EGOP / 2)
    np.testing.assert_allclose(shown(second), AGOP.detach() / 8)
    assert [ax.get_title() for ax in panels(fig)] == ["EGOP", "AGOP"]
    assert [t.get_text() for t in second.texts] == ["cosine with NFM 0.94"]
    assert not first.texts


def test_shared_scale():
    first, second = panels(matrix_row({"EGOP": EGOP, "AGOP": AGOP}, share_scale=True))
    np.testing.assert_allclose(shown(first), EGOP / 8)
    np.testing.assert_allclose(shown(second), AGOP.detach() / 8)


def test_colors_are_centered_at_zero_if_there_are_negative_entries():
    for matrices, low in (({"a": EGOP}, 0.0), ({"a": EGOP, "b": AGOP}, -1.0), ({"a": EGOP - 1e-9}, 0.0)):
        fig = matrix_row(matrices)
        for ax in panels(fig):
            assert (ax.images[0].norm.vmin, ax.images[0].norm.vmax) == (low, 1.0)
        assert len(fig.axes) == len(matrices) + 1  # one color bar for all
    red, green, blue, _ = panels(matrix_row({"b": AGOP}))[0].images[0].cmap(0.5)
    assert red == pytest.approx(green, abs=0.02)
    assert red == pytest.approx(blue, abs=0.02)
    assert matrix_row({"b": AGOP}, cmap="viridis").axes[0].images[0].cmap.name == "viridis"


def test_crop_keeps_the_scale_of_the_whole():
    (ax,) = panels(matrix_row({"AGOP": AGOP}, crop=2, titles={"AGOP": "corner"}, title="Figure"))
    np.testing.assert_allclose(shown(ax), AGOP.detach()[:2, :2] / 8)
    assert ax.get_title() == "corner"
    assert ax.figure.get_suptitle() == "Figure"


def test_zeros_and_nan_are_drawn(tmp_path):
    fig = matrix_row({"zero": np.zeros((3, 3)), "nan": np.array([[np.nan, 1.0], [2.0, 4.0]])})
    zero, nan = panels(fig)
    assert (shown(zero) == 0).all()
    assert np.isnan(np.ma.filled(nan.images[0].get_array(), np.nan)[0, 0])
    assert shown(nan)[1, 1] == 1
    fig.savefig(tmp_path / "a.png")


def test_ticks_are_whole_numbers():
    fig = matrix_row({"a": np.eye(2), "b": np.eye(33)})
    for ax in panels(fig):
        for axis in (ax.xaxis, ax.yaxis):
            assert all(float(t) == int(t) for t in axis.get_ticklocs())


@pytest.mark.parametrize(
    ("matrices", "settings", "message"),
    [
        ({}, {}, "at least one"),
        ({"a": np.zeros(3)}, {}, "'a' must be a matrix"),
        ({"a": np.zeros((0, 0))}, {}, "'a' must be a matrix"),
        ({"a": np.eye(2)}, {"subtitles": {"b": "x"}}, "must name matrices in"),
        ({"a": np.eye(2)}, {"crop": 0}, "crop"),
        ({"a": np.eye(2)}, {"cmap": "octarine"}, "octarine"),
    ],
)
def test_bad_arguments(matrices, settings, message):
    with pytest.raises(InputError, match=message):
        matrix_row(matrices, **settings)
