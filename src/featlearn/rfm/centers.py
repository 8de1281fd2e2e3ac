"""Which rows are Nystrom centres."""

from __future__ import annotations

import torch
from torch import Tensor

from featlearn.errors import InputError
from featlearn.numerics.seeds import Seed, as_generator
from featlearn.rfm.kernel_rows import KernelRows, check_rows, cholesky, kernel_diagonal, over_transposed
from featlearn.rfm.kernels import Kernel

__all__ = ["choose_centers"]

_PILOT = 512  # rows from which leverage scores are estimated


def choose_centers(
    kernel: Kernel,
    u: Tensor,
    weights: Tensor,
    m: int,
    bandwidth: float,
    ridge: float,
    how: str = "uniform",
    generator: Seed = None,
) -> Tensor:
    r"""Rows to be centres, drawn without replacement.

    "leverage" draws row i with a probability proportional to its ridge leverage score, the weight of row i in its own
    fitted value, estimated from a uniform sample J of p rows (as in Rudi et al. 2018):

    ``l_i = w_i / (N lambda) [k_ii - k_iJ (K_JJ + lambda D^{-1})^{-1} k_Ji]``, ``D = diag(w_j n / (p N))``, N = sum w.

    Rows in places where few others are have large scores; "uniform" may leave such places without a centre.

    Args:
        kernel: The kernel.
        u: Rows transformed by the root of M, ``(n, d)``; centred for a radial kernel.
        weights: Of the rows, ``(n,)``; a row of weight zero is never a centre.
        m: How many; if there are no more rows of positive weight, all of them.
        bandwidth: L.
        ridge: lambda, above 0 for "leverage".
        how: "uniform" or "leverage".
        generator: Generator or seed.

    Returns:
        Row numbers, ascending.

    Time: "leverage" ``O(n p (d + p))`` with p = 512 at the most. Memory: ``O(n + p^2)`` and a block of the kernel.
    """
    check_rows(u, weights, bandwidth, ridge)
    if not isinstance(m, int) or isinstance(m, bool) or m < 1:
        raise InputError(f"m, the number of centres, must be a whole number of at least 1, got {m!r}")
    if how not in ("uniform", "leverage"):
        raise InputError(f'how must be "uniform" or "leverage", got {how!r}')
    random = as_generator(generator, "nystrom centers")
    rows = weights.nonzero()[:, 0]
    if m >= len(rows):
        return rows
    if how == "uniform":
        picked = torch.randperm(len(rows), generator=random)[:m]
    else:
        scores = _leverage(kernel, u, weights, rows, bandwidth, ridge, random)
        # A race of exponential clocks: the first m to ring are a sample without replacement, for any n.
        clocks = torch.empty(len(rows), dtype=torch.float64).exponential_(generator=random)
        picked = torch.topk(clocks / scores[rows].cpu(), m, largest=False).indices
    chosen: Tensor = rows[picked.to(rows.device)].sort().values
    return chosen


def _leverage(
    kernel: Kernel, u: Tensor, weights: Tensor, rows: Tensor, bandwidth: float, ridge: float, random: torch.Generator
) -> Tensor:
    """Ridge leverage scores of all rows, estimated from a sample of those given, float64."""
    if ridge == 0:
        raise InputError('how="leverage" needs a ridge above 0: without one, every row has the same score')
    pilot = rows[torch.randperm(len(rows), generator=random)[:_PILOT].to(rows.device)]
    weights = weights.double()
    total = weights.sum()
    within = kernel.matrix(u[pilot].double(), u[pilot].double(), bandwidth)
    within.diagonal().add_(ridge * total * len(pilot) / (len(rows) * weights[pilot]))
    factor = cholesky(within, torch.finfo(u.dtype).eps)
    scores = torch.empty_like(weights)
    for block, entries in KernelRows(kernel, u, u[pilot], bandwidth, 0).blocks():
        explained = over_transposed(entries, factor).square_().sum(1)
        scores[block] = kernel_diagonal(kernel, u[block].double(), bandwidth).sub_(explained)
    # What the pilot explains wholly is 0 or less by rounding, and must still be able to ring.
    scores.clamp_min_(torch.finfo(u.dtype).eps * scores.max())
    return scores.mul_(weights).div_(total * ridge)
