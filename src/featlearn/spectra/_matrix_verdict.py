"""Verdict on one matrix without its initial weights: compared with noise that has its row and column norms."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from featlearn.errors import InputError
from featlearn.spectra._bulk_and_spikes import LEAST_EIGENVALUES, MARGIN, FittedBulk, spikes
from featlearn.spectra._entry_statistics import EntryStatistics
from featlearn.spectra._norm_null import explain_tail, parallel_rows
from featlearn.spectra._phase import Phase, phase
from featlearn.spectra._power_law import PowerLawFit
from featlearn.spectra._profile_null import ProfileNull, Spike
from featlearn.spectra._tail_evidence import tail_evidence

Array = NDArray[np.float64]

_FEWEST = 8  # eigenvalues below which nothing is said about noise
_NEAR = 1.7  # factor: where a tail starts at most, over the largest eigenvalue of noise
_LITTLE = 0.01  # share of the energy of noise that is mentioned
_KOLMOGOROV = 1.358  # 5% point of sqrt(n) times the distance of independent values from their law
_TAIL, _FITS = 10, 1.09  # eigenvalues of a tail; 5% point of its distance from an exponential law of estimated rate


def law_verdict(bulk: FittedBulk, values: Array) -> Phase:
    """Return the phase of eigenvalues compared with a fitted law, with a reason that does not refer to training.

    Args:
        bulk: Marchenko-Pastur law of the bulk.
        values: Eigenvalues of ``W^T W`` of the smaller side, ascending.
    """
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
    close = e.bulk_distance <= same_law(values.size)
    if close and e.spikes:
        # The edge of the law is more accurate than that of a bulk without a law, with up to 1% of false positives.
        limit = spikes(values, bulk.law, margin=MARGIN).threshold
        e = replace(e, spikes=tuple(s for s in e.spikes if s > limit))
        result = replace(result, evidence=e, name=result.name if e.spikes else "invariant bulk")
    law = f"Marchenko-Pastur (distance {e.bulk_distance:.3f}, variance {bulk.variance:.3g})"
    if result.name == "rank collapse":
        return replace(result, reason=f"{e.collapsed:.0%} of the eigenvalues hold less than 0.5% of the energy")
    if result.name == "bulk + spikes" and e.trained_edge is not None:
        found = _listed(e.spikes)
        return replace(
            result, reason=f"{found} beyond {e.trained_edge.threshold:.3g}; the bulk is {'' if close else 'not '}{law}"
        )
    if result.name == "invariant bulk" and close:
        return replace(result, reason=f"the bulk is {law}, and no eigenvalue is beyond its edge")
    if result.name in ("invariant bulk", "undecided") and not close:
        also = "" if e.trained_edge is not None else f"; {result.reason}"
        return replace(result, name="undecided", reason=f"the bulk is not {law}, and there is no spike{also}")
    return result


def matrix_verdict(
    bulk: FittedBulk, values: Array, weight: Tensor, null: ProfileNull, statistics: EntryStatistics
) -> Phase:
    """Return the phase of a matrix compared with noise that has its row and column norms.

    1. A rank collapse is one by the eigenvalues alone, unless what is left is noise with spikes.
    2. The rest of the spectrum, without the spikes beyond the edge of the noise (`profile_null`), is compared with the
       law of the noise: Marchenko-Pastur if the norms vary by no more than chance, and that of the norms otherwise. If
       it is close, the matrix is noise with these spikes, or noise alone; ten or more spikes that follow a power law
       from the edge on are a heavy tail.
    3. A heavy tail by the eigenvalues alone stays one, unless the norms explain it.
    4. If the bulk is not the law, spikes must be beyond the edge of the bulk itself too (`empirical_edge`); a bulk that
       reaches beyond the edge of the noise without an end is undecided.

    Args:
        bulk: Marchenko-Pastur law of the bulk.
        values: Eigenvalues of ``W^T W`` of the smaller side, ascending.
        weight: The matrix, shape ``(groups, h, d)``.
        null: Noise with the same norms.
        statistics: Norms of the rows and columns of the matrix.
    """
    result = law_verdict(bulk, values)
    if (result.evidence is None and result.name == "rank collapse") or values.size < _FEWEST:
        return result
    varying = statistics.varying
    distance = null.distance(values[values > 0]) if varying or len(null.spikes) > bulk.left_out else bulk.distance
    close = distance <= same_law(values.size)
    of_noise = f"noise with the same row and column norms (distance {distance:.3f})" if varying else (
        f"Marchenko-Pastur (distance {distance:.3f}, variance {bulk.variance:.3g})"
    )  # fmt: skip
    named = [spike for spike in null.spikes if not spike.is_mean]
    e = result.evidence
    if result.name == "rank collapse" and not (close and named):
        return result
    rest = values.size - len(null.spikes)
    if len(named) >= _TAIL and distance <= _KOLMOGOROV / math.sqrt(rest):
        tail = _tail_beyond(values, named[-1].value) if named[-1].value <= _NEAR * null.limit else None
        if tail is not None:
            reason = (
                f"a power law of exponent {tail.alpha:.2f} +- {tail.standard_error:.2f} fits the {tail.n_tail} "
                f"eigenvalues beyond {null.limit:.3g}, which noise reaches; the rest is {of_noise}"
            )
            return _with_spikes(result, tuple(s.value for s in named), name="heavy tail", reason=reason)
    # A signal on a few rows is in their norms.
    hidden = e is not None and bool(e.spikes) and not null.spikes and parallel_rows(weight, statistics)
    if close and not hidden:
        return _noise_and_spikes(result, named, null, bulk, values, of_noise, varying)
    if result.name == "heavy tail":
        if not varying:
            return result
        explained = explain_tail(result, weight, statistics, null.limit)
        return replace(result, name="undecided", reason=f"{varying}: {explained}") if explained else result
    also = "".join(f"; {text}" for text in (_mean_part(null), varying) if text)
    edge = None if e is None else e.trained_edge
    both = [spike for spike in named if edge is not None and spike.value > edge.threshold]
    if hidden:
        return replace(result, reason=f"{result.reason}; large rows or columns are parallel, which noise does not make")
    if both and edge is not None:
        reason = (
            f"{_listed([spike.value for spike in both])} beyond {edge.threshold:.3g}, where the bulk itself ends; the "
            f"bulk is not {of_noise}: {_counted(len(named))} beyond its edge {null.edge:.3g}{also}"
        )
        return _with_spikes(result, tuple(s.value for s in both), name="bulk + spikes", reason=reason)
    if named:
        many = f"{_counted(len(named))} beyond {null.limit:.3g}, which noise reaches"
        reason = f"the bulk is not {of_noise}: {many}, but the bulk itself has no end before them{also}"
    elif e is not None and e.spikes:
        many = f"{_counted(len(e.spikes))} beyond the bulk, but noise with the same norms reaches {null.limit:.3g}"
        reason = f"{varying or 'entries of many sizes'}: {many}"
    else:
        reason = f"the bulk is not {of_noise}, and there is no spike{also}"
    return _with_spikes(result, (), name="undecided", reason=reason)


def _tail_beyond(values: Array, start: float) -> PowerLawFit | None:
    """Return the power law of the eigenvalues beyond noise; None if they do not follow one.

    Spikes of similar sizes are far from the edge of the noise, or follow a power law that is too steep.
    """
    try:
        evidence = tail_evidence(values, x_min=start)
    except InputError:
        return None
    if evidence is None or not evidence.is_power_law or evidence.fit.distance * math.sqrt(evidence.fit.n_tail) > _FITS:
        return None
    return evidence.fit


def same_law(count: int) -> float:
    """Return the largest distance of a bulk that counts as one of a law: 2% plus four eigenvalues.

    Among 3,432 Gaussian matrices of 50 to 768 columns, and 1 to 8 times as many rows, no distance was above ``5 / n``.

    Args:
        count: Number of eigenvalues.
    """
    return 0.02 + 4 / count


def _noise_and_spikes(
    result: Phase,
    named: list[Spike],
    null: ProfileNull,
    bulk: FittedBulk,
    values: Array,
    of_noise: str,
    varying: str,
) -> Phase:
    """Return the phase of a bulk with some spikes, which may be none."""
    parts = [f"the bulk is {of_noise}"]
    if named:
        weakest = max(spike.p_value for spike in named)
        p = "p < 1e-9" if weakest < 1e-9 else f"p {weakest:.1g}"
        parts.insert(0, f"{_listed([spike.value for spike in named])} beyond {null.edge:.3g}, the edge of noise ({p})")
    else:
        parts.append(f"no eigenvalue is beyond its edge {null.edge:.3g}")
    noise = float(values[: values.size - len(null.spikes)].sum() / values.sum())
    if noise < _LITTLE:
        parts.append(f"the noise holds {noise:.1g} of the energy, so that W is nearly of rank {len(null.spikes)}")
    if mean := _mean_part(null):
        parts.append(mean)
    plain = 0 if bulk.law is None else len(spikes(values, bulk.law, margin=MARGIN))
    if varying and plain != len(named):
        parts.append(f"{varying}, so that Marchenko-Pastur alone would count {_counted(plain)}")
    name = "bulk + spikes" if named else "invariant bulk"
    return _with_spikes(result, tuple(spike.value for spike in named), name=name, reason="; ".join(parts))


def _mean_part(null: ProfileNull) -> str:
    """Return that the mean of the entries is a component beyond the noise; empty if it is not."""
    means = [spike.value for spike in null.spikes if spike.is_mean]
    return f"the mean of the entries is a part of rank one ({means[0]:.3g})" if means else ""


def _with_spikes(result: Phase, found: tuple[float, ...], **changes: str) -> Phase:
    evidence = None if result.evidence is None else replace(result.evidence, spikes=found)
    return replace(result, evidence=evidence, **changes)  # type: ignore[arg-type]


def _counted(count: int) -> str:
    return f"{count} eigenvalue{'s' * (count != 1)}"


def _listed(values: tuple[float, ...] | list[float]) -> str:
    shown = ", ".join(f"{value:.3g}" for value in values[:3])
    return f"{_counted(len(values))} ({shown}{', ...' * (len(values) > 3)})"
