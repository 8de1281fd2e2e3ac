"""The user's loss, whichever way it is reduced."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from featlearn.errors import InputError

__all__ = ["Loss", "check_loss", "summed_loss"]

Loss = Callable[[Tensor, Any], Tensor]


def summed_loss(loss: Loss, output: Tensor, target: Any, n: int, reduction: str) -> Tensor:
    """The sum of the per-sample losses of a batch, whichever way the user's function reduces them."""
    if target is None:
        raise InputError(
            'loss= needs a target for every batch: give data as (inputs, target), or as a dict with "labels"'
        )
    value = _called(loss, output, target)
    if not isinstance(value, Tensor):
        raise InputError(f"loss must return a tensor, got {type(value).__name__}")
    if value.shape == (n,):
        total = value.sum()
    elif value.ndim == 0:
        total = value * n if reduction == "mean" else value
    else:
        raise InputError(
            f"loss must return one value per sample, shape ({n},), or a scalar (reduced as loss_reduction says), "
            f"got shape {tuple(value.shape)}: average or sum over the other dimensions"
        )
    if not torch.isfinite(total):
        raise InputError("the loss is NaN or infinite on this batch")
    if value.ndim == 0:
        _check_separable(loss, output, target, value, n, reduction)
    if not total.requires_grad:
        raise InputError("the loss does not depend on the output in a differentiable way")
    return total


def check_loss(loss: Any) -> None:
    """Refuse what is no function of output and target."""
    if isinstance(loss, type):
        raise InputError(f"loss is the class {loss.__name__}: pass an instance, {loss.__name__}()")
    if loss is not None and not callable(loss):
        raise InputError(f"loss must be a function, got {loss!r}")


def _called(loss: Loss, output: Tensor, target: Any) -> Tensor:
    try:
        return loss(output, target)
    except Exception as error:
        shape = tuple(target.shape) if isinstance(target, Tensor) else type(target).__name__
        error.add_note(f"raised by loss= on an output of shape {tuple(output.shape)} and a target of {shape}")
        raise


def _check_separable(loss: Loss, output: Tensor, target: Any, value: Tensor, n: int, reduction: str) -> None:
    """Refuse a scalar loss that is no mean (or sum) over samples, by its values on two parts of the batch.

    Class weights, ignored labels, pairs of samples or a broadcast make the parts not add up; the gradients would
    then depend on how the data is cut into batches.
    """
    if n < 2 or not isinstance(target, Tensor) or target.ndim == 0 or target.shape[0] != n:
        return
    # Tight, for an untrained model's losses are nearly equal, and weights then change their mean by little.
    tolerance = max(1e-9, 100 * torch.finfo(value.dtype).eps)
    whole = float(value.detach())
    for cut in {1, (n + 2) // 3} - {n}:  # two cuts, because one may share out what is ignored evenly
        parts = _values_of_parts(loss, output, target, (slice(0, cut), slice(cut, n)))
        if parts is None:
            continue  # the loss takes no batch of this size
        weights = (cut / n, 1 - cut / n) if reduction == "mean" else (1.0, 1.0)
        joined = sum(part * weight for part, weight in zip(parts, weights, strict=True))
        if abs(joined - whole) <= tolerance * max(abs(whole), *map(abs, parts)):
            continue
        raise InputError(
            f"the loss is not a {reduction} over samples: {whole:.6g} on a batch, {joined:.6g} from two parts of it "
            f"(class weights, ignored labels, or an output {tuple(output.shape)} broadcast with a target "
            f"{tuple(target.shape)}?); return one value per sample instead"
        )


def _values_of_parts(loss: Loss, output: Tensor, target: Tensor, parts: tuple[slice, ...]) -> list[float] | None:
    with torch.no_grad():
        try:
            return [float(loss(output[rows], target[rows].clone())) for rows in parts]
        except (RuntimeError, ValueError, TypeError, IndexError):
            return None
