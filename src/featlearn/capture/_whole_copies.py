"""Plain copies of models whose weights are sharded over processes (FSDP2), with weights only while they are used."""

from __future__ import annotations

import copy
import inspect
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn


def is_sharded(model: nn.Module) -> bool:
    """Return whether weights are sharded over processes (FSDP2), which must then all make the same passes."""
    return any(hasattr(p, "full_tensor") for p in model.parameters()) or any(map(_is_fsdp, model.modules()))


def _is_fsdp(module: nn.Module) -> bool:
    return any(kind.__name__ == "FSDPModule" for kind in type(module).__mro__)


class WholeCopy:
    """Plain copy of a sharded model, whose memory is free except in the block of `gathered`.

    All processes must create it, and enter the block, together.

    Args:
        model: Module whose parameters are sharded by ``torch.distributed.fsdp.fully_shard``.
        now: Whether the copy has the present weights rather than the current ones of each block; this process keeps
            its shards of them.

    Attributes:
        module: The copy, of the original classes.
    """

    def __init__(self, model: nn.Module, *, now: bool) -> None:
        _reshard(model)
        self.module = _without_shards(model)
        self._model = model
        self._shards = {name: t.detach().clone() for name, t in _tensors(model)} if now else None
        self._free()

    @contextmanager
    def gathered(self) -> Iterator[nn.Module]:
        """Gather the weights from all processes for a block.

        Yields:
            The copy.
        """
        _reshard(self._model)
        source = dict(_tensors(self._model)) if self._shards is None else self._shards
        try:
            with torch.inference_mode(False), torch.no_grad():
                for name, tensor in _tensors(self.module):
                    tensor.untyped_storage().resize_(tensor.numel() * tensor.element_size())
                    tensor.copy_(_whole(source[name]))
                if self._shards is None:
                    for name, parameter in self.module.named_parameters():
                        parameter.requires_grad_(source[name].requires_grad)  # some may be frozen later
            yield self.module
        finally:
            self._free()

    def _free(self) -> None:
        for _, tensor in _tensors(self.module):
            tensor.untyped_storage().resize_(0)


def _reshard(model: nn.Module) -> None:
    """Remove whole weights that a forward pass gathered; those of the shards are the current ones."""
    for module in filter(_is_fsdp, model.modules()):
        module.reshard()  # type: ignore[operator]


def _tensors(model: nn.Module) -> Iterable[tuple[str, Tensor]]:
    """Return the parameters and buffers by name, each once."""
    yield from model.named_parameters()
    yield from model.named_buffers()


def _whole(tensor: Tensor) -> Tensor:
    gather = getattr(tensor, "full_tensor", None)
    return tensor.detach() if gather is None else gather().detach()


def _without_shards(model: nn.Module) -> nn.Module:
    """Return a copy of a sharded model with parameters of the whole shapes, not initialized.

    ``copy.deepcopy`` refuses the classes that ``fully_shard`` makes: the modules have their original classes meanwhile.
    """
    from torch.distributed.fsdp import FSDPModule

    memo: dict[int, Any] = {}
    for parameter in model.parameters():
        memo[id(parameter)] = nn.Parameter(
            torch.empty(parameter.shape, dtype=parameter.dtype, device=parameter.device), parameter.requires_grad
        )
    classes: dict[nn.Module, Any] = {module: type(module) for module in filter(_is_fsdp, model.modules())}
    for module in model.modules():
        for name, value in vars(module).items():
            if name.startswith("__composable_api") and isinstance(value, dict):
                memo[id(value)] = type(value)()  # the state of FSDP
            elif name.endswith("_hooks") and isinstance(value, dict):
                memo[id(value)] = type(value)((key, hook) for key, hook in value.items() if not _of_fsdp(hook))
    try:
        for module, kind in classes.items():
            module.__class__ = next(c for c in kind.__mro__[1:] if not issubclass(c, FSDPModule))
        return copy.deepcopy(model, memo)
    finally:
        for module, kind in classes.items():
            module.__class__ = kind


def _of_fsdp(hook: Any) -> bool:
    """Return whether a hook gathers or frees the weights of a sharded module."""
    function = inspect.unwrap(getattr(hook, "func", hook))
    owner = getattr(function, "__self__", None)
    return "fsdp" in (type(owner).__module__ if owner is not None else getattr(function, "__module__", ""))
