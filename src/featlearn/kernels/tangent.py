"""The empirical neural tangent kernel, layer by layer from ``x`` and ``J``."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn

from featlearn.capture import Batch, Forward, Subject
from featlearn.errors import InputError
from featlearn.kernels.blocks import (
    block_kernels,
    blocks_of,
    check_memory,
    check_outputs,
    first_batch,
    gradient_memory,
    most_rows,
    rows_at_a_time,
)
from featlearn.kernels.tangent_features import Sketch, TangentFeatures
from featlearn.numerics.seeds import Seed, as_generator

__all__ = ["ntk"]


def ntk(
    model: nn.Module,
    X: Any,
    Z: Any = None,
    outputs: str | int = "trace",
    by_layer: bool = False,
    max_memory: int | float | str | None = None,
    *,
    parameters: str | Iterable[str] | None = None,
    sketches: int | None = None,
    generator: Seed = None,
    forward: Forward | None = None,
    train_mode: str = "error",
    batch_size: int | None = None,
    device: torch.device | str | None = None,
    dtype: torch.dtype | None = None,
) -> Tensor | dict[str, Tensor]:
    """Empirical neural tangent kernel ``Theta_ab = <df(x_a)/dtheta, df(x_b)/dtheta>`` (spectral paper, section 3).

    A layer's share is ``(J_a . J_b)(x_a . x_b)``, with a bias ``(J_a . J_b)(x_a . x_b + 1)``, and a sum over pairs of
    positions for tokens and convolutions (NFA paper, proposition 12). All parameters count: weights, biases, gains of
    normalisation layers, embeddings and, as ``"other parameters"``, whatever is no layer's own (parameters used in a
    module's own code, weights tied to an embedding, parametrised weights), differentiated for all samples by vmap.

    Args:
        model: Any module.
        X: Inputs: a tensor, an array, a dict of keyword arguments, or batches of these.
        Z: Other inputs, for the kernel of X against Z; None is X against itself.
        outputs: ``"trace"`` sums over outputs, (n, m); ``"full"`` keeps them, (n, m, c, c); a number takes that output.
        by_layer: Return a dict of each layer's share instead of the sum.
        max_memory: Bytes, or text as ``"2 GB"``, for the gradients held at a time; a quarter of the machine by default.
            The kernel itself, and the graph of one block's forward pass, come on top.
        parameters: Globs of parameter names to count; None counts all.
        sketches: Number m of random output vectors v of signs that stand for the outputs in the trace, for models with
            many: ``(1/m) sum_v <d(v . f(x_a))/dtheta, d(v . f(x_b))/dtheta>`` has the trace as its mean. None, and a
            number of at least the outputs, take every output.
        generator: Generator or seed of these vectors.
        forward: As in `featlearn.probe`.
        train_mode: As in `featlearn.probe`.
        batch_size: Rows at a time; by default as many as are fast, within the memory.
        device: As in `featlearn.probe`.
        dtype: As in `featlearn.probe`.

    Returns:
        The kernel in float64, or a dict of kernels.

    Raises:
        InputError: The gradients of two samples, or the kernel, do not fit into memory; the message has the estimate.

    Time: c backward passes, then for each layer the cheaper of pairs of positions, ``n m P^2 (k_in + c k_out)``, and
    per-sample gradients, ``(n + m) c P k_in k_out + n m c k_in k_out``. Samples are taken in blocks, whose
    gradients are kept while they fit into half of the memory, and computed again for each block of X otherwise.
    """
    check_outputs(outputs)
    subject = Subject(model, vectors=True, forward=forward, train_mode=train_mode, device=device, dtype=dtype)
    memory = gradient_memory(max_memory)
    sketch = _sketch(sketches, outputs, generator)
    tangents = TangentFeatures(subject, outputs, parameters, sketch)

    def blocks(numbers: float) -> tuple[list[Batch], list[Batch]]:
        rows = rows_at_a_time(numbers, memory) if batch_size is None else batch_size
        left = blocks_of(subject, X, rows)
        return left, left if Z is None else blocks_of(subject, Z, rows)

    full = outputs == "full"
    with subject.open(inputs=True, weight_gradients=True):
        tangents.prepare(first_batch(subject, X), most_rows(X, Z))
        check_memory(X, Z, tangents, full, max_memory)
        kernels = block_kernels(*blocks(tangents.numbers), tangents.features, full, memory)
    if tangents.rest:
        left, right = blocks(tangents.numbers_of_the_rest)
        kernels |= block_kernels(left, right, tangents.rest_features(left[0]), full, memory)
    for name, kernel in kernels.items():
        if not torch.isfinite(kernel).all():
            raise InputError(f"the gradients in {name!r} are NaN or infinite: leave parameters out with parameters=")
    if by_layer:
        return kernels
    total = sum(kernels.values())
    assert isinstance(total, Tensor)
    return total


def _sketch(sketches: int | None, outputs: str | int, generator: Seed) -> Sketch | None:
    if sketches is None:
        return None
    if isinstance(sketches, bool) or not isinstance(sketches, int) or sketches < 1:
        raise InputError(f"sketches must be a number of at least 1, or None, got {sketches!r}")
    if outputs != "trace":
        raise InputError(f'sketches estimates the trace over outputs: it needs outputs="trace", got {outputs!r}')
    seed = torch.randint(2**62, (1,), generator=as_generator(generator, "sketch"))
    return Sketch(sketches, int(seed))
