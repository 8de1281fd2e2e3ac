"""Theorem 1 of the paper on adaptive tangent features: without structure, predictions do not change.

References:
    LeJeune & Alemohammad (2023), https://arxiv.org/abs/2308.15478, theorem 1.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pandas as pd
import torch
from matplotlib.figure import Figure

from featlearn._utils.rng import as_generator
from featlearn.adaptive import adapt
from featlearn.papers._figures import PALETTE, draw_lines, label, panels
from featlearn.papers.adaptive.brute_force import least_objective
from featlearn.papers.claim import about, at_most, holds
from featlearn.papers.experiment import Outcomes, Result, Values, experiment


@dataclass(frozen=True)
class Config:
    """Configuration: random features and labels of several sizes; M is P x P without structure."""

    n: int = 3
    features: int = 5
    sizes: tuple[float, ...] = (0.3, 1.0, 3.0, 10.0)
    restarts: int = 6
    seeds: tuple[int, ...] = (0, 1, 2)


def _measure(n: int, features: int, restarts: int, size: float, seed: int) -> Values:
    generator = as_generator(seed, "theorem 1")
    A = torch.randn(n, features, generator=generator, dtype=torch.float64)
    unseen = torch.randn(20, features, generator=generator, dtype=torch.float64)
    r = size * torch.randn(n, generator=generator, dtype=torch.float64)
    solution = adapt(A, r, penalty="square", tolerance=1e-14)
    beta = torch.linalg.pinv(A) @ r  # ridgeless regression with the initial features
    s = _stretch(float(beta.norm()))
    eye = torch.eye(features, dtype=torch.float64)
    predicted_m = eye + (s - 1) * torch.outer(beta, beta) / beta.square().sum()
    m = solution.transforms["features"].matrix(eye[:, None])[:, 0]
    change = unseen @ beta
    ours = (unseen @ solution.matrices["features"].flatten()) - change
    kernel = unseen @ m @ m.mT @ unseen.mT
    printed = unseen @ unseen.mT + (s**2 - 1) / beta.square().sum() * torch.outer(change, change)
    return {
        "norm": float(beta.norm()),
        "s": s,
        "prediction error": float(ours.abs().max() / change.abs().max()),
        "M error": float((m - predicted_m).norm() / predicted_m.norm()),
        "kernel error": float((kernel - printed).norm() / printed.norm()),
        "objective": solution.objective,
        "formula": float((s - 1) ** 2 + beta.square().sum() / s**2),
        "brute force": least_objective({"A": A[:, None]}, r, fixed=("A",), restarts=restarts, seed=seed),
    }


def _stretch(v: float) -> float:
    """Return ``argmin over z >= 1 of (z - 1)^2 + v^2 / z^2``, the root of ``z^4 - z^3 = v^2``."""
    roots = np.roots([1.0, -1.0, 0.0, 0.0, -(v**2)])
    return float(max(root.real for root in roots if abs(root.imag) < 1e-9))


@experiment(
    "adaptive-thm1",
    "Features without structure: predictions stay, the kernel aligns",
    covers=("theorem 1",),
    smoke=Config(n=2, features=3, sizes=(0.5, 2.0), restarts=1, seeds=(0,)),
    quick=Config(),
    full=Config(n=4, features=6, restarts=12, seeds=(0, 1, 2, 3, 4)),
    measure=_measure,
    over={"seed": "seeds", "size": "sizes"},
)
def _conclude(config: Config, outcomes: Outcomes) -> Result:
    table = outcomes.table("size", "seed")
    ordered = [
        bool((rows.sort_values("norm")["s"].diff().dropna() > 0).all()) for _, rows in table.groupby("seed", sort=False)
    ]
    rounding = "both are exact; what is left is the tolerance of the descent"
    claims = (
        at_most("predictions of the solver against ridgeless regression, relative", "theorem 1", 0.0,
                table["prediction error"], 1e-5, rounding),
        at_most("M of the solver against the theorem's, relative", "theorem 1", 0.0, table["M error"], 1e-4, rounding),
        at_most("adapted kernel against the theorem's, relative", "theorem 1", 0.0, table["kernel error"], 1e-4,
                rounding),
        about("objective of the solver over the theorem's", "theorem 1", 1.0, table["objective"] / table["formula"],
              1e-6, rounding),
        about("least objective by brute force over the theorem's", "theorem 1", 1.0,
              table["brute force"] / table["formula"], 1e-4, "a general minimizer over every entry of M"),
        holds("s grows with |beta|: alignment with the labels is stronger where the task is harder", "section 3.1",
              ordered),
    )  # fmt: skip
    return Result(
        claims,
        {"by size of the labels": table},
        {"theorem 1": _figure(table)},
        f"{config.n} labels, {config.features} features, the penalty (z - 1)^2 on every singular value of M.",
    )


def _figure(table: pd.DataFrame) -> Figure:
    fig, ((left, right),) = panels(6.6, 2.8, 1, 2)
    v = np.geomspace(table["norm"].min() / 1.5, table["norm"].max() * 1.5, 100)
    left.plot(v, [_stretch(x) for x in v], color="#999999", label="$s^4 - s^3 = |\\beta|^2$")
    left.plot(table["norm"], table["s"], linestyle="", marker="o", markersize=4, color=PALETTE[0], label="problems")
    label(left, "$|\\hat\\beta|$", "stretch s", log="x", legend="best")
    formula = table["formula"]
    names = {"solver": "objective", "brute force": "brute force"}
    gaps = {text: (table[name] / formula - 1).abs().clip(lower=1e-16) for text, name in names.items()}
    draw_lines(right, formula, gaps, marked=True, linestyle="", markersize=4)
    label(right, "objective by the theorem", "relative gap", log="xy", legend="best")
    return fig
