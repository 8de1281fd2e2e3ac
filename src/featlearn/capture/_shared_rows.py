"""Detect layers whose rows are shared by several samples.

A backward pass from the outputs of all samples gives each sample's own gradient only where every row of a layer acts on
one sample. A learned query, a hypernetwork or relative positions compute rows once for the whole batch: their gradient
is then the sum over samples, and an outer product of it is not the sum of the samples' outer products.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from featlearn.capture._hooks import Trace

Rows = Mapping[str, Sequence[Tensor]]
"""Gradients of each call of each layer, (samples, positions, groups, k_out)."""

# Factors are plus or minus a power of 8, so that no small sum of some over their number is another one, times 1 + m/64,
# so that many samples have factors of their own.
_POWERS, _STEPS = range(-3, 4), 64
# Rows that are smaller than this share of the layer's largest do not decide: their outer products are rounding.
_SMALL = 1e-6
_TOLERANCE = {torch.float64: 1e-9, torch.float32: 2e-4}
# Rounding in a row is that of the largest terms summed in it, not of what is left of them: in units of the last place
# of the largest gradient of the layer, times the factor of the row.
_ROUNDING = 8
_COARSE = 0.03  # of half precision, where factors are powers of two, or signs


def sample_factors(n: int, dtype: torch.dtype = torch.float64, seed: int = 0) -> Tensor:
    """Return a factor per sample, shape (n,) in float64.

    Args:
        n: Number of samples.
        dtype: Precision of the gradients that are scaled: bfloat16 allows powers of 8 only, float16 only signs.
        seed: Of the order in which factors are given out.
    """
    if dtype == torch.float16:
        codes = torch.tensor([1.0, -1.0], dtype=torch.float64)
    else:
        powers = 8.0 ** torch.tensor(list(_POWERS), dtype=torch.float64)
        steps = 1 + torch.arange(_STEPS if dtype in _TOLERANCE else 1, dtype=torch.float64) / _STEPS
        codes = (torch.tensor([1.0, -1.0])[:, None, None] * powers[:, None] * steps).flatten().double()
    generator = torch.Generator().manual_seed(seed)
    # Each once before any comes again, and then in another order: partners at a fixed distance must differ, too.
    rounds = [torch.randperm(len(codes), generator=generator) for _ in range(-(-n // len(codes)))]
    return codes[torch.cat(rounds)[:n]] if n else codes[:0]


def output_signs(output: Tensor, seed: int = 0) -> Tensor:
    """Return signs shaped like the output, so that one backward pass asks about all outputs.

    Args:
        output: Output of the model.
        seed: Of the signs.
    """
    bits = torch.randint(0, 2, output.shape, generator=torch.Generator().manual_seed(seed), dtype=torch.int8)
    return bits.to(output.device, output.dtype).mul_(2).sub_(1)


def shared_layers(trace: Trace, cotangent: Tensor | None = None, rows: Rows | None = None, seed: int = 0) -> set[str]:
    """Find the layers in which a row acts on several samples.

    The cotangent of each sample is scaled by a factor of its own. The gradient at a row that acts on one sample is then
    scaled by that sample's factor; at a row that acts on several it is scaled by none of the factors.

    Args:
        trace: A trace of the batch.
        cotangent: Shaped like the output; None takes random signs.
        rows: Gradients for this cotangent, if they are there already.
        seed: Of the factors. Another one for each batch, so that no coincidence stays.

    Returns:
        Names of the layers with shared rows.

    Time: one backward pass, and another one without ``rows``.
    """
    output = trace.output
    n = output.shape[0]
    if n < 2:
        return set()
    v = output_signs(output, seed) if cotangent is None else cotangent
    plain = trace.gradients(output, v) if rows is None else rows
    factors = sample_factors(n, output.dtype, seed).to(output.device)
    scaled = trace.gradients(output, v * factors.to(v.dtype).reshape(-1, *[1] * (output.ndim - 1)))
    # Half precision rounds gradients: a factor would cost small ones their digits.
    tiny = 0.0 if output.dtype == torch.float16 else 1e6 * torch.finfo(output.dtype).tiny
    found = set()
    for name, calls in plain.items():
        pairs = list(zip(calls, scaled[name], strict=True))
        largest = max((float(j.abs().amax()) for pair in pairs for j in pair if j.numel()), default=0.0)
        if largest > tiny and not all(_of_one_sample(a, b, factors, largest) for a, b in pairs):
            found.add(name)
    return found


def _of_one_sample(plain: Tensor, scaled: Tensor, factors: Tensor, largest: float) -> bool:
    """Whether each row, (samples, positions, groups, k), was scaled by a single one of the factors."""
    if plain.numel() == 0:
        return True
    tolerance = _TOLERANCE.get(plain.dtype, _COARSE)
    precision = torch.promote_types(plain.dtype, torch.float32)
    a, b = (j.to(precision).flatten(2) for j in (plain, scaled))
    rounding = _ROUNDING * torch.finfo(plain.dtype).eps * float(a.abs().amax())
    # The sum over samples of either may vanish: the larger one decides whether a row is small.
    decisive = torch.maximum(a.abs().amax(2), b.abs().amax(2)) > _SMALL * largest
    if a.shape[0] == len(factors):  # rows in the order of the samples, nearly always
        expected = factors.to(precision)[:, None, None]
        off = (b - expected * a).abs().amax(2)
        even = off <= tolerance * b.abs().amax(2) + rounding * expected.abs()[..., 0]
        if bool((even | ~decisive).all()):
            return True
    a, b = a[decisive], b[decisive]
    at = a.abs().argmax(1, keepdim=True)
    found = (b.gather(1, at) / a.gather(1, at)).double()
    known = factors.sort().values
    above = torch.searchsorted(known, found).clamp(max=len(known) - 1)
    below = (above - 1).clamp_min(0)
    nearest = torch.where((known[above] - found).abs() < (known[below] - found).abs(), known[above], known[below])
    nearest = nearest.to(precision)
    off = (b - nearest * a).abs().amax(1, keepdim=True)
    return bool((off <= tolerance * b.abs().amax(1, keepdim=True) + rounding * nearest.abs()).all())
