"""Tables 1 and 2 of the FACT paper: which matrix a trained first layer's ``W^T W`` resembles."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pandas as pd
from matplotlib.figure import Figure

from featlearn.lab.experiments.claim import Claim, about, at_least, holds, not_tried
from featlearn.lab.experiments.experiment import Experiment, Outcome, Result
from featlearn.lab.experiments.fact.networks import (
    correlations,
    decayed_network,
    decayed_report,
    image_data,
    network_for,
)
from featlearn.plots import MARKERS, PALETTE, new_figure, style

__all__ = ["EXPERIMENT", "Config"]

COMPARED = ("FACT", "symmetrised FACT", "√AGOP", "√eNFA")
PUBLISHED = {
    ("mnist", 1000, 1e-4): (0.890, 0.956, 0.899, 0.903),
    ("mnist", 2000, 1e-4): (0.988, 0.998, 0.923, 0.923),
    ("mnist", 5000, 1e-4): (0.995, 1.000, 0.924, 0.917),
    ("mnist", 60000, 1e-4): (0.999, 1.000, 0.909, 0.903),
    ("cifar10", 50000, 1e-3): (0.830, 0.929, 0.793, 0.797),
    ("cifar10", 50000, 1e-4): (0.896, 0.943, 0.722, 0.714),
}
"""Of `COMPARED`, by set, images and weight decay; `PAPER_EPOCHS` at width 1024."""

TRIED = (
    "; tried on 1,000 images with seed 0 against the published .890, .956, .899, .903: standardised pixels, biases and "
    "a third hidden layer leave FACT below .3; the loss summed over outputs gives .413, width 256 .365, with 400 "
    "epochs .594 and with 800 .785. What comes near is a decay of 1e-3: see the claims at that decay"
)

OTHER_DECAY = 1e-3
"""Of the nine settings of `TRIED` the one nearest to the published column for 1,000 MNIST images."""

ENOUGH = 0.95
"""Of the initial ``W^T W`` to be forgotten before a run counts as one near a critical point."""

PAPER_EPOCHS = 200

NAMES = {"mnist": "MNIST", "cifar10": "CIFAR-10", "digits": "digits"}


@dataclass(frozen=True)
class Config:
    """Networks of two hidden layers ("depth 3").

    Attributes:
        cases: Set, images, width, weight decay, epochs and number of seeds.
    """

    cases: tuple[tuple[str, int, int, float, int, int], ...]


def _points(config: Config) -> list[dict[str, Any]]:
    return [
        {"data": data, "n": n, "width": width, "weight_decay": decay, "epochs": epochs, "seed": seed}
        for data, n, width, decay, epochs, seeds in config.cases
        for seed in range(seeds)
    ]


def _measure(data: str, n: int, width: int, weight_decay: float, epochs: int, seed: int) -> Mapping[str, Any]:
    rows = image_data(data, n, seed)
    model = network_for(rows, width, 2, seed)
    history = decayed_network(rows, model, weight_decay=weight_decay, epochs=epochs, seed=seed)
    first = decayed_report(model, rows, weight_decay, layers="0")["0"]
    return {
        "correlations": correlations(first),
        "relgrad": first.relgrad,
        "loss": history.final_loss,
        "steps": len(history.loss),
    }


def _conclude(config: Config, outcomes: Sequence[Outcome]) -> Result:
    frame = pd.DataFrame(
        [dict(point) | dict(found["correlations"]) | {k: found[k] for k in ("relgrad", "loss", "steps")}
         for point, found in outcomes]
    )  # fmt: skip
    claims: list[Claim] = []
    for case in config.cases:
        claims += _case_claims(case, _rows_of(frame, case))
    tried = {(data, n, decay) for data, n, width, decay, epochs, _ in config.cases if _as_published(width, epochs)}
    for (data, n, decay), numbers in PUBLISHED.items():
        if (data, n, decay) not in tried:
            claims.append(
                not_tried(f"Pearson correlation of FACT with the NFM, {_titled(data, n, decay)}", "table 2", numbers[0],
                          "the paper's size, 1024 wide for 200 epochs")
            )  # fmt: skip
    frame["forgotten"] = _forgotten(frame["steps"], frame["weight_decay"])
    enough = frame[frame["forgotten"] > ENOUGH]
    if len(enough):
        claims.append(
            holds(
                "FACT and its symmetrisation are nearer to the NFM than √AGOP and √eNFA", "table 2",
                enough[["FACT", "symmetrised FACT"]].min(axis=1) > enough[["√AGOP", "√eNFA"]].max(axis=1),
                note=f"the {len(enough)} runs long enough for weight decay to leave less than 5% of the initial W^T W; "
                "the paper excepts MNIST with 1,000 images",
            )
        )  # fmt: skip
    claims.append(
        holds(
            "√AGOP and √eNFA are nearer to the NFM than AGOP and eNFA", "section 3.1",
            (frame["√AGOP"] > frame["AGOP"]) & (frame["√eNFA"] > frame["eNFA"]), share=0.9,
            reason="the paper has one run a column; a run in ten may be a draw",
        )
    )  # fmt: skip
    shown = frame.rename(columns={"data": "set", "weight_decay": "weight decay"})
    return Result(
        tuple(claims),
        {"Pearson correlation with the first layer's W^T W, by seed": shown},
        {"table 2": _figure(config, frame)},
        "The networks have no biases, two hidden layers (three weight matrices) and pixels from 0 to 1; the paper says "
        "'depth 3' and PyTorch's initialisation. FACT is exact at a critical point only. What weight decay has to "
        "forget takes (1 - momentum)/(lr wd) steps, 10,000 at a decay of 1e-4 and 1,000 at 1e-3, so that 200 "
        "epochs are "
        "few for few images; relgrad is |grad + lambda W| / (lambda |W|) of the first layer, 0 at a critical point. "
        "Other sets, widths and decays than the paper's stand in where a CPU cannot hold its own.",
    )


def _forgotten(steps: pd.Series, decay: pd.Series) -> pd.Series:
    """Share of the initial ``W^T W`` that weight decay alone takes away, at the rates of `decayed_network`."""
    mean_rate = 0.05  # of a cosine schedule from .1
    left: pd.Series = np.exp(-2 * steps * mean_rate * decay / 0.1)
    return 1.0 - left


def _rows_of(frame: pd.DataFrame, case: tuple[Any, ...]) -> pd.DataFrame:
    data, n, width, decay, epochs, _ = case
    chosen = (frame["data"] == data) & (frame["n"] == n) & (frame["width"] == width)
    found: pd.DataFrame = frame[chosen & (frame["weight_decay"] == decay) & (frame["epochs"] == epochs)]
    return found


def _case_claims(case: tuple[Any, ...], rows: pd.DataFrame) -> list[Claim]:
    data, n, width, decay, epochs, _ = case
    title = _titled(data, n, decay)
    guessed = data == "mnist" and decay == OTHER_DECAY
    column = (data, n, 1e-4 if guessed else decay)
    if column in PUBLISHED and _as_published(width, epochs):
        how = f"relative gradient {rows['relgrad'].mean():.2f} after {rows['steps'].iloc[0]:,} steps"
        guess = (
            "; the table says a decay of 1e-4. This one was picked after the fact, by one column and one seed, and "
            "then held against the other columns"
        )
        return [
            about(
                f"Pearson correlation of {name} with the NFM, {title}{' in place of 0.0001' if guessed else ''}",
                "table 2", number, rows[name],
                max(0.02, 2 * float(rows[name].std(ddof=1)) if len(rows) > 1 else 0.02),
                "one run in the paper: two standard deviations over seeds here, and at least .02 for the order of "
                "images, the scale of pixels and biases, which it does not tell",
                note=how + (guess if guessed else TRIED),
            )
            for name, number in zip(COMPARED, PUBLISHED[column], strict=True)
        ]  # fmt: skip
    model = {
        "digits": ("mnist", 5000, 1e-4),
        "mnist": ("mnist", n, 1e-4) if ("mnist", n, 1e-4) in PUBLISHED else ("mnist", 5000, 1e-4),
        "cifar10": ("cifar10", 50000, decay),
    }[data]
    return [
        at_least(
            f"Pearson correlation of {name} with the NFM, {title}", "table 2", PUBLISHED[model][i], rows[name],
            0.01 if data != "cifar10" else 0.1,
            "what lies between the published columns for 2,000 and 5,000 images, or between two decays of CIFAR-10",
            note=f"stands in for {_titled(*model)}: width {width}, {epochs} epochs, {rows['steps'].iloc[0]:,} steps, "
            f"relative gradient {rows['relgrad'].mean():.2f}",
        )
        for i, name in enumerate(COMPARED[:2])
    ]  # fmt: skip


def _as_published(width: int, epochs: int) -> bool:
    return width == 1024 and epochs == PAPER_EPOCHS


def _titled(data: str, n: int, decay: float) -> str:
    return f"{NAMES[data]}, {n:,} images, decay {decay:g}"


def _figure(config: Config, frame: pd.DataFrame) -> Figure:
    """A group of points a case, and the published ones as bars behind them."""
    with style():
        fig = new_figure(max(4.6, 1.6 + 1.35 * len(config.cases)), 3.2)
        ax = fig.subplots()
        for i, case in enumerate(config.cases):
            rows = _rows_of(frame, case)
            column = (case[0], case[1], 1e-4 if case[0] == "mnist" else case[3])  # MNIST was trained at one decay
            published = PUBLISHED.get(column) if _as_published(case[2], case[4]) else None
            for j, name in enumerate(COMPARED):
                x = i + 0.2 * (j - 1.5)
                if published is not None:
                    ax.hlines(published[j], x - 0.09, x + 0.09, color=PALETTE[j], linewidth=5, alpha=0.3)
                ax.plot(
                    np.full(len(rows), x), rows[name], linestyle="", marker=MARKERS[j], markersize=5,
                    color=PALETTE[j], alpha=0.85, label=name if i == 0 else None,
                )  # fmt: skip
        ax.set_xticks(
            range(len(config.cases)),
            [f"{NAMES[c[0]]}\n{c[1]:,} images\nwidth {c[2]}\ndecay {c[3]:g}\n{c[4]} epochs" for c in config.cases],
        )
        ax.set_xlim(-0.5, len(config.cases) - 0.5)
        lowest = float(frame[list(COMPARED)].min().min())
        ax.set_ylim(min(0.7, np.floor(lowest * 10) / 10), 1.01)
        ax.set_ylabel("Pearson correlation with $W^T W$")
        ax.grid(axis="y")
        ax.legend(ncols=4, loc="lower center", bbox_to_anchor=(0.5, 1.0), handletextpad=0.2, columnspacing=1.2)
    return fig


EXPERIMENT = Experiment(
    name="fact-table2",
    title="FACT, AGOP and eNFA against the first layer of trained networks",
    covers=("table 1", "table 2"),
    scales={
        "smoke": Config(cases=(("digits", 120, 16, 1e-2, 10, 1),)),
        "quick": Config(
            cases=(("digits", 1500, 256, 1e-3, 200, 3), ("mnist", 1000, 256, 1e-3, 200, 3))
        ),
        "full": Config(
            cases=(
                ("mnist", 1000, 1024, 1e-4, 200, 3),
                ("mnist", 2000, 1024, 1e-4, 200, 3),
                ("mnist", 5000, 1024, 1e-4, 200, 3),
                ("mnist", 5000, 1024, 1e-4, 1000, 3),
                ("mnist", 1000, 1024, 1e-3, 200, 3),
                ("mnist", 2000, 1024, 1e-3, 200, 3),
                ("mnist", 5000, 1024, 1e-3, 200, 3),
                ("cifar10", 10000, 256, 1e-3, 100, 3),
                ("cifar10", 10000, 256, 1e-4, 200, 3),
            )
        ),
    },
    points=_points,
    measure=_measure,
    conclude=_conclude,
    data=("mnist", "cifar10"),
)  # fmt: skip
