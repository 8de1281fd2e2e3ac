"""Networks trained with weight decay until FACT can hold, and what their feature matrices resemble."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from featlearn.datasets import image_task, one_hot_labels
from featlearn.datasets.images import Standardize
from featlearn.features import LayerFeatures, Report, probe
from featlearn.models import mlp
from featlearn.training import History, fit

FORWARD = {
    "FACT": ("fact", 1.0),
    "symmetrized FACT": ("fact_symmetric", 1.0),
    "√AGOP": ("agop", 0.5),
    "√eNFA": ("enfa", 0.5),
    "AGOP": ("agop", 1.0),
    "eNFA": ("enfa", 1.0),
}
"""Matrices to be compared with ``W^T W``, by the paper's names: quantity of a report, and power."""

BACKWARD = {
    "bFACT": ("bfact", 1.0),
    "symmetrized bFACT": ("bfact_symmetric", 1.0),
    "√bAGOP": ("bagop", 0.5),
    "√beNFA": ("benfa", 0.5),
    "bAGOP": ("bagop", 1.0),
    "beNFA": ("benfa", 1.0),
}
"""Those to be compared with ``W W^T`` (appendix A)."""


NAMES = {"mnist": "MNIST", "cifar10": "CIFAR-10", "digits": "digits"}
"""Names of data sets in titles."""


def image_data(name: str, n: int, seed: int, standardize: Standardize | None = None) -> tuple[Tensor, Tensor]:
    """Images with pixels from 0 to 1, or standardized as `image_task` does it, and their one-hot labels."""
    task = image_task(name, n, 0, standardize=standardize, generator=seed)
    return task.X, one_hot_labels(task.y, task.classes)


def network_for(data: tuple[Tensor, Tensor], width: int, hidden: int, seed: int) -> nn.Sequential:
    """ReLU layers of one width between the data's inputs and outputs, without biases, as PyTorch initializes them."""
    X, y = data
    return mlp([X.shape[1], *[width] * hidden, y.shape[1]], generator=seed)


def decayed_network(
    data: tuple[Tensor, Tensor],
    model: nn.Module,
    *,
    weight_decay: float,
    epochs: int,
    lr: float = 0.1,
    batch_size: int = 64,
    seed: int = 0,
    callback: Callable[[int, float], object] | None = None,
) -> History:
    """Train by SGD of momentum .9 with a cosine schedule on the mean squared error (FACT paper, appendix B).

    What matters to FACT is ``lr * steps``: a part of W that the loss does not want decays like
    ``exp(-lr wd / (1 - momentum) * steps)``, with a time constant of 10,000 steps at the paper's rates.
    """
    return fit(
        model, data, optimizer=partial(_decaying, lr=lr, weight_decay=weight_decay), epochs=epochs,
        batch_size=batch_size, schedule="cosine", generator=seed, callback=callback,
    )  # fmt: skip


def _decaying(parameters: Iterable[nn.Parameter], lr: float, weight_decay: float) -> Optimizer:
    # Fused: the update of a wide layer takes as long as its gradient otherwise.
    return torch.optim.SGD(parameters, lr=lr, momentum=0.9, weight_decay=weight_decay, fused=True)


def decayed_report(
    model: nn.Module, data: tuple[Tensor, Tensor], weight_decay: float, layers: str | None = None
) -> Report:
    """Everything that FACT, AGOP and eNFA need, for the loss of `decayed_network`."""
    return probe(model, data, loss=nn.MSELoss(), weight_decay=weight_decay, layers=layers)


def correlations(layer: LayerFeatures, backward: bool = False) -> dict[str, float]:
    """Pearson correlation of each matrix with ``W^T W``, or ``W W^T``."""
    matrices = BACKWARD if backward else FORWARD
    return {label: layer.correlation(name, kind="pearson", power=power) for label, (name, power) in matrices.items()}
