"""Kernels of one layer: of what goes into it (conjugate), and of the gradients that come back (tangent)."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

from featlearn._utils.memory import check_fits
from featlearn.capture import Forward, ModelSession, Trace, batches, shared_layers, sliceable
from featlearn.errors import InputError, UnsupportedModelError
from featlearn.features.measurement_plan import Outputs, cotangents
from featlearn.kernels._ntk import most_rows
from featlearn.layers import Layer, find_layers, unwrap

Features = Callable[[Trace, Layer], Iterator[Tensor]]


def ck(
    model: nn.Module,
    X: Any,
    Z: Any = None,
    layer: str | None = None,
    *,
    forward: Forward | None = None,
    train_mode: str = "error",
    batch_size: int = 512,
    device: torch.device | str | None = None,
    dtype: torch.dtype | None = None,
) -> Tensor:
    """Conjugate kernel ``K_ab = x_a . x_b`` of the inputs of a layer (spectral paper, equation 4).

    By default of the last linear layer, which is the kernel of training that layer alone. Nothing is divided by the
    width: an NTK-parameterized network carries its own 1/sqrt(h).

    Args:
        model: Any module.
        X: Inputs: a tensor, an array, a dict of keyword arguments, or batches of these.
        Z: Other inputs, for the kernel of X against Z; None is X against itself.
        layer: Name of a layer whose inputs are meant.
        forward: As in `featlearn.probe`.
        train_mode: As in `featlearn.probe`.
        batch_size: Rows at a time, for inputs given as tensors.
        device: As in `featlearn.probe`.
        dtype: As in `featlearn.probe`.

    Returns:
        (n, m) in float64.

    Time: a forward pass and ``n m k`` products; memory ``(n + m) k`` for k numbers that enter the layer a sample.
    """
    subject = _subject(model, layer, forward, train_mode, device, dtype)
    (kernel,) = _kernels(subject, X, Z, _inputs, batch_size, inputs=True).values()
    return kernel


def ck_by_layer(
    model: nn.Module,
    X: Any,
    *,
    layers: str | Iterable[str] | None = None,
    forward: Forward | None = None,
    train_mode: str = "error",
    batch_size: int = 512,
) -> dict[str, Tensor]:
    """The conjugate kernel `ck` of the inputs of every layer, from one pass over the data.

    Layers that the forward pass does not call, or whose rows are not samples, are left out.

    Args:
        model: Any module.
        X: Inputs, as in `ck`.
        layers: Globs of layer names; None takes all.
        forward: As in `featlearn.probe`.
        train_mode: As in `featlearn.probe`.
        batch_size: Rows at a time, for inputs given as tensors.

    Time: a forward pass and ``n^2 k`` products a layer; memory n k for the numbers that enter all layers a sample.
    """
    subject = ModelSession(model, layers=layers, forward=forward, train_mode=train_mode)
    return _kernels(subject, X, None, _inputs, batch_size, inputs=True, strict=False)


def _inputs(trace: Trace, chosen: Layer) -> Iterator[Tensor]:
    yield torch.cat([_rows(call.x) for call in trace.calls[chosen.name] if call.x is not None], dim=1)


def ptk(
    model: nn.Module,
    X: Any,
    Z: Any = None,
    *,
    layer: str,
    forward: Forward | None = None,
    train_mode: str = "error",
    batch_size: int = 512,
    device: torch.device | str | None = None,
    dtype: torch.dtype | None = None,
) -> Tensor:
    """Pre-activation tangent kernel ``P_ab = J_a . J_b`` of a layer (NFA paper, equation PTK).

    ``J = df/dh``, summed over outputs, and over positions where the layer runs at several.

    Args:
        model: Any module.
        X: Inputs, as in `ck`.
        Z: Other inputs, or None.
        layer: Name of the layer.
        forward: As in `featlearn.probe`.
        train_mode: As in `featlearn.probe`.
        batch_size: Rows at a time, for inputs given as tensors.
        device: As in `featlearn.probe`.
        dtype: As in `featlearn.probe`.

    Returns:
        (n, m) in float64.

    Time: one backward pass an output and ``c n m k`` products; memory ``(n + m) c k``.
    """

    def features(trace: Trace, chosen: Layer) -> Iterator[Tensor]:
        n = trace.output.shape[0]
        plan = Outputs(trace.output.numel() // n)
        # Every output by itself, so that no generator is asked.
        for _, v in cotangents(plan, trace.output, torch.Generator()):
            if chosen.name in trace.shared:
                if not trace.alone:
                    raise UnsupportedModelError(
                        f"layer {chosen.name!r} has rows that several samples of a batch share, and the model does not "
                        "take one sample by itself: a pre-activation tangent kernel is of samples apart"
                    )
                # Each sample's own gradient at all rows of the layer.
                samples = trace.gradients_by_sample(v)
                yield torch.stack([torch.cat([j.flatten() for j in one[chosen.name]]) for one in samples])
                continue
            rows = trace.gradients(trace.output, v)[chosen.name]
            width = sum(layer_call.shape.numel() for layer_call in trace.calls[chosen.name]) // n
            yield torch.cat([_rows(j) for j in rows], dim=1) if rows else trace.output.new_zeros(n, width)

    subject = _subject(model, layer, forward, train_mode, device, dtype)
    (kernel,) = _kernels(subject, X, Z, features, batch_size, inputs=False).values()
    return kernel


def _subject(
    model: nn.Module,
    layer: str | None,
    forward: Forward | None,
    train_mode: str,
    device: torch.device | str | None,
    dtype: torch.dtype | None,
) -> ModelSession:
    if layer is None and isinstance(model, nn.Module):
        linear = [found.name for found in find_layers(unwrap(model)) if found.kind.startswith("linear")]
        if not linear:
            raise InputError("the model has no linear layer to take the inputs of: name one with layer=")
        layer = linear[-1]
    subject = ModelSession(model, layers=layer, forward=forward, train_mode=train_mode, device=device, dtype=dtype)
    if len(subject.layers) > 1:
        raise InputError(f"layer={layer!r} matches {len(subject.layers)} layers: name one")
    return subject


def _kernels(
    subject: ModelSession, X: Any, Z: Any, features: Features, batch_size: int, inputs: bool, strict: bool = True
) -> dict[str, Tensor]:
    """The kernel of each layer; one that is not called, or not on samples, is an error, or left out if not strict."""
    n = most_rows(X, most=None)
    m = n if Z is None else most_rows(Z, most=None)
    check_fits(12.0 * n * m * len(subject.layers), f"kernels of {n:,} x {m:,} samples", "take fewer samples")
    with subject.open(inputs=inputs):
        left = _stacked(subject, X, features, batch_size, inputs, strict)
        right = left if Z is None else _stacked(subject, Z, features, batch_size, inputs, strict)
    kernels = {}
    for name, rows in left.items():
        if rows.shape[1] != right[name].shape[1]:
            raise InputError(f"X and Z give features of different sizes, {rows.shape[1]} and {right[name].shape[1]}")
        with torch.autocast(
            rows.device.type, enabled=False
        ):  # which would round the product, not only the forward pass
            kernels[name] = (rows @ right[name].mT).to(torch.float64)
    return kernels


def _stacked(
    subject: ModelSession, data: Any, features: Features, batch_size: int, inputs: bool, strict: bool
) -> dict[str, Tensor]:
    """The features of all samples for each layer, (n, k), outputs side by side."""
    blocks: dict[str, list[Tensor]] = {}
    for raw in batches(data, batch_size if sliceable(data) else None):
        batch = subject.batch(raw)
        trace = subject.trace(batch)
        n = trace.output.shape[0]
        if not inputs:
            subject.separate(trace, batch, shared_layers(trace, seed=len(blocks)))
        for layer in subject.layers:
            if layer.name not in trace.calls:
                if strict:
                    raise InputError(f"layer {layer.name!r} is not called in the forward pass, or with autograd off")
                continue
            counts = {call.shape[0] if call.shape else 1 for call in trace.calls[layer.name]}
            if layer.name not in trace.shared and (counts != {n} or (inputs and layer.name in subject.unscaled)):
                if not strict:
                    continue
                raise InputError(
                    f"layer {layer.name!r} has {max(counts)} rows for {n} samples, and they are not samples: these "
                    "must come first in it"
                )
            rows = torch.cat(list(features(trace, layer)), dim=1).detach()
            if not torch.isfinite(rows).all():
                raise InputError(f"the features of layer {layer.name!r} are NaN or infinite")
            blocks.setdefault(layer.name, []).append(rows if rows.dtype == torch.float64 else rows.to(torch.float32))
    return {name: torch.cat(rows) for name, rows in blocks.items()}


def _rows(x: Tensor) -> Tensor:
    return x.flatten(1) if x.ndim > 1 else x.unsqueeze(1)
