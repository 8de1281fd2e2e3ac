"""Factored feature matrices of a layer, and correlations of sketched ones with standard errors.

Every feature matrix of a layer is ``M = L^T C R`` with thin factors: the NFM is ``W^T W``, the AGOP
``W^T K W``, FACT ``-(1/lambda) W^T dL/dW``. Inner products, norms, means, diagonals and powers follow from the
small Gram matrices of the factors.

Sketched outputs are kept in a few independent groups. ``F`` is a neural feature matrix, ``G_i`` the estimate of its
partner from group i. Correlations, also without some of the groups, follow from a few inner products.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from featlearn.errors import InputError, NotMeasuredError
from featlearn.linalg.matrices import psd_power
from featlearn.linalg.symmetric_products import gram

FloatArray = NDArray[np.float64]

# Gram matrices, and their weights: W now, W0 before training, Wb their difference.
_GRAMS = {"nfm": "W", "bnfm": "W^T", "centered_nfm": "Wb", "initial_nfm": "W0"}
# Matrices ``weight^T core weight``: the weight, the core (K of output gradients, Kb of their change, B of loss
# gradients), and the name of the sum where the product is summed on the side of the inputs.
CONJUGATES = {
    "agop": ("W", "K", "agop"),
    "centered_agop": ("Wb", "K", "centered"),
    "double_centered_agop": ("Wb", "Kb", "double"),
    "ptk_centered_agop": ("W0", "Kb", "ptk"),
    "enfa": ("W", "B", "enfa"),
}
_CORES = {"bagop": "K", "ptk_covariance": "K", "benfa": "B"}
# Matrices ``weight^T gradient``.
_FACTS = {"fact": ("W", "D"), "bfact": ("W^T", "D^T")}
PARTNERS = {
    **dict.fromkeys(("agop", "enfa", "fact", "fact_symmetric"), "nfm"),
    **dict.fromkeys(("bagop", "benfa", "bfact", "bfact_symmetric"), "bnfm"),
    **dict.fromkeys(("centered_agop", "double_centered_agop"), "centered_nfm"),
    "ptk_centered_agop": "initial_nfm",
}
"""Feature matrices, and the Gram matrix of weights that each is compared with."""
_NEEDS = {
    "K": "the gradients of the outputs (measure nfc)",
    "Kb": "initial= and measure double_centered_nfc or ptk_centered_nfc",
    "B": "loss=",
    "D": "loss= and weight_decay=",
}

_SMALL = 2**16  # entries of matrices whose products are computed together


class Factor:
    """Thin factor of shape (blocks, r, k) with a cache of its products with other factors."""

    def __init__(self, tensor: Tensor) -> None:
        self.tensor = tensor
        self._grams: dict[int, tuple[Factor, Tensor]] = {}

    def gram(self, other: Factor) -> Tensor:
        """Return ``self other^T``, shape (blocks, r, r'), computed once per pair."""
        if id(other) not in self._grams:
            product = gram(self.tensor) if other is self else self.tensor @ other.tensor.mT
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

    @cached_property
    def square(self) -> float:
        """Squared Frobenius norm."""
        return self.inner(self)

    def norm(self) -> float:
        """Return the Frobenius norm."""
        return math.sqrt(max(self.square, 0.0))

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
    if core is None and left is right:
        return Factored(None, gram(left.tensor.mT), None)
    return Factored(None, product.dense(), None)


def correlation(a: Factored, b: Factored, kind: str = "cosine", diagonal: bool = False) -> float:
    """Return the cosine or Pearson correlation of two matrices, or of their diagonals; NaN if a norm is zero."""
    if diagonal:
        a, b = (Factored(None, m.diagonal().unsqueeze(-1), None) for m in (a, b))
    inner, first, second = a.inner(b), a.square, b.square
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
    inner: FloatArray
    products: FloatArray

    def without(self, group: int) -> GroupProducts:
        """Return the inner products without one group."""
        products = np.delete(np.delete(self.products, group, 0), group, 1)
        return GroupProducts(self.size, np.delete(self.inner, group), products)

    def cosine(self, clamped: bool = True) -> float:
        """Return the cosine of F and the mean of the groups.

        ``E <G_i, G_j>`` is ``|G|^2`` for different i and j, but ``|G|^2`` plus the noise for i = j: the mean over pairs
        is an unbiased estimate of the squared norm, while the norm of the mean is too large.

        Args:
            clamped: Whether values above 1, which the estimate of the norm allows, become 1.
        """
        groups = len(self.inner)
        square = float(self.products.sum()) / groups**2
        if groups > 1:
            pairs = float(self.products.sum() - self.products.trace()) / (groups * (groups - 1))
            # If the noise dominates, the mean over pairs can be negative: use the biased norm then.
            square = pairs if pairs > 0 else square
        value = ratio(float(self.inner.mean()), self.size * math.sqrt(max(square, 0.0)))
        return min(value, 1.0) if clamped else value

    def over(self, other: GroupProducts) -> float:
        """Return the ratio of the unnormalized ``<F, G>`` to that of other products."""
        return ratio(float(self.inner.sum()), float(other.inner.sum()))


def group_products(nfm: Factored, groups: Sequence[Factored]) -> GroupProducts:
    """Return all inner products of a neural feature matrix and the estimates of its partner, one per group."""
    shared, cores = groups[0].left, [g.core for g in groups if g.core is not None]
    small = len(cores) == len(groups) and cores[0].numel() <= _SMALL
    if small and nfm.left is nfm.right is shared and all(g.left is g.right is shared for g in groups):
        # All at once, as `Factored.inner`: the time of small matrices is that of the calls.
        stacked = torch.stack(cores)
        gram_times = stacked if shared is None else shared.gram(shared) @ stacked
        turned = gram_times if shared is None else gram_times.mT
        one = nfm.core if shared is None else nfm._from(shared)
        assert one is not None
        inner = (turned.flatten(1) @ one.flatten()).cpu().numpy()
        return GroupProducts(nfm.norm(), inner, (gram_times.flatten(1) @ turned.flatten(1).mT).cpu().numpy())
    products = np.zeros((len(groups), len(groups)))
    for i, g in enumerate(groups):
        for j, h in enumerate(groups[: i + 1]):
            products[i, j] = products[j, i] = g.inner(h)
    return GroupProducts(nfm.norm(), np.array([nfm.inner(g) for g in groups]), products)


@dataclass(frozen=True, eq=False)
class LayerMatrices:
    """Weights and averages of one layer, and the feature matrices built from them.

    Attributes:
        name: Path of the layer.
        kind: Kind of the layer.
        shape: Shape (groups, k_out, k_in) of the weight matrices.
        weights: ``W`` and, if the probe was given the initial model, ``W0``.
        sums: Averages over the data; those of output gradients have a leading dimension of sketch groups.
        weight_decay: Lambda of FACT; None if there is none.
        flags: Remarks on the measurement: no dependence, ties, parametrization.
        gradient_noise: Sampling noise of the gradient of the loss in W, in the Frobenius norm; None if not measured.
    """

    name: str
    kind: str
    shape: tuple[int, int, int]
    weights: Mapping[str, Tensor] = field(repr=False)
    sums: Mapping[str, Tensor] = field(repr=False)
    weight_decay: float | None = None
    flags: tuple[str, ...] = ()
    gradient_noise: float | None = None

    @cached_property
    def _factors(self) -> dict[str, Factor]:
        w = self.weights["W"].to(torch.float64)
        factors = {"W": Factor(w), "W^T": Factor(w.mT)}
        if "W0" in self.weights:
            w0 = self.weights["W0"].to(torch.float64)
            factors |= {"W0": Factor(w0), "Wb": Factor(w - w0)}
        if "D" in self.sums and self.weight_decay is not None:
            scaled = self.sums["D"] / -self.weight_decay
            factors |= {"D": Factor(scaled), "D^T": Factor(scaled.mT)}
        return factors

    def _factor(self, name: str) -> Factor:
        if name not in self._factors:
            if name.startswith("D"):
                raise NotMeasuredError(
                    f"FACT of layer {self.name!r} was not measured: probe with loss= and a weight_decay= "
                    "greater than 0 for this layer"
                )
            raise NotMeasuredError(f"layer {self.name!r} was probed without initial=, so it has no centered quantity")
        return self._factors[name]

    def _sum(self, name: str) -> Tensor:
        if name in self.sums:
            return self.sums[name]
        if lost := next((flag for flag in self.flags if flag.startswith("not measured")), None):
            raise NotMeasuredError(f"layer {self.name!r} was {lost}")
        detail = f"it needs {_NEEDS[name]}"
        if any(projected in self.sums for _, core, projected in CONJUGATES.values() if core == name):
            detail = (
                f"its {self.shape[1]} x {self.shape[1]} matrix is large, so only its projection on the inputs "
                "was summed; ask for it with measure=('ptk_covariance', ...)"
            )
        raise NotMeasuredError(f"layer {self.name!r} holds no sum {name}: {detail}")

    def _conjugates(self, name: str, by_group: bool = False) -> list[Factored]:
        """Return ``weight^T core weight`` of the mean over the sketch groups, or of each group."""
        weight, core, projected = CONJUGATES[name]
        factor = self._factor(weight)
        value = self._sum(projected if projected in self.sums else core)
        parts = list(value) if by_group else [_mean(value)]
        if projected in self.sums:
            return [Factored(None, part, None) for part in parts]
        return [factored(factor, part, factor) for part in parts]

    @cached_property
    def _products(self) -> dict[str, Factored]:
        return {}

    def _matrix(self, name: str) -> Factored:
        """Return a feature matrix by its public name."""
        if name in self._products:
            return self._products[name]
        if name in _CORES:
            return Factored(None, _mean(self._sum(_CORES[name])), None)
        if name.removesuffix("_symmetric") in _FACTS:
            weight, gradient = map(self._factor, _FACTS[name.removesuffix("_symmetric")])
            return factored(weight, None, gradient) if name in _FACTS else _symmetrized(weight.tensor, gradient.tensor)
        if name == "bnfm" and self.shape[1] <= self.shape[2]:
            w = self._factor("W")  # its Gram matrix serves others too
            self._products[name] = Factored(None, w.gram(w), None)
        elif name in _GRAMS:
            factor = self._factor(_GRAMS[name])
            self._products[name] = factored(factor, None, factor)
        elif name in CONJUGATES:
            (self._products[name],) = self._conjugates(name)
        else:
            raise InputError(f"name must be a feature matrix: one of {', '.join(PARTNERS)}, nfm, bnfm; got {name!r}.")
        return self._products[name]

    def _power(self, name: str, power: float) -> Factored:
        if power == 1:
            return self._matrix(name)
        if name in _FACTS:
            raise InputError(f"power must be 1 for {name}, which is not symmetric, got {power}. Use {name}_symmetric.")
        return self._matrix(name).power(power)

    def _symmetric_cosine(self, name: str) -> float:
        """Return the cosine of a symmetrized matrix and its partner."""
        weight, gradient = map(self._factor, _FACTS[name.removesuffix("_symmetric")])
        inner, size = symmetrized_inner(weight.tensor, gradient.tensor)
        return ratio(inner, self._matrix(PARTNERS[name]).norm() * size)

    def _overlap(self, name: str) -> float:
        """Return the inner product of a feature matrix and its partner."""
        return self._matrix(PARTNERS[name]).inner(self._matrix(name))

    @cached_property
    def _sketches(self) -> dict[str, GroupProducts]:
        return {}

    def _group_products(self, name: str) -> GroupProducts:
        if name not in self._sketches:
            groups = self._conjugates(name, by_group=True)
            self._sketches[name] = group_products(self._matrix(PARTNERS[name]), groups)
        return self._sketches[name]

    def _norm(self, factor: str) -> float:
        return float(self._factor(factor).tensor.norm())


def _mean(value: Tensor) -> Tensor:
    """Return the mean over sketch groups, if the sum has them."""
    return value.mean(0) if value.ndim == 4 else value


def _symmetrized(w: Tensor, d: Tensor) -> Factored:
    """Return ``(M M^T)^{1/2}`` of ``M = W^T D``, from the singular values of M rather than of ``M M^T``.

    With ``W^T = Q R`` and ``R D = U s V^T`` it is ``Q U s U^T Q^T``; the square of a singular value below 1e-8 would
    be lost.
    """
    thin = w.shape[1] < w.shape[2]
    q, r = torch.linalg.qr(w.mT) if thin else (None, w.mT)
    u, s = _left_singular(r, d)
    core = (u * s.unsqueeze(-2)) @ u.mT
    basis = None if q is None else Factor(q.mT)
    return Factored(basis, core, basis)


def symmetrized_inner(w: Tensor, d: Tensor) -> tuple[float, float]:
    """Return ``<W^T W, S>`` and ``|S|`` of ``S = (M M^T)^{1/2}`` with ``M = W^T D``, without computing S.

    With the factors of `_symmetrized` they are ``sum_i s_i |R^T u_i|^2`` and ``|s|``: Q is not needed.

    Args:
        w: Weights W, shape (blocks, r, k).
        d: Matrices D of the same shape.
    """
    r = torch.linalg.qr(w.mT, mode="r").R if w.shape[1] < w.shape[2] else w.mT
    u, s = _left_singular(r, d)
    return float((s * (r.mT @ u).square().sum(-2)).sum()), float(s.norm())


def _left_singular(r: Tensor, d: Tensor) -> tuple[Tensor, Tensor]:
    """Return the left singular vectors and the singular values of ``R D``."""
    if d.shape[1] < d.shape[2]:  # D^T = Q2 R2, and Q2 changes the right singular vectors only
        d = torch.linalg.qr(d.mT, mode="r").R.mT
    u, s, _ = torch.linalg.svd(r @ d, full_matrices=False)
    return u, s
