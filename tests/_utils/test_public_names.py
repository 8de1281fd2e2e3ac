"""Old public names still work, and say what the new ones are."""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from featlearn._utils.public_names import renamed_arguments
from featlearn.datasets import image_task, teacher_task
from featlearn.models import ntk_mlp, small_cnn
from featlearn.optim import AdaptiveSLO
from featlearn.runs import Run
from featlearn.spectra import compare, power_law, spectral_entropy
from featlearn.training.two_layer import new_student

IMAGES = torch.ones(2, 1, 8, 8)
NAMES = [
    ("featlearn", "centred_alignment", "centered_alignment"),
    ("featlearn.kernels", "centred_alignment", "centered_alignment"),
    ("featlearn.kernels", "centred_kernel", "centered_kernel"),
    ("featlearn.capture", "VectorisationError", "VectorizationError"),
    ("featlearn.linalg", "NormalisedActivation", "NormalizedActivation"),
    ("featlearn.linalg", "normalised_activation", "normalized_activation"),
    ("featlearn.models", "NormalisedActivation", "NormalizedActivation"),
    ("featlearn.models", "normalised_activation", "normalized_activation"),
    ("featlearn.training", "Reading", "Diagnosis"),
    ("featlearn.training", "WORDS", "DIAGNOSES"),
    ("featlearn.training", "read_layer", "diagnose_layer"),
]


@pytest.mark.parametrize(("module", "old", "new"), NAMES)
def test_old_names(module: str, old: str, new: str) -> None:
    home = importlib.import_module(module)
    with pytest.warns(DeprecationWarning, match=f"{module}.{old} is deprecated: use {module}.{new}"):
        value = getattr(home, old)
    assert value is getattr(home, new)
    assert old not in home.__all__
    with pytest.raises(AttributeError, match="nothing_like_it"):
        _ = home.nothing_like_it


def test_entropy_by_its_old_argument() -> None:
    eigenvalues = np.arange(1.0, 6.0)
    with pytest.warns(DeprecationWarning, match=r"spectral_entropy\(normalised=...\) is deprecated: use normalized="):
        old = spectral_entropy(eigenvalues, normalised=True)  # type: ignore[call-arg]
    assert old == spectral_entropy(eigenvalues, normalized=True) != spectral_entropy(eigenvalues)


@pytest.mark.parametrize(
    ("make", "old", "new"),
    [
        (lambda **k: teacher_task(8, 4, k=1, generator=0, **k).y, "normalised", "normalized"),
        (lambda **k: teacher_task(8, 4, k=1, tau=1.0, generator=0, **k).y, "centre_norm", "center_norm"),
        (
            lambda **k: ntk_mlp([3, 4, 1], activation="relu", generator=0, **k)(torch.ones(2, 3)),
            "normalised",
            "normalized",
        ),
        (
            lambda **k: small_cnn((2,), image_shape=(1, 8, 8), generator=0, **k)(torch.ones(2, 1, 8, 8)),
            "normalised",
            "normalized",
        ),
    ],
)
@pytest.mark.parametrize("value", [True, False])
def test_old_arguments(make: Any, old: str, new: str, value: bool) -> None:
    with pytest.warns(DeprecationWarning, match=f"{old}=...\\) is deprecated: use {new}="):
        by_old = make(**{old: value})
    assert torch.equal(by_old, make(**{new: value}))


def test_images_by_their_old_argument(tmp_path: Path) -> None:
    images = np.random.default_rng(0).integers(0, 255, (12, 4, 4), dtype=np.uint8)
    np.savez(tmp_path / "small.npz", x_train=images, y_train=np.arange(12) % 2, x_test=images, y_test=np.arange(12) % 2)
    with pytest.warns(DeprecationWarning, match="use standardize="):
        old = image_task(tmp_path / "small.npz", 8, 4, standardise="pixels", generator=0)  # type: ignore[call-arg]
    assert torch.equal(old.X, image_task(tmp_path / "small.npz", 8, 4, standardize="pixels", generator=0).X)


def test_randomness_by_its_old_argument() -> None:
    with pytest.warns(DeprecationWarning, match="use generator="):
        old = new_student(20, 10, 5, seed=0)
    assert torch.equal(old.task.X, new_student(20, 10, 5, generator=0).task.X)
    model = torch.nn.Sequential(torch.nn.Linear(3, 2), torch.nn.Tanh(), torch.nn.Linear(2, 1))
    with pytest.warns(DeprecationWarning, match="use generator="):
        AdaptiveSLO(model, torch.ones(4, 3), lr=0.1, seed=0)  # type: ignore[call-arg]


def test_both_names_of_an_argument() -> None:
    @renamed_arguments(colour="color")
    def paint(color: str) -> str:
        return color

    assert paint("red") == paint(color="red") == "red"
    with pytest.raises(TypeError, match="both 'color' and its old name 'colour'"):
        paint(color="red", colour="blue")  # type: ignore[call-arg]


def test_tails() -> None:
    tail = power_law(np.random.default_rng(0).pareto(2.0, 500) + 1)
    comparison = compare(tail, "lognormal")
    with pytest.warns(DeprecationWarning, match=r"TailComparison\.favours is deprecated: use TailComparison\.favors"):
        assert comparison.favours == comparison.favors
    with pytest.warns(DeprecationWarning, match="normalised"):
        assert comparison.normalised == comparison.normalized


def test_runs(tmp_path: Path) -> None:
    with pytest.warns(DeprecationWarning, match=r"Run\.is_in is deprecated: use Run\.exists"):
        assert not Run.is_in(tmp_path / "run")
    with pytest.warns(DeprecationWarning, match=r"Run\.at is deprecated: use Run\.open_or_create"):
        Run.at(tmp_path / "run", {"lr": 0.1}).close()
    assert Run.exists(tmp_path / "run")
