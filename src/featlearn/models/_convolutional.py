"""Convolutional networks of the papers, for small images.

References:
    Beaglehole, Mitliagkas & Agarwala, "Feature learning as alignment", https://openreview.net/forum?id=JXCe2ZcUXr (NFA
    paper).
    Wang, Engel, Sarwate, Dumitriu & Chiang (2022), https://arxiv.org/abs/2211.06506 (spectral paper).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Literal

import torch
from torch import Tensor, nn

from featlearn._utils.public_names import renamed_arguments
from featlearn._utils.rng import Seed, as_generator
from featlearn._utils.validation import check_number, check_option, is_int
from featlearn.errors import InputError
from featlearn.linalg.activations import Activation, activation_module, normalized_activation
from featlearn.models.mlp import Scale, draw_normal, linear_layer, with_parameters

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
    """Create a small convolutional network in the NTK parameterization (spectral paper, figures 4 and 6, appendix A).

    The network of the paper is "similar to the VGG model", without biases, with standard normal weights in the NTK
    parameterization and normalized centered activations; the paper does not give its sizes. Here each 3x3 convolution
    with padding has a factor ``1 / sqrt(9 channels)`` before it, and the activation and 2x2 max-pooling after it. The
    linear readout has a factor ``1 / sqrt(features)``. Inputs should be standardized.

    Args:
        channels: Number of output channels of each convolution.
        outputs: Number of outputs; 1 for CIFAR-2.
        image_shape: Shape ``(channels, height, width)`` of the images; each pooling halves the sides, rounded down.
        activation: Activation: a name, a module, a factory or a function, as in `activation_module`.
        normalized: Whether the activation is centered and normalized under N(0, 1), as in `normalized_activation`.
        generator: Generator or integer seed. None is seed 0.
        dtype: Type of the parameters. None is torch's default. Numbers are drawn in float64 and rounded, so that a
            network has the same weights in every dtype.

    Returns:
        The network.

    Raises:
        InputError: A number is not a positive integer, or the images are too small for the poolings.

    Example:
        >>> net = small_cnn((8, 16), image_shape=(1, 28, 28))
        >>> net(torch.zeros(2, 1, 28, 28)).shape
        torch.Size([2, 1])
    """
    k_in, height, width = image_shape
    _check_counts([*channels, outputs, *image_shape])
    most = min(height, width).bit_length() - 1  # each pooling halves the sides
    if not 1 <= len(channels) <= most:
        raise InputError(
            f"channels must be 1 to {most} numbers for images of {height}x{width} pixels, got {len(channels)}"
        )
    generator = as_generator(generator, "small_cnn")
    net = nn.Sequential()
    for k_out in channels:
        convolution = _conv_layer(draw_normal((k_out, k_in, 3, 3), generator), None, dtype)
        activate = normalized_activation(activation) if normalized else activation_module(activation)
        net.extend([Scale(1 / math.sqrt(9 * k_in)), convolution, activate, nn.MaxPool2d(2)])
        k_in = k_out
    features = k_in * (height >> len(channels)) * (width >> len(channels))
    readout = linear_layer(draw_normal((outputs, features), generator), dtype=dtype)
    return net.extend([nn.Flatten(), Scale(1 / math.sqrt(features)), readout])


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
    """Create VGG-11 without batch normalization for images of 32x32 pixels (NFA paper, figure 2C and appendix J).

    The network has eight 3x3 convolutions with padding and ReLU, of 64, 128, 256, 256, 512, 512, 512 and 512 channels,
    five poolings down to one pixel, and linear layers. VGG-11 of torchvision, on which the paper is based, has two
    hidden linear layers of 4,096 (``hidden=(4096, 4096)``) with dropout, on 7x7 copies of this pixel; copies and
    dropout are left out here. The networks of the paper have no biases.

    Args:
        classes: Number of outputs.
        width: Factor of all numbers of channels, which are rounded, above 0; 0.125 is fast enough for a CPU.
        hidden: Widths of hidden linear layers, not multiplied by ``width``.
        channels: Number of channels of the images.
        bias: Whether layers have biases.
        init: Initialization: "uniform" is PyTorch's default, U(-1/sqrt(k_in), 1/sqrt(k_in)) with k_in = 9 channels for
            a convolution, as in the paper; "he" is torchvision's: N(0, 2 / (9 outputs)) for convolutions,
            N(0, 0.01^2) for linear layers, zero biases.
        generator: Generator or integer seed. None is seed 0.
        dtype: Type of the parameters. None is torch's default. Numbers are drawn in float64 and rounded, so that a
            network has the same weights in every dtype.

    Returns:
        The network.

    Raises:
        InputError: An argument is not allowed.

    Example:
        >>> vgg11(10, width=0.125)(torch.zeros(2, 3, 32, 32)).shape
        torch.Size([2, 10])
    """
    _check_counts([classes, channels, *hidden])
    check_number("width", width, above=0)
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
        net.extend([_conv_layer(*_drawn((k_out, k_in, 3, 3), std, bias, generator), dtype), nn.ReLU()])
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
    """Draw a normal weight with zero bias, or PyTorch's uniform weight and bias if ``std`` is None."""
    if std is not None:
        return std * draw_normal(shape, generator), torch.zeros(shape[0]) if bias else None
    bound = 1 / math.sqrt(math.prod(shape[1:]))
    draw = [2 * bound * torch.rand(s, generator=generator, dtype=torch.float64) - bound for s in (shape, shape[:1])]
    return draw[0], draw[1] if bias else None


def _conv_layer(weight: Tensor, bias: Tensor | None, dtype: torch.dtype | None) -> nn.Conv2d:
    """Create a 3x3 convolution with given parameters that keeps the size of images."""
    k_out, k_in = weight.shape[:2]
    return with_parameters(weight, bias, nn.Conv2d, k_in, k_out, 3, padding=1, dtype=dtype)
