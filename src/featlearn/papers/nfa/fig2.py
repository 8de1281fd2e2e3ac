"""Figures 2 (A, B), 13 and 14 of the NFA paper: fully connected networks on images, layer by layer."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import pandas as pd
import torch
from matplotlib.figure import Figure

from featlearn.datasets import image_task, one_hot_labels
from featlearn.models import mlp
from featlearn.papers._figures import PALETTE, label, label_outer, panels
from featlearn.papers.claim import Claim, holds, not_tried
from featlearn.papers.experiment import Groups, Outcomes, Result, Values, experiment
from featlearn.papers.nfa.layer_trajectories import (
    converges,
    draw_centered,
    final_gaps,
    gap_curves,
    losses_and_changes,
    measurement_steps,
    mostly_above,
    moves,
    watch_layers,
)
from featlearn.training import fit

# Learning rate and whether pixels are standardized; the paper's rates, which has no digits.
_SETS = {"digits": (1.0, False), "mnist": (10.0, False), "cifar10": (0.2, True), "gtsrb": (0.1, True)}


@dataclass(frozen=True)
class Config:
    """Of the paper but for the sets: five hidden layers of 256, batches of 128, one-hot labels, scale 1.

    ``sets`` has a name, a number of images and of epochs each; the paper has 50,000 images and 150 epochs (MNIST 50).
    """

    sets: tuple[tuple[str, int, int], ...]
    width: int = 256
    probed: int = 500
    measurements: int = 14
    seeds: tuple[int, ...] = (0, 1, 2)


def _points(config: Config) -> list[dict[str, Any]]:
    shared = {"width": config.width, "probed": config.probed, "measurements": config.measurements}
    return [
        shared | {"name": name, "n": n, "epochs": epochs, "seed": seed}
        for name, n, epochs in config.sets
        for seed in config.seeds
    ]


def _measure(name: str, n: int, epochs: int, width: int, probed: int, measurements: int, seed: int) -> Values:
    lr, standardized = _SETS[name]
    task = image_task(name, n, 300, standardize="pixels" if standardized else None, generator=seed)
    labels = one_hot_labels(task.y, task.classes)
    model = mlp([task.X.shape[1], *[width] * 5, task.classes], generator=seed)
    batch = 128
    total = epochs * -(-n // batch)

    def train(told: Callable[[int, float], object]) -> None:
        done = fit(
            model, (task.X, labels), lr=lr, epochs=epochs, batch_size=batch, generator=seed, callback=told
        )  # fmt: skip
        told(total, done.final_loss)

    # The last layer's outputs are the network's: its K is the identity and its NFC 1 by definition.
    found = watch_layers(
        model, task.X[:probed], [str(2 * i) for i in range(5)], measurement_steps(total, measurements), train,
        outputs="exact" if task.classes <= 10 else 8,
    )  # fmt: skip
    with torch.no_grad():
        right = model(task.X_test).argmax(1) == task.y_test
    return found | {"accuracy": float(right.double().mean())}


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
    table = pd.DataFrame(
        [
            {"set": p["name"], "seed": p["seed"], "test accuracy": v["accuracy"]}
            | {f"UC {i + 1}": float(v["nfc"][-1][i]) for i in range(5)}
            | {f"C {i + 1}": float(v["centered_nfc"][-1][i]) for i in range(5)}
            | {"least change": float(v["weight_change_relative"][-1].min())}
            for p, v in outcomes
        ]
    )
    said = "; ".join(f"{name}: {n} images, {epochs} epochs" for name, n, epochs in config.sets)
    changes = losses_and_changes(runs, [f"layer {i + 1}" for i in range(5)], "layer")
    return Result(
        _claims(runs),
        {"end of training": table.groupby("set", sort=False).mean().drop(columns="seed").reset_index()},
        {"figure 2 A and B": _summary(runs), "figure 13": _trajectories(runs), "figure 14": changes},
        f"{said}. The squared error of one-hot labels at the paper's rates. Digits, which come with scikit-learn, are "
        "beside the paper's sets; SVHN, CIFAR-100 and STL-10 are not tried.",
    )


def _claims(runs: Groups) -> list[Claim]:
    claims: list[Claim] = []
    few = "Some hundred to two thousand updates here, some ten thousand in the paper."
    for name, found in runs.items():
        gaps = [gap_curves(v).mean(1) for v in found]
        changes = (float(torch.as_tensor(v["weight_change_relative"])[-1].mean()) for v in found)
        claims += [
            holds(f"{name}: C-NFC is above UC-NFC in every layer at the end", "figure 2B, figure 13",
                  (min(final_gaps(v)) > 0 for v in found)),
            mostly_above("figure 2A, figure 13", found, f"{name}: "),
            holds(f"{name}: the gap is largest before the end (mean over layers)", "section 3",
                  (float(g[:-1].max()) > float(g[-1]) for g in gaps), note="'especially holds at early times'"),
            converges(found, f"{name}: ").remark(few),
            moves(f"{name}: weights move significantly, mean change at the end", "figure 14", changes, few),
        ]  # fmt: skip
    claims += [
        not_tried(f"{name}: C-NFC is above UC-NFC in every layer at the end", "figure 13", 1.0, note, "holds")
        for name, note in [("SVHN, CIFAR-100, STL-10", "no files of these sets")]
        + [(name, "left out at this scale") for name in ("mnist", "cifar10", "gtsrb") if name not in runs]
    ]
    return claims


def _summary(runs: Groups) -> Figure:
    fig, (axes,) = panels(2.3 * len(runs) + 3.0, 2.9, 1, len(runs) + 1)
    for ax, (name, found) in zip(axes, runs.items(), strict=False):
        draw_centered(ax, found)
        ax.set_title(f"A  {name}, mean over layers", fontsize=9)
        ax.set_xlabel("step")
    axes[0].legend(loc="lower right")
    places, bars = np.arange(1, 6), axes[-1]
    for name, text, color, shift in (("nfc", "UC-NFC", PALETTE[0], -0.18), ("centered_nfc", "C-NFC", PALETTE[2], 0.18)):
        ends = np.array([np.asarray(v[name])[-1] for found in runs.values() for v in found])
        bars.bar(places + shift, ends.mean(0), 0.34, yerr=ends.std(0), color=color, label=text, capsize=2)
    label(bars, "layer", ylim=(0, 1.08), xticks=places)
    bars.set_title("B  end, mean over sets", fontsize=9)
    bars.grid(visible=False)
    return fig


def _trajectories(runs: Groups) -> Figure:
    fig, axes = panels(10.0, 0.5 + 1.9 * len(runs), len(runs), 5, sharey=True, sharex="row")
    for line, found in zip(axes, runs.values(), strict=True):
        for i, ax in enumerate(line):
            draw_centered(ax, found, i)
    label_outer(axes, "step", [f"layer {i + 1}" for i in range(5)], runs)
    axes[0][-1].legend(loc="lower right")
    return fig
