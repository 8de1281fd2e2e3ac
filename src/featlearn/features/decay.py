"""The lambda of FACT, read from a number, from globs, or from an optimiser."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import torch

from featlearn.errors import InputError
from featlearn.layers import Layer
from featlearn.numerics.globs import pick_values

__all__ = ["WeightDecay", "decay_of_layers"]

# By name: torch got some of them after the oldest version that is supported.
_DECOUPLED = {"AdamW", "Adafactor", "Muon"}

WeightDecay = float | Mapping[str, float] | torch.optim.Optimizer


def decay_of_layers(weight_decay: WeightDecay | None, layers: Sequence[Layer]) -> dict[str, float]:
    """Lambda of each layer that has a positive one.

    Args:
        weight_decay: A number for all layers; ``{glob: number}``, where the first glob that matches a layer's
            name decides; or the optimiser that trained the model.
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
        if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value) or value < 0:
            raise InputError(f"weight_decay of layer {name!r} must be a number of at least 0, got {value!r}")
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
            found[layer.name] = own[0]  # a parametrised weight: the decay of its factors
    if not found:
        raise InputError(
            "the optimiser given as weight_decay holds no weight of this model: pass the one that trained it, "
            "or a number"
        )
    return found
