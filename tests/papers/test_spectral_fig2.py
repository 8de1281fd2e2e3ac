"""Tests of the horizontal lines of figure 2: the right edges of the laws at initialization."""

from __future__ import annotations

import matplotlib.pyplot as plt
import pytest
import torch

from featlearn.papers.experiment import Outcome
from featlearn.papers.spectral import fig2_learning_rate as fig2
from featlearn.spectra import conjugate_kernel_law, marchenko_pastur

SIZE = (200, 150, 100)


def test_lines_are_the_edges_of_the_laws_at_initialization() -> None:
    values = fig2._measure(1.0, SIZE, 32, 1, 0)
    n, h, d = SIZE
    edge = conjugate_kernel_law(torch.tanh, n, h, d).edges[1]
    assert values["edge CK"] == edge
    assert values["initial lambda1 CK"] == pytest.approx(edge, rel=0.15)
    assert values["initial lambda1 CK"] != edge  # the line is the law's, not the matrix's
    figure = fig2._transition_figure([[Outcome({"rate": 1.0}, values)]], fig2.Config(SIZE))
    flat = [
        [float(line.get_ydata()[0]) for line in axes.lines if len(set(line.get_xdata())) > 1] for axes in figure.axes
    ]
    assert flat[0] == pytest.approx([marchenko_pastur(h, d).edges[1] * h / d])
    assert flat[1] == pytest.approx([edge])
    plt.close(figure)
