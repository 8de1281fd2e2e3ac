"""How a network starts: the scale of its weights, and an output of exactly zero."""

from __future__ import annotations

import copy
import math
from collections.abc import Mapping
from typing import Any, Literal

import torch
from torch import Tensor, nn

from featlearn._utils.patterns import pick_values
from featlearn._utils.validation import check_option
from featlearn.errors import InputError, UnsupportedModelError

ScaleOf = Literal["std", "variance"]
"""What a scale multiplies: the weights themselves, or their variance."""


def weight_factor(scale: float, scale_of: ScaleOf) -> float:
    """What the weights are multiplied by: ``scale`` or, if it is of the variance, its square root."""
    if not (math.isfinite(scale) and scale >= 0):
        raise InputError(f"a scale must be finite and not negative, got {scale}")
    check_option("scale_of", scale_of, ("std", "variance"))
    return scale if scale_of == "std" else math.sqrt(scale)


def scale_weights(model: nn.Module, scales: Mapping[str, float], scale_of: ScaleOf = "std") -> None:
    """Multiply the weights of a model, in place.

    Only parameters of two or more dimensions are scaled: biases and the gains of normalization layers stay.
    "Initialization scale s" has two readings in the papers: the weights are multiplied by s
    (``scale_of="std"``), or they are drawn from N(0, s/k) as the first version of the NFA paper writes,
    which multiplies them by the square root of s (``scale_of="variance"``).

    Args:
        model: Any module.
        scales: ``{glob: scale}``; globs are matched against the names of modules that own such parameters,
            e.g. ``{"net.0": 0.01, "*": 1.0}``. Of several globs that match a module, the first counts.
        scale_of: "std" or "variance".

    Raises:
        InputError: A glob matches no module, or a tied weight would get two scales.
    """
    factors = {glob: weight_factor(scale, scale_of) for glob, scale in scales.items()}
    owners: dict[str, list[nn.Parameter]] = {}
    for name, module in model.named_modules():
        matrices = [p for p in module.parameters(recurse=False) if p.ndim >= 2]
        if matrices:
            owners[name] = matrices
    chosen: dict[nn.Parameter, tuple[str, float]] = {}
    for name, factor in pick_values(factors, list(owners), "scales", "module with weights").items():
        for weight in owners[name]:
            first, before = chosen.setdefault(weight, (name, factor))
            if before != factor:
                raise InputError(
                    f"{first!r} and {name!r} share one weight but would get two scales: give both the same"
                )
    with torch.no_grad():
        for weight, (_, factor) in chosen.items():
            weight.mul_(factor)


def subtract_initial(model: nn.Module) -> SubtractInitial:
    """A network whose output starts at exactly zero: ``f_t(x) - f_0(x)`` (NFA paper, Method 7).

    Training the result trains ``model`` itself (not a copy) against labels minus its first outputs; the
    residuals are then the labels at the first step, as the paper's theory asks.

    Args:
        model: The network as it is now; it must return one tensor and, for an exact zero, be deterministic
            (dropout would draw two different masks).
    """
    return SubtractInitial(model)


class SubtractInitial(nn.Module):
    """See `subtract_initial`.

    The copy takes no part in autograd: the gradient with respect to parameters and pre-activations is that
    of ``model`` alone, and so is the gradient with respect to the inputs, which leaves f_0 out.

    Attributes:
        model: The network that trains.
        initial: The frozen copy, always in eval mode; its attribute ``featlearn_skip`` tells measurements
            to leave it out.
    """

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model
        self.initial = copy.deepcopy(model).requires_grad_(False).eval()
        self.initial.featlearn_skip = "frozen copy of the initial network"  # type: ignore[assignment]

    def forward(self, *args: Any, **kwargs: Any) -> Tensor:
        """``model(...) - initial(...)``."""
        out = self.model(*args, **kwargs)
        if not isinstance(out, Tensor):
            raise UnsupportedModelError(
                f"subtract_initial needs a model that returns one tensor, got {type(out).__name__}: "
                "wrap it in a module that returns its logits"
            )
        with torch.no_grad():
            start: Tensor = self.initial(*args, **kwargs)
        return out - start

    def train(self, mode: bool = True) -> SubtractInitial:
        """Set the mode of the network that trains; the copy stays in eval mode."""
        super().train(mode)
        self.initial.eval()
        return self

    def requires_grad_(self, requires_grad: bool = True) -> SubtractInitial:
        """Freeze or thaw the network that trains; the copy stays frozen."""
        self.model.requires_grad_(requires_grad)
        return self
