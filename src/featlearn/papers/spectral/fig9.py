"""Figures 9, 10(a, b) and 30 to 33 of the spectral paper: what training changes in all, as networks and data grow."""

from __future__ import annotations

import copy
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pandas as pd
import torch
from matplotlib.figure import Figure
from torch import Tensor, nn

from featlearn._utils.rng import as_generator
from featlearn.datasets import teacher_task
from featlearn.kernels import ck, ntk
from featlearn.models import ntk_mlp
from featlearn.papers.claim import Claim, at_most, holds
from featlearn.papers.experiment import Experiment, Outcome, Result
from featlearn.plots import MARKERS, PALETTE, new_figure, style
from featlearn.spectra import change_norms
from featlearn.training import fit
from featlearn.training.two_layer import READOUT, hidden_weight

__all__ = ["EXPERIMENT", "Config", "changes_by_training", "growth", "growth_figure", "standard_error"]

SETTINGS: dict[str, dict[str, Any]] = {
    "figure 9": {
        "ratios": (0.6, 1.2), "activation": "tanh", "teacher": "softplus", "noise": 0.3, "lr": 5.0, "first": True,
    },
    "figure 10": {
        "ratios": (0.5, 0.8), "activation": "tanh", "teacher": "softplus", "noise": 0.3, "lr": 2.5, "batch_size": 32,
    },
    "figure 30": {
        "ratios": (1.2, 0.6), "activation": "relu", "teacher": "tanh", "noise": 0.3, "lr": 5.0, "first": True,
    },
    "figure 31": {
        "ratios": (0.6, 1.2), "activation": "softplus", "teacher": "tanh", "noise": 0.3, "lr": 3.6, "first": True,
        "batch_size": 200,
    },
    "figure 32": {"ratios": (0.5, 0.8), "activation": "softplus", "teacher": "tanh", "noise": 0.3, "lr": 3.6},
    "figure 33": {
        "ratios": (0.6, 1.2), "activation": "relu", "teacher": "tanh", "noise": 0.1, "lr": 1.0, "batch_size": 128,
    },
}  # fmt: skip
"""d/n and h/n, activations, noise and rates of the captions; whether the first layer alone is trained."""


@dataclass(frozen=True)
class Config:
    """Sizes n, trials at each, and the loss at which training ends."""

    sizes: tuple[int, ...] = (200, 400, 800)
    trials: int = 3
    stop_loss: float = 1e-3
    steps: int = 4000
    figures: tuple[str, ...] = tuple(SETTINGS)


def changes_by_training(
    n: int,
    seed: int,
    *,
    ratios: Sequence[float],
    activation: str,
    teacher: str,
    noise: float,
    lr: float,
    first: bool = False,
    batch_size: int | None = None,
    steps: int = 4000,
    stop_loss: float | None = 1e-3,
) -> dict[str, float]:
    """Norms of what training changes in W (over sqrt d), CK, NTK, v and the outputs at fresh points.

    Args:
        n: Training points.
        seed: Of data, network and batches.
        ratios: d/n and h/n.
        activation: Of the student, normalized.
        teacher: Of the single-index teacher, normalized.
        noise: In the labels.
        lr: Learning rate, for nn.MSELoss.
        first: Train the first layer only; then the NTK is the first layer's (the paper's footnote 2).
        batch_size: Of SGD; None is gradient descent.
        steps: At most.
        stop_loss: Where training ends.
    """
    generator = as_generator(seed, "changes by training")
    d, h = (round(ratio * n) for ratio in ratios)
    task = teacher_task(n, d, activation=teacher, noise=noise, n_test=500, generator=generator, dtype=torch.float64)
    start = ntk_mlp([d, h, 1], activation=activation, generator=generator, dtype=torch.float64)
    model = copy.deepcopy(start)
    if first:
        model.get_parameter(READOUT).requires_grad_(False)
    history = fit(
        model, (task.X, task.y), lr=lr, steps=steps, batch_size=batch_size, stop_loss=stop_loss, generator=generator
    )
    parameters = ["1.weight"] if first else None
    kernels = [(ck(net, task.X), _tangent(net, task.X, parameters)) for net in (start, model)]
    w = change_norms(hidden_weight(start), hidden_weight(model), scale=math.sqrt(d))
    of_ck, of_ntk = (change_norms(a, b) for a, b in zip(*kernels, strict=True))
    with torch.no_grad():
        readout = float((start.get_parameter(READOUT) - model.get_parameter(READOUT)).norm())
        moved = (model(task.X_test) - start(task.X_test)).abs()
        error = float((model(task.X_test) - task.y_test).square().mean())
    return {
        "W frobenius": w.frobenius,
        "W operator": w.operator,
        "W rows": w.two_to_infinity,
        "CK frobenius": of_ck.frobenius,
        "CK operator": of_ck.operator,
        "NTK frobenius": of_ntk.frobenius,
        "NTK operator": of_ntk.operator,
        "v": readout / math.sqrt(h),
        "output": float(moved.mean()),
        "test error": error,
        "train loss": history.final_loss,
        "steps": float(len(history.step)),
    }


def _tangent(model: nn.Module, X: Tensor, parameters: Sequence[str] | None) -> Tensor:
    found = ntk(model, X, parameters=parameters) if parameters else ntk(model, X)
    assert isinstance(found, Tensor)
    return found


def growth(outcomes: Sequence[Outcome], name: str) -> list[float]:
    """Exponent of n in a number's growth, by least squares of logarithms, one a trial."""
    trials = sorted({o.point["seed"] for o in outcomes})
    found = []
    for trial in trials:
        own = sorted((o for o in outcomes if o.point["seed"] == trial), key=lambda o: o.point["n"])
        x = np.log([o.point["n"] for o in own])
        y = np.log([max(o.values[name], 1e-300) for o in own])
        found.append(float(np.polyfit(x, y, 1)[0]) if len(x) > 1 else math.nan)
    return found


def growth_figure(rows: Mapping[str, Sequence[Outcome]], panels: Mapping[str, Sequence[str]]) -> Figure:
    """Means over trials against n, on logarithmic axes, a row a figure of the paper."""
    with style():
        fig = new_figure(3.1 * len(panels), 2.2 * len(rows) + 0.4)
        axes = np.atleast_2d(fig.subplots(len(rows), len(panels), squeeze=False))
        for line, (title, outcomes) in zip(axes, rows.items(), strict=True):
            sizes = sorted({o.point["n"] for o in outcomes})
            for ax, (panel, names) in zip(line, panels.items(), strict=True):
                for name, color, marker in zip(names, PALETTE, MARKERS, strict=False):
                    means = [np.mean([o.values[name] for o in outcomes if o.point["n"] == n]) for n in sizes]
                    ax.plot(sizes, means, color=color, marker=marker, label=name.split(" ", 1)[-1])
                ax.set_xscale("log")
                ax.set_yscale("log")
                ax.set_xticks(sizes, [str(n) for n in sizes])
                ax.minorticks_off()
                ax.set_title(f"{title}: {panel}", fontsize=8)
                ax.grid()
        for ax in axes[0]:
            ax.legend(fontsize=7)
        for ax in axes[-1]:
            ax.set_xlabel("n")
    return fig


def _points(config: Config) -> list[dict[str, Any]]:
    return [
        {"figure": figure, "n": n, "seed": seed, "steps": config.steps, "stop_loss": config.stop_loss}
        for figure in config.figures
        for seed in range(config.trials)
        for n in config.sizes
    ]


def _measure(figure: str, n: int, seed: int, steps: int, stop_loss: float) -> Mapping[str, Any]:
    return changes_by_training(n, seed, steps=steps, stop_loss=stop_loss, **SETTINGS[figure])


def _conclude(config: Config, outcomes: Sequence[Outcome]) -> Result:
    rows = {figure: [o for o in outcomes if o.point["figure"] == figure] for figure in config.figures}
    claims = [claim for figure, found in rows.items() for claim in _claims(figure, found)]
    table = pd.DataFrame(
        [{"figure": o.point["figure"], "n": o.point["n"], "trial": o.point["seed"], **o.values} for o in outcomes]
    )
    mean = table.drop(columns="trial").groupby(["figure", "n"], sort=False).mean().reset_index()
    panels = {
        "W": ("W frobenius", "W operator", "W rows"),
        "CK": ("CK frobenius", "CK operator"),
        "NTK": ("NTK frobenius", "NTK operator"),
    }
    return Result(
        tuple(claims), {"means over trials": mean}, {"figures 9, 10 and 30 to 33": growth_figure(rows, panels)},
        f"Sizes {', '.join(map(str, config.sizes))} where the paper has up to 11000; training ends at a loss of "
        f"{config.stop_loss:g} or after {config.steps} steps. Flat means an exponent of n of no more than .15 beyond "
        "twice its standard error.",
    )  # fmt: skip


def _claims(figure: str, outcomes: Sequence[Outcome]) -> list[Claim]:
    both = not SETTINGS[figure].get("first", False)
    told = {"W frobenius": "|W - W0|_F / sqrt d", "CK frobenius": "|CK - CK0|_F", "NTK frobenius": "|NTK - NTK0|_F"}
    claims = []
    for name, text in told.items():
        found = growth(outcomes, name)
        if name == "NTK frobenius" and both:
            if figure in ("figure 32", "figure 33"):
                grows = [exponent > 0.15 for exponent in found]
                note = "it grows with an exponent of " + ", ".join(f"{e:.2f}" for e in found) + "; sizes are small"
                claims.append(holds(f"{text} does not stay bounded when both layers train", figure, grows, note=note))
            continue
        claims.append(
            at_most(
                f"{text} stays bounded: its exponent of n", figure, 0.0, found, 0.15 + 2 * standard_error(found),
                "a tenth is what the finite sizes bend; twice the standard error over trials",
            )
        )  # fmt: skip
    if both and figure == "figure 32":
        claims.append(
            holds("|v - v0| grows like sqrt h", figure, [abs(e) < 0.15 for e in growth(outcomes, "v")], share=0.6)
        )
    return claims


def standard_error(found: Sequence[float]) -> float:
    """Of the mean of some numbers; 0 for a single one."""
    return float(np.std(found, ddof=1) / math.sqrt(len(found))) if len(found) > 1 else 0.0


EXPERIMENT = Experiment(
    name="spectral-fig9",
    title="What training changes in all, as networks and data grow together",
    covers=("figure 9", "figure 10 (a, b)", "figure 30", "figure 31", "figure 32", "figure 33"),
    scales={
        "smoke": Config((20, 40), 1, 0.1, 20, ("figure 9", "figure 30")),
        "quick": Config((150, 300, 600), 3, 1e-2, 2000),
        "full": Config((200, 400, 800, 1600), 5, 1e-3, 4000),
    },
    points=_points,
    measure=_measure,
    conclude=_conclude,
)
