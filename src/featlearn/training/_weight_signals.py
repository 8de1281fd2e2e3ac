"""Norms of the gradients of each layer, and its updates from a sample of its weights."""

from __future__ import annotations

import math
import weakref
from collections import deque
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from featlearn.layers import Layer, tensors_behind

_ENTRIES = 4096  # of each layer; the relative error of the norm of a random sample is below 2%
_SIDE = 32  # of the part of each matrix whose singular values are looked at
_LEAST_SIDE = 4
_KEPT = 3  # samples of consecutive steps: two updates, whose cosine is measured


@dataclass(frozen=True)
class Updates:
    """Last updates of the weights of one layer.

    Attributes:
        ratio: Norm of the last update over that of the weights before it. NaN if the weights were zero.
        cosine: Cosine of the last two updates. NaN if there are not two, or one is zero.
        moved: Norm of the change since the initial model over that of the initial weights. NaN if those were zero.
        decay: Cosine of the last update with the weights before it, reversed: 1 for weight decay alone.
        bulk: Median singular value of a part of the matrix over that of the initial model. NaN if unknown.
        top: Largest singular value of the same part over that of the initial model. NaN if unknown.
    """

    ratio: float
    cosine: float
    moved: float
    decay: float = math.nan
    bulk: float = math.nan
    top: float = math.nan


class WeightSignals:
    """Gradients and updates of the layers of a model, between calls in its training loop.

    Args:
        layers: Layers of the model, by name.
        initial: The same layers of the model before training.
        model: The model, without wrappers.

    Attributes:
        layers: Layers whose weights are parameters, or computed from parameters.
        parameters: All parameters of the model.
    """

    def __init__(self, layers: Mapping[str, Layer], initial: Mapping[str, Layer], model: nn.Module) -> None:
        self.layers = {name: layer for name, layer in layers.items() if tensors_behind(layer)}
        self.parameters = list(model.parameters())
        self._tensors = {name: tensors_behind(layer) for name, layer in self.layers.items()}
        self._start = {name: _sample(initial[name]) for name in self.layers if name in initial}
        self._first_values = {name: _singular_values(initial[name]) for name in self._start}
        self._samples: deque[tuple[int, dict[str, Tensor]]] = deque(maxlen=_KEPT)
        self._handles: list[RemovableHandle] = []
        self._armed: dict[int, Tensor] = {}  # norms of the gradients of the last backward pass, by parameter
        weakref.finalize(self, _remove_all, self._handles)

    def take_sample(self, call: int) -> None:
        """Keep a sample of the weights, from which the next updates are measured.

        Args:
            call: Number of the call in the training loop. Only samples of consecutive calls are compared.
        """
        if self._samples and self._samples[-1][0] not in (call - 1, call):
            self._samples.clear()
        if not self._samples or self._samples[-1][0] != call:
            self._samples.append((call, {name: _sample(layer) for name, layer in self.layers.items()}))

    def updates(self) -> dict[str, Updates]:
        """Return the last updates of each layer, NaN where there are no samples of consecutive calls.

        If no layer changed between two calls, as between batches whose gradients are accumulated, there was no update.
        """
        if not self._samples:
            return {}
        last = self._samples[-1][1]
        numbers = []
        for name, now in last.items():
            before = self._samples[-2][1][name] if len(self._samples) > 1 else torch.full_like(now, torch.nan)
            update = (now - before).double()
            earlier = torch.zeros_like(update)
            if len(self._samples) == _KEPT:
                earlier = (before - self._samples[0][1][name]).double()
            start = self._start.get(name, before)
            start = (start if start.shape == now.shape else torch.full_like(now, torch.nan)).to(now)
            norms = [torch.linalg.vector_norm(v.double()) for v in (update, before, earlier, now - start, start)]
            dots = torch.dot(update, earlier), -torch.dot(update, before.double())
            numbers.append(torch.stack([*norms, *dots]))
        if not numbers:
            return {}
        result = {}
        for name, row in zip(last, torch.stack(numbers).tolist(), strict=True):
            update_, before_, earlier_, moved, start_, dot, inward = row
            product = update_ * earlier_
            result[name] = Updates(
                update_ / before_ if before_ else math.nan,
                dot / product if product else math.nan,
                moved / start_ if start_ else math.nan,
                inward / (update_ * before_) if update_ * before_ else math.nan,
                *self._spectrum_change(name),
            )
        if all(of.ratio == 0 or math.isnan(of.ratio) for of in result.values()):
            return {name: replace(of, ratio=math.nan, cosine=math.nan, decay=math.nan) for name, of in result.items()}
        return result

    def _spectrum_change(self, name: str) -> tuple[float, float]:
        """Return the median and the largest singular value of a part of a matrix over those of the start."""
        now, start = _singular_values(self.layers[name]), self._first_values.get(name)
        if now is None or start is None or now.shape != start.shape or not bool(torch.isfinite(now).all()):
            return math.nan, math.nan
        pairs = ((now[len(now) // 2], start[len(now) // 2]), (now[0], start[0]))
        bulk, top = (float(value / before) if before > 0 else math.nan for value, before in pairs)
        return bulk, top

    def is_finite(self) -> bool:
        """Return whether the sampled weights are finite."""
        return not self._samples or all(bool(torch.isfinite(v).all()) for v in self._samples[-1][1].values())

    def frozen(self) -> frozenset[str]:
        """Return the names of the layers none of whose weights require gradients."""
        return frozenset(name for name, tensors in self._tensors.items() if not any(p.requires_grad for p in tensors))

    def low_precision(self) -> frozenset[str]:
        """Return the names of the layers with weights of less than 32 bits, in which small updates are lost."""
        return frozenset(n for n, tensors in self._tensors.items() if any(p.dtype.itemsize < 4 for p in tensors))

    def has_gradients(self) -> bool:
        """Return whether the parameters hold gradients that are not all zero."""
        return any(bool(dense(p.grad).any()) for p in self.parameters if p.grad is not None)

    def arm(self) -> None:
        """Record the norms of the gradients of the next backward pass, by hooks that `disarm` removes."""
        self.disarm()
        self._armed = {}
        for p in self.parameters:
            if p.requires_grad and p.is_leaf:
                self._handles.append(p.register_post_accumulate_grad_hook(partial(_note_norm, self._armed)))  # type: ignore[no-untyped-call]

    def disarm(self) -> None:
        """Remove all hooks."""
        _remove_all(self._handles)

    def gradient_norms(self) -> tuple[dict[str, float], float]:
        """Return the norm of the last gradient of each layer, and that of the whole model; NaN if there is none.

        The gradients that the parameters hold are taken, or else those that the hooks of `arm` recorded.
        """
        held = self.has_gradients()
        total = _norms_of(self.parameters, None if held else self._armed)
        names, rows = [], []
        for name, layer in self.layers.items():
            own = [p for p in self._tensors[name] if p.grad is not None] if held else []
            if held and len(own) == 1 and layer.part is not None:  # one of several matrices in a tensor
                rows.append(norm_of(layer.matrix(dense(own[0].grad))))
            elif (norm := _norms_of(self._tensors[name], None if held else self._armed)) is not None:
                rows.append(norm)
            else:
                continue
            names.append(name)
        if total is None:
            return {}, math.nan
        self._armed = {}
        *of_layers, of_model = torch.stack([row.cpu() for row in (*rows, total)]).tolist()
        return dict(zip(names, of_layers, strict=True)), of_model


def _note_norm(norms: dict[int, Tensor], parameter: Tensor) -> None:
    with torch.no_grad():
        if parameter.grad is not None:
            norms[id(parameter)] = norm_of(dense(parameter.grad))


def _remove_all(handles: list[RemovableHandle]) -> None:
    while handles:
        handles.pop().remove()


def _norms_of(parameters: Iterable[Tensor], noted: Mapping[int, Tensor] | None) -> Tensor | None:
    """Return the joint norm of the gradients of some parameters, held by them or noted by hooks; None without any."""
    if noted is None:
        norms = [norm_of(dense(p.grad)) for p in parameters if p.grad is not None]
    else:
        norms = [noted[id(p)] for p in parameters if id(p) in noted]
    return torch.linalg.vector_norm(torch.stack([n.cpu() for n in norms])) if norms else None


def norm_of(gradient: Tensor) -> Tensor:
    """Return the norm of a gradient, summed with at least 32 bits."""
    gradient = torch.view_as_real(gradient.resolve_conj()) if gradient.is_complex() else gradient
    precision = torch.float64 if gradient.dtype == torch.float64 else torch.float32
    norm: Tensor = torch.linalg.vector_norm(gradient.detach(), dtype=precision)
    return norm.float()


def dense(tensor: Tensor | None) -> Tensor:
    """Return the entries of a gradient in this process."""
    assert tensor is not None
    tensor = tensor.to_local() if hasattr(tensor, "to_local") else tensor
    return tensor if tensor.layout == torch.strided else tensor.coalesce().values()


def _sample(layer: Layer) -> Tensor:
    """Return spread entries of the weights of a layer, on the CPU."""
    tensors = tensors_behind(layer)
    parts = []
    for tensor in tensors:
        held = dense(tensor.detach())
        if layer.part is not None and len(tensors) == 1:  # one of several matrices in a tensor
            held = layer.matrix(held)
        held = torch.view_as_real(held.resolve_conj()) if held.is_complex() else held
        step = max(1, held.numel() // _ENTRIES)
        while math.gcd(step, held.shape[-1] if held.ndim else 1) > 1:  # or only some columns would be looked at
            step += 1
        part = held.reshape(-1)[::step]
        parts.append((part.float() if part.dtype.itemsize < 4 else part).cpu().clone())
    return torch.cat(parts)


def _singular_values(layer: Layer) -> Tensor | None:
    """Return the singular values of spread rows and columns of a weight matrix; None if it is computed or small."""
    tensors = tensors_behind(layer)
    if len(tensors) != 1 or tensors[0] is not layer.module._parameters.get(layer.parameter) or layer.is_complex:
        return None
    matrix = layer.matrix(dense(tensors[0].detach()))
    if matrix.ndim != 3 or min(matrix.shape[1:]) < _LEAST_SIDE:
        return None
    rows, columns = (max(1, size // _SIDE) for size in matrix.shape[1:])
    part = matrix[0, ::rows, ::columns][:_SIDE, :_SIDE].float().cpu()
    return torch.linalg.svdvals(part) if bool(torch.isfinite(part).all()) else None
