"""The state of a training between two updates: all that the next one depends on."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import UninitializedParameter
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from featlearn.errors import InputError
from featlearn.runs import Run


@dataclass
class Training:
    """A training that can be written down and taken up again.

    Attributes:
        model: What is trained.
        optimizer: With its momenta.
        scheduler: Of the learning rate, or None.
        generator: Shuffles the data.
        devices: Accelerators whose global generators the model may draw from.
        settings: What must not change between start and resumption.
        order: Rows in the order of the present epoch.
        losses: Loss before each update.
    """

    model: nn.Module
    optimizer: Optimizer
    scheduler: LRScheduler | None
    generator: torch.Generator
    devices: Sequence[int]
    settings: Mapping[str, Any]
    order: Tensor
    losses: list[float]

    def save(self, run: Run) -> None:
        """Write a checkpoint, named by the number of updates made."""
        run.save_checkpoint(
            len(self.losses),
            {
                "settings": dict(self.settings),
                "model": dict(self.model.state_dict()),
                "buffers": _unsaved_buffers(self.model),
                "optimizer": self.optimizer.state_dict(),
                "scheduler": None if self.scheduler is None else _plain(self.scheduler.state_dict()),
                "generator": self.generator.get_state(),
                "random": torch.get_rng_state(),
                "devices": [torch.cuda.get_rng_state(device) for device in self.devices],
                "order": self.order,
                "losses": torch.tensor(self.losses, dtype=torch.float64),
            },
        )

    def load(self, state: Mapping[str, Any]) -> None:
        """Take up the training where a checkpoint left it; the global generators are set as they were.

        Raises:
            InputError: It is not the state of this training; nothing has been changed then.
        """
        if not state.keys() >= {"settings", "model", "optimizer", "generator", "random", "order", "losses"}:
            raise InputError("the checkpoint of the run was not written by fit: start a run of its own")
        check_same_training(state["settings"], self.settings)
        _check_same_model(state["model"], self.model)
        groups = (state["optimizer"]["param_groups"], self.optimizer.param_groups)
        before, now = ([len(group["params"]) for group in of] for of in groups)
        if before != now:
            raise InputError(f"the run began with {sum(before)} trained parameters, and there are {sum(now)} now")
        self.model.load_state_dict(state["model"])
        for name, value in state.get("buffers", {}).items():
            path, _, own = name.rpartition(".")
            module = self.model.get_submodule(path)
            there = module._buffers.get(own)
            module._buffers[own] = value if there is None else value.to(there.device)
        self.optimizer.load_state_dict(state["optimizer"])
        if self.scheduler is not None:
            self.scheduler.load_state_dict(state["scheduler"])
        self.generator.set_state(state["generator"])
        torch.set_rng_state(state["random"])
        for device, of_device in zip(self.devices, state["devices"], strict=False):
            torch.cuda.set_rng_state(of_device, device)
        self.order = state["order"]
        self.losses = state["losses"].tolist()


def check_same_training(before: Mapping[str, Any], now: Mapping[str, Any]) -> None:
    """Refuse to go on with other data or settings than the run began with."""
    changed = [
        f"{name} was {before[name]!r} and is {value!r}"
        for name, value in now.items()
        if name in before and before[name] != value  # older checkpoints lack some
    ]
    if changed:
        raise InputError(
            f"the run began with other settings: {'; '.join(changed)}. Take them back, or start a run of its own"
        )


def _check_same_model(before: Mapping[str, Any], model: nn.Module) -> None:
    if other := changed_tensors(before, model.state_dict()):
        raise InputError(f"the run began with a model of another architecture: they differ in {', '.join(other[:5])}")


def changed_tensors(before: Mapping[str, Any], now: Mapping[str, Any]) -> list[str]:
    """Return the names that only one of two state_dicts has, then those of another shape."""
    shapes = [
        name for name in now if name in before and _has_shape(now[name]) and now[name].shape != before[name].shape
    ]
    return sorted(before.keys() ^ now.keys()) + shapes


def _has_shape(value: Any) -> bool:
    return isinstance(value, Tensor) and not isinstance(value, UninitializedParameter)


def _unsaved_buffers(model: nn.Module) -> dict[str, Tensor]:
    """Buffers that a state_dict leaves out; a forward pass may change them as well."""
    return {
        f"{path}.{name}" if path else name: buffer
        for path, module in model.named_modules()
        for name, buffer in module._buffers.items()
        if buffer is not None and name in module._non_persistent_buffers_set
    }


def model_mark(model: nn.Module) -> str:
    """Return a short mark of the weights and buffers of a model."""
    state = {name: value for name, value in model.state_dict().items() if _has_shape(value)}
    return tensor_mark(*(state[name] for name in sorted(state)))


def tensor_mark(*tensors: Tensor) -> str:
    """Return a short mark of tensors, to distinguish other data."""
    digest = hashlib.blake2b(digest_size=8)
    for part in tensors:
        digest.update(f"{tuple(part.shape)} {part.dtype}".encode())
        flat = part.detach().cpu().resolve_conj().resolve_neg().reshape(-1).contiguous()
        digest.update(flat.view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()


def _plain(state: Mapping[str, Any]) -> dict[str, Any]:
    """A schedule's state without its functions, which belong to the code; as torch leaves out those of LambdaLR."""
    return {name: value for name, value in state.items() if not callable(value)}
