"""Detection of layers whose rows are shared by several samples.

A backward pass from the outputs of all samples gives the gradient of each sample only if every row of a layer acts on
one sample. A learned query, a hypernetwork or relative positions compute rows once for the whole batch: their gradient
is the sum over samples, and its outer product is not the sum of the outer products of the samples.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import lru_cache

import torch
from torch import Tensor

from featlearn.capture._model_state import without_autocast
from featlearn.capture._trace import Trace

Profile = tuple[Tensor, torch.dtype]
Profiles = Mapping[str, Mapping[int, Profile]]
"""Profiles of the gradients of each call, by layer name and index of the call, see `row_profiles`."""

Owners = dict[str, dict[int, Tensor]]
"""Factor of the sample of each row, by layer name and index of the call."""

_DIRECTIONS = 4  # random directions of a profile
_WIDE = 8  # outputs of a group: profiles of narrower groups would be as large as the rows

# Factors are plus or minus a power of 8, so that the mean of a few factors is not another factor, times 1 + m/64, so
# that many samples have different factors.
_POWERS, _STEPS = range(-3, 4), 64
# Rows smaller than this share of the largest row of the layer are ignored: their outer products are rounding.
_SMALL = 1e-6
_TOLERANCE = {torch.float64: 1e-9, torch.float32: 2e-4}
# Rounding of a row is that of the largest terms of its sum, not of the sum: in units of the last place of the largest
# gradient of the layer, times the factor of the row.
_ROUNDING = 8
# Further passes for rows in an unusual order, which other factors may scale by chance.
_FURTHER = {torch.float32: 1, torch.bfloat16: 4, torch.float16: 10}
_COARSE = 0.03  # tolerance of half precision, where factors are powers of two, or signs


def sample_factors(n: int, dtype: torch.dtype = torch.float64, seed: int = 0) -> Tensor:
    """Return a factor per sample, shape (n,) in float64.

    Args:
        n: Number of samples.
        dtype: Precision of the gradients that are scaled: bfloat16 allows powers of 8 only, float16 only signs.
        seed: Seed of the order of the factors.
    """
    if dtype == torch.float16:
        codes = torch.tensor([1.0, -1.0], dtype=torch.float64)
    else:
        powers = 8.0 ** torch.tensor(list(_POWERS), dtype=torch.float64)
        steps = 1 + torch.arange(_STEPS if dtype in _TOLERANCE else 1, dtype=torch.float64) / _STEPS
        codes = (torch.tensor([1.0, -1.0])[:, None, None] * powers[:, None] * steps).flatten().double()
    generator = torch.Generator().manual_seed(seed)
    # Each factor is used once before any is repeated, then in another order: samples at a fixed distance must differ.
    rounds = [torch.randperm(len(codes), generator=generator) for _ in range(-(-n // len(codes)))]
    return codes[torch.cat(rounds)[:n]] if n else codes[:0]


def output_signs(output: Tensor, seed: int = 0) -> Tensor:
    """Return random signs shaped like the output, so that one backward pass covers all outputs.

    Args:
        output: Output of the model.
        seed: Seed of the signs.
    """
    bits = torch.randint(0, 2, output.shape, generator=torch.Generator().manual_seed(seed), dtype=torch.int8)
    return bits.to(output.device, output.dtype).mul_(2).sub_(1)


def row_profiles(rows: Tensor) -> Profile:
    """Return the products of each row with a few random directions, and the precision of the rows.

    Rows that are multiples of each other have profiles that are multiples of each other by the same factor, and other
    rows have not. A profile takes little memory, and no copy of the rows.

    Args:
        rows: Gradients of shape (samples, positions, groups, k).

    Returns:
        Products of shape (samples, positions, 4), and the dtype of `rows`.
    """
    n, positions, groups, k = rows.shape
    if groups > 1 and k >= _WIDE:  # experts in one product: each group has rows of other samples
        rows = rows.reshape(n, positions * groups, 1, k)
        positions, groups = positions * groups, 1
    precision = torch.promote_types(rows.dtype, torch.float32)
    directions = _directions(groups * k, precision, rows.device)
    given, rows = rows.dtype, rows.to(precision)
    with without_autocast(rows.device):
        if rows.stride(1) == 1 and positions > 1:  # channels first, as in convolutions
            by_channel = rows.permute(0, 2, 3, 1).reshape(n, groups * k, positions)
            return (directions.mT @ by_channel).mT, given
        return rows.reshape(n, positions, groups * k) @ directions, given


@lru_cache(maxsize=64)
def _directions(size: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    # Normal, not signs: those would be orthogonal to a difference of two coordinates half of the time.
    return torch.randn(size, _DIRECTIONS, generator=torch.Generator().manual_seed(size)).to(device, dtype)


def shared_layers(
    trace: Trace,
    cotangent: Tensor | None = None,
    known: Profiles | None = None,
    seed: int = 0,
    owners: Owners | None = None,
) -> set[str]:
    """Find the layers in which a row acts on several samples.

    The cotangent of each sample is scaled by a different factor. The gradient at a row that acts on one sample is then
    scaled by the factor of that sample; at a row that acts on several samples it is scaled by none of the factors.
    Time: one backward pass, and another one without ``known``; none if the graph proves that there are no such rows.

    Args:
        trace: Trace of the batch.
        cotangent: Tensor shaped like the output. None takes random signs.
        known: Profiles of the gradients for this cotangent. None computes them.
        seed: Seed of the factors. A different seed per batch avoids repeated coincidences.
        owners: Dict that receives the factor of the sample of each row, by name and index of the call, for layers whose
            rows are not in the order of the samples, such as those of an expert; NaN for rows of small gradients.

    Returns:
        Names of the layers with shared rows.
    """
    output = trace.output
    n = output.shape[0]
    if n < 2 or trace.has_own_rows:
        return set()
    v = output_signs(output, seed) if cotangent is None else cotangent
    plain = _profiles(trace, v) if known is None else known
    # Scaled by a factor, small gradients of half precision would lose digits.
    tiny = 0.0 if output.dtype == torch.float16 else 1e6 * torch.finfo(output.dtype).tiny
    shared: set[str] = set()
    unsure = set(plain)
    for turn in range(1 + _FURTHER.get(output.dtype, 0)):
        factors = sample_factors(n, output.dtype, seed + 7919 * turn).to(output.device)
        scaled = _profiles(trace, v * factors.to(v.dtype).reshape(-1, *[1] * (output.ndim - 1)))
        for name in sorted(unsure):
            others = scaled.get(name, {})
            pairs = {i: (profile, others[i]) for i, profile in plain[name].items() if i in others}
            largest = max((float(j.abs().amax()) for pair in pairs.values() for j, _ in pair if j.numel()), default=0.0)
            answers = []
            for i, (a, b) in pairs.items() if largest > tiny else ():
                answer, owner = _of_one_sample(a, b, factors, largest, trace.lowered)
                answers.append(answer)
                if owners is not None and owner is not None and turn == 0:
                    owners.setdefault(name, {})[i] = owner
            if "no" in answers:
                shared.add(name)
            if "no" in answers or "maybe" not in answers:
                unsure.discard(name)
        if not unsure:
            break
    return shared


def _profiles(trace: Trace, cotangent: Tensor) -> Profiles:
    profiles: dict[str, dict[int, Profile]] = {}

    def keep(name: str, index: int, rows: Tensor) -> None:
        profiles.setdefault(name, {})[index] = row_profiles(rows)

    trace.stream(trace.output, cotangent, keep)
    return profiles


def _of_one_sample(
    plain: Profile, scaled: Profile, factors: Tensor, largest: float, lowered: bool
) -> tuple[str, Tensor | None]:
    """Return whether each row, given by its profile, was scaled by a single factor, and these factors if not in order.

    The answer is "yes" if the rows are in the order of the samples, and "maybe" if each was scaled by a factor of any
    sample: a mean of factors may be another one.
    """
    (a, dtype), (b, _) = plain, scaled
    if a.numel() == 0:
        return "yes", None
    known_to = torch.float32 if lowered and dtype == torch.float64 else dtype
    tolerance, precision = _TOLERANCE.get(known_to, _COARSE), a.dtype
    rounding = _ROUNDING * torch.finfo(known_to).eps * float(a.abs().amax())
    # The sum over samples of either may vanish, so a row is small only if both are.
    decisive = torch.maximum(a.abs().amax(2), b.abs().amax(2)) > _SMALL * largest
    for expected in _in_order(factors.to(precision), a.shape[0], a.shape[1]):
        off = (b - expected * a).abs().amax(2)
        even = off <= tolerance * b.abs().amax(2) + rounding * expected.abs()[..., 0]
        if bool((even | ~decisive).all()):
            return "yes", None
    owners = torch.full(decisive.shape, torch.nan, dtype=precision, device=a.device)
    a, b = a[decisive], b[decisive]
    at = a.abs().argmax(1, keepdim=True)
    quotient = (b.gather(1, at) / a.gather(1, at)).double()
    known = factors.sort().values
    above = torch.searchsorted(known, quotient).clamp(max=len(known) - 1)
    below = (above - 1).clamp_min(0)
    closer_above = (known[above] - quotient).abs() < (known[below] - quotient).abs()
    nearest = torch.where(closer_above, known[above], known[below]).to(precision)
    off = (b - nearest * a).abs().amax(1, keepdim=True)
    even = off <= tolerance * b.abs().amax(1, keepdim=True) + rounding * nearest.abs()
    owners[decisive] = nearest.squeeze(1)
    return ("maybe", owners) if bool(even.all()) else ("no", None)


def _in_order(factors: Tensor, rows: int, positions: int) -> Iterator[Tensor]:
    """Yield the factors of the rows (rows, positions, 1), for the usual orders of samples."""
    n = len(factors)
    if rows % n == 0:  # one row per sample, windows of a sample, or steps of all samples
        yield factors.repeat_interleave(rows // n)[:, None, None]
        if rows > n:
            yield factors.repeat(rows // n)[:, None, None]
    if positions % n == 0:  # samples in the second dimension
        yield factors.repeat_interleave(positions // n)[None, :, None]
