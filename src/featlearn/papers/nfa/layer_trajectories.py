"""Correlations and weight changes of every layer while a network trains: what the parts of figure 2 have in common."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import pandas as pd
import torch
from matplotlib import colormaps
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from numpy.typing import NDArray
from torch import Tensor, nn

from featlearn.features import probe
from featlearn.plots import PALETTE, new_figure, style

__all__ = [
    "NUMBERS",
    "draw_centered",
    "final_gaps",
    "final_table",
    "gap_curves",
    "losses_and_changes",
    "measurement_steps",
    "share_above",
    "watch_layers",
]

NUMBERS = ("nfc", "centered_nfc", "weight_change_relative")
_UNCENTERED, _CENTERED = PALETTE[0], PALETTE[2]  # blue and green, as in the paper


def measurement_steps(total: int, count: int) -> list[int]:
    """About so many steps from 1 to the last, closer together early on, where correlations move most."""
    return sorted({max(1, round(total * (i / count) ** 2)) for i in range(1, count + 1)})


def watch_layers(
    model: nn.Module,
    data: Any,
    layers: Sequence[str],
    steps: Sequence[int],
    train: Callable[[Callable[[int, float], object]], Any],
    outputs: str | int = "auto",
) -> dict[str, Any]:
    """Train a model and measure its layers at given steps.

    Args:
        model: The network, at its initialization.
        data: What to measure on.
        layers: Names of the layers to measure.
        steps: After how many updates to measure.
        train: Trains the model, calling back with the number of updates made and a loss, also after the last.
        outputs: As in `featlearn.probe`.

    Returns:
        ``step`` and ``loss``, and for each of `NUMBERS` ``(steps, layers)``.
    """
    initial = copy.deepcopy(model)
    found: dict[str, list[Any]] = {name: [] for name in ("step", "loss", *NUMBERS)}

    def record(step: int, loss: float) -> None:
        if step not in steps or step in found["step"]:
            return
        found["step"].append(step)
        found["loss"].append(loss)
        # The same random output vectors each time, where there are too many outputs for all.
        report = probe(
            model, data, initial=initial, layers=layers, measure=("nfc", "centered_nfc", "weight_change"),
            outputs=outputs, generator=0,
        )  # fmt: skip
        for name in NUMBERS:
            found[name].append([getattr(report[layer], name) for layer in layers])

    train(record)
    return {name: values if name == "step" else torch.tensor(values) for name, values in found.items()}


def gap_curves(values: Mapping[str, Any]) -> Tensor:
    """C-NFC less UC-NFC, ``(steps, layers)``."""
    return torch.as_tensor(values["centered_nfc"]) - torch.as_tensor(values["nfc"])


def final_gaps(values: Mapping[str, Any]) -> list[float]:
    """C-NFC less UC-NFC of each layer at the end."""
    found: list[float] = gap_curves(values)[-1].tolist()
    return found


def final_table(runs: Sequence[Mapping[str, Any]], names: Sequence[str]) -> pd.DataFrame:
    """Correlations and change of each layer at the end, means over runs."""
    columns = {"UC-NFC": "nfc", "C-NFC": "centered_nfc", "change": "weight_change_relative"}
    means = {title: np.mean([np.asarray(run[n])[-1] for run in runs], axis=0) for title, n in columns.items()}
    return pd.DataFrame({"layer": names, **means})


def share_above(values: Mapping[str, Any]) -> float:
    """Share of all layers and measurements where C-NFC is above UC-NFC."""
    return float((gap_curves(values) > 0).double().mean())


def draw_centered(ax: Axes, runs: Sequence[Mapping[str, Any]], layer: int | None = None) -> None:
    """UC-NFC and C-NFC over training, means over runs with their range; without a layer, means over layers."""
    for name, color, label in (("nfc", _UNCENTERED, "UC-NFC"), ("centered_nfc", _CENTERED, "C-NFC")):
        stack = np.stack([_chosen(run[name], layer) for run in runs])
        steps = runs[0]["step"]
        ax.plot(steps, stack.mean(0), color=color, label=label)
        ax.fill_between(steps, stack.min(0), stack.max(0), color=color, alpha=0.15, linewidth=0)
    ax.set_ylim(0, 1.03)
    ax.grid()


def _chosen(values: Any, layer: int | None) -> NDArray[np.float64]:
    array: NDArray[np.float64] = np.asarray(torch.as_tensor(values).double().numpy())
    return array.mean(1) if layer is None else array[:, layer]


def losses_and_changes(runs: Mapping[str, Sequence[Mapping[str, Any]]], names: Sequence[str], title: str) -> Figure:
    """Losses beside the relative changes of weights, ``|W - W0| / |W|``: a row a network or data set."""
    with style():
        fig = new_figure(7.4, 0.5 + 2.0 * len(runs))
        axes = fig.subplots(len(runs), 2, squeeze=False)
        # Told apart if they are few; from dark to light with depth if they are many.
        many = colormaps["viridis"](np.linspace(0.0, 0.92, len(names)))
        shades: Sequence[Any] = PALETTE if len(names) <= len(PALETTE) else list(many)
        for (left, right), (name, found) in zip(axes, runs.items(), strict=True):
            steps = found[0]["step"]
            for run in found:
                left.plot(steps, run["loss"], color=PALETTE[0], alpha=0.7, linewidth=1.2)
            left.set_ylabel(name)
            change = np.mean([np.asarray(run["weight_change_relative"]) for run in found], axis=0)
            for i, layer in enumerate(names):
                right.plot(steps, change[:, i], color=shades[i], label=layer, linewidth=1.2)
            right.set_ylim(bottom=0)
            for ax in (left, right):
                ax.grid()
        axes[0][0].set_title("training loss")
        axes[0][1].set_title("$\\|W - W_0\\| \\, / \\, \\|W\\|$")
        axes[0][1].legend(fontsize=6.5, loc="center left", bbox_to_anchor=(1.0, 0.5), title=title, title_fontsize=7)
        for ax in axes[-1]:
            ax.set_xlabel("step")
    return fig
