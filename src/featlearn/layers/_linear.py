"""Linear layers: ``nn.Linear`` with any leading shape, and the transposed ``Conv1D`` of transformers."""

from __future__ import annotations

from torch import Tensor, nn

from featlearn.layers.base import Layer, module_layer


def token_rows(t: Tensor) -> Tensor:
    """Reshape ``(samples, ..., k)`` to ``(samples, positions, 1, k)``.

    Args:
        t: Inputs or outputs of a linear layer; a vector is one sample.

    Returns:
        View, or copy, of shape ``(samples, positions, 1, k)``.
    """
    if t.ndim == 1:
        t = t.unsqueeze(0)
    return t.reshape(t.shape[0], -1, 1, t.shape[-1])


def linear_layers(name: str, module: nn.Module) -> list[Layer]:
    """Return the layer of an ``nn.Linear``, whose weight is (k_out, k_in)."""
    assert isinstance(module, nn.Linear)
    shape = (1, module.out_features, module.in_features)
    rows = {"outputs": token_rows, "inputs": token_rows}
    return [module_layer(name, "linear", module, shape, matrix=lambda w: w.unsqueeze(0), **rows)]


def transposed_layers(name: str, module: nn.Module) -> list[Layer]:
    """Return the layer of a ``Conv1D`` of transformers, whose weight is (k_in, k_out)."""
    k_in, k_out = module.weight.shape  # type: ignore[misc]
    rows = {"outputs": token_rows, "inputs": token_rows}
    kind = "linear (transposed)"
    return [module_layer(name, kind, module, (1, k_out, k_in), matrix=lambda w: w.mT.unsqueeze(0), **rows)]
