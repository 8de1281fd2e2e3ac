"""Alignment of kernels with labels and with each other."""

from __future__ import annotations

import numpy as np
import pytest
import torch

import featlearn as fl
from featlearn.kernels import centred_alignment, centred_kernel, kernel_target_alignment, label_kernel

G = torch.Generator().manual_seed(0)
FEATURES = torch.randn(12, 5, dtype=torch.float64, generator=G) + 1.0
KERNEL = FEATURES @ FEATURES.T
Y = torch.randn(12, dtype=torch.float64, generator=G)


def test_label_kernel() -> None:
    assert torch.allclose(label_kernel(Y), torch.outer(Y, Y))
    two = torch.randn(12, 2, dtype=torch.float64)
    assert torch.allclose(label_kernel(two), two @ two.T)
    classes = np.array([3, 7, 3, 3])
    assert label_kernel(classes).tolist() == (classes[:, None] == classes[None, :]).astype(float).tolist()


def test_alignment_is_written_out() -> None:
    expected = float(Y @ KERNEL @ Y) / (float(KERNEL.norm()) * float(Y @ Y))
    assert kernel_target_alignment(KERNEL, Y) == pytest.approx(expected, rel=1e-13)
    assert kernel_target_alignment(torch.outer(Y, Y), -3 * Y) == pytest.approx(1.0, rel=1e-13)


def test_centring_is_that_of_the_features() -> None:
    centred = FEATURES - FEATURES.mean(0)
    assert torch.allclose(centred_kernel(KERNEL), centred @ centred.T, atol=1e-12)
    # An offset of the features changes the plain cosine and not the centred one.
    moved = (FEATURES + 10.0) @ (FEATURES + 10.0).T
    assert centred_alignment(KERNEL, moved) == pytest.approx(1.0, rel=1e-12)
    assert fl.cosine(KERNEL, moved) < 0.9


def test_bad_kernels_and_labels_are_refused() -> None:
    for bad, words in (
        (KERNEL[:5], "square"),
        (KERNEL.triu(), "symmetric"),
        (KERNEL * float("nan"), "NaN"),
        (torch.zeros(12, 12), "zero"),
    ):
        with pytest.raises(fl.InputError, match=words):
            kernel_target_alignment(bad, Y)
    with pytest.raises(fl.InputError, match=r"12 points.*of 4"):
        kernel_target_alignment(KERNEL, Y[:4])
    with pytest.raises(fl.InputError, match="all zero"):
        kernel_target_alignment(KERNEL, torch.zeros(12))
    with pytest.raises(fl.InputError, match="constant"):
        centred_alignment(KERNEL, label_kernel(torch.ones(12)))
    with pytest.raises(fl.InputError, match="class labels"):
        label_kernel(torch.ones(3, 2, dtype=torch.int64))
