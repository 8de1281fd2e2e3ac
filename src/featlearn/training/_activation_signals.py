"""Units of each layer that are dead or saturated, from one forward pass of a few rows."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from featlearn.capture import ModelSession, map_tensors
from featlearn.layers import Layer

_NEGLIGIBLE = 1e-6  # share of the root mean square of the outputs of the layer
_ON_MOST = 0.5  # share of rows and positions on which a unit is saturated
_SATURATED = 0.99
_RECTIFIERS = frozenset(
    {
        "relu", "relu6", "threshold", "gelu", "silu", "mish", "hardswish", "elu", "celu", "selu", "leaky_relu", "prelu",
        "rrelu", "softplus",
    }
)  # fmt: skip
_CLAMPS = frozenset({"clamp", "clamp_min", "clip", "hardtanh"})
_CENTERS = {"tanh": 0.0, "hardtanh": 0.0, "softsign": 0.0, "sigmoid": 0.5, "hardsigmoid": 0.5}
"""Activations between two limits, with the middle of them; the limits are 2 (sigmoids: 1) apart."""


@dataclass
class UnitSignals:
    """Activity of the units of one layer on the looked-at rows.

    Attributes:
        units: Number of units.
        rows: Number of looked-at rows.
        scale: Root mean square of the outputs of the layer.
        dead: Number of units whose activation is negligible on all rows and positions; None without a rectifier.
        saturated: Number of units that are saturated on at least half of rows and positions; None without an activation
            that saturates.
        rank: Participation ratio of the outputs, centered over the rows: the number of directions in which they vary,
            zero if they do not. NaN if unknown.
        spread: Root mean square of the outputs, centered over the rows. NaN if unknown.
    """

    units: int
    rows: int
    scale: float
    dead: int | None
    saturated: int | None
    rank: float
    spread: float = math.nan


@dataclass(frozen=True)
class ActivationLook:
    """Result of `look_at_activations`.

    Attributes:
        layers: Signals by layer, in the order in which the layers were called.
        outputs: Names of the layers whose outputs are those of the model.
        features: Outputs of the last layer that is not one of them, one row per sample. None if there is none.
    """

    layers: dict[str, UnitSignals]
    outputs: frozenset[str]
    features: Tensor | None


def look_at_activations(session: ModelSession, layers: Mapping[str, Layer], raws: Sequence[Any]) -> ActivationLook:
    """Run a model in evaluation mode on a few rows, and look at the units of its layers.

    Gradients, random generators, training flags, buffers and hooks of the model are left as they are. An activation
    belongs to the layer that was called before it, if its result has the shape of the outputs of the layer. Where no
    known activation follows, the units that the next layer receives are looked at.

    Args:
        session: Session of the model, which switches it to evaluation mode.
        layers: Layers of the model, by name.
        raws: Raw batches of rows, which are cast to the precision of the model.

    Raises:
        InputError: The parameters are not finite, or the output is not a tensor.
    """
    session.refresh()
    precisions = {p.dtype for p in session.model.parameters() if p.is_floating_point()}
    if len(precisions) == 1:  # the model may have been cast since the rows were taken
        (precision,) = precisions
        raws = map_tensors(list(raws), lambda t: t.to(precision) if t.is_floating_point() else t)
    watch = _Watch()
    with ExitStack() as stack:
        for name, layer in layers.items():
            if layer.part is None and layer.operation is None and not isinstance(layer.module, torch.jit.ScriptModule):
                stack.enter_context(layer.module.register_forward_pre_hook(watch.before))
                after = partial(watch.after, name, layer)
                stack.enter_context(layer.module.register_forward_hook(after, prepend=True))
        for raw in raws:
            watch.restart()
            batch = session.batch(raw)
            with watch:
                output = session.outputs(batch)
            watch.finish(output)
    units = {name: of.signals() for name, of in watch.layers.items()}
    hidden = [name for name in units if name not in watch.outputs]
    features = watch.layers[hidden[-1]].samples() if hidden else None
    return ActivationLook(units, frozenset(watch.outputs), features)


@dataclass
class _Sums:
    """Sums over the calls of one layer."""

    layer: Layer
    squares: float = 0.0
    entries: int = 0
    largest: Tensor | None = None  # of each unit, after the activation
    saturated: Tensor | None = None  # number of entries, of each unit
    looked_at: int = 0  # entries of each unit
    rows: list[Tensor] = field(default_factory=list)

    def signals(self) -> UnitSignals:
        scale = math.sqrt(self.squares / self.entries) if self.entries else math.nan
        dead = saturated = None
        if self.largest is not None:
            dead = int((self.largest <= _NEGLIGIBLE * scale).sum())
        if self.saturated is not None:
            saturated = int((self.saturated >= _ON_MOST * self.looked_at).sum())
        samples = self.samples()
        units = self.layer.groups * self.layer.k_out
        rank, spread = (math.nan, math.nan) if samples is None else _variation(samples)
        return UnitSignals(units, 0 if samples is None else len(samples), scale, dead, saturated, rank, spread)

    def samples(self) -> Tensor | None:
        widths = {rows.shape[1] for rows in self.rows}
        return torch.cat(self.rows) if len(widths) == 1 else None


class _Watch(TorchFunctionMode):
    """Mode in which the activations between the layers of a model are looked at."""

    def __init__(self) -> None:
        super().__init__()
        self.layers: dict[str, _Sums] = {}
        self.outputs: set[str] = set()
        self.restart()

    def restart(self) -> None:
        """Forget the last forward pass."""
        self._last: tuple[str, Tensor] | None = None
        self._alive: Tensor | None = None  # size of each unit of the last layer, before its activation
        self._open = 0  # depth of layers that are being called

    def before(self, module: nn.Module, args: Any) -> None:
        """Look at the units that a layer receives from the last one, if no known activation was between them."""
        self._open += 1
        x = args[0] if args and isinstance(args[0], Tensor) else None
        if self._last is None or self._alive is None or x is None:
            return
        name, h = self._last
        alive, self._alive = self._alive, None
        if x is h or x.shape != h.shape or not x.is_floating_point():
            return
        with torch._C.DisableTorchFunction():
            sizes = self._sizes(name, x)
            if sizes is not None and bool((x == 0).any()):
                # Units that the layer itself left at zero were not silenced by an activation.
                self._note_largest(name, torch.where(alive > 0, sizes, torch.ones_like(sizes)))

    def after(self, name: str, layer: Layer, module: nn.Module, args: Any, h: Any) -> None:
        """Look at the outputs of a layer."""
        self._open -= 1
        self._last = self._alive = None
        if not isinstance(h, Tensor) or not h.is_floating_point() or h.numel() == 0 or h.layout != torch.strided:
            return
        with torch._C.DisableTorchFunction():
            sums = self.layers.setdefault(name, _Sums(layer))
            values = h.detach()
            sums.squares += float(values.double().square().sum())
            sums.entries += values.numel()
            rows = self._rows(name, values)
            if rows is not None:
                sums.rows.append(rows.float().mean(1).cpu())
            self._last, self._alive = (name, values), None if rows is None else rows.abs().amax((0, 1)).float()

    def finish(self, output: Tensor) -> None:
        """Find the layer whose outputs are those of the model."""
        if self._last is None:
            return
        name, h = self._last
        units = self.layers[name].layer.groups * self.layers[name].layer.k_out
        same = output.shape == h.shape and bool(torch.equal(output, h))
        if same or (output.numel() == h.numel() and units in output.shape[-1:] + output.shape[1:2]):
            self.outputs.add(name)

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """Call a function, and look at its result if it is an activation of the last layer."""
        result = func(*args, **(kwargs or {}))
        if self._last is None or self._alive is None or self._open or not isinstance(result, Tensor):
            return result
        name = getattr(func, "__name__", "").rstrip("_")
        rectifier = name in _RECTIFIERS or (name in _CLAMPS and _least(args, kwargs or {}) == 0)  # ReLU6 is a hardtanh
        if (rectifier or name in _CENTERS) and result.shape == self._last[1].shape and result.is_floating_point():
            if rectifier:
                sizes = self._sizes(self._last[0], result)
                if sizes is not None:
                    self._note_largest(self._last[0], sizes)
            else:
                self._note_saturated(self._last[0], result, _CENTERS[name])
            self._alive = None  # one activation per call of a layer
        return result

    def _rows(self, name: str, values: Tensor) -> Tensor | None:
        """Return values of the shape of the outputs of a layer as (samples, positions, units)."""
        layer = self.layers[name].layer
        if values.ndim < layer.ndim:
            return None
        return layer.outputs(values).flatten(2)

    def _sizes(self, name: str, values: Tensor) -> Tensor | None:
        rows = self._rows(name, values.detach())
        return None if rows is None else rows.abs().amax((0, 1)).float()

    def _note_largest(self, name: str, sizes: Tensor) -> None:
        sums = self.layers[name]
        sums.largest = sizes if sums.largest is None else torch.maximum(sums.largest, sizes)

    def _note_saturated(self, name: str, values: Tensor, center: float) -> None:
        rows = self._rows(name, values.detach())
        if rows is not None:
            limit = _SATURATED * (1 - center) if center == 0 else _SATURATED - center
            counts = ((rows.float() - center).abs() >= limit).sum((0, 1))
            sums = self.layers[name]
            sums.saturated = counts if sums.saturated is None else sums.saturated + counts
            sums.looked_at += rows.shape[0] * rows.shape[1]


def _least(args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """Return the lower limit of a call of clamp or hardtanh."""
    return kwargs.get("min", kwargs.get("min_val", args[1] if len(args) > 1 else None))


def _variation(rows: Tensor) -> tuple[float, float]:
    """Return ``tr(C)^2 / |C|^2`` of the covariance C of some rows, and the root mean square of the centered rows."""
    centered = rows.double() - rows.double().mean(0)
    gram = centered @ centered.T if rows.shape[0] < rows.shape[1] else centered.T @ centered
    trace, square = float(gram.trace()), float(gram.square().sum())
    return trace**2 / square if square > 0 else 0.0, math.sqrt(trace / max(centered.numel(), 1))
