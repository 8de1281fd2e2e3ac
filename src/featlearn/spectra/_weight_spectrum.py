"""Spectrum of one weight matrix, with its phase, tail, ranks and norms."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field, replace

import numpy as np
from matplotlib.figure import Figure
from numpy.typing import NDArray
from torch import Tensor

from featlearn.errors import InputError
from featlearn.plots import spectrum_histogram
from featlearn.spectra._bulk_and_spikes import LEAST_EIGENVALUES, MARGIN, FittedBulk, fit_marchenko_pastur, spikes
from featlearn.spectra._compare import histogram
from featlearn.spectra._laws import Law
from featlearn.spectra._norm_null import against_norms
from featlearn.spectra._phase import Phase, phase
from featlearn.spectra._power_law import PowerLawFit, power_law
from featlearn.spectra._ranks import clean_eigenvalues, effective_rank, spectral_entropy, stable_rank

Array = NDArray[np.float64]


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
        return None if e is None or e.trained_edge is None else e.spikes

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
        spikes, fit, bulk = self.spikes, self.fit, self.bulk
        return {
            "kind": self.kind,
            "shape": f"{rows}x{columns}" if groups == 1 else f"{groups} x {rows}x{columns}",
            "eigenvalues": self.eigenvalues.size,
            "zeros": int((self.eigenvalues == 0).sum()),
            "phase": self.phase_name,
            "spikes": math.nan if spikes is None else len(spikes),
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

    def plot(self, title: str | None = None) -> Figure:
        """Draw the spectrum with the initial one, or with the Marchenko-Pastur law of its bulk.

        Args:
            title: Title of the figure. None uses the names of the matrix and its phase.

        Returns:
            The figure.

        Raises:
            InputError: If the matrix is zero.
        """
        if not self.eigenvalues[-1] > 0:
            raise InputError(f"The matrix {self.name!r} is zero: there is nothing to draw.")
        heading = title or f"{self.name}: {self.phase_name}"
        if self.initial is not None and self.phase.initial.size:
            return self.phase.plot(heading)
        log = self.phase_name in ("heavy tail", "rank collapse")
        bins = histogram(self.eigenvalues, log=log)
        curve, edge = None, None
        if self.law is not None:
            x = np.linspace(*self.law.edges, 300)[1:-1]
            curve, edge = (x, self.law.pdf(x).numpy()), self.law.edges[1]
        spikes = () if log or self.spikes is None else self.spikes
        return spectrum_histogram(
            (bins.edges, bins.density), density=curve, edge=edge, spikes=spikes, log=log, title=heading
        )


def measure_spectrum(
    name: str,
    kind: str,
    shape: tuple[int, int, int],
    parameter: str,
    eigenvalues: Array,
    *,
    initial: Array | None = None,
    tied: tuple[str, ...] = (),
    notes: tuple[str, ...] = (),
    make_weight: Callable[[], Tensor] | None = None,
) -> WeightSpectrum:
    """Measure the spectrum of a matrix, compared with its initial spectrum or with a law.

    Args:
        name: Name of the matrix.
        kind: Kind of the matrix, such as "linear".
        shape: Shape ``(groups, rows, columns)`` of the matrix.
        parameter: Name of the tensor.
        eigenvalues: Eigenvalues of ``W^T W``, of the smaller side.
        initial: Eigenvalues of the initial weights. None compares with a law.
        tied: Other names of the tensor.
        notes: Notes for the report.
        make_weight: Function that returns the matrix, of shape `shape`, for `against_norms`. None skips this
            comparison, if only eigenvalues are known.

    Returns:
        The spectrum with all its numbers.
    """
    values = clean_eigenvalues(eigenvalues)
    bulk = fit_marchenko_pastur(values, *shape[1:]) if values[-1] > 0 else None
    if bulk is None:
        result = Phase("undecided", "all eigenvalues are zero", None, values[:0], values[:0])
    elif initial is not None and not initial.max() > 0:
        result = Phase("undecided", "the initial weights are zero", None, values[:0], values[values > 0])
    else:
        result = phase(initial, values) if initial is not None else _against_law(bulk, values)
        if make_weight is not None:
            result = against_norms(result, make_weight)
    fit = None if result.evidence is None or result.evidence.tail is None else result.evidence.tail.fit
    if fit is None:
        try:
            fit = power_law(values)
        except InputError:
            positive = int((values > 0).sum())
            notes = (*notes, f"no tail: {positive} positive eigenvalues are too few, or too many of them are equal")
    return WeightSpectrum(name, kind, shape, parameter, values, result, bulk, fit, initial, tied, notes)


def _against_law(bulk: FittedBulk, values: Array) -> Phase:
    """Return the phase compared with a fitted law, with a reason that does not refer to training."""
    positive = values[values > 0]
    if bulk.law is None:
        reason = f"{values.size - positive.size} of {values.size} eigenvalues are zero"
        return Phase("rank collapse", reason, None, positive, positive)
    result = phase(bulk.law, values)
    e = result.evidence
    if e is None:
        return replace(
            result, reason=f"{values.size} eigenvalues are too few: at least {LEAST_EIGENVALUES} are required"
        )
    close = e.bulk_distance <= _same_law(values.size)
    if close and e.spikes:
        # The edge of the law is more accurate than that of a bulk without a law, with up to 1% of false positives.
        limit = spikes(values, bulk.law, margin=MARGIN).threshold
        e = replace(e, spikes=tuple(s for s in e.spikes if s > limit))
        result = replace(result, evidence=e, name=result.name if e.spikes else "invariant bulk")
    law = f"Marchenko-Pastur (distance {e.bulk_distance:.3f}, variance {bulk.variance:.3g})"
    if result.name == "rank collapse":
        return replace(
            result, reason=f"{e.collapsed:.0%} of the eigenvalues are below a hundredth of the Marchenko-Pastur law"
        )
    if result.name == "bulk + spikes" and e.trained_edge is not None:
        count, listed = len(e.spikes), ", ".join(f"{s:.3g}" for s in e.spikes[:3])
        return replace(
            result,
            reason=f"{count} eigenvalue{'s' * (count > 1)} ({listed}{', ...' * (count > 3)}) beyond "
            f"{e.trained_edge.threshold:.3g}; the bulk is {'' if close else 'not '}{law}",
        )
    if result.name == "invariant bulk" and close:
        return replace(result, reason=f"the bulk is {law}, and no eigenvalue is beyond its edge")
    if result.name in ("invariant bulk", "undecided") and not close:
        also = "" if e.trained_edge is not None else f"; {result.reason}"
        return replace(result, name="undecided", reason=f"the bulk is not {law}, and there is no spike{also}")
    return result


def _same_law(count: int) -> float:
    """Return the largest distance of a bulk that counts as Marchenko-Pastur: 2% plus four eigenvalues.

    Among 3,432 Gaussian matrices of 50 to 768 columns, and 1 to 8 times as many rows, no distance was above ``5 / n``.
    """
    return 0.02 + 4 / count
