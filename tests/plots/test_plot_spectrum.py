import numpy as np
import pytest
import torch

from featlearn.errors import InputError
from featlearn.plots import spectrum


def test_sorted_on_a_logarithmic_axis():
    fig = spectrum({"K": torch.tensor([1.0, 100.0, 10.0]), "F": [0.5, 0.0, 2.0, -1e-18, 1e-16]}, title="Spectra")
    (ax,) = fig.axes
    first, second = ax.lines
    assert first.get_data()[0].tolist() == [1, 2, 3]
    assert first.get_data()[1].tolist() == [100, 10, 1]
    assert second.get_data()[1].tolist() == [2.0, 0.5]
    assert ax.get_yscale() == "log"
    assert ax.get_xscale() == "linear"
    assert [t.get_text() for t in ax.get_legend().get_texts()] == ["K", "F (3 of 5 at zero)"]
    assert fig.get_suptitle() == "Spectra"
    assert min(ax.get_xticks()) == 1


def test_one_set_needs_no_legend_and_ranks_may_be_logarithmic():
    ax = spectrum({"K": 1 / np.arange(1.0, 1000.0) ** 2}, log_rank=True, ylabel="singular value").axes[0]
    assert ax.get_legend() is None
    assert ax.get_xscale() == "log"
    assert ax.get_ylabel() == "singular value"


def test_zero_spectrum_is_drawn_empty(tmp_path):
    fig = spectrum({"K": np.zeros(4)})
    fig.savefig(tmp_path / "a.png")
    assert fig.axes[0].get_legend().get_texts()[0].get_text() == "K (4 of 4 at zero)"


@pytest.mark.parametrize("values", [{}, {"a": []}, {"a": [[1.0]]}, {"a": [float("nan")]}])
def test_bad_arguments(values):
    with pytest.raises(InputError):
        spectrum(values)
