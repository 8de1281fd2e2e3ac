"""Two classes of digits, easy and hard targets for them, and the tangent kernels of networks that fit these."""

from __future__ import annotations

import copy
import math
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from featlearn.datasets import image_task
from featlearn.kernels import average_ntk, ntk
from featlearn.models import mlp
from featlearn.training import fit

TARGETS = ("linear", "binary")


@dataclass(frozen=True)
class ImageConfig:
    """See `adapted_kernels`; the paper has 500 images and 50 points."""

    data: str = "mnist"
    n: int = 500
    width: int = 128
    steps: int = 1000
    points: int = 50
    seeds: tuple[int, ...] = (0, 1, 2)


IMAGE_OVER = {"seed": "seeds", "target": TARGETS}


@dataclass(frozen=True, eq=False)
class AdaptedKernels:
    """A network fitted to a target, rows in the order of the linear one.

    Attributes:
        linear: ``y_i``, what the last layer of an independent random network makes of the classes, (n,).
        target: What the network was trained on: y, or its sign.
        initial: Tangent kernel at the start.
        average: Of the tangent features averaged along the straight path: the adapted kernel.
        final: At the end.
        accuracy: Share of rows on which the sign of y is the class.
        loss: Mean squared error at the end.
        path_error: How far the average is from the exact one, see `featlearn.average_ntk`.
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
    data: str = "mnist",
    n: int = 500,
    target: str = "linear",
    *,
    width: int = 128,
    steps: int = 1000,
    batch_size: int = 50,
    lr: float = 0.1,
    points: int = 50,
    seed: int = 0,
) -> AdaptedKernels:
    """Train a ReLU network of three layers on digits 2 and 3, and compare its tangent kernels (appendix B.1).

    Weights start at N(0, 2/k_in). Each image has mean 0, and length 1 rather than a variance of 1: with the latter the
    initial kernel would be near 1,000, where the paper's colors end at 4, and a rate of .1 would diverge.

    Args:
        data: "mnist", or "digits".
        n: Images.
        target: "linear", or "binary" for its sign.
        width: Of both hidden layers.
        steps: Of SGD with momentum .9 and a cosine schedule.
        batch_size: Of SGD.
        lr: Its rate.
        points: On the path.
        seed: Of images and networks.
    """
    task = image_task(data, n, 0, classes=(2, 3), standardize="images", generator=seed)
    X = task.X / task.X.norm(dim=1, keepdim=True)
    classes = (2.0 * task.y - 1.0)[:, None]
    linear = _best_fit(_network(X.shape[1], width, seed + 1000), X, classes)
    order = linear[:, 0].argsort()
    X, linear, classes = X[order], linear[order], classes[order]
    labels = linear if target == "linear" else linear.sign()
    start = _network(X.shape[1], width, seed)
    model = copy.deepcopy(start)
    history = fit(
        model, (X, labels), lr=lr, momentum=0.9, steps=steps, batch_size=batch_size, schedule="cosine", generator=seed
    )
    average = average_ntk(model, start, X, points=points)
    return AdaptedKernels(
        linear=linear[:, 0],
        target=labels[:, 0],
        initial=_kernel(start, X),
        average=average.kernel,
        final=_kernel(model, X),
        accuracy=float(((linear > 0) == (classes > 0)).double().mean()),
        loss=history.final_loss,
        path_error=average.completeness_error,
    )


def _kernel(model: nn.Module, X: Tensor) -> Tensor:
    found = ntk(model, X)
    assert isinstance(found, Tensor)
    return found


def _network(inputs: int, width: int, seed: int) -> nn.Sequential:
    return mlp([inputs, width, width, 1], init="normal", scales=[math.sqrt(2)] * 3, generator=seed)


def _best_fit(network: nn.Sequential, X: Tensor, labels: Tensor) -> Tensor:
    """Least squares on the features below the last layer."""
    with torch.no_grad():
        features = network[:-1](X).double()
    found = torch.linalg.lstsq(features, labels.double(), driver="gelsd").solution
    fitted: Tensor = features @ found
    return fitted.to(X.dtype)
