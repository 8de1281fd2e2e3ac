"""Convolutional networks of the papers, for small images."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Literal

import torch
from torch import Tensor, nn

from featlearn._utils.public_names import renamed_arguments
from featlearn._utils.rng import Seed, as_generator
from featlearn._utils.validation import check_option, is_int
from featlearn.errors import InputError
from featlearn.linalg.activations import Activation, activation_module, normalized_activation
from featlearn.models.mlp import Scale, linear_layer

_VGG11 = (64, "pool", 128, "pool", 256, 256, "pool", 512, 512, "pool", 512, 512, "pool")


@renamed_arguments(normalised="normalized")
def small_cnn(
    channels: Sequence[int] = (32, 64, 64),
    outputs: int = 1,
    *,
    image_shape: tuple[int, int, int] = (3, 32, 32),
    activation: Activation = "relu",
    normalized: bool = True,
    generator: Seed = None,
    dtype: torch.dtype | None = None,
) -> nn.Sequential:
    """A small convolutional network in the NTK parameterization (spectral paper, figures 4 and 6, appendix A).

    The paper says of its network that it is "similar to the VGG model", without biases, with standard normal weights
    in the NTK parameterization and normalized centered activations; its sizes are not told. Here it is 3x3
    convolutions with padding, each behind a factor ``1 / sqrt(9 channels)`` and followed by the activation and 2x2
    max-pooling, and a linear readout behind ``1 / sqrt(features)``. Inputs should be standardized.

    Args:
        channels: Outputs of each convolution.
        outputs: Of the readout; CIFAR-2 has one.
        image_shape: ``(channels, height, width)`` of the images; sides are halved, rounded down, by every pooling.
        activation: A name, a module, a factory or a function, see `activation_module`.
        normalized: Whether to center and normalize the activation under N(0, 1), see `normalized_activation`.
        generator: Generator or integer seed.
        dtype: Of the parameters, torch's default if None. Numbers are drawn in float64 and rounded.

    >>> net = small_cnn((8, 16), image_shape=(1, 28, 28))
    >>> net(torch.zeros(2, 1, 28, 28)).shape
    torch.Size([2, 1])
    """
    k_in, height, width = image_shape
    _check_counts([*channels, outputs, *image_shape])
    side = min(height, width) >> len(channels)
    if not channels or side < 1:
        raise InputError(f"images of {height}x{width} pixels allow from 1 to {_poolings(height, width)} convolutions")
    generator = as_generator(generator, "small_cnn")
    net = nn.Sequential()
    for k_out in channels:
        net.append(Scale(1 / math.sqrt(9 * k_in)))
        net.append(_conv_layer(_normal((k_out, k_in, 3, 3), 1.0, generator), None, dtype))
        net.append(normalized_activation(activation) if normalized else activation_module(activation))
        net.append(nn.MaxPool2d(2))
        k_in = k_out
    features = k_in * (height >> len(channels)) * (width >> len(channels))
    net.append(nn.Flatten())
    net.append(Scale(1 / math.sqrt(features)))
    net.append(linear_layer(_normal((outputs, features), 1.0, generator), dtype=dtype))
    return net


def _poolings(height: int, width: int) -> int:
    return min(height, width).bit_length() - 1


def vgg11(
    classes: int = 10,
    *,
    width: float = 1.0,
    hidden: Sequence[int] = (),
    channels: int = 3,
    bias: bool = False,
    init: Literal["uniform", "he"] = "uniform",
    generator: Seed = None,
    dtype: torch.dtype | None = None,
) -> nn.Sequential:
    """VGG-11 without batch normalization, for images of 32x32 pixels (NFA paper, figure 2C and appendix J).

    Eight 3x3 convolutions with padding and ReLU, of 64, 128, 256, 256, 512, 512, 512 and 512 channels, five
    poolings that leave one pixel, and linear layers. Torchvision's VGG-11, from which the paper's is taken, has two
    hidden linear layers of 4,096 (``hidden=(4096, 4096)``) behind copies of that one pixel on 7x7 places, which this
    leaves out, and dropout between them. The paper's networks have no biases.

    Args:
        classes: Number of outputs.
        width: Factor of all numbers of channels, which are rounded: 0.125 runs on a CPU.
        hidden: Widths of hidden linear layers, not multiplied by ``width``.
        channels: Of the images.
        bias: Whether layers have biases.
        init: "uniform" is PyTorch's own, U(-1/sqrt(k_in), 1/sqrt(k_in)) with k_in = 9 channels for a convolution, which
            the paper states for its networks; "he" is torchvision's: N(0, 2 / (9 outputs)) for convolutions,
            N(0, 0.01^2) for linear layers, zero biases.
        generator: Generator or integer seed.
        dtype: Of the parameters, torch's default if None. Numbers are drawn in float64 and rounded.

    >>> vgg11(10, width=0.125)(torch.zeros(2, 3, 32, 32)).shape
    torch.Size([2, 10])
    """
    _check_counts([classes, channels, *hidden])
    if not (math.isfinite(width) and width > 0):
        raise InputError(f"width is a factor and must be positive, got {width!r}")
    check_option("init", init, ("uniform", "he"))
    generator = as_generator(generator, "vgg11")
    net = nn.Sequential()
    k_in = channels
    for item in _VGG11:
        if isinstance(item, str):
            net.append(nn.MaxPool2d(2))
            continue
        k_out = max(round(width * item), 1)
        std = math.sqrt(2 / (9 * k_out)) if init == "he" else None
        net.append(_conv_layer(*_drawn((k_out, k_in, 3, 3), std, bias, generator), dtype))
        net.append(nn.ReLU())
        k_in = k_out
    net.append(nn.Flatten())
    for i, k_out in enumerate((*hidden, classes)):
        if i:
            net.append(nn.ReLU())
        net.append(linear_layer(*_drawn((k_out, k_in), 0.01 if init == "he" else None, bias, generator), dtype))
        k_in = k_out
    return net


def _check_counts(counts: Sequence[int]) -> None:
    if not all(is_int(k, 1) for k in counts):
        raise InputError(f"numbers of channels, pixels and outputs must be positive integers, got {list(counts)}")


def _drawn(
    shape: tuple[int, ...], std: float | None, bias: bool, generator: torch.Generator
) -> tuple[Tensor, Tensor | None]:
    """Weight and bias: normal with a standard deviation and zero, or PyTorch's uniform if that is None."""
    if std is not None:
        return _normal(shape, std, generator), torch.zeros(shape[0]) if bias else None
    bound = 1 / math.sqrt(math.prod(shape[1:]))
    draw = [2 * bound * torch.rand(s, generator=generator, dtype=torch.float64) - bound for s in (shape, shape[:1])]
    return draw[0], draw[1] if bias else None


def _normal(shape: tuple[int, ...], std: float, generator: torch.Generator) -> Tensor:
    return std * torch.randn(shape, generator=generator, dtype=torch.float64)


def _conv_layer(weight: Tensor, bias: Tensor | None, dtype: torch.dtype | None) -> nn.Conv2d:
    """A 3x3 convolution that keeps the size of images, with given parameters."""
    k_out, k_in = weight.shape[:2]
    # skip_init leaves the parameters unset: nn.Conv2d would draw from the global generator.
    conv: nn.Conv2d = nn.utils.skip_init(  # type: ignore[no-untyped-call]
        nn.Conv2d, k_in, k_out, 3, padding=1, bias=bias is not None, dtype=dtype
    )
    with torch.no_grad():
        conv.weight.copy_(weight)
        if bias is not None and conv.bias is not None:
            conv.bias.copy_(bias)
    return conv
