"""Tests of comparisons of two spectra against loops, exact values, and laws whose quantiles are known."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from featlearn.errors import InputError
from featlearn.spectra import histogram, ks_distance, marchenko_pastur, qq


def naive_distance(a: np.ndarray, b: np.ndarray) -> float:
    points = [*a, *b]
    return max(abs(sum(v <= x for v in a) / len(a) - sum(v <= x for v in b) / len(b)) for x in points)


def test_distance_of_samples_against_a_loop() -> None:
    draw = np.random.default_rng(0)
    a, b = draw.exponential(size=37), np.append(draw.exponential(2.0, size=23), [0.5, 0.5])
    assert ks_distance(a, torch.tensor(b)) == pytest.approx(naive_distance(a, b), abs=1e-15)
    assert ks_distance(a, a[::-1]) == 0


def test_distance_from_a_law_at_its_own_quantiles() -> None:
    law = marchenko_pastur(300, 100)
    quantiles = law.quantile((np.arange(50) + 0.5) / 50)
    assert ks_distance(quantiles, law) == pytest.approx(0.01)  # half a step
    assert ks_distance(quantiles + 100, law) == pytest.approx(1)


def test_an_atom_is_met_by_zeros() -> None:
    law = marchenko_pastur(50, 100)
    positive = law.quantile(0.5 + (np.arange(50) + 0.5) / 100).numpy()
    assert ks_distance([*positive, *[1e-17] * 50], law) == pytest.approx(0.005)
    assert ks_distance(positive, law) == pytest.approx(0.505)  # just below the first of them: the atom and half a step


def test_quantiles_are_the_eigenvalues_and_interpolate_between_them() -> None:
    equal = qq([3.0, 1.0, 2.0], [30.0, 10.0, 20.0])
    assert equal.initial.tolist() == [1, 2, 3]
    assert equal.trained.tolist() == [10, 20, 30]
    assert equal.shares.tolist() == pytest.approx([1 / 6, 1 / 2, 5 / 6])
    uneven = qq([0.0, 1.0, 2.0, 3.0], [5.0, 7.0])
    assert uneven.initial.tolist() == [0.5, 2.5]
    law = marchenko_pastur(300, 100)
    assert qq(law, [1.0] * 7, points=3).initial.tolist() == law.quantile([1 / 6, 1 / 2, 5 / 6]).tolist()


def test_histogram_has_mass_one_and_keeps_far_eigenvalues_apart() -> None:
    bulk = marchenko_pastur(300, 100).quantile((np.arange(100) + 0.5) / 100).numpy()
    result = histogram([*bulk, 1e6, *[0.0] * 9])
    assert result.beyond.tolist() == [1e6]
    assert result.zeros == 9
    assert 5 < result.counts.size <= 100
    mass = (result.density * np.diff(result.edges)).sum()
    assert mass + 10 / 110 == pytest.approx(1)
    near = histogram([*bulk, 4.0])
    assert near.beyond.size == 0
    assert near.counts.sum() == 101


def test_histogram_on_equal_ratios_and_of_equal_values() -> None:
    values = np.geomspace(1e-3, 1e3, 61)
    result = histogram(values, bins=6, log=True)
    assert result.counts.tolist() == [10, 10, 10, 10, 10, 11]
    assert result.edges[1:] / result.edges[:-1] == pytest.approx(10)
    assert histogram([2.0, 2.0, 2.0]).counts.tolist() == [3]
    assert histogram([2.0, 2.0, 2.0], log=True).counts.tolist() == [3]
    assert histogram([0.0, 0.0]).zeros == 2


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: ks_distance([], [1.0]), "not empty"),
        (lambda: ks_distance([[1.0]], [1.0]), "vector"),
        (lambda: ks_distance([1.0, np.nan], [1.0]), "1 of 2"),
        (lambda: ks_distance([1.0, -1.0], [1.0]), "negative"),
        (lambda: ks_distance(marchenko_pastur(3, 2), [1.0]), "Pass the law as the second argument"),
        (lambda: qq([1.0], [1.0], points=0), "points"),
        (lambda: histogram([1.0], bins=0), "bins"),
        (lambda: histogram([1.0], bins=[1.0, 1.0]), "ascending"),
    ],
)
def test_bad_input(call, message: str) -> None:
    with pytest.raises(InputError, match=message):
        call()
