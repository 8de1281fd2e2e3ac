"""Theorem 9 of the NFA paper: on the sphere, the first derivatives of the centered NFM and AGOP become equal.

References:
    Beaglehole, Mitliagkas & Agarwala, "Feature learning as alignment", https://openreview.net/forum?id=JXCe2ZcUXr,
    theorem 9.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pandas as pd
import torch
from matplotlib.figure import Figure
from torch import Tensor

from featlearn._utils.rng import as_generator
from featlearn.papers._figures import GRAY, PALETTE, draw_lines, label, panels
from featlearn.papers.claim import at_least, at_most, holds
from featlearn.papers.experiment import Outcomes, Result, Values, experiment
from featlearn.theory import derivative_correlation, sphere_alignment

_ACTIVATIONS = {
    "normal-integral": "$\\phi'$ = normal distribution function",
    "erf": "erf",
    "relu": "ReLU (not differentiable: beyond the theorem)",
}


@dataclass(frozen=True)
class Config:
    """Configuration: dimensions d, with n = d^1.3 points, and widths of networks that are drawn at one dimension."""

    dimensions: tuple[int, ...] = (10, 20, 50, 100, 200, 400)
    width_at: int = 50
    widths: tuple[int, ...] = (64, 256, 1024, 4096, 16384)
    seeds: tuple[int, ...] = (0, 1, 2)


def _points(config: Config) -> list[dict[str, Any]]:
    cases = [{"d": d, "activation": name, "widths": []} for name in _ACTIVATIONS for d in config.dimensions]
    cases.append({"d": config.width_at, "activation": "erf", "widths": list(config.widths)})
    return [case | {"seed": seed} for case in cases for seed in config.seeds]


def _measure(d: int, activation: str, widths: Sequence[int], seed: int) -> Values:
    """Measure 1 - rho of the infinitely wide network and of networks of given widths, with the labels x_1."""
    n = int(d**1.3)
    limit = sphere_alignment(d, n, activation, seed=seed)
    without = sphere_alignment(d, n, activation, _no_linear_part, seed=seed)
    generator = as_generator(seed, "sphere networks")
    return {
        "n": n,
        "gap": 1 - limit.rho,
        "gap_without": 1 - without.rho,
        "gap_at_width": [1 - _drawn(d, n, width, generator) for width in widths],
    }


def _no_linear_part(X: Tensor) -> Tensor:
    return X[:, 0] * X[:, 1]


def _drawn(d: int, n: int, width: int, generator: torch.Generator) -> float:
    """Return rho of a network ``a^T erf(W x)``, ``a, W ~ N(0, 1/d)``, with kernel ``J J^T``, ``J = a erf'(W x)``."""
    x = torch.randn(n, d, generator=generator, dtype=torch.float64)
    x *= math.sqrt(d) / x.norm(dim=1, keepdim=True)
    w = torch.randn(width, d, generator=generator, dtype=torch.float64) / math.sqrt(d)
    a = torch.randn(width, generator=generator, dtype=torch.float64)
    slopes = a * torch.exp(-(x @ w.mT).square())
    return derivative_correlation(x, x[:, 0], slopes @ slopes.mT / width)


@experiment(
    "nfa-thm9",
    "Maximum centered NFC for data on the sphere",
    covers=("theorem 9",),
    smoke=Config((10, 20), 10, (16, 64), (0,)),
    quick=Config((10, 20, 50, 100, 200)),
    full=Config(seeds=(0, 1, 2, 3)),
    measure=_measure,
    points=_points,
)
def _conclude(config: Config, outcomes: Outcomes) -> Result:
    drawn = [v for p, v in outcomes if p["widths"]]
    columns = {"n": "n", "1 - rho": "gap", "1 - rho without a linear part": "gap_without"}
    limits = Outcomes(o for o in outcomes if not o.point["widths"]).table("activation", "d", "seed", values=columns)
    smallest, largest = config.dimensions[0], config.dimensions[-1]
    gaps = limits.pivot(index="seed", columns=["activation", "d"], values="1 - rho")

    def falls(activation: str) -> list[bool]:
        by_seed = gaps[activation][list(config.dimensions)].to_numpy()
        return [list(values) == sorted(values, reverse=True) for values in by_seed]

    smooth = [name for name in _ACTIVATIONS if name != "relu"]
    claims = [
        at_most(f"1 - rho at d = {largest}, {name}", "theorem 9", 1e-4, gaps[name, largest],
                reason="rho tends to 1: a ten-thousandth is asked for at the largest d")
        for name in smooth
    ] + [holds(f"1 - rho falls with every larger d, {name}", "theorem 9", falls(name)) for name in _ACTIVATIONS] + [
        at_least(f"fall of 1 - rho from d = {smallest} to {largest}, {name}: factor", "theorem 9", 50.0,
                 gaps[name, smallest] / gaps[name, largest],
                 reason="more than in proportion to d")
        for name in smooth
    ] + [
        holds(f"networks of width {config.widths[-1]} are as aligned as the limit, to half of their 1 - rho",
              "theorem 9, width to infinity",
              (abs(v["gap_at_width"][-1] / v["gap"] - 1) < 0.5 for v in drawn),
              note=f"d = {config.width_at}, erf, other points drawn than for the limit"),
    ]  # fmt: skip
    mean = limits.drop(columns="seed").groupby(["activation", "d"], sort=False).mean().reset_index()
    return Result(
        claims,
        {"mean over seeds": mean},
        {"theorem 9": _figure(config, mean, drawn)},
        "The theorem has no figure. Points are n = d^1.3 (the theorem has d log^3 d to d^2), labels x_1. Without "
        "assumption 5, for labels x_1 x_2 with no linear part, see the table: 1 - rho is much larger there.",
    )


def _figure(config: Config, mean: pd.DataFrame, drawn: Sequence[Values]) -> Figure:
    fig, ((left, right),) = panels(8.4, 3.2, 1, 2)
    gaps = mean.pivot(index="d", columns="activation", values="1 - rho")
    curves = {text: gaps[name] for name, text in _ACTIVATIONS.items()}
    draw_lines(left, gaps.index, curves, marked=True, markersize=4)
    legend = {"loc": "lower left", "fontsize": 7}
    label(left, "dimension d", "1 - rho", "infinite width, $n = d^{1.3}$ points on the sphere", log="xy", legend=legend)
    at_width = np.array([values["gap_at_width"] for values in drawn])
    right.plot(config.widths, at_width.T, color=PALETTE[0], alpha=0.3, linewidth=1)
    right.plot(config.widths, at_width.mean(0), color=PALETTE[0], marker="o", markersize=4, label="networks drawn")
    limit = float(np.mean([values["gap"] for values in drawn]))
    right.axhline(limit, color=GRAY, linestyle="--", label="infinite width")
    label(right, "width k", "1 - rho", f"finite width, erf, d = {config.width_at}", log="xy", legend="upper right")
    return fig
