"""Figure 4 of the FACT paper: data on which FACT holds and the neural feature ansatz does not.

References:
    Boix-Adsera, Mallinar, Simon & Belkin (2025), https://arxiv.org/abs/2507.05644, figure 4.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import pandas as pd
import torch
from matplotlib.figure import Figure

from featlearn._utils.rng import as_generator
from featlearn.linalg import cosine
from featlearn.papers._figures import draw_lines, label, panels
from featlearn.papers.claim import at_least, at_most, holds
from featlearn.papers.experiment import Outcomes, Result, Values, experiment
from featlearn.plots import matrix_row
from featlearn.theory import separation, separation_data


@dataclass(frozen=True)
class Config:
    """Configuration: weight decays to minimize at, and number of steps of the paper's optimizer.

    Attributes:
        cases: Pairs of share p of the uniform part and weight decay, each solved to rounding.
        restarts: Number of random starts of each solve.
        adam_steps: Number of steps of Adam at .01 with the published decay; 0 leaves Adam out.
        seeds: Seeds of the starts.
    """

    cases: tuple[tuple[float, float], ...] = (
        (1e-5, 1e-5), (1e-5, 3e-6), (1e-5, 1e-6), (1e-5, 1e-7), (1e-5, 1e-8), (5e-6, 1e-7),
    )  # fmt: skip
    restarts: int = 2
    adam_steps: int = 0
    seeds: tuple[int, ...] = (0, 1, 2)


PUBLISHED_P = 1e-5
PUBLISHED_DECAY = 1e-5


def _points(config: Config) -> list[dict[str, Any]]:
    runs = [("least squares", decay, p, config.restarts) for p, decay in config.cases]
    runs += [("Adam", PUBLISHED_DECAY, PUBLISHED_P, config.adam_steps)] if config.adam_steps else []
    names = ("solver", "decay", "p", "effort", "seed")
    return [dict(zip(names, (*run, seed), strict=True)) for run in runs for seed in config.seeds]


def _measure(solver: str, decay: float, p: float, effort: int, seed: int) -> Values:
    if solver == "Adam":
        return adam_separation(p, decay, effort, seed)
    result = separation(p, weight_decay=decay, restarts=effort, seed=seed)
    return {
        "FACT": result.fact_cosine,
        "AGOP": result.agop_cosine,
        "relgrad": result.relgrad,
        "objective": result.objective,
        "rank": int(torch.linalg.matrix_rank(result.nfm, rtol=1e-3)),
        "matrices": {"NFM": result.nfm, "FACT": result.fact, "AGOP": result.agop},
    }


def adam_separation(
    p: float, decay: float, steps: int, seed: int, width: int = 10, tau: float = 0.02
) -> dict[str, Any]:
    """Minimize the population loss as in the paper, by Adam at a rate of .01 with weight decay within the gradient.

    Args:
        p: Share of the uniform part.
        decay: Weight decay lambda.
        steps: Number of steps.
        seed: Seed of the start, which is PyTorch's initialization for both layers.
        width: Number of neurons.
        tau: Weight of ``x1 x2``.

    Returns:
        Values of a point of the experiment.
    """
    data = separation_data(p, tau)
    X, y, weights = data.X.numpy(), data.y.numpy(), data.weights.numpy()
    generator = as_generator(seed, "adam separation")
    draws = 2 * torch.rand(5 * width, generator=generator, dtype=torch.float64).numpy() - 1
    theta = np.concatenate([draws[:width] / np.sqrt(width), draws[width:] / 2])
    mean, square = np.zeros_like(theta), np.zeros_like(theta)
    gradient = np.zeros_like(theta)
    for step in range(1, steps + 2):
        a, w = theta[:width], theta[width:].reshape(width, 4)
        h = X @ w.T
        errors = 2 * weights * (h**2 @ a - y)
        slopes = 2 * a * h
        gradient[:width] = errors @ h**2
        gradient[width:] = ((slopes * errors[:, None]).T @ X).ravel()
        fact = -(w.T @ gradient[width:].reshape(w.shape)) / decay
        gradient += decay * theta
        if step > steps:
            break
        mean += 0.1 * (gradient - mean)
        square += 0.001 * (gradient**2 - square)
        theta = theta - 0.01 * (mean / (1 - 0.9**step)) / (np.sqrt(square / (1 - 0.999**step)) + 1e-8)
    nfm, jacobians = w.T @ w, slopes @ w
    agop = jacobians.T @ (weights[:, None] * jacobians)
    return {
        "FACT": cosine(fact, nfm),
        "AGOP": cosine(agop, nfm),
        "relgrad": float(np.linalg.norm(gradient) / (decay * np.linalg.norm(theta))),
        "objective": float(weights @ (h**2 @ a - y) ** 2 + decay / 2 * theta @ theta),
        "rank": int(np.linalg.matrix_rank(nfm, rtol=1e-3)),
        "matrices": {name: torch.from_numpy(m) for name, m in (("NFM", nfm), ("FACT", fact), ("AGOP", agop))},
    }


@experiment(
    "fact-fig4",
    "Data on which FACT holds and the NFA fails",
    covers=("figure 4", "theorem 3.4"),
    smoke=Config(cases=((1e-5, 1e-5), (1e-5, 1e-7), (5e-6, 1e-7)), restarts=1, seeds=(0,)),
    quick=Config(),
    full=Config(restarts=12, adam_steps=1_000_000),
    measure=_measure,
    points=_points,
)
def _conclude(config: Config, outcomes: Outcomes) -> Result:
    columns = ("FACT", "AGOP", "relgrad", "objective", "rank")
    table = outcomes.table("solver", "p", {"lambda": "decay"}, "seed", values=columns)
    solved = table[table["solver"] == "least squares"]
    ours = solved[solved["p"] == PUBLISHED_P]
    published = ours[ours["lambda"] == PUBLISHED_DECAY]
    least = ours[ours["lambda"] == ours["lambda"].min()]
    rarer = solved[solved["p"] < PUBLISHED_P]
    claims = [
        at_least("cosine of FACT with the NFM", "figure 4", 0.994, solved["FACT"],
                 note="at minimizers to rounding FACT is exact; the paper's .994 is what Adam left"),
        at_most("cosine of the AGOP with the NFM at the published lambda of 1e-5", "figure 4", 0.068, published["AGOP"],
                note="the best minimizer there is of rank one, x3 x4 alone being too dear, and the AGOP fits it; Adam "
                "from random starts was tried as well (scale full)"),
        at_most(f"cosine of the AGOP with the NFM at lambda = {least['lambda'].iloc[0]:g}", "figure 4", 0.068,
                least["AGOP"], note="there the separation of theorem 3.4 is clear, but its limit is .0813 at p = 1e-5"),
        at_most("cosine of the AGOP with the NFM at p = 5e-6 and lambda = 1e-7", "figure 4", 0.068, rarer["AGOP"],
                note="half the published p and a hundredth of the published lambda"),
        holds("the NFA can be nearly uncorrelated with the weights while FACT holds", "theorem 3.4",
              (least["AGOP"] < 0.1) & (least["FACT"] > 0.999)),
    ]  # fmt: skip
    adam = table[table["solver"] == "Adam"]
    if len(adam):
        claims += [
            at_least("cosine of FACT with the NFM after Adam", "figure 4", 0.994, adam["FACT"], 0.01,
                     "what is left of the gradient differs from run to run"),
            at_most("cosine of the AGOP with the NFM after Adam at lambda = 1e-5", "figure 4", 0.068, adam["AGOP"],
                    note="a million steps from PyTorch's initialization, decay within the gradient, end at the "
                    "minimizer of rank one that the solver finds too; the published number fits a smaller lambda or p"),
        ]  # fmt: skip
    shown = outcomes[list(solved.index)[list(solved["lambda"]).index(least["lambda"].iloc[0])]]
    matrices = {name: shown.values["matrices"][name] for name in ("NFM", "FACT", "AGOP")}
    subtitles = {name: f"cosine with NFM {shown.values[name]:.3f}" for name in ("FACT", "AGOP")}
    subtitles["NFM"] = f"$\\lambda$ = {shown.point['decay']:g}"
    picture = matrix_row(matrices, titles={"NFM": "NFM  $W^T W$"}, subtitles=subtitles)
    return Result(
        claims,
        {"minimizers": table},
        {"figure 4": picture, "by weight decay": _by_decay(ours)},
        "The population loss is E (f - y)^2 + lambda/2 |theta|^2 over 81 points, minimized to rounding by Levenberg "
        "and Marquardt's method from random starts. The published numbers belong to a lambda below 1e-6, not to 1e-5.",
    )


def _by_decay(solved: pd.DataFrame) -> Figure:
    means = solved.groupby("lambda")[["FACT", "AGOP"]].mean()
    fig, ((ax,),) = panels(4.2, 2.8)
    draw_lines(ax, means.index, {name: means[name] for name in ("FACT", "AGOP")}, marked=True, clip_on=False)
    ax.axvline(PUBLISHED_DECAY, color="#999999", linewidth=0.8, linestyle=":")
    ax.annotate("published λ", (PUBLISHED_DECAY, 0.5), (-4, 0), textcoords="offset points", ha="right", fontsize=8)
    label(ax, "weight decay $\\lambda$", "cosine with $W^T W$", log="x", ylim=(0, 1.04), legend="center left")
    return fig
