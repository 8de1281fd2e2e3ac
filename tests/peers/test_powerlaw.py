"""Tail fits against the powerlaw package."""

from __future__ import annotations

import warnings

import numpy as np
import pytest

from featlearn.spectra import compare, marchenko_pastur, power_law

powerlaw = pytest.importorskip("powerlaw", reason="the powerlaw package is not installed: pip install powerlaw")
pytestmark = pytest.mark.peers


def spectra() -> dict[str, np.ndarray]:
    draw = np.random.default_rng(0)
    bulk = marchenko_pastur(800, 450).quantile(draw.uniform(size=450)).numpy()
    entries = draw.standard_t(2.5, size=(400, 200))
    return {
        "power law": draw.uniform(size=600) ** (-1 / 1.5),
        "steep": draw.uniform(size=400) ** (-1 / 4.5),
        "bulk and tail": np.concatenate([bulk, 2 + draw.pareto(2.0, 50)]),
        "lognormal": np.exp(draw.standard_normal(500)),
        "heavy entries": np.linalg.eigvalsh(entries.T @ entries / 400),
        "ties": np.repeat(draw.uniform(size=150) ** -1.0, 3),
    }


@pytest.fixture(params=spectra())
def values(request: pytest.FixtureRequest) -> np.ndarray:
    return spectra()[request.param]


def package(values: np.ndarray) -> powerlaw.Fit:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of divisions in the tails of one or two eigenvalues that it tries as well
        # Without the range it keeps alpha below 3.
        return powerlaw.Fit(values, verbose=False, parameter_ranges={"alpha": [1, 200]})


def test_alpha_and_its_start(values: np.ndarray) -> None:
    theirs = package(values)
    ours = power_law(values)
    if ours.n_tail == 10 or (values >= theirs.xmin).sum() < 10:
        pytest.fail("the package's tail is shorter than what is tried here: choose another spectrum")
    assert ours.x_min == pytest.approx(theirs.xmin, rel=1e-12)
    assert ours.alpha == pytest.approx(theirs.alpha, abs=1e-6)
    assert ours.distance == pytest.approx(theirs.D, abs=1e-9)
    assert ours.standard_error == pytest.approx(theirs.sigma, rel=1e-6)


def test_likelihood_ratio_against_an_exponential_tail(values: np.ndarray) -> None:
    theirs, ours = package(values), power_law(values)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        ratio, p = theirs.distribution_compare("power_law", "exponential", normalized_ratio=False)
    result = compare(ours, "exponential")
    assert result.ratio == pytest.approx(ratio, rel=1e-4, abs=1e-4)
    assert result.p_value == pytest.approx(p, rel=1e-3, abs=1e-4)
