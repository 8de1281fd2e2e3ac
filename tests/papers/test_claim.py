from __future__ import annotations

import math

import pytest

from featlearn.errors import InputError
from featlearn.papers.claim import Claim, about, at_least, at_most, holds, not_tried


@pytest.mark.parametrize(
    ("claim", "verdict"),
    [
        (about("a", "b", 0.9, [0.3 + 0.6], 0.0, "exact"), "reproduced"),
        (about("a", "b", 0.9, [0.8, 0.94], 0.03, "seeds"), "reproduced"),
        (about("a", "b", 0.9, [0.8, 0.93], 0.03, "seeds"), "differs"),
        (about("a", "b", 0.9, [math.nan, 0.9], 0.03, "seeds"), "differs"),
        (at_least("a", "b", 0.9, [0.95, 0.86]), "reproduced"),
        (at_least("a", "b", 0.9, [0.95, 0.84]), "differs"),
        (at_most("a", "b", 0.9, [0.95, 0.84]), "reproduced"),
        (at_most("a", "b", 0.9, [0.95, 0.86]), "differs"),
        (holds("a", "b", [True, True]), "reproduced"),
        (holds("a", "b", [True, False]), "differs"),
        (holds("a", "b", [True, False], share=0.5), "reproduced"),
        (not_tried("a", "b", 0.9, "too large"), "not tried at this size"),
    ],
)
def test_the_verdict_is_that_of_the_mean_over_seeds(claim: Claim, verdict: str) -> None:
    assert claim.verdict == verdict


def test_what_people_read() -> None:
    claim = about("NFC", "figure 1", 0.93, [0.94, 0.96], 0.03, "seeds")
    assert (claim.published_text, claim.measured_text) == ("0.93", "0.95 ± 0.014")
    assert at_least("a", "b", 0.98, [0.99]).published_text == "≥ 0.98"
    assert at_least("a", "b", 0.98, [0.99]).measured_text == "0.99"
    assert holds("a", "b", [True, False, True]).measured_text == "2 of 3"
    assert not_tried("a", "b", 3.0, "too large").measured_text == "–"
    assert claim.remark("said").note == "said"


def test_a_claim_without_a_measurement_is_refused() -> None:
    with pytest.raises(InputError, match="use not_tried"):
        about("a", "b", 1.0, [], 0.1, "none")
    with pytest.raises(InputError, match="tolerance"):
        about("a", "b", 1.0, [1.0], math.nan, "none")
