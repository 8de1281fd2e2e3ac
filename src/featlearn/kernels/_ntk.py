"""Empirical neural tangent kernel in blocks of samples, within a memory limit.

References:
    Wang, Engel, Sarwate, Dumitriu & Chiang (2022), https://arxiv.org/abs/2211.06506, sec. 3.
    Beaglehole, Mitliagkas & Agarwala, "Feature learning as alignment", https://openreview.net/forum?id=JXCe2ZcUXr,
    proposition 12.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from featlearn._utils.memory import available_memory, check_fits, parse_memory
from featlearn._utils.rng import Seed
from featlearn._utils.standard_errors import mean_and_error
from featlearn._utils.validation import is_int
from featlearn.capture import Batch, Forward, ModelSession, Trace, batches, few_rows, rows_of, sliceable
from featlearn.errors import InputError
from featlearn.kernels._kernel_sums import TOTAL, KernelSums
from featlearn.kernels.contractions import bytes_of, contract
from featlearn.kernels.per_sample_gradients import Features, PerSampleGradients, called_by_some
from featlearn.kernels.random_vectors import groups_of, make_sketch

_FIRST = 64
_MOST_ROWS = 4096
_FEWEST_ROWS = 64
_ENTRY = 16  # bytes of an entry of a contribution, with intermediate results
_BLOCK = 2**28  # bytes of features in a block; larger blocks take more time to concatenate


def check_outputs(outputs: str | int) -> None:
    """Raise an error unless `outputs` is "trace", "full" or the index of an output."""
    if outputs not in ("trace", "full") and not is_int(outputs, 0):
        raise InputError(f'outputs must be "trace", "full" or the number of an output, got {outputs!r}.')


def add_block_kernels(
    sums: KernelSums,
    left: Sequence[Batch],
    right: Sequence[Batch],
    features: Callable[[Batch], Features],
    full: bool,
    memory: float,
    groups: int = 1,
) -> None:
    """Add the kernel of each layer from the features of blocks of samples.

    The features of as many right blocks are kept as fit into half of the memory; those of the others are computed again
    for each left block.

    Args:
        sums: Sums to add to.
        left: Blocks of the first samples.
        right: Blocks of the second samples; the same list object makes the kernel symmetric.
        features: Function that returns the features of a block.
        full: Whether to keep outputs separate.
        memory: Limit in bytes.
        groups: Number of groups of outputs to keep separate, as in `contract`.
    """
    same = right is left
    kept: dict[int, Features] = {}
    free = memory / 2
    sums.begin()

    def of_right(j: int) -> Features:
        nonlocal free
        if j in kept:
            return kept[j]
        result = features(right[j])
        size = sum(bytes_of(share) for share in result.values())
        if size <= free and len(left) > 1:
            kept[j], free = result, free - size
        return result

    for i, block in enumerate(left):
        a = of_right(i) if same else features(block)
        for j in range(i if same else 0, len(right)):
            b = a if same and i == j else of_right(j)
            if missing := a.keys() - b.keys():
                raise called_by_some(min(missing))
            for name, share in a.items():
                sums.add(i, j, name, contract(share, b[name], full, groups))
        if same:
            kept.pop(i, None)  # earlier blocks are not needed again
    if same:
        sums.mirror(full)


def rows_at_a_time(numbers: float, memory: float, entries: int = 1) -> float:
    """Return the number of samples per block: enough for fast products, within the memory.

    A quarter of the memory is for the features of a block and their computation, another for those of a second block,
    and an eighth for the contribution of a layer between them.

    Args:
        numbers: Number of features per sample, with intermediate results.
        memory: Limit in bytes.
        entries: Entries of the kernel of two samples.
    """
    size = 4 * max(1.0, numbers)
    return min(memory / 8 / size, max(_FEWEST_ROWS, _BLOCK / size), math.sqrt(memory / 8 / (_ENTRY * entries)))


def first_batch(subject: ModelSession, data: Any) -> Batch:
    """Return the first samples of the data, from which the size of a sample is measured."""
    return subject.batch(next(iter(batches(data, _FIRST if sliceable(data) else None))))


def blocks_of(subject: ModelSession, data: Any, rows: float) -> list[Batch]:
    """Return the data in batches of a maximum size; batches of the caller are split if they have one row per sample.

    Args:
        subject: Session of the model.
        data: Inputs, as in `ntk`.
        rows: Maximum number of rows.
    """
    size = whole_rows(rows)
    return smaller_blocks((subject.batch(raw) for raw in batches(data, size if sliceable(data) else None)), size)


def smaller_blocks(blocks: Iterable[Batch], rows: float) -> list[Batch]:
    """Split blocks that have one row per sample to a maximum size.

    Args:
        blocks: Blocks of samples.
        rows: Maximum number of rows.
    """
    size, result = whole_rows(rows), []
    for block in blocks:
        n = block.size or 0
        if n <= size or few_rows(block) is block:
            result.append(block)
        else:
            result += [block.rows(start, min(start + size, n)) for start in range(0, n, size)]
    return result


def whole_rows(rows: float) -> int:
    """Return a number of rows of a block, which is at least one and limited.

    Args:
        rows: Number of rows that fit into memory.
    """
    return max(1, min(_MOST_ROWS, int(rows)))


def read_once(data: Any) -> Any:
    """Return data that can be read more than once: an iterator becomes the list of its batches.

    Args:
        data: Data in any form, or None.
    """
    return list(data) if isinstance(data, Iterator) else data


def check_kernel_memory(
    X: Any, Z: Any, tangents: PerSampleGradients, full: bool, max_memory: Any, kernels: int = 1, groups: int = 1
) -> None:
    """Refuse a tangent kernel that does not fit into memory, before it is computed.

    Args:
        X: Inputs, as in `featlearn.ntk`.
        Z: Other inputs, or None.
        tangents: Gradients, with the size of a sample.
        full: Whether the kernel has a block per pair of outputs.
        max_memory: Limit of the caller, as in `featlearn.ntk`.
        kernels: Number of kernels, such as one per layer.
        groups: Number of groups of outputs, each with kernels of its own.
    """
    c = tangents.count
    fewer = "pass sketches=16 for random output vectors, or outputs= the number of one output" if c > 1 else ""
    check_fits(
        8 * tangents.numbers_of_the_rest,
        f"a tangent kernel holds the gradients of two samples, which for {c:,} outputs",
        fewer or "leave parameters out with parameters=",
        max_memory,
    )
    # The kernels are not part of max_memory; the free memory limits them.
    n = most_rows(X, most=None)
    m = n if Z is None else most_rows(Z, most=None)
    kernel = 8.0 * n * m * (c**2 if full else groups)
    what = f"a kernel of {n:,} x {m:,} samples" + (f" and {c:,} x {c:,} outputs" if full else "")
    of_layers = f", for each of {kernels} layers," if kernels > 1 else ""
    check_fits(kernel * kernels, what + of_layers, "take fewer samples")


def expected_rows(blocks: Sequence[Batch]) -> int:
    """Return the number of samples of some blocks, of those whose number is known.

    Args:
        blocks: Blocks of samples.
    """
    return sum(block.size or 1 for block in blocks)


def most_rows(*data: Any, most: int | None = _MOST_ROWS) -> int:
    """Estimate the number of samples of the largest data set.

    Args:
        *data: Data sets; None is ignored.
        most: Upper limit of the result. None is unlimited.
    """
    counts = [_rows(part) for part in data if part is not None]
    return max((rows if most is None else min(most, rows) for rows in counts), default=64)


def _rows(data: Any) -> int:
    """Return the number of samples of data in any form; 64 if it is unknown."""
    if sliceable(data):
        return rows_of(data)
    if isinstance(data, list):
        return sum(_rows_of_batch(raw) for raw in data)
    try:
        sized: Any = data.dataset if isinstance(data, torch.utils.data.DataLoader) else data
        return len(sized)
    except (TypeError, AttributeError, NotImplementedError):  # a stream
        return 64


def _rows_of_batch(raw: Any) -> int:
    try:
        return rows_of(raw)
    except InputError:  # tensors of different lengths
        return 1


def gradient_memory(max_memory: int | float | str | None) -> int:
    """Return the memory limit of gradients in bytes.

    Args:
        max_memory: Limit of the caller. None is a quarter of the memory of the machine, at most half of the free one.
    """
    if max_memory is not None:
        return parse_memory(max_memory)
    return min(parse_memory(None), available_memory()) // 2


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
    standard_error: bool = False,
) -> Tensor | dict[str, Tensor] | tuple[Tensor, Tensor] | tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Compute the empirical neural tangent kernel ``Theta_ab = <df(x_a)/dtheta, df(x_b)/dtheta>``.

    A layer contributes ``(J_a . J_b)(x_a . x_b)``, with a bias ``(J_a . J_b)(x_a . x_b + 1)``, summed over pairs of
    positions for tokens and convolutions. All parameters are included: weights, biases, gains of normalization layers,
    embeddings and, as ``"other parameters"``, those that do not belong to one layer (parameters used in the code of a
    module, weights tied to an embedding, parametrized weights), which are differentiated for all samples by vmap.

    Time: c backward passes, then for each layer the cheaper of pairs of positions, ``n m P^2 (k_in + c k_out)``, and
    per-sample gradients, ``(n + m) c P k_in k_out + n m c k_in k_out``. Samples are processed in blocks, whose
    gradients are kept while they fit into half of the memory, and computed again for each block of X otherwise.

    Args:
        model: Module to measure.
        X: Inputs: tensor, array, dict of keyword arguments, or batches of these.
        Z: Other inputs, for the kernel of X against Z. None is X against itself.
        outputs: ``"trace"`` sums over outputs, shape (n, m); ``"full"`` keeps them, shape (n, m, c, c); an integer
            selects that output.
        by_layer: Whether to return a dict with the contribution of each layer instead of the sum.
        max_memory: Limit for the gradients, in bytes or as text such as ``"2 GB"``, without the kernel and the graph of
            one block. None is a quarter of the memory of the machine.
        parameters: Glob pattern of parameter names to include, or several. None includes all.
        sketches: Number m of random output vectors v of signs that estimate the trace, for models with many outputs:
            the mean of ``(1/m) sum_v <d(v . f(x_a))/dtheta, d(v . f(x_b))/dtheta>`` is the trace. None, and a number of
            at least the outputs, differentiate every output.
        generator: Generator or seed of the random vectors. None is the seed 0.
        forward: Function ``forward(model, batch)`` that returns the output, samples first. None calls the model on the
            inputs of the batch.
        train_mode: ``"error"`` refuses BatchNorm or dropout in training mode; ``"eval"`` switches the model to
            evaluation mode and restores it.
        batch_size: Number of rows per block. None chooses it from `max_memory`.
        device: Device to measure on. A device other than the model's measures a copy. None is the model's.
        dtype: Precision to measure in. A dtype other than the model's measures a copy. None is the model's.
        standard_error: Whether to return ``(kernel, error)`` with the standard error of each entry that is due to the
            random vectors, from the kernels of groups of vectors. Needs at least two ``sketches``; the error is 0 where
            every output is differentiated.

    Returns:
        The kernel in float64, or a dict of kernels by layer name; with its standard error, if that is asked for.

    Raises:
        InputError: An argument is invalid, or the gradients of two samples or the kernel do not fit into memory.

    Example:
        >>> import torch, featlearn as fl
        >>> fl.ntk(torch.nn.Linear(2, 1), torch.eye(2)).tolist()
        [[2.0, 1.0], [1.0, 2.0]]
    """
    check_outputs(outputs)
    if standard_error and (sketches is None or sketches == 1):
        raise InputError(
            f"standard_error needs at least two random vectors: pass sketches=16, got sketches={sketches}."
        )
    subject = ModelSession(model, vectors=True, forward=forward, train_mode=train_mode, device=device, dtype=dtype)
    tangents = PerSampleGradients(subject, outputs, parameters, make_sketch(sketches, outputs, generator))
    options: dict[str, Any] = {"by_layer": by_layer, "max_memory": max_memory, "batch_size": batch_size}
    kernels = tangent_kernels(tangents, X, Z, in_groups=standard_error, **options)
    if not standard_error:
        return kernels if by_layer else kernels[TOTAL]
    if not by_layer:
        return mean_and_error(kernels[TOTAL])
    both = {name: mean_and_error(kernel) for name, kernel in kernels.items()}
    return {name: mean for name, (mean, _) in both.items()}, {name: error for name, (_, error) in both.items()}


def tangent_kernels(
    tangents: PerSampleGradients,
    X: Any,
    Z: Any = None,
    *,
    by_layer: bool = False,
    max_memory: int | float | str | None = None,
    batch_size: int | None = None,
    observe: Callable[[Trace], None] | None = None,
    in_groups: bool = False,
) -> dict[str, Tensor]:
    """Compute the tangent kernel, or the contribution of each layer to it, for the present weights of the model.

    Args:
        tangents: Gradients per sample, whose session is closed.
        X: Inputs, as in `ntk`.
        Z: Other inputs, or None.
        by_layer: Whether to return the contribution of each layer.
        max_memory: Limit of the gradients, as in `ntk`.
        batch_size: Number of rows per block, as in `ntk`.
        observe: Function that receives one trace of all samples of X, in parts and in order. None makes no call.
        in_groups: Whether to return kernels of equal groups of random output vectors, shape (n, m, groups), each an
            unbiased estimate, instead of their mean.

    Returns:
        Kernels in float64 by layer name, or the kernel under the name `TOTAL`.

    Raises:
        InputError: The gradients of two samples or the kernel do not fit into memory, or are not finite.
    """
    memory, subject, full = gradient_memory(max_memory), tangents.session, tangents.full
    X, Z = read_once(X), read_once(Z)
    observed: set[int] = set()
    with subject.open(inputs=True, weight_gradients=True):
        if not tangents.settled:
            tangents.prepare(first_batch(subject, X), most_rows(X, Z), memory)
        groups = groups_of(tangents.count) if in_groups and tangents.random else 1
        check_kernel_memory(X, Z, tangents, full, max_memory, tangents.shares if by_layer else 1, groups)
        entries = tangents.count**2 if full else groups

        def rows(numbers: float) -> float:
            return rows_at_a_time(numbers, memory, entries) if batch_size is None else batch_size

        left = blocks_of(subject, X, rows(tangents.numbers))
        right = left if Z is None else blocks_of(subject, Z, rows(tangents.numbers))
        of_x = {id(block) for block in left}

        def features(block: Batch) -> Features:
            new = id(block) in of_x - observed  # features that do not fit into memory are computed again
            observed.add(id(block))
            return tangents.features(block, observe if new else None)

        sums = KernelSums(expected_rows(left), expected_rows(right), by_layer)
        add_block_kernels(sums, left, right, features, full, memory, groups)
    if tangents.rest:
        # The same blocks again: a loader may return its samples in another order.
        fewer = rows(tangents.numbers_of_the_rest)
        left = smaller_blocks(left, fewer)
        right = left if Z is None else smaller_blocks(right, fewer)
        add_block_kernels(sums, left, right, tangents.rest_features(left[0]), full, memory, groups)
    kernels = sums.kernels()
    # The vectors are scaled for the sum over all of them.
    return {name: kernel.mul_(groups) for name, kernel in kernels.items()} if groups > 1 else kernels
