"""Table 1 of the spectral paper: four trainings of one network, and three kinds of spectra."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal, NamedTuple

import pandas as pd

from featlearn.errors import InputError
from featlearn.lab.experiments.spectral.two_layer import SpectralEvolution, new_student, train_student
from featlearn.numerics import Seed

__all__ = [
    "PUBLISHED_CASES",
    "PUBLISHED_LAZY",
    "Published",
    "Size",
    "compare_with_table1",
    "spectral_case",
    "student_sizes",
]

Size = Literal["half", "full"] | tuple[int, int, int]
"""Half or all of the paper's size, or ``(n, h, d)``."""


class Published(NamedTuple):
    """A row of the table.

    Attributes:
        test_error: Mean squared error.
        r2: R^2 score.
        spectra: What the paper calls them.
    """

    test_error: float
    r2: float
    spectra: str


PUBLISHED_CASES: dict[int, Published] = {
    1: Published(0.36381, 0.63582, "invariant bulk"),
    2: Published(0.36879, 0.60605, "invariant bulk"),
    3: Published(0.23791, 0.76081, "bulk + spike"),
    4: Published(0.21071, 0.78829, "heavy tail"),
}
PUBLISHED_LAZY = Published(0.3185, 0.68092, "the initial kernel")

_SIZES = {"full": (2000, 1500, 1000), "half": (1000, 750, 500)}
_TRAINING: dict[int, dict[str, Any]] = {
    1: {"optimizer": "gd", "lr": 5.0, "steps": 400},
    2: {"optimizer": "sgd", "lr": 0.1, "batch_size": 32, "epochs": 200},
    3: {"optimizer": "sgd", "lr": 20.0, "batch_size": 32, "epochs": 200, "stop_loss": 1e-5},
    4: {"optimizer": "adam", "lr": 0.092, "batch_size": 32, "epochs": 60, "schedule": "cosine", "stop_loss": 1e-5},
}


def spectral_case(
    case: int,
    size: Size = "half",
    *,
    tau: float = 0.2,
    centre_norm: bool = True,
    noise: float = 0.3,
    seed: Seed = None,
    **training: Any,
) -> SpectralEvolution:
    """Train the normalised tanh network of a case of table 1 on the softplus teacher, and measure it.

    ======  =========  ====  ==========  =====  ==============
    case    optimiser  rate  test error  R^2    spectra
    ======  =========  ====  ==========  =====  ==============
    1       GD         5     .364        .636   invariant bulk
    2       SGD        .1    .369        .606   invariant bulk
    3       SGD        22    .238        .761   bulk and spike
    4       Adam       .092  .211        .788   heavy tail
    lazy                     .319        .681
    ======  =========  ====  ==========  =====  ==============

    The paper is silent on some of the setting; what is taken here:

    - The loss is nn.MSELoss, although equation (2) has half of it: with the half, no spike appears at rate 22.
    - Batches of 32 (figure 18), and test labels without noise, whose variance of 1 is what the published R^2 imply.
    - An odd network cannot learn the mean of the teacher's norm term, tau, which would add tau^2 and more to its
      error: the term is centred unless ``centre_norm=False``.
    - Cases 3 and 4 stop at a training loss of 1e-5 (figure 2). Case 4 needs a falling rate to come there. Cases 1 and
      2 end after 400 steps and 200 epochs: at half size it takes case 1 1500 steps to come to 1e-5, with a spectrum
      that is no less invariant and an error of .379 instead of .363, and case 2 more than ten times as long.
    - At sizes other than "full" the rate of case 3 is 20: at half size, 22 diverges on some seeds.

    Measured at full size (seed 0): errors .360, .385, .242, .241, lazy .290; R^2 .645, .620, .762, .762, lazy .714.
    The lazy error over seeds 0 to 6 is .272 to .321 (mean .300, deviation .017), its R^2 .679 to .725.

    Args:
        case: 1 to 4.
        size: "half" (n, h, d = 1000, 750, 500; 10 to 20 seconds), "full" (2000, 1500, 1000; 1 to 3 minutes), or
            three numbers.
        tau: Factor of the teacher's norm term, equation (9).
        centre_norm: Whether to centre that term.
        noise: Standard deviation of the noise in the training labels.
        seed: Of data, network and batches. Cases of one integer share data and network.
        training: Arguments of `featlearn.training.fit` in place of the case's own, as ``lr`` or ``epochs``.
    """
    if case not in _TRAINING:
        raise InputError(f"table 1 has the cases 1, 2, 3 and 4, got {case!r}")
    recipe = dict(_TRAINING[case])
    if case == 3 and size == "full":
        recipe["lr"] = 22.0
    if "steps" in training or "epochs" in training:  # one excludes the other
        recipe = {key: value for key, value in recipe.items() if key not in ("steps", "epochs")}
    student = new_student(*student_sizes(size), tau=tau, centre_norm=centre_norm, noise=noise, seed=seed)
    return train_student(student, **(recipe | {"generator": seed} | training))


def compare_with_table1(cases: Mapping[int, SpectralEvolution]) -> pd.DataFrame:
    """The table as published and as measured, a row a case."""
    rows = {}
    for case, result in cases.items():
        published = PUBLISHED_CASES[case]
        rows[case] = {
            "spectra": published.spectra,
            "published error": published.test_error,
            "error": result.test_error,
            "published R2": published.r2,
            "R2": result.r2,
            "lazy error": result.lazy_error,
            "lambda1 W": float(result.weights.trained[-1]),
            "initial lambda1 W": float(result.weights.initial[-1]),
            "beta.u1": result.weights.alignment[1],
            "KTA": result.ck.kta[1] if result.ck.kta else None,
        }
    return pd.DataFrame.from_dict(rows, orient="index").rename_axis("case")


def student_sizes(size: Size) -> tuple[int, int, int]:
    """n, h and d of a size."""
    if isinstance(size, str):
        if size not in _SIZES:
            raise InputError(f"size must be 'half', 'full' or (n, h, d), got {size!r}")
        return _SIZES[size]
    if not isinstance(size, tuple | list) or len(size) != 3:
        raise InputError(f"size must be 'half', 'full' or (n, h, d), got {size!r}")
    n, h, d = size
    return n, h, d
