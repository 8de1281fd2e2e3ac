import numpy as np
import pytest

from featlearn.errors import InputError
from featlearn.plots import qq_plot, save_figure, spectrum_evolution, spectrum_histogram, tail_plot

BINS = ([0.0, 1.0, 2.0], [0.7, 0.3])


def test_histogram_shows_what_it_is_given(tmp_path):
    fig = spectrum_histogram(
        BINS, BINS, density=([0.0, 1.0], [1.0, 0.5]), edge=2.123456789, spikes=[3.0, 5.0], qq=([1.0], [2.0]), title="W"
    )
    ax, beside = fig.axes
    words = [t.get_text() for t in ax.get_legend().get_texts()]
    assert words == ["initial", "trained", "law", "edge 2.12"]
    assert [t.get_text() for t in ax.texts if t.get_text()] == ["5", "3"]
    assert ax.get_xlim()[1] > 5
    assert ax.get_ylim()[1] > 0.7
    assert beside.lines[-1].get_data()[1].tolist() == [2.0]
    save_figure(fig, tmp_path / "a.png")


def test_words_of_many_spikes_do_not_meet():
    ax = spectrum_histogram(BINS, spikes=[3.0, 3.05, 3.1, 3.15, 3.2]).axes[0]
    words = [t for t in ax.texts if t.get_text()]
    assert len(words) == 3
    assert sum(not t.get_text() for t in ax.texts) == 5  # arrows
    assert len({t.get_position()[1] for t in words}) == 3


def test_logarithmic_histogram_and_no_legend_entry_for_what_is_missing():
    ax = spectrum_histogram(([0.1, 1.0, 10.0], [1.0, 0.1]), log=True).axes[0]
    assert (ax.get_xscale(), ax.get_yscale()) == ("log", "log")
    assert [t.get_text() for t in ax.get_legend().get_texts()] == ["trained"]


def test_quantiles_and_the_diagonal():
    ax = qq_plot([1.0, 2.0], [1.0, 5.0]).axes[0]
    diagonal, dots = ax.lines
    assert diagonal.get_data()[0].tolist() == diagonal.get_data()[1].tolist() == [1.0, 5.0]
    assert dots.get_data()[1].tolist() == [1.0, 5.0]
    assert qq_plot([0.0, 2.0], [1.0, 5.0], log=True).axes[0].lines[-1].get_data()[0].tolist() == [2.0]


def test_tail_starts_at_its_share_and_falls_with_its_exponent():
    values = np.geomspace(1, 100, 50)
    ax = tail_plot(values[::-1], 10.0, 3.0, standard_error=0.123456).axes[0]
    dots, line = ax.lines[:2]
    assert dots.get_data()[1].tolist() == pytest.approx((1 - np.arange(50) / 50).tolist())
    x, y = line.get_data()
    assert y[0] == pytest.approx(np.mean(values >= 10))
    assert y[-1] / y[0] == pytest.approx((x[-1] / x[0]) ** -2)
    assert "3.00 $\\pm$ 0.12" in ax.get_legend().get_texts()[1].get_text()


def test_evolution_draws_the_largest_of_each_step():
    spectra = np.array([[1.0, 2.0, 3.0, 4.0], [1.0, 9.0, 2.0, 3.0]])
    fig = spectrum_evolution([0, 10], spectra, top=2, edge=4.0)
    ax = fig.axes[0]
    median, first, second, edge = ax.lines
    assert median.get_data()[1].tolist() == [2.5, 2.5]
    assert first.get_data()[1].tolist() == [4.0, 9.0]
    assert second.get_data()[1].tolist() == [3.0, 3.0]
    assert list(edge.get_ydata()) == [4.0, 4.0]
    words = [t.get_text() for t in fig.legends[0].get_texts()]
    assert words == ["5 to 95%", "25 to 75%", "median", "largest 2", "edge 4"]


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: spectrum_histogram(([0.0, 1.0], [1.0, 2.0])), "one edge more"),
        (lambda: spectrum_histogram(BINS, density=([0.0], [1.0, 2.0])), "density must be two vectors"),
        (lambda: qq_plot([1.0], [1.0, 2.0]), "equal length"),
        (lambda: tail_plot([0.0, 1.0], 1.0, 2.0), "Leave zeros out"),
        (lambda: tail_plot([1.0, 2.0], 3.0, 2.0), "above it"),
        (lambda: spectrum_evolution([0], [[1.0], [2.0]]), "one row of finite eigenvalues per step"),
        (lambda: spectrum_evolution([0], [[1.0, 2.0]], top=3), "top"),
    ],
)
def test_bad_arguments(call, message):
    with pytest.raises(InputError, match=message):
        call()
