"""State of a training between two updates, complete enough to resume it to the same bits."""

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
    """Training that can be saved as a checkpoint and resumed.

    Attributes:
        model: Model that is trained.
        optimizer: Optimizer, including its momenta.
        scheduler: Scheduler of the learning rate, or None.
        generator: Generator that shuffles the data.
        devices: Indices of CUDA devices whose global generators the model may draw from.
        settings: Settings that must be the same when the training is resumed.
        order: Order of the rows in the current epoch.
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
        state = {
            "settings": dict(self.settings),
            "model": dict(self.model.state_dict()),
            "buffers": _unsaved_buffers(self.model),
            "optimizer": self.optimizer.state_dict(),
            "scheduler": None,
            "generator": self.generator.get_state(),
            "random": torch.get_rng_state(),
            "devices": [torch.cuda.get_rng_state(device) for device in self.devices],
            "order": self.order,
            "losses": torch.tensor(self.losses, dtype=torch.float64),
        }
        if self.scheduler is not None:  # without functions, which belong to the code, as torch does for LambdaLR
            state["scheduler"] = {k: v for k, v in self.scheduler.state_dict().items() if not callable(v)}
        run.save_checkpoint(len(self.losses), state)

    def load(self, state: Mapping[str, Any]) -> None:
        """Resume the training from a checkpoint, including the states of the global generators.

        Args:
            state: State written by `save`.

        Raises:
            InputError: If the state belongs to another training. Nothing has been changed then.
        """
        if not state.keys() >= {"settings", "model", "optimizer", "generator", "random", "order", "losses"}:
            raise InputError("The checkpoint of the run was not written by fit. Pass the folder of another run.")
        changed = [
            f"{name} was {state['settings'][name]!r} and is {value!r}"
            for name, value in self.settings.items()
            if name in state["settings"] and state["settings"][name] != value  # older checkpoints lack some
        ]
        if changed:
            raise InputError(
                f"The run began with other settings: {'; '.join(changed)}. Restore them, or start a new run."
            )
        if other := changed_tensors(state["model"], self.model.state_dict()):
            raise InputError(
                f"model must have the architecture that the run began with, but differs in {', '.join(other[:5])}."
            )
        groups = (state["optimizer"]["param_groups"], self.optimizer.param_groups)
        before, now = ([len(group["params"]) for group in of] for of in groups)
        if before != now:
            raise InputError(
                f"model must have the {sum(before)} trained parameters that the run began with, got {sum(now)}."
            )
        self.model.load_state_dict(state["model"])
        for path, value in state.get("buffers", {}).items():
            module_path, _, name = path.rpartition(".")
            buffers = self.model.get_submodule(module_path)._buffers
            old = buffers.get(name)
            buffers[name] = value if old is None else value.to(old.device)
        self.optimizer.load_state_dict(state["optimizer"])
        if self.scheduler is not None:
            self.scheduler.load_state_dict(state["scheduler"])
        self.generator.set_state(state["generator"])
        torch.set_rng_state(state["random"])
        for device, device_state in zip(self.devices, state["devices"], strict=False):
            torch.cuda.set_rng_state(device_state, device)
        self.order = state["order"]
        self.losses = state["losses"].tolist()


def changed_tensors(before: Mapping[str, Any], now: Mapping[str, Any]) -> list[str]:
    """Return the names that only one of two state_dicts has, then the names whose shapes differ."""
    common = [name for name in now if name in before and _has_shape(now[name])]
    return sorted(before.keys() ^ now.keys()) + [name for name in common if now[name].shape != before[name].shape]


def _has_shape(value: Any) -> bool:
    return isinstance(value, Tensor) and not isinstance(value, UninitializedParameter)


def _unsaved_buffers(model: nn.Module) -> dict[str, Tensor]:
    """Return the buffers that a state_dict omits; a forward pass may change them too."""
    return {
        f"{path}.{name}" if path else name: buffer
        for path, module in model.named_modules()
        for name, buffer in module._buffers.items()
        if buffer is not None and name in module._non_persistent_buffers_set
    }


def model_mark(model: nn.Module) -> str:
    """Return a short hash of the weights and buffers of a model."""
    return tensor_mark(*(value for _, value in sorted(model.state_dict().items()) if _has_shape(value)))


def tensor_mark(*tensors: Tensor) -> str:
    """Return a short hash of the shapes, dtypes and values of tensors."""
    digest = hashlib.blake2b(digest_size=8)
    for part in tensors:
        digest.update(f"{tuple(part.shape)} {part.dtype}".encode())
        flat = part.detach().cpu().resolve_conj().resolve_neg().reshape(-1).contiguous()
        digest.update(flat.view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()
