"""Figures 2 (A, B), 13 and 14 of the NFA paper: fully connected networks on images, layer by layer.

References:
    Beaglehole, Mitliagkas & Agarwala, "Feature learning as alignment", https://openreview.net/forum?id=JXCe2ZcUXr,
    figures 2 (A, B), 13 and 14.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from matplotlib.figure import Figure

from featlearn.datasets import image_task, one_hot_labels
from featlearn.models import mlp
from featlearn.papers._figures import PALETTE, label, label_outer, panels
from featlearn.papers.claim import Claim, holds, not_tried
from featlearn.papers.experiment import Groups, Outcomes, Result, Values, experiment
from featlearn.papers.nfa import layer_trajectories as trajectories

# Learning rate, as in the paper but for the digits, and whether pixels are standardized.
_SETS = {"digits": (1.0, False), "mnist": (10.0, False), "cifar10": (0.2, True), "gtsrb": (0.1, True)}


@dataclass(frozen=True)
class Config:
    """Configuration of the paper but for the sets: five hidden layers of 256, batches of 128, one-hot labels, scale 1.

    ``sets`` holds tuples of name, number of images and number of epochs; the paper has 50,000 images and 150 epochs
    (MNIST 50).
    """

    sets: tuple[tuple[str, int, int], ...]
    width: int = 256
    probed: int = 500
    measurements: int = 14
    seeds: tuple[int, ...] = (0, 1, 2)


def _points(config: Config) -> list[dict[str, Any]]:
    shared = {"width": config.width, "probed": config.probed, "measurements": config.measurements}
    sets = [{"name": name, "n": n, "epochs": epochs} for name, n, epochs in config.sets]
    return [shared | case | {"seed": seed} for case in sets for seed in config.seeds]


def _measure(name: str, n: int, epochs: int, width: int, probed: int, measurements: int, seed: int) -> Values:
    lr, standardized = _SETS[name]
    task = image_task(name, n, 300, standardize="pixels" if standardized else None, generator=seed)
    model = mlp([task.X.shape[1], *[width] * 5, task.classes], generator=seed)
    # The last layer is left out: its outputs are the network's, so that its K is the identity and its NFC is 1.
    data, layers = (task.X, one_hot_labels(task.y, task.classes)), [str(2 * i) for i in range(5)]
    training = {"lr": lr, "epochs": epochs, "generator": seed}
    values = trajectories.watch_images(model, data, layers, probed, measurements, **training)
    with torch.no_grad():
        right = model(task.X_test).argmax(1) == task.y_test
    return values | {"accuracy": float(right.double().mean())}


@experiment(
    "nfa-fig2",
    "Centered and uncentered NFC of fully connected networks on images",
    covers=("figure 2 (A, B)", "figure 13", "figure 14"),
    smoke=Config((("digits", 128, 4),), 16, 32, 3, (0,)),
    quick=Config((("digits", 1400, 100), ("mnist", 2000, 50), ("cifar10", 1500, 100), ("gtsrb", 1500, 60))),
    full=Config((("digits", 1400, 150), ("mnist", 20000, 50), ("cifar10", 10000, 150), ("gtsrb", 6500, 150))),
    measure=_measure,
    points=_points,
    data=("mnist", "cifar10", "gtsrb"),
)
def _conclude(config: Config, outcomes: Outcomes) -> Result:
    runs = outcomes.values_by("name")

    def ends(values: Values) -> Values:
        numbers = (("UC", values["nfc"]), ("C", values["centered_nfc"]))
        columns = {f"{name} {i + 1}": float(curves[-1][i]) for name, curves in numbers for i in range(5)}
        change = float(values["weight_change_relative"][-1].min())
        return {"test accuracy": values["accuracy"], **columns, "least change": change}

    table = outcomes.table({"set": "name"}, values=ends).groupby("set", sort=False).mean().reset_index()
    sizes = "; ".join(f"{name}: {n} images, {epochs} epochs" for name, n, epochs in config.sets)
    changes = trajectories.losses_and_changes(runs, [f"layer {i + 1}" for i in range(5)], "layer")
    return Result(
        _claims(runs),
        {"end of training": table},
        {"figure 2 A and B": _summary(runs), "figure 13": _trajectories(runs), "figure 14": changes},
        f"{sizes}. The squared error of one-hot labels at the paper's rates. Digits, which come with scikit-learn, are "
        "beside the paper's sets; SVHN, CIFAR-100 and STL-10 are not tried.",
    )


def _claims(runs: Groups) -> list[Claim]:
    claims: list[Claim] = []
    few = "Some hundred to two thousand updates here, some ten thousand in the paper."
    for name, group in runs.items():
        gaps = [trajectories.gap_curves(v).mean(1) for v in group]
        claims += [
            holds(f"{name}: C-NFC is above UC-NFC in every layer at the end", "figure 2B, figure 13",
                  (min(trajectories.final_gaps(v)) > 0 for v in group)),
            trajectories.mostly_above("figure 2A, figure 13", group, f"{name}: "),
            holds(f"{name}: the gap is largest before the end (mean over layers)", "section 3",
                  (float(g[:-1].max()) > float(g[-1]) for g in gaps), note="'especially holds at early times'"),
            trajectories.converges(group, f"{name}: ").remark(few),
            trajectories.moves(
                f"{name}: weights move significantly, mean change at the end", "figure 14", group, torch.mean, few),
        ]  # fmt: skip
    omitted = {name: "left out at this scale" for name in ("mnist", "cifar10", "gtsrb") if name not in runs}
    return claims + [
        not_tried(f"{name}: C-NFC is above UC-NFC in every layer at the end", "figure 13", 1.0, note, "holds")
        for name, note in ({"SVHN, CIFAR-100, STL-10": "no files of these sets"} | omitted).items()
    ]


def _summary(runs: Groups) -> Figure:
    fig, (axes,) = panels(2.3 * len(runs) + 3.0, 2.9, 1, len(runs) + 1)
    for ax, (name, group) in zip(axes, runs.items(), strict=False):
        trajectories.draw_centered(ax, group)
        ax.set_title(f"A  {name}, mean over layers", fontsize=9)
        ax.set_xlabel("step")
    axes[0].legend(loc="lower right")
    places, bars = np.arange(1, 6), axes[-1]
    for name, text, color, shift in (("nfc", "UC-NFC", PALETTE[0], -0.18), ("centered_nfc", "C-NFC", PALETTE[2], 0.18)):
        ends = np.array([np.asarray(v[name])[-1] for group in runs.values() for v in group])
        bars.bar(places + shift, ends.mean(0), 0.34, yerr=ends.std(0), color=color, label=text, capsize=2)
    label(bars, "layer", ylim=(0, 1.08), xticks=places)
    bars.set_title("B  end, mean over sets", fontsize=9)
    bars.grid(visible=False)
    return fig


def _trajectories(runs: Groups) -> Figure:
    fig, axes = panels(10.0, 0.5 + 1.9 * len(runs), len(runs), 5, sharey=True, sharex="row")
    for line, group in zip(axes, runs.values(), strict=True):
        for i, ax in enumerate(line):
            trajectories.draw_centered(ax, group, i)
    label_outer(axes, "step", [f"layer {i + 1}" for i in range(5)], runs)
    axes[0][-1].legend(loc="lower right")
    return fig
