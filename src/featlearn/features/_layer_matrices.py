"""Factored feature matrices of one layer, built from its weights and averages."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property

import torch
from torch import Tensor

from featlearn.errors import InputError, NotMeasuredError
from featlearn.features._correlations import Factor, Factored, GroupProducts, factored, group_products

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
        if name in _GRAMS:
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
    u, s, _ = torch.linalg.svd(r @ d, full_matrices=False)
    core = (u * s.unsqueeze(-2)) @ u.mT
    basis = None if q is None else Factor(q.mT)
    return Factored(basis, core, basis)
