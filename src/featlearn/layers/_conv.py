"""Convolutions as matrices on unfolded patches (FORMULAS, section 1).

For group g the matrix is the weight reshaped to ``(C_out/G, C_in/G * kernel)``, its inputs are the patches
in the same order, and its positions are the places of the output. This is exact for any stride, padding,
padding mode and dilation.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from featlearn.layers.base import Layer, stacked

Conv = nn.Conv1d | nn.Conv2d | nn.Conv3d

_GROUPED_UP_TO = 256  # channels; above, a product with the patches was twice as fast, below up to three times slower


def conv_layers(name: str, module: nn.Module) -> list[Layer]:
    """The block-diagonal matrix of an ``nn.Conv1d``, ``nn.Conv2d`` or ``nn.Conv3d``."""
    assert isinstance(module, Conv)
    dims, groups = len(module.kernel_size), module.groups
    k_out = module.out_channels // groups
    k_in = module.in_channels // groups * math.prod(module.kernel_size)
    return [
        Layer(
            name=name,
            kind=f"conv{dims}d",
            module=module,
            part=None,
            parameter="weight",
            groups=groups,
            k_out=k_out,
            k_in=k_in,
            weight=lambda: module.weight,
            matrix=lambda w: w.reshape(groups, k_out, k_in),
            outputs=_channel_rows(dims, groups),
            inputs=lambda x: _patches(module, x),
            ndim=dims + 2,
            bias=None if module.bias is None else "bias",
            vector=lambda b: b.reshape(groups, k_out),
            sample_gradients=lambda x, rows: _sample_gradients(module, x, rows),
        )
    ]


def _channel_rows(dims: int, groups: int) -> Callable[[Tensor], Tensor]:
    def rows(h: Tensor) -> Tensor:
        if h.ndim == dims + 1:
            h = h.unsqueeze(0)  # an image without a batch dimension is one sample
        return h.reshape(h.shape[0], groups, h.shape[1] // groups, -1).permute(0, 3, 1, 2)

    return rows


def _sample_gradients(module: Conv, x: Tensor, rows: Sequence[Tensor]) -> Tensor:
    """Gradients in the weight of each sample: one convolution whose groups are the samples.

    The c gradients of a sample are further output channels of its group.
    """
    groups, c = module.groups, len(rows)
    n, _, _, k_out = rows[0].shape
    gradients = stacked([row.permute(0, 2, 3, 1) for row in rows], dim=2)  # (n, groups, c, k_out, positions)
    if c * k_out > _GROUPED_UP_TO:
        patches = _patches(module, x).transpose(1, 2)
        found: Tensor = gradients.flatten(2, 3) @ patches
        return found.reshape(n, groups, c, k_out, -1).transpose(1, 2)
    x = _padded(module, x)
    dims = len(module.kernel_size)
    places = [
        (size - dilation * (kernel - 1) - 1) // stride + 1
        for size, kernel, stride, dilation in zip(
            x.shape[2:], module.kernel_size, module.stride, module.dilation, strict=True
        )
    ]
    weight = x.new_empty(n * groups * c * k_out, x.shape[1] // groups, *module.kernel_size)
    zeros = [0] * dims
    _, found, _ = torch.ops.aten.convolution_backward(
        gradients.reshape(1, -1, *places),
        x.reshape(1, -1, *x.shape[2:]),
        weight,
        None,
        list(module.stride),
        zeros,
        list(module.dilation),
        False,
        zeros,
        n * groups,
        [False, True, False],
    )
    return found.reshape(n, groups, c, k_out, -1).transpose(1, 2)


def _padded(module: Conv, x: Tensor) -> Tensor:
    """A batch of inputs with the module's padding around them."""
    if x.ndim == len(module.kernel_size) + 1:
        x = x.unsqueeze(0)
    # The module keeps its padding, also "same" and "valid", in the order that F.pad takes.
    padding = module._reversed_padding_repeated_twice
    return F.pad(x, padding, mode="constant" if module.padding_mode == "zeros" else module.padding_mode)


def _patches(module: Conv, x: Tensor) -> Tensor:
    """The inputs of each output position, ``(samples, positions, groups, C_in/G * kernel)``."""
    dims = len(module.kernel_size)
    x = _padded(module, x)
    for axis, (size, stride, dilation) in enumerate(
        zip(module.kernel_size, module.stride, module.dilation, strict=True)
    ):
        x = x.unfold(2 + axis, dilation * (size - 1) + 1, stride)[..., ::dilation]
    # x is now (n, C, *places, *kernel).
    n, channels = x.shape[:2]
    places = math.prod(x.shape[2 : 2 + dims])
    order = (0, *range(2, 2 + dims), 1, *range(2 + dims, 2 + 2 * dims))
    return (
        x.permute(order)
        .reshape(n, places, module.groups, -1)
        .reshape(n, places, module.groups, channels // module.groups * math.prod(module.kernel_size))
    )
