"""Linear layers and convolutions."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from featlearn.layers.base import Layer, module_layer, stacked


def token_rows(t: Tensor) -> Tensor:
    """Reshape ``(samples, ..., k)`` to ``(samples, positions, 1, k)``.

    Args:
        t: Inputs or outputs of a linear layer; a vector is one sample.

    Returns:
        View, or copy, of shape ``(samples, positions, 1, k)``.
    """
    if t.ndim == 1:
        t = t.unsqueeze(0)
    return t.reshape(t.shape[0], math.prod(t.shape[1:-1]), 1, t.shape[-1])


def linear_layers(name: str, module: nn.Module) -> list[Layer]:
    """Return the layer of an ``nn.Linear``, whose weight is (k_out, k_in)."""
    assert isinstance(module, nn.Linear)
    shape = (1, module.out_features, module.in_features)
    rows = {"outputs": token_rows, "inputs": token_rows, "input_gradients": True}
    return [module_layer(name, "linear", module, shape, matrix=lambda w: w.unsqueeze(0), **rows)]


def transposed_layers(name: str, module: nn.Module) -> list[Layer]:
    """Return the layer of a ``Conv1D`` of transformers, whose weight is (k_in, k_out)."""
    k_in, k_out = module.weight.shape  # type: ignore[misc]
    rows = {"outputs": token_rows, "inputs": token_rows, "input_gradients": True}
    kind = "linear (transposed)"
    return [module_layer(name, kind, module, (1, k_out, k_in), matrix=lambda w: w.mT.unsqueeze(0), **rows)]


Conv = nn.Conv1d | nn.Conv2d | nn.Conv3d

_GROUPED_UP_TO = 256  # channels; a product with the patches is twice as fast above, up to three times slower below
# For matrices of few numbers, convolutions of fewer channels, one after the other, are yet two to three times as fast.
_CHANNELS, _SMALL = 128, 2**15


def conv_layers(name: str, module: nn.Module) -> list[Layer]:
    """Return the layer of an ``nn.Conv1d``, ``nn.Conv2d`` or ``nn.Conv3d``, with a block-diagonal matrix."""
    assert isinstance(module, Conv)
    dims, groups = len(module.kernel_size), module.groups
    k_out = module.out_channels // groups
    k_in = module.in_channels // groups * math.prod(module.kernel_size)

    def outputs(h: Tensor) -> Tensor:
        if h.ndim == dims + 1:
            h = h.unsqueeze(0)  # an image without a batch dimension is one sample
        return h.reshape(h.shape[0], groups, h.shape[1] // groups, -1).permute(0, 3, 1, 2)

    return [
        module_layer(
            name,
            f"conv{dims}d",
            module,
            (groups, k_out, k_in),
            matrix=lambda w: w.reshape(groups, k_out, k_in),
            outputs=outputs,
            inputs=lambda x: _patches(module, x),
            ndim=dims + 2,
            input_gradients=_pointwise(module),
            sample_gradients=lambda x, rows: _sample_gradients(module, x, rows),
        )
    ]


def _sample_gradients(module: Conv, x: Tensor, rows: Sequence[Tensor]) -> Tensor:
    """Compute the gradient of each sample in the weight by one convolution whose groups are the samples.

    The c gradients of a sample are output channels of its group.
    """
    groups, c = module.groups, len(rows)
    n, _, _, k_out = rows[0].shape
    if c * k_out > _GROUPED_UP_TO and k_out <= _CHANNELS and module.weight[0].numel() * k_out <= _SMALL:
        step = _CHANNELS // k_out
        return torch.cat([_sample_gradients(module, x, rows[i : i + step]) for i in range(0, c, step)], dim=1)
    gradients = stacked([row.permute(0, 2, 3, 1) for row in rows], dim=2)  # (n, groups, c, k_out, positions)
    if c * k_out > _GROUPED_UP_TO:
        patches = _patches(module, x).transpose(1, 2)
        result: Tensor = gradients.flatten(2, 3) @ patches
        return result.reshape(n, groups, c, k_out, -1).transpose(1, 2)
    x = _padded(module, x)
    stride, dilation, zeros = list(module.stride), list(module.dilation), [0] * len(module.kernel_size)
    sides = zip(x.shape[2:], module.kernel_size, stride, dilation, strict=True)
    gradients = gradients.reshape(1, -1, *((size - d * (kernel - 1) - 1) // s + 1 for size, kernel, s, d in sides))
    weight = x.new_empty(n * groups * c * k_out, x.shape[1] // groups, *module.kernel_size)
    x, mask = x.reshape(1, -1, *x.shape[2:]), [False, True, False]
    _, result, _ = torch.ops.aten.convolution_backward(
        gradients, x, weight, None, stride, zeros, dilation, False, zeros, n * groups, mask
    )
    return result.reshape(n, groups, c, k_out, -1).transpose(1, 2)


def _pointwise(module: Conv) -> bool:
    """Return whether each output position sees one input position, so that input gradients are ``J W``."""
    one = all(size == 1 for size in (*module.kernel_size, *module.stride))
    return one and not any(module._reversed_padding_repeated_twice)


def _padded(module: Conv, x: Tensor) -> Tensor:
    """Return a batch of inputs with the padding of the module."""
    if x.ndim == len(module.kernel_size) + 1:
        x = x.unsqueeze(0)
    # The module stores its padding, also "same" and "valid", in the order of F.pad.
    padding = module._reversed_padding_repeated_twice
    return F.pad(x, padding, mode="constant" if module.padding_mode == "zeros" else module.padding_mode)


def _patches(module: Conv, x: Tensor) -> Tensor:
    """Return the inputs of each output position, ``(samples, positions, groups, C_in/G * kernel)``."""
    dims = len(module.kernel_size)
    x = _padded(module, x)
    sides = zip(module.kernel_size, module.stride, module.dilation, strict=True)
    for axis, (size, stride, dilation) in enumerate(sides):
        x = x.unfold(2 + axis, dilation * (size - 1) + 1, stride)[..., ::dilation]
    # x is now (n, C, *places, *kernel).
    n, channels = x.shape[:2]
    places = math.prod(x.shape[2 : 2 + dims])
    x = x.permute(0, *range(2, 2 + dims), 1, *range(2 + dims, 2 + 2 * dims))
    return x.reshape(n, places, module.groups, channels // module.groups * math.prod(module.kernel_size))
