"""Figures 3, 8, 9 and 10 of the FACT paper: all layers of a deep network during training, forward and backward.

References:
    Boix-Adsera, Mallinar, Simon & Belkin (2025), https://arxiv.org/abs/2507.05644, figures 3, 8, 9 and 10.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import pandas as pd
from matplotlib.figure import Figure

from featlearn.papers._figures import MARKERS, PALETTE, label, panels
from featlearn.papers.claim import Claim, at_least, holds, not_tried
from featlearn.papers.experiment import Outcomes, Result, Values, experiment
from featlearn.papers.fact.networks import (
    BACKWARD,
    FORWARD,
    NAMES,
    correlations,
    decayed_network,
    decayed_report,
    image_data,
    network_for,
)

SHOWN = 3
"""Layers whose course over training is drawn, as in figures 8 and 10."""


@dataclass(frozen=True)
class Config:
    """Configuration of networks with several hidden layers.

    Attributes:
        cases: Tuples of data set, images, width, weight decay, epochs and number of seeds.
        looks: Number of measurements during training.
        hidden: Number of hidden layers.
    """

    cases: tuple[tuple[str, int, int, float, int, int], ...]
    looks: int = 10
    hidden: int = 5


def _points(config: Config) -> list[dict[str, Any]]:
    names = ("data", "n", "width", "weight_decay", "epochs", "seed", "looks", "hidden")
    runs = [(*case, s, config.looks, config.hidden) for *case, seeds in config.cases for s in range(seeds)]
    return [dict(zip(names, run, strict=True)) for run in runs]


def _measure(
    data: str, n: int, width: int, weight_decay: float, epochs: int, seed: int, looks: int, hidden: int
) -> Values:
    rows = image_data(data, n, seed)
    model = network_for(rows, width, hidden, seed)
    per_epoch = -(-n // 64)
    times = sorted({max(1, round(epochs * (i + 1) / looks)) for i in range(looks)})[:-1]
    course: dict[str, Any] = {}

    def look(epoch: int) -> None:
        report = decayed_report(model, rows, weight_decay)
        course[str(epoch)] = [
            correlations(report[str(2 * i)])
            | correlations(report[str(2 * i)], backward=True)
            | {"relgrad": report[str(2 * i)].relgrad}
            for i in range(hidden)
        ]

    def callback(step: int, _: float) -> None:
        if step % per_epoch == 0 and step // per_epoch in times:
            look(step // per_epoch)

    history = decayed_network(rows, model, weight_decay, epochs=epochs, generator=seed, callback=callback)
    look(epochs)
    return {"course": course, "loss": history.final_loss, "steps": len(history.loss)}


@experiment(
    "fact-fig3",
    "FACT, AGOP and eNFA in every layer, over training, forward and backward",
    covers=("figure 3", "figure 8", "figure 9", "figure 10"),
    smoke=Config(cases=(("digits", 150, 16, 1e-3, 4, 1),), looks=2, hidden=3),
    quick=Config(cases=(("digits", 1500, 128, 1e-3, 200, 2), ("mnist", 1000, 128, 1e-3, 400, 2))),
    full=Config(cases=(("mnist", 2000, 256, 1e-3, 200, 2), ("cifar10", 5000, 256, 1e-3, 80, 1))),
    measure=_measure,
    points=_points,
    data=("mnist", "cifar10"),
)
def _conclude(config: Config, outcomes: Outcomes) -> Result:
    rows = []
    for point, values in outcomes:
        run = {"case": f"{NAMES[point['data']]}, {point['n']:,} images", "seed": point["seed"]}
        for epoch, layers in values["course"].items():
            for i, numbers in enumerate(layers, 1):
                rows.append(run | {"epoch": int(epoch), "layer": i} | dict(numbers) | {"loss": values["loss"]})
    frame = pd.DataFrame(rows)
    ends = frame[frame["epoch"] == frame.groupby("case")["epoch"].transform("max")]
    return Result(
        _claims(frame, ends),
        {"at the end of training": ends.reset_index(drop=True)},
        {
            "figure 3": _by_depth(ends, list(FORWARD), "$W^T W$"),
            "figure 9": _by_depth(ends, list(BACKWARD), "$W W^T$"),
            "figure 8": _by_epoch(frame, list(FORWARD), "$W^T W$"),
            "figure 10": _by_epoch(frame, list(BACKWARD), "$W W^T$"),
        },
        "Five hidden ReLU layers without biases, trained as for table 2; the paper trains on all images at width 1024 "
        "(3072 for CIFAR-10) and a decay of 1e-4, five runs. Here fewer images, narrower layers and a decay of 1e-3, "
        "whose time constant of 1,000 steps the training outlasts. Pearson correlations; the readout, whose matrices "
        "are small, is left out.",
    )


def _claims(frame: pd.DataFrame, ends: pd.DataFrame) -> tuple[Claim, ...]:
    runs = ends.groupby(["case", "seed"], sort=False)
    middle = frame[(frame["epoch"] <= 0.5 * frame.groupby("case")["epoch"].transform("max")) & (frame["layer"] == 1)]
    early = middle.groupby(["case", "seed"], sort=False)[["FACT", "symmetrized FACT"]].mean()
    final = ends[ends["layer"] == 1].set_index(["case", "seed"])
    least, mean = runs[["symmetrized FACT", "symmetrized bFACT"]].min(), runs[[*FORWARD, *BACKWARD]].mean()
    return (
        at_least("Pearson correlation of symmetrized FACT in the layer where it is least", "figure 3", 0.9,
                 least["symmetrized FACT"], 0.0, "drawn near 1 for MNIST, without a number"),
        holds("FACT is nearer to W^T W than √AGOP and √eNFA, in the mean over layers", "figure 3",
              mean["FACT"] > mean[["√AGOP", "√eNFA"]].max(axis=1)),
        holds("bFACT is nearer to W W^T than √bAGOP and √beNFA, in the mean over layers", "figure 9",
              mean["bFACT"] > mean[["√bAGOP", "√beNFA"]].max(axis=1)),
        at_least("Pearson correlation of symmetrized bFACT in the layer where it is least", "figure 9", 0.9,
                 least["symmetrized bFACT"], 0.0, "drawn near 1 for MNIST, without a number"),
        holds("FACT has a low correlation for most epochs and rises sharply at the end", "figure 8",
              (early["FACT"] < 0.6) & (final["FACT"] > early["FACT"] + 0.3),
              note="first layer, mean over the first half of training and at its end"),
        holds("symmetrized FACT has a nontrivial correlation before that, above FACT's", "section 6",
              (early["symmetrized FACT"] > 0.3) & (early["symmetrized FACT"] > early["FACT"])),
        not_tried("FACT in every layer of networks trained on all of MNIST and CIFAR-10", "figure 3", 1.0,
                  "50 GPU hours", "holds"),
    )  # fmt: skip


def _lines(names: list[str]) -> dict[str, dict[str, Any]]:
    """Return the look of each line: roots and plain forms share a color, plain forms of AGOP and eNFA are dashed."""
    colors, dashes = (*PALETTE[:4], *PALETTE[2:4]), ("-", "-", "-", "-", "--", "--")
    shared = {"markersize": 4, "linewidth": 1.2, "clip_on": False}
    looks = zip(names, colors, MARKERS, dashes, strict=False)
    return {name: {"color": c, "marker": marker, "linestyle": line} | shared for name, c, marker, line in looks}


def _by_depth(ends: pd.DataFrame, names: list[str], against: str) -> Figure:
    cases = list(dict.fromkeys(ends["case"]))
    fig, (axes,) = panels(1.7 + 2.9 * len(cases), 2.9, 1, len(cases), sharey=True)
    for ax, case in zip(axes, cases, strict=True):
        rows = ends[ends["case"] == case].groupby("layer")[names]
        middle, spread = rows.mean(), rows.std().fillna(0.0)
        low, high = middle - spread, middle + spread
        for name, look in _lines(names).items():
            ax.plot(middle.index, middle[name], label=name, **look)
            ax.fill_between(middle.index, low[name], high[name], color=look["color"], alpha=0.12, linewidth=0)
        lowest = min(0.0, float(ends[names].min().min()))
        label(ax, "layer", title=case, xticks=list(middle.index), ylim=(lowest, 1.02))
    axes[0].set_ylabel(f"Pearson correlation with {against}")
    axes[-1].legend(loc="center left", bbox_to_anchor=(1.02, 0.5))
    return fig


def _by_epoch(frame: pd.DataFrame, names: list[str], against: str) -> Figure:
    cases = list(dict.fromkeys(frame["case"]))
    fig, axes = panels(1.6 + 2.4 * SHOWN, 0.5 + 2.2 * len(cases), len(cases), SHOWN, sharey=True)
    lowest = min(-0.05, float(np.floor(10 * frame[names].min().min()) / 10))
    for line, case in zip(axes, cases, strict=True):
        for layer, ax in enumerate(line, 1):
            rows = frame[(frame["case"] == case) & (frame["layer"] == layer)]
            middle = rows.groupby("epoch")[names].mean()
            for name, look in _lines(names).items():
                ax.plot(middle.index, middle[name], label=name, **look | {"markersize": 3})
            ax.set(xlabel="epoch", ylim=(lowest, 1.02))
            ax.set_title(f"{case}, layer {layer}", fontsize=9)
        line[0].set_ylabel(f"correlation with {against}")
    axes[0, -1].legend(loc="center left", bbox_to_anchor=(1.02, 0.5))
    return fig
