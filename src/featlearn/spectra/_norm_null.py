"""Comparison of a phase with what the norms of rows and columns alone explain.

Spikes are compared with the edge of noise with the same norms (`featlearn.spectra.profile_null`), heavy tails with a
copy of the matrix that has random signs: the same entries up to sign, the same norms, and no other structure.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import torch
from numpy.typing import NDArray
from scipy.special import ndtri
from torch import Tensor

from featlearn._utils.public_names import renamed_arguments
from featlearn.spectra._entry_statistics import EntryStatistics, entry_statistics
from featlearn.spectra._gram_eigenvalues import gram_eigenvalues
from featlearn.spectra._phase import Phase
from featlearn.spectra._profile_null import ProfileNull, null_of_blocks

Array = NDArray[np.float64]

_SAME_TAIL = 0.1  # difference of logarithms: below 0.08 for nulls of log-sd 1, above 0.12 for planted power laws
_LARGE_ROWS, _LEVEL = 64, 0.01
_IN_QUESTION = ("bulk + spikes", "heavy tail", "undecided")  # phases that norms can explain


def varying_norms(weight: Tensor) -> str:
    """Test whether the norms of the rows or columns of a matrix vary more than chance allows.

    The test is an analysis of variance of ``t = w^2 / (w^2 + m)`` over rows and over columns, where m is the median of
    ``w^2``. t is bounded, so that a few huge entries, which make norms vary by chance, have little influence: entries
    of one distribution pass, whatever its tail. Norms vary if the variance between rows is more than 5 standard
    deviations above its expectation for rows of the same distribution.

    Time: ``O(entries)``. Memory: one block of rows.

    Args:
        weight: Block-diagonal matrix of shape ``(groups, h, d)``, finite.

    Returns:
        ``"row norms vary"``, ``"column norms vary"``, ``"row and column norms vary"``, or an empty string.

    Example:
        >>> import torch
        >>> from featlearn.spectra import varying_norms
        >>> weight = torch.randn(1, 100, 50, generator=torch.Generator().manual_seed(0))
        >>> varying_norms(weight), varying_norms(weight * torch.linspace(0.5, 2.0, 100)[:, None])
        ('', 'row norms vary')
    """
    return entry_statistics(weight).varying


@renamed_arguments(found="phase")
def against_norms(phase: Phase, make_weight: Callable[[], Tensor]) -> Phase:
    """Return the phase of a matrix, or "undecided" if the norms of its rows and columns alone explain it.

    Spikes must be beyond the edge of noise with the same row and column norms (`profile_null`); others are dropped. If
    none is left, the phase is "undecided", unless two large rows or columns are parallel, which noise does not make. If
    norms vary more than chance allows, a heavy tail is explained by them if its largest eigenvalue is not beyond that
    edge, or if its eigenvalues are those of a copy of the matrix with random signs, rank by rank (the median ratio is
    within 10%). If the phase is already "undecided", varying norms are added to its reason.

    Time: a few milliseconds; for a heavy tail two whole spectra.

    Args:
        phase: Phase of the matrix, from its eigenvalues.
        make_weight: Function that returns the matrix, shape ``(groups, h, d)``. Called for the phases "bulk + spikes",
            "heavy tail" and "undecided".

    Returns:
        The same phase, or one with the name "undecided" and the reason.
    """
    if phase.name not in _IN_QUESTION or phase.evidence is None:
        return phase
    weight = make_weight()
    statistics = entry_statistics(weight)

    def make_null(unit: float) -> ProfileNull:
        return null_of_blocks(weight, [None] * len(weight), statistics, eigenvalues=phase.trained / unit)

    return explain_by_norms(phase, weight, statistics, make_null)


def explain_by_norms(
    phase: Phase, weight: Tensor, statistics: EntryStatistics, make_null: Callable[[float], ProfileNull]
) -> Phase:
    """Return `against_norms` of a matrix whose norms are known.

    Args:
        phase: Phase of the matrix, from its eigenvalues.
        weight: The matrix, shape ``(groups, h, d)``.
        statistics: Norms of its rows and columns.
        make_null: Function that returns the noise with these norms, given the unit of the eigenvalues of the phase.
    """
    if phase.name not in _IN_QUESTION or phase.evidence is None:
        return phase
    varying = statistics.varying
    if phase.name == "undecided":
        return replace(phase, reason=f"{phase.reason}; {varying}") if varying else phase
    if phase.name == "heavy tail" and not varying:
        return phase
    unit = _unit(phase, statistics)
    limit = make_null(unit).limit * unit
    if phase.name == "heavy tail":
        explained = explain_tail(phase, weight, statistics, limit)
        if not explained:
            return phase
        beyond = phase.trained[phase.trained > limit][::-1]
        also = f"; {beyond.size} of its eigenvalues are beyond that" if beyond.size else ""
        evidence = replace(phase.evidence, spikes=tuple(beyond.tolist()))
        return replace(phase, name="undecided", reason=f"{varying}: {explained}{also}", evidence=evidence)
    kept = tuple(spike for spike in phase.evidence.spikes if spike > limit)
    if len(kept) == len(phase.evidence.spikes) or (not kept and parallel_rows(weight, statistics)):
        return phase
    count = len(phase.evidence.spikes) - len(kept)
    noise = f"noise with the same row and column norms reaches {limit:.3g}"
    evidence = replace(phase.evidence, spikes=kept)
    if kept:
        return replace(
            phase, reason=f"{phase.reason}; {count} more are not counted, because {noise}", evidence=evidence
        )
    spikes = f"{count} spikes" if count > 1 else "1 spike"
    reason = f"{varying or 'entries of many sizes'}: {spikes} beyond the bulk, but {noise}"
    return replace(phase, name="undecided", reason=reason, evidence=evidence)


def _unit(phase: Phase, statistics: EntryStatistics) -> float:
    """Return the eigenvalues of a phase over those of the matrix: they can have a divisor."""
    return float(phase.trained.sum() / statistics.rows.sum())


def explain_tail(phase: Phase, weight: Tensor, statistics: EntryStatistics, limit: float) -> str:
    """Return how noise with the norms of a matrix explains its heavy tail; empty if it does not.

    Args:
        phase: Phase of the matrix, a heavy tail.
        weight: The matrix, shape ``(groups, h, d)``.
        statistics: Norms of its rows and columns.
        limit: Largest eigenvalue that the noise reaches, in the unit of the phase.
    """
    assert phase.evidence is not None and phase.evidence.tail is not None
    tail = slice(-phase.evidence.tail.fit.n_tail, None)
    copy = gram_eigenvalues(weight, signs=torch.Generator().manual_seed(0)) * _unit(phase, statistics)
    ratios = phase.trained[tail] / copy[-phase.trained.size :][tail].clip(min=np.finfo(float).tiny)
    if float(np.median(np.abs(np.log(ratios)))) <= _SAME_TAIL:
        return "the same entries with random signs have the same heavy tail"
    if phase.trained[-1] <= limit:
        return f"noise with the same norms reaches as far as the tail ({limit:.3g})"
    return ""


def parallel_rows(weight: Tensor, statistics: EntryStatistics) -> bool:
    """Return whether two of the largest rows, or columns, are more parallel than random signs make them.

    A signal on a few rows raises their norms, and noise with these norms reaches nearly as far; but it makes the rows
    parallel. With random signs, the product ``sum_j sign(a_j) b_j / |b|`` of two rows has the variance 1 and lighter
    tails than a normal variable, whatever the entries are. The largest of all pairs is compared with the normal law at
    a level of 1%.

    Args:
        weight: Block-diagonal matrix of shape ``(groups, h, d)``.
        statistics: Norms of its rows and columns.
    """
    tiny = torch.finfo(torch.float64).tiny
    sides = [
        (block, norms)
        for blocks, norms in ((weight.detach(), statistics.rows), (weight.detach().mT, statistics.columns))
        for block, norms in zip(blocks, torch.from_numpy(norms), strict=True)
        if min(block.shape) > 1
    ]
    for block, norms in sides:
        largest = norms.topk(min(_LARGE_ROWS, len(block))).indices.to(block.device)
        rows = block[largest].double().cpu()
        rows = rows / rows.norm(dim=1, keepdim=True).clamp_min(tiny)
        scores = (rows.sign() @ rows.mT).abs().fill_diagonal_(0)
        if float(scores.max()) > -ndtri(_LEVEL / (2 * len(sides) * len(rows) * (len(rows) - 1))):
            return True
    return False
