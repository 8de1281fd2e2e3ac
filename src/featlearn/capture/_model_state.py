"""Leaving a model exactly as it was found, whatever happens in between."""

from __future__ import annotations

import random
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

import numpy as np
import torch
from torch import nn
from torch.nn.parameter import UninitializedParameter
from torch.nn.utils import parametrize
from torch.nn.utils.prune import BasePruningMethod
from torch.nn.utils.spectral_norm import SpectralNorm
from torch.nn.utils.weight_norm import WeightNorm

from featlearn.errors import InputError, UnsupportedModelError

_COMPUTED = "_featlearn_computed"


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
    """Restore training flags, requires_grad and buffers of a model at the end, also after an exception.

    Parameters are taken to be left alone by a forward pass, but for embeddings with ``max_norm``, which
    renormalize their weight when they are called.
    """
    modules = list(model.modules())
    training = [(module, module.training) for module in modules]
    requires_grad = [(p, p.requires_grad) for p in model.parameters()]
    registered = [(module, dict(module._buffers)) for module in modules]
    # Weights that hooks compute (the older weight_norm and spectral_norm, pruning) are plain attributes.
    attributes = [(m, {k: v for k, v in m.__dict__.items() if isinstance(v, torch.Tensor)}) for m in modules]
    written = [b for b in model.buffers() if not b.is_inference()] + [
        m.weight for m in modules if isinstance(m, nn.Embedding | nn.EmbeddingBag) and m.max_norm is not None
    ]
    values = [(t, t.detach().clone()) for t in written]
    try:
        yield
    finally:
        for module, flag in training:
            module.training = flag
        for parameter, flag in requires_grad:
            parameter.requires_grad_(flag)
        for module, buffers in registered:
            module._buffers.update(buffers)
        for module, tensors in attributes:
            module.__dict__.update(tensors)
        with torch.no_grad():
            for tensor, value in values:
                # Not by the version: writes through .data leave it as it was.
                if not torch.equal(tensor, value):
                    tensor.copy_(value)


@contextmanager
def at_rest(model: nn.Module) -> Iterator[None]:
    """Let the weights of a model be read as its forward pass has them in evaluation mode.

    Reading a weight may compute it, and change the model: spectral_norm iterates in training mode. Weights that hooks
    compute are those of the last forward pass, and older than the last update.
    """
    with preserved(model), torch.no_grad():
        model.eval()
        refresh_hooked_weights(model)
        yield


def refresh_hooked_weights(model: nn.Module) -> None:
    """Compute again the weights that hooks compute before each call: since the last step they may be stale."""
    for module in model.modules():
        for hook in module._forward_pre_hooks.values():
            if isinstance(hook, WeightNorm | SpectralNorm | BasePruningMethod):
                hook(module, None)


@contextmanager
def parametrizations_computed_once(model: nn.Module) -> Iterator[None]:
    """Give each parametrized tensor of a model one value, so that its gradient can be asked for by identity.

    Not by `torch.nn.utils.parametrize.cached`, which takes a module and its deep copies for the same, and
    whose values would be computed inside checkpointed regions, or not, from one pass to the next.
    """
    changed: list[tuple[nn.Module, type[nn.Module]]] = []
    try:
        for module in model.modules():
            if parametrize.is_parametrized(module):
                kind = type(module)
                computed = {name: getattr(module, name) for name in module.parametrizations}  # type: ignore[union-attr]
                changed.append((module, kind))
                module.__dict__[_COMPUTED] = computed
                module.__class__ = type(kind.__name__, (kind,), {name: _computed(name) for name in computed})
        yield
    finally:
        for module, kind in changed:
            module.__class__ = kind
            module.__dict__.pop(_COMPUTED, None)


def _computed(name: str) -> property:
    return property(lambda module: module.__dict__[_COMPUTED][name])


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


def check_shaped(model: nn.Module, what: str = "the model") -> None:
    """Refuse parameters of lazy layers that have no shape yet."""
    for name, parameter in model.named_parameters():
        if isinstance(parameter, UninitializedParameter):
            raise InputError(
                f"{what} has no weights yet in {name!r}: run the model once so that lazy layers take shape"
            )


def check_parameters(model: nn.Module, what: str = "the model") -> None:
    """Refuse parameters that are not finite, or that lie on several devices."""
    check_shaped(model, what)
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


def check_batch_statistics(model: nn.Module, what: str = "the model") -> None:
    """Refuse batch norms that mix samples in evaluation mode as well, for they keep no running statistics."""
    for name, module in model.named_modules():
        if isinstance(module, nn.modules.batchnorm._BatchNorm) and module.running_mean is None:
            raise UnsupportedModelError(
                f"{name or 'model'} ({type(module).__name__}) of {what} keeps no running statistics, so that it mixes "
                "samples in evaluation mode as well and gradients per sample have no meaning: build it with "
                "track_running_stats=True"
            )


def check_training_mode(model: nn.Module, what: str = "the model") -> None:
    """Refuse modules whose training mode mixes samples, draws random numbers or changes their own state."""
    named = [(f"{name or 'model'} ({type(module).__name__})", module) for name, module in model.named_modules()]
    found = [name for name, module in named if module.training and _acts_in_training(module)]
    if found:
        shown = ", ".join(found[:3]) + (f" and {len(found) - 3} more" if len(found) > 3 else "")
        raise InputError(
            f"{what} is in training mode, where {shown} would mix samples or draw random numbers, so that gradients "
            'per sample have no meaning: call its eval() first, or pass train_mode="eval" to switch for the '
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
    return any(isinstance(hook, SpectralNorm) for hook in module._forward_pre_hooks.values())
