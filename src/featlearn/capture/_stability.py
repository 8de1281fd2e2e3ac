"""Comparison of outputs: random numbers, samples that act on each other, and effects of rounding."""

from __future__ import annotations

import math
import random
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from featlearn.capture._data import Batch, map_tensors
from featlearn.capture._trace import Trace

ACT_ON_EACH_OTHER = (
    "the samples of a batch act on each other: outputs change when other samples are left out, so gradients per sample "
    "are not defined (batch statistics, or samples in another than the first dimension?). If this is intended, pass "
    "forward=: each sample is then measured by a separate backward pass."
)
ROUNDING = "its gradients are rounding errors for the first samples: the output may not depend on this layer"
"""Note of a layer from `noise_layers`."""
MANY_SAMPLES = 32
"""Number of samples from which on a pass of two of them takes little time."""
_NOISY_PASSES = 4


def advance_generators(device: torch.device) -> None:
    """Draw a number from each global random generator (torch, numpy, python), so that a pass draws others than before.

    Args:
        device: Device whose generator is used.
    """
    torch.rand(1, device=device)
    np.random.random()  # noqa: NPY002  # the legacy global generator
    random.random()


def same_output(expected: Tensor, some: Tensor) -> bool | None:
    """Return whether samples have the same output alone as in the batch; None if the shapes differ.

    Args:
        expected: Output in the batch.
        some: Output alone.
    """
    if some.shape != expected.shape:
        return None
    return _distance(expected, some) <= math.sqrt(torch.finfo(expected.dtype).eps) * _norm(expected)


def is_repeatable(first: Tensor, second: Tensor) -> bool:
    """Return whether the outputs of two passes on the same samples differ by rounding at most.

    Random numbers of any generator are found in this way.

    Args:
        first: Output of the first pass.
        second: Output of the second pass.
    """
    if first.shape != second.shape or not first.is_floating_point():
        return first.shape == second.shape
    return _distance(first, second) <= min(1e3 * torch.finfo(first.dtype).eps, 0.05) * _norm(first)


def spaced_rows(n: int) -> list[list[int]]:
    """Return groups of samples to run apart from a batch of n.

    In a large batch both neighbors of each sample are left out, and more samples at its start than at its end: experts
    that take a share of the batch would else drop the same samples.

    Args:
        n: Number of samples, at least 2.
    """
    few = {2: [[0], [1]], 3: [[0, 2]]}
    if n >= MANY_SAMPLES:
        return [[1, n // 4, n // 2, 3 * n // 4 - 4, *range(n - 7, n, 2)]]
    return few.get(n) or [sorted({round(1 + i * (n - 3) / 7) for i in range(8)})]


def two_rows(n: int, number: int) -> list[int]:
    """Return two of n samples: the last, which a full expert drops first, and another one in each batch.

    Args:
        n: Number of samples, at least 2.
        number: Number of the batch.
    """
    return [int((number * 0.6180339887) % 1 * (n - 1)), n - 1]


def changes_by_rounding(
    model: nn.Module, run: Callable[[Batch], Tensor], part: Batch, alone: Tensor, expected: Tensor
) -> bool:
    """Return whether noise of the size of rounding errors changes an output as much as the other samples do.

    Rounding depends on the size of a batch. A model that chooses experts by their scores may choose another one for two
    equal scores, which is not an action of the other samples.

    Args:
        model: Module that `run` calls.
        run: Function that returns the output for a batch.
        part: Some samples.
        alone: Their output.
        expected: Their output in the batch.
    """
    if alone.shape != expected.shape:
        return False
    difference, generator = _distance(alone, expected), torch.Generator().manual_seed(0)
    for _ in range(_NOISY_PASSES):
        inputs = map_tensors(part.inputs, lambda t: _disturbed(t, generator))
        try:
            with _rounding_noise(model, generator):
                output = run(Batch(inputs, inputs, None, part.size))
        except Exception:  # any error of a model that noise does not suit
            return False
        if output.shape != alone.shape or _distance(output, alone) > difference / 10:
            return True
    return False


def noise_layers(model: nn.Module, run: Callable[[], Trace]) -> set[str]:
    """Return the layers whose gradients are rounding errors, since terms cancel: noise changes them as a whole.

    The output may not depend on such a layer at all, as on a number that is added to all arguments of a softmax. Time:
    two forward and two backward passes, and more if there are such layers.

    Args:
        model: Module that `run` calls.
        run: Function that traces a few samples.

    Returns:
        Names of the layers; none if the output cannot be differentiated, or is in half precision.
    """
    generator = torch.Generator().manual_seed(0)

    def disturbed() -> Trace:
        with _rounding_noise(model, generator):
            return run()

    def changed(other: Trace) -> set[str]:
        after = other.gradients(other.output, _disturbed(v, generator))
        return {name for name, rows in before.items() if _is_other(rows, after[name])}

    try:
        trace = run()
        if not trace.output.requires_grad or trace.output.dtype.itemsize < 4:
            return set()  # gradients in half precision change by noise anyway
        v = torch.randn(trace.output.shape, generator=generator).to(trace.output)
        before = trace.gradients(trace.output, v)
        candidates = changed(disturbed())
        # Rounding errors may be equal by chance, and a choice between equal scores may change once.
        again = range(_NOISY_PASSES - 1) if candidates else ()
        counts = Counter(name for _ in again for name in changed(disturbed()))
    except Exception:  # any error of a model that noise does not suit, or that takes whole batches only
        return set()
    return {name for name in candidates if counts[name] > 1}


def _is_other(before: Sequence[Tensor], after: Sequence[Tensor]) -> bool:
    """Return whether gradients have changed by a third of their size or more."""
    if [j.shape for j in before] != [j.shape for j in after]:
        return False  # other rows, of a model that chooses them by its activations
    change = math.hypot(*map(_distance, before, after))
    return change > math.hypot(*map(_norm, before)) / 3


@contextmanager
def _rounding_noise(model: nn.Module, generator: torch.Generator) -> Iterator[None]:
    """Add noise of the size of rounding errors to the outputs of all modules with parameters of their own."""

    def disturb(module: nn.Module, args: Any, h: Any) -> Any:
        return _disturbed(h, generator) if isinstance(h, Tensor) else h

    modules = [m for m in model.modules() if m._parameters and not isinstance(m, torch.jit.ScriptModule)]
    handles = [m.register_forward_hook(disturb) for m in modules]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def _disturbed(t: Tensor, generator: torch.Generator) -> Tensor:
    """Return a tensor with noise of the size of rounding errors, the same in all rows, which takes less time."""
    if not t.is_floating_point():
        return t
    noise = torch.randn(t.shape[-1:], generator=generator, dtype=torch.float64)
    return t + t * (4 * torch.finfo(t.dtype).eps * noise).to(t)


def _distance(a: Tensor, b: Tensor) -> float:
    return float((a.detach().double() - b.detach().double()).norm())


def _norm(a: Tensor) -> float:
    return float(a.detach().double().norm())
