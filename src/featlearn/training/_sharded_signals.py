"""Signals of a training whose weights are sharded over processes (FSDP2): all of them look at the same steps."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from featlearn.errors import FeatlearnError
from featlearn.training._activation_signals import ActivationLook
from featlearn.training._first_process import broadcast, writes_files
from featlearn.training._signals import SOON, Look, Signals
from featlearn.training._weight_signals import WeightSignals, dense, norm_of


@dataclass(frozen=True)
class Shards:
    """Sharded model, and the plain copies of it and of its start.

    Attributes:
        model: Sharded model in training.
        gathered: Function that returns a context in which the plain copy of the model has its present weights.
        gathered_both: The same for the copies of the model and of its start.
    """

    model: nn.Module
    gathered: Callable[[], AbstractContextManager[Any]]
    gathered_both: Callable[[], AbstractContextManager[Any]]


class ShardedSignals(Signals):
    """Signals of a sharded model, taken from a plain copy whose weights are gathered for each look.

    Clocks differ, and processes that do not gather together would deadlock: the first one decides, at the steps at
    which all of them exchange metrics. It passes its own rows through the model.

    Args:
        shards: Sharded model and its copies.
        model: Plain copy of the model.
        arguments: Other arguments of `Signals`.
    """

    def __init__(self, shards: Shards, model: nn.Module, *arguments: Any, **options: Any) -> None:
        super().__init__(model, *arguments, **options)
        self._shards = shards
        self._soon = self._ends = self._over = False

    def step(
        self, step: int, *, wanted: bool = False, last: bool = False, measured: float = 0.0, together: bool = True
    ) -> Look | None:
        """Look at the model as `Signals.step` does, or prepare a look; all processes must call this.

        Args:
            step: Number of the step.
            wanted: Whether to look at this step if the time allows; that of the first process counts.
            last: Whether training has ended.
            measured: Time of all measurements so far, in seconds.
            together: Whether the processes decide at this step.
        """
        if self._over:
            return None
        return super().step(step, wanted=wanted, last=last, measured=measured, together=together)

    def look_soon(self) -> None:
        """Plan another look after the next decision."""
        self._soon = True

    def end(self) -> None:
        """End the looks of all processes at the next decision."""
        self._ends = True

    def _agreed(self, alone: bool, scheduled: bool, wanted: bool, together: bool) -> tuple[bool, bool, bool]:
        if not together:
            return False, self._affordable, self._due(self._step)
        soon, self._soon = self._soon, False
        alone, scheduled, wanted, soon, self._over = broadcast((alone, scheduled, wanted, soon, self._ends))
        if soon and scheduled and self._planned is None:
            self._planned = self._call + SOON
        return alone, scheduled, wanted

    def _prepare(self, is_next: bool) -> None:
        self._run_whole(partial(super()._prepare, is_next))

    def _look(self, step: int) -> Look:
        look: Look = self._run_whole(partial(super()._look, step))
        return look

    def _run_whole(self, work: Callable[[], Any]) -> Any:
        """Run a function with whole weights; if it fails in one process, raise in all."""
        result, error = None, ""
        with self._shards.gathered_both() if self._weights is None else self._shards.gathered():
            try:
                result = work()
            except Exception as raised:  # a model can raise anything
                error = f"{type(raised).__name__}: {raised}"
        errors: list[Any] = [None] * torch.distributed.get_world_size()
        torch.distributed.all_gather_object(errors, error)
        if any(errors):
            raise FeatlearnError(next(filter(None, errors)))
        return result

    def _look_at_activations(self, weights: WeightSignals) -> ActivationLook | None:
        return super()._look_at_activations(weights) if writes_files() else None

    def _new_weights(self) -> WeightSignals:
        return ShardedWeightSignals(self._shards.model, *self._find(), self._model)


class ShardedWeightSignals(WeightSignals):
    """Signals of the weights of a plain copy, and of the gradients of the sharded model.

    Args:
        source: Sharded model.
        arguments: Arguments of `WeightSignals`, of the plain copy.
    """

    def __init__(self, source: nn.Module, *arguments: Any) -> None:
        super().__init__(*arguments)
        self._sources = {id(p): shard for p, shard in zip(self.parameters, source.parameters(), strict=True)}

    def has_gradients(self) -> bool:
        """Return whether parameters hold gradients that are not all zero, in any process."""
        local = any(bool(dense(shard.grad).any()) for shard in self._sources.values() if shard.grad is not None)
        return bool(self._sum([torch.tensor(float(local))])[0] > 0)

    def arm(self) -> None:
        """Record the norms of the gradients of the next backward pass, by hooks that `disarm` removes."""
        self.disarm()
        self._armed = {}
        for key, shard in self._sources.items():
            if shard.requires_grad and shard.is_leaf:
                note = partial(_note_square, self._armed, key)
                self._handles.append(shard.register_post_accumulate_grad_hook(note))  # type: ignore[no-untyped-call]

    def gradient_norms(self) -> tuple[dict[str, float], float]:
        """Return the norm of the last gradient of each layer, and that of the whole model; NaN if there is none."""
        held = self.has_gradients()
        local, self._armed = self._armed, {}
        if held:
            local = {key: _square(shard.grad) for key, shard in self._sources.items() if shard.grad is not None}
        zero = torch.zeros((), dtype=torch.float64)
        sums = self._sum([local.get(key, zero) for key in self._sources])
        known = self._sum([zero + (key in local) for key in self._sources])
        squares = {key: square for key, square, n in zip(self._sources, sums, known, strict=True) if n > 0}
        norms = {}
        for name, layer in self.layers.items():
            keys = [id(p) for p in self._tensors[name] if id(p) in squares]
            if held and len(keys) == 1 and layer.part is not None:  # one of several matrices in a tensor
                norms[name] = float(norm_of(layer.matrix(_whole(self._sources[keys[0]].grad))))
            elif keys:
                norms[name] = float(sum(squares[key] for key in keys)) ** 0.5
        return norms, float(sum(squares.values())) ** 0.5 if squares else float("nan")

    def _sum(self, values: list[Tensor]) -> Tensor:
        """Return the sums of some numbers over all processes, on the CPU."""
        if not values:
            return torch.zeros(0)
        device = next(iter(self._sources.values())).device
        total = torch.stack([value.double().cpu() for value in values]).to(device)
        torch.distributed.all_reduce(total)
        return total.cpu()


def _note_square(squares: dict[int, Tensor], key: int, shard: Tensor) -> None:
    with torch.no_grad():
        if shard.grad is not None:
            squares[key] = _square(shard.grad)


def _square(gradient: Tensor) -> Tensor:
    """Return the part of this process in the squared norm of a gradient."""
    copies = torch.distributed.get_world_size()
    mesh = getattr(gradient, "device_mesh", None)
    if mesh is not None:
        placements = gradient.placements  # type: ignore[attr-defined]
        copies //= mesh.size()
        for dimension, placement in enumerate(placements):
            copies *= mesh.size(dimension) if placement.is_replicate() else 1
    return norm_of(dense(gradient)).double().square() / copies


def _whole(gradient: Tensor | None) -> Tensor:
    assert gradient is not None
    gather = getattr(gradient, "full_tensor", None)
    return gradient if gather is None else gather()
