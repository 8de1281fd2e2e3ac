"""Constants of a two-layer network and its data from which bounds of its training follow."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from featlearn.errors import InputError
from featlearn.linalg.matrices import as_float64

Activation = Callable[[Tensor], Tensor]

_GRID = torch.linspace(-8, 8, 4001, dtype=torch.float64)


@dataclass(frozen=True, eq=False)
class TwoLayerStart:
    """Network ``f(x) = v^T sigma(W x / sqrt d) / sqrt h`` with a fixed readout, at given weights and data.

    Attributes:
        inputs: Inputs over ``sqrt d``, shape ``(n, d)``.
        labels: Labels, shape ``(n,)``.
        weight: Weights W, shape ``(h, d)``.
        readout: Readout v, shape ``(h,)``.
        activation: Activation sigma.
        slope: Largest ``|sigma'|`` on the grid from -8 to 8.
        curvature: Largest ``|sigma''|``; infinite if sigma' jumps.
    """

    inputs: Tensor
    labels: Tensor
    weight: Tensor
    readout: Tensor
    activation: Activation
    slope: float
    curvature: float

    @property
    def n(self) -> int:
        """Number of data points."""
        return len(self.inputs)

    @property
    def h(self) -> int:
        """Width."""
        return len(self.weight)

    @cached_property
    def features(self) -> Tensor:
        """Features ``sigma(W x / sqrt d)``, shape ``(n, h)``."""
        return self.activation(self.inputs @ self.weight.mT)

    @cached_property
    def loss(self) -> float:
        """Norm of the residual, ``|y - f(X)|``."""
        return float((self.labels - self.features @ self.readout / math.sqrt(self.h)).norm())

    @cached_property
    def size(self) -> float:
        """Spectral norm of the inputs over ``sqrt d``."""
        return float(torch.linalg.matrix_norm(self.inputs, 2))

    @property
    def jacobian_bound(self) -> float:
        """Bound of the norm of the Jacobian of the outputs in W, at any W: ``s |v|_inf S``."""
        return self.slope * float(self.readout.abs().max()) * self.size

    @cached_property
    def jacobian_lipschitz(self) -> float:
        """Lipschitz constant of the Jacobian in the Frobenius norm, ``c |v|_inf S max |x_i| / sqrt(d h)``."""
        longest = float(self.inputs.norm(dim=1).max())
        return self.curvature * float(self.readout.abs().max()) * self.size * longest / math.sqrt(self.h)

    @cached_property
    def tangent_eigenvalues(self) -> Tensor:
        """Eigenvalues of the tangent kernel ``J J^T`` of the first layer, ascending."""
        points = (self.inputs @ self.weight.mT).requires_grad_()
        with torch.enable_grad():
            (slopes,) = torch.autograd.grad(self.activation(points).sum(), points)
        scaled = slopes * self.readout
        kernel = (self.inputs @ self.inputs.mT) * (scaled @ scaled.mT) / self.h
        values: Tensor = torch.linalg.eigvalsh(kernel).clamp_min(0.0)
        return values

    def gram_change(self, moved: float) -> float:
        """Return the bound ``(2 |W| + m) m / h`` of the change of ``W^T W / h`` if W moves by at most m."""
        return (2 * float(torch.linalg.matrix_norm(self.weight, 2)) + moved) * moved / self.h

    def ck_change(self, moved: float) -> float:
        """Return the bound ``(2 |Phi| + D) D / h``, ``D = s S m``, of the change of the conjugate kernel."""
        of_features = self.slope * self.size * moved
        return (2 * float(torch.linalg.matrix_norm(self.features, 2)) + of_features) * of_features / self.h

    def ntk_change(self, moved: float) -> float:
        """Return the bound ``(2 |J| + e) e``, e the change of J, of the change of the first layer's tangent kernel."""
        of_jacobian = self.jacobian_lipschitz * moved if moved else 0.0
        return (2 * math.sqrt(float(self.tangent_eigenvalues[-1])) + of_jacobian) * of_jacobian


def two_layer_start(
    X: Any, y: Any, weight: Any, readout: Any, activation: Activation, kinks: Sequence[float]
) -> TwoLayerStart:
    """Validate data and weights of a two-layer network, and return them in float64."""
    x, w, v, labels = as_float64(X), as_float64(weight), as_float64(readout).flatten(), as_float64(y).flatten()
    if x.ndim != 2 or w.ndim != 2 or x.shape[1] != w.shape[1] or len(v) != len(w) or len(labels) != len(x):
        raise InputError(
            "X must have shape (n, d), y (n,), weight (h, d) and readout (h,), "
            f"got {tuple(x.shape)}, ({len(labels)},), {tuple(w.shape)} and ({len(v)},)."
        )
    if not all(bool(torch.isfinite(t).all()) for t in (x, w, v, labels)):
        raise InputError("X, y, weight and readout must be finite, got NaN or infinite entries.")
    slope, curvature = _largest_derivatives(activation, kinks)
    return TwoLayerStart(x / math.sqrt(x.shape[1]), labels, w, v, activation, slope, curvature)


def _largest_derivatives(activation: Activation, kinks: Sequence[float]) -> tuple[float, float]:
    grid = _GRID.clone().requires_grad_()
    with torch.enable_grad():
        (first,) = torch.autograd.grad(activation(grid).sum(), grid, create_graph=True)
        slope = float(first.detach().abs().max())
        if kinks:
            return slope, math.inf
        if not first.requires_grad:
            return slope, 0.0
        (second,) = torch.autograd.grad(first.sum(), grid)
    return slope, float(second.abs().max())
