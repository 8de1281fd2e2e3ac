"""Compute the empirical neural tangent kernel in blocks of samples, within a memory limit."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from featlearn._utils.memory import available_memory, check_fits, parse_memory
from featlearn._utils.rng import Seed, as_generator
from featlearn._utils.validation import check_int, is_int
from featlearn.capture import Batch, Forward, ModelSession, batches, few_rows, rows_of, sliceable
from featlearn.errors import InputError
from featlearn.kernels.contractions import Share, bytes_of, contract
from featlearn.kernels.per_sample_gradients import Features, PerSampleGradients, Sketch, called_by_some

_FIRST = 64
_MOST_ROWS = 4096
_FEWEST_ROWS = 64
_BLOCK = 2**28  # bytes of features in a block: larger ones only take more time to be joined


def check_outputs(outputs: str | int) -> None:
    """Refuse what is neither a way to take the outputs together nor the number of one."""
    if outputs not in ("trace", "full") and not is_int(outputs, 0):
        raise InputError(f'outputs must be "trace", "full" or the number of an output, got {outputs!r}')


def block_kernels(
    left: Sequence[Batch], right: Sequence[Batch], features: Callable[[Batch], Features], full: bool, memory: float
) -> dict[str, Tensor]:
    """Each share's kernel from the features of blocks of samples; symmetric if both sides are one list.

    The features of as many blocks on the right are kept as fit into half of the memory; those of the others are
    computed again for each block on the left.
    """
    rows: dict[str, list[list[Tensor]]] = {}
    kept: dict[int, Features] = {}
    free = memory / 2

    def of_right(j: int) -> Features:
        nonlocal free
        if j in kept:
            return kept[j]
        found = features(right[j])
        size = sum(bytes_of(share) for share in found.values())
        if size <= free and len(left) > 1:
            kept[j], free = found, free - size
        return found

    for i, block in enumerate(left):
        a = of_right(i) if right is left else features(block)
        row: dict[str, list[Tensor]] = {}
        for j in range(len(right)):
            if right is left and j < i:
                found = {name: _mirrored(parts[j][i]) for name, parts in rows.items()}
            else:
                b = a if right is left and i == j else of_right(j)
                found = {name: contract(share, _partner(b, name), full).to(torch.float64) for name, share in a.items()}
            for name, kernel in found.items():
                row.setdefault(name, []).append(kernel)
        for name, parts in row.items():
            rows.setdefault(name, []).append(parts)
    return {name: torch.cat([torch.cat(parts, dim=1) for parts in found]) for name, found in rows.items()}


def _mirrored(block: Tensor) -> Tensor:
    """A block below the diagonal from the one above it: the kernel of X against itself is symmetric."""
    return block.mT if block.ndim == 2 else block.permute(1, 0, 3, 2)


def _partner(features: Features, name: str) -> Share:
    if name not in features:
        raise called_by_some(name)
    return features[name]


def rows_at_a_time(numbers: float, memory: float) -> float:
    """How many samples a block has: what products need to be fast, and no more than the memory allows.

    A quarter of it is for the features of a block and what they are made of, another for those of a second one.
    """
    size = 4 * max(1.0, numbers)
    return min(memory / 8 / size, max(_FEWEST_ROWS, _BLOCK / size))


def first_batch(subject: ModelSession, data: Any) -> Batch:
    """Samples to learn from what a sample takes."""
    return subject.batch(next(iter(batches(data, _FIRST if sliceable(data) else None))))


def blocks_of(subject: ModelSession, data: Any, rows: float) -> list[Batch]:
    """Return the data in batches of at most so many rows; batches that were given are cut where samples can be told."""
    size = max(1, min(_MOST_ROWS, int(rows)))
    found = []
    for raw in batches(data, size if sliceable(data) else None):
        batch = subject.batch(raw)
        n = batch.size or 0
        if n <= size or few_rows(batch) is batch:
            found.append(batch)
        else:
            found += [batch.rows(start, min(start + size, n)) for start in range(0, n, size)]
    return found


def check_kernel_memory(X: Any, Z: Any, tangents: PerSampleGradients, full: bool, max_memory: Any) -> None:
    """Refuse a tangent kernel that does not fit, before anything of it is made.

    Args:
        X: Inputs, as in `featlearn.ntk`.
        Z: Other inputs, or None.
        tangents: Features, which know what a sample takes.
        full: Whether the kernel has a block for each pair of outputs.
        max_memory: As in `featlearn.ntk`.
    """
    c = tangents.count
    fewer = "pass sketches=16 for random output vectors, or outputs= the number of one output" if c > 1 else ""
    check_fits(
        8 * tangents.numbers_of_the_rest,
        f"a tangent kernel holds the gradients of two samples, which for {c:,} outputs",
        fewer or "leave parameters out with parameters=",
        max_memory,
    )
    # The kernels come on top of max_memory: what is free limits them. Each is there in blocks, and once joined.
    n = most_rows(X, most=None)
    m = n if Z is None else most_rows(Z, most=None)
    kernel = 8.0 * n * m * (c**2 if full else 1)
    what = f"a kernel of {n:,} x {m:,} samples" + (f" and {c:,} x {c:,} outputs" if full else "")
    check_fits(kernel * (tangents.shares + 1), f"{what}, for each of {tangents.shares} layers,", "take fewer samples")


def most_rows(*data: Any, most: int | None = _MOST_ROWS) -> int:
    """About how many samples there are, at most as many as a block has: for the choice of a form."""
    found = [_rows(part) for part in data if part is not None]
    return max((rows if most is None else min(most, rows) for rows in found), default=64)


def _rows(data: Any) -> int:
    """Samples of data in any form; a guess where only reading it would tell."""
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
    except InputError:  # tensors of other lengths beside the samples
        return 1


def gradient_memory(max_memory: int | float | str | None) -> int:
    """Return the bytes that gradients may take: by default a quarter of the machine, or half of what is free."""
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
) -> Tensor | dict[str, Tensor]:
    """Empirical neural tangent kernel ``Theta_ab = <df(x_a)/dtheta, df(x_b)/dtheta>`` (spectral paper, section 3).

    A layer's share is ``(J_a . J_b)(x_a . x_b)``, with a bias ``(J_a . J_b)(x_a . x_b + 1)``, and a sum over pairs of
    positions for tokens and convolutions (NFA paper, proposition 12). All parameters count: weights, biases, gains of
    normalization layers, embeddings and, as ``"other parameters"``, whatever is no layer's own (parameters used in a
    module's own code, weights tied to an embedding, parametrized weights), differentiated for all samples by vmap.

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
    subject = ModelSession(model, vectors=True, forward=forward, train_mode=train_mode, device=device, dtype=dtype)
    memory = gradient_memory(max_memory)
    sketch = _sketch(sketches, outputs, generator)
    tangents = PerSampleGradients(subject, outputs, parameters, sketch)

    def blocks(numbers: float) -> tuple[list[Batch], list[Batch]]:
        rows = rows_at_a_time(numbers, memory) if batch_size is None else batch_size
        left = blocks_of(subject, X, rows)
        return left, left if Z is None else blocks_of(subject, Z, rows)

    full = outputs == "full"
    with subject.open(inputs=True, weight_gradients=True):
        tangents.prepare(first_batch(subject, X), most_rows(X, Z))
        check_kernel_memory(X, Z, tangents, full, max_memory)
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
    check_int("sketches", sketches, optional=True)
    if outputs != "trace":
        raise InputError(f'sketches estimates the trace over outputs: it needs outputs="trace", got {outputs!r}')
    seed = torch.randint(2**62, (1,), generator=as_generator(generator, "sketch"))
    return Sketch(sketches, int(seed))
