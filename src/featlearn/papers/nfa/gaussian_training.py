"""Training of two hidden ReLU layers on Gaussian data, shared by figures 5, 6 and 8 to 10 of the NFA paper.

References:
    Beaglehole, Mitliagkas & Agarwala, "Feature learning as alignment", https://openreview.net/forum?id=JXCe2ZcUXr
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import pandas as pd
import torch
from matplotlib.axes import Axes

from featlearn._utils.rng import as_generator
from featlearn.datasets import chain_monomial_task
from featlearn.features import probe
from featlearn.models import mlp
from featlearn.papers._figures import PALETTE, draw_band
from featlearn.papers.experiment import Groups, Outcomes, Values
from featlearn.training import fit

LAYERS = ("0", "2")
_EARLY = (5, 10)  # steps that are always measured: the paper measures every 5 steps
SPECTRA = {0.0: "$\\lambda_k = 1$", 1.0: "$\\lambda_k \\sim 1/(1+k)$", 2.0: "$\\lambda_k \\sim 1/(1+k^2)$"}


@dataclass(frozen=True)
class GaussianConfig:
    """Configuration of appendix J, with the sizes of the paper's first version; initial scales are not stated."""

    n: int = 256
    d: int = 32
    width: int = 256
    steps: int = 800
    every: int = 5
    decays: tuple[float, ...] = (0.0,)
    scales: tuple[float, ...] = (1.0, 0.1, 0.01)
    seeds: tuple[int, ...] = (0, 1, 2)


GAUSSIAN_OVER = {"decay": "decays", "scale": "scales", "seed": "seeds"}
"""Axes of the points: spectrum, scale and seed."""


def layer_table(outcomes: Outcomes, number: str, *columns: str) -> pd.DataFrame:
    """Return a number of both layers at the second, a later and the last measurement, one row per point.

    Args:
        outcomes: Outcomes of `watch_training`.
        number: Name of the number.
        *columns: Arguments of the points to show beside it.
    """
    steps = outcomes[0].values["step"]
    places = [(layer, place) for layer in (0, 1) for place in (1, len(steps) // 4, -1)]

    def numbers(values: Values) -> Values:
        return {f"layer {i + 1}, step {steps[place]}": float(values[number][place][i]) for i, place in places}

    return outcomes.table(*columns, values=numbers)


def draw_scales(ax: Axes, runs: Groups, number: str, layer: int) -> None:
    """Draw a number of one layer over training, one band per initial scale; the first measurement is left out."""
    for (scale, group), color in zip(runs.items(), PALETTE, strict=False):
        curves = [torch.as_tensor(values[number])[1:, layer] for values in group]
        draw_band(ax, group[0]["step"][1:], curves, color, label=f"initial scale {scale:g}")


def watch_training(
    n: int, d: int, width: int, steps: int, every: int, decay: float, scale: float, seed: int, watched: Sequence[str]
) -> Values:
    """Train on the chain monomial at rate .05 with full batches, and record numbers of both hidden layers.

    Args:
        n: Number of training points.
        d: Number of input coordinates.
        width: Width of both hidden layers.
        steps: Number of updates.
        every: Number of updates between measurements.
        decay: Decay of the spectrum of the data.
        scale: Scale of the first layer's weights at initialization, relative to PyTorch's default.
        seed: Seed of data and network; the data are the same for every scale.
        watched: Quantities of `featlearn.probe` to record.

    Returns:
        ``step``; each watched number, ``(measurements, 2)``; ``train_loss`` and ``test_loss``.
    """
    generator = as_generator(seed, "gaussian training")
    task = chain_monomial_task(n, d, 5, n_test=1000, generator=generator, covariance_decay=decay)
    model = mlp([d, width, width, 1], scales={"0": scale}, generator=generator)
    initial = copy.deepcopy(model)
    data = (task.X, task.y)
    recorded: dict[str, list[Any]] = {name: [] for name in ("step", "train_loss", "test_loss", *watched)}

    def record(step: int, loss: float) -> None:
        if step % every and step not in _EARLY:
            return
        recorded["step"].append(step)
        recorded["train_loss"].append(loss)
        with torch.no_grad():
            recorded["test_loss"].append(float((model(task.X_test) - task.y_test).square().mean()))
        report = probe(model, data, initial=initial, measure=watched, layers=LAYERS)
        for name in watched:
            recorded[name].append([getattr(report[layer], name) for layer in LAYERS])

    history = fit(model, data, lr=0.05, steps=steps, callback=record)
    record(steps // every * every, history.final_loss)
    return {name: values if name == "step" else torch.tensor(values) for name, values in recorded.items()}
