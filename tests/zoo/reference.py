"""Naive NFC of the linear layers and convolutions of a model. Nothing is shared with featlearn.

One sample is run at a time. Forward hooks add zeros to the output of each module, and each output of the model is
differentiated by these zeros.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

Forward = Callable[[nn.Module, Any], Tensor]


def plain_output(model: nn.Module, batch: Any) -> Any:
    """Call a model on a batch and return the output to differentiate.

    The output is the result itself if it is a tensor; otherwise its ``logits``, else ``last_hidden_state``, else its
    first floating-point tensor.
    """
    result = model(**batch) if isinstance(batch, dict) else model(batch)
    if isinstance(result, Tensor):
        return result
    named = dict(result) if hasattr(result, "keys") else dict(enumerate(result))
    for key in ("logits", "last_hidden_state"):
        if isinstance(named.get(key), Tensor):
            return named[key]
    return next(part for part in named.values() if isinstance(part, Tensor) and part.is_floating_point())


def small_head(forward: Forward, outputs: int = 4) -> Forward:
    """Return a forward function with few outputs: those of a fixed random linear head, if there are more than eight."""

    def call(model: nn.Module, batch: Any) -> Tensor:
        output = forward(model, batch).flatten(1)
        count = output.shape[1]
        if count <= 8:
            return output
        generator = torch.Generator().manual_seed(5)
        head = torch.randn(count, outputs, generator=generator, dtype=torch.float64) / count**0.5
        return output @ head.to(output.dtype)

    return call


def sample(data: Any, a: int, copies: int = 1) -> Any:
    """Return one sample of a data set as a batch, or a few copies of it."""
    if isinstance(data, dict):
        return {key: sample(part, a, copies) for key, part in data.items()}
    return data[[a] * copies]


def is_simple(module: nn.Module) -> bool:
    """Return whether the reference knows the matrix of a module."""
    if isinstance(module, nn.Linear) or type(module).__name__ == "Conv1D":
        return True
    # A subclass with a forward function of its own may compute another weight.
    return any(type(module).forward is kind.forward for kind in (nn.Conv1d, nn.Conv2d, nn.Conv3d))


def matrices(module: nn.Module) -> Tensor:
    """Return the weight matrices of a module, shape (groups, k_out, k_in)."""
    weight = module.weight.detach()
    if isinstance(module, nn.Linear):
        return weight[None]
    if type(module).__name__ == "Conv1D":  # of transformers, with the inputs first
        return weight.T[None]
    return weight.reshape(module.groups, weight.shape[0] // module.groups, -1)


def rows(module: nn.Module, gradient: Tensor) -> Tensor:
    """Return the gradients in the output of a module for one sample, shape (groups, positions, k_out)."""
    if isinstance(module, nn.Linear) or type(module).__name__ == "Conv1D":
        return gradient.reshape(1, -1, gradient.shape[-1])
    channels = gradient.movedim(1, -1)
    return channels.reshape(-1, module.groups, channels.shape[-1] // module.groups).transpose(0, 1)


def reference_nfc(model: nn.Module, data: Any, forward: Forward, samples: int) -> dict[str, float]:
    """Return ``cos(W^T W, W^T K W)`` with ``K = sum J J^T`` of each simple module that is called, by its name.

    NaN if the outputs do not depend on the module.
    """
    modules = {name: module for name, module in model.named_modules() if is_simple(module)}
    sums: dict[str, Tensor] = {}
    zeros: list[tuple[str, Tensor]] = []

    def hook(name: str) -> Callable[..., Tensor]:
        def add(module: nn.Module, args: Any, output: Tensor) -> Tensor:
            offset = torch.zeros_like(output, requires_grad=True)
            zeros.append((name, offset))
            return output + offset

        return add

    # In PyTorch 2.13, the gradient of a BatchNorm in evaluation mode is wrong for one sample if the incoming gradient
    # is transposed. A copy of the sample, which is not differentiated, avoids this.
    copies = 2 if any(isinstance(module, nn.modules.batchnorm._BatchNorm) for module in model.modules()) else 1
    handles = [module.register_forward_hook(hook(name)) for name, module in modules.items()]
    try:
        for a in range(samples):
            zeros.clear()
            for number in forward(model, sample(data, a, copies))[0] if modules else ():
                offsets = [offset for _, offset in zeros]
                grads = torch.autograd.grad(number, offsets, retain_graph=True, allow_unused=True)
                for (name, offset), grad in zip(zeros, grads, strict=True):
                    j = rows(modules[name], torch.zeros_like(offset) if grad is None else grad).double()
                    sums[name] = sums.get(name, 0) + j.mT @ j
    finally:
        for handle in handles:
            handle.remove()
    result = {}
    for name, k in sums.items():
        w = matrices(modules[name]).double()
        nfm, agop = w.mT @ w, w.mT @ k @ w
        norms = nfm.norm() * agop.norm()
        result[name] = float((nfm * agop).sum() / norms) if norms > 0 else float("nan")
    return result
