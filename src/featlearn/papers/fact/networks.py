"""Networks trained with weight decay, and correlations of their feature matrices with ``W^T W`` (FACT paper).

References:
    Boix-Adsera, Mallinar, Simon & Belkin (2025), https://arxiv.org/abs/2507.05644
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from featlearn.datasets import image_task, one_hot_labels
from featlearn.datasets.images import Standardize
from featlearn.features import LayerFeatures, Report, probe
from featlearn.models import mlp
from featlearn.training import History, fit

_QUANTITIES = (("fact", 1.0), ("fact_symmetric", 1.0), ("agop", 0.5), ("enfa", 0.5), ("agop", 1.0), ("enfa", 1.0))

FORWARD = dict(zip(("FACT", "symmetrized FACT", "√AGOP", "√eNFA", "AGOP", "eNFA"), _QUANTITIES, strict=True))
"""Matrices to be compared with ``W^T W``, by the paper's names: quantity of a report, and power."""

BACKWARD = {
    name: (f"b{quantity}", power)
    for name, (quantity, power) in zip(
        ("bFACT", "symmetrized bFACT", "√bAGOP", "√beNFA", "bAGOP", "beNFA"), _QUANTITIES, strict=True
    )
}
"""Matrices to be compared with ``W W^T`` (appendix A)."""

NAMES = {"mnist": "MNIST", "cifar10": "CIFAR-10", "digits": "digits"}
"""Names of data sets in titles."""


def image_data(name: str, n: int, seed: int, standardize: Standardize | None = None) -> tuple[Tensor, Tensor]:
    """Return images with pixels from 0 to 1, or standardized as by `image_task`, and their one-hot labels."""
    task = image_task(name, n, 0, standardize=standardize, generator=seed)
    return task.X, one_hot_labels(task.y, task.classes)


def network_for(data: tuple[Tensor, Tensor], width: int, hidden: int, seed: int) -> nn.Sequential:
    """Return a network of ReLU layers of one width for the data, without biases, with PyTorch's initialization."""
    return mlp([data[0].shape[1], *[width] * hidden, data[1].shape[1]], generator=seed)


def decayed_network(data: tuple[Tensor, Tensor], model: nn.Module, weight_decay: float, **fitting: Any) -> History:
    """Train by SGD at .1 in batches of 64, momentum .9 and a cosine schedule, on the mean squared error (appendix B).

    FACT depends on ``lr * steps``: a part of W that the loss does not need decays like
    ``exp(-lr wd / (1 - momentum) * steps)``, with a time constant of 10,000 steps at the paper's rates.

    Args:
        data: Images and labels.
        model: Network, trained in place.
        weight_decay: Weight decay lambda.
        **fitting: Further arguments of `featlearn.training.fit`, such as ``epochs`` and ``generator``.

    Returns:
        Losses of the training.
    """
    # Fused: otherwise the update of a wide layer takes as long as its gradient.
    sgd = partial(torch.optim.SGD, lr=0.1, momentum=0.9, weight_decay=weight_decay, fused=True)
    return fit(model, data, optimizer=sgd, batch_size=64, schedule="cosine", **fitting)


def decayed_report(
    model: nn.Module, data: tuple[Tensor, Tensor], weight_decay: float, layers: str | None = None
) -> Report:
    """Probe a network with the loss of `decayed_network`, for FACT, AGOP and eNFA."""
    return probe(model, data, loss=nn.MSELoss(), weight_decay=weight_decay, layers=layers)


def correlations(layer: LayerFeatures, backward: bool = False) -> dict[str, float]:
    """Return the Pearson correlation of each matrix with ``W^T W``, or of each backward matrix with ``W W^T``."""
    matrices = BACKWARD if backward else FORWARD
    return {label: layer.correlation(name, kind="pearson", power=power) for label, (name, power) in matrices.items()}
