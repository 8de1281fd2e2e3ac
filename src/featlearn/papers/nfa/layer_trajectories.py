"""Correlations and weight changes of every layer during training, shared by the parts of figure 2 of the NFA paper.

References:
    Beaglehole, Mitliagkas & Agarwala, "Feature learning as alignment", https://openreview.net/forum?id=JXCe2ZcUXr
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pandas as pd
import torch
from matplotlib import colormaps
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from torch import Tensor, nn

from featlearn.features import probe
from featlearn.papers._figures import PALETTE, draw_band, label_outer, panels
from featlearn.papers.claim import Claim, at_least, at_most, holds
from featlearn.papers.experiment import Groups, Values
from featlearn.plots.style import as_array
from featlearn.training import fit

NUMBERS = ("nfc", "centered_nfc", "weight_change_relative")
_UNCENTERED, _CENTERED = PALETTE[0], PALETTE[2]  # blue and green, as in the paper


def measurement_steps(total: int, count: int) -> list[int]:
    """Return about ``count`` steps from 1 to ``total``, closer together early on, where correlations change most."""
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
        model: Network at its initialization.
        data: Data to measure on.
        layers: Names of the layers to measure.
        steps: Numbers of updates after which to measure.
        train: Function that trains the model and calls its argument with the number of updates made and a loss, also
            after the last update.
        outputs: Outputs to differentiate, as in `featlearn.probe`.

    Returns:
        ``step`` and ``loss``, and for each of `NUMBERS` ``(steps, layers)``.
    """
    initial = copy.deepcopy(model)
    rows: list[tuple[Any, ...]] = []

    def record(step: int, loss: float) -> None:
        if step in steps and step not in [row[0] for row in rows]:
            # The same random output vectors each time, where there are too many outputs to take all.
            measure = ("nfc", "centered_nfc", "weight_change")
            report = probe(model, data, initial=initial, layers=layers, measure=measure, outputs=outputs, generator=0)
            numbers = ([getattr(report[layer], name) for layer in layers] for name in NUMBERS)
            rows.append((step, loss, *numbers))

    train(record)
    step, *others = map(list, zip(*rows, strict=True))
    return {"step": step} | dict(zip(("loss", *NUMBERS), map(torch.tensor, others), strict=True))


def watch_images(
    model: nn.Module, data: tuple[Tensor, Tensor], layers: Sequence[str], probed: int, measurements: int, **fitting: Any
) -> dict[str, Any]:
    """Train a model by SGD on batches of 128 images, and measure its layers as `watch_layers` does.

    Args:
        model: Network at its initialization.
        data: Images and one-hot labels. With more than ten classes, 8 random output vectors are differentiated.
        layers: Names of the layers to measure.
        probed: Number of images to measure on.
        measurements: Number of measurements, see `measurement_steps`.
        **fitting: Arguments of `featlearn.training.fit`: ``lr``, ``epochs`` and ``generator``.

    Returns:
        Measurements of `watch_layers`.
    """
    X, y = data
    total = fitting["epochs"] * -(-len(X) // 128)

    def train(callback: Callable[[int, float], object]) -> None:
        callback(total, fit(model, data, batch_size=128, callback=callback, **fitting).final_loss)

    steps = measurement_steps(total, measurements)
    return watch_layers(model, X[:probed], layers, steps, train, "exact" if y.shape[1] <= 10 else 8)


def gap_curves(values: Values) -> Tensor:
    """Return C-NFC less UC-NFC, ``(steps, layers)``."""
    return torch.as_tensor(values["centered_nfc"]) - torch.as_tensor(values["nfc"])


def final_gaps(values: Values) -> list[float]:
    """Return C-NFC less UC-NFC of each layer at the end."""
    return [float(gap) for gap in gap_curves(values)[-1]]


def final_table(runs: Sequence[Values], names: Sequence[str]) -> pd.DataFrame:
    """Return correlations and weight change of each layer at the end, means over runs."""
    columns = {"UC-NFC": "nfc", "C-NFC": "centered_nfc", "change": "weight_change_relative"}
    means = {title: np.mean([np.asarray(run[n])[-1] for run in runs], axis=0) for title, n in columns.items()}
    return pd.DataFrame({"layer": names, **means})


def share_above(values: Values) -> float:
    """Return the share of all layers and measurements where C-NFC is above UC-NFC."""
    return float((gap_curves(values) > 0).double().mean())


def mostly_above(where: str, runs: Sequence[Values], name: str = "") -> Claim:
    """Return the claim that C-NFC is above UC-NFC in nearly all layers, nearly all the time."""
    text, reason = (
        "share of layers and times with C-NFC above UC-NFC",
        "'consistently' in words; nine tenths are asked for",
    )
    return at_least(name + text, where, 0.9, map(share_above, runs), reason=reason)


def larger_early(where: str, runs: Sequence[Values]) -> Claim:
    """Return the claim that the gap between C-NFC and UC-NFC is larger at the start of training than at its end."""
    text = "the gap is larger at the first measurement than at the last (mean over layers)"
    gaps = [gap_curves(values).mean(1) for values in runs]
    return holds(text, where, (float(gap[0]) > float(gap[-1]) for gap in gaps), note="'especially at early times'")


def larger_deep(text: str, where: str, runs: Sequence[Values], count: int) -> Claim:
    """Return the claim that the gap between C-NFC and UC-NFC is larger in the last layers than in the first ones."""
    gaps = [gap_curves(values).mean(0) for values in runs]
    return holds(text, where, (float(gap[-count:].mean()) > float(gap[:count].mean()) for gap in gaps))


def converges(runs: Sequence[Values], name: str = "") -> Claim:
    """Return the claim that C-NFC and UC-NFC are close to each other at the end of training."""
    gaps = [float(np.mean(final_gaps(values))) for values in runs]
    reason = "'converge at late times in most settings'; a tenth is asked for"
    return at_most(f"{name}UC-NFC converges to C-NFC: mean gap at the end", "section 3", 0.1, gaps, reason=reason)


def moves(
    text: str, where: str, runs: Sequence[Values], over_layers: Callable[[Tensor], Tensor], note: str = ""
) -> Claim:
    """Return the claim that the weights change by at least a tenth of their size, in the mean or least over layers."""
    changes = [float(over_layers(torch.as_tensor(values["weight_change_relative"])[-1])) for values in runs]
    reason = "'significantly' in words; a tenth of their size is asked for"
    return at_least(text, where, 0.1, changes, reason=reason, note=note)


def draw_centered(ax: Axes, runs: Sequence[Values], layer: int | None = None) -> None:
    """Draw UC-NFC and C-NFC over training, means over runs with their range; without a layer, means over layers."""
    for name, color, text in (("nfc", _UNCENTERED, "UC-NFC"), ("centered_nfc", _CENTERED, "C-NFC")):
        curves = [as_array(run[name]) for run in runs]
        curves = [curve.mean(1) if layer is None else curve[:, layer] for curve in curves]
        draw_band(ax, runs[0]["step"], curves, color, label=text)
    ax.set_ylim(0, 1.03)


def losses_and_changes(runs: Groups, names: Sequence[str], title: str) -> Figure:
    """Draw losses beside the relative changes of weights, ``|W - W0| / |W|``: one row per network or data set."""
    fig, axes = panels(7.4, 0.5 + 2.0 * len(runs), len(runs), 2)
    # Distinct colors if there are few layers; from dark to light with depth if there are many.
    many = colormaps["viridis"](np.linspace(0.0, 0.92, len(names)))
    shades: Sequence[Any] = PALETTE if len(names) <= len(PALETTE) else list(many)
    for (left, right), group in zip(axes, runs.values(), strict=True):
        steps = group[0]["step"]
        for run in group:
            left.plot(steps, run["loss"], color=PALETTE[0], alpha=0.7, linewidth=1.2)
        change = np.mean([np.asarray(run["weight_change_relative"]) for run in group], axis=0)
        for i, layer in enumerate(names):
            right.plot(steps, change[:, i], color=shades[i], label=layer, linewidth=1.2)
        right.set_ylim(bottom=0)
    label_outer(axes, "step", ("training loss", "$\\|W - W_0\\| \\, / \\, \\|W\\|$"), runs)
    axes[0][1].legend(fontsize=6.5, loc="center left", bbox_to_anchor=(1.0, 0.5), title=title, title_fontsize=7)
    return fig
