"""The expected gradient outer product of a function of its inputs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from featlearn._utils.memory import check_fits
from featlearn._utils.rng import Seed, as_generator
from featlearn.capture import check_training_mode
from featlearn.errors import InputError
from featlearn.features._batch_sums import add_gram, mirrored
from featlearn.features.measurement_plan import check_outputs, cotangents, plan_outputs


def egop(
    target: Callable[[Tensor], Tensor],
    X: Any,
    *,
    outputs: str | int = "auto",
    batch_size: int = 4096,
    generator: Seed = None,
) -> Tensor:
    """Expected gradient outer product ``(1/n) sum_i sum_c grad y_c(x_i) grad y_c(x_i)^T`` (NFA paper, section 2.1).

    For a target function it is the structure that a network should find; for a model it is the total input
    gradient's AGOP, which agrees with `featlearn.probe`'s AGOP of a first layer where that layer is the only
    path from the input.

    Args:
        target: Maps (n, ...) inputs to (n,) or (n, c) outputs, differentiably, each row by itself.
        X: Inputs, (n, d) or (n, ...), which are flattened to d coordinates.
        outputs: As in `featlearn.probe`.
        batch_size: Rows at a time.
        generator: Generator or seed of an output sketch.

    Returns:
        (d, d) in float64.

    Time: one backward pass an output; memory O(batch d + d^2).

    Example:
        >>> import torch
        >>> egop(lambda x: x[:, 0] * 3, torch.randn(10, 2))
        tensor([[9., 0.],
                [0., 0.]], dtype=torch.float64)
    """
    if not callable(target):
        raise InputError(f"target must be a function of the inputs, got {target!r}")
    if isinstance(X, tuple | dict):
        raise InputError("X must be the inputs alone, a tensor or an array")
    X = torch.as_tensor(X)
    if X.ndim < 2 or X.shape[0] == 0:
        raise InputError(f"X must be (n, d) with n of at least 1, got shape {tuple(X.shape)}")
    if not X.is_floating_point():
        X = X.to(torch.get_default_dtype())
    if not torch.isfinite(X).all():
        raise InputError("X has NaN or infinite entries")
    if not isinstance(batch_size, int) or batch_size < 1:
        raise InputError(f"batch_size must be a whole number of at least 1, got {batch_size!r}")
    check_outputs(outputs)
    source = as_generator(generator, "sketch")
    n, d = X.shape[0], X[0].numel()
    check_fits(
        24.0 * d**2, f"a matrix of {d:,} x {d:,} inputs", "take fewer inputs, or the first layer's AGOP by probe"
    )
    total = torch.zeros(1, d, d, dtype=torch.float64, device=X.device)
    scale = 1.0
    precision = torch.float64 if X.dtype == torch.float64 else torch.float32
    if isinstance(target, nn.Module):
        check_training_mode(target)
    for rows in X.split(batch_size):
        with torch.inference_mode(False), torch.enable_grad():
            x = rows.detach().clone().requires_grad_()
            y = target(x)
            if not isinstance(y, Tensor) or y.ndim == 0 or y.shape[0] != len(x):
                shape = tuple(y.shape) if isinstance(y, Tensor) else type(y).__name__
                raise InputError(f"target must return a value for each of the {len(x)} rows, got {shape}")
            if not y.requires_grad:
                raise InputError("target must be differentiable: write it with torch operations on its argument")
            plan = plan_outputs(outputs, y.numel() // len(x))
            scale = plan.scale()
            part = torch.zeros(1, d, d, dtype=precision, device=x.device)
            for _, v in cotangents(plan, y, source):
                (gradient,) = torch.autograd.grad(y, x, v, retain_graph=True, materialize_grads=True)
                add_gram(part, gradient.reshape(len(x), 1, d).to(precision))
        total += mirrored(part)
    if not torch.isfinite(total).all():
        raise InputError("the gradients of target are NaN or infinite on X")
    mean: Tensor = total[0] / (n * scale)
    return mean
