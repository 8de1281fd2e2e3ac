"""Tables 1 and 2 of the FACT paper: matrices that ``W^T W`` of a trained first layer resembles.

References:
    Boix-Adsera, Mallinar, Simon & Belkin (2025), https://arxiv.org/abs/2507.05644, tables 1 and 2.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import pandas as pd
from matplotlib.figure import Figure

from featlearn.datasets.images import Standardize
from featlearn.papers._figures import MARKERS, PALETTE, label, panels
from featlearn.papers.claim import Claim, about, at_least, holds, not_tried
from featlearn.papers.experiment import Outcomes, Result, Values, experiment, scalars
from featlearn.papers.fact.networks import NAMES, correlations, decayed_network, decayed_report, image_data, network_for

COMPARED = ("FACT", "symmetrized FACT", "√AGOP", "√eNFA")
PUBLISHED = {
    ("mnist", 1000, 1e-4): (0.890, 0.956, 0.899, 0.903),
    ("mnist", 2000, 1e-4): (0.988, 0.998, 0.923, 0.923),
    ("mnist", 5000, 1e-4): (0.995, 1.000, 0.924, 0.917),
    ("mnist", 60000, 1e-4): (0.999, 1.000, 0.909, 0.903),
    ("cifar10", 50000, 1e-3): (0.830, 0.929, 0.793, 0.797),
    ("cifar10", 50000, 1e-4): (0.896, 0.943, 0.722, 0.714),
}
"""Correlations of `COMPARED`, by set, images and weight decay; `PAPER_EPOCHS` at width 1024."""

TRIED = (
    "; tried on 1,000 images with seed 0 against the published .890, .956, .899, .903: standardized pixels, biases and "
    "a third hidden layer leave FACT below .3; the loss summed over outputs gives .413, width 256 .365, with 400 "
    "epochs .594 and with 800 .785. What comes near is a decay of 1e-3: see the claims at that decay"
)

TRIED_CIFAR = (
    "; with pixels from 0 to 1 FACT comes to .59 and √AGOP to .94 after 100 epochs at a decay of 1e-3, with "
    "standardized channels to .71 and .85, at width 512 to .75 and .81, and after 300 epochs to .88 and .83 (one seed "
    "each): published are .830 and .793"
)

NEAR = 0.5
"""Relative gradient of a run near a critical point. ``|FACT - W^T W|`` is at most that times ``|W|^2``."""

PAPER_EPOCHS = 200


@dataclass(frozen=True)
class Case:
    """Column of the table: a network of two hidden layers ("depth 3").

    Attributes:
        data: Set of images.
        n: Number of images.
        width: Width of the hidden layers.
        weight_decay: Weight decay lambda of the training.
        epochs: Number of passes over the images.
        seeds: Number of networks that are trained.
        standardize: Parts of the images that get mean 0 and deviation 1; None leaves pixels from 0 to 1.
    """

    data: str
    n: int
    width: int
    weight_decay: float
    epochs: int
    seeds: int = 3
    standardize: Standardize | None = None

    @property
    def settings(self) -> dict[str, Any]:
        """Arguments of its measurements, but for the seed."""
        return {k: v for k, v in asdict(self).items() if k != "seeds" and v is not None}

    @property
    def as_published(self) -> bool:
        """True if the paper has this width, number of epochs and number of images."""
        return (self.width, self.epochs, self.n) == (1024, PAPER_EPOCHS, self.column[1])

    @property
    def column(self) -> tuple[str, int, float]:
        """Corresponding column of the table, by set, images and weight decay."""
        if self.data == "cifar10":
            return ("cifar10", 50000, self.weight_decay)
        column = ("mnist", self.n, 1e-4)
        return column if self.data == "mnist" and column in PUBLISHED else ("mnist", 5000, 1e-4)

    @property
    def title(self) -> str:
        """Set, images and weight decay, for readers."""
        return _titled(self.data, self.n, self.weight_decay)


@dataclass(frozen=True)
class Config:
    """Configuration: columns of the table to train networks for."""

    cases: tuple[Case, ...]


def _points(config: Config) -> list[dict[str, Any]]:
    return [{**case.settings, "seed": seed} for case in config.cases for seed in range(case.seeds)]


def _measure(
    data: str, n: int, width: int, weight_decay: float, epochs: int, seed: int, standardize: Standardize | None = None
) -> Values:
    rows = image_data(data, n, seed, standardize)
    model = network_for(rows, width, 2, seed)
    history = decayed_network(rows, model, weight_decay, epochs=epochs, generator=seed)
    first = decayed_report(model, rows, weight_decay, layers="0")["0"]
    ends = {"relgrad": first.relgrad, "loss": history.final_loss, "steps": len(history.loss)}
    return {"correlations": correlations(first)} | ends


@experiment(
    "fact-table2",
    "FACT, AGOP and eNFA against the first layer of trained networks",
    covers=("table 1", "table 2"),
    smoke=Config((Case("digits", 120, 16, 1e-2, 10, seeds=1),)),
    quick=Config((Case("digits", 1500, 256, 1e-3, 200), Case("mnist", 1000, 256, 1e-3, 200))),
    full=Config(
        (
            *(Case("mnist", n, 1024, 1e-4, 200) for n in (1000, 2000, 5000)),
            Case("mnist", 5000, 1024, 1e-4, 1000),
            *(Case("mnist", n, 1024, 1e-3, 200) for n in (1000, 2000, 5000)),
            Case("cifar10", 10000, 256, 1e-3, 100),
            Case("cifar10", 10000, 256, 1e-3, 300, standardize="channels"),
        )
    ),
    measure=_measure,
    points=_points,
    data=("mnist", "cifar10"),
)
def _conclude(config: Config, outcomes: Outcomes) -> Result:
    frame = pd.DataFrame([{**point, **values["correlations"], **scalars(values)} for point, values in outcomes])
    by_case = {case: _rows_of(frame, case) for case in config.cases}
    claims = [claim for case, rows in by_case.items() for claim in _case_claims(case, rows)]
    tried = {case.column for case in config.cases if case.as_published}
    claims += [
        not_tried(f"Pearson correlation of FACT with the NFM, {_titled(*column)}", "table 2", numbers[0],
                  "the paper's size, 1024 wide for 200 epochs")
        for column, numbers in PUBLISHED.items() if column not in tried
    ]  # fmt: skip
    near = frame["relgrad"] < NEAR
    ahead = frame[["FACT", "symmetrized FACT"]].min(axis=1) > frame[["√AGOP", "√eNFA"]].max(axis=1)
    if near.any():
        claims.append(
            holds(
                "FACT and its symmetrization are nearer to the NFM than √AGOP and √eNFA", "table 2", ahead[near],
                note=f"the {near.sum()} runs with a relative gradient below {NEAR}, a bound that was set when the runs "
                f"had been seen; of the other {(~near).sum()}, farther from a critical point, {ahead[~near].sum()}. "
                "The paper excepts MNIST with 1,000 images",
            )
        )  # fmt: skip
    claims.append(
        holds("√AGOP and √eNFA are nearer to the NFM than AGOP and eNFA", "section 3.1",
              (frame["√AGOP"] > frame["AGOP"]) & (frame["√eNFA"] > frame["eNFA"]), share=0.9,
              reason="the paper has one run per column; a run in ten may be a draw")
    )  # fmt: skip
    shown = frame.rename(columns={"data": "set", "weight_decay": "weight decay"})
    return Result(
        claims,
        {"Pearson correlation with the first layer's W^T W, by seed": shown},
        {"table 2": _figure(by_case, float(frame[list(COMPARED)].min().min()))},
        "The networks have no biases, two hidden layers (three weight matrices) and pixels from 0 to 1; the paper says "
        "'depth 3' and PyTorch's initialization. FACT is exact at a critical point only. What weight decay has to "
        "forget takes (1 - momentum)/(lr wd) steps, 10,000 at a decay of 1e-4 and 1,000 at 1e-3, so that 200 epochs "
        "are few for few images; relgrad is |grad + lambda W| / (lambda |W|) of the first layer, 0 at a critical "
        "point. Other sets, widths and decays than the paper's stand in where a CPU cannot hold its own.",
    )


def _rows_of(frame: pd.DataFrame, case: Case) -> pd.DataFrame:
    chosen = (frame[list(case.settings)] == pd.Series(case.settings)).all(axis=1)
    if case.standardize is None and "standardize" in frame:
        chosen &= frame["standardize"].isna()
    return frame[chosen]


def _case_claims(case: Case, rows: pd.DataFrame) -> list[Claim]:
    published = PUBLISHED[case.column]
    how = f"relative gradient {rows['relgrad'].mean():.2f} after {rows['steps'].iloc[0]:,} steps"
    if case.as_published:
        guessed = case.weight_decay != case.column[2]
        guess = (
            "; the table says a decay of 1e-4. This one was picked after the fact, by one column and one seed, and "
            "then held against the other columns"
        )
        return [
            about(f"Pearson correlation of {name} with the NFM, {case.title}{' in place of 0.0001' if guessed else ''}",
                  "table 2", number, rows[name],
                  max(0.02, 2 * float(rows[name].std(ddof=1)) if len(rows) > 1 else 0.02),
                  "one run in the paper: two standard deviations over seeds here, and at least .02 for the order of "
                  "images, the scale of pixels and biases, which it does not tell",
                  note=how + (guess if guessed else TRIED))
            for name, number in zip(COMPARED, published, strict=True)
        ]  # fmt: skip
    return [
        at_least(
            f"Pearson correlation of {name} with the NFM, {case.title}, {case.epochs:,} epochs"
            + (f", standardized {case.standardize}" if case.standardize else ""), "table 2", number, rows[name],
            0.1 if case.data == "cifar10" else 0.01,
            "what lies between the published columns for 2,000 and 5,000 images, or between two decays of CIFAR-10",
            note=f"stands in for {_titled(*case.column)}: width {case.width}; {how}"
            + (TRIED_CIFAR if case.data == "cifar10" else ""),
        )
        for name, number in list(zip(COMPARED, published, strict=True))[:2]
    ]  # fmt: skip


def _titled(data: str, n: int, decay: float) -> str:
    return f"{NAMES[data]}, {n:,} images, decay {decay:g}"


def _figure(by_case: Mapping[Case, pd.DataFrame], lowest: float) -> Figure:
    """Draw a group of points per case, and the published ones as bars behind them."""
    fig, ((ax,),) = panels(max(4.6, 1.6 + 1.35 * len(by_case)), 3.2, grid="y")
    for i, (case, rows) in enumerate(by_case.items()):
        for j, name in enumerate(COMPARED):
            x = i + 0.2 * (j - 1.5)
            if case.as_published:
                ax.hlines(PUBLISHED[case.column][j], x - 0.09, x + 0.09, color=PALETTE[j], linewidth=5, alpha=0.3)
            look = {"linestyle": "", "marker": MARKERS[j], "markersize": 5, "color": PALETTE[j], "alpha": 0.85}
            ax.plot(np.full(len(rows), x), rows[name], **look, label=None if i else name)
    texts = [
        f"{NAMES[c.data]}\n{c.n:,} images\nwidth {c.width}\ndecay {c.weight_decay:g}\n{c.epochs:,} epochs"
        + ("\nstandardized" if c.standardize else "")
        for c in by_case
    ]
    ax.set_xticks(range(len(by_case)), texts)
    limits = (min(0.7, np.floor(lowest * 10) / 10), 1.01)
    label(ax, y="Pearson correlation with $W^T W$", xlim=(-0.5, len(by_case) - 0.5), ylim=limits)
    ax.legend(ncols=4, loc="lower center", bbox_to_anchor=(0.5, 1.0), handletextpad=0.2, columnspacing=1.2)
    return fig
