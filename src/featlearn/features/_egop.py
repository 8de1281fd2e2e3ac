"""Expected gradient outer product of a function of its inputs.

References:
    Beaglehole, Mitliagkas & Agarwala, "Feature learning as alignment", https://openreview.net/forum?id=JXCe2ZcUXr,
    sec. 2.1.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from featlearn._utils.memory import check_fits
from featlearn._utils.rng import Seed, as_generator
from featlearn._utils.validation import check_int
from featlearn.capture import check_training_mode
from featlearn.errors import InputError
from featlearn.features._batch_sums import add_gram
from featlearn.features.measurement_plan import check_outputs, cotangents, plan_outputs
from featlearn.linalg.symmetric_products import mirrored


def egop(
    target: Callable[[Tensor], Tensor],
    X: Any,
    *,
    outputs: str | int = "auto",
    batch_size: int = 4096,
    generator: Seed = None,
) -> Tensor:
    """Compute the expected gradient outer product ``(1/n) sum_i sum_c grad y_c(x_i) grad y_c(x_i)^T``.

    The EGOP of a target function shows the directions that a network should learn. The EGOP of a model is the AGOP of
    the total input gradient; it agrees with the AGOP of the first layer in `featlearn.probe` if that layer is the only
    path from the input. Time: one backward pass per output. Memory: O(batch d + d^2).

    Args:
        target: Differentiable function or module that maps inputs (n, ...) to outputs (n,) or (n, c), row by row.
        X: Inputs of shape (n, d) or (n, ...), which are flattened to d coordinates. Must be finite.
        outputs: ``"exact"`` differentiates each output, an integer is the number of random output vectors, ``"auto"``
            is exact for up to 64 outputs and takes 16 vectors for more.
        batch_size: Number of rows per batch.
        generator: Generator or seed of the random output vectors. None is the seed 0.

    Returns:
        The EGOP, shape (d, d), in float64.

    Raises:
        InputError: An argument is invalid, the target is not differentiable, or its gradients are not finite.

    Example:
        >>> import torch
        >>> egop(lambda x: x[:, 0] * 3, torch.randn(10, 2))
        tensor([[9., 0.],
                [0., 0.]], dtype=torch.float64)
    """
    if not callable(target):
        raise InputError(f"target must be a function of the inputs, got {target!r}.")
    if isinstance(X, tuple | dict):
        raise InputError(f"X must be a tensor or an array of inputs only, got a {type(X).__name__}.")
    X = torch.as_tensor(X)
    if X.ndim < 2 or X.shape[0] == 0:
        raise InputError(f"X must be (n, d) with n of at least 1, got shape {tuple(X.shape)}.")
    if not X.is_floating_point():
        X = X.to(torch.get_default_dtype())
    if not torch.isfinite(X).all():
        raise InputError("X must be finite, got NaN or infinite entries.")
    check_int("batch_size", batch_size)
    check_outputs(outputs)
    source = as_generator(generator, "sketch")
    n, d = X.shape[0], X[0].numel()
    fix = "pass fewer inputs, or measure the AGOP of the first layer with probe"
    check_fits(24.0 * d**2, f"a matrix of {d:,} x {d:,} inputs", fix)
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
                raise InputError(f"target must return a value for each of the {len(x)} rows, got {shape}.")
            if not y.requires_grad:
                raise InputError("target must be differentiable. Write it with torch operations on its argument.")
            plan = plan_outputs(outputs, y.numel() // len(x))
            scale = plan.scale()
            part = torch.zeros(1, d, d, dtype=precision, device=x.device)
            for _, v in cotangents(plan, y, source):
                (gradient,) = torch.autograd.grad(y, x, v, retain_graph=True, materialize_grads=True)
                add_gram(part, gradient.reshape(len(x), 1, 1, d).to(precision))
        total += mirrored(part)
    if not torch.isfinite(total).all():
        raise InputError("target must have finite gradients on X, got NaN or infinite ones.")
    mean: Tensor = total[0] / (n * scale)
    return mean
