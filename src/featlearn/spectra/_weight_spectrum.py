"""Spectrum of one weight matrix, with its phase, tail, ranks and norms."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from featlearn.errors import InputError
from featlearn.linalg.ranks import clean_eigenvalues, effective_rank, spectral_entropy, stable_rank
from featlearn.spectra._bulk_and_spikes import MARGIN, FittedBulk, fit_marchenko_pastur
from featlearn.spectra._bulk_and_spikes import spikes as spikes_beyond
from featlearn.spectra._compare import histogram
from featlearn.spectra._entry_statistics import entry_statistics
from featlearn.spectra._gram_eigenvalues import GramMatrix
from featlearn.spectra._laws import Law
from featlearn.spectra._matrix_verdict import law_verdict, matrix_verdict
from featlearn.spectra._norm_null import explain_by_norms
from featlearn.spectra._phase import Phase, phase
from featlearn.spectra._power_law import PowerLawFit, power_law
from featlearn.spectra._profile_null import ProfileNull, Spike, null_of_blocks

if TYPE_CHECKING:
    from matplotlib.figure import Figure

Array = NDArray[np.float64]

_WIDE = 20.0  # largest eigenvalue over the median, from which on axes are logarithmic
_VISIBLE, _LOW = 1e-3, 0.002  # smallest density of a law that is drawn, over that at the median; share below it


@dataclass(frozen=True, eq=False)
class WeightSpectrum:
    """Spectrum of one weight matrix W. Numbers that cannot be measured are NaN, and `notes` state the reason.

    Attributes:
        name: Name of the matrix.
        kind: Kind of the matrix, such as "conv2d"; a file gives less detail than a model.
        shape: Shape ``(groups, rows, columns)``.
        parameter: Name of the tensor.
        eigenvalues: Eigenvalues of ``W^T W``, of the smaller side, ascending, including zeros.
        phase: Phase compared with the initial weights, or with `law` if they were not given.
        bulk: Marchenko-Pastur law that fits the bulk. None for a zero matrix.
        fit: Power law that fits the tail. None if there are too few different eigenvalues.
        initial: Eigenvalues of the initial weights. None if they were not given.
        tied: Other names of the tensor.
        notes: Notes on the matrix, such as assumptions about its shape.
        null: Noise with the row and column norms of the matrix, and the spikes beyond its edge. None if only
            eigenvalues are known.
    """

    name: str
    kind: str
    shape: tuple[int, int, int]
    parameter: str
    eigenvalues: Array = field(repr=False)
    phase: Phase
    bulk: FittedBulk | None = field(repr=False)
    fit: PowerLawFit | None = field(repr=False)
    initial: Array | None = field(default=None, repr=False)
    tied: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()
    null: ProfileNull | None = field(default=None, repr=False)

    @property
    def law(self) -> Law | None:
        """Marchenko-Pastur law of the bulk; None if it could not be fitted."""
        return None if self.bulk is None else self.bulk.law

    @property
    def phase_name(self) -> str:
        """Name of the phase; an invariant bulk without initial weights is "random-like"."""
        return "random-like" if self.initial is None and self.phase.name == "invariant bulk" else self.phase.name

    @property
    def spikes(self) -> tuple[float, ...] | None:
        """Spikes in descending order, only new ones if initial weights were given; None if the bulk has no edge."""
        e = self.phase.evidence
        if e is None:
            return None if self.null is None or self.initial is not None else tuple(s.value for s in self._named)
        return None if e.trained_edge is None and not e.spikes else e.spikes

    @property
    def _named(self) -> list[Spike]:
        """Spikes beyond noise of the same norms, but for the mean of the entries."""
        return [] if self.null is None else [spike for spike in self.null.spikes if not spike.is_mean]

    @property
    def spikes_marchenko_pastur(self) -> int:
        """Number of eigenvalues beyond the edge of the Marchenko-Pastur law, whatever the norms; as WeightWatcher."""
        return 0 if self.law is None else len(spikes_beyond(self.eigenvalues, self.law, margin=MARGIN))

    @property
    def noise_distance(self) -> float:
        """Kolmogorov-Smirnov distance of the bulk from noise with the norms of the matrix; NaN if that is unknown."""
        positive = self.eigenvalues[self.eigenvalues > 0]
        if self.null is None or positive.size <= len(self.null.spikes):
            return math.nan
        return self.null.distance(positive)

    @property
    def spectral_norm(self) -> float:
        """Largest singular value of W."""
        return math.sqrt(self.eigenvalues[-1])

    @property
    def frobenius_norm(self) -> float:
        """Frobenius norm of W, the root of the sum of the squared entries."""
        return math.sqrt(self.eigenvalues.sum())

    def numbers(self) -> dict[str, object]:
        """Return all columns of the table as a dict.

        Returns:
            Value of each column by name; NaN if it cannot be measured.
        """
        groups, rows, columns = self.shape
        zero = not self.eigenvalues[-1] > 0
        spikes, fit, bulk, null = self.spikes, self.fit, self.bulk, self.null
        return {
            "kind": self.kind,
            "shape": f"{rows}x{columns}" if groups == 1 else f"{groups} x {rows}x{columns}",
            "eigenvalues": self.eigenvalues.size,
            "zeros": int((self.eigenvalues == 0).sum()),
            "phase": self.phase_name,
            "spikes": math.nan if spikes is None else len(spikes),
            "spikes_mp": self.spikes_marchenko_pastur,
            "p_value": math.nan if null is None else null.p_value(self.eigenvalues[-1]),
            "strength": math.nan if not self._named else self._named[0].strength,
            "noise_edge": math.nan if null is None else null.edge,
            "alpha": math.nan if fit is None else fit.alpha,
            "alpha_se": math.nan if fit is None else fit.standard_error,
            "x_min": math.nan if fit is None else fit.x_min,
            "n_tail": math.nan if fit is None else fit.n_tail,
            "ks_distance": math.nan if fit is None else fit.distance,
            "weighted_alpha_paper": math.nan if fit is None else fit.weighted_alpha_paper,
            "weighted_alpha_log": math.nan if fit is None else fit.weighted_alpha_log,
            "log_alpha_norm": math.nan if fit is None else fit.log_alpha_norm,
            "stable_rank": math.nan if zero else stable_rank(self.eigenvalues),
            "effective_rank": math.nan if zero else effective_rank(self.eigenvalues),
            "entropy": math.nan if zero else spectral_entropy(self.eigenvalues),
            "spectral_norm": self.spectral_norm,
            "frobenius_norm": self.frobenius_norm,
            "mp_softrank": math.nan if zero or self.law is None else self.law.edges[1] / self.eigenvalues[-1],
            "mp_variance": math.nan if bulk is None else bulk.variance,
            "mp_distance": math.nan if bulk is None else bulk.distance,
            "reason": self.phase.reason,
            "parameter": self.parameter,
            "tied_to": ", ".join(self.tied),
            "notes": "; ".join(self.notes),
        }

    def __str__(self) -> str:
        lines = [f"{self.name} ({self.kind}, {self.numbers()['shape']}): {self.phase_name}: {self.phase.reason}"]
        if self.fit is not None:
            fit = self.fit
            lines.append(f"alpha {fit.alpha:.2f} +- {fit.standard_error:.2f} over {fit.n_tail} eigenvalues")
        return "\n".join([*lines, *self.notes])

    def plot(self, title: str | None = None, *, explain: bool = True) -> Figure:
        """Draw the spectrum with the initial one, or with noise that has the norms of the matrix, and its tail.

        Without initial weights, the histogram has the law of the noise with the row and column norms of the matrix, its
        edge, the edge of the Marchenko-Pastur law, and the spikes; beside it are the tail and its power law.

        Args:
            title: Title of the figure. None uses the names of the matrix and its phase.
            explain: Whether to print the reason for the phase below the axes.

        Returns:
            The figure.

        Raises:
            InputError: If the matrix is zero.
        """
        from featlearn.plots import matrix_spectrum

        if not self.eigenvalues[-1] > 0:
            raise InputError(f"The matrix {self.name!r} is zero: there is nothing to draw.")
        heading = title or f"{self.name}: {self.phase_name}"
        if self.initial is not None and self.phase.initial.size:
            return self.phase.plot(heading)
        positive = self.eigenvalues[self.eigenvalues > 0]
        wide = positive[-1] > _WIDE * np.median(positive)
        log = wide or self.phase_name in ("heavy tail", "rank collapse")
        bins = histogram(self.eigenvalues, log=log)
        curve, edges = self.noise_curve()
        fit = self.fit
        return matrix_spectrum(
            (bins.edges, bins.density),
            positive,
            density=curve,
            edges=edges,
            spikes=self.spikes or (),
            tail=None if fit is None else (fit.x_min, fit.alpha, fit.standard_error),
            log=log,
            title=heading,
            text=self.phase.reason if explain else None,
        )

    def noise_curve(self) -> tuple[tuple[Array, Array] | None, dict[str, float]]:
        """Return the density of the noise that the spectrum is compared with, and the right edges by name.

        Returns:
            Points and density of the law of noise with the row and column norms of the matrix, or of the
            Marchenko-Pastur law of the bulk if it has several blocks or only eigenvalues are known, or None if there is
            neither; and the edges of both laws.
        """
        curve, edges = None, {}
        if self.law is not None:
            x = np.linspace(*self.law.edges, 300)[1:-1]
            curve, edges["Marchenko-Pastur edge"] = (x, self.law.pdf(x).numpy()), self.law.edges[1]
        if self.null is not None:
            edges["edge of noise with its norms"] = self.null.edge
            if len(self.null.profiles) == 1:
                law = self.null.laws[0]
                # Below the left edge the density is not zero, but an error with nearly no mass.
                inside = law.mass > law.mass[0] + _LOW
                # The density of a square matrix is infinite at zero: that in the middle is the measure.
                inside &= law.density > _VISIBLE * np.interp(law.mass[[0, -1]].mean(), law.mass, law.density)
                curve = law.x[inside], law.density[inside]
        return curve, edges


def measure_matrix(
    weight: Tensor,
    name: str,
    kind: str,
    parameter: str,
    *,
    initial: Array | None = None,
    tied: tuple[str, ...] = (),
    notes: tuple[str, ...] = (),
) -> WeightSpectrum:
    """Measure the spectrum of a matrix, compared with its initial spectrum or with noise of the same norms.

    Args:
        weight: The matrix, block-diagonal of shape ``(groups, h, d)``, finite.
        name: Name of the matrix.
        kind: Kind of the matrix, such as "linear".
        parameter: Name of the tensor.
        initial: Eigenvalues of the initial weights. None compares with noise.
        tied: Other names of the tensor.
        notes: Notes for the report.

    Returns:
        The spectrum with all its numbers.
    """
    grams = [GramMatrix(block) for block in weight.detach()]
    values = clean_eigenvalues(np.concatenate([gram.eigenvalues for gram in grams]))
    groups, h, d = weight.shape
    bulk = fit_marchenko_pastur(values, h, d) if values[-1] > 0 else None
    null = None
    if bulk is None or (initial is not None and not initial.max() > 0):
        result = _phase_of_zeros(values)
    else:
        statistics = entry_statistics(weight)
        null = noise = null_of_blocks(weight, grams, statistics, eigenvalues=values if groups == 1 else None)
        if initial is not None:
            result = explain_by_norms(phase(initial, values), weight, statistics, lambda _: noise)
        else:
            result = matrix_verdict(bulk, values, weight, null, statistics)
    return _spectrum(name, kind, (groups, h, d), parameter, values, result, bulk, null, initial, tied, notes)


def measure_eigenvalues(
    eigenvalues: Array, name: str, kind: str, shape: tuple[int, int, int], parameter: str
) -> WeightSpectrum:
    """Measure the spectrum of a matrix of which only the eigenvalues are known, compared with the Marchenko-Pastur law.

    Args:
        eigenvalues: Eigenvalues of ``W^T W``, of the smaller side.
        name: Name of the matrix.
        kind: Kind of the matrix, such as "linear".
        shape: Shape ``(groups, rows, columns)`` of the matrix.
        parameter: Name of the tensor.

    Returns:
        The spectrum with all its numbers.
    """
    values = clean_eigenvalues(eigenvalues)
    bulk = fit_marchenko_pastur(values, *shape[1:]) if values[-1] > 0 else None
    result = _phase_of_zeros(values) if bulk is None else law_verdict(bulk, values)
    return _spectrum(name, kind, shape, parameter, values, result, bulk)


def _phase_of_zeros(values: Array) -> Phase:
    """Return the phase of a matrix that is zero, or was zero at the start."""
    if not values[-1] > 0:
        return Phase("undecided", "all eigenvalues are zero", None, values[:0], values[:0])
    return Phase("undecided", "the initial weights are zero", None, values[:0], values[values > 0])


def _spectrum(
    name: str,
    kind: str,
    shape: tuple[int, int, int],
    parameter: str,
    values: Array,
    result: Phase,
    bulk: FittedBulk | None,
    null: ProfileNull | None = None,
    initial: Array | None = None,
    tied: tuple[str, ...] = (),
    notes: tuple[str, ...] = (),
) -> WeightSpectrum:
    """Return the spectrum with the power law of its tail."""
    fit = None if result.evidence is None or result.evidence.tail is None else result.evidence.tail.fit
    if fit is None:
        try:
            fit = power_law(values)
        except InputError:
            positive = int((values > 0).sum())
            notes = (*notes, f"no tail: {positive} positive eigenvalues are too few, or too many of them are equal")
    return WeightSpectrum(name, kind, shape, parameter, values, result, bulk, fit, initial, tied, notes, null)
