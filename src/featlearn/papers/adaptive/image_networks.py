"""Tangent kernels of networks that fit easy and hard targets on two classes of digits.

References:
    LeJeune & Alemohammad (2023), https://arxiv.org/abs/2308.15478
"""

from __future__ import annotations

import copy
import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from featlearn.datasets import image_task
from featlearn.kernels import average_ntk, ntk
from featlearn.models import mlp
from featlearn.training import fit

TARGETS = ("linear", "binary")


@dataclass(frozen=True)
class ImageConfig:
    """Configuration of `adapted_kernels`; the paper has 500 images and 50 points."""

    data: str = "mnist"
    n: int = 500
    width: int = 128
    steps: int = 1000
    points: int = 50
    seeds: tuple[int, ...] = (0, 1, 2)


IMAGE_OVER = {"seed": "seeds", "target": TARGETS}


@dataclass(frozen=True, eq=False)
class AdaptedKernels:
    """Kernels of a network fitted to a target, rows in the order of the linear target.

    Attributes:
        linear: Linear target ``y_i``: least-squares fit of the classes by the features of an independent random
            network, (n,).
        target: Target of the training: y, or its sign.
        initial: Tangent kernel at the start.
        average: Adapted kernel: that of the tangent features averaged along the straight path.
        final: Tangent kernel at the end.
        accuracy: Share of rows on which the sign of y is the class.
        loss: Mean squared error at the end.
        path_error: Deviation of the average from the exact one, see `featlearn.average_ntk`.
    """

    linear: Tensor
    target: Tensor
    initial: Tensor
    average: Tensor
    final: Tensor
    accuracy: float
    loss: float
    path_error: float


def adapted_kernels(
    data: str, n: int, target: str, *, width: int, steps: int, points: int, seed: int
) -> AdaptedKernels:
    """Train a ReLU network of three layers on digits 2 and 3, and return its tangent kernels (appendix B.1).

    Weights start at N(0, 2/k_in). Each image has mean 0, and length 1 rather than a variance of 1: with the latter the
    initial kernel would be near 1,000, where the paper's colors end at 4, and a rate of .1 would diverge. SGD takes
    batches of 50 at a rate of .1, momentum .9 and a cosine schedule.

    Args:
        data: Set of images, "mnist" or "digits".
        n: Number of images.
        target: Target, "linear", or "binary" for its sign.
        width: Width of both hidden layers.
        steps: Number of steps.
        points: Number of points on the path.
        seed: Seed of images and networks.
    """
    task = image_task(data, n, 0, classes=(2, 3), standardize="images", generator=seed)
    X = task.X / task.X.norm(dim=1, keepdim=True)
    classes = (2.0 * task.y - 1.0)[:, None]
    with torch.no_grad():
        features = _network(X.shape[1], width, seed + 1000)[:-1](X).double()
    solution = torch.linalg.lstsq(features, classes.double(), driver="gelsd").solution
    linear = (features @ solution).to(X.dtype)
    order = linear[:, 0].argsort()
    X, linear, classes = X[order], linear[order], classes[order]
    labels = linear if target == "linear" else linear.sign()
    start = _network(X.shape[1], width, seed)
    model = copy.deepcopy(start)
    sgd: dict[str, Any] = {"lr": 0.1, "momentum": 0.9, "batch_size": 50, "schedule": "cosine"}
    history = fit(model, (X, labels), steps=steps, generator=seed, **sgd)
    average = average_ntk(model, start, X, points=points)
    initial, final = (ntk(network, X) for network in (start, model))
    assert isinstance(initial, Tensor) and isinstance(final, Tensor)
    accuracy = float(((linear > 0) == (classes > 0)).double().mean())
    numbers = (accuracy, history.final_loss, average.completeness_error)
    return AdaptedKernels(linear[:, 0], labels[:, 0], initial, average.kernel, final, *numbers)


def _network(inputs: int, width: int, seed: int) -> nn.Sequential:
    return mlp([inputs, width, width, 1], init="normal", scales=[math.sqrt(2)] * 3, generator=seed)
