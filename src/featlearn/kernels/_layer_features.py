"""Features of samples in single layers, whose products are the kernels of the layer."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator

import torch
from torch import Tensor

from featlearn.capture import Trace
from featlearn.errors import InputError
from featlearn.layers import Layer

Features = Callable[[Trace, Layer], Iterator[Tensor]]
"""Function that yields the features of a traced batch in a layer, each of shape (n, k)."""


def input_rows(trace: Trace, chosen: Layer) -> Iterator[Tensor]:
    """Yield the inputs of a layer, shape (n, k)."""
    yield torch.cat([as_rows(call.x) for call in trace.calls[chosen.name] if call.x is not None], dim=1)


def add_features(
    blocks: dict[str, list[Tensor]],
    trace: Trace,
    layers: Iterable[Layer],
    features: Features,
    unscaled: Collection[str],
    strict: bool,
) -> None:
    """Add the features of a batch to those of the batches before.

    Args:
        blocks: Features of the batches by layer name, which are added to.
        trace: Trace of the batch.
        layers: Layers to take.
        features: Function that returns the features.
        unscaled: Names of the layers whose number of rows does not depend on the number of samples.
        strict: Whether a layer that is not called, or whose rows are not samples, is an error; it is left out
            otherwise.

    Raises:
        InputError: The features are not finite, or a layer has none and `strict` is True.
    """
    n = trace.output.shape[0]
    for layer in layers:
        if layer.name not in trace.calls:
            if strict:
                raise InputError(f"layer {layer.name!r} is not called in the forward pass, or with autograd off.")
            continue
        counts = {call.shape[0] if call.shape else 1 for call in trace.calls[layer.name]}
        if layer.name not in trace.shared and (counts != {n} or layer.name in unscaled):
            if not strict:
                continue
            raise InputError(
                f"layer {layer.name!r} has {max(counts)} rows for {n} samples; samples must be its first dimension."
            )
        rows = torch.cat(list(features(trace, layer)), dim=1).detach()
        if not torch.isfinite(rows).all():
            raise InputError(f"the features of layer {layer.name!r} must be finite, got NaN or infinite ones.")
        blocks.setdefault(layer.name, []).append(rows if rows.dtype == torch.float64 else rows.to(torch.float32))


def products_of(left: Tensor, right: Tensor) -> Tensor:
    """Return the products of all pairs of rows in float64, shape (n, m)."""
    with torch.autocast(left.device.type, enabled=False):  # it would round the product too
        return (left @ right.mT).to(torch.float64)


def as_rows(x: Tensor) -> Tensor:
    """Return a tensor with samples first as a matrix."""
    return x.flatten(1) if x.ndim > 1 else x.unsqueeze(1)
