"""Figure 4 of the FACT paper: data on which FACT holds and the neural feature ansatz does not."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import pandas as pd
import torch
from matplotlib.figure import Figure
from torch import Tensor

from featlearn._utils.rng import as_generator
from featlearn.linalg import cosine
from featlearn.papers._figures import draw_lines, label, panels
from featlearn.papers.claim import at_least, at_most, holds
from featlearn.papers.experiment import Outcomes, Result, Values, experiment
from featlearn.plots import matrix_row
from featlearn.theory import separation, separation_data


@dataclass(frozen=True)
class Config:
    """Weight decays to minimize at, and how long to run the paper's own optimizer.

    Attributes:
        cases: Share p of the uniform part and weight decay, each solved to rounding, from several starts.
        restarts: Random starts of each solve.
        adam_steps: Steps of Adam at .01 with the published decay; 0 leaves it out.
        seeds: Of the starts.
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
    solved = [
        {"solver": "least squares", "decay": decay, "p": p, "effort": config.restarts, "seed": seed}
        for p, decay in config.cases
        for seed in config.seeds
    ]
    adam = {"solver": "Adam", "decay": PUBLISHED_DECAY, "p": PUBLISHED_P, "effort": config.adam_steps}
    return solved + [adam | {"seed": seed} for seed in config.seeds if config.adam_steps]


def _measure(solver: str, decay: float, p: float, effort: int, seed: int) -> Values:
    if solver == "Adam":
        return adam_separation(p, decay, effort, seed)
    found = separation(p, weight_decay=decay, restarts=effort, seed=seed)
    return {
        "FACT": found.fact_cosine,
        "AGOP": found.agop_cosine,
        "relgrad": found.relgrad,
        "objective": found.objective,
        "rank": int(torch.linalg.matrix_rank(found.nfm, rtol=1e-3)),
        "matrices": {"NFM": found.nfm, "FACT": found.fact, "AGOP": found.agop},
    }


def adam_separation(
    p: float, decay: float, steps: int, seed: int, width: int = 10, tau: float = 0.02
) -> dict[str, Any]:
    """What the paper ran: Adam at a rate of .01 on the population loss, weight decay within the gradient.

    Args:
        p: Share of the uniform part.
        decay: lambda.
        steps: Of Adam.
        seed: Of the start, which is PyTorch's for both layers.
        width: Neurons.
        tau: Weight of ``x1 x2``.
    """
    data = separation_data(p, tau)
    X, y, weights = data.X.numpy(), data.y.numpy(), data.weights.numpy()
    generator = as_generator(seed, "adam separation")
    draws = 2 * torch.rand(5 * width, generator=generator, dtype=torch.float64).numpy() - 1
    theta = np.concatenate([draws[:width] / np.sqrt(width), draws[width:] / 2])
    mean, square = np.zeros_like(theta), np.zeros_like(theta)
    gradient = np.zeros_like(theta)
    for step in range(1, steps + 1):
        a, w = theta[:width], theta[width:].reshape(width, 4)
        h = X @ w.T
        errors = 2 * weights * (h**2 @ a - y)
        gradient[:width] = errors @ h**2
        gradient[width:] = ((2 * a * h * errors[:, None]).T @ X).ravel()
        gradient += decay * theta
        mean += 0.1 * (gradient - mean)
        square += 0.001 * (gradient**2 - square)
        theta = theta - 0.01 * (mean / (1 - 0.9**step)) / (np.sqrt(square / (1 - 0.999**step)) + 1e-8)
    a, w = theta[:width], theta[width:].reshape(width, 4)
    h = X @ w.T
    errors = weights * (h**2 @ a - y)
    slopes = 2 * a * h
    nfm, jacobians = w.T @ w, slopes @ w
    by_weight = 2 * (slopes * errors[:, None]).T @ X
    by_readout = 2 * errors @ h**2
    agop = jacobians.T @ (weights[:, None] * jacobians)
    fact = -(w.T @ by_weight) / decay
    rest = np.concatenate([by_readout + decay * a, (by_weight + decay * w).ravel()])
    return {
        "FACT": cosine(_tensor(fact), _tensor(nfm)),
        "AGOP": cosine(_tensor(agop), _tensor(nfm)),
        "relgrad": float(np.linalg.norm(rest) / (decay * np.linalg.norm(theta))),
        "objective": float(weights @ (h**2 @ a - y) ** 2 + decay / 2 * theta @ theta),
        "rank": int(np.linalg.matrix_rank(nfm, rtol=1e-3)),
        "matrices": {"NFM": _tensor(nfm), "FACT": _tensor(fact), "AGOP": _tensor(agop)},
    }


def _tensor(matrix: Any) -> Tensor:
    return torch.from_numpy(np.asarray(matrix, dtype=np.float64))


@experiment(
    "fact-fig4",
    "Data on which FACT holds and the NFA fails",
    covers=("figure 4", "theorem 3.4"),
    smoke=Config(cases=((1e-5, 1e-5), (1e-5, 1e-7), (5e-6, 1e-7)), restarts=1, seeds=(0,)),
    quick=Config(adam_steps=0),
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
    matrices = shown.values["matrices"]
    picture = matrix_row(
        {name: matrices[name] for name in ("NFM", "FACT", "AGOP")},
        titles={"NFM": "NFM  $W^T W$"},
        subtitles={
            "NFM": f"$\\lambda$ = {shown.point['decay']:g}",
            "FACT": f"cosine with NFM {shown.values['FACT']:.3f}",
            "AGOP": f"cosine with NFM {shown.values['AGOP']:.3f}",
        },
    )
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
