"""Discussion of the tangent features paper: the final tangent kernel against the average one."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import pandas as pd
import torch
from matplotlib.figure import Figure

from featlearn._utils.rng import as_generator
from featlearn.linalg import cosine, pearson
from featlearn.papers.adaptive.image_networks import ImageConfig, adapted_kernels, image_points
from featlearn.papers.claim import at_least, holds
from featlearn.papers.experiment import Experiment, Outcome, Result
from featlearn.plots import PALETTE, new_figure, style

__all__ = ["EXPERIMENT"]


def _measure(**point: Any) -> Mapping[str, Any]:
    found = adapted_kernels(**point)
    scale = float((found.average * found.final).sum() / found.average.square().sum())
    rows = np.triu_indices(len(found.average))
    chosen = as_generator(point["seed"], "entries")
    some = torch.randperm(len(rows[0]), generator=chosen)[:1000].numpy()
    return {
        "cosine": cosine(found.average, found.final),
        "Pearson": pearson(found.average, found.final),
        "initial cosine": cosine(found.initial, found.final),
        "scale": scale,
        "trace": float(found.final.trace() / found.average.trace()),
        "average": found.average[rows][some].float(),
        "final": found.final[rows][some].float(),
    }


def _conclude(config: ImageConfig, outcomes: Sequence[Outcome]) -> Result:
    columns = ("cosine", "Pearson", "initial cosine", "scale", "trace")
    table = pd.DataFrame(
        [{"target": p["target"], "seed": p["seed"]} | {n: found[n] for n in columns} for p, found in outcomes]
    )
    claims = (
        at_least("cosine of the final with the average tangent kernel", "discussion", 0.95, table["cosine"], 0.0,
                 "'closely resembles a re-scaled version', without a number"),
        holds("it is nearer to the average kernel than to the initial one", "discussion",
              table["cosine"] > table["initial cosine"]),
        holds("the final features are larger", "discussion", table["trace"] > 1,
              note="ratio of traces " + ", ".join(f"{v:.2f}" for v in table["trace"])),
    )  # fmt: skip
    return Result(
        claims,
        {"by target and seed": table},
        {"average against final": _figure(outcomes)},
        f"{config.n} images of {config.data}, the networks of figure 1 in all else.",
    )


def _figure(outcomes: Sequence[Outcome]) -> Figure:
    with style():
        fig = new_figure(6.6, 3.1)
        for ax, (point, found) in zip(fig.subplots(1, 2), outcomes[:2], strict=True):
            x, y = np.asarray(found["average"]), np.asarray(found["final"])
            ax.scatter(x, y, s=6, color=PALETTE[0], alpha=0.35, linewidth=0)
            ends = np.array([min(0.0, x.min()), x.max()])
            ax.plot(ends, found["scale"] * ends, color=PALETTE[1], label=f"{found['scale']:.2f} times")
            ax.set_title(f"{point['target']} targets, cosine {found['cosine']:.3f}")
            ax.set_xlabel("average tangent kernel")
            ax.set_ylabel("final tangent kernel")
            ax.grid()
            ax.legend(loc="upper left")
    return fig


EXPERIMENT = Experiment(
    name="adaptive-final",
    title="The final tangent kernel is the average one, re-scaled",
    covers=("section 4 (average against final features)",),
    scales={
        "smoke": ImageConfig("digits", n=30, width=12, steps=60, points=3, seeds=(0,)),
        "quick": ImageConfig("digits", n=200, points=20),
        "full": ImageConfig(n=300, points=20),
    },
    points=image_points,
    measure=_measure,
    conclude=_conclude,
    data=("mnist",),
)
