r"""Tell a spectrum that the norms of rows and columns explain from one that needs more.

A matrix ``D_1 G D_2`` of Gaussian entries and diagonal scales has no signal, yet its spectrum leaves Marchenko-Pastur's
law: large rows look like spikes, rows of many sizes like a heavy tail. A matrix with the same entries and random signs
has the same norms, and nothing else of the structure: it is the null that a verdict is compared with.
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

from featlearn.spectra._phase import Phase
from featlearn.spectra._ranks import gram_eigenvalues

Array = NDArray[np.float64]

_CHANCE = 5.0  # standard deviations of the test for equal norms
_COPIES = 8
_FAR = 1.5  # factor beyond one copy that no other copy reaches
_SAME_TAIL = 0.1  # of logarithms: nulls of log-sd 1 are within 0.08, planted power laws beyond 0.12
_LARGE_ROWS = 64
_DENSE = 256  # sides up to which all eigenvalues take milliseconds
_BLOCK = 1 << 20


def varying_norms(weight: Tensor) -> str:
    r"""Return ``"row norms vary"``, ``"column norms vary"``, ``"row and column norms vary"``, or nothing.

    The test is an analysis of variance of ``t = w^2 / (w^2 + m)``, m the median of ``w^2``, over rows and over columns.
    t is bounded, so that a few huge entries, which make norms vary by chance, count for little: entries of one law,
    whatever its tail, pass. Norms vary if the variance between rows is more than 5 standard deviations above that of
    rows of one law.

    Args:
        weight: Block-diagonal matrix of shape ``(groups, h, d)``, finite.

    Time: ``O(entries)``. Memory: a block of rows.
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
    """Return how many standard deviations the variance between rows is above that of rows of one law.

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
    if within <= rounding:  # all entries of a row are of one size
        return math.inf if between > rounding else 0.0
    return (between / within - 1) * math.sqrt((count - 1) / 2)


def flip_random_signs(weight: Tensor, seed: int) -> Tensor:
    """Return the matrix with random signs of its entries, in float32 or float64: the same norms, and no signal."""
    signs = torch.randint(0, 2, weight.shape, generator=torch.Generator().manual_seed(seed), dtype=torch.int8)
    dtype = torch.float64 if weight.dtype == torch.float64 else torch.float32
    return weight.detach().cpu().to(dtype) * signs.mul_(2).sub_(1)


def against_norms(found: Phase, make_weight: Callable[[], Tensor]) -> Phase:
    r"""Return the phase of a matrix, or "undecided" if the norms of its rows and columns alone explain it.

    Spikes and heavy tails are compared with those of copies of the matrix that have random signs, if its norms vary
    more than chance makes them. Spikes are explained if the largest eigenvalue does not exceed the largest of eight
    copies by more than their range, and no two large rows or columns are parallel; a heavy tail if the first holds, or
    if its eigenvalues are those of a copy, rank by rank (the median ratio is within 10%). A signal survives: it needs
    signs that agree along rows and columns. Where the phase is undecided anyway, norms that vary are added to its
    reason.

    Measured (``benchmarks/spectra_norms.py``, 60 draws of each kind): Gaussian matrices with scales of log-standard
    deviation 0.1 to 1 in rows, columns or both are called spikes or heavy tails in 0 to 2% of draws, where eigenvalues
    alone would say so in up to 100%. Delocalized spikes, spikes on ten rows or columns, Cauchy entries and power laws
    are found as often as by eigenvalues alone; a spike on three rows, most of it on one of them, is undecided in 2
    to 5% of draws, and one on a single row always may be: it is a row of a larger norm. Beside rows of log-sd 0.3 a
    spike needs about 4 times `bbp_threshold`, beside those of log-sd 1 more.

    Args:
        found: Phase of the matrix.
        make_weight: Returns the matrix, shape ``(groups, h, d)``; called for spikes, heavy tails and undecided phases.

    Time: where norms vary, the largest eigenvalue of one to eight matrices; for a heavy tail two whole spectra.
    """
    if found.name not in ("bulk + spikes", "heavy tail", "undecided") or found.evidence is None:
        return found
    weight = make_weight()
    varying = varying_norms(weight)
    if not varying:
        return found
    if found.name == "undecided":
        return replace(found, reason=f"{found.reason}; {varying}")
    weight = weight.detach() / weight.detach().abs().max()  # squares of a copy in float32 stay in range
    # The eigenvalues may be divided by something, such as the number of rows.
    unit = float(found.trained.sum() / sum(float(w.double().square().sum()) for w in weight))
    values = found.trained / unit
    threshold = _reach(weight, float(values[-1]))
    beyond = values[values > threshold][::-1] * unit
    if found.name == "heavy tail":
        assert found.evidence.tail is not None
        tail = slice(-found.evidence.tail.fit.n_tail, None)
        copy = gram_eigenvalues(flip_random_signs(weight, 0))
        ratios = values[tail] / copy[-values.size :][tail].clip(min=np.finfo(float).tiny)
        same = float(np.median(np.abs(np.log(ratios)))) <= _SAME_TAIL
        if beyond.size and not same:
            return found
        also = f"; {beyond.size} of its eigenvalues are beyond that" if beyond.size else ""
        reason = (
            f"{varying}: the same entries with random signs "
            + ("have the same heavy tail" if same else f"reach as far as the tail ({threshold * unit:.3g})")
            + also
        )
    elif beyond.size or _coherent(weight):
        return found
    else:
        count = len(found.evidence.spikes)
        spikes = f"{count} spikes" if count > 1 else "a spike"
        reason = (
            f"{varying}: there would be {spikes} beyond the bulk, but the same entries with random signs reach as far "
            f"({threshold * unit:.3g})"
        )
    evidence = replace(found.evidence, spikes=tuple(beyond.tolist()))
    return replace(found, name="undecided", reason=reason, evidence=evidence)


def _reach(weight: Tensor, top: float) -> float:
    """Return what eigenvalues of random signs reach: the largest of eight copies and their range.

    Fewer copies are made where they decide already: the largest eigenvalue is far beyond a copy's, or within it.
    """
    tops: list[float] = []
    for seed in range(_COPIES):
        tops.append(_largest(flip_random_signs(weight, seed)))
        if top <= max(tops) or top > _FAR * tops[0]:
            break
    return max(tops) + (max(tops) - min(tops))


def _coherent(weight: Tensor) -> bool:
    """Return whether two of the largest rows, or columns, are more parallel than with random signs.

    A signal on a few rows, most of it on one, hardly raises the largest eigenvalue beyond that row's norm, but makes
    the others parallel to it.
    """
    for side in (*weight, *weight.mT):
        rows = side[side.norm(dim=1).topk(min(_LARGE_ROWS, len(side))).indices]
        if len(rows) < 2 or side.shape[1] < 2:
            continue
        copies = [_cosine(flip_random_signs(rows, seed)) for seed in range(_COPIES)]
        if _cosine(rows.cpu()) > 3 * max(copies) - 2 * min(copies):  # and twice their range
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
        start = np.random.default_rng(0).standard_normal(n)  # always the same: results do not change
        operator = LinearOperator((n, n), matvec=product, dtype=np.float64)
        best = max(best, float(eigsh(operator, 1, which="LA", v0=start, tol=1e-3, return_eigenvectors=False)[0]))
    return best
