"""The small honest training loop: tensors in, a trained model and its losses out."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.optim import Optimizer
from torch.optim.lr_scheduler import CosineAnnealingLR, LRScheduler

from featlearn.errors import FeatlearnError, InputError
from featlearn.numerics.progress import progress_bar
from featlearn.numerics.seeds import Seed, as_generator

__all__ = ["DivergenceError", "History", "fit", "relative_gradient"]

LossFunction = Callable[[Tensor, Tensor], Tensor]
OptimizerFactory = Callable[[Iterable[nn.Parameter]], Optimizer]
ScheduleFactory = Callable[[Optimizer], LRScheduler]


def fit(
    model: nn.Module,
    data: tuple[Tensor, Tensor],
    *,
    loss: str | LossFunction = "mse",
    optimizer: str | OptimizerFactory = "sgd",
    lr: float | None = None,
    steps: int | None = None,
    epochs: int | None = None,
    batch_size: int | None = None,
    momentum: float = 0.0,
    weight_decay: float = 0.0,
    schedule: str | ScheduleFactory | None = None,
    stop_loss: float | None = None,
    stop_relgrad: float | None = None,
    generator: Seed = None,
    callback: Callable[[int, float], object] | None = None,
    progress: bool = False,
) -> History:
    """Train a model on tensors, in place.

    The model is trained in the mode it is in (a new module is in training mode). Shuffling, dropout and
    whatever else the model draws come from ``generator``; the global generators are left as they were.

    Args:
        model: Any module with ``model(X)`` a tensor.
        data: ``(X, y)``.
        loss: "mse" is nn.MSELoss, the mean over samples *and* outputs without a half; "half_mse" is half of
            it; "cross_entropy" is nn.CrossEntropyLoss; or ``callable(output, target) -> scalar``, a mean
            over samples.
        optimizer: "sgd" ("gd" is the same), "adam", "adagrad", or a factory ``parameters -> Optimizer``,
            which then sets its own lr, momentum and weight decay.
        lr: Learning rate.
        steps: Number of updates at most; give this or ``epochs``.
        epochs: Number of passes over the data at most.
        batch_size: Samples an update; None is full-batch gradient descent. The last batch of an epoch may
            be smaller.
        momentum: Of "sgd".
        weight_decay: lambda, the gradient of lambda/2 |theta|^2 added to every parameter's, as torch's own
            optimisers do.
        schedule: None for a constant rate, "cosine" for one that falls to 0 over all steps, or a factory
            ``optimizer -> LRScheduler``, stepped after every update.
        stop_loss: Stop as soon as the loss is below this. With batches the loss over all the data is
            looked at after every epoch.
        stop_relgrad: Stop as soon as `relative_gradient` is below this (looked at as often).
        generator: Generator or integer seed.
        callback: Called as ``callback(step, loss)`` before every update.
        progress: Whether to show a bar on stderr, if that is a terminal.

    Raises:
        InputError: Arguments contradict each other or do not suit the data.
        DivergenceError: The loss became infinite or NaN.
    """
    X, y = _check_data(data)
    batch = _check_length(len(X), steps, epochs, batch_size)
    loss_function = _loss_function(loss)
    parameters = [p for p in model.parameters() if p.requires_grad]
    if not parameters:
        raise InputError("the model has no parameter that requires a gradient: there is nothing to train")
    updates = _make_optimizer(optimizer, parameters, lr, momentum, weight_decay)
    if stop_relgrad is not None:
        _check_decay(updates)
    per_epoch = math.ceil(len(X) / batch)
    total = steps if steps is not None else (epochs or 0) * per_epoch
    scheduler = _make_schedule(schedule, updates, total)
    generator = as_generator(generator, "fit")

    def whole(gradient: bool) -> float:
        """Loss over all the data and, if asked for, its gradient in ``.grad``."""
        updates.zero_grad()
        value = 0.0
        with torch.set_grad_enabled(gradient):
            for start in range(0, len(X), batch):
                xs, ys = X[start : start + batch], y[start : start + batch]
                part = loss_function(model(xs), ys) * (len(xs) / len(X))
                if gradient:
                    part.backward()  # type: ignore[no-untyped-call]
                value += float(part.detach())
        return value

    def stop_reason(value: float) -> Literal["loss", "relgrad"] | None:
        if stop_loss is not None and value < stop_loss:
            return "loss"
        if stop_relgrad is not None:
            history.relgrad = relative_gradient(updates)
            if history.relgrad < stop_relgrad:
                return "relgrad"
        return None

    history = History()
    began = time.perf_counter()
    order = torch.arange(len(X))
    with _own_randomness(generator, parameters), progress_bar(total, "training", progress) as advance:
        for step in range(total):
            if batch < len(X):
                if step % per_epoch == 0:
                    order = torch.randperm(len(X), generator=generator)
                chosen = order[(step % per_epoch) * batch :][:batch].to(X.device)
                xs, ys = X[chosen], y[chosen.to(y.device)]
            else:
                xs, ys = X, y
            updates.zero_grad()
            objective = loss_function(model(xs), ys)
            value = float(objective.detach())
            _check_finite(value, step, updates)
            history.step.append(step)
            history.loss.append(value)
            if callback is not None:
                callback(step, value)
            objective.backward()  # type: ignore[no-untyped-call]
            if batch == len(X) and (reason := stop_reason(value)):
                history.stopped = reason
                break
            updates.step()
            if scheduler is not None:
                scheduler.step()
            advance()
            rules = stop_loss is not None or stop_relgrad is not None
            if batch < len(X) and rules and (step + 1) % per_epoch == 0:
                value = whole(gradient=stop_relgrad is not None)
                _check_finite(value, step + 1, updates)
                if reason := stop_reason(value):
                    history.stopped = reason
                    break
        history.final_loss = whole(gradient=stop_relgrad is not None)
        _check_finite(history.final_loss, len(history.step), updates)
        if stop_relgrad is not None:
            history.relgrad = relative_gradient(updates)
        updates.zero_grad()
    history.seconds = time.perf_counter() - began
    return history


def relative_gradient(optimizer: Optimizer) -> float:
    """Distance from a critical point, ``|grad(L + lambda/2 |theta|^2)| / (lambda |theta|)``.

    Norms run over the weight matrices (parameters of two or more dimensions) that have a gradient of L in
    ``.grad``. The ratio is 1 for a loss without gradient and 0 at a critical point, where
    ``lambda W = -dL/dW``: the point at which FACT is W^T W.
    """
    residual, scale = 0.0, 0.0
    for group in optimizer.param_groups:
        decay = float(group.get("weight_decay", 0.0))
        for p in group["params"]:
            if p.ndim >= 2 and p.grad is not None:
                pull = decay * p.detach().double()
                residual += float((p.grad.double() + pull).square().sum())
                scale += float(pull.square().sum())
    return math.sqrt(residual / scale) if scale > 0 else math.nan


def _check_data(data: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
    if not isinstance(data, tuple) or len(data) != 2 or not all(isinstance(a, Tensor) for a in data):
        raise InputError(f"data must be a tuple (X, y) of two tensors, got {type(data).__name__}")
    X, y = data
    if X.ndim == 0 or y.ndim == 0 or len(X) != len(y) or len(X) == 0:
        raise InputError(
            f"X and y must have as many samples, at least one: their shapes are {tuple(X.shape)} and {tuple(y.shape)}"
        )
    return X, y


def _check_length(n: int, steps: int | None, epochs: int | None, batch_size: int | None) -> int:
    """Check the number of updates and return the number of samples in one."""
    if (steps is None) == (epochs is None):
        raise InputError(f"give either steps or epochs, got steps={steps} and epochs={epochs}")
    for name, count in (("steps", steps), ("epochs", epochs)):
        if count is not None and count < 0:
            raise InputError(f"{name} must not be negative, got {count}")
    if batch_size is None:
        return n
    if batch_size < 1:
        raise InputError(f"batch_size must be at least 1, or None for the full batch, got {batch_size}")
    return min(batch_size, n)


def _loss_function(loss: str | LossFunction) -> LossFunction:
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


def _make_optimizer(
    optimizer: str | OptimizerFactory,
    parameters: list[nn.Parameter],
    lr: float | None,
    momentum: float,
    weight_decay: float,
) -> Optimizer:
    if callable(optimizer):
        if lr is not None or momentum != 0 or weight_decay != 0:
            raise InputError("an optimizer factory sets its own lr, momentum and weight_decay: leave them out of fit")
        return optimizer(parameters)
    if lr is None or not lr > 0:
        raise InputError(f"lr must be a positive number, got {lr}")
    if not weight_decay >= 0:
        raise InputError(f"weight_decay must not be negative, got {weight_decay}")
    if optimizer in ("sgd", "gd"):
        return torch.optim.SGD(parameters, lr=lr, momentum=momentum, weight_decay=weight_decay)
    if momentum != 0:
        raise InputError(f"momentum belongs to 'sgd'; {optimizer!r} does not take it")
    if optimizer == "adam":
        return torch.optim.Adam(parameters, lr=lr, weight_decay=weight_decay)
    if optimizer == "adagrad":
        return torch.optim.Adagrad(parameters, lr=lr, weight_decay=weight_decay)
    raise InputError(f"no optimizer is called {optimizer!r}: choose from sgd, gd, adam, adagrad, or pass a factory")


def _make_schedule(schedule: str | ScheduleFactory | None, optimizer: Optimizer, total: int) -> LRScheduler | None:
    if schedule is None:
        return None
    if callable(schedule):
        return schedule(optimizer)
    if schedule == "cosine":
        return CosineAnnealingLR(optimizer, T_max=max(total, 1))
    raise InputError(f"no schedule is called {schedule!r}: choose cosine, None, or pass a factory")


def _check_decay(optimizer: Optimizer) -> None:
    groups = optimizer.param_groups
    if isinstance(optimizer, torch.optim.AdamW) or any(g.get("decoupled_weight_decay") for g in groups):
        raise InputError("stop_relgrad needs a weight decay that is part of the gradient; AdamW's is decoupled from it")
    if not any(g.get("weight_decay", 0.0) > 0 for g in groups):
        raise InputError("stop_relgrad divides by lambda |theta|: give a weight_decay > 0, or leave it out")


def _check_finite(value: float, step: int, optimizer: Optimizer) -> None:
    if not math.isfinite(value):
        rates = ", ".join(f"{g['lr']:g}" for g in optimizer.param_groups)
        raise DivergenceError(
            f"the loss is {value} at step {step} with lr={rates}: lower the rate or the initial scale"
            if step
            else f"the loss is {value} before any update: look for NaN or infinite inputs, labels or weights"
        )


@contextmanager
def _own_randomness(generator: torch.Generator, parameters: list[nn.Parameter]) -> Iterator[None]:
    """Let layers such as dropout, which know only the global generators, draw from ours."""
    seed = int(torch.randint(2**62, (), generator=generator))
    devices: list[Any] = sorted({p.device.index for p in parameters if p.device.type == "cuda"})
    with torch.random.fork_rng(devices=devices):
        # Not torch.manual_seed: it would reseed devices that are not restored afterwards.
        torch.default_generator.manual_seed(seed)
        for device in devices:
            with torch.cuda.device(device):
                torch.cuda.manual_seed(seed)
        yield


@dataclass
class History:
    """What happened in `fit`.

    Attributes:
        step: Numbers of the updates, from 0.
        loss: Loss before each update, over its batch.
        final_loss: Loss of the trained model over all the data, in the mode the model is in.
        relgrad: `relative_gradient` of the trained model, if ``stop_relgrad`` was given, else NaN.
        stopped: "steps" if all updates were made, else the rule that ended training.
        seconds: Time taken.
    """

    step: list[int] = field(default_factory=list)
    loss: list[float] = field(default_factory=list)
    final_loss: float = math.nan
    relgrad: float = math.nan
    stopped: Literal["steps", "loss", "relgrad"] = "steps"
    seconds: float = 0.0


class DivergenceError(FeatlearnError, RuntimeError):
    """The loss became infinite or NaN."""
