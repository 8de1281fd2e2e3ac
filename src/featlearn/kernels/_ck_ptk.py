"""Kernels of one layer: of its inputs (conjugate kernel), and of its output gradients (pre-activation tangent kernel).

References:
    Wang, Engel, Sarwate, Dumitriu & Chiang (2022), https://arxiv.org/abs/2211.06506, eq. 4.
    Beaglehole, Mitliagkas & Agarwala, "Feature learning as alignment", https://openreview.net/forum?id=JXCe2ZcUXr.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

from featlearn._utils.memory import check_fits
from featlearn.capture import Forward, ModelSession, Trace, batches, shared_layers, sliceable
from featlearn.errors import InputError, UnsupportedModelError
from featlearn.kernels._layer_features import Features, add_features, as_rows, input_rows, products_of
from featlearn.kernels._ntk import check_outputs, most_rows
from featlearn.kernels.random_vectors import unit_vectors
from featlearn.layers import Layer, find_layers, unwrap


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
    """Compute the conjugate kernel ``K_ab = x_a . x_b`` of the inputs of a layer.

    The conjugate kernel of the last linear layer is the kernel of training that layer only. The kernel is not divided
    by the width: an NTK-parametrized network includes the factor 1/sqrt(h). Time: a forward pass and ``n m k``
    products, memory ``(n + m) k``, for k inputs of the layer per sample.

    Args:
        model: Module to measure.
        X: Inputs: tensor, array, dict of keyword arguments, or batches of these.
        Z: Other inputs, for the kernel of X against Z. None is X against itself.
        layer: Name of the layer. None takes the last linear layer.
        forward: Function ``forward(model, batch)`` that returns the output, samples first. None calls the model on the
            inputs of the batch.
        train_mode: ``"error"`` refuses BatchNorm or dropout in training mode; ``"eval"`` switches the model to
            evaluation mode and restores it.
        batch_size: Number of rows per batch, for inputs given as tensors.
        device: Device to measure on. A device other than the model's measures a copy. None is the model's.
        dtype: Precision to measure in. A dtype other than the model's measures a copy. None is the model's.

    Returns:
        Kernel of shape (n, m) in float64.

    Raises:
        InputError: The layer does not exist or is not called, or its rows are not samples.

    Example:
        >>> import torch, featlearn as fl
        >>> fl.ck(torch.nn.Sequential(torch.nn.Linear(2, 1)), torch.eye(2)).tolist()
        [[1.0, 0.0], [0.0, 1.0]]
    """
    subject = _subject(model, layer, forward=forward, train_mode=train_mode, device=device, dtype=dtype)
    (kernel,) = _kernels(subject, X, Z, input_rows, batch_size, inputs=True).values()
    return kernel


def ck_by_layer(
    model: nn.Module,
    X: Any,
    Z: Any = None,
    *,
    layers: str | Iterable[str] | None = None,
    forward: Forward | None = None,
    train_mode: str = "error",
    batch_size: int = 512,
    device: torch.device | str | None = None,
    dtype: torch.dtype | None = None,
) -> dict[str, Tensor]:
    """Compute the conjugate kernel `ck` of the inputs of every layer, from one pass over the data.

    Layers that the forward pass does not call, or whose rows are not samples, are left out. Time: a forward pass and
    ``n m k`` products per layer; memory ``(n + m) k``, for k inputs of all layers per sample.

    Args:
        model: Module to measure.
        X: Inputs, as in `ck`.
        Z: Other inputs, for the kernels of X against Z. None is X against itself.
        layers: Glob pattern of layer names, or several. None takes all layers.
        forward: Function ``forward(model, batch)`` that returns the output, samples first. None calls the model on the
            inputs of the batch.
        train_mode: ``"error"`` refuses BatchNorm or dropout in training mode; ``"eval"`` switches the model to
            evaluation mode and restores it.
        batch_size: Number of rows per batch, for inputs given as tensors.
        device: Device to measure on. A device other than the model's measures a copy. None is the model's.
        dtype: Precision to measure in. A dtype other than the model's measures a copy. None is the model's.

    Returns:
        Kernels of shape (n, m) in float64, by layer name.

    Example:
        >>> import torch
        >>> from featlearn.kernels import ck_by_layer
        >>> model = torch.nn.Sequential(torch.nn.Linear(2, 3), torch.nn.ReLU(), torch.nn.Linear(3, 1))
        >>> kernels = ck_by_layer(model, torch.tensor([[1.0, 2.0], [3.0, 0.0]]))
        >>> list(kernels)
        ['0', '2']
        >>> kernels["0"].tolist()
        [[5.0, 3.0], [3.0, 9.0]]
    """
    subject = ModelSession(model, layers=layers, forward=forward, train_mode=train_mode, device=device, dtype=dtype)
    return _kernels(subject, X, Z, input_rows, batch_size, inputs=True, strict=False)


def ptk(
    model: nn.Module,
    X: Any,
    Z: Any = None,
    *,
    layer: str,
    outputs: str | int = "trace",
    forward: Forward | None = None,
    train_mode: str = "error",
    batch_size: int = 512,
    device: torch.device | str | None = None,
    dtype: torch.dtype | None = None,
) -> Tensor:
    """Compute the pre-activation tangent kernel ``P_ab = J_a . J_b`` of a layer, with ``J = df/dh``.

    The product is summed over the positions of the layer, and over outputs unless they are kept apart. Time: one
    backward pass per output and ``c n m k`` products, or ``c^2 n m k``; memory ``(n + m) c k``.

    Args:
        model: Module to measure.
        X: Inputs, as in `ck`.
        Z: Other inputs, for the kernel of X against Z. None is X against itself.
        layer: Name of the layer.
        outputs: ``"trace"`` sums over outputs, ``"full"`` keeps them apart, an integer selects that output.
        forward: Function ``forward(model, batch)`` that returns the output, samples first. None calls the model on the
            inputs of the batch.
        train_mode: ``"error"`` refuses BatchNorm or dropout in training mode; ``"eval"`` switches the model to
            evaluation mode and restores it.
        batch_size: Number of rows per batch, for inputs given as tensors.
        device: Device to measure on. A device other than the model's measures a copy. None is the model's.
        dtype: Precision to measure in. A dtype other than the model's measures a copy. None is the model's.

    Returns:
        Kernel of shape (n, m), or (n, m, c, c) with all outputs, in float64.

    Raises:
        InputError: The layer does not exist or is not called, or its rows are not samples.
        UnsupportedModelError: Samples share rows of the layer, and the model does not accept single samples.

    Example:
        >>> import torch, featlearn as fl
        >>> first, last = torch.nn.Linear(2, 2, bias=False), torch.nn.Linear(2, 1)
        >>> _ = first.weight.data.copy_(torch.eye(2)), last.weight.data.fill_(2.0)
        >>> model = torch.nn.Sequential(first, torch.nn.ReLU(), last)
        >>> fl.ptk(model, torch.tensor([[1.0, 1.0], [1.0, -1.0]]), layer="0").tolist()  # two active units, then one
        [[8.0, 4.0], [4.0, 4.0]]
    """
    check_outputs(outputs)
    count = 0

    def features(trace: Trace, chosen: Layer) -> Iterator[Tensor]:
        nonlocal count
        n = trace.output.shape[0]
        if not count and outputs == "full":
            _check_all_outputs(X, Z, trace.output[0].numel())
        count = trace.output[0].numel()
        for v in unit_vectors(trace.output, outputs):
            if chosen.name in trace.shared:
                if not trace.alone:
                    raise UnsupportedModelError(
                        f"samples share rows of layer {chosen.name!r}, and the model does not accept single samples, "
                        "so its pre-activation tangent kernel is not defined."
                    )
                # Gradients of each sample at all rows of the layer.
                samples = trace.gradients_by_sample(v)
                yield torch.stack([torch.cat([j.flatten() for j in rows[chosen.name]]) for rows in samples])
                continue
            rows = trace.gradients(trace.output, v)[chosen.name]
            width = sum(layer_call.shape.numel() for layer_call in trace.calls[chosen.name]) // n
            yield torch.cat([as_rows(j) for j in rows], dim=1) if rows else trace.output.new_zeros(n, width)

    subject = _subject(model, layer, forward=forward, train_mode=train_mode, device=device, dtype=dtype)
    (pair,) = _features_of_both(subject, X, Z, features, batch_size, inputs=False).values()
    if outputs != "full":
        return products_of(*pair)
    n, m = (len(rows) for rows in pair)
    apart = products_of(*(rows.reshape(len(rows) * count, -1) for rows in pair))
    return apart.reshape(n, count, m, count).transpose(1, 2)


def _check_all_outputs(X: Any, Z: Any, count: int) -> None:
    """Refuse a kernel with all outputs that does not fit into memory, before any output is differentiated."""
    n = most_rows(X, most=None)
    m = n if Z is None else most_rows(Z, most=None)
    what = f"a kernel of {n:,} x {m:,} samples and {count:,} x {count:,} outputs"
    check_fits(12.0 * n * m * count**2, what, "pass fewer samples")


def _subject(model: nn.Module, layer: str | None, **options: Any) -> ModelSession:
    """Open a session with one layer, by default the last linear one."""
    if layer is None and isinstance(model, nn.Module):
        linear = [x.name for x in find_layers(unwrap(model)) if x.kind.startswith("linear")]
        if not linear:
            raise InputError("the model has no linear layer. Pass the name of another layer as layer=.")
        layer = linear[-1]
    subject = ModelSession(model, layers=layer, **options)
    if len(subject.layers) > 1:
        raise InputError(f"layer must match one layer, but {layer!r} matches {len(subject.layers)} layers.")
    return subject


def _kernels(
    subject: ModelSession, X: Any, Z: Any, features: Features, batch_size: int, inputs: bool, strict: bool = True
) -> dict[str, Tensor]:
    """Compute the kernel of each layer; a layer without rows of samples is left out, or an error if strict."""
    both = _features_of_both(subject, X, Z, features, batch_size, inputs, strict)
    return {name: products_of(*pair) for name, pair in both.items()}


def _features_of_both(
    subject: ModelSession, X: Any, Z: Any, features: Features, batch_size: int, inputs: bool, strict: bool = True
) -> dict[str, tuple[Tensor, Tensor]]:
    """Return the features of X and of Z by layer."""
    n = most_rows(X, most=None)
    m = n if Z is None else most_rows(Z, most=None)
    check_fits(12.0 * n * m * len(subject.layers), f"kernels of {n:,} x {m:,} samples", "pass fewer samples")
    with subject.open(inputs=inputs):
        left = _stacked(subject, X, features, batch_size, inputs, strict)
        right = left if Z is None else _stacked(subject, Z, features, batch_size, inputs, strict)
    both = {name: (rows, right[name]) for name, rows in left.items() if name in right}
    for rows, others in both.values():
        if rows.shape[1] != others.shape[1]:
            raise InputError(f"X and Z must have features of one size, got {rows.shape[1]} and {others.shape[1]}.")
    return both


def _stacked(
    subject: ModelSession, data: Any, features: Features, batch_size: int, inputs: bool, strict: bool
) -> dict[str, Tensor]:
    """Return the features of all samples by layer, shape (n, k), with outputs side by side."""
    blocks: dict[str, list[Tensor]] = {}
    for raw in batches(data, batch_size if sliceable(data) else None):
        batch = subject.batch(raw)
        trace = subject.trace(batch)
        if not inputs:
            subject.separate(trace, batch, shared_layers(trace, seed=len(blocks)))
        add_features(blocks, trace, subject.layers, features, subject.unscaled if inputs else (), strict)
    return {name: torch.cat(rows) for name, rows in blocks.items()}
