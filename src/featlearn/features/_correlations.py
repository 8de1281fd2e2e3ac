"""Factored feature matrices, and correlations of sketched ones with standard errors.

Every feature matrix of a layer is ``M = L^T C R`` with thin factors: the NFM is ``W^T W``, the AGOP
``W^T K W``, FACT ``-(1/lambda) W^T dL/dW``. Inner products, norms, means, diagonals and powers follow from the
small Gram matrices of the factors.

Sketched outputs are kept in a few independent groups. ``F`` is a neural feature matrix, ``G_i`` the estimate of its
partner from group i. Correlations, also without some of the groups, follow from a few inner products.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from featlearn.linalg.matrices import psd_power


class Factor:
    """Thin factor of shape (blocks, r, k) with a cache of its products with other factors."""

    def __init__(self, tensor: Tensor) -> None:
        self.tensor = tensor
        self._grams: dict[int, tuple[Factor, Tensor]] = {}

    def gram(self, other: Factor) -> Tensor:
        """Return ``self other^T``, shape (blocks, r, r'), computed once per pair."""
        if id(other) not in self._grams:
            product = self.tensor @ other.tensor.mT
            # The other factor is kept with the product: a new object must not reuse its id.
            self._grams[id(other)] = (other, product)
            if other is not self:
                other._grams[id(self)] = (self, product.mT)
        return self._grams[id(other)][1]


class Factored:
    """Matrix ``L^T C R``, or the dense matrix ``C`` if both factors are None.

    Args:
        left: Factor L, shape (blocks, r, k), or None.
        core: Core C, shape (blocks, r, r'). None is the identity.
        right: Factor R, shape (blocks, r', k'), or None.
    """

    def __init__(self, left: Factor | None, core: Tensor | None, right: Factor | None) -> None:
        self.left, self.core, self.right = left, core, right
        self._seen: tuple[Factor, Tensor] | None = None

    def dense(self) -> Tensor:
        """Return the matrix as a tensor, shape (blocks, k, k')."""
        if self.left is None or self.right is None:
            assert self.core is not None
            return self.core
        return self.left.tensor.mT @ _times(self.core, self.right.tensor)

    def inner(self, other: Factored) -> float:
        """Return the inner product ``<M, N> = tr(M^T N)``, summed over the blocks."""
        if self.left is None and other.left is None:
            assert self.core is not None and other.core is not None
            return float((self.core * other.core).sum())
        if self.left is None or other.left is None:
            thin, dense = (other, self) if self.left is None else (self, other)
            assert thin.left is not None and thin.right is not None and dense.core is not None
            seen = thin.left.tensor @ dense.core @ thin.right.tensor.mT
            return float((seen * thin.core).sum() if thin.core is not None else _trace(seen))
        assert self.right is not None and other.right is not None
        if self.left is self.right is other.left is other.right:
            # Both are symmetric: tr(C A D A) = <A C, (A D)^T> with A = L L^T, one product per core.
            return float((self._from(self.left) * other._from(self.left).mT).sum())
        lefts, rights = other._from(self.left), self.right.gram(other.right)
        if self.core is not None:
            lefts = self.core.mT @ lefts
        return float((lefts * rights).sum())

    def _from(self, factor: Factor) -> Tensor:
        """Return ``factor L^T C``; the last result is cached, because the next factor is often the same."""
        assert self.left is not None
        if self.core is None:
            return factor.gram(self.left)
        if self._seen is None or self._seen[0] is not factor:
            self._seen = (factor, factor.gram(self.left) @ self.core)
        return self._seen[1]

    def norm(self) -> float:
        """Return the Frobenius norm."""
        return math.sqrt(max(self.inner(self), 0.0))

    def size(self) -> int:
        """Return the number of entries of all blocks."""
        if self.left is None or self.right is None:
            assert self.core is not None
            return self.core.numel()
        return self.left.tensor.shape[0] * self.left.tensor.shape[2] * self.right.tensor.shape[2]

    def total(self) -> float:
        """Return the sum of the entries."""
        if self.left is None or self.right is None:
            assert self.core is not None
            return float(self.core.sum())
        left, right = self.left.tensor.sum(-1, keepdim=True), self.right.tensor.sum(-1, keepdim=True)
        return float((left * _times(self.core, right)).sum())

    def diagonal(self) -> Tensor:
        """Return the diagonals of the blocks, shape (blocks, k)."""
        if self.left is None or self.right is None:
            assert self.core is not None
            return self.core.diagonal(dim1=-2, dim2=-1)
        return (self.left.tensor * _times(self.core, self.right.tensor)).sum(-2)

    def power(self, exponent: float) -> Factored:
        """Return a power of a positive semi-definite ``L^T C L``, in the same factors.

        With ``Q = C^{1/2}`` and ``Q L L^T Q = V t V^T`` the power is ``L^T [Q V t^{p-1} V^T Q] L``.
        """
        if self.left is None:
            assert self.core is not None
            return Factored(None, psd_power(self.core, exponent), None)
        gram = self.left.gram(self.left)
        if self.core is None:
            return Factored(self.left, psd_power(gram, exponent - 1), self.right)
        root = psd_power(self.core, 0.5)
        return Factored(self.left, root @ psd_power(root @ gram @ root, exponent - 1) @ root, self.right)


def factored(left: Factor, core: Tensor | None, right: Factor) -> Factored:
    """Return the product ``L^T C R``, multiplied out if the factors are not thin."""
    product = Factored(left, core, right)
    if left.tensor.shape[1] <= left.tensor.shape[2]:
        return product
    return Factored(None, product.dense(), None)


def correlation(a: Factored, b: Factored, kind: str = "cosine", diagonal: bool = False) -> float:
    """Return the cosine or Pearson correlation of two matrices, or of their diagonals; NaN if a norm is zero."""
    if diagonal:
        a, b = (Factored(None, m.diagonal().unsqueeze(-1), None) for m in (a, b))
    inner, first, second = a.inner(b), a.inner(a), b.inner(b)
    if kind == "pearson":
        total_a, total_b, entries = a.total(), b.total(), a.size()
        inner -= total_a * total_b / entries
        first -= total_a**2 / entries
        second -= total_b**2 / entries
    return ratio(inner, math.sqrt(max(first, 0.0)) * math.sqrt(max(second, 0.0)))


def ratio(numerator: float, denominator: float) -> float:
    """Return the quotient; NaN if the denominator is zero."""
    return numerator / denominator if denominator != 0 else math.nan


def _times(core: Tensor | None, right: Tensor) -> Tensor:
    return right if core is None else core @ right


def _trace(blocks: Tensor) -> Tensor:
    return torch.einsum("gii->", blocks)


@dataclass(frozen=True)
class GroupProducts:
    """Inner products of F and the estimates of the groups.

    Attributes:
        size: Norm ``|F|``.
        inner: Inner products ``<F, G_i>``, shape (groups,).
        products: Inner products ``<G_i, G_j>``, shape (groups, groups).
    """

    size: float
    inner: Tensor
    products: Tensor

    def without(self, group: int) -> GroupProducts:
        """Return the inner products without one group."""
        rest = [i for i in range(len(self.inner)) if i != group]
        return GroupProducts(self.size, self.inner[rest], self.products[rest][:, rest])

    def cosine(self) -> float:
        """Return the cosine of F and the mean of the groups.

        ``E <G_i, G_j>`` is ``|G|^2`` for different i and j, but ``|G|^2`` plus the noise for i = j: the mean over pairs
        is an unbiased estimate of the squared norm, while the norm of the mean is too large.
        """
        groups = len(self.inner)
        square = float(self.products.sum()) / groups**2
        if groups > 1:
            pairs = float(self.products.sum() - self.products.diagonal().sum()) / (groups * (groups - 1))
            # If the noise dominates, the mean over pairs can be negative: use the biased norm then.
            square = pairs if pairs > 0 else square
        return min(ratio(float(self.inner.mean()), self.size * math.sqrt(max(square, 0.0))), 1.0)

    def over(self, other: GroupProducts) -> float:
        """Return the ratio of the unnormalized ``<F, G>`` to that of other products."""
        return ratio(float(self.inner.sum()), float(other.inner.sum()))


def group_products(nfm: Factored, groups: Sequence[Factored]) -> GroupProducts:
    """Return all inner products of a neural feature matrix and the estimates of its partner, one per group."""
    return GroupProducts(
        nfm.norm(),
        torch.tensor([nfm.inner(g) for g in groups], dtype=torch.float64),
        torch.tensor([[g.inner(h) for h in groups] for g in groups], dtype=torch.float64),
    )


def jackknife_error(values: Sequence[float]) -> float:
    """Return the jackknife standard error ``((m-1)/m sum (v_j - mean)^2)^{1/2}`` from leave-one-out values."""
    v = torch.tensor(values, dtype=torch.float64)
    return float(((len(v) - 1) / len(v) * (v - v.mean()).square().sum()).sqrt())
