"""Discussion of the paper on adaptive tangent features: the final tangent kernel against the average one.

References:
    LeJeune & Alemohammad (2023), https://arxiv.org/abs/2308.15478, discussion.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from matplotlib.figure import Figure

from featlearn._utils.rng import as_generator
from featlearn.linalg import cosine, pearson
from featlearn.papers._figures import draw_proportional, label, panels
from featlearn.papers.adaptive.image_networks import IMAGE_OVER, ImageConfig, adapted_kernels
from featlearn.papers.claim import at_least, holds
from featlearn.papers.experiment import Outcome, Outcomes, Result, Values, experiment


def _measure(**point: Any) -> Values:
    kernels = adapted_kernels(**point)
    average, final = kernels.average, kernels.final
    rows = np.triu_indices(len(average))
    some = torch.randperm(len(rows[0]), generator=as_generator(point["seed"], "entries"))[:1000].numpy()
    return {
        "cosine": cosine(average, final),
        "Pearson": pearson(average, final),
        "initial cosine": cosine(kernels.initial, final),
        "scale": float((average * final).sum() / average.square().sum()),
        "trace": float(final.trace() / average.trace()),
        "average": average[rows][some].float(),
        "final": final[rows][some].float(),
    }


@experiment(
    "adaptive-final",
    "The final tangent kernel is the average one, re-scaled",
    covers=("section 4 (average against final features)",),
    smoke=ImageConfig("digits", n=30, width=12, steps=60, points=3, seeds=(0,)),
    quick=ImageConfig("digits", n=200, points=20),
    full=ImageConfig(n=300, points=20),
    measure=_measure,
    over=IMAGE_OVER,
    data=("mnist",),
)
def _conclude(config: ImageConfig, outcomes: Outcomes) -> Result:
    columns = ("cosine", "Pearson", "initial cosine", "scale", "trace")
    table = outcomes.table("target", "seed", values=columns)
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
        {"average against final": _figure(outcomes[:2])},
        f"{config.n} images of {config.data}, the networks of figure 1 in all else.",
    )


def _figure(outcomes: Sequence[Outcome]) -> Figure:
    fig, (axes,) = panels(6.6, 3.1, 1, 2)
    for ax, (point, values) in zip(axes, outcomes, strict=True):
        text = f"{values['scale']:.2f} times"
        draw_proportional(ax, values["average"], values["final"], values["scale"], text, size=6)
        title = f"{point['target']} targets, cosine {values['cosine']:.3f}"
        label(ax, "average tangent kernel", "final tangent kernel", title)
    return fig
