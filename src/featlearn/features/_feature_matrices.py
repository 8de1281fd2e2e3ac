"""Feature matrices and correlations of one layer."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cached_property

import torch
from torch import Tensor

from featlearn._utils.validation import check_option
from featlearn.errors import InputError, NotMeasuredError
from featlearn.features._correlations import (
    Factor,
    Factored,
    GroupProducts,
    correlation,
    factored,
    group_products,
    jackknife_error,
    ratio,
)

# Gram matrices, by the weights they are of: W now, W0 before training, Wb their difference.
_GRAMS = {"nfm": "W", "bnfm": "W^T", "centered_nfm": "Wb", "initial_nfm": "W0"}
# Matrices ``weight^T core weight``: K of output gradients, Kb of their change, B of loss gradients.
_CONJUGATES = {
    "agop": ("W", "K"),
    "centered_agop": ("Wb", "K"),
    "double_centered_agop": ("Wb", "Kb"),
    "ptk_centered_agop": ("W0", "Kb"),
    "enfa": ("W", "B"),
}
# Each feature matrix and the one it is compared with.
_PARTNERS = {
    "agop": "nfm",
    "enfa": "nfm",
    "fact": "nfm",
    "fact_symmetric": "nfm",
    "bagop": "bnfm",
    "benfa": "bnfm",
    "bfact": "bnfm",
    "bfact_symmetric": "bnfm",
    "centered_agop": "centered_nfm",
    "double_centered_agop": "centered_nfm",
    "ptk_centered_agop": "initial_nfm",
}
# Numbers that a sketch of the outputs enters: the matrix of <F, G>, and that of the <F, G> below it, if it is a ratio.
_SKETCHED: dict[str, tuple[str, str | None]] = {
    "nfc": ("agop", None),
    "centered_nfc": ("centered_agop", None),
    "double_centered_nfc": ("double_centered_agop", None),
    "ptk_centered_nfc": ("ptk_centered_agop", None),
    "centered_ratio": ("centered_agop", "agop"),
    "double_centered_ratio": ("double_centered_agop", "centered_agop"),
}
# The same matrices where they are summed on the side of the inputs.
_PROJECTED = {
    ("W", "K"): "agop",
    ("Wb", "K"): "centered",
    ("Wb", "Kb"): "double",
    ("W0", "Kb"): "ptk",
    ("W", "B"): "enfa",
}
_NEEDS = {
    "K": "the gradients of the outputs (measure nfc)",
    "Kb": "initial= and measure double_centered_nfc or ptk_centered_nfc",
    "B": "loss=",
    "D": "loss= and weight_decay=",
}


@dataclass(frozen=True, eq=False)
class LayerFeatures:
    """What a probe found out about one layer.

    Matrices are float64, (k, k), or (groups, k, k) for a grouped convolution, and are built when asked for.
    Correlations are numbers; they never build a matrix of the larger side.

    Attributes:
        name: Path of the layer.
        kind: Kind of layer.
        shape: (groups, k_out, k_in).
        weights: ``W`` and, if the probe was given the initial model, ``W0``.
        sums: Averages over the data; those of output gradients have a leading dimension of sketch groups.
        weight_decay: Lambda of FACT, or None.
        flags: What a reader should know: no dependence, ties, parametrization.
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

    # --- factors and products -----------------------------------------------------------------

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

    def _core(self, name: str) -> Tensor:
        if name not in self.sums:
            if lost := next((flag for flag in self.flags if flag.startswith("not measured")), None):
                raise NotMeasuredError(f"layer {self.name!r} was {lost}")
            projected = any(key in self.sums for (_, core), key in _PROJECTED.items() if core == name)
            detail = (
                f"its {self.shape[1]} x {self.shape[1]} matrix is large, so only its projection on the inputs "
                "was summed; ask for it with measure=('ptk_covariance', ...)"
                if projected
                else f"it needs {_NEEDS[name]}"
            )
            raise NotMeasuredError(f"layer {self.name!r} holds no sum {name}: {detail}")
        value = self.sums[name]
        return value.mean(0) if value.ndim == 4 else value

    def _gram(self, weight: str) -> Factored:
        return self._cached(f"{weight}^T{weight}", lambda: factored(self._factor(weight), None, self._factor(weight)))

    def _conjugate(self, weight: str, core: str) -> Factored:
        def build() -> Factored:
            projected = _PROJECTED[weight, core]
            factor = self._factor(weight)
            if projected in self.sums:
                value = self.sums[projected]
                return Factored(None, value.mean(0) if value.ndim == 4 else value, None)
            return factored(factor, self._core(core), factor)

        return self._cached(f"{weight}^T {core} {weight}", build)

    def _cached(self, key: str, build: Callable[[], Factored]) -> Factored:
        if key not in self._products:
            self._products[key] = build()
        return self._products[key]

    @cached_property
    def _products(self) -> dict[str, Factored]:
        return {}

    @cached_property
    def _correlations(self) -> dict[tuple[str, str, float, bool], float]:
        return {}

    def _power(self, name: str, power: float) -> Factored:
        if power == 1:
            return self._matrix(name)
        if name in ("fact", "bfact"):
            raise InputError(f"{name} is not symmetric and has no powers: take {name}_symmetric")
        return self._matrix(name).power(power)

    def _matrix(self, name: str) -> Factored:
        """A feature matrix by its public name."""
        if name in _GRAMS:
            return self._gram(_GRAMS[name])
        if name in _CONJUGATES:
            return self._conjugate(*_CONJUGATES[name])
        match name:
            case "bagop" | "ptk_covariance":
                return Factored(None, self._core("K"), None)
            case "benfa":
                return Factored(None, self._core("B"), None)
            case "fact":
                return factored(self._factor("W"), None, self._factor("D"))
            case "bfact":
                return factored(self._factor("W^T"), None, self._factor("D^T"))
            case "fact_symmetric":
                return self._symmetrized("W", "D")
            case "bfact_symmetric":
                return self._symmetrized("W^T", "D^T")
        raise InputError(f"{name!r} is no feature matrix: choose from {', '.join(_PARTNERS)}, nfm, bnfm")

    def _symmetrized(self, weight: str, gradient: str) -> Factored:
        """``(M M^T)^{1/2}`` of ``M = W^T D``, from the singular values of M rather than of ``M M^T``.

        With ``W^T = Q R`` and ``R D = U s V^T`` it is ``Q U s U^T Q^T``; the square of a singular value below
        1e-8 would be lost.
        """
        w, d = self._factor(weight).tensor, self._factor(gradient).tensor
        thin = w.shape[1] < w.shape[2]
        if thin:
            q, r = torch.linalg.qr(w.mT)
            product = r @ d
        else:
            product = w.mT @ d
        u, s, _ = torch.linalg.svd(product, full_matrices=False)
        core = (u * s.unsqueeze(-2)) @ u.mT
        if not thin:
            return Factored(None, core, None)
        basis = Factor(q.mT)
        return Factored(basis, core, basis)

    # --- matrices --------------------------------------------------------------------------------

    def matrix(self, name: str, power: float = 1.0) -> Tensor:
        """A feature matrix by name, to any power (positive semi-definite ones only)."""
        value = self._power(name, power).dense()
        return value.squeeze(0) if value.shape[0] == 1 else value

    @property
    def nfm(self) -> Tensor:
        """Neural feature matrix ``F = W^T W``."""
        return self.matrix("nfm")

    @property
    def ptk_covariance(self) -> Tensor:
        """PTK feature covariance ``K = (1/n) sum J J^T`` over samples, outputs and positions (NFA paper, 3)."""
        return self.matrix("ptk_covariance")

    @property
    def agop(self) -> Tensor:
        """Average gradient outer product through the layer, ``G = W^T K W``."""
        return self.matrix("agop")

    @property
    def bagop(self) -> Tensor:
        """Backward AGOP: the PTK feature covariance, to be compared with ``W W^T`` (FACT paper, appendix A)."""
        return self.matrix("bagop")

    @property
    def fact(self) -> Tensor:
        """``FACT = -(1/lambda) W^T dL/dW`` (FACT paper, theorem 3.1)."""
        return self.matrix("fact")

    @property
    def bfact(self) -> Tensor:
        """``bFACT = -(1/lambda) W (dL/dW)^T`` (FACT paper, remark 3.2)."""
        return self.matrix("bfact")

    @property
    def fact_symmetric(self) -> Tensor:
        """``(FACT FACT^T)^{1/2}`` (FACT paper, remark 3.3)."""
        return self.matrix("fact_symmetric")

    @property
    def bfact_symmetric(self) -> Tensor:
        """``(bFACT bFACT^T)^{1/2}``."""
        return self.matrix("bfact_symmetric")

    @property
    def enfa(self) -> Tensor:
        """``eNFA = W^T (1/n) sum g g^T W`` with ``g = dl/dh`` of per-sample losses (FACT paper, eNFA)."""
        return self.matrix("enfa")

    @property
    def benfa(self) -> Tensor:
        """Backward eNFA, ``(1/n) sum g g^T``."""
        return self.matrix("benfa")

    # --- numbers ---------------------------------------------------------------------------------

    def correlation(
        self, name: str = "agop", *, kind: str = "cosine", power: float = 1.0, diagonal: bool = False
    ) -> float:
        """Correlation of a feature matrix with the neural feature matrix that it should resemble.

        Args:
            name: ``agop``, ``enfa``, ``fact``, ``fact_symmetric`` are compared with ``W^T W``; ``bagop``,
                ``benfa``, ``bfact``, ``bfact_symmetric`` with ``W W^T``; ``centered_agop`` and
                ``double_centered_agop`` with ``Wb^T Wb``; ``ptk_centered_agop`` with ``W0^T W0``.
            kind: ``"cosine"`` or ``"pearson"``.
            power: Power of the named matrix, 1/2 in the usual neural feature ansatz.
            diagonal: Compare the diagonals alone.

        Returns:
            The correlation, NaN where a matrix is zero. With sketched outputs the noise of the sketch makes a
            matrix longer and its correlations smaller; cosines of the four AGOP forms (power 1, whole matrices)
            are corrected for it by products of independent parts of the sketch.
        """
        if name not in _PARTNERS:
            raise InputError(f"{name!r} has no partner to be compared with: choose from {', '.join(_PARTNERS)}")
        check_option("kind", kind, ("cosine", "pearson"))
        key = (name, kind, power, diagonal)
        if key not in self._correlations:
            if self.sketched and name in _CONJUGATES and name != "enfa" and key[1:] == ("cosine", 1.0, False):
                self._correlations[key] = self._group_products(name).cosine()
            else:
                partner = self._matrix(_PARTNERS[name])
                self._correlations[key] = correlation(partner, self._power(name, power), kind, diagonal)
        return self._correlations[key]

    @cached_property
    def nfc(self) -> float:
        """Uncentered neural feature correlation ``cos(W^T W, W^T K W)`` (NFA paper, NFC)."""
        return self.correlation("agop")

    @cached_property
    def centered_nfc(self) -> float:
        """``cos(Wb^T Wb, Wb^T K Wb)`` with ``Wb = W - W0`` (NFA paper, C-NFC)."""
        return self.correlation("centered_agop")

    @cached_property
    def double_centered_nfc(self) -> float:
        """``cos(Wb^T Wb, Wb^T Kb Wb)`` with Kb the covariance of ``J - J0`` (NFA paper, appendix D)."""
        return self.correlation("double_centered_agop")

    @cached_property
    def ptk_centered_nfc(self) -> float:
        """``cos(W0^T W0, W0^T Kb W0)`` (NFA paper, appendix D)."""
        return self.correlation("ptk_centered_agop")

    @cached_property
    def centered_ratio(self) -> float:
        """C/UC ratio ``tr(Wb^T Wb Wb^T K Wb) / tr(W^T W W^T K W)`` (NFA paper, section 5)."""
        return ratio(
            self._gram("Wb").inner(self._conjugate("Wb", "K")),
            self._gram("W").inner(self._conjugate("W", "K")),
        )

    @cached_property
    def double_centered_ratio(self) -> float:
        """``tr(Wb^T Wb Wb^T Kb Wb) / tr(Wb^T Wb Wb^T K Wb)`` (NFA paper, figure 5)."""
        change = self._gram("Wb")
        return ratio(change.inner(self._conjugate("Wb", "Kb")), change.inner(self._conjugate("Wb", "K")))

    @cached_property
    def weight_change(self) -> float:
        """``|W - W0| / |W0|``."""
        return ratio(self._norm("Wb"), self._norm("W0"))

    @cached_property
    def weight_change_relative(self) -> float:
        """``|W - W0| / |W|`` (NFA paper, figures 14 and 15)."""
        return ratio(self._norm("Wb"), self._norm("W"))

    @cached_property
    def weight_norm(self) -> float:
        """``|W|``, Frobenius."""
        return self._norm("W")

    @cached_property
    def relgrad(self) -> float:
        """``|dL/dW + lambda W| / (lambda |W|)``: how far from the critical point where FACT = NFM.

        The theorem is about the loss of all training rows: on a part of them see `relgrad_noise`.
        """
        return ratio(float((self._factor("W").tensor - self._factor("D").tensor).norm()), self._norm("W"))

    @cached_property
    def relgrad_noise(self) -> float:
        """Sampling noise of `relgrad`: ``|D - E D| / (lambda |W|)`` of ``D = dL/dW``, from halves of the rows.

        Theorem 3.1 of the FACT paper is about the loss of *all* training rows. On a part of them D has noise of this
        size, and relgrad is at least about as large even at a critical point: it says nothing about convergence
        unless it is well above the noise, or the noise is small. On all training rows the noise plays no role.
        """
        self._factor("D")  # raises with what is missing
        if self.gradient_noise is None or self.weight_decay is None:
            return math.nan
        return ratio(self.gradient_noise, self.weight_decay * self._norm("W"))

    @property
    def sketched(self) -> bool:
        """Whether the sums over outputs are estimates from random output vectors."""
        return any(value.ndim == 4 and value.shape[0] > 1 for value in self.sums.values())

    def standard_error(self, name: str = "nfc") -> float:
        """Standard error of a number that is due to the output sketch, by the jackknife over its groups.

        Zero when outputs were taken one by one; NaN when a single group was kept.
        """
        if name not in _SKETCHED:
            raise InputError(f"{name!r} is no number with a standard error: choose from {', '.join(_SKETCHED)}")
        numerator, denominator = _SKETCHED[name]
        above = self._group_products(numerator)
        below = None if denominator is None else self._group_products(denominator)
        groups = len(above.inner)
        if groups == 1:
            return math.nan if "sketched in one group" in self.flags else 0.0
        return jackknife_error(
            [
                above.without(j).cosine() if below is None else above.without(j).over(below.without(j))
                for j in range(groups)
            ]
        )

    def _group_products(self, name: str) -> GroupProducts:
        if name not in self._sketches:
            weight, core = _CONJUGATES[name]
            projected, factor = _PROJECTED[weight, core], self._factor(weight)
            if projected in self.sums:
                groups = [Factored(None, part, None) for part in self.sums[projected]]
            else:
                self._core(core)  # says what is missing, if it is
                groups = [factored(factor, part, factor) for part in self.sums[core]]
            self._sketches[name] = group_products(self._gram(weight), groups)
        return self._sketches[name]

    @cached_property
    def _sketches(self) -> dict[str, GroupProducts]:
        return {}

    def _norm(self, factor: str) -> float:
        return float(self._factor(factor).tensor.norm())
