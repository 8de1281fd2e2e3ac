from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from torch import nn

import featlearn as fl
from featlearn.training import DIAGNOSES, diagnose_layer

MOVED = {"weight_change": 0.5, "nfc": 0.6, "centered_ratio": 0.3}


@pytest.mark.parametrize(
    ("numbers", "phase", "word", "reported"),
    [
        ({"weight_change": 0.0, "nfc": 0.4}, None, "untrained", "NFC 0.40"),
        (MOVED, None, "learning", "50%"),
        ({"weight_change": 0.05, "nfc": 0.6, "centered_ratio": 0.01}, "invariant bulk", "lazy", "5%"),
        ({"weight_change": 0.05, "nfc": 0.6, "centered_ratio": 0.2}, None, "learning", "20%"),
        ({"weight_change": 0.15, "nfc": 0.6, "centered_ratio": 0.01}, None, "learning", "15%"),
        ({**MOVED, "nfc": 0.85, "centered_ratio": 0.7}, "bulk + spikes", "aligned", "70%"),
        ({**MOVED, "nfc": 0.85, "centered_ratio": 0.4}, None, "learning", "NFC 0.85"),
        ({**MOVED, "w.alpha": 2.31}, "heavy tail", "heavy-tailed", "2.31"),
        ({**MOVED, "relgrad": 0.02, "fact": 0.99}, None, "at convergence", "0.990"),
        ({**MOVED, "relgrad": 0.2, "fact": 0.99}, None, "learning", "50%"),
        ({**MOVED, "relgrad": 0.02, "fact": 0.9}, None, "learning", "50%"),
        ({**MOVED, "relgrad": 25.0, "fact": 0.5, "relgrad_noise": 24.0}, None, "undecided", "25"),
        ({**MOVED, "relgrad": 0.09, "fact": 0.97, "relgrad_noise": 0.12}, None, "undecided", "0.09"),
        ({**MOVED, "relgrad": 0.09, "fact": 0.97, "relgrad_noise": 0.05}, None, "at convergence", "0.970"),
        ({**MOVED, "relgrad": 0.02, "fact": 0.99, "relgrad_noise": 24.0}, None, "at convergence", "0.990"),
        ({**MOVED, "relgrad": 5.0, "fact": 0.5, "relgrad_noise": 24.0}, None, "learning", "50%"),
        ({**MOVED, "relgrad": 90.0, "fact": 0.5, "relgrad_noise": 24.0}, None, "learning", "50%"),
        ({**MOVED, "relgrad": 60.0, "fact": 0.5, "relgrad_noise": 24.0}, None, "undecided", "60"),
        ({**MOVED, "nfc": math.nan}, None, "collapsed", "no gradient"),
        ({**MOVED, "w.effective_rank": 2.0, "w.initial_effective_rank": 40.0}, None, "collapsed", "40.0 to 2.0"),
        ({**MOVED, "w.effective_rank": 30.0, "w.initial_effective_rank": 40.0}, "rank collapse", "collapsed", "30.0"),
        ({"weight_change": 0.02}, None, "lazy", "2%"),
    ],
)
def test_words_and_the_numbers_that_decided(numbers, phase, word, reported) -> None:
    reading = diagnose_layer(numbers, phase)
    assert reading.word == word
    assert reported in reading.text
    assert word in DIAGNOSES
    assert str(reading) == f"{word}: {reading.text}"


def test_a_single_output_is_aligned_by_construction_and_not_called_so() -> None:
    numbers = {"weight_change": 0.5, "nfc": 1.0, "centered_ratio": 0.9}
    assert diagnose_layer(numbers).word == "aligned"
    reading = diagnose_layer(numbers, trivial=True)
    assert reading.word == "learning"
    assert "by construction" in reading.text


def test_a_part_of_the_rows_without_a_noise_estimate_decides_nothing() -> None:
    numbers = {**MOVED, "relgrad": 5.0, "fact": 0.5, "relgrad_noise": math.nan}
    assert diagnose_layer(numbers, part=True).word == "undecided"
    assert diagnose_layer(numbers).word == "learning"
    assert (
        diagnose_layer({**MOVED, "relgrad": 0.05, "fact": 0.99, "relgrad_noise": 24.0}, part=True).word == "undecided"
    )


# -- what must not be praised ------------------------------------------------------------------------------------------

ALIGNED = {"weight_change": 0.5, "nfc": 0.95, "centered_ratio": 0.9}


def test_a_layer_that_is_dead_from_the_start_is_not_untrained() -> None:
    assert diagnose_layer({"weight_change": 0.0, "nfc": math.nan, "signal.dead_share": 1.0}).word == "collapsed"
    # A layer that passes no gradient is untrained at the start, and cut off when others have changed.
    assert diagnose_layer({"weight_change": 0.0, "nfc": math.nan}).word == "untrained"
    assert diagnose_layer({"weight_change": 0.0, "nfc": math.nan}, trained=True).word == "collapsed"
    assert diagnose_layer({"weight_change": 0.0, "nfc": 0.3}, trained=True).word == "untrained"  # a frozen layer


def test_a_layer_of_dead_units_is_not_aligned() -> None:
    assert diagnose_layer(ALIGNED).word == "aligned"
    reading = diagnose_layer({**ALIGNED, "signal.dead_share": 58 / 64})
    assert reading.word == "learning"
    assert "91% of the units are dead" in reading.text


def test_a_layer_of_a_training_that_diverged_is_not_praised() -> None:
    reading = diagnose_layer(ALIGNED, diverged=True)
    assert reading.word == "learning"
    assert "diverged" in reading.text
    converged = {**MOVED, "relgrad": 0.02, "fact": 0.99}
    assert diagnose_layer(converged, diverged=True).word == "learning"


def test_a_tail_of_all_eigenvalues_is_no_heavy_tail() -> None:
    numbers = {**MOVED, "w.alpha": 2.0}
    assert diagnose_layer({**numbers, "w.tail_share": 1.0}, "heavy tail").word == "learning"
    assert diagnose_layer({**numbers, "w.tail_share": 0.2}, "heavy tail").word == "heavy-tailed"


def trained(prepare: Callable[[nn.Sequential], None], lr: float = 0.1) -> fl.Monitor:
    """Train a classifier of ten classes, whose output layer has NFC 1 by construction."""
    generator = torch.Generator().manual_seed(0)
    X = torch.randn(128, 16, generator=generator)
    y = (X @ torch.randn(16, 10, generator=generator)).argmax(1)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(16, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))
    prepare(model)
    monitor = fl.Monitor(model, (X, y), every=[0, 30, 60], budget=None, measure="features")
    optimizer = torch.optim.SGD(model.parameters(), lr=lr)
    for step in range(60):
        loss = nn.functional.cross_entropy(model(X), y)
        monitor.step(step, loss=loss)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    monitor.last(60)
    return monitor


def test_the_output_layer_of_a_classifier_is_not_aligned() -> None:
    monitor = trained(lambda model: model[4].weight.data.mul_(0.01), lr=0.3)
    numbers = monitor.latest.layers["4"]
    assert numbers["nfc"] == pytest.approx(1.0)
    assert diagnose_layer(numbers).word == "aligned"  # without knowing that it is the last one
    assert monitor.latest.readings["4"].word == "learning"
    assert "by construction" in monitor.latest.readings["4"].text


def test_a_monitor_with_dead_layers_says_so() -> None:
    monitor = trained(lambda model: model[2].bias.data.fill_(-100.0))
    readings = monitor.latest.readings
    assert readings["2"].word == "collapsed"
    assert readings["0"].word == "collapsed"  # cut off from the outputs
    monitor = trained(lambda model: model[2].bias.data[:58].fill_(-100.0), lr=0.5)
    assert monitor.latest.readings["2"].word != "aligned"
