"""Losses, optimizers and schedules of the fit loop, by name."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.optim import Optimizer
from torch.optim.lr_scheduler import CosineAnnealingLR, LRScheduler, ReduceLROnPlateau

from featlearn.errors import InputError
from featlearn.optim import SLO

LossFunction = Callable[[Tensor, Tensor], Tensor]
OptimizerFactory = Callable[[Iterable[nn.Parameter]], Optimizer]
ScheduleFactory = Callable[[Optimizer], LRScheduler]


def loss_function(loss: str | LossFunction) -> LossFunction:
    """A loss by its name, or the function itself."""
    if callable(loss):
        return loss
    if loss == "mse":
        return _mse
    if loss == "half_mse":
        return _half_mse
    if loss == "cross_entropy":
        return functional.cross_entropy
    raise InputError(f"no loss is called {loss!r}: choose from mse, half_mse, cross_entropy, or pass a function")


def _mse(output: Tensor, target: Tensor) -> Tensor:
    # (n, 1) against (n,) would broadcast to n x n and train on noise.
    if output.shape != target.shape:
        raise InputError(
            "outputs and labels must have one shape for the squared loss: "
            f"the model gives {tuple(output.shape)}, y is {tuple(target.shape)}"
        )
    return functional.mse_loss(output, target)


def _half_mse(output: Tensor, target: Tensor) -> Tensor:
    return _mse(output, target) / 2


def make_optimizer(
    optimizer: str | OptimizerFactory,
    parameters: list[nn.Parameter],
    lr: float | None,
    momentum: float,
    weight_decay: float,
) -> Optimizer:
    """An optimizer by its name, or as a factory makes it."""
    if callable(optimizer):
        if lr is not None or momentum != 0 or weight_decay != 0:
            raise InputError("an optimizer factory sets its own lr, momentum and weight_decay: leave them out of fit")
        made = optimizer(parameters)
        if not isinstance(made, Optimizer):
            raise InputError(f"an optimizer factory must return a torch Optimizer, got {type(made).__name__}")
        if isinstance(made, torch.optim.LBFGS):
            raise InputError(
                "fit makes one gradient an update, and LBFGS asks for several: use it in a loop of your own"
            )
        return made
    if lr is None or not lr > 0:
        raise InputError(f"lr must be a positive number, got {lr}")
    if not weight_decay >= 0:
        raise InputError(f"weight_decay must not be negative, got {weight_decay}")
    if optimizer in ("sgd", "gd"):
        return torch.optim.SGD(parameters, lr=lr, momentum=momentum, weight_decay=weight_decay)
    if optimizer == "slo":
        return SLO(parameters, lr=lr, momentum=momentum, weight_decay=weight_decay)
    if momentum != 0:
        raise InputError(f"momentum belongs to 'sgd' and 'slo'; {optimizer!r} does not take it")
    if optimizer == "adam":
        return torch.optim.Adam(parameters, lr=lr, weight_decay=weight_decay)
    if optimizer == "adagrad":
        return torch.optim.Adagrad(parameters, lr=lr, weight_decay=weight_decay)
    raise InputError(
        f"no optimizer is called {optimizer!r}: choose from sgd, gd, adam, adagrad, slo, or pass a factory"
    )


def make_schedule(schedule: str | ScheduleFactory | None, optimizer: Optimizer, total: int) -> LRScheduler | None:
    """A schedule by its name, or as a factory makes it."""
    if schedule is None:
        return None
    if callable(schedule):
        made = schedule(optimizer)
        if isinstance(made, ReduceLROnPlateau):
            raise InputError(
                "ReduceLROnPlateau waits for a number to be handed to it, and fit steps schedules without one: choose "
                "a schedule of the steps, or write the loop yourself"
            )
        return made
    if schedule == "cosine":
        return CosineAnnealingLR(optimizer, T_max=max(total, 1))
    raise InputError(f"no schedule is called {schedule!r}: choose cosine, None, or pass a factory")


def check_decay(optimizer: Optimizer) -> None:
    """Refuse an optimizer whose weight decay is not part of the gradient, or is zero."""
    groups = optimizer.param_groups
    if isinstance(optimizer, torch.optim.AdamW) or any(g.get("decoupled_weight_decay") for g in groups):
        raise InputError("stop_relgrad needs a weight decay that is part of the gradient; AdamW's is decoupled from it")
    if not any(g.get("weight_decay", 0.0) > 0 for g in groups):
        raise InputError("stop_relgrad divides by lambda |theta|: give a weight_decay > 0, or leave it out")
