"""Detect layers whose rows are shared by several samples.

A backward pass from the outputs of all samples gives each sample's own gradient only where every row of a layer acts on
one sample. A learned query, a hypernetwork or relative positions compute rows once for the whole batch: their gradient
is then the sum over samples, and an outer product of it is not the sum of the samples' outer products.
"""

from __future__ import annotations

import torch
from torch import Tensor

from featlearn.capture.capture import Trace

__all__ = ["sample_scales", "shared_rows"]

# Powers of two: a gradient that is scaled by one keeps every digit, so that a row of one sample comes back exactly.
_LOWEST, _HIGHEST = -4, 3
_FACTORS = 2 * (_HIGHEST - _LOWEST + 1)
# Rows that are smaller than this share of the layer's largest do not decide: their outer products are rounding.
_SMALL = 1e-6
_TOLERANCE = {torch.float64: 1e-6, torch.float32: 1e-3}
_COARSE = 0.03


def sample_scales(n: int) -> Tensor:
    """Return a factor per sample, plus or minus a power of two, shape (n,): different ones for the first 16 samples.

    Args:
        n: Number of samples.
    """
    generator = torch.Generator().manual_seed(0)
    codes = torch.arange(n)
    # At random beyond: samples that are paired at a fixed distance, as two views of an image are, must differ too.
    codes[_FACTORS:] = torch.randint(_FACTORS, (max(0, n - _FACTORS),), generator=generator)
    return (1.0 - 2.0 * (codes % 2)) * 2.0 ** (codes // 2 + _LOWEST)


def shared_rows(trace: Trace) -> tuple[set[str], set[str]]:
    """Find the layers in which a row acts on several samples, and those whose gradients are zero.

    The output of each sample is scaled by a factor of its own. The gradient at a row that acts on one sample is scaled
    by that sample's factor; at a row that acts on several it is not scaled by any of the factors.

    Args:
        trace: A trace of at least two samples.

    Returns:
        Names of the layers with shared rows, and of the layers about which nothing is known: all their gradients are
        zero, or nearly so.

    Time: two backward passes.
    """
    output = trace.output
    half = output.dtype == torch.float16  # whose range is too small for other factors than signs
    scales = sample_scales(output.shape[0]).to(output).reshape(-1, *[1] * (output.ndim - 1))
    scales = scales.sign() if half else scales
    generator = torch.Generator().manual_seed(1)
    signs = (2.0 * torch.randint(0, 2, output.shape, generator=generator) - 1.0).to(output)
    plain, scaled = trace.gradients(output, signs), trace.gradients(output, signs * scales)
    shared, unknown = set(), set()
    for name in trace.calls:
        pairs = list(zip(plain[name], scaled[name], strict=True))
        largest = max((float(j.abs().amax()) for pair in pairs for j in pair if j.numel()), default=0.0)
        if largest <= (0.0 if half else 1e3 * torch.finfo(output.dtype).tiny):  # factors would cost digits
            unknown.add(name)
        elif not all(_of_one_sample(a, b, largest) for a, b in pairs):
            shared.add(name)
    return shared, unknown


def _of_one_sample(plain: Tensor, scaled: Tensor, largest: float) -> bool:
    """Whether each row, (samples, positions, groups, k), was scaled by a single factor of those that samples have."""
    if plain.numel() == 0:
        return True
    tolerance = _TOLERANCE.get(plain.dtype, _COARSE)
    precision = torch.promote_types(plain.dtype, torch.float32)
    a, b = (j.flatten(0, 1).flatten(1).to(precision) for j in (plain, scaled))
    # A sum over samples may vanish without the factors: the larger one decides whether a row is small.
    decisive = torch.maximum(a.abs().amax(1), b.abs().amax(1)) > _SMALL * largest
    a, b = a[decisive], b[decisive]
    at = a.abs().argmax(1, keepdim=True)
    factor = b.gather(1, at) / a.gather(1, at)
    power = factor.abs().log2()
    known = (power - power.round()).abs() <= tolerance
    known &= (power.round() >= _LOWEST) & (power.round() <= _HIGHEST)
    even = (b - factor * a).abs().amax(1, keepdim=True) <= tolerance * b.abs().amax(1, keepdim=True)
    return bool((known & even).all())
