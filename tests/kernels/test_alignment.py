"""Alignment of kernels with labels and with each other."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from sklearn.datasets import load_digits

import featlearn as fl
from featlearn.kernels import centered_alignment, centered_kernel, kernel_target_alignment, label_kernel

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


def test_centering_is_that_of_the_features() -> None:
    centered = FEATURES - FEATURES.mean(0)
    assert torch.allclose(centered_kernel(KERNEL), centered @ centered.T, atol=1e-12)
    # An offset of the features changes the plain cosine and not the centered one.
    moved = (FEATURES + 10.0) @ (FEATURES + 10.0).T
    assert centered_alignment(KERNEL, moved) == pytest.approx(1.0, rel=1e-12)
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
    with pytest.raises(fl.InputError, match="12 points and 4"):
        kernel_target_alignment(KERNEL, Y[:4])
    with pytest.raises(fl.InputError, match="all zero"):
        kernel_target_alignment(KERNEL, torch.zeros(12))
    with pytest.raises(fl.InputError, match="constant"):
        centered_alignment(KERNEL, label_kernel(torch.ones(12)))
    with pytest.raises(fl.InputError, match="class labels"):
        label_kernel(torch.ones(3, 2, dtype=torch.int64))


# -- classes -----------------------------------------------------------------------------------------------------------


def naive_alignment(kernel: torch.Tensor, classes: list[int], center: bool) -> float:
    """Cosine with the kernel of one-hot rows, entry by entry in float64."""
    n, kinds = len(classes), sorted(set(classes))
    share = {kind: sum(c == kind for c in classes) / n if center else 0.0 for kind in kinds}
    rows = [[float(c == kind) - share[kind] for kind in kinds] for c in classes]
    inner = size = whole = 0.0
    for i in range(n):
        for j in range(n):
            target = sum(a * b for a, b in zip(rows[i], rows[j], strict=True))
            entry = float(kernel[i, j])
            inner, size, whole = inner + entry * target, size + target**2, whole + entry**2
    return inner / (size * whole) ** 0.5


@pytest.mark.parametrize(
    "classes", [[0, 1] * 6, [0] * 9 + [1] * 3, [0, 1, 2] * 4, [5, -3, 5, 5, 9, 9, 5, -3, 5, 5, 5, 5], list(range(12))]
)
def test_classes_are_centered_unless_they_are_not_to_be(classes: list[int]) -> None:
    for kernel in (KERNEL, torch.ones(12, 12) + torch.eye(12)):
        for center, expected in (("auto", True), (True, True), (False, False)):
            wanted = naive_alignment(kernel, classes, expected)
            result = kernel_target_alignment(kernel, classes, center=center)
            assert result == pytest.approx(wanted, rel=1e-12, abs=1e-15)
        assert kernel_target_alignment(kernel, classes) == kernel_target_alignment(
            kernel, np.array(classes, np.int32) + 1
        )


@pytest.mark.parametrize("kind", [torch.int64, torch.uint8, torch.bool])
def test_two_balanced_classes_are_signs(kind: torch.dtype) -> None:
    signs = torch.tensor([1.0, -1.0, -1.0, 1.0, 1.0, -1.0] * 2)
    for kernel in (KERNEL, KERNEL + 100.0):
        classes = (signs > 0).to(kind)
        assert kernel_target_alignment(kernel, classes) == kernel_target_alignment(kernel, signs)
        assert kernel_target_alignment(kernel, classes, center=False) != kernel_target_alignment(kernel, signs)


def test_real_labels_stay_as_they_are_unless_centered() -> None:
    y = Y + 3.0
    wanted = float(y @ KERNEL @ y) / (float(KERNEL.norm()) * float(y @ y))
    for center in ("auto", False):
        assert kernel_target_alignment(KERNEL, y, center=center) == pytest.approx(wanted, rel=1e-13)
    centered = y - y.mean()
    assert kernel_target_alignment(KERNEL, y, center=True) == kernel_target_alignment(KERNEL, centered)
    one_hot = torch.nn.functional.one_hot(torch.arange(12) % 3).double()
    assert kernel_target_alignment(KERNEL, one_hot) == kernel_target_alignment(
        KERNEL, torch.arange(12) % 3, center=False
    )


def test_labels_that_do_not_vary_are_refused_in_one_sentence() -> None:
    for one in (torch.zeros(12, dtype=torch.int64), torch.full((12,), 7), torch.ones(12, dtype=torch.bool)):
        with pytest.raises(fl.InputError, match=r"y must have two classes or more, got one"):
            kernel_target_alignment(KERNEL, one)
        assert kernel_target_alignment(KERNEL, one, center=False) > 0
    with pytest.raises(fl.InputError, match=r"y must vary, got the same label in every row"):
        kernel_target_alignment(KERNEL, torch.full((12,), 0.1), center=True)
    for wrong in ("yes", None, 1):
        with pytest.raises(fl.InputError, match="center must be one of 'auto', True, False, got"):
            kernel_target_alignment(KERNEL, Y, center=wrong)


def test_an_untrained_network_is_not_aligned_with_digits() -> None:
    images, digits = load_digits(return_X_y=True)
    taken = (digits == 3) | (digits == 8)
    X = torch.tensor(images[taken] / 16.0, dtype=torch.float32)[:128]
    y = torch.tensor(digits[taken])[:128]
    signs = torch.where(y == 3, 1.0, -1.0)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = torch.nn.Sequential(torch.nn.Linear(64, 256), torch.nn.ReLU(), torch.nn.Linear(256, 1))
    for kernel in (fl.ck(model, X), fl.ntk(model, X)):
        by_class, by_sign = kernel_target_alignment(kernel, y), kernel_target_alignment(kernel, signs)
        assert by_class < 0.1
        assert by_class == pytest.approx(by_sign, abs=0.01)  # the classes are nearly balanced
        assert kernel_target_alignment(kernel, y, center=False) > 0.6
