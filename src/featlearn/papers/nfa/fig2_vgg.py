"""Figures 2 (C) and 15 (A) of the NFA paper: the convolutions of a VGG-11 on CIFAR-10.

References:
    Beaglehole, Mitliagkas & Agarwala, "Feature learning as alignment", https://openreview.net/forum?id=JXCe2ZcUXr,
    figures 2 (C) and 15 (A).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from matplotlib.figure import Figure
from torch import nn
from torch.nn.functional import interpolate

from featlearn.datasets import image_task, one_hot_labels
from featlearn.models import vgg11
from featlearn.papers._figures import label_outer, panels
from featlearn.papers.claim import holds
from featlearn.papers.experiment import Outcomes, Result, Values, experiment
from featlearn.papers.nfa import layer_trajectories as trajectories


@dataclass(frozen=True)
class Config:
    """Configuration of the paper but for the sizes: learning rate 1, batches of 128.

    The paper has 50,000 images, width 1 and 50 epochs.
    """

    name: str = "cifar10"
    n: int = 1000
    width: float = 0.125
    epochs: int = 20
    probed: int = 64
    measurements: int = 8
    seeds: tuple[int, ...] = (0, 1, 2)


def _measure(name: str, n: int, width: float, epochs: int, probed: int, measurements: int, seed: int) -> Values:
    task = image_task(name, n, 0, standardize="channels", flatten=False, generator=seed)
    images = task.X if task.X.shape[-1] == 32 else interpolate(task.X, size=32)  # digits, in tests
    model = vgg11(task.classes, width=width, channels=images.shape[1], init="he", generator=seed)
    data = (images, one_hot_labels(task.y, task.classes))
    convolutions = [place for place, module in model.named_modules() if isinstance(module, nn.Conv2d)]
    training = {"lr": 1.0, "epochs": epochs, "generator": seed}
    return trajectories.watch_images(model, data, convolutions, probed, measurements, **training)


@experiment(
    "nfa-fig2-vgg",
    "Centered and uncentered NFC of a VGG-11",
    covers=("figure 2 (C)", "figure 15 (A)"),
    smoke=Config("digits", 16, 0.03, 2, 8, 2, (0,)),
    quick=Config(),
    full=Config(n=10000, width=0.25, epochs=50, probed=256, measurements=14),
    measure=_measure,
    data=("cifar10",),
)
def _conclude(config: Config, outcomes: Outcomes) -> Result:
    runs, names = outcomes.values, [f"convolution {i + 1}" for i in range(8)]
    changes = trajectories.losses_and_changes({"VGG-11": runs}, names, "layer")
    claims = (
        holds("C-NFC is above UC-NFC in every convolution at the end", "figure 2C",
              (min(trajectories.final_gaps(v)) > 0 for v in runs)),
        trajectories.mostly_above("figure 2C", runs),
        trajectories.larger_deep(
            "the gap is larger in the deeper half of the layers", "figure 2C, section 3", runs, 4),
        trajectories.larger_early("figure 2C, section 3", runs),
        trajectories.moves(
            "weights move significantly: mean change at the end", "figure 15A", runs, torch.mean,
            "A tenth of the images, and far fewer updates than in the paper.",
        ),
    )  # fmt: skip
    return Result(
        claims,
        {"end of training, mean over seeds": trajectories.final_table(runs, names)},
        {
            "figure 2 C": _figure(runs),
            "figure 15 A": changes,
        },
        f"Channels times {config.width:g}, {config.n} images of {config.name}, {config.epochs} epochs, squared error "
        "of one-hot labels at the paper's rate of 1; torchvision's own initialization (with PyTorch's uniform one, and "
        "no batch normalization, nothing is learned in this time). No hidden linear layers, of which torchvision's "
        "has two.",
    )


def _figure(runs: Sequence[Values]) -> Figure:
    fig, axes = panels(9.4, 4.2, 2, 4, sharex=True, sharey=True)
    for i, ax in enumerate(axes.flat):
        trajectories.draw_centered(ax, runs, i)
        ax.set_title(f"convolution {i + 1}")
    axes[0][0].legend(loc="lower left")
    label_outer(axes, "step")
    return fig
