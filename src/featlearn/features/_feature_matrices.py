"""Feature matrices and correlations of one layer.

References:
    Beaglehole, Mitliagkas & Agarwala, "Feature learning as alignment", https://openreview.net/forum?id=JXCe2ZcUXr
    (NFM, AGOP, NFC and their centered forms).
    Boix-Adsera, Mallinar, Simon & Belkin (2025), https://arxiv.org/abs/2507.05644 (FACT, eNFA and backward forms).
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property

from torch import Tensor

from featlearn._utils.standard_errors import jackknife_error
from featlearn._utils.validation import check_option
from featlearn.features._correlations import CONJUGATES, PARTNERS, LayerMatrices, correlation, ratio

# Numbers with a standard error (of a sketch, of sampled rows): the matrix of <F, G>, and that of a ratio's denominator.
_SKETCHED: dict[str, tuple[str, str | None]] = {
    "nfc": ("agop", None),
    "centered_nfc": ("centered_agop", None),
    "double_centered_nfc": ("double_centered_agop", None),
    "ptk_centered_nfc": ("ptk_centered_agop", None),
    "centered_ratio": ("centered_agop", "agop"),
    "double_centered_ratio": ("double_centered_agop", "centered_agop"),
}


@dataclass(frozen=True, eq=False)
class LayerFeatures(LayerMatrices):
    """Feature matrices, correlations and ratios of one layer, from a `featlearn.probe`.

    Matrices are float64, (k, k), or (groups, k, k) for a grouped convolution, and are built on request. Correlations
    are numbers, computed without building a matrix of the larger side.

    Attributes:
        name: Path of the layer.
        kind: Kind of the layer.
        shape: Shape (groups, k_out, k_in) of the weight matrices.
        weights: ``W`` and, if the probe was given the initial model, ``W0``.
        sums: Averages over the data; those of output gradients have a leading dimension of sketch groups.
        weight_decay: Lambda of FACT; None if there is none.
        flags: Remarks on the measurement: no dependence, ties, parametrization.
        gradient_noise: Sampling noise of the gradient of the loss in W, in the Frobenius norm; None if not measured.

    Example:
        >>> import torch, featlearn as fl
        >>> layer = fl.probe(torch.nn.Sequential(torch.nn.Linear(3, 1)), torch.randn(8, 3))["0"]
        >>> layer.agop.shape, round(layer.nfc, 6)
        (torch.Size([3, 3]), 1.0)
    """

    # --- matrices --------------------------------------------------------------------------------

    def matrix(self, name: str, power: float = 1.0) -> Tensor:
        """Return a feature matrix by name.

        Args:
            name: Name of the matrix: ``nfm``, ``bnfm``, ``ptk_covariance``, or a name that `correlation` accepts.
            power: Power of the matrix. Powers other than 1 require a positive semi-definite matrix, so not FACT or
                bFACT.

        Returns:
            Float64 matrix of shape (k, k), or (groups, k, k) for a grouped convolution.

        Raises:
            InputError: The name is unknown, or the matrix has no powers.
            NotMeasuredError: The probe did not measure the matrix.
        """
        value = self._power(name, power).dense()
        return value.squeeze(0) if value.shape[0] == 1 else value

    @property
    def nfm(self) -> Tensor:
        """Neural feature matrix ``F = W^T W``."""
        return self.matrix("nfm")

    @property
    def ptk_covariance(self) -> Tensor:
        """PTK feature covariance ``K = (1/n) sum J J^T`` over samples, outputs and positions (NFA paper, sec. 3)."""
        return self.matrix("ptk_covariance")

    @property
    def agop(self) -> Tensor:
        """Average gradient outer product through the layer, ``G = W^T K W``."""
        return self.matrix("agop")

    @property
    def bagop(self) -> Tensor:
        """Backward AGOP: the PTK feature covariance, which is compared with ``W W^T`` (FACT paper, appendix A)."""
        return self.matrix("bagop")

    @property
    def fact(self) -> Tensor:
        """Features at convergence, ``FACT = -(1/lambda) W^T dL/dW`` (FACT paper, theorem 3.1)."""
        return self.matrix("fact")

    @property
    def bfact(self) -> Tensor:
        """Backward FACT, ``bFACT = -(1/lambda) W (dL/dW)^T`` (FACT paper, remark 3.2)."""
        return self.matrix("bfact")

    @property
    def fact_symmetric(self) -> Tensor:
        """Symmetrized FACT, ``(FACT FACT^T)^{1/2}`` (FACT paper, remark 3.3)."""
        return self.matrix("fact_symmetric")

    @property
    def bfact_symmetric(self) -> Tensor:
        """Symmetrized backward FACT, ``(bFACT bFACT^T)^{1/2}``."""
        return self.matrix("bfact_symmetric")

    @property
    def enfa(self) -> Tensor:
        """Empirical NFA matrix, ``W^T (1/n) sum g g^T W`` with ``g = dl/dh`` of per-sample losses (FACT paper)."""
        return self.matrix("enfa")

    @property
    def benfa(self) -> Tensor:
        """Backward eNFA matrix, ``(1/n) sum g g^T``."""
        return self.matrix("benfa")

    # --- numbers ---------------------------------------------------------------------------------

    def correlation(
        self, name: str = "agop", *, kind: str = "cosine", power: float = 1.0, diagonal: bool = False
    ) -> float:
        """Compute the correlation of a feature matrix with the matrix of weights that it should resemble.

        With sketched outputs the noise of the sketch increases the norm of a matrix and decreases its correlations; so
        does the noise of few rows (``rows="sample"``). Cosines of the four AGOP forms (power 1, whole matrices) are
        corrected for it by products of independent parts of the sketch, or of the rows.

        Args:
            name: Name of the matrix: ``agop``, ``enfa``, ``fact``, ``fact_symmetric`` are compared with ``W^T W``;
                ``bagop``, ``benfa``, ``bfact``, ``bfact_symmetric`` with ``W W^T``; ``centered_agop`` and
                ``double_centered_agop`` with ``Wb^T Wb``; ``ptk_centered_agop`` with ``W0^T W0``.
            kind: Correlation to compute, ``"cosine"`` or ``"pearson"``.
            power: Power of the named matrix; 1/2 in the usual neural feature ansatz.
            diagonal: Whether to compare the diagonals only.

        Returns:
            The correlation; NaN if a matrix is zero.

        Raises:
            InputError: An argument is not allowed.
            NotMeasuredError: The probe did not measure the matrix.
        """
        check_option("name", name, PARTNERS)
        check_option("kind", kind, ("cosine", "pearson"))
        key = (name, kind, power, diagonal)
        if key not in self._correlations:
            plain = key[1:] == ("cosine", 1.0, False)
            if plain and self.sketched and name in CONJUGATES and name != "enfa":
                self._correlations[key] = self._group_products(name).cosine()
            elif plain and name.endswith("_symmetric"):
                self._correlations[key] = self._symmetric_cosine(name)
            else:
                partner = self._matrix(PARTNERS[name])
                self._correlations[key] = correlation(partner, self._power(name, power), kind, diagonal)
        return self._correlations[key]

    @cached_property
    def _correlations(self) -> dict[tuple[str, str, float, bool], float]:
        return {}

    @cached_property
    def nfc(self) -> float:
        """Uncentered neural feature correlation ``cos(W^T W, W^T K W)`` (NFA paper, NFC)."""
        return self.correlation("agop")

    @cached_property
    def centered_nfc(self) -> float:
        """Centered NFC, ``cos(Wb^T Wb, Wb^T K Wb)`` with ``Wb = W - W0`` (NFA paper, C-NFC)."""
        return self.correlation("centered_agop")

    @cached_property
    def double_centered_nfc(self) -> float:
        """Double-centered NFC, ``cos(Wb^T Wb, Wb^T Kb Wb)`` with Kb of ``J - J0`` (NFA paper, appendix D)."""
        return self.correlation("double_centered_agop")

    @cached_property
    def ptk_centered_nfc(self) -> float:
        """PTK-centered NFC, ``cos(W0^T W0, W0^T Kb W0)`` (NFA paper, appendix D)."""
        return self.correlation("ptk_centered_agop")

    @cached_property
    def centered_ratio(self) -> float:
        """C/UC ratio ``tr(Wb^T Wb Wb^T K Wb) / tr(W^T W W^T K W)`` (NFA paper, section 5)."""
        return ratio(self._overlap("centered_agop"), self._overlap("agop"))

    @cached_property
    def double_centered_ratio(self) -> float:
        """Ratio ``tr(Wb^T Wb Wb^T Kb Wb) / tr(Wb^T Wb Wb^T K Wb)`` (NFA paper, figure 5)."""
        return ratio(self._overlap("double_centered_agop"), self._overlap("centered_agop"))

    @cached_property
    def weight_change(self) -> float:
        """Change of the weights relative to the initial ones, ``|W - W0| / |W0|``."""
        return ratio(self._norm("Wb"), self._norm("W0"))

    @cached_property
    def weight_change_relative(self) -> float:
        """Change of the weights relative to the present ones, ``|W - W0| / |W|`` (NFA paper, figures 14 and 15)."""
        return ratio(self._norm("Wb"), self._norm("W"))

    @cached_property
    def weight_norm(self) -> float:
        """Frobenius norm ``|W|`` of the weights."""
        return self._norm("W")

    @cached_property
    def relgrad(self) -> float:
        """Relative gradient ``|dL/dW + lambda W| / (lambda |W|)``; zero at a critical point, where FACT = NFM.

        The theorem holds for the loss of all training rows. For a part of them see `relgrad_noise`.
        """
        return ratio(float((self._factor("W").tensor - self._factor("D").tensor).norm()), self._norm("W"))

    @cached_property
    def relgrad_noise(self) -> float:
        """Sampling noise of `relgrad`, ``|D - E D| / (lambda |W|)`` of ``D = dL/dW``, from parts of the rows.

        Theorem 3.1 of the FACT paper holds for the loss of *all* training rows. On a part of them D has noise of this
        size, and relgrad is about as large even at a critical point: it indicates a lack of convergence only if it is
        well above the noise. On all training rows the noise plays no role. NaN if the noise was not measured.
        """
        self._factor("D")  # raises if FACT was not measured
        if self.gradient_noise is None or self.weight_decay is None:
            return math.nan
        return ratio(self.gradient_noise, self.weight_decay * self._norm("W"))

    @property
    def sketched(self) -> bool:
        """True if sums are estimates from random output vectors, or from rows that are a sample."""
        return any(value.ndim == 4 and value.shape[0] > 1 for value in self.sums.values())

    def standard_error(self, name: str = "nfc") -> float:
        """Return the standard error of a number by the jackknife over groups of random output vectors, or of rows.

        Args:
            name: Name of the number: ``nfc``, ``centered_nfc``, ``double_centered_nfc``, ``ptk_centered_nfc``,
                ``centered_ratio`` or ``double_centered_ratio``.

        Returns:
            The standard error; zero if each output was differentiated and the rows are no sample, NaN if the sketch has
            a single group.

        Raises:
            InputError: The name is not one of these.
            NotMeasuredError: The probe did not measure the number.
        """
        numerator, denominator = _SKETCHED[check_option("name", name, _SKETCHED)]
        above = self._group_products(numerator)
        below = None if denominator is None else self._group_products(denominator)
        groups = range(len(above.inner))
        if len(groups) == 1:
            return math.nan if "sketched in one group" in self.flags else 0.0
        if below is None:
            return jackknife_error([above.without(j).cosine(clamped=False) for j in groups])
        return jackknife_error([above.without(j).over(below.without(j)) for j in groups])
