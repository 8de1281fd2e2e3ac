"""What the NFA paper's experiments compute besides calling the library."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch

from featlearn.features import probe
from featlearn.models import mlp
from featlearn.papers._figures import diagonal_image
from featlearn.papers.nfa.fig3 import average_moments
from featlearn.papers.nfa.gaussian_training import watch_training
from featlearn.papers.nfa.layer_trajectories import measurement_steps, share_above, watch_layers
from featlearn.theory import readout_moments
from featlearn.training import fit


def test_moments_over_networks_are_those_expected() -> None:
    drawn = average_moments(24, 32, 600, seed=0)
    assert drawn == pytest.approx(readout_moments(24, 32), rel=0.15)


def test_measurements_end_with_the_last_step_and_come_closer_early() -> None:
    steps = measurement_steps(1000, 10)
    assert steps[0] >= 1
    assert steps[-1] == 1000
    assert all(a < b for a, b in pairwise(steps))
    assert steps[1] - steps[0] < steps[-1] - steps[-2]
    assert measurement_steps(2, 10) == [1, 2]


def test_layers_are_measured_against_their_start() -> None:
    X, y = torch.randn(40, 6, generator=torch.Generator().manual_seed(0)), torch.ones(40, 1)
    model, start = mlp([6, 8, 8, 1], generator=0), mlp([6, 8, 8, 1], generator=0)

    def train(reported: object) -> None:
        done = fit(model, (X, y), lr=0.1, steps=10, callback=reported)  # type: ignore[arg-type]
        reported(10, done.final_loss)  # type: ignore[operator]

    result = watch_layers(model, X, ["0", "2"], [2, 10], train)
    after = probe(model, X, initial=start)
    assert result["step"] == [2, 10]
    assert result["centered_nfc"][-1].tolist() == pytest.approx([after[n].centered_nfc for n in ("0", "2")], rel=1e-5)
    assert 0 <= share_above(result) <= 1


def test_gaussian_training_starts_from_its_own_weights_and_ends_trained() -> None:
    result = watch_training(64, 8, 16, 60, 30, 1.0, 0.1, 0, ("nfc", "centered_ratio"))
    assert result["step"] == [0, 5, 10, 30, 60]
    assert result["centered_ratio"][0].tolist() == [0, 0]
    assert float(result["train_loss"][-1]) < float(result["train_loss"][0])


def test_a_diagonal_is_a_picture() -> None:
    picture = diagonal_image(torch.arange(12.0), (3, 2, 2))
    assert picture.ravel().tolist() == pytest.approx([0, 1 / 3, 2 / 3, 1])
    assert diagonal_image(torch.ones(4), (1, 2, 2)).tolist() == [[0, 0], [0, 0]]
