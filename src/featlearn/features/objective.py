"""Loss and weight decay of the training objective: lambda per layer, and the loss summed over samples."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from featlearn._utils.patterns import pick_values
from featlearn._utils.validation import check_number
from featlearn.errors import InputError
from featlearn.layers import Layer

# Names of optimizers: the oldest supported version of torch lacks some of them.
_DECOUPLED = {"AdamW", "Adafactor", "Muon"}

WeightDecay = float | Mapping[str, float] | torch.optim.Optimizer


def decay_of_layers(weight_decay: WeightDecay | None, layers: Sequence[Layer]) -> dict[str, float]:
    """Return the weight decay lambda of each layer that has a positive one.

    Args:
        weight_decay: Number for all layers; ``{glob: number}``, where the first glob that matches the name of a layer
            counts; or the optimizer that trained the model. None for training without weight decay.
        layers: Layers of the model.

    Returns:
        Lambda by layer name.

    Raises:
        InputError: A value is negative or not finite, all are zero, or the optimizer decays outside the gradient.
    """
    if weight_decay is None:
        return {}
    if isinstance(weight_decay, torch.optim.Optimizer):
        decays = _from_optimizer(weight_decay, layers)
    elif isinstance(weight_decay, Mapping):
        decays = pick_values(weight_decay, [layer.name for layer in layers], "weight_decay", "layer")
    else:
        decays = {layer.name: weight_decay for layer in layers}
    for name, value in decays.items():
        check_number(f"weight_decay of layer {name!r}", value, 0)
    positive = {name: float(value) for name, value in decays.items() if value > 0}
    if not positive:
        raise InputError(
            "FACT divides by weight_decay, which is 0 for every layer. Pass the weight decay that the model was "
            "trained with, or leave weight_decay out."
        )
    return positive


def _from_optimizer(optimizer: torch.optim.Optimizer, layers: Sequence[Layer]) -> dict[str, float]:
    of_parameter: dict[int, float] = {}
    for group in optimizer.param_groups:
        decay = group.get("weight_decay", 0.0)
        decoupled = type(optimizer).__name__ in _DECOUPLED or group.get("decoupled_weight_decay", False)
        if decay and decoupled:
            raise InputError(
                f"{type(optimizer).__name__} decays weights outside the gradient, so its fixed points do not "
                "satisfy FACT. Pass weight_decay as a number to compute it anyway."
            )
        of_parameter |= {id(p): float(decay) for p in group["params"]}
    decays = {}
    for layer in layers:
        weight = dict(layer.module.named_parameters()).get(layer.parameter)
        # A parametrized weight has the decay of its factors.
        parts = [p for p in layer.module.parameters() if p.ndim >= 2] if weight is None else [weight]
        known = [of_parameter[id(p)] for p in parts if id(p) in of_parameter]
        if known:
            decays[layer.name] = known[0]
    if not decays:
        raise InputError(
            "weight_decay must be the optimizer that trained the model, or a number, got an optimizer with no weight "
            "of this model."
        )
    return decays


Loss = Callable[[Tensor, Any], Tensor]


def summed_loss(loss: Loss, output: Tensor, target: Any, n: int, reduction: str) -> Tensor:
    """Return the sum of the per-sample losses of a batch.

    Args:
        loss: Function of output and target, which returns one value per sample, or a scalar.
        output: Output of the model, samples first.
        target: Target of the batch.
        n: Number of samples.
        reduction: Reduction of a scalar loss over samples, ``"mean"`` or ``"sum"``.

    Raises:
        InputError: The target is missing, or the loss is not a finite, differentiable sum or mean over samples.
    """
    if target is None:
        raise InputError(
            'loss= needs a target for every batch. Pass data as (inputs, target), or as a dict with "labels".'
        )
    # Copies, because a loss may write into its arguments.
    kept, labels = output.detach().clone(), target.clone() if isinstance(target, Tensor) else target
    try:
        value = loss(output, target)
    except Exception as error:
        shape = tuple(target.shape) if isinstance(target, Tensor) else type(target).__name__
        error.add_note(f"raised by loss= on an output of shape {tuple(output.shape)} and a target of {shape}")
        raise
    if not isinstance(value, Tensor):
        raise InputError(f"loss must return a tensor, got {type(value).__name__}.")
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
        raise InputError("the loss is NaN or infinite on this batch.")
    _check_separable(loss, kept, labels, value, n, reduction)
    if not total.requires_grad:
        raise InputError("loss must depend on the output in a differentiable way.")
    return total


def check_loss(loss: Any) -> None:
    """Raise an error unless a loss is None or a function of output and target.

    Args:
        loss: Argument to check.

    Raises:
        InputError: The loss is a class, or not callable.
    """
    if isinstance(loss, type):
        raise InputError(f"loss must be a function, got the class {loss.__name__}: pass an instance, {loss.__name__}()")
    if loss is not None and not callable(loss):
        raise InputError(f"loss must be a function, got {loss!r}.")


def _check_separable(loss: Loss, output: Tensor, target: Any, value: Tensor, n: int, reduction: str) -> None:
    """Refuse a loss that is not a mean (or sum) over samples, by its values on two parts of the batch.

    With class weights, ignored labels, pairs of samples or a broadcast the parts do not add up; the gradients would
    then depend on how the data is split into batches.
    """
    if n < 2 or not isinstance(target, Tensor) or target.ndim == 0 or target.shape[0] != n:
        return
    # The tolerance is small: the losses of an untrained model are nearly equal, and weights hardly change their mean.
    tolerance = max(1e-9, 100 * torch.finfo(value.dtype).eps)
    each = value.ndim > 0  # one value per sample
    reduction = "sum" if each else reduction
    whole = float(value.detach().sum())
    for cut in {1, (n + 2) // 3} - {n}:  # two cuts, because one may split ignored labels evenly
        parts = _values_of_parts(loss, output, target, (slice(0, cut), slice(cut, n)))
        if parts is None:
            continue  # the loss does not accept a batch of this size
        weights = (cut / n, 1 - cut / n) if reduction == "mean" else (1.0, 1.0)
        joined = sum(part * weight for part, weight in zip(parts, weights, strict=True))
        if abs(joined - whole) <= tolerance * max(abs(whole), *map(abs, parts)):
            continue
        if each:
            raise InputError(
                f"the losses of samples depend on each other: {whole:.6g} in sum on a batch, {joined:.6g} on two parts "
                "of it, so they have no gradients per sample. Return a loss of each sample alone, or leave loss= out."
            )
        raise InputError(
            f"the loss is not a {reduction} over samples: {whole:.6g} on a batch, {joined:.6g} from two parts of it "
            f"(class weights, ignored labels, or an output {tuple(output.shape)} broadcast with a target "
            f"{tuple(target.shape)}?). Return one value per sample instead."
        )


def _values_of_parts(loss: Loss, output: Tensor, target: Tensor, parts: tuple[slice, ...]) -> list[float] | None:
    with torch.no_grad():
        try:
            return [float(loss(output[rows].clone(), target[rows].clone()).sum()) for rows in parts]
        except (RuntimeError, ValueError, TypeError, IndexError):
            return None
