"""Null model for spikes and heavy tails: a matrix with the same row and column norms, and random signs.

A matrix ``D_1 G D_2`` with Gaussian entries G and diagonal scales has no signal, but its spectrum differs from the
Marchenko-Pastur law: large rows look like spikes, and rows of many sizes like a heavy tail. A copy of the matrix with
random signs has the same entries up to sign, the same norms, and no other structure. The phase of a matrix is compared
with such copies.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace

import numpy as np
import torch
from numpy.typing import NDArray
from scipy.sparse.linalg import LinearOperator, eigsh
from torch import Tensor

from featlearn._utils.public_names import renamed_arguments
from featlearn.spectra._phase import Phase
from featlearn.spectra._ranks import gram_eigenvalues

Array = NDArray[np.float64]

_CHANCE = 5.0  # critical value of the test for equal norms, in standard deviations
_COPIES = 8
_FAR = 1.5  # an eigenvalue larger than one copy's by this factor exceeds those of all copies
_SAME_TAIL = 0.1  # difference of logarithms: below 0.08 for nulls of log-sd 1, above 0.12 for planted power laws
_LARGE_ROWS = 64
_DENSE = 256  # side up to which all eigenvalues are computed, in milliseconds
_BLOCK = 1 << 20


def varying_norms(weight: Tensor) -> str:
    """Test whether the norms of the rows or columns of a matrix vary more than chance allows.

    The test is an analysis of variance of ``t = w^2 / (w^2 + m)`` over rows and over columns, where m is the median of
    ``w^2``. t is bounded, so that a few huge entries, which make norms vary by chance, have little influence: entries
    of one distribution pass, whatever its tail. Norms vary if the variance between rows is more than 5 standard
    deviations above its expectation for rows of the same distribution.

    Time: ``O(entries)``. Memory: one block of rows.

    Args:
        weight: Block-diagonal matrix of shape ``(groups, h, d)``, finite.

    Returns:
        ``"row norms vary"``, ``"column norms vary"``, ``"row and column norms vary"``, or an empty string.

    Example:
        >>> import torch
        >>> from featlearn.spectra import varying_norms
        >>> weight = torch.randn(1, 100, 50, generator=torch.Generator().manual_seed(0))
        >>> varying_norms(weight), varying_norms(weight * torch.linspace(0.5, 2.0, 100)[:, None])
        ('', 'row norms vary')
    """
    groups, h, d = weight.shape
    sampled = weight.detach().flatten()[:: max(1, weight.numel() // _BLOCK)].double().square()
    positive = sampled[sampled > 0]
    if not positive.numel():
        return ""
    middle = sampled.median() if 2 * positive.numel() > sampled.numel() else positive.median()
    rows, columns = torch.zeros(groups, h, dtype=torch.float64), torch.zeros(groups, d, dtype=torch.float64)
    total = 0.0
    for group, block in enumerate(weight.detach()):
        for first in range(0, h, step := max(1, _BLOCK // d)):
            squares = block[first : first + step].double().square()
            bent = squares.div_(squares + middle).cpu()
            rows[group, first : first + step] = bent.sum(1)
            columns[group] += bent.sum(0)
            total += float(bent.square().sum())
    sides = [name for name, sums, n in (("row", rows, d), ("column", columns, h)) if _excess(sums, n, total) > _CHANCE]
    return f"{' and '.join(sides)} norms vary" if sides else ""


def _excess(sums: Tensor, inside: int, total: float) -> float:
    """Return the excess variance between rows over that of rows of one distribution, in standard deviations.

    Args:
        sums: Sum of each row.
        inside: Number of entries per row.
        total: Sum of the squares of all entries.
    """
    means = sums.flatten() / inside
    count = means.numel()
    if count < 2 or inside < 2:
        return 0.0
    within = (total - inside * float(means.square().sum())) / (count * (inside - 1))
    between = inside * float((means - means.mean()).square().sum()) / (count - 1)
    rounding = 1e-12 * total / (count * inside)
    if within <= rounding:  # all entries of a row have the same size
        return math.inf if between > rounding else 0.0
    return (between / within - 1) * math.sqrt((count - 1) / 2)


def flip_random_signs(weight: Tensor, seed: int) -> Tensor:
    """Return a copy of a matrix with random signs, in float32 or float64: the same norms, and no signal.

    Args:
        weight: Matrix of any shape and floating dtype.
        seed: Seed of the signs.
    """
    signs = torch.randint(0, 2, weight.shape, generator=torch.Generator().manual_seed(seed), dtype=torch.int8)
    dtype = torch.float64 if weight.dtype == torch.float64 else torch.float32
    return weight.detach().cpu().to(dtype) * signs.mul_(2).sub_(1)


@renamed_arguments(found="phase")
def against_norms(phase: Phase, make_weight: Callable[[], Tensor]) -> Phase:
    """Return the phase of a matrix, or "undecided" if the norms of its rows and columns alone explain it.

    If the norms vary more than chance allows, spikes and heavy tails are compared with those of copies of the matrix
    with random signs. Spikes are explained by the norms if the largest eigenvalue does not exceed the largest of eight
    copies by more than their range, and no two large rows or columns are parallel. A heavy tail is explained if its
    largest eigenvalue does not exceed that of the copies either, or if its eigenvalues are those of a copy, rank by
    rank (the median ratio is within 10%). A signal remains, because it requires signs that agree along rows and
    columns. If the phase is already "undecided", varying norms are added to its reason.

    Measured (``benchmarks/spectra_norms.py``, 60 draws of each kind): Gaussian matrices with scales of log-standard
    deviation 0.1 to 1 in rows, columns or both are classified as spikes or heavy tails in 0 to 2% of draws, by
    eigenvalues alone in up to 100%. Delocalized spikes, spikes on ten rows or columns, Cauchy entries and power laws
    are detected as often as by eigenvalues alone. A spike on three rows, most of it on one of them, is undecided in 2
    to 5% of draws. A spike on a single row can always be undecided, because it is a row of a larger norm. Next to rows
    of log-sd 0.3 a spike must be about 4 times `bbp_threshold`, next to those of log-sd 1 larger.

    Time: if norms vary, the largest eigenvalue of one to eight matrices; for a heavy tail two whole spectra.

    Args:
        phase: Phase of the matrix, from its eigenvalues.
        make_weight: Function that returns the matrix, shape ``(groups, h, d)``. Called for the phases "bulk + spikes",
            "heavy tail" and "undecided".

    Returns:
        The same phase, or one with the name "undecided" and the reason.
    """
    if phase.name not in ("bulk + spikes", "heavy tail", "undecided") or phase.evidence is None:
        return phase
    weight = make_weight()
    varying = varying_norms(weight)
    if not varying:
        return phase
    if phase.name == "undecided":
        return replace(phase, reason=f"{phase.reason}; {varying}")
    weight = weight.detach() / weight.detach().abs().max()  # squares of a copy in float32 stay in range
    # The eigenvalues can have a divisor, such as the number of rows.
    unit = float(phase.trained.sum() / sum(float(w.double().square().sum()) for w in weight))
    values = phase.trained / unit
    threshold = _reach(weight, float(values[-1]))
    beyond = values[values > threshold][::-1] * unit
    if phase.name == "heavy tail":
        assert phase.evidence.tail is not None
        tail = slice(-phase.evidence.tail.fit.n_tail, None)
        copy = gram_eigenvalues(flip_random_signs(weight, 0))
        ratios = values[tail] / copy[-values.size :][tail].clip(min=np.finfo(float).tiny)
        same = float(np.median(np.abs(np.log(ratios)))) <= _SAME_TAIL
        if beyond.size and not same:
            return phase
        also = f"; {beyond.size} of its eigenvalues are beyond that" if beyond.size else ""
        reason = (
            f"{varying}: the same entries with random signs "
            + ("have the same heavy tail" if same else f"reach as far as the tail ({threshold * unit:.3g})")
            + also
        )
    elif beyond.size or _coherent(weight):
        return phase
    else:
        count = len(phase.evidence.spikes)
        spikes = f"{count} spikes" if count > 1 else "1 spike"
        reason = (
            f"{varying}: {spikes} beyond the bulk, but the same entries with random signs reach as far "
            f"({threshold * unit:.3g})"
        )
    evidence = replace(phase.evidence, spikes=tuple(beyond.tolist()))
    return replace(phase, name="undecided", reason=reason, evidence=evidence)


def _reach(weight: Tensor, top: float) -> float:
    """Return the threshold that random signs reach: the largest eigenvalue of eight copies plus their range.

    Fewer copies are made if they suffice: if `top` is far above the first copy's eigenvalue, or not above a copy's.
    """
    tops: list[float] = []
    for seed in range(_COPIES):
        tops.append(_largest(flip_random_signs(weight, seed)))
        if top <= max(tops) or top > _FAR * tops[0]:
            break
    return max(tops) + (max(tops) - min(tops))


def _coherent(weight: Tensor) -> bool:
    """Return whether two of the largest rows, or columns, are more parallel than with random signs.

    A signal on a few rows, most of it on one, hardly raises the largest eigenvalue above the norm of that row, but
    makes the others parallel to it.
    """
    for side in (*weight, *weight.mT):
        rows = side[side.norm(dim=1).topk(min(_LARGE_ROWS, len(side))).indices]
        if len(rows) < 2 or side.shape[1] < 2:
            continue
        copies = [_cosine(flip_random_signs(rows, seed)) for seed in range(_COPIES)]
        if _cosine(rows.cpu()) > 3 * max(copies) - 2 * min(copies):  # the largest copy plus twice the range
            return True
    return False


def _cosine(rows: Tensor) -> float:
    """Return the largest absolute cosine of two rows."""
    unit = rows.double() / rows.double().norm(dim=1, keepdim=True).clamp_min(torch.finfo(torch.float64).tiny)
    return float((unit @ unit.mT).fill_diagonal_(0.0).abs().max())


def _largest(weight: Tensor) -> float:
    """Return the largest eigenvalue of ``W^T W``, to about 0.1%."""
    best = 0.0
    for block in weight:
        if min(block.shape) <= _DENSE:
            best = max(best, float(gram_eigenvalues(block[None])[-1]))
            continue
        a = block if block.shape[0] >= block.shape[1] else block.mT

        def product(v: Array, a: Tensor = a) -> Array:
            u = torch.from_numpy(np.ascontiguousarray(v.ravel())).to(a.dtype)
            result: Array = (a.mT @ (a @ u)).double().numpy()
            return result

        n = a.shape[1]
        start = np.random.default_rng(0).standard_normal(n)  # a fixed start makes results reproducible
        operator = LinearOperator((n, n), matvec=product, dtype=np.float64)
        best = max(best, float(eigsh(operator, 1, which="LA", v0=start, tol=1e-3, return_eigenvectors=False)[0]))
    return best
