"""Comparisons and powers of matrices: properties that hold for any input."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from torch import Tensor

import featlearn as fl

properties = settings(max_examples=50, deadline=None, derandomize=True)
finite = st.floats(-1e3, 1e3, allow_nan=False).map(lambda v: 0.0 if abs(v) < 1e-6 else v)
arrays = hnp.arrays(np.float64, hnp.array_shapes(min_dims=1, max_dims=3, min_side=1, max_side=5), elements=finite)
scales = st.sampled_from([1e-200, 1e-30, 1.0, 1e30, 1e200])


def random(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def psd(k: int, rank: int, seed: int = 0, blocks: int | None = None) -> Tensor:
    a = random(*(() if blocks is None else (blocks,)), k, rank, seed=seed)
    return a @ a.mT


@given(arrays, st.integers(0, 2**31), scales, scales)
@properties
def test_cosine(a: np.ndarray, seed: int, s: float, t: float) -> None:
    b = np.random.default_rng(seed).normal(size=a.shape)
    value = fl.cosine(a, b)
    if not a.any():
        assert math.isnan(value)
        return
    assert -1 <= value <= 1
    expected = float((a * b).sum() / np.linalg.norm(a) / np.linalg.norm(b))
    assert value == pytest.approx(expected, abs=1e-12)
    assert fl.cosine(b, a) == pytest.approx(value, abs=1e-14)
    assert fl.cosine(s * a, t * b) == pytest.approx(value, abs=1e-12)
    assert fl.cosine(-a, b) == pytest.approx(-value, abs=1e-14)
    assert fl.cosine(a, a) == pytest.approx(1.0, abs=1e-14)


@given(arrays, st.integers(0, 2**31), scales, st.floats(-100, 100))
@properties
def test_pearson(a: np.ndarray, seed: int, s: float, shift: float) -> None:
    b = np.random.default_rng(seed).normal(size=a.shape)
    value = fl.pearson(a, b)
    if a.size == 1 or np.ptp(a) == 0:
        assert math.isnan(value)
        return
    if np.ptp(a) < 1e-6 * np.abs(a).max():
        return  # rounding decides
    assert -1 <= value <= 1
    expected = float(np.corrcoef(a.reshape(-1), b.reshape(-1))[0, 1])
    assert value == pytest.approx(expected, abs=1e-8)
    assert fl.pearson(a, b + shift) == pytest.approx(value, abs=1e-9)
    assert fl.pearson(a, s * b) == pytest.approx(value, abs=1e-10)
    assert fl.pearson(a - a.mean(), b - b.mean()) == pytest.approx(fl.cosine(a - a.mean(), b - b.mean()), abs=1e-8)


@pytest.mark.parametrize("value", [0.1, 1 / 3, 1e10, -7.7])
def test_a_constant_has_no_pearson_correlation(value: float) -> None:
    assert math.isnan(fl.pearson(torch.full((7, 7), value), random(7, 7)))


@pytest.mark.parametrize("function", [fl.cosine, fl.pearson])
def test_arrays_of_different_shape_are_refused(function: object) -> None:
    assert callable(function)
    with pytest.raises(fl.InputError, match=r"\(2, 3\).*\(3, 2\)"):
        function(torch.zeros(2, 3), torch.zeros(3, 2))


def test_comparisons_take_what_is_like_an_array() -> None:
    a = random(3, 3).requires_grad_()
    assert fl.cosine(a, a.detach().numpy()) == pytest.approx(1.0)
    assert fl.cosine([[1, 2], [3, 4]], torch.tensor([[1, 2], [3, 4]])) == pytest.approx(1.0)
    assert math.isnan(fl.cosine(torch.zeros(0), torch.zeros(0)))


@given(st.integers(1, 8), st.integers(1, 8), st.integers(0, 1000), st.floats(0.1, 3), st.floats(0.1, 3))
@properties
def test_powers(k: int, rank: int, seed: int, p: float, q: float) -> None:
    a = psd(k, min(k, rank), seed)
    size = float(a.norm())
    assert torch.allclose(fl.psd_power(a, 1.0), a, atol=1e-12 * size)
    half = fl.psd_power(a, 0.5)
    assert torch.allclose(half @ half, a, atol=1e-11 * size)
    assert torch.allclose(half, half.mT, atol=1e-12 * size)
    product = fl.psd_power(a, p) @ fl.psd_power(a, q)
    assert torch.allclose(product, fl.psd_power(a, p + q), atol=1e-9 * max(1.0, size ** (p + q)))
    values = torch.linalg.eigvalsh(a)
    values = torch.where(values > 1e-14 * size, values, 0.0)  # rounding is not raised to a power
    assert torch.allclose(torch.linalg.eigvalsh(fl.psd_power(a, p)), values**p, atol=1e-6 * max(1, size**p))
    if min(k, rank) == k and float(values[0]) > 1e-6 * size:
        assert torch.allclose(fl.psd_power(a, -1.0) @ a, torch.eye(k, dtype=torch.float64), atol=1e-6)


def test_a_power_of_blocks_is_the_power_of_each() -> None:
    a = psd(4, 3, blocks=3)
    for block, power in zip(a, fl.psd_power(a, 0.3), strict=True):
        assert torch.allclose(fl.psd_power(block, 0.3), power, atol=1e-12)


def test_rounding_is_not_raised_by_a_root() -> None:
    root = fl.psd_power(psd(20, 3), 0.5)
    assert int((torch.linalg.eigvalsh(root) > 1e-12).sum()) == 3
    pseudo = fl.psd_power(psd(20, 3), -1.0)
    assert torch.allclose(pseudo, torch.linalg.pinv(psd(20, 3), hermitian=True, rtol=1e-10), rtol=1e-6)


@pytest.mark.parametrize(
    ("matrix", "words"),
    [
        (torch.zeros(2, 3), "square"),
        (torch.zeros(3), "square"),
        (torch.tensor([[1.0, 2.0], [0.0, 1.0]]), "symmetric"),
        (torch.diag(torch.tensor([1.0, -1.0])), "semi-definite"),
        (torch.tensor([[math.nan]]), "NaN"),
    ],
)
def test_powers_of_what_has_none(matrix: Tensor, words: str) -> None:
    with pytest.raises(fl.InputError, match=words):
        fl.psd_power(matrix, 0.5)


@given(st.integers(2, 9), st.integers(1, 9), st.integers(1, 9), st.integers(0, 1000))
@properties
def test_principal_angles(k: int, p: int, q: int, seed: int) -> None:
    from scipy.linalg import subspace_angles

    u, v = random(k, min(p, k), seed=seed), random(k, min(q, k), seed=seed + 1)
    angles = fl.principal_angles(u, v)
    assert len(angles) == min(u.shape[1], v.shape[1])
    assert (angles >= 0).all()
    assert (angles <= math.pi / 2 + 1e-12).all()
    assert (angles.diff() >= -1e-12).all()
    assert np.allclose(angles, subspace_angles(u.numpy(), v.numpy())[::-1], atol=1e-7)
    assert torch.allclose(angles, fl.principal_angles(v, u), atol=1e-10)
    # neither the basis nor a rotation of space matters
    mix = random(u.shape[1], u.shape[1], seed=seed + 2) + 3 * torch.eye(u.shape[1], dtype=torch.float64)
    q_space = torch.linalg.qr(random(k, k, seed=seed + 3))[0]
    assert torch.allclose(angles, fl.principal_angles(q_space @ u @ mix, q_space @ v), atol=1e-6)
    assert fl.principal_angles(u, u).max() < 1e-7


def test_a_small_angle_is_told_from_zero() -> None:
    angle = 1e-9
    u = torch.tensor([[1.0], [0.0]], dtype=torch.float64)
    v = torch.tensor([[math.cos(angle)], [math.sin(angle)]], dtype=torch.float64)
    assert float(fl.principal_angles(u, v)) == pytest.approx(angle, rel=1e-6)


@pytest.mark.parametrize(
    ("u", "v", "words"),
    [(random(3, 4), random(3, 1), "p <= k"), (random(4, 2), random(3, 2), "rows"), (random(4), random(4, 1), "u must")],
)
def test_principal_angles_of_what_has_none(u: Tensor, v: Tensor, words: str) -> None:
    with pytest.raises(fl.InputError, match=words):
        fl.principal_angles(u, v)


@given(st.integers(1, 7), st.integers(0, 1000), st.booleans())
@properties
def test_corrupt_keeps_the_spectrum(k: int, seed: int, symmetric_only: bool) -> None:
    a = psd(k, k, seed)
    if symmetric_only:
        a = a - a.trace() / k * torch.eye(k, dtype=torch.float64)
    state = torch.get_rng_state()
    b = fl.corrupt(a, generator=seed)
    assert torch.equal(state, torch.get_rng_state())
    assert torch.equal(b, fl.corrupt(a, generator=seed))
    assert torch.equal(b, b.mT)
    assert torch.allclose(torch.linalg.eigvalsh(a), torch.linalg.eigvalsh(b), atol=1e-10 * (1 + float(a.norm())))


def test_corrupt_turns_evenly() -> None:
    """The mean over rotations of a Haar-turned matrix is tr/k I; a QR without signs is not Haar."""
    k, draws = 3, 4000
    a = torch.diag(torch.tensor([3.0, 0.0, 0.0], dtype=torch.float64))
    generator = torch.Generator().manual_seed(0)
    mean = torch.stack([fl.corrupt(a, generator) for _ in range(draws)]).mean(0)
    # var of 3 u_i u_j: 9 (2/15 ... ) < 1, so the standard error is below 1/sqrt(draws)
    assert (mean - torch.eye(k, dtype=torch.float64)).abs().max() < 4 / math.sqrt(draws)


def test_corrupt_turns_each_block_by_itself() -> None:
    a = psd(3, 3).expand(2, 3, 3)
    b = fl.corrupt(a)
    assert not torch.allclose(b[0], b[1])
    assert torch.allclose(torch.linalg.eigvalsh(b[0]), torch.linalg.eigvalsh(b[1]))
