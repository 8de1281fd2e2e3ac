"""What the spectral paper claims of table 1 and figure 2, at half of its size and over seeds."""

import pytest
import torch

import featlearn as fl
from featlearn.lab.experiments import learning_rate_transition, spectral_case

pytestmark = pytest.mark.slow

SEEDS = (0, 1, 2)
LAW = fl.spectra.marchenko_pastur(750, 500)


@pytest.fixture(scope="module", params=SEEDS)
def cases(request):
    return {case: spectral_case(case, seed=request.param) for case in (1, 2, 3, 4)}


def test_the_bulk_stays_in_cases_1_and_2(cases):
    for case in (1, 2):
        result = cases[case]
        assert len(fl.spectra.spikes(result.weights.trained, LAW)) == 0
        assert result.weights.alignment[1] < 0.15
        for evolution, share in ((result.weights, 0.01), (result.ck, 0.01), (result.ntk, 0.1)):
            # Eigenvalue by eigenvalue, in units of the largest.
            moved = (evolution.trained - evolution.initial).abs().max() / evolution.initial[-1]
            assert float(moved) < share


def test_one_spike_leaves_the_bulk_in_case_3_and_points_at_the_feature(cases):
    result = cases[3]
    assert result.history.stopped == "loss"
    assert len(fl.spectra.spikes(result.weights.trained, LAW)) == 1
    assert result.weights.alignment[0] < 0.15
    assert result.weights.alignment[1] > 0.75
    assert result.ck.alignment[1] > 0.8
    # The bulk stays: all but the spike are where they were.
    rest = result.weights.trained[:-1] - result.weights.initial[:-1]
    assert float(rest.abs().max()) < 0.1
