"""Equation (9) of the NFA paper: mean and covariance term of the numerator of the early alignment.

References:
    Beaglehole, Mitliagkas & Agarwala, "Feature learning as alignment", https://openreview.net/forum?id=JXCe2ZcUXr,
    equation (9).
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import pandas as pd
import torch
from matplotlib.figure import Figure

from featlearn._utils.rng import as_generator
from featlearn.datasets import chain_monomial_task
from featlearn.papers._figures import GRAY, PALETTE, draw_lines, label, panels
from featlearn.papers.claim import about, at_most, holds
from featlearn.papers.experiment import Outcomes, Result, Values, experiment
from featlearn.theory import numerator_terms


@dataclass(frozen=True)
class Config:
    """Configuration: the chain monomial with n = d, and quadratic networks of growing width."""

    n: int = 128
    d: int = 128
    widths: tuple[int, ...] = (32, 128, 512, 2048, 8192)
    networks: int = 40
    seeds: tuple[int, ...] = (0, 1, 2)


def _measure(n: int, d: int, width: int, networks: int, seed: int) -> Values:
    """Measure the terms of the numerator, as shares of its expectation, and the numerators of random networks."""
    generator = as_generator(seed, "numerator")
    task = chain_monomial_task(n, d, generator=generator, dtype=torch.float64)
    x, terms = task.X, numerator_terms(task.X, task.y, width)
    c, b = x.mT @ (task.y * x), x.mT @ x
    drawn = []
    for _ in range(networks):
        a = torch.randn(width, generator=generator, dtype=torch.float64)
        w = torch.randn(width, d, generator=generator, dtype=torch.float64) / math.sqrt(width)
        moved = c @ (w.mT * a.square()) @ w  # C R
        # P = 4 X R X^T, so that X^T Y P Y X = 4 C R C and X^T Y P^2 Y X = 16 C R B R C.
        drawn.append(64 * float(((moved @ c) * (moved @ b @ moved.mT)).sum()))
    return {
        "mean": terms.mean / terms.total,
        "covariance": terms.covariance / terms.total,
        "squared_mean": terms.mean_of_squared_mean / terms.total,
        "drawn": float(np.mean(drawn)) / terms.total,
        "error": float(np.std(drawn, ddof=1)) / math.sqrt(networks) / terms.total,
    }


_COLUMNS = {"mean term": "mean", "covariance term": "covariance", "mean term with E[P]^2": "squared_mean"}
_COLUMNS |= {"networks drawn": "drawn", "their error": "error"}


@experiment(
    "nfa-eq9",
    "Mean and covariance terms of the numerator",
    covers=("equation 9",),
    smoke=Config(n=16, d=12, widths=(16, 64), networks=5, seeds=(0,)),
    quick=Config(),
    full=Config(n=256, d=256, widths=(32, 128, 512, 2048, 8192, 32768), networks=60, seeds=(0, 1, 2, 3)),
    measure=_measure,
    over={"width": "widths", "seed": "seeds"},
)
def _conclude(config: Config, outcomes: Outcomes) -> Result:
    table = outcomes.table("width", "seed", values=_COLUMNS)
    narrower, width = sorted(config.widths)[-2:]
    next_widest, widest = (table[table.width == w] for w in (narrower, width))
    ratios = widest["covariance term"].to_numpy() / next_widest["covariance term"].to_numpy()
    slopes = np.log(ratios) / math.log(width / narrower)
    covariances = [table[table.seed == seed].sort_values("width")["covariance term"] for seed in config.seeds]
    claims = (
        holds("the covariance term's share falls with every larger width", "equation (9), first version",
              (values.is_monotonic_decreasing for values in covariances)),
        at_most(f"share of the covariance term at width {width}", "equation (9), first version",
                0.05, widest["covariance term"], reason="it vanishes with the width: a twentieth is asked for"),
        about(f"power of the width with which the share falls, from width {narrower} to {width}",
              "equation (9), first version",
              -1.0, slopes, 0.1, "1/k is the order of what the moments of R add; terms of 1/k^2 bend the line",
              note="a line through all widths from 128 on, looked at first, has -.87"),
        at_most(
            f"what E[P]^2 in place of E[P^2] changes in the mean term at width {width}", "equation (9)",
            0.1, (widest["mean term"] - widest["mean term with E[P]^2"]).abs() / widest["mean term"],
            reason="3 Tr(B)/k is left, which is of order d/k times the inputs' size",
        ),
        about(f"numerator of networks drawn over the sum of both terms, at width {width}", "equation (9)",
              1.0, widest["networks drawn"], 0.05,
              "three standard errors of the mean over networks; the sum is exact at finite size"),
    )  # fmt: skip
    mean = table.drop(columns="seed").groupby("width").mean().reset_index()
    return Result(
        claims,
        {"shares of the numerator, mean over seeds": mean},
        {"equation 9": _figure(mean)},
        f"The equation has no figure. Quadratic networks of one hidden layer, chain monomial, n = d = {config.d}.",
    )


def _figure(mean: pd.DataFrame) -> Figure:
    fig, ((left, right),) = panels(8.0, 3.1, 1, 2)
    terms = ("mean term", "covariance term", "mean term with E[P]^2")
    draw_lines(left, mean.width, {name.replace("^2", "²"): mean[name] for name in terms}, marker="o", markersize=4)
    left.errorbar(
        mean.width, mean["networks drawn"], 2 * mean["their error"], color=GRAY, marker="s", markersize=4,
        linestyle="", label="networks drawn (total)", capsize=2,
    )  # fmt: skip
    label(left, "width k", "share of the numerator", "terms of the numerator", log="x", ylim=(-0.03, None))
    left.legend(fontsize=7, loc="center right", bbox_to_anchor=(1.0, 0.34))
    right.plot(mean.width, mean["covariance term"], marker="o", markersize=4, color=PALETTE[1], label="covariance")
    last = mean.iloc[-1]
    right.plot(mean.width, last["covariance term"] * last.width / mean.width, color=GRAY, linestyle="--", label="1/k")
    label(right, "width k", "share of the numerator", "the covariance term vanishes", log="xy", legend="best")
    return fig
