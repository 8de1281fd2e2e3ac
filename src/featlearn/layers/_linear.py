"""Linear layers: ``nn.Linear`` with any leading shape, and transformers' transposed ``Conv1D``."""

from __future__ import annotations

from torch import Tensor, nn

from featlearn.layers.base import Layer


def token_rows(t: Tensor) -> Tensor:
    """``(samples, ..., k)`` as ``(samples, positions, 1, k)``; a lone vector is one sample."""
    if t.ndim == 1:
        t = t.unsqueeze(0)
    return t.reshape(t.shape[0], -1, 1, t.shape[-1])


def linear_layers(name: str, module: nn.Module) -> list[Layer]:
    """The matrix of an ``nn.Linear``, ``weight`` (k_out, k_in)."""
    assert isinstance(module, nn.Linear)
    return [
        Layer(
            name=name,
            kind="linear",
            module=module,
            part=None,
            parameter="weight",
            groups=1,
            k_out=module.out_features,
            k_in=module.in_features,
            weight=lambda: module.weight,
            matrix=lambda w: w.unsqueeze(0),
            outputs=token_rows,
            inputs=token_rows,
            bias=None if module.bias is None else "bias",
            vector=lambda b: b.unsqueeze(0),
        )
    ]


def transposed_layers(name: str, module: nn.Module) -> list[Layer]:
    """The matrix of transformers' ``Conv1D``, which stores its weight as (k_in, k_out)."""
    weight: Tensor = module.weight  # type: ignore[assignment]  # nn.Module types attributes as Tensor | Module
    return [
        Layer(
            name=name,
            kind="linear (transposed)",
            module=module,
            part=None,
            parameter="weight",
            groups=1,
            k_out=weight.shape[1],
            k_in=weight.shape[0],
            weight=lambda: module.weight,  # type: ignore[arg-type,return-value]
            matrix=lambda w: w.mT.unsqueeze(0),
            outputs=token_rows,
            inputs=token_rows,
            bias="bias",
            vector=lambda b: b.unsqueeze(0),
        )
    ]
