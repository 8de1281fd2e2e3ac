"""Tests of ranks and entropy of a spectrum."""

from __future__ import annotations

import math

import pytest
import torch

from featlearn.errors import InputError
from featlearn.spectra import effective_rank, spectral_entropy, stable_rank


def test_equal_eigenvalues_have_their_number_as_rank() -> None:
    values = [2.5] * 6 + [0.0] * 4
    assert stable_rank(values) == pytest.approx(6)
    assert effective_rank(values) == pytest.approx(6)
    assert spectral_entropy(values) == pytest.approx(math.log(6))
    assert spectral_entropy(values, normalized=True) == pytest.approx(1)


def test_against_norms_of_the_matrix_and_a_loop() -> None:
    w = torch.randn(30, 20, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    values = torch.linalg.eigvalsh(w.mT @ w)
    norm = torch.linalg.matrix_norm(w, 2)
    assert stable_rank(values) == pytest.approx(float(w.square().sum() / norm**2))
    total = sum(values.tolist())
    entropy = -sum(v / total * math.log(v / total) for v in values.tolist())
    assert spectral_entropy(values) == pytest.approx(entropy)
    assert effective_rank(values) == pytest.approx(math.exp(entropy))
    assert spectral_entropy(7 * values, normalized=True) == pytest.approx(entropy / math.log(20))


def test_rank_one() -> None:
    assert (stable_rank([3.0, 0.0]), effective_rank([3.0, 0.0])) == (1.0, 1.0)
    assert spectral_entropy([3.0, 0.0]) == spectral_entropy([3.0], normalized=True) == 0.0


def test_rounding_errors_do_not_count_in_the_rank() -> None:
    w = torch.randn(5, 200, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    small, large = torch.linalg.eigvalsh(w @ w.mT), torch.linalg.eigvalsh(w.mT @ w)
    assert effective_rank(large) == pytest.approx(effective_rank(small), rel=1e-10)


@pytest.mark.parametrize("function", [stable_rank, effective_rank, spectral_entropy])
def test_bad_spectra_are_refused(function) -> None:
    with pytest.raises(InputError, match="eigenvalues must not all be zero, got 3 zeros"):
        function(torch.zeros(3))
    with pytest.raises(InputError, match="negative"):
        function([1.0, -1.0])
    with pytest.raises(InputError, match="NaN or infinite"):
        function([1.0, math.inf])
