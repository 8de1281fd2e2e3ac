"""Tests of norms of a change and spectra of weights, against full decompositions."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from featlearn.errors import InputError
from featlearn.spectra import change_norms, weight_eigenvalues


def random(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


@pytest.mark.parametrize("shape", [(30, 20), (300, 400)])  # dense, and by Lanczos' method
def test_norms_against_singular_values_and_rows(shape: tuple[int, int]) -> None:
    a, b = random(*shape), random(*shape, seed=1)
    result = change_norms(a, b, scale=3.0)
    singular, base = (np.linalg.svd(m.numpy(), compute_uv=False) for m in (b - a, a))
    rows = [max(math.sqrt(sum(x * x for x in row)) for row in m.tolist()) for m in (b - a, a)]
    assert result.operator == pytest.approx(singular[0] / 3, rel=1e-12)
    assert result.frobenius == pytest.approx(math.sqrt((singular**2).sum()) / 3, rel=1e-12)
    assert result.two_to_infinity == pytest.approx(rows[0] / 3, rel=1e-12)
    assert result.relative_operator == pytest.approx(singular[0] / base[0], rel=1e-12)
    assert result.relative_frobenius == pytest.approx(math.sqrt((singular**2).sum() / (base**2).sum()), rel=1e-12)
    assert result.relative_two_to_infinity == pytest.approx(rows[0] / rows[1], rel=1e-12)
    assert result.two_to_infinity <= result.operator <= result.frobenius  # equation (17)


def test_no_change_and_a_change_from_zero() -> None:
    a = random(300, 300)
    assert change_norms(a, a).operator == 0
    assert change_norms(0 * a, a).relative_operator == math.inf
    assert change_norms(0 * a, 0 * a).relative_frobenius == 0


@pytest.mark.parametrize(("h", "d"), [(12, 7), (7, 12), (9, 9)])
def test_eigenvalues_against_singular_values(h: int, d: int) -> None:
    w = random(h, d)
    squares = np.sort(np.linalg.svd(w.numpy(), compute_uv=False) ** 2)
    small = min(h, d)
    for side, size in (("columns", d), ("rows", h), ("smaller", small)):
        result = weight_eigenvalues(w, scale=2.0, side=side)
        assert result.shape == (size,)
        assert result[: size - small].tolist() == [0.0] * (size - small)
        assert result[size - small :].numpy() == pytest.approx(squares / 2, rel=1e-10)
    assert weight_eigenvalues(w).numpy()[-1] == pytest.approx(squares[-1] / h)


def test_groups_are_a_block_diagonal() -> None:
    w = random(3, 4, 6)
    result = weight_eigenvalues(w.float(), scale=1)
    block = torch.block_diag(*w.float().double())
    assert result.dtype == torch.float64
    assert result.tolist()[:6] == [0.0] * 6
    assert result.numpy() == pytest.approx(np.linalg.eigvalsh((block.T @ block).numpy()), abs=1e-12)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: change_norms(random(3, 2), random(2, 3)), r"the same shape .*got shapes \(3, 2\) and \(2, 3\)"),
        (lambda: change_norms(random(3), random(3)), "matrices"),
        (lambda: change_norms(random(3, 2), math.nan * random(3, 2)), "trained must be finite, got NaN"),
        (lambda: change_norms(random(3, 2), random(3, 2), scale=0), "scale"),
        (lambda: weight_eigenvalues(random(3)), "Reshape a convolution"),
        (lambda: weight_eigenvalues(random(0, 3)), r"not be empty, got shape \(0, 3\)"),
        (lambda: weight_eigenvalues(math.inf * random(3, 3)), "NaN or infinite"),
        (lambda: weight_eigenvalues(random(3, 3), scale=-1), "scale"),
        (lambda: weight_eigenvalues(random(3, 3), side="left"), "side"),
    ],
)
def test_bad_input(call, message: str) -> None:
    with pytest.raises(InputError, match=message):
        call()
