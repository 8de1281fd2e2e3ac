from __future__ import annotations

import math

import pytest

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
