"""Permutation test of whether labels depend on inputs.

References:
    Schilling, "Multivariate two-sample tests based on nearest neighbors", JASA 1986,
    https://doi.org/10.1080/01621459.1986.10478337.
"""

from __future__ import annotations

import torch
from torch import Tensor

_NEIGHBORS = 5
_PERMUTATIONS = 499
_LEAST_ROWS = 30


def label_p_value(rows: Tensor, labels: Tensor) -> float | None:
    """Return the p-value of the agreement of labels with those of the nearest neighbors, under permutations of labels.

    Classes agree if they are equal; real labels by the product of their deviations from the mean. Time:
    O(n^2 d + 500 n) for n rows in d dimensions.

    Args:
        rows: Inputs or features, shape (n, d), in any units.
        labels: Classes of shape (n,), or real labels of shape (n,) or (n, c).

    Returns:
        The p-value, at least 0.002; None for fewer than 30 rows, labels that do not vary or rows without neighbors.
    """
    n = len(labels)
    if n < _LEAST_ROWS or len(rows) != n:
        return None
    x = rows.double().reshape(n, -1)
    x = x - x.mean(0)
    if labels.is_floating_point():
        y = labels.double().reshape(n, -1)
        y = y - y.mean(0)
    else:
        y = torch.nn.functional.one_hot(torch.unique(labels, return_inverse=True)[1]).double()
        y = y - y.mean(0)
    if not bool(y.any()) or not bool(x.any()) or not bool(torch.isfinite(x).all()):
        return None
    distances = torch.cdist(x, x)
    distances.fill_diagonal_(torch.inf)
    near = distances.topk(_NEIGHBORS, largest=False).indices
    graph = torch.zeros(n, n, dtype=torch.float64).scatter_(1, near, 1.0)
    generator = torch.Generator().manual_seed(0)
    statistic = float((y * (graph @ y)).sum())
    reached = 1
    for _ in range(_PERMUTATIONS):
        permuted = y[torch.randperm(n, generator=generator)]
        reached += float((permuted * (graph @ permuted)).sum()) >= statistic - 1e-12
    return reached / (_PERMUTATIONS + 1)
