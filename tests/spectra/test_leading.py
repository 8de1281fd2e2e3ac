"""Tests of leading vectors and their alignment, against full decompositions and planted directions."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from featlearn.errors import InputError
from featlearn.linalg import principal_angles
from featlearn.spectra import leading_alignment, leading_vectors, subspace_alignment


def random(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


@pytest.mark.parametrize("shape", [(40, 30), (300, 420), (420, 300)])
@pytest.mark.parametrize("k", [1, 3])
def test_against_the_whole_decomposition(shape: tuple[int, int], k: int) -> None:
    w = random(*shape)
    values, vectors = leading_vectors(w, k)
    _, expected, rows = np.linalg.svd(w.numpy())
    assert values.numpy() == pytest.approx(expected[:k], rel=1e-10)
    overlap = np.abs(rows[:k] @ vectors.numpy())
    assert overlap == pytest.approx(np.eye(k), abs=1e-6)
    assert torch.equal(vectors, leading_vectors(w, k)[1])


def test_a_centered_kernel_by_lanczos() -> None:
    x = random(400, 500)
    x = x - x.mean(0)
    kernel = x @ x.mT
    values, vectors = leading_vectors((kernel + kernel.mT) / 2, 2)
    expected, basis = np.linalg.eigh(kernel.numpy())
    assert values.numpy() == pytest.approx(expected[::-1][:2], rel=1e-10)
    assert abs(basis[:, -1] @ vectors[:, 0].numpy()) == pytest.approx(1, abs=1e-8)


def test_a_planted_direction_is_found() -> None:
    beta = random(300, seed=1)
    w = random(350, 300) + 20 * torch.outer(random(350, seed=2), beta) / beta.norm()
    result = leading_alignment(w, 7 * beta, k=2)
    _, _, rows = np.linalg.svd(w.numpy())
    expected = np.abs(rows[:2] @ (beta / beta.norm()).numpy())
    assert result.overlaps.numpy() == pytest.approx(expected, abs=1e-7)
    assert result.overlaps[0] > 0.99
    assert float(result.projections) == pytest.approx(math.hypot(*expected), abs=1e-7)
    assert result.values is not None
    assert result.values.shape == (2,)


def test_a_subspace_has_principal_angles() -> None:
    u, directions = torch.linalg.qr(random(30, 4))[0], random(30, 3, seed=1)
    result = subspace_alignment(u, directions)
    assert result.overlaps.shape == (4, 3)
    for j in range(3):
        projected = u @ (u.mT @ directions[:, j])
        assert float(result.projections[j]) == pytest.approx(float(projected.norm() / directions[:, j].norm()))
    assert torch.equal(result.angles, principal_angles(u, directions))
    assert float(subspace_alignment(u, u[:, 1] * 3).projections) == pytest.approx(1)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: leading_vectors(random(3)), "rows, columns"),
        (lambda: leading_vectors(math.nan * random(3, 3)), "NaN"),
        (lambda: leading_vectors(random(3, 4), 4), "smaller side of the matrix, 3"),
        (lambda: leading_alignment(random(3, 4), random(3)), "one entry for each of the 4"),
        (lambda: leading_alignment(random(3, 4), torch.zeros(4)), "linearly independent and not zero"),
        (lambda: leading_alignment(random(3, 4), torch.ones(4, 2)), "independent"),
        (lambda: leading_alignment(random(3, 4), math.inf * random(4)), "directions must be finite, got NaN"),
        (lambda: subspace_alignment(2 * torch.eye(3), random(3)), "orthonormal"),
    ],
)
def test_bad_input(call, message: str) -> None:
    with pytest.raises(InputError, match=message):
        call()
