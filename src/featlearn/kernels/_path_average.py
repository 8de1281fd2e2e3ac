"""Kernel of tangent features averaged along the straight path from the initial to the trained network.

References:
    LeJeune & Alemohammad (2023), https://arxiv.org/abs/2308.15478, sec. 2.1.
"""

from __future__ import annotations

import copy
import logging
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Literal, get_args

import numpy as np
import torch
from torch import Tensor, nn

from featlearn._utils.progress import progress_bar
from featlearn._utils.validation import check_int, check_option
from featlearn.capture import Batch, Forward, ModelSession, initial_model
from featlearn.errors import InputError
from featlearn.kernels._kernel_sums import TOTAL, KernelSums
from featlearn.kernels._ntk import (
    add_block_kernels,
    blocks_of,
    check_kernel_memory,
    check_outputs,
    expected_rows,
    first_batch,
    gradient_memory,
    most_rows,
    read_once,
    rows_at_a_time,
)
from featlearn.kernels.contractions import average
from featlearn.kernels.per_sample_gradients import Features, PerSampleGradients, with_rest
from featlearn.layers import unwrap

_log = logging.getLogger("featlearn")

Rule = Literal["midpoint", "trapezoid", "gauss-legendre"]
_CLOSE = 0.05


def average_ntk(
    model: nn.Module,
    initial: nn.Module | Mapping[str, Tensor],
    X: Any,
    Z: Any = None,
    points: int = 50,
    rule: Rule = "midpoint",
    *,
    outputs: str | int = "trace",
    by_layer: bool = False,
    parameters: str | Iterable[str] | None = None,
    max_memory: int | float | str | None = None,
    forward: Forward | None = None,
    train_mode: str = "error",
    batch_size: int | None = None,
    device: torch.device | str | None = None,
    dtype: torch.dtype | None = None,
    progress: bool = False,
) -> AverageKernel:
    r"""Compute the kernel of the average tangent features between the initial and the trained network.

    ``K(a, b) = <g(a), g(b)>`` with ``g(x) = int_0^1 df/dtheta(x) dt`` at ``theta_t = (1 - t) theta_0 + t theta``. With
    these features the network is exactly linear,

        f_theta(x) - f_theta0(x) = <g(x), theta - theta_0>,

    and the error of the quadrature in this identity is measured on X and returned. The integral is over gradients, not
    over kernels: ``K`` is not the mean of the kernels along the path. Buffers, such as the running statistics of batch
    norms, are those of the trained model along the whole path.

    Time: ``points`` times the gradients of a tangent kernel, per block of samples, and ``n m c`` products per
    parameter. Memory: ``c`` gradients per sample for the samples of two blocks, within ``max_memory``.

    Args:
        model: Trained network.
        initial: Initial network, or its state dict.
        X: Inputs, as in `featlearn.ntk`.
        Z: Other inputs, for the kernel of X against Z. None is X against itself.
        points: Number of points on the path.
        rule: Quadrature rule, "midpoint", "trapezoid" or "gauss-legendre". For smooth activations the error falls like
            1/points^2 for the first two and exponentially for the third; with kinks, as of a ReLU, like 1/points.
        outputs: ``"trace"`` sums over outputs, ``"full"`` keeps them, an integer selects that output.
        by_layer: Whether to keep the contribution of each layer too.
        parameters: Glob pattern of parameter names to include, or several. None includes all. The whole network moves
            along the path in any case.
        max_memory: Limit for the gradients, in bytes or as text such as ``"2 GB"``. None is a quarter of the memory of
            the machine.
        forward: Function ``forward(model, batch)`` that returns the output, samples first. None calls the model on the
            inputs of the batch.
        train_mode: ``"error"`` refuses BatchNorm or dropout in training mode; ``"eval"`` switches the model to
            evaluation mode and restores it.
        batch_size: Number of rows per block. None chooses it from `max_memory`.
        device: Device to measure on. A device other than the model's measures a copy. None is the model's.
        dtype: Precision to measure in. A dtype other than the model's measures a copy. None is the model's.
        progress: Whether to show a progress bar on stderr, if it is a terminal.

    Returns:
        The kernel, with the error of the quadrature.

    Raises:
        InputError: An argument is invalid, `initial` is of another architecture, or the memory does not suffice.

    Example:
        >>> import copy, torch, featlearn as fl
        >>> _ = torch.manual_seed(0)
        >>> initial = torch.nn.Sequential(torch.nn.Linear(3, 8), torch.nn.Tanh(), torch.nn.Linear(8, 1))
        >>> model = copy.deepcopy(initial)
        >>> _ = model[0].weight.data.add_(1.0)
        >>> average = fl.average_ntk(model, initial, torch.randn(10, 3), points=10, rule="gauss-legendre")
        >>> average.kernel.shape, average.completeness_error < 1e-3
        (torch.Size([10, 10]), True)
    """
    check_outputs(outputs)
    X, Z = read_once(X), read_once(Z)
    times, weights = _quadrature(points, rule)
    moving = copy.deepcopy(model) if isinstance(model, nn.Module) else model
    subject = ModelSession(moving, vectors=True, forward=forward, train_mode=train_mode, device=device, dtype=dtype)
    path = _Path(subject.model, initial_model(initial, subject.model, unwrap(model)))
    tangents = PerSampleGradients(subject, outputs, parameters, materialize=True)
    memory = gradient_memory(max_memory)
    with subject.open(inputs=True, weight_gradients=True):
        tangents.prepare(first_batch(subject, X), most_rows(X, Z), memory)
    full = outputs == "full"
    check_kernel_memory(X, Z, tangents, full, max_memory, tangents.shares + 1 if by_layer else 1)
    # Fewer rows than for one point, because the averages take memory too.
    entries = tangents.count**2 if full else 1
    rows = rows_at_a_time(1.5 * tangents.numbers_of_the_rest, memory, entries) if batch_size is None else batch_size
    left = blocks_of(subject, X, rows)
    right = left if Z is None else blocks_of(subject, Z, rows)
    rest = tangents.rest_features(left[0]) if tangents.rest else None
    calls = len(left) + (0 if right is left else len(right))  # if all features fit into the memory

    linear: Tensor | None = None
    sums = KernelSums(expected_rows(left), expected_rows(right), by_layer)
    with progress_bar(calls * points, "points on the path", progress) as advance:

        def features(batch: Batch) -> Features:
            nonlocal linear
            total: Features = {}
            for t, weight in zip(times, weights, strict=True):
                path.go(t)
                with subject.open(inputs=True, weight_gradients=True):
                    point = tangents.features(batch)
                if rest is not None:
                    point = with_rest(point, rest(batch))
                total = {
                    name: average([total[name], share], [1.0, weight]) if total else average([share], [weight])
                    for name, share in point.items()
                }
                advance()
            if linear is None:  # the first block of X comes first
                linear = tangents.along(total, path.change)
            return total

        add_block_kernels(sums, left, right, features, full, memory)
    assert linear is not None
    path.go(1.0)
    after = _values(subject, left[0], outputs)
    path.go(0.0)
    change = after - _values(subject, left[0], outputs)
    gap = float((linear - change).norm() / change.norm()) if change.any() else float((linear - change).norm())
    if parameters is not None:
        gap = math.nan  # a part of the parameters explains a part of the change
    if gap > _CLOSE:
        _log.warning("the average over %d points differs from the change of the network by %.0f%%", points, 100 * gap)
    kernels = sums.kernels()
    if not by_layer:
        return AverageKernel(kernels[TOTAL], gap, points, rule)
    first, *others = kernels.values()
    total = first.clone()
    for kernel in others:
        total += kernel
    return AverageKernel(total, gap, points, rule, kernels)


@dataclass(frozen=True, eq=False)
class AverageKernel:
    """Kernel of average tangent features, from `average_ntk`.

    Attributes:
        kernel: Kernel in float64, shape (n, m), or (n, m, c, c) with all outputs.
        completeness_error: Relative error ``|<g, theta - theta_0> - (f_theta - f_theta0)| / |f_theta - f_theta0|`` of
            the quadrature, on the first block of samples; NaN for a part of the parameters.
        points: Number of points on the path.
        rule: Quadrature rule.
        by_layer: Contribution of each layer by its name, if it was asked for.
    """

    kernel: Tensor
    completeness_error: float
    points: int
    rule: Rule
    by_layer: Mapping[str, Tensor] | None = None

    def __repr__(self) -> str:
        return (
            f"AverageKernel({' x '.join(map(str, self.kernel.shape))}, {self.points} points by {self.rule}, "
            f"completeness error {self.completeness_error:.1e})"
        )


class _Path:
    """Straight line between two states of a model."""

    def __init__(self, model: nn.Module, start: nn.Module) -> None:
        self._parameters = dict(model.named_parameters())
        first = dict(start.named_parameters())
        if set(first) != set(self._parameters):
            raise InputError("initial is of another architecture: its parameters have different names.")
        # In double precision, so that each point is rounded once.
        self._start = {name: first[name].detach().double() for name in self._parameters}
        self.change = {name: p.detach().double() - self._start[name] for name, p in self._parameters.items()}

    def go(self, t: float) -> None:
        with torch.no_grad():
            for name, parameter in self._parameters.items():
                parameter.copy_(self._start[name] + t * self.change[name])


def _values(subject: ModelSession, batch: Batch, outputs: str | int) -> Tensor:
    output = subject.outputs(batch).double()
    values = output.reshape(output.shape[0], -1)
    return values[:, outputs : outputs + 1] if isinstance(outputs, int) else values


def _quadrature(points: int, rule: str) -> tuple[list[float], list[float]]:
    """Return points between 0 and 1, and their weights."""
    check_option("rule", rule, get_args(Rule))
    check_int("points", points, 2 if rule == "trapezoid" else 1)
    if rule == "midpoint":
        return [(i + 0.5) / points for i in range(points)], [1 / points] * points
    if rule == "trapezoid":
        weights = np.full(points, 1 / (points - 1))
        weights[[0, -1]] /= 2
        return np.linspace(0, 1, points).tolist(), weights.tolist()
    nodes, weights = np.polynomial.legendre.leggauss(points)
    return ((nodes + 1) / 2).tolist(), (weights / 2).tolist()
