"""Low-rank adapters (LoRA and DoRA of peft): the merged weight ``W + B A`` as one layer."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from featlearn.layers._linear_conv import token_rows
from featlearn.layers.base import Layer


def is_adapter(module: nn.Module) -> bool:
    """Return whether a module adds active low-rank adapters to a linear layer, in the way of peft."""
    needed = ("base_layer", "lora_A", "lora_B", "get_delta_weight", "active_adapters")
    if not all(hasattr(module, name) for name in needed):
        return False
    base: Any = module.base_layer
    matrix = isinstance(base, nn.Linear) or type(base).__name__ == "Conv1D"
    idle = getattr(module, "merged", False) or getattr(module, "disable_adapters", False)
    return matrix and not idle and bool(_active(module))


def adapter_layers(name: str, module: nn.Module) -> list[Layer]:
    """Return the layer of the merged weight, whose pre-activations are the output of the whole module."""
    base: Any = module.base_layer
    # The weight of a Conv1D of transformers is (k_in, k_out).
    transposed = not isinstance(base, nn.Linear)
    k_out, k_in = reversed(base.weight.shape) if transposed else base.weight.shape
    names, parts = _active(module), (module.lora_A, module.lora_B, getattr(module, "lora_magnitude_vector", {}))
    leaves = [base.weight]
    for adapter in names:
        for part in parts:
            if adapter in part:  # type: ignore[operator]
                leaves += [p for p in part[adapter].parameters() if p.ndim > 0]  # type: ignore[index,union-attr]
    return [
        Layer(
            name=name,
            kind="adapted linear",
            module=module,
            part=None,
            parameter="base_layer.weight",
            groups=1,
            k_out=k_out,
            k_in=k_in,
            weight=lambda: _merged(module, transposed),
            matrix=lambda w: w.unsqueeze(0),
            outputs=token_rows,
            inputs=token_rows,
            note=f"merged weight of {' and '.join(names)}",
            input_gradients=True,
            leaves=tuple(leaves),
        )
    ]


def _active(module: Any) -> list[str]:
    return [name for name in module.active_adapters if name in module.lora_A]


def _merged(module: Any, transposed: bool) -> Tensor:
    """Return the weight that the base layer and its adapters apply together, shape (k_out, k_in)."""
    weight: Tensor = module.base_layer.weight
    weight = weight.mT if transposed else weight
    total = weight
    for name in _active(module):
        change: Tensor = module.get_delta_weight(name)
        change = change.mT if transposed else change
        magnitudes = getattr(module, "lora_magnitude_vector", {})
        if name in magnitudes:  # DoRA: rows of given norms
            norms = torch.linalg.vector_norm(weight + change, dim=1, keepdim=True)
            magnitude = magnitudes[name].weight.reshape(-1, 1)
            change = magnitude / norms * (weight + change) - weight
        total = total + change
    return total
