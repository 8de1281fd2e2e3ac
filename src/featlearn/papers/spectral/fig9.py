"""Figures 9, 10(a, b) and 30 to 33 of the paper on spectral evolution: total change by training, by size.

References:
    Wang, Engel, Sarwate, Dumitriu & Chiang (2022), https://arxiv.org/abs/2211.06506, figures 9, 10(a, b) and 30 to 33.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from matplotlib.figure import Figure
from torch import Tensor

from featlearn._utils.rng import as_generator
from featlearn.datasets import teacher_task
from featlearn.kernels import ck, ntk
from featlearn.models import ntk_mlp
from featlearn.papers._figures import draw_lines, label, label_outer, panels
from featlearn.papers.claim import Claim, at_most, holds
from featlearn.papers.experiment import Outcomes, Result, Values, experiment
from featlearn.spectra import change_norms
from featlearn.training import fit
from featlearn.training.two_layer import READOUT, hidden_weight

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
"""Settings of the captions: d/n and h/n, activations, noise, rates, and whether only the first layer is trained."""

_NORMS = {"frobenius": "frobenius", "operator": "operator", "rows": "two_to_infinity"}
_PANELS = {"W": tuple(_NORMS), "CK": ("frobenius", "operator"), "NTK": ("frobenius", "operator")}


@dataclass(frozen=True)
class Config:
    """Configuration: sizes n, trials per size, the loss at which training ends, and figures."""

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
    """Train a student and return norms of the change of W (over sqrt d), CK, NTK, v and the outputs at fresh points.

    Args:
        n: Number of training points.
        seed: Seed of data, network and batches.
        ratios: Ratios d/n and h/n.
        activation: Activation of the student, normalized.
        teacher: Activation of the single-index teacher, normalized.
        noise: Standard deviation of the noise in the labels.
        lr: Learning rate, for nn.MSELoss.
        first: Whether to train the first layer only; the NTK is then that of the first layer (the paper's footnote 2).
        batch_size: Batch size of SGD; None is gradient descent.
        steps: Maximum number of steps.
        stop_loss: Training loss at which to stop; None never stops early.

    Returns:
        Norms by name.
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
    changes = {"W": change_norms(hidden_weight(start), hidden_weight(model), scale=math.sqrt(d))}
    changes |= {"CK": change_norms(*(ck(net, task.X) for net in (start, model)))}
    parameters: dict[str, Any] = {"parameters": ["1.weight"]} if first else {}
    before, after = (ntk(net, task.X, **parameters) for net in (start, model))
    assert isinstance(before, Tensor) and isinstance(after, Tensor)
    changes |= {"NTK": change_norms(before, after)}
    with torch.no_grad():
        readout = float((start.get_parameter(READOUT) - model.get_parameter(READOUT)).norm())
        moved = (model(task.X_test) - start(task.X_test)).abs()
        error = float((model(task.X_test) - task.y_test).square().mean())
    norms = {f"{m} {name}": getattr(changes[m], _NORMS[name]) for m, names in _PANELS.items() for name in names}
    return norms | {
        "v": readout / math.sqrt(h),
        "output": float(moved.mean()),
        "test error": error,
        "train loss": history.final_loss,
        "steps": float(len(history.step)),
    }


def growth(outcomes: Outcomes, name: str) -> list[float]:
    """Return the exponent of n in a number's growth, by least squares of logarithms, one per trial."""
    exponents = []
    for _, group in sorted(outcomes.by("seed").items()):
        points = sorted(group, key=lambda outcome: outcome.point["n"])
        x = np.log([point["n"] for point, _ in points])
        y = np.log([max(values[name], 1e-300) for _, values in points])
        exponents.append(float(np.polyfit(x, y, 1)[0]) if len(x) > 1 else math.nan)
    return exponents


def growth_figure(rows: Mapping[str, Outcomes]) -> Figure:
    """Draw means over trials against n, on logarithmic axes, one row per figure of the paper."""
    fig, axes = panels(3.1 * len(_PANELS), 2.2 * len(rows) + 0.4, len(rows), len(_PANELS))
    for line, (title, outcomes) in zip(axes, rows.items(), strict=True):
        by_size = dict(sorted(outcomes.values_by("n").items()))
        for ax, (panel, names) in zip(line, _PANELS.items(), strict=True):
            curves = {
                name: [np.mean([v[f"{panel} {name}"] for v in values]) for values in by_size.values()] for name in names
            }
            draw_lines(ax, list(by_size), curves, marked=True)
            label(ax, log="xy")
            ax.set_xticks(list(by_size), [str(n) for n in by_size])
            ax.minorticks_off()
            ax.set_title(f"{title}: {panel}", fontsize=8)
    label_outer(axes, "n")
    for ax in axes[0]:
        ax.legend(fontsize=7)
    return fig


def _measure(figure: str, n: int, seed: int, steps: int, stop_loss: float) -> Values:
    return changes_by_training(n, seed, steps=steps, stop_loss=stop_loss, **SETTINGS[figure])


@experiment(
    "spectral-fig9",
    "What training changes in all, as networks and data grow together",
    covers=("figure 9", "figure 10 (a, b)", "figure 30", "figure 31", "figure 32", "figure 33"),
    smoke=Config((20, 40), 1, 0.1, 20, ("figure 9", "figure 30")),
    quick=Config((150, 300, 600), 3, 1e-2, 2000),
    full=Config((200, 400, 800, 1600), 5, 1e-3, 4000),
    measure=_measure,
    over={"figure": "figures", "seed": "trials", "n": "sizes"},
)
def _conclude(config: Config, outcomes: Outcomes) -> Result:
    rows = outcomes.by("figure")
    claims = [claim for figure, group in rows.items() for claim in _claims(figure, group)]
    mean = outcomes.table("figure", "n").groupby(["figure", "n"], sort=False).mean().reset_index()
    return Result(
        claims, {"means over trials": mean}, {"figures 9, 10 and 30 to 33": growth_figure(rows)},
        f"Sizes {', '.join(map(str, config.sizes))} where the paper has up to 11000; training ends at a loss of "
        f"{config.stop_loss:g} or after {config.steps} steps. Flat means an exponent of n of no more than .15 beyond "
        "twice its standard error.",
    )  # fmt: skip


def _claims(figure: str, outcomes: Outcomes) -> list[Claim]:
    both = not SETTINGS[figure].get("first", False)
    texts = {"W frobenius": "|W - W0|_F / sqrt d", "CK frobenius": "|CK - CK0|_F", "NTK frobenius": "|NTK - NTK0|_F"}
    claims = []
    for name, text in texts.items():
        exponents = growth(outcomes, name)
        if name == "NTK frobenius" and both:
            if figure in ("figure 32", "figure 33"):
                grows = [exponent > 0.15 for exponent in exponents]
                note = "it grows with an exponent of " + ", ".join(f"{e:.2f}" for e in exponents) + "; sizes are small"
                claims.append(holds(f"{text} does not stay bounded when both layers train", figure, grows, note=note))
            continue
        claims.append(
            at_most(f"{text} stays bounded: its exponent of n", figure, 0.0, exponents,
                    0.15 + 2 * standard_error(exponents),
                    "a tenth is what the finite sizes bend; twice the standard error over trials")
        )  # fmt: skip
    if both and figure == "figure 32":
        claims.append(
            holds("|v - v0| grows like sqrt h", figure, [abs(e) < 0.15 for e in growth(outcomes, "v")], share=0.6)
        )
    return claims


def standard_error(numbers: Sequence[float]) -> float:
    """Return the standard error of the mean of some numbers; 0 for a single one."""
    return float(np.std(numbers, ddof=1) / math.sqrt(len(numbers))) if len(numbers) > 1 else 0.0
