"""Figure 17 of the NFA paper: speed limited optimization on images, with CIFAR-10 in place of SVHN.

References:
    Beaglehole, Mitliagkas & Agarwala, "Feature learning as alignment", https://openreview.net/forum?id=JXCe2ZcUXr,
    figure 17.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable
from dataclasses import dataclass

import torch
from matplotlib.figure import Figure
from torch import nn
from torch.optim import Optimizer

from featlearn._utils.rng import as_generator
from featlearn.datasets import image_task, one_hot_labels
from featlearn.features import probe
from featlearn.linalg import pearson
from featlearn.models import mlp
from featlearn.optim import SLO
from featlearn.papers._figures import PALETTE, draw_band, draw_diagonal, label
from featlearn.papers.claim import at_least, holds
from featlearn.papers.experiment import Groups, Outcomes, Result, Values, experiment
from featlearn.plots import new_figure
from featlearn.training import fit

_METHODS = ("GD", "SLO")
_NUMBERS = {"nfc": "UC-NFC", "centered_nfc": "C-NFC", "centered_ratio": "C/UC ratio"}


@dataclass(frozen=True)
class Config:
    """Configuration of the paper but for the images: four hidden layers of 256, rates .2 (GD) and .3 (SLO).

    Pixels are standardized. The paper has 4,000 images and 3,000 epochs, measured every 50; batches are full here.
    """

    name: str = "cifar10"
    n: int = 300
    width: int = 256
    steps: int = 500
    every: int = 50
    seeds: tuple[int, ...] = (0, 1)


def _measure(name: str, n: int, width: int, steps: int, every: int, method: str, seed: int) -> Values:
    task = image_task(name, n, 300, standardize="pixels", generator=seed)
    data = (task.X, one_hot_labels(task.y, task.classes))
    model = mlp([task.X.shape[1], *[width] * 4, task.classes], generator=as_generator(seed, "slo on images"))
    initial = copy.deepcopy(model)
    curves: dict[str, list[float]] = {key: [] for key in ("step", "loss", *_NUMBERS)}

    def record(step: int, loss: float) -> None:
        if step % every == 0 and step > 0:
            first = probe(model, task.X, initial=initial, layers="0", measure=tuple(_NUMBERS))["0"]
            for key, value in {"step": step, "loss": loss, **{key: getattr(first, key) for key in _NUMBERS}}.items():
                curves[key].append(value)

    def optimizer(parameters: Iterable[nn.Parameter]) -> Optimizer:
        if method == "GD":
            return torch.optim.SGD(parameters, lr=0.2)
        return SLO.for_layers(model, 0.3, {"0": 2.5, "*": 0.4}, eps=0.2)

    history = fit(model, data, optimizer=optimizer, steps=steps, callback=record)
    record(steps // every * every, history.final_loss)
    last = probe(model, task.X, layers="0", measure=("nfc", "agop"))["0"]
    nfm, agop = last.nfm.diagonal().clone(), last.agop.diagonal().clone()
    pictures = {"nfm": nfm, "agop": agop}
    return {**curves, "diagonals": pearson(nfm, agop), "shape": list(task.image_shape), "pictures": pictures}


@experiment(
    "nfa-fig17",
    "Speed limited optimization on images",
    covers=("figure 17",),
    smoke=Config("digits", 64, 16, 8, 4, (0,)),
    quick=Config(),
    full=Config(n=4000, steps=3000, seeds=(0, 1, 2)),
    measure=_measure,
    over={"method": _METHODS, "seed": "seeds"},
    data=("cifar10",),
)
def _conclude(config: Config, outcomes: Outcomes) -> Result:
    runs = outcomes.values_by("method")
    note = f"{config.name}, {config.n} images and {config.steps} full batches, stands in for SVHN."

    def higher(name: str) -> list[bool]:
        return [b[name][-1] > a[name][-1] for a, b in zip(runs["GD"], runs["SLO"], strict=True)]

    claims = (
        *(
            holds(f"first layer: {title} is higher with SLO at the end", "figure 17a", higher(name), note=note)
            for name, title in _NUMBERS.items()
        ),
        at_least("SLO: C/UC ratio at the end is close to 1", "section 5.2, figure 17a", 0.9,
                 (v["centered_ratio"][-1] for v in runs["SLO"]),
                 reason="'close to 1', 'the same result holds for SVHN'; nine tenths is asked for", note=note),
        holds("diagonals of NFM and AGOP are more alike with SLO (Pearson)", "figure 17b and c",
              (b["diagonals"] > a["diagonals"] for a, b in zip(runs["GD"], runs["SLO"], strict=True)), note=note),
    )  # fmt: skip

    def ends(values: Values) -> Values:
        numbers = {title: values[name][-1] for name, title in _NUMBERS.items()}
        return numbers | {"Pearson of diagonals": values["diagonals"], "train loss": values["loss"][-1]}

    table = outcomes.table("method", "seed", values=ends)
    return Result(claims, {"end of training": table}, {"figure 17": _figure(runs)}, note)


def _figure(runs: Groups) -> Figure:
    fig = new_figure(9.6, 5.0)
    upper, lower = fig.subfigures(2, 1)  # type: ignore[misc]  # an array
    axes = upper.subplots(1, 4)
    for ax, (name, title) in zip(axes, {**_NUMBERS, "loss": "training loss"}.items(), strict=True):
        for method, color in zip(_METHODS, PALETTE, strict=False):
            draw_band(ax, runs[method][0]["step"], [v[name] for v in runs[method]], color, label=method)
        label(ax, "epoch", title=title)
        if name != "loss":
            ax.set_ylim(0, 1.03)
        ax.grid()
    axes[0].legend(loc="upper left")
    pictures = [(method, name) for method in _METHODS for name in ("nfm", "agop")]
    for ax, (method, name) in zip(lower.subplots(1, 4), pictures, strict=True):
        values = runs[method][0]
        draw_diagonal(ax, values["pictures"][name], values["shape"])
        ax.set_title(f"{method}: diagonal of {name.upper()}", fontsize=9)
    return fig
