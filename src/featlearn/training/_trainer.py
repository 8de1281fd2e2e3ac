"""Minimal deterministic training loop with checkpoints.

References:
    Boix-Adsera, Mallinar, Simon & Belkin (2025), https://arxiv.org/abs/2507.05644 (FACT).
"""

from __future__ import annotations

import math
import os
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from featlearn._utils.progress import progress_bar
from featlearn._utils.rng import Seed, as_generator
from featlearn._utils.validation import as_settings, check_int
from featlearn.errors import DivergenceError, InputError
from featlearn.runs import Run
from featlearn.runs.launch import launch, run_to_continue
from featlearn.runs.lock import warn_or_close
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

    The model is trained in its current mode (a new module is in training mode). Shuffling, dropout and all other random
    numbers come from ``generator``; the global generators are restored.

    Args:
        model: Any module for which ``model(X)`` is a tensor.
        data: Inputs and targets ``(X, y)``.
        loss: "mse" is nn.MSELoss, the mean over samples *and* outputs without a half; "half_mse" is half of it;
            "cross_entropy" is nn.CrossEntropyLoss; or a function ``(output, target) -> scalar``, a mean over samples.
        optimizer: "sgd" (or its synonym "gd"), "adam", "adagrad", "slo", or a factory ``parameters -> Optimizer``,
            which sets lr, momentum and weight decay itself.
        lr: Learning rate. Required unless ``optimizer`` is a factory.
        steps: Maximum number of updates. Pass either this or ``epochs``.
        epochs: Maximum number of passes over the data.
        batch_size: Number of samples per update; the last batch of an epoch may be smaller. None is full-batch gradient
            descent.
        momentum: Momentum of "sgd" and "slo".
        weight_decay: Coefficient lambda; the gradient of lambda/2 |theta|^2 is added to that of the loss, as in torch's
            optimizers.
        schedule: Schedule of the learning rate. None is constant, "cosine" decays to 0 over all steps; or a factory
            ``optimizer -> LRScheduler``, which is stepped after each update.
        stop_loss: Stop as soon as the loss is below this value. With batches, the loss over all the data is checked
            after each epoch. None does not stop.
        stop_relgrad: Stop as soon as `relative_gradient` is below this value, checked as often. None does not stop.
        generator: Generator or integer seed. None is the seed 0.
        callback: Function called as ``callback(step, loss)`` before each update.
        monitor: `featlearn.Monitor` that records each step before its update, and the trained model at the end.
        run: Run for losses and checkpoints: a `featlearn.runs.Run`, or a folder in which a run is created. A run with a
            checkpoint is resumed: a training that is killed at any instant and started again with the same arguments
            ends with the same bits (on the same threads and versions). Other arguments raise an error. If the folder
            holds a run of another training without a checkpoint, a new run is created in ``<folder>-2``, with a
            warning.
        checkpoint_every: Number of updates between checkpoints; one is written at the end too. None writes none.
        progress: Whether to show a progress bar on stderr, if that is a terminal.

    Returns:
        The losses and the reason why training stopped.

    Raises:
        InputError: If arguments contradict each other or do not match the data.
        DivergenceError: If the loss becomes infinite or NaN.

    Example:
        >>> import torch
        >>> X, y = torch.eye(4), torch.ones(4, 1)
        >>> model = torch.nn.Linear(4, 1, bias=False)
        >>> history = fit(model, (X, y), lr=1.0, steps=200, stop_loss=1e-6, generator=0)
        >>> history.stopped
        'loss'
    """
    X, y = _check_data(data)
    batch = _check_length(len(X), steps, epochs, batch_size)
    objective = loss_function(loss)
    parameters = [p for p in model.parameters() if p.requires_grad]
    if not parameters:
        raise InputError("model must have a parameter that requires a gradient: there is nothing to train.")
    if checkpoint_every is not None:
        check_int("checkpoint_every", checkpoint_every, optional=True)
        if run is None:
            raise InputError(f"checkpoint_every={checkpoint_every} requires run. Pass a folder as run=.")
    updates = make_optimizer(optimizer, parameters, lr, momentum, weight_decay)
    if stop_relgrad is not None:
        check_decay(updates)
    per_epoch = math.ceil(len(X) / batch)
    total = steps if steps is not None else (epochs or 0) * per_epoch
    scheduler = make_schedule(schedule, updates, total)
    generator = as_generator(generator, "fit")

    def whole_loss(step: int) -> float:
        """Return the loss over all the data, or raise; add its gradient to ``.grad`` if a stopping rule needs it."""
        updates.zero_grad()
        value = 0.0
        with torch.set_grad_enabled(stop_relgrad is not None):
            for start in range(0, len(X), batch):
                xs, ys = X[start : start + batch], y[start : start + batch]
                part = objective(model(xs), ys) * (len(xs) / len(X))
                if stop_relgrad is not None:
                    part.backward()  # type: ignore[no-untyped-call]
                value += float(part.detach())
        _check_finite(value, step, updates)
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
            log = run
        else:
            log = stack.enter_context(_open_run(run, described | {"steps": total, "start": model_mark(model)}))
        stack.enter_context(_global_rng(generator, devices))
        advance = stack.enter_context(progress_bar(total, "training", progress))
        stored = None if log is None else log.checkpoint()
        if stored is not None:
            training.load(stored[1])
            history.loss = training.losses
            if len(history.loss) > total:
                raise InputError(f"steps must be at least the {len(history.loss)} updates of the run, got {total}.")
            advance(len(history.loss))
        saved = len(history.loss)
        for step in range(saved, total):
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
            if log is not None:
                log.log(step, {"loss": value})
            if monitor is not None:
                monitor.step(step, loss=value)
            if callback is not None:
                callback(step, value)
            loss_now.backward()  # type: ignore[no-untyped-call]
            history.loss.append(value)
            if batch == len(X) and (reason := stop_reason(value)):
                history.stopped = reason
                break
            updates.step()
            if scheduler is not None:
                scheduler.step()
            advance()
            checked = (stop_loss is not None or stop_relgrad is not None) and (step + 1) % per_epoch == 0
            if batch < len(X) and checked and (reason := stop_reason(whole_loss(step + 1))):
                history.stopped = reason
                break
            if log is not None and checkpoint_every is not None and (step + 1) % checkpoint_every == 0:
                training.save(log)
                saved = step + 1
        done = len(history.loss)
        history.step = list(range(done))
        if log is not None and checkpoint_every is not None and history.stopped == "steps" and saved < done:
            training.save(log)
        history.final_loss = whole_loss(done)
        if stop_relgrad is not None:
            history.relgrad = relative_gradient(updates)
        updates.zero_grad()
        if log is not None:
            log.log(done, {"loss": history.final_loss})
        if monitor is not None:
            monitor.last(done, loss=history.final_loss)
    history.seconds = time.perf_counter() - began
    return history


def relative_gradient(optimizer: Optimizer) -> float:
    """Compute the relative distance from a critical point, ``|grad(L + lambda/2 |theta|^2)| / (lambda |theta|)``.

    The norms run over the weight matrices (parameters of two or more dimensions) that have a gradient of L in
    ``.grad``. The ratio is 1 if the gradient of the loss is zero. It is 0 at a critical point, where
    ``lambda W = -dL/dW`` and FACT equals ``W^T W``.

    Args:
        optimizer: Optimizer with the parameters and their weight decay, lambda.

    Returns:
        The ratio; NaN if the weight decay or the weights are zero.

    Example:
        >>> import torch
        >>> from featlearn.training import relative_gradient
        >>> W = torch.nn.Parameter(torch.tensor([[3.0, 4.0]]))
        >>> optimizer = torch.optim.SGD([W], lr=0.1, weight_decay=0.5)
        >>> W.grad = torch.zeros(1, 2)
        >>> relative_gradient(optimizer)
        1.0
        >>> W.grad = -0.5 * W.detach()  # a critical point: dL/dW = -lambda W
        >>> relative_gradient(optimizer)
        0.0

    References:
        Boix-Adsera, Mallinar, Simon & Belkin (2025), https://arxiv.org/abs/2507.05644, theorem 3.1.
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
        raise InputError(f"data must be a tuple (X, y) of two tensors, got {type(data).__name__}.")
    X, y = data
    if X.ndim == 0 or y.ndim == 0 or len(X) != len(y) or len(X) == 0:
        raise InputError(
            f"X and y must have the same number of samples, at least 1, got {tuple(X.shape)} and {tuple(y.shape)}."
        )
    return X, y


def _check_length(n: int, steps: int | None, epochs: int | None, batch_size: int | None) -> int:
    """Check the number of updates and return the number of samples in one."""
    if (steps is None) == (epochs is None):
        raise InputError(f"Pass either steps or epochs, got steps={steps} and epochs={epochs}.")
    for name, count in (("steps", steps), ("epochs", epochs)):
        if count is not None:
            check_int(name, count, 0)
    if batch_size is None:
        return n
    if batch_size < 1:
        raise InputError(f"batch_size must be at least 1, or None for the full batch, got {batch_size}.")
    return min(batch_size, n)


def _check_finite(value: float, step: int, optimizer: Optimizer) -> None:
    if not math.isfinite(value):
        rates = ", ".join(f"{g['lr']:g}" for g in optimizer.param_groups)
        raise DivergenceError(
            f"The loss is {value} at step {step} with lr={rates}. Reduce the learning rate or the initial scale."
            if step
            else f"The loss is {value} before any update. Check inputs, labels and weights for NaN and infinity."
        )


def _settings(
    loss: str | LossFunction, optimizer: Optimizer, schedule: str | ScheduleFactory | None, total: int, batch: int
) -> dict[str, Any]:
    """Return the settings of a training as JSON types; they must be the same when it is resumed."""
    groups = []
    for group in optimizer.param_groups:
        plain = {k: v for k, v in group.items() if v is None or isinstance(v, bool | int | float | str)}
        initial = {"lr": group["initial_lr"]} if "initial_lr" in group else {}
        groups.append({k: v for k, v in (plain | initial).items() if k != "initial_lr"})
    return {
        "loss": _name(loss),
        "optimizer": type(optimizer).__name__,
        "options": groups[0] if len(groups) == 1 else groups,
        "schedule": None if schedule is None else f"{_name(schedule)} over {total} steps",
        "batch": batch,
    }


def _open_run(folder: str | os.PathLike[str], config: dict[str, Any]) -> Run:
    """Open the run of a folder that this training continues or repeats from its start, or create a new one."""
    old = run_to_continue(folder)
    if old is not None and (old.checkpoint_steps() or old.config == as_settings(config)):
        run = Run.open(folder, write=True)
        if not run.checkpoint_steps():
            run.repeat_from(0)  # the same training, which ended before its first checkpoint
        return run
    run, message = launch(folder, config)
    if message is not None:
        warn_or_close(run, message, stacklevel=4)
    return run


def _name(of: Any) -> str:
    return of if isinstance(of, str) else str(getattr(of, "__qualname__", type(of).__name__))


@contextmanager
def _global_rng(generator: torch.Generator, devices: list[Any]) -> Iterator[None]:
    """Set the global generators, which layers such as dropout use, from a generator, and restore them at the end."""
    seed = int(torch.randint(2**62, (), generator=generator))
    with torch.random.fork_rng(devices=devices):
        # Unlike torch.manual_seed, which would reseed devices that are not restored afterwards.
        torch.default_generator.manual_seed(seed)
        for device in devices:
            with torch.cuda.device(device):
                torch.cuda.manual_seed(seed)
        yield


@dataclass
class History:
    """Losses and result of `fit`.

    Attributes:
        step: Numbers of the updates, from 0.
        loss: Loss before each update, over its batch.
        final_loss: Loss of the trained model over all the data, in the current mode of the model.
        relgrad: `relative_gradient` of the trained model if ``stop_relgrad`` was given, else NaN.
        stopped: "steps" if all updates were made, else the stopping rule that ended training, "loss" or "relgrad".
        seconds: Training time in seconds.
    """

    step: list[int] = field(default_factory=list)
    loss: list[float] = field(default_factory=list)
    final_loss: float = math.nan
    relgrad: float = math.nan
    stopped: Literal["steps", "loss", "relgrad"] = "steps"
    seconds: float = 0.0
