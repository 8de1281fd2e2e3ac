"""Figure 11 of the FACT paper: deep linear networks, where the ansatz requires the power 1/L and FACT none.

References:
    Boix-Adsera, Mallinar, Simon & Belkin (2025), https://arxiv.org/abs/2507.05644, figure 11.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from matplotlib.figure import Figure
from torch import Tensor

from featlearn.datasets import linear_task
from featlearn.linalg import cosine, psd_power
from featlearn.models import mlp
from featlearn.papers._figures import PALETTE, label, panels
from featlearn.papers.claim import at_least, at_most, holds
from featlearn.papers.experiment import Outcomes, Result, Values, experiment
from featlearn.theory import balance

POWERS = tuple(float(s) for s in np.round(np.concatenate([np.arange(0.1, 1.0, 0.02), [1.0]]), 2))


@dataclass(frozen=True)
class Config:
    """Configuration of the paper, but for full batches and a larger rate, see `train_linear`."""

    depths: tuple[int, ...] = (2, 3, 4, 5)
    n: int = 5000
    width: int = 64
    weight_decay: float = 0.01
    lr: float = 0.04
    steps: int = 8_000
    seeds: tuple[int, ...] = (0, 1, 2)


def train_linear(
    weights: list[Tensor], X: Tensor, y: Tensor, weight_decay: float, lr: float, steps: int
) -> tuple[list[Tensor], list[Tensor]]:
    """Minimize the mean squared error of ``W_L ... W_1 x`` plus ``lambda/2 sum |W|^2`` by full-batch gradient descent.

    The loss depends on the data through ``X^T X`` and ``y^T X`` alone. Products are taken from the narrow ends, so that
    a step takes ``h^2`` operations rather than ``h^3``. The paper takes batches of 128 at .005 for 200,000 steps.

    Args:
        weights: Initial layers, the first one first; updated in place.
        X: Inputs, (n, d).
        y: Labels, (n, c).
        weight_decay: Weight decay lambda.
        lr: Learning rate.
        steps: Number of steps.

    Returns:
        Layers, and the gradient of the loss (without decay) for each.
    """
    n, c = y.shape
    second, cross = X.mT @ X / n, y.mT @ X / n
    for step in range(steps + 1):
        below = [torch.eye(X.shape[1], dtype=X.dtype)]
        for w in weights:
            below.append(w @ below[-1])
        above = (2 / c) * (below[-1] @ second - cross)
        gradients = []
        for w, inner in zip(reversed(weights), reversed(below[:-1]), strict=True):
            gradients.append((above, inner))
            above = w.mT @ above
        gradients.reverse()
        if step == steps:
            return weights, [left @ right.mT for left, right in gradients]
        for w, (left, right) in zip(weights, gradients, strict=True):
            w.mul_(1 - lr * weight_decay).addmm_(left, right.mT, alpha=-lr)
    raise AssertionError


def _measure(n: int, width: int, weight_decay: float, lr: float, depth: int, steps: int, seed: int) -> Values:
    task = linear_task(n, generator=seed, dtype=torch.float64)
    sizes = [task.X.shape[1], *[width] * (depth - 1), task.y.shape[1]]
    start = mlp(sizes, activation="identity", generator=seed, dtype=torch.float64)
    weights = [p.detach().clone() for p in start.parameters()]
    weights, gradients = train_linear(weights, task.X, task.y, weight_decay, lr, steps)
    first = weights[0]
    nfm = first.mT @ first
    product = torch.linalg.multi_dot(weights[::-1])
    agop = product.mT @ product
    rest = sum(float((g + weight_decay * w).square().sum()) for g, w in zip(gradients, weights, strict=True))
    size = sum(float(w.square().sum()) for w in weights)
    return {
        "FACT": cosine(-(first.mT @ gradients[0]) / weight_decay, nfm),
        "AGOP": [cosine(psd_power(agop, s), nfm) for s in POWERS],
        "AGOP at 1/L": cosine(psd_power(agop, 1 / depth), nfm),
        "balance": max(balance(weights)),
        "rank": int(torch.linalg.matrix_rank(product, rtol=1e-3)),
        "relgrad": (rest / size) ** 0.5 / weight_decay,
    }


@experiment(
    "fact-fig11",
    "Deep linear networks: the power 1/L",
    covers=("figure 11", "appendix C"),
    smoke=Config(depths=(2, 3), n=200, width=16, steps=500, seeds=(0,)),
    quick=Config(),
    full=Config(width=512, steps=12_000),
    measure=_measure,
    over={"depth": "depths", "seed": "seeds"},
)
def _conclude(config: Config, outcomes: Outcomes) -> Result:
    columns = ("FACT", "AGOP at 1/L", "balance", "rank", "relgrad")
    table = outcomes.table({"L": "depth"}, "seed", values=columns)
    table["best power"] = [POWERS[int(np.argmax(values["AGOP"]))] for values in outcomes.values]
    near = (table["best power"] - 1 / table["L"]).abs() <= 0.02
    claims = (
        at_least("cosine of FACT with the NFM, L = 2 to 5", "figure 11", 0.999, table["FACT"]),
        at_least("cosine of AGOP^(1/L) with the NFM, L = 2 to 5", "figure 11", 1.0, table["AGOP at 1/L"], 0.005,
                 "the paper says 'close to 1'"),
        holds("the best power of the AGOP is 1/L", "appendix C", near,
              note="among powers of .02 apart; so 1/2 for two layers only"),
        at_most("imbalance of neighboring layers, relative", "appendix C", 0.0, table["balance"], 0.01,
                "the paper calls their singular values identical; what is left decays like exp(-2 lr wd steps)"),
    )  # fmt: skip
    return Result(
        claims,
        {"by depth": table},
        {"figure 11": _figure(outcomes)},
        f"Full batches at {config.lr:g} for {config.steps:,} steps and hidden layers of {config.width} (512 in the "
        "paper); the critical points are those of the paper's batches of 128 at .005, without their noise.",
    )


def _figure(outcomes: Outcomes) -> Figure:
    fig, ((ax,),) = panels(5.8, 3.0)
    for (depth, runs), color in zip(outcomes.values_by("depth").items(), PALETTE, strict=False):
        ax.plot(POWERS, np.mean([v["AGOP"] for v in runs], axis=0), color=color, label=f"$AGOP^s$, L = {depth}")
        ax.plot(1 / depth, float(np.mean([v["AGOP at 1/L"] for v in runs])), color=color, marker="o", markersize=5)
        ax.axvline(1 / depth, color=color, linewidth=0.7, linestyle=":")
    fact = float(np.mean([values["FACT"] for values in outcomes.values]))
    ax.axhline(fact, color="#000000", linewidth=1.0, linestyle="--", label="FACT, all L")
    legend = {"loc": "center left", "bbox_to_anchor": (1.0, 0.5)}
    label(ax, "power s of the AGOP  (dots: s = 1/L)", "cosine with $W_1^T W_1$", legend=legend)
    return fig
