"""Feature matrices and correlations of one layer."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property

import torch
from torch import Tensor

from featlearn.errors import FeatlearnError, InputError
from featlearn.features.factored import Factor, Factored, correlation, factored

__all__ = ["LayerFeatures", "NotMeasuredError"]


class NotMeasuredError(FeatlearnError, AttributeError):
    """A quantity was asked of a report that holds no measurement of it."""


# Sums on the side of the inputs: which weights and which core they stand for.
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
        flags: What a reader should know: no dependence, ties, parametrisation.
    """

    name: str
    kind: str
    shape: tuple[int, int, int]
    weights: Mapping[str, Tensor] = field(repr=False)
    sums: Mapping[str, Tensor] = field(repr=False)
    weight_decay: float | None = None
    flags: tuple[str, ...] = ()

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
            raise NotMeasuredError(f"layer {self.name!r} was probed without initial=, so it has no centred quantity")
        return self._factors[name]

    def _core(self, name: str) -> Tensor:
        if name not in self.sums:
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

    def _cached(self, key: str, build: object) -> Factored:
        assert callable(build)
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
        match name:
            case "nfm":
                return self._gram("W")
            case "bnfm":
                return self._gram("W^T")
            case "agop":
                return self._conjugate("W", "K")
            case "enfa":
                return self._conjugate("W", "B")
            case "bagop" | "ptk_covariance":
                return Factored(None, self._core("K"), None)
            case "benfa":
                return Factored(None, self._core("B"), None)
            case "fact":
                return factored(self._factor("W"), None, self._factor("D"))
            case "bfact":
                return factored(self._factor("W^T"), None, self._factor("D^T"))
            case "fact_symmetric":
                return self._symmetrised("W", "D")
            case "bfact_symmetric":
                return self._symmetrised("W^T", "D^T")
            case "centered_nfm":
                return self._gram("Wb")
            case "centered_agop":
                return self._conjugate("Wb", "K")
            case "double_centered_agop":
                return self._conjugate("Wb", "Kb")
            case "initial_nfm":
                return self._gram("W0")
            case "ptk_centered_agop":
                return self._conjugate("W0", "Kb")
        raise InputError(f"{name!r} is no feature matrix: choose from {', '.join(_PARTNERS)}, nfm, bnfm")

    def _symmetrised(self, weight: str, gradient: str) -> Factored:
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
        if kind not in ("cosine", "pearson"):
            raise InputError(f'kind must be "cosine" or "pearson", got {kind!r}')
        key = (name, kind, power, diagonal)
        if key not in self._correlations:
            if self.sketched and name in _CONJUGATES and key == (name, "cosine", 1.0, False):
                self._correlations[key] = _cosine_of_groups(*self._inner_products(*_CONJUGATES[name]))
            else:
                partner = self._matrix(_PARTNERS[name])
                self._correlations[key] = correlation(partner, self._power(name, power), kind, diagonal)
        return self._correlations[key]

    @cached_property
    def nfc(self) -> float:
        """Uncentred neural feature correlation ``cos(W^T W, W^T K W)`` (NFA paper, NFC)."""
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
        return _ratio(
            self._gram("Wb").inner(self._conjugate("Wb", "K")),
            self._gram("W").inner(self._conjugate("W", "K")),
        )

    @cached_property
    def double_centered_ratio(self) -> float:
        """``tr(Wb^T Wb Wb^T Kb Wb) / tr(Wb^T Wb Wb^T K Wb)`` (NFA paper, figure 5)."""
        change = self._gram("Wb")
        return _ratio(change.inner(self._conjugate("Wb", "Kb")), change.inner(self._conjugate("Wb", "K")))

    @cached_property
    def weight_change(self) -> float:
        """``|W - W0| / |W0|``."""
        return _ratio(self._norm("Wb"), self._norm("W0"))

    @cached_property
    def weight_change_relative(self) -> float:
        """``|W - W0| / |W|`` (NFA paper, figures 14 and 15)."""
        return _ratio(self._norm("Wb"), self._norm("W"))

    @cached_property
    def weight_norm(self) -> float:
        """``|W|``, Frobenius."""
        return self._norm("W")

    @cached_property
    def relgrad(self) -> float:
        """``|dL/dW + lambda W| / (lambda |W|)``: how far from the critical point where FACT = NFM."""
        return _ratio(float((self._factor("W").tensor - self._factor("D").tensor).norm()), self._norm("W"))

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
        self._inner_products(*numerator)  # says what is missing, if something is
        groups = max((value.shape[0] for value in self.sums.values() if value.ndim == 4), default=1)
        if groups == 1:
            return math.nan if "sketched in one group" in self.flags else 0.0
        values = torch.empty(groups, dtype=torch.float64)
        size, inner, products = self._inner_products(*numerator)
        for j in range(groups):
            rest = [i for i in range(groups) if i != j]
            if denominator is None:
                values[j] = _cosine_of_groups(size, inner[rest], products[rest][:, rest])
            else:
                below = self._inner_products(*denominator)[1]
                values[j] = _ratio(float(inner[rest].sum()), float(below[rest].sum()))
        return float(((groups - 1) / groups * (values - values.mean()).square().sum()).sqrt())

    def _inner_products(self, weight: str, core: str) -> tuple[float, Tensor, Tensor]:
        """``|F|``, ``<F, G_i>`` and ``<G_i, G_j>`` of ``F = W^T W`` and the ``G_i = W^T K_i W`` of the sketch groups.

        Whatever groups are left out, the correlation follows from these few numbers.
        """
        key = (weight, core)
        if key not in self._group_products:
            factor = self._factor(weight)
            projected = _PROJECTED[key]
            thin = projected not in self.sums and factor.tensor.shape[1] < factor.tensor.shape[2]
            if thin:
                gram = factor.gram(factor)
                parts = [gram @ k for k in self._groups(core)]
                # <F, G_i> = tr(A A K_i) and <G_i, G_j> = tr(A K_i A K_j) with A = W W^T.
                inner = [float((p * gram).sum()) for p in parts]
                products = [[float((p * q.mT).sum()) for q in parts] for p in parts]
                size = float(gram.norm())
            else:
                nfm = self._gram(weight).dense()
                w = factor.tensor
                parts = (
                    list(self.sums[projected]) if projected in self.sums else [w.mT @ k @ w for k in self._groups(core)]
                )
                inner = [float((p * nfm).sum()) for p in parts]
                products = [[float((p * q).sum()) for q in parts] for p in parts]
                size = float(nfm.norm())
            self._group_products[key] = (
                size,
                torch.tensor(inner, dtype=torch.float64),
                torch.tensor(products, dtype=torch.float64),
            )
        return self._group_products[key]

    @cached_property
    def _group_products(self) -> dict[tuple[str, str], tuple[float, Tensor, Tensor]]:
        return {}

    def _groups(self, core: str) -> list[Tensor]:
        self._core(core)  # says what is missing, if it is
        return list(self.sums[core])

    def _norm(self, factor: str) -> float:
        return float(self._factor(factor).tensor.norm())


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

# Numbers that depend on a sketch of the outputs: the weights and core of <F, G>, and of what it is divided by
# where that is not |F| |G|.
_CONJUGATES = {
    "agop": ("W", "K"),
    "centered_agop": ("Wb", "K"),
    "double_centered_agop": ("Wb", "Kb"),
    "ptk_centered_agop": ("W0", "Kb"),
}
_SKETCHED: dict[str, tuple[tuple[str, str], tuple[str, str] | None]] = {
    "nfc": (("W", "K"), None),
    "centered_nfc": (("Wb", "K"), None),
    "double_centered_nfc": (("Wb", "Kb"), None),
    "ptk_centered_nfc": (("W0", "Kb"), None),
    "centered_ratio": (("Wb", "K"), ("W", "K")),
    "double_centered_ratio": (("Wb", "Kb"), ("Wb", "K")),
}


def _cosine_of_groups(size: float, inner: Tensor, products: Tensor) -> float:
    """Cosine of F with the mean of independent unbiased estimates ``G_i``.

    ``E <G_i, G_j>`` is ``|G|^2`` for i and j apart, but ``|G|^2`` plus the noise for i = j, so that the mean over
    pairs estimates the square of the length without bias.

    Args:
        size: ``|F|``.
        inner: ``<F, G_i>``.
        products: ``<G_i, G_j>``.
    """
    groups = len(inner)
    square = float(products.sum()) / groups**2
    if groups > 1:
        pairs = float(products.sum() - products.diagonal().sum()) / (groups * (groups - 1))
        # Where noise is all there is, pairs may come out negative: then the plain length stands.
        square = pairs if pairs > 0 else square
    return min(_ratio(float(inner.mean()), size * math.sqrt(max(square, 0.0))), 1.0)


def _ratio(numerator: float, denominator: float) -> float:
    return numerator / denominator if denominator != 0 else math.nan
