"""State of a model: restoring it after a measurement, and checks before."""

from __future__ import annotations

import random
import sys
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext

import numpy as np
import torch
from torch import nn
from torch.nn.parameter import UninitializedParameter
from torch.nn.utils import parametrize
from torch.nn.utils.prune import BasePruningMethod
from torch.nn.utils.spectral_norm import SpectralNorm
from torch.nn.utils.weight_norm import WeightNorm

from featlearn.errors import InputError, UnsupportedModelError

COMPUTED = "_featlearn_computed"
"""Attribute of a module with its parametrized tensors while they are computed once."""


@contextmanager
def preserved_rng() -> Iterator[None]:
    """Restore the state of every global random generator (torch, CUDA, numpy, python) at the end of a block."""
    cpu = torch.get_rng_state()
    cuda = torch.cuda.get_rng_state_all() if torch.cuda.is_initialized() else None  # type: ignore[no-untyped-call]
    python, numpy = random.getstate(), np.random.get_state()  # noqa: NPY002  # the legacy global generator
    try:
        yield
    finally:
        torch.set_rng_state(cpu)
        if cuda is not None:
            torch.cuda.set_rng_state_all(cuda)
        random.setstate(python)
        np.random.set_state(numpy)  # noqa: NPY002


def without_autocast(device: torch.device) -> AbstractContextManager[object]:
    """Return a context in which autocast, if it is on, does not round products to half precision.

    Args:
        device: Device of the products.
    """
    on = torch.amp.is_autocast_available(device.type) and torch.is_autocast_enabled(device.type)
    return torch.autocast(device.type, enabled=False) if on else nullcontext()


@contextmanager
def preserved(model: nn.Module) -> Iterator[None]:
    """Restore training flags, requires_grad and buffers of a model at the end of a block, also after an exception.

    A forward pass is assumed not to change parameters, except embeddings with ``max_norm``, which renormalize their
    weight when they are called.
    """
    # TorchScript modules hold their state elsewhere.
    modules = [m for m in model.modules() if not isinstance(m, torch.jit.ScriptModule)]
    training = [(module, module.training) for module in modules]
    requires_grad = [(p, p.requires_grad) for p in model.parameters()]
    registered = [(module, dict(module._buffers)) for module in modules]
    # Weights that hooks compute (the older weight_norm and spectral_norm, pruning) are plain attributes.
    attributes = [(m, dict(m.__dict__)) for m in modules]
    written = [b for b in model.buffers() if not b.is_inference() and b.layout == torch.strided] + [
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
        for module, before in attributes:
            _restore_tensors(module.__dict__, before)
        with torch.no_grad():
            for tensor, value in values:
                # The values are compared, because writes through .data do not change the version.
                if not torch.equal(tensor, value):
                    tensor.copy_(value)


def _restore_tensors(now: dict[str, object], before: Mapping[str, object]) -> None:
    """Put back the attributes that were tensors, or are now: a forward pass may keep activations with their graph."""
    for name in [name for name, value in now.items() if isinstance(value, torch.Tensor) and name not in before]:
        del now[name]
    for name, value in before.items():
        if isinstance(value, torch.Tensor) or isinstance(now.get(name), torch.Tensor):
            now[name] = value


@contextmanager
def at_rest(model: nn.Module) -> Iterator[None]:
    """Switch a model to evaluation mode, with up-to-date weights, while its weights are read.

    Reading a weight may compute it and change the model: spectral_norm iterates in training mode. Weights that hooks
    compute are those of the last forward pass, which may be older than the last update.

    Args:
        model: Module, which is restored at the end.
    """
    with preserved(model), torch.no_grad():
        model.eval()
        refresh_hooked_weights(model)
        yield


def refresh_hooked_weights(model: nn.Module) -> None:
    """Recompute the weights that hooks compute before each call, which may be older than the last update."""
    for module in model.modules():
        for hook in module._forward_pre_hooks.values():
            if isinstance(hook, WeightNorm | SpectralNorm | BasePruningMethod):
                hook(module, None)


@contextmanager
def parametrizations_computed_once(model: nn.Module) -> Iterator[None]:
    """Compute each parametrized tensor of a model once, so that its gradient can be taken by identity.

    `torch.nn.utils.parametrize.cached` is not used: it confuses a module with its deep copies, and whether its values
    are computed inside checkpointed regions can change from one pass to the next.
    """
    changed: list[tuple[nn.Module, type[nn.Module]]] = []
    try:
        for module in model.modules():
            if parametrize.is_parametrized(module):
                kind = type(module)
                computed = {name: getattr(module, name) for name in module.parametrizations}  # type: ignore[union-attr]
                changed.append((module, kind))
                module.__dict__[COMPUTED] = computed
                module.__class__ = type(kind.__name__, (kind,), {name: _computed(name) for name in computed})
        yield
    finally:
        for module, kind in changed:
            module.__class__ = kind
            module.__dict__.pop(COMPUTED, None)


def _computed(name: str) -> property:
    return property(lambda module: module.__dict__[COMPUTED][name])


@contextmanager
def eager() -> Iterator[None]:
    """Run modules one by one with gradients: without compiled code, fused attention and inference mode.

    Hooks added to a compiled model are not called, and the fused attention path calls no module.
    """
    fast_path = torch.backends.mha.get_fastpath_enabled()
    with ExitStack() as stack:
        # Without the compiler loaded, nothing has been compiled; loading it takes seconds.
        if "torch._dynamo" in sys.modules:
            stack.enter_context(torch.compiler.set_stance("force_eager"))
        stack.enter_context(torch.inference_mode(False))
        stack.enter_context(torch.enable_grad())
        stack.callback(torch.backends.mha.set_fastpath_enabled, fast_path)
        torch.backends.mha.set_fastpath_enabled(False)
        yield


def check_shaped(model: nn.Module, what: str = "the model") -> None:
    """Refuse parameters of lazy layers that have no shape yet.

    Args:
        model: Module to check.
        what: Name of the model in messages.

    Raises:
        InputError: A parameter is not initialized.
    """
    for name, parameter in model.named_parameters():
        if isinstance(parameter, UninitializedParameter):
            raise InputError(f"{what} has no weights yet in {name!r}: run the model once to initialize lazy layers.")


def check_parameters(model: nn.Module, what: str = "the model") -> None:
    """Refuse parameters that are not finite, or are on several devices."""
    check_shaped(model, what)
    devices: dict[torch.device, str] = {}
    for name, parameter in model.named_parameters():
        if parameter.is_inference():
            raise UnsupportedModelError(
                f"{what} was built under torch.inference_mode, so {name!r} cannot be differentiated. Build it outside."
            )
        devices.setdefault(parameter.device, name)
        if parameter.device.type != "meta" and parameter.is_floating_point():
            # A finite sum implies finite entries: a cheap test before the exact one.
            total = parameter.detach().sum()
            if not torch.isfinite(total) and not torch.isfinite(parameter.detach()).all():
                raise InputError(f"{what} has NaN or infinite entries in parameter {name!r}.")
    if len(devices) > 1:
        places = ", ".join(f"{device} ({name!r})" for device, name in devices.items())
        raise InputError(f"{what} is on several devices: {places}. Move it to one with model.to(device).")
    if any(device.type == "meta" for device in devices):
        raise InputError(f"{what} has no values (device meta). Load its weights first.")


def check_model(model: nn.Module, what: str, train_mode: str) -> None:
    """Refuse a model whose gradients per sample cannot be measured.

    Args:
        model: Module to check.
        what: Name of the model in messages.
        train_mode: ``"error"`` refuses modules that act differently in training mode.
    """
    check_parameters(model, what)
    for name, module in model.named_modules():
        if isinstance(module, nn.modules.batchnorm._BatchNorm) and module.running_mean is None:
            raise UnsupportedModelError(
                f"{name or 'model'} ({type(module).__name__}) of {what} has no running statistics, so it mixes samples "
                "in evaluation mode too and gradients per sample are not defined. Build it with "
                "track_running_stats=True."
            )
    if train_mode == "error":
        check_training_mode(model, what)


def check_training_mode(model: nn.Module, what: str = "the model") -> None:
    """Refuse modules that mix samples, draw random numbers or change their state in training mode.

    Args:
        model: Module to check.
        what: Name of the model in messages.

    Raises:
        InputError: Such a module is in training mode.
    """
    active = [
        f"{name or 'model'} ({type(module).__name__})"
        for name, module in model.named_modules()
        if module.training and _acts_in_training(module)
    ]
    if active:
        shown = ", ".join(active[:3]) + (f" and {len(active) - 3} more" if len(active) > 3 else "")
        raise InputError(
            f"{what} is in training mode, where {shown} would mix samples or draw random numbers, so that gradients "
            'per sample have no meaning: call its eval() first, or pass train_mode="eval" to switch for the '
            "measurement and back"
        )


def _acts_in_training(module: nn.Module) -> bool:
    if isinstance(module, nn.modules.batchnorm._BatchNorm | nn.RReLU):
        return True
    if isinstance(module, nn.modules.instancenorm._InstanceNorm):
        return module.track_running_stats
    if isinstance(module, nn.modules.dropout._DropoutNd):
        return module.p > 0
    if isinstance(module, nn.MultiheadAttention | nn.RNNBase):
        return module.dropout > 0
    if parametrize.is_parametrized(module):
        kinds = {type(p).__name__ for p in module.parametrizations.modules()}  # type: ignore[union-attr]
        return "_SpectralNorm" in kinds
    return any(isinstance(hook, SpectralNorm) for hook in module._forward_pre_hooks.values())
