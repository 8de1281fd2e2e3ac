"""The small honest training loop: tensors in, a trained model and its losses out."""

from __future__ import annotations

import math
import os
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from featlearn._utils.progress import progress_bar
from featlearn._utils.rng import Seed, as_generator
from featlearn._utils.validation import as_settings
from featlearn.errors import DivergenceError, InputError
from featlearn.runs import Run
from featlearn.runs.launch import launch, run_to_continue
from featlearn.training._checkpoint import Training, model_mark, tensor_mark
from featlearn.training._losses_optimizers import (
    LossFunction,
    OptimizerFactory,
    ScheduleFactory,
    check_decay,
    loss_function,
    make_optimizer,
    make_schedule,
)
from featlearn.training._monitor import Monitor


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
    monitor: Monitor | None = None,
    run: Run | str | os.PathLike[str] | None = None,
    checkpoint_every: int | None = None,
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
        optimizer: "sgd" ("gd" is the same), "adam", "adagrad", "slo", or a factory ``parameters -> Optimizer``,
            which then sets its own lr, momentum and weight decay.
        lr: Learning rate.
        steps: Number of updates at most; give this or ``epochs``.
        epochs: Number of passes over the data at most.
        batch_size: Samples an update; None is full-batch gradient descent. The last batch of an epoch may
            be smaller.
        momentum: Of "sgd" and "slo".
        weight_decay: lambda, the gradient of lambda/2 |theta|^2 added to every parameter's, as torch's own
            optimizers do.
        schedule: None for a constant rate, "cosine" for one that falls to 0 over all steps, or a factory
            ``optimizer -> LRScheduler``, stepped after every update.
        stop_loss: Stop as soon as the loss is below this. With batches the loss over all the data is
            looked at after every epoch.
        stop_relgrad: Stop as soon as `relative_gradient` is below this (looked at as often).
        generator: Generator or integer seed.
        callback: Called as ``callback(step, loss)`` before every update.
        monitor: A `featlearn.Monitor`, told of every step before its update, and of the trained model at the end.
        run: Where losses and checkpoints go: a `featlearn.runs.Run`, or a folder, in which a run is made. A run that
            has a checkpoint is taken up there: killed at any instant and called again with the same arguments,
            training ends with the same bits as if nothing had happened (on the same threads and versions). Other
            arguments are refused. If the folder holds a run of another training without a checkpoint, a new run is
            made beside it, in ``<folder>-2``, with a warning.
        checkpoint_every: Updates between checkpoints; one is written at the end as well. None writes none.
        progress: Whether to show a bar on stderr, if that is a terminal.

    Raises:
        InputError: Arguments contradict each other or do not suit the data.
        DivergenceError: The loss became infinite or NaN.
    """
    X, y = _check_data(data)
    batch = _check_length(len(X), steps, epochs, batch_size)
    objective = loss_function(loss)
    parameters = [p for p in model.parameters() if p.requires_grad]
    if not parameters:
        raise InputError("the model has no parameter that requires a gradient: there is nothing to train")
    if checkpoint_every is not None and (run is None or not _is_count(checkpoint_every) or checkpoint_every < 1):
        raise InputError(f"checkpoint_every is a number of updates, and needs run=; got {checkpoint_every} and {run!r}")
    updates = make_optimizer(optimizer, parameters, lr, momentum, weight_decay)
    if stop_relgrad is not None:
        check_decay(updates)
    per_epoch = math.ceil(len(X) / batch)
    total = steps if steps is not None else (epochs or 0) * per_epoch
    scheduler = make_schedule(schedule, updates, total)
    generator = as_generator(generator, "fit")

    def whole(gradient: bool) -> float:
        """Loss over all the data and, if asked for, its gradient in ``.grad``."""
        updates.zero_grad()
        value = 0.0
        with torch.set_grad_enabled(gradient):
            for start in range(0, len(X), batch):
                xs, ys = X[start : start + batch], y[start : start + batch]
                part = objective(model(xs), ys) * (len(xs) / len(X))
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
    devices: list[Any] = sorted({p.device.index for p in parameters if p.device.type == "cuda"})
    described: dict[str, Any] = {}
    if run is not None:
        described = _settings(loss, updates, schedule, total, batch)
        described |= {"data": tensor_mark(X, y), "generator": tensor_mark(generator.get_state())}
    training = Training(
        model, updates, scheduler, generator, devices, described, torch.arange(len(X)), losses=history.loss
    )
    with ExitStack() as stack:
        if run is None or isinstance(run, Run):
            own_run = run
        else:
            own_run = stack.enter_context(_run_in(run, described | {"steps": total, "start": model_mark(model)}))
        stack.enter_context(_own_randomness(generator, devices))
        advance = stack.enter_context(progress_bar(total, "training", progress))
        stored = None if own_run is None else own_run.checkpoint()
        if stored is not None:
            training.load(stored[1])
            history.loss = training.losses
            if len(history.loss) > total:
                raise InputError(f"the run has made {len(history.loss)} updates already, more than the {total} asked")
            history.step = list(range(len(history.loss)))
            advance(len(history.loss))
        saved = len(history.loss)
        for step in range(len(history.loss), total):
            if batch < len(X):
                if step % per_epoch == 0:
                    training.order = torch.randperm(len(X), generator=generator)
                chosen = training.order[(step % per_epoch) * batch :][:batch].to(X.device)
                xs, ys = X[chosen], y[chosen.to(y.device)]
            else:
                xs, ys = X, y
            updates.zero_grad()
            loss_now = objective(model(xs), ys)
            value = float(loss_now.detach())
            _check_finite(value, step, updates)
            if own_run is not None:
                own_run.log(step, {"loss": value})
            if monitor is not None:
                monitor.step(step, loss=value)
            if callback is not None:
                callback(step, value)
            loss_now.backward()  # type: ignore[no-untyped-call]
            if batch == len(X) and (reason := stop_reason(value)):
                history.step.append(step)
                history.loss.append(value)
                history.stopped = reason
                break
            updates.step()
            if scheduler is not None:
                scheduler.step()
            history.step.append(step)
            history.loss.append(value)
            advance()
            rules = stop_loss is not None or stop_relgrad is not None
            if batch < len(X) and rules and (step + 1) % per_epoch == 0:
                value = whole(gradient=stop_relgrad is not None)
                _check_finite(value, step + 1, updates)
                if reason := stop_reason(value):
                    history.stopped = reason
                    break
            if own_run is not None and checkpoint_every is not None and (step + 1) % checkpoint_every == 0:
                training.save(own_run)
                saved = step + 1
        done = len(history.loss)
        if own_run is not None and checkpoint_every is not None and history.stopped == "steps" and saved < done:
            training.save(own_run)
        history.final_loss = whole(gradient=stop_relgrad is not None)
        _check_finite(history.final_loss, len(history.step), updates)
        if stop_relgrad is not None:
            history.relgrad = relative_gradient(updates)
        updates.zero_grad()
        if own_run is not None:
            own_run.log(done, {"loss": history.final_loss})
        if monitor is not None:
            monitor.last(done, loss=history.final_loss)
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
        if count is not None and not _is_count(count):
            raise InputError(f"{name} must be a whole number, got {count!r}")
        if count is not None and count < 0:
            raise InputError(f"{name} must not be negative, got {count}")
    if batch_size is None:
        return n
    if batch_size < 1:
        raise InputError(f"batch_size must be at least 1, or None for the full batch, got {batch_size}")
    return min(batch_size, n)


def _check_finite(value: float, step: int, optimizer: Optimizer) -> None:
    if not math.isfinite(value):
        rates = ", ".join(f"{g['lr']:g}" for g in optimizer.param_groups)
        raise DivergenceError(
            f"the loss is {value} at step {step} with lr={rates}: lower the rate or the initial scale"
            if step
            else f"the loss is {value} before any update: look for NaN or infinite inputs, labels or weights"
        )


def _settings(
    loss: str | LossFunction, optimizer: Optimizer, schedule: str | ScheduleFactory | None, total: int, batch: int
) -> dict[str, Any]:
    """What a training is, in plain words and numbers: the same when it is taken up again."""
    groups = []
    for group in optimizer.param_groups:
        options = {k: v for k, v in group.items() if k not in ("params", "initial_lr") and _is_plain(v)}
        groups.append(options | ({"lr": group["initial_lr"]} if "initial_lr" in group else {}))
    return {
        "loss": _name(loss),
        "optimizer": type(optimizer).__name__,
        "options": groups[0] if len(groups) == 1 else groups,
        "schedule": None if schedule is None else f"{_name(schedule)} over {total} steps",
        "batch": batch,
    }


def _run_in(folder: str | os.PathLike[str], config: dict[str, Any]) -> Run:
    """Open the run of a folder that this training continues or repeats from its start, or make a new one."""
    old = run_to_continue(folder)
    if old is not None and (old.checkpoint_steps() or old.config == as_settings(config)):
        run = Run.open(folder, write=True)
        if not run.checkpoint_steps():
            run.repeat_from(0)  # the same training, which ended before its first checkpoint
        return run
    run, told = launch(folder, config)
    if told is not None:
        try:
            warnings.warn(told, UserWarning, stacklevel=3)
        except UserWarning:
            run.close()
            raise
    return run


def _name(of: Any) -> str:
    return of if isinstance(of, str) else str(getattr(of, "__qualname__", type(of).__name__))


def _is_count(value: Any) -> bool:
    return hasattr(value, "__index__") and not isinstance(value, bool | Tensor)


def _is_plain(value: Any) -> bool:
    return value is None or isinstance(value, bool | int | float | str)


@contextmanager
def _own_randomness(generator: torch.Generator, devices: list[Any]) -> Iterator[None]:
    """Let layers such as dropout, which know only the global generators, draw from ours."""
    seed = int(torch.randint(2**62, (), generator=generator))
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
