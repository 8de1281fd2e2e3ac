"""Numbers from outputs that were sketched: free of the shift that noise causes, and with a standard error.

The sketch is kept in a few independent groups. ``F`` is a neural feature matrix, ``G_i`` the estimate of its partner
from group i. Whatever groups are left out, correlations follow from a handful of inner products.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from featlearn.features.factored import Factored, ratio

__all__ = ["GroupProducts", "group_products", "jackknife_error"]


@dataclass(frozen=True)
class GroupProducts:
    """Inner products of F and the groups' estimates.

    Attributes:
        size: ``|F|``.
        inner: ``<F, G_i>``.
        products: ``<G_i, G_j>``.
    """

    size: float
    inner: Tensor
    products: Tensor

    def without(self, group: int) -> GroupProducts:
        """The same with one group left out."""
        rest = [i for i in range(len(self.inner)) if i != group]
        return GroupProducts(self.size, self.inner[rest], self.products[rest][:, rest])

    def cosine(self) -> float:
        """Cosine of F and the mean of the groups.

        ``E <G_i, G_j>`` is ``|G|^2`` for i and j apart, but ``|G|^2`` plus the noise for i = j: the mean over pairs
        estimates the square of the length without bias, where the length of the mean is too long.
        """
        groups = len(self.inner)
        square = float(self.products.sum()) / groups**2
        if groups > 1:
            pairs = float(self.products.sum() - self.products.diagonal().sum()) / (groups * (groups - 1))
            # Where noise is all there is, pairs may come out negative: then the plain length stands.
            square = pairs if pairs > 0 else square
        return min(ratio(float(self.inner.mean()), self.size * math.sqrt(max(square, 0.0))), 1.0)

    def over(self, other: GroupProducts) -> float:
        """Ratio of the unnormalised ``<F, G>`` to another."""
        return ratio(float(self.inner.sum()), float(other.inner.sum()))


def group_products(nfm: Factored, groups: Sequence[Factored]) -> GroupProducts:
    """All inner products of a neural feature matrix and the groups' estimates of its partner."""
    return GroupProducts(
        nfm.norm(),
        torch.tensor([nfm.inner(g) for g in groups], dtype=torch.float64),
        torch.tensor([[g.inner(h) for h in groups] for g in groups], dtype=torch.float64),
    )


def jackknife_error(values: Sequence[float]) -> float:
    """Standard error from the values with one group left out each, ``((m-1)/m sum (v_j - mean)^2)^{1/2}``."""
    v = torch.tensor(values, dtype=torch.float64)
    return float(((len(v) - 1) / len(v) * (v - v.mean()).square().sum()).sqrt())
