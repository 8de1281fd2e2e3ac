"""Loss and weight decay of the training objective: read lambda per layer, and sum the loss over samples."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from featlearn._utils.patterns import pick_values
from featlearn._utils.validation import check_number
from featlearn.errors import InputError
from featlearn.layers import Layer

# By name: torch got some of them after the oldest version that is supported.
_DECOUPLED = {"AdamW", "Adafactor", "Muon"}

WeightDecay = float | Mapping[str, float] | torch.optim.Optimizer


def decay_of_layers(weight_decay: WeightDecay | None, layers: Sequence[Layer]) -> dict[str, float]:
    """Lambda of each layer that has a positive one.

    Args:
        weight_decay: A number for all layers; ``{glob: number}``, where the first glob that matches a layer's
            name decides; or the optimizer that trained the model.
        layers: The layers of the model.
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
            "FACT divides by the weight decay, which is 0 for every layer: pass the weight_decay the model was "
            "trained with, or leave weight_decay out"
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
                "satisfy FACT: pass weight_decay as a number to compute it all the same"
            )
        of_parameter |= {id(p): float(decay) for p in group["params"]}
    found = {}
    for layer in layers:
        own = [of_parameter[id(p)] for p in layer.module.parameters() if id(p) in of_parameter and p.ndim >= 2]
        weight = dict(layer.module.named_parameters()).get(layer.parameter)
        if weight is not None and id(weight) in of_parameter:
            found[layer.name] = of_parameter[id(weight)]
        elif weight is None and own:
            found[layer.name] = own[0]  # a parametrized weight: the decay of its factors
    if not found:
        raise InputError(
            "the optimizer given as weight_decay holds no weight of this model: pass the one that trained it, "
            "or a number"
        )
    return found


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
