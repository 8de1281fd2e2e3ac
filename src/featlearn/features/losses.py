"""The user's loss, whichever way it is reduced."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from featlearn.errors import InputError

__all__ = ["Loss", "summed_loss"]

Loss = Callable[[Tensor, Any], Tensor]


def summed_loss(loss: Loss, output: Tensor, target: Any, n: int, reduction: str) -> Tensor:
    """The sum of the per-sample losses of a batch, whichever way the user's function reduces them."""
    if target is None:
        raise InputError(
            'loss= needs a target for every batch: give data as (inputs, target), or as a dict with "labels"'
        )
    value = loss(output, target)
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
    if not total.requires_grad:
        raise InputError("the loss does not depend on the output in a differentiable way")
    return total
