"""Initialization of networks: the scale of the weights, and an initial output of exactly zero.

References:
    Beaglehole, Mitliagkas & Agarwala, "Feature learning as alignment", https://openreview.net/forum?id=JXCe2ZcUXr (NFA
    paper).
"""

from __future__ import annotations

import copy
import math
from collections.abc import Mapping
from typing import Any, Literal

import torch
from torch import Tensor, nn

from featlearn._utils.patterns import pick_values
from featlearn._utils.validation import check_number, check_option
from featlearn.errors import InputError, UnsupportedModelError

ScaleOf = Literal["std", "variance"]
"""Meaning of a scale: a factor of the weights, or of their variance."""


def weight_factor(scale: float, scale_of: ScaleOf) -> float:
    """Return the factor of the weights: ``scale``, or its square root if it is a scale of the variance.

    Args:
        scale: Scale, finite and not negative.
        scale_of: Meaning of the scale: "std" or "variance".

    Raises:
        InputError: An argument is not allowed.
    """
    check_number("scale", scale, 0)
    check_option("scale_of", scale_of, ("std", "variance"))
    return scale if scale_of == "std" else math.sqrt(scale)


def scale_weights(model: nn.Module, scales: Mapping[str, float], scale_of: ScaleOf = "std") -> None:
    """Multiply the weights of a model in place.

    Only parameters of two or more dimensions are scaled, not biases and gains of normalization layers. "Initialization
    scale s" has two meanings in the papers: the weights are multiplied by s (``scale_of="std"``), or they are drawn
    from N(0, s/k), as in the first version of the NFA paper, which multiplies them by the square root of s
    (``scale_of="variance"``).

    Args:
        model: Model whose weights are multiplied.
        scales: Scale of each glob over the names of modules with such parameters, e.g. ``{"net.0": 0.01, "*": 1.0}``.
            If several globs match a module, the first one is used.
        scale_of: Meaning of a scale: "std" or "variance".

    Raises:
        InputError: A glob matches no module, a scale is negative, or a tied weight would get two scales.

    Example:
        >>> import torch
        >>> from featlearn.models import scale_weights
        >>> model = torch.nn.Sequential(torch.nn.Linear(3, 2), torch.nn.ReLU(), torch.nn.Linear(2, 1))
        >>> before = model[0].weight.detach().norm()
        >>> scale_weights(model, {"0": 0.01})
        >>> round(float(model[0].weight.detach().norm() / before), 4)
        0.01
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
                raise InputError(f"{first!r} and {name!r} share one weight and must have the same scale, got two")
    with torch.no_grad():
        for weight, (_, factor) in chosen.items():
            weight.mul_(factor)


def subtract_initial(model: nn.Module) -> SubtractInitial:
    """Wrap a network so that its output starts at exactly zero: ``f_t(x) - f_0(x)`` (NFA paper, Method 7).

    Training the result trains ``model`` itself, not a copy. The residuals of the first step are then the labels, as
    the theory of the paper requires.

    Args:
        model: Network that returns one tensor. For an exact zero it must be deterministic; dropout would draw two
            different masks.

    Returns:
        Module that subtracts the output of a frozen copy of the network.

    Example:
        >>> net = subtract_initial(nn.Linear(3, 1))
        >>> net(torch.ones(1, 3)).item()
        0.0
    """
    return SubtractInitial(model)


class SubtractInitial(nn.Module):
    """Network minus a frozen copy of its initial state; `subtract_initial` creates one.

    The copy is excluded from autograd: gradients with respect to parameters, pre-activations and inputs are those of
    ``model`` only.

    Attributes:
        model: Network that is trained.
        initial: Frozen copy, always in eval mode; its attribute ``featlearn_skip`` excludes it from measurements.
    """

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model
        self.initial = copy.deepcopy(model).requires_grad_(False).eval()
        self.initial.featlearn_skip = "frozen copy of the initial network"  # type: ignore[assignment]

    def forward(self, *args: Any, **kwargs: Any) -> Tensor:
        """Compute ``model(...) - initial(...)``.

        Args:
            *args: Positional arguments of both networks.
            **kwargs: Keyword arguments of both networks.

        Returns:
            Difference of the outputs.

        Raises:
            UnsupportedModelError: The model does not return one tensor.
        """
        out = self.model(*args, **kwargs)
        if not isinstance(out, Tensor):
            raise UnsupportedModelError(
                f"model must return one tensor for subtract_initial, got {type(out).__name__}. "
                "Wrap it in a module that returns its logits."
            )
        with torch.no_grad():
            start: Tensor = self.initial(*args, **kwargs)
        return out - start

    def train(self, mode: bool = True) -> SubtractInitial:
        """Set the mode of the trained network; the copy stays in eval mode.

        Args:
            mode: Whether to set training mode; otherwise eval mode.

        Returns:
            The module itself.
        """
        super().train(mode)
        self.initial.eval()
        return self

    def requires_grad_(self, requires_grad: bool = True) -> SubtractInitial:
        """Freeze or unfreeze the trained network; the copy stays frozen.

        Args:
            requires_grad: Whether parameters of the trained network require gradients.

        Returns:
            The module itself.
        """
        self.model.requires_grad_(requires_grad)
        return self
