"""Leaving a model exactly as it was found, whatever happens in between."""

from __future__ import annotations

import random
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

import numpy as np
import torch
from torch import nn
from torch.nn.utils import parametrize

from featlearn.errors import InputError, UnsupportedModelError

__all__ = ["check_parameters", "check_training_mode", "eager", "preserved", "preserved_rng"]


@contextmanager
def preserved_rng() -> Iterator[None]:
    """Give every global random generator (torch, its accelerators, numpy, python) its state back."""
    cpu = torch.get_rng_state()
    cuda = torch.cuda.get_rng_state_all() if torch.cuda.is_initialized() else None  # type: ignore[no-untyped-call]
    python, numpy = random.getstate(), np.random.get_state()  # noqa: NPY002  # the legacy global generator is meant
    try:
        yield
    finally:
        torch.set_rng_state(cpu)
        if cuda is not None:
            torch.cuda.set_rng_state_all(cuda)
        random.setstate(python)
        np.random.set_state(numpy)  # noqa: NPY002


@contextmanager
def preserved(model: nn.Module) -> Iterator[None]:
    """Restore training flags, requires_grad and buffers of a model at the end, also after an exception."""
    training = [(module, module.training) for module in model.modules()]
    requires_grad = [(p, p.requires_grad) for p in model.parameters()]
    buffers = [(b, b.detach().clone(), b._version) for b in model.buffers() if not b.is_inference()]
    try:
        yield
    finally:
        for module, flag in training:
            module.training = flag
        for parameter, flag in requires_grad:
            parameter.requires_grad_(flag)
        with torch.no_grad():
            for buffer, value, version in buffers:
                if buffer._version != version:
                    buffer.copy_(value)


@contextmanager
def eager() -> Iterator[None]:
    """Run modules one by one with gradients: no compiled code, fused attention or inference mode.

    Hooks added to a compiled model never fire, and the fused attention path calls no module at all.
    """
    fast_path = torch.backends.mha.get_fastpath_enabled()
    with ExitStack() as stack:
        # Nothing has been compiled in a process that never loaded the compiler, and loading it takes seconds.
        if "torch._dynamo" in sys.modules:
            stack.enter_context(torch.compiler.set_stance("force_eager"))
        stack.enter_context(torch.inference_mode(False))
        stack.enter_context(torch.enable_grad())
        stack.callback(torch.backends.mha.set_fastpath_enabled, fast_path)
        torch.backends.mha.set_fastpath_enabled(False)
        yield


def check_parameters(model: nn.Module, what: str = "the model") -> None:
    """Refuse parameters that are not finite, or that lie on several devices."""
    devices: dict[torch.device, str] = {}
    for name, parameter in model.named_parameters():
        if parameter.is_inference():
            raise UnsupportedModelError(
                f"{what} was built under torch.inference_mode, so nothing can be differentiated through "
                f"{name!r}: build it outside"
            )
        devices.setdefault(parameter.device, name)
        if parameter.device.type != "meta" and parameter.is_floating_point():
            # A sum is finite unless an entry is not (or the sum overflows): one cheap pass, then the exact one.
            total = parameter.detach().sum()
            if not torch.isfinite(total) and not torch.isfinite(parameter.detach()).all():
                raise InputError(f"{what} has NaN or infinite entries in parameter {name!r}")
    if len(devices) > 1:
        places = ", ".join(f"{device} ({name!r})" for device, name in devices.items())
        raise InputError(f"{what} lies on several devices: {places}; move it to one with model.to(device)")
    if any(device.type == "meta" for device in devices):
        raise InputError(f"{what} has no values (device meta): load its weights first")


def check_training_mode(model: nn.Module) -> None:
    """Refuse modules whose training mode mixes samples, draws random numbers or changes their own state."""
    found = [
        f"{name or 'model'} ({type(module).__name__})"
        for name, module in model.named_modules()
        if module.training and _acts_in_training(module)
    ]
    if found:
        shown = ", ".join(found[:3]) + (f" and {len(found) - 3} more" if len(found) > 3 else "")
        raise InputError(
            f"in training mode {shown} mixes samples or draws random numbers, so that gradients per sample "
            'have no meaning: call model.eval() first, or pass train_mode="eval" to switch for the '
            "measurement and back"
        )


def _acts_in_training(module: nn.Module) -> bool:
    if isinstance(module, nn.modules.batchnorm._BatchNorm):
        return True
    if isinstance(module, nn.modules.instancenorm._InstanceNorm):
        return module.track_running_stats
    if isinstance(module, nn.modules.dropout._DropoutNd):
        return module.p > 0
    if isinstance(module, nn.MultiheadAttention | nn.RNNBase):
        return module.dropout > 0
    if isinstance(module, nn.RReLU):
        return True
    if parametrize.is_parametrized(module):
        kinds = {type(p).__name__ for p in module.parametrizations.modules()}  # type: ignore[union-attr]
        return "_SpectralNorm" in kinds
    hooks = {type(hook).__name__ for hook in module._forward_pre_hooks.values()}
    return "SpectralNorm" in hooks
