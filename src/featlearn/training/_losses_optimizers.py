"""Losses, optimizers and schedules of `featlearn.training.fit`, by name."""

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
    """Return the loss function of a name, or the function itself."""
    if callable(loss):
        return loss
    named: dict[str, LossFunction] = {"mse": _mse, "half_mse": _half_mse, "cross_entropy": functional.cross_entropy}
    if not isinstance(loss, str) or loss not in named:
        raise InputError(f"loss must be 'mse', 'half_mse', 'cross_entropy' or a function, got {loss!r}.")
    return named[loss]


def _mse(output: Tensor, target: Tensor) -> Tensor:
    # (n, 1) against (n,) would broadcast to n x n and train on noise.
    if output.shape != target.shape:
        raise InputError(
            "Outputs of the model and y must have the same shape for the squared loss, "
            f"got {tuple(output.shape)} and {tuple(target.shape)}."
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
    """Return the optimizer of a name, or the one that a factory returns."""
    if callable(optimizer):
        if lr is not None or momentum != 0 or weight_decay != 0:
            raise InputError("An optimizer factory sets lr, momentum and weight_decay itself. Do not pass them to fit.")
        made = optimizer(parameters)
        if not isinstance(made, Optimizer):
            raise InputError(f"An optimizer factory must return a torch Optimizer, got {type(made).__name__}.")
        if isinstance(made, torch.optim.LBFGS):
            raise InputError(
                "optimizer must use one gradient per update, but LBFGS needs several. Write your own training loop."
            )
        return made
    if lr is None or not lr > 0:
        raise InputError(f"lr must be a positive number, got {lr}.")
    if not weight_decay >= 0:
        raise InputError(f"weight_decay must be at least 0, got {weight_decay}.")
    if optimizer in ("sgd", "gd", "slo"):
        kind = SLO if optimizer == "slo" else torch.optim.SGD
        return kind(parameters, lr=lr, momentum=momentum, weight_decay=weight_decay)
    if optimizer not in ("adam", "adagrad"):
        raise InputError(f"optimizer must be 'sgd', 'gd', 'adam', 'adagrad', 'slo' or a factory, got {optimizer!r}.")
    if momentum != 0:
        raise InputError(f"momentum must be 0 for optimizer {optimizer!r}, got {momentum}. Use 'sgd' or 'slo'.")
    adaptive = torch.optim.Adam if optimizer == "adam" else torch.optim.Adagrad
    return adaptive(parameters, lr=lr, weight_decay=weight_decay)


def make_schedule(schedule: str | ScheduleFactory | None, optimizer: Optimizer, total: int) -> LRScheduler | None:
    """Return the schedule of a name, or the one that a factory returns."""
    if schedule is None:
        return None
    if schedule == "cosine":
        return CosineAnnealingLR(optimizer, T_max=max(total, 1))
    if not callable(schedule):
        raise InputError(f"schedule must be 'cosine', None or a factory, got {schedule!r}.")
    made = schedule(optimizer)
    if isinstance(made, ReduceLROnPlateau):
        raise InputError(
            "schedule must depend on the step only, but ReduceLROnPlateau needs a metric at each step. Choose another "
            "schedule, or write your own training loop."
        )
    return made


def check_decay(optimizer: Optimizer) -> None:
    """Raise InputError for an optimizer whose weight decay is zero or not part of the gradient."""
    groups = optimizer.param_groups
    if isinstance(optimizer, torch.optim.AdamW) or any(g.get("decoupled_weight_decay") for g in groups):
        raise InputError(
            "stop_relgrad requires a weight decay that is part of the gradient; the weight decay of AdamW is decoupled."
        )
    if not any(g.get("weight_decay", 0.0) > 0 for g in groups):
        raise InputError("stop_relgrad requires weight_decay > 0: relgrad is divided by lambda |theta|.")
