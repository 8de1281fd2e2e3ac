"""A device for tests without an accelerator: tensors that say they are elsewhere, and compute on the CPU.

Mixing them with tensors of the CPU raises, as it does on a GPU. The type "lazy" has dispatch keys in every build of
torch and needs no library.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map

DEVICE = torch.device("lazy", 0)


class OtherTensor(Tensor):
    """A tensor on the other device, around one on the CPU."""

    inner: Tensor
    __torch_function__ = torch._C._disabled_torch_function_impl

    @staticmethod
    def __new__(cls, inner: Tensor) -> OtherTensor:
        options = {"strides": inner.stride(), "storage_offset": inner.storage_offset(), "dtype": inner.dtype}
        made = torch.Tensor._make_wrapper_subclass(cls, inner.shape, device=DEVICE, requires_grad=False, **options)
        made.inner = inner
        return made

    @classmethod
    def __torch_dispatch__(cls, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return _computed(func, args, kwargs or {})


class OtherDevice(TorchDispatchMode):
    """The block in which tensors can be made on the device and moved to it."""

    def __torch_dispatch__(self, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return _computed(func, args, kwargs or {})


def moved(model: nn.Module) -> nn.Module:
    """Put a model's parameters and buffers on the other device, in place."""
    for module in model.modules():
        for name, parameter in list(module.named_parameters(recurse=False)):
            setattr(module, name, nn.Parameter(OtherTensor(parameter.detach().clone())))
        for name, buffer in list(module.named_buffers(recurse=False)):
            setattr(module, name, OtherTensor(buffer.clone()))
    return model


def _computed(func: Any, args: Any, kwargs: Any) -> Any:
    on_cpu, on_device = False, False

    def bare(value: Any) -> Any:
        nonlocal on_cpu, on_device
        on_device |= isinstance(value, OtherTensor)
        # A number may be on the CPU.
        on_cpu |= isinstance(value, Tensor) and not isinstance(value, OtherTensor) and value.ndim > 0
        return value.inner if isinstance(value, OtherTensor) else value

    plain, options = tree_map(bare, args), tree_map(bare, kwargs)
    copies = func in (torch.ops.aten._to_copy.default, torch.ops.aten.copy_.default)
    if on_cpu and on_device and not copies:
        raise RuntimeError(f"Expected all tensors to be on the same device, but found cpu and {DEVICE}: {func}")
    asked = kwargs.get("device")
    if asked is not None:
        on_device = torch.device(asked).type == DEVICE.type
        options["device"] = torch.device("cpu")
    result = func(*plain, **options)
    if func._schema.name.endswith("_"):  # in place
        return args[0]
    return tree_map(lambda value: OtherTensor(value) if on_device and type(value) is Tensor else value, result)
