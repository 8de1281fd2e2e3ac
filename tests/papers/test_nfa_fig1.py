"""The first figure of the NFA paper at its own setting."""

from __future__ import annotations

import pytest
import torch

import featlearn as fl
from featlearn.papers import ChainAlignment, chain_alignment


@pytest.fixture(scope="module")
def result() -> ChainAlignment:
    return chain_alignment(generator=0)


def test_a_trained_network_is_aligned_and_corruption_undoes_it(result: ChainAlignment) -> None:
    """Published: NFC .93, corrupted .53, spread 5.9; seeds 0-5 gave .935-.967, .59-.63 and 5.9-6.1."""
    first = result.after["0"]
    assert result.history.final_loss < 1e-5
    assert 0.92 <= first.nfc <= 0.97
    assert 0.5 <= result.mean_corrupted_nfc <= 0.72
    assert max(result.corrupted_nfc) < first.nfc - 0.1
    assert 5.2 <= result.spread <= 6.5


def test_training_raises_the_correlation(result: ChainAlignment) -> None:
    assert result.before["0"].nfc < 0.6 < result.after["0"].nfc
    # The scale of the first layer is small, so that nearly all of its correlation is learned.
    assert result.after["0"].centered_ratio > 0.9
    # One output: the last layer's NFC is 1 whatever the weights are.
    assert result.before["4"].nfc == pytest.approx(1.0)


def test_the_network_found_the_structure_of_the_task(result: ChainAlignment) -> None:
    assert fl.cosine(result.egop, result.after["0"].agop) > 0.9
    assert fl.cosine(result.egop, result.after["0"].nfm) > 0.85


def test_the_corrupted_matrix_keeps_the_spectrum_of_the_core(result: ChainAlignment) -> None:
    core = result.after["0"].ptk_covariance
    corrupted = fl.corrupt(core, 3)
    assert torch.allclose(
        torch.linalg.eigvalsh(core), torch.linalg.eigvalsh(corrupted), atol=1e-10 * float(core.norm())
    )


def test_the_picture_names_its_matrices(result: ChainAlignment) -> None:
    words = " ".join(text.get_text() for ax in result.plot().axes for text in [ax.title, *ax.texts])
    assert "EGOP" in words
    assert f"{result.after['0'].nfc:.2f}" in words


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(1, 6))
def test_over_seeds(seed: int) -> None:
    result = chain_alignment(generator=seed)
    assert 0.91 <= result.after["0"].nfc <= 0.975
    assert 0.5 <= result.mean_corrupted_nfc <= 0.72
    assert 5.2 <= result.spread <= 6.5
