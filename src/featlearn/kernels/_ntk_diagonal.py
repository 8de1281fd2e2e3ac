"""Diagonal of the tangent kernel: the squared gradient of each sample."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn

from featlearn._utils.memory import check_fits
from featlearn._utils.rng import Seed
from featlearn.capture import Batch, Forward, ModelSession
from featlearn.errors import InputError
from featlearn.kernels._kernel_sums import TOTAL
from featlearn.kernels._ntk import (
    blocks_of,
    check_outputs,
    first_batch,
    gradient_memory,
    most_rows,
    read_once,
    rows_at_a_time,
    smaller_blocks,
)
from featlearn.kernels.contractions import self_products
from featlearn.kernels.per_sample_gradients import Features, PerSampleGradients, called_by_some
from featlearn.kernels.random_vectors import make_sketch

_ONE = 1  # samples that each is contracted with, in the choice of the form


def ntk_diagonal(
    model: nn.Module,
    X: Any,
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
    """Compute the diagonal ``|df(x_a)/dtheta|^2`` of the tangent kernel `ntk`, without the rest of it.

    Time: c backward passes, then per sample and layer ``P^2 (k_in + c k_out)`` or ``c P k_in k_out``, whichever is
    less. Memory: the gradients of one block of samples, within `max_memory`.

    Args:
        model: Module to measure.
        X: Inputs: tensor, array, dict of keyword arguments, or batches of these.
        outputs: ``"trace"`` sums over outputs, shape (n,); ``"full"`` keeps them, shape (n, c, c); an integer selects
            that output.
        by_layer: Whether to return a dict with the contribution of each layer instead of the sum.
        max_memory: Limit for the gradients, as in `ntk`.
        parameters: Glob pattern of parameter names to include, or several. None includes all.
        sketches: Number of random output vectors that estimate the trace, as in `ntk`.
        generator: Generator or seed of the random vectors. None is the seed 0.
        forward: Function ``forward(model, batch)`` that returns the output, samples first. None calls the model on the
            inputs of the batch.
        train_mode: ``"error"`` refuses BatchNorm or dropout in training mode; ``"eval"`` switches the model to
            evaluation mode and restores it.
        batch_size: Number of rows per block. None chooses it from `max_memory`.
        device: Device to measure on. A device other than the model's measures a copy. None is the model's.
        dtype: Precision to measure in. A dtype other than the model's measures a copy. None is the model's.

    Returns:
        The diagonal in float64, or a dict by layer name.

    Raises:
        InputError: An argument is invalid, or the gradients of a sample do not fit into memory or are not finite.

    Example:
        >>> import torch, featlearn as fl
        >>> fl.ntk_diagonal(torch.nn.Linear(2, 1), torch.tensor([[1.0, 0.0], [3.0, 4.0]])).tolist()
        [2.0, 26.0]
    """
    check_outputs(outputs)
    subject = ModelSession(model, vectors=True, forward=forward, train_mode=train_mode, device=device, dtype=dtype)
    tangents = PerSampleGradients(subject, outputs, parameters, make_sketch(sketches, outputs, generator))
    memory, full, X = gradient_memory(max_memory), outputs == "full", read_once(X)

    def rows(numbers: float) -> float:
        return rows_at_a_time(numbers, memory) if batch_size is None else batch_size

    with subject.open(inputs=True, weight_gradients=True):
        tangents.prepare(first_batch(subject, X), _ONE, memory)
        _check_memory(X, tangents, max_memory, tangents.shares if by_layer else 1)
        blocks = blocks_of(subject, X, rows(tangents.numbers))
        result = _diagonals(tangents.features, blocks, full, by_layer)
    if tangents.rest:
        # The same blocks again: a loader may return its samples in another order.
        blocks = smaller_blocks(blocks, rows(tangents.numbers_of_the_rest))
        for name, products in _diagonals(tangents.rest_features(blocks[0]), blocks, full, by_layer).items():
            result[name] = result[name] + products if name in result else products
    return result if by_layer else result[TOTAL]


def _check_memory(X: Any, tangents: PerSampleGradients, max_memory: Any, diagonals: int) -> None:
    """Refuse a diagonal that does not fit into memory, before it is computed."""
    c = tangents.count
    check_fits(
        4 * tangents.numbers_of_the_rest,
        f"the diagonal of a tangent kernel holds the gradients of a sample, which for {c:,} outputs",
        "pass sketches=16 for random output vectors, or leave parameters out with parameters=",
        max_memory,
    )
    n = most_rows(X, most=None)
    if tangents.full:
        what = f"the diagonal of {n:,} samples with {c:,} x {c:,} outputs"
        check_fits(8.0 * n * c**2 * diagonals, what, "pass fewer samples")


def _diagonals(
    features: Callable[[Batch], Features], blocks: list[Batch], full: bool, by_layer: bool
) -> dict[str, Tensor]:
    """Return the diagonal of each layer, or of all under the name `TOTAL`."""
    parts: dict[str, list[Tensor]] = {}
    called: set[str] | None = None
    for block in blocks:
        of_block: dict[str, Tensor] = {}
        shares = features(block)
        if called is not None and (differing := called ^ shares.keys()):
            raise called_by_some(min(differing))
        called = set(shares)
        for name in list(shares):
            products = self_products(shares.pop(name), full).to(torch.float64)
            if not torch.isfinite(products).all():
                raise InputError(
                    f"the gradients in {name!r} are NaN or infinite. Leave parameters out with parameters=."
                )
            key = name if by_layer else TOTAL
            of_block[key] = of_block[key] + products if key in of_block else products
        for name, products in of_block.items():
            parts.setdefault(name, []).append(products)
    return {name: torch.cat(rows) for name, rows in parts.items()}
