"""Phases of a trained spectrum: invariant bulk, bulk + spikes, heavy tail, rank collapse.

References:
    Wang, Engel, Sarwate, Dumitriu & Chiang (2022), "Spectral evolution and invariance in linear-width neural
    networks", https://arxiv.org/abs/2211.06506, table 1 and section 5 (the spectral paper).
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
from numpy.typing import NDArray

from featlearn.errors import InputError
from featlearn.linalg.ranks import effective_rank, positive_eigenvalues, stable_rank
from featlearn.spectra._bulk_and_spikes import LEAST_EIGENVALUES, MARGIN, EmpiricalEdge, edge_scale, empirical_edge
from featlearn.spectra._compare import histogram, ks_distance, qq
from featlearn.spectra._laws import Law
from featlearn.spectra._tail_evidence import TailEvidence, tail_evidence

if TYPE_CHECKING:
    from matplotlib.figure import Figure

Array = NDArray[np.float64]
PhaseName = Literal["invariant bulk", "bulk + spikes", "heavy tail", "rank collapse", "undecided"]

_SAME_BULK = 0.1  # largest Kolmogorov-Smirnov distance of bulks of the same shape
_GONE, _GAP = 5e-3, 10.0  # collapsed eigenvalues hold at most this share of the energy, below a gap of this factor
_ONCE, _ALIKE = 10.0, 100.0  # factors: they held more initially; the largest of them exceeds their median by less
_IMPROBABLE = 1e6  # factor of a gap to the power of the number of eigenvalues above it, which no heavy tail has
_MANY = 0.1  # smallest share of collapsed eigenvalues of a rank collapse
_NARROW = 1e-6  # initial eigenvalues with a smaller relative interquartile range are all equal
_STRAIGHT = 0.5  # p-value of the end of a tail above which spikes are not mentioned; see `tail_evidence`
_BINS = 40


def phase(initial: Any, trained: Any, *, size: int | None = None, margin: float = MARGIN) -> Phase:
    """Classify a trained spectrum by comparison with the initial one.

    Both spectra are of a positive semi-definite matrix: ``W^T W``, a conjugate kernel or a tangent kernel. The first of
    these rules that applies gives the phase. All but the first are independent of the scale, which is that of the
    medians:

    1. **rank collapse**: at least a tenth of the eigenvalues are below a gap of a factor of 10, hold at most
       0.5% of the sum of all, and held at least ten times as much initially.
    2. **heavy tail**: `tail_evidence` finds a power law, and the bulk has moved: its edge is beyond the initial
       threshold, or the bulks differ. This is the notion of the paper, "an extreme of bulk + spikes, where a fraction
       of the eigenvalues move out of the initial bulk" (section 5.3). An unchanged bulk with spikes of many sizes is
       not a heavy tail. If a stretched bulk with a few spikes would explain the tail as well, the reason mentions it.
    3. **bulk + spikes**: eigenvalues exceed the edge of the trained bulk (`empirical_edge`) by more than ``margin``
       Tracy-Widom scales, and the largest eigenvalue of the initial bulk by half as many, and were not spikes
       initially. A spike is not new if an initial spike is within ``margin sqrt(2 / n)`` of its value, which is
       ``margin`` standard deviations of a spike.
    4. **invariant bulk**: none of these, and the bulks have a Kolmogorov-Smirnov distance of at most 0.1: at most a
       tenth of the eigenvalues has crossed any value.
    5. **undecided**: otherwise, or if fewer than 50 initial eigenvalues are positive.

    Accuracy, measured at 300 x 200 (100 draws each): two draws of the same law are an invariant bulk in 99.7% (of 300).
    A signal of 1.5 times `bbp_threshold` is detected in 97% of draws and one of 1.25 times in 29%. Cauchy entries give
    a heavy tail in all draws, Student's t with 2 degrees of freedom in 84%, with 3 in 9% (otherwise spikes).
    Eigenvalues of a power law are a heavy tail in 97% up to alpha = 3. A stretched bulk with three or more spikes of
    different sizes is a heavy tail in all draws, one with a single spike in none. Case 4 of the paper (Adam), at half
    its size, is of that kind: W, CK and NTK of eleven trainings were all classified as heavy tails, as in the paper.

    A bulk consists of the positive eigenvalues that are not spikes; bulks are compared after division by their medians.
    A heavy tail that was present initially and has not changed is an invariant bulk: the phase describes training.

    Eigenvalues do not show whether the norms of rows and columns alone explain a phase: a matrix with rows of many
    sizes has spikes or a heavy tail without a signal. If the matrix is known, pass the result to `against_norms`, as
    `weight_spectra` and `featlearn.Monitor` do.

    Args:
        initial: Initial eigenvalues in any order, or the law that they follow.
        trained: Eigenvalues after training, in any order. Their number can differ from the initial one if both follow
            the same law, so have the same ratio of sizes: ranks are then compared at equal shares.
        size: Dimension of the matrix, if zeros were left out of the eigenvalues. None uses the number of eigenvalues.
        margin: Smallest distance of a spike from the edge, in Tracy-Widom scales, at least 0.

    Returns:
        The phase with its reason and evidence.

    Raises:
        InputError: If a spectrum is empty, not a vector, not finite or negative, all initial eigenvalues are zero,
            `size` is smaller than the number of eigenvalues, or `margin` is negative or not finite.

    References:
        Wang, Engel, Sarwate, Dumitriu & Chiang (2022), https://arxiv.org/abs/2211.06506, table 1 and section 5.

    Example:
        >>> from featlearn.spectra import marchenko_pastur, phase
        >>> law = marchenko_pastur(300, 100)
        >>> bulk = law.quantile([(i + 0.5) / 98 for i in range(98)]).tolist()
        >>> phase(law, [*bulk, 4.0, 5.0]).name
        'bulk + spikes'
    """
    after, zeros = positive_eigenvalues(trained, "trained eigenvalues")
    if size is not None:
        if size < after.size + zeros:
            raise InputError(f"size must be at least the number of eigenvalues, {after.size + zeros}, got {size}.")
        zeros = size - after.size
    before, zeros_before = _start(initial, after.size + zeros, size)
    if before.size < LEAST_EIGENVALUES:
        reason = (
            f"the initial spectrum has {before.size} positive eigenvalues, at least {LEAST_EIGENVALUES} are required"
        )
        return Phase("undecided", reason, None, before, after, initial if isinstance(initial, Law) else None)
    evidence = _gather(initial, before, after, (zeros_before, zeros), margin)
    name, reason = _decide(evidence, before, after)
    return Phase(name, reason, evidence, before, after, initial if isinstance(initial, Law) else None)


@dataclass(frozen=True, eq=False)
class PhaseEvidence:
    """Numbers that `phase` decides by. Pairs are (initial, trained).

    Attributes:
        zeros: Numbers of zero eigenvalues.
        collapsed: Share of the eigenvalues that have collapsed, beyond those that were zero initially.
        top_ratio: Ratio of the largest trained to the largest initial eigenvalue.
        scale: Ratio of the medians of the trained and the initial bulk.
        bulk_distance: Kolmogorov-Smirnov distance of the bulks after division by their medians.
        raw_distance: Kolmogorov-Smirnov distance of the bulks without this division.
        initial_edge: Edge of the initial bulk, with its threshold and spikes. None if it has no edge.
        trained_edge: Edge of the trained bulk, with its threshold and all spikes. None if it has no edge.
        spikes: New spikes, in descending order.
        kept_spikes: Spikes that were present initially, in descending order.
        tail: Evidence for a heavy tail of the trained spectrum. None if it has too few different eigenvalues.
        stable_ranks: Stable ranks, ``sum lambda / lambda_max``.
        effective_ranks: Effective ranks, ``exp`` of the entropy.
    """

    zeros: tuple[int, int]
    collapsed: float
    top_ratio: float
    scale: float
    bulk_distance: float
    raw_distance: float
    initial_edge: EmpiricalEdge | None
    trained_edge: EmpiricalEdge | None
    spikes: tuple[float, ...]
    kept_spikes: tuple[float, ...]
    tail: TailEvidence | None
    stable_ranks: tuple[float, float]
    effective_ranks: tuple[float, float]


@dataclass(frozen=True, eq=False)
class Phase:
    """Phase of a trained spectrum: the result of `phase`.

    Attributes:
        name: "invariant bulk", "bulk + spikes", "heavy tail", "rank collapse" or "undecided".
        reason: Sentence with the numbers that the phase was decided by.
        evidence: All measured numbers. None if there were too few eigenvalues.
        initial: Positive initial eigenvalues, ascending; quantiles if a law was passed.
        trained: Positive trained eigenvalues, ascending.
        law: Law that was passed as the initial spectrum. None if eigenvalues were passed.
    """

    name: PhaseName
    reason: str
    evidence: PhaseEvidence | None = field(repr=False)
    initial: Array = field(repr=False)
    trained: Array = field(repr=False)
    law: Law | None = field(repr=False, default=None)

    def __str__(self) -> str:
        return f"{self.name}: {self.reason}"

    def plot(self, title: str | None = None) -> Figure:
        """Draw histograms of both spectra next to their Q-Q plot, logarithmic for heavy tails and collapses.

        Args:
            title: Title of the figure. None uses the name of the phase.

        Returns:
            The figure.

        Raises:
            InputError: If all trained eigenvalues are zero.
        """
        from featlearn.plots import spectrum_histogram

        if not self.trained.size:
            raise InputError("All trained eigenvalues are zero: there is nothing to draw.")
        e = self.evidence
        spread = self.trained[-1] > 4 * self.initial[-1]
        log = spread or self.name in ("heavy tail", "rank collapse")
        both = np.concatenate([self.initial, self.trained])
        low, high = float(both.min()), float(both.max())
        bins = np.geomspace(low, high, _BINS + 1) if log else np.linspace(0.0, high, _BINS + 1)
        before, after = histogram(self.initial, bins=bins), histogram(self.trained, bins=bins)
        zeros = (0, 0) if e is None else e.zeros
        pairs = qq(np.pad(self.initial, (zeros[0], 0)), np.pad(self.trained, (zeros[1], 0)))
        curve = None
        if self.law is not None:
            x = np.linspace(*self.law.edges, 300)[1:-1]
            curve = (x, self.law.pdf(x).numpy() / (1 - self.law.atom))
        return spectrum_histogram(
            (after.edges, after.density),
            (before.edges, before.density),
            density=curve,
            edge=None if e is None or e.trained_edge is None or self.name == "rank collapse" else e.trained_edge.edge,
            spikes=e.spikes if e is not None and self.name == "bulk + spikes" else (),
            qq=(pairs.initial, pairs.trained),
            log=log,
            title=title or self.name,
        )


def _start(initial: Any, count: int, size: int | None) -> tuple[Array, int]:
    """Return the positive initial eigenvalues and the number of zeros; quantiles for a law."""
    if isinstance(initial, Law):
        positive = max(1, round((1 - initial.atom) * count))
        shares = initial.atom + (1 - initial.atom) * (np.arange(positive) + 0.5) / positive
        return initial.quantile(shares).numpy(), count - positive
    values, zeros = positive_eigenvalues(initial, "initial eigenvalues")
    if not values.size:
        raise InputError(f"initial must have a positive eigenvalue, but all {zeros} initial eigenvalues are zero.")
    return values, zeros if size is None else size - values.size


def _gather(initial: Any, before: Array, after: Array, zeros: tuple[int, int], margin: float) -> PhaseEvidence:
    if isinstance(initial, Law):
        right, scale = initial.edges[1], edge_scale(initial, before.size + zeros[0])
        start: EmpiricalEdge | None = EmpiricalEdge(right, scale, right + margin * scale, before[:0])
    else:
        start = empirical_edge(before, margin=margin)
    end = empirical_edge(after, margin=margin) if after.size >= LEAST_EIGENVALUES else None
    old = _bulk(before, start)
    bulk = _bulk(after, end) if after.size else np.zeros(1)
    middle = float(np.median(bulk)) / float(np.median(old))
    # A spike at the edge is detected in one draw and not in the next: it is new only if it exceeds the initial bulk.
    floor = 0.0 if end is None else middle * float(old[-1]) + margin / 2 * end.scale
    new, kept = _match(start, end, middle, margin * math.sqrt(2 / before.size), floor)
    return PhaseEvidence(
        zeros=zeros,
        collapsed=_collapsed(before, after, zeros),
        top_ratio=float(after[-1] / before[-1]) if after.size else 0.0,
        scale=middle,
        bulk_distance=ks_distance(bulk, middle * old) if middle else 1.0,
        raw_distance=ks_distance(bulk, old),
        initial_edge=start,
        trained_edge=end,
        spikes=new,
        kept_spikes=kept,
        tail=tail_evidence(after) if after.size else None,
        stable_ranks=(stable_rank(before), stable_rank(after) if after.size else 0.0),
        effective_ranks=(effective_rank(before), effective_rank(after) if after.size else 0.0),
    )


def _bulk(values: Array, edge: EmpiricalEdge | None) -> Array:
    """Return the ascending values without the spikes; all of them if there is no edge."""
    return values if edge is None else values[: values.size - edge.spikes.size]


def _collapsed(before: Array, after: Array, zeros: tuple[int, int]) -> float:
    """Return the share of the eigenvalues that a gap separates from the others, and that hold nearly no energy.

    The energy is the sum of the eigenvalues, so that the rule does not depend on the scale of the initial weights.
    """
    values = np.concatenate([np.zeros(zeros[1]), after])
    n, total = values.size, float(values.sum())
    if not total > 0:
        return 1.0
    below = np.cumsum(values)[:-1] / total
    with np.errstate(divide="ignore", invalid="ignore"):
        gaps = np.where(values[1:] > 0, values[1:] / values[:-1], 1.0)
    start = np.concatenate([np.zeros(zeros[0]), before])
    shares = np.arange(1, n) / n
    held = np.interp(shares, np.arange(1, start.size + 1) / start.size, np.cumsum(start) / start.sum())
    # A heavy tail can have a gap near its end: its other eigenvalues are of many sizes. But a gap of a factor r below k
    # eigenvalues has the probability r^(-k (alpha - 1)) in a power law.
    medians = values[np.arange(1, n) // 2]
    with np.errstate(divide="ignore"):
        likely = np.arange(n - 1, 0, -1) * np.log(gaps) < math.log(_IMPROBABLE)
    possible = (gaps >= _GAP) & (below <= _GONE) & (held > _ONCE * below)
    possible &= (values[:-1] <= _ALIKE * medians) | ~likely
    share = float(shares[possible].max(initial=0.0))
    return max(0.0, share - zeros[0] / start.size)


def _match(
    start: EmpiricalEdge | None, end: EmpiricalEdge | None, scale: float, tolerance: float, floor: float
) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """Split the spikes of the trained spectrum into new ones and those that an initial spike explains."""
    left = [] if start is None else [float(s) * scale for s in start.spikes]
    new, kept = [], []
    for spike in [] if end is None else end.spikes.tolist():
        nearest = min(left, key=lambda s: abs(s - spike), default=None)
        if nearest is not None and abs(spike - nearest) <= tolerance * nearest:
            left.remove(nearest)
            kept.append(spike)
        elif spike <= floor:
            kept.append(spike)
        else:
            new.append(spike)
    return tuple(new), tuple(kept)


def _decide(e: PhaseEvidence, before: Array, after: Array) -> tuple[PhaseName, str]:
    distance = f"Kolmogorov-Smirnov distance {e.bulk_distance:.3f}"
    ranks = f"effective rank {e.effective_ranks[0]:.4g} -> {e.effective_ranks[1]:.4g}"
    low, high = np.quantile(before, [0.25, 0.75]).tolist()
    if e.collapsed >= _MANY:
        return "rank collapse", f"{e.collapsed:.0%} of the eigenvalues hold nearly no energy, {ranks}"
    if high - low <= _NARROW * high:
        return "undecided", "the initial eigenvalues are all equal (orthogonal weights?): there is no bulk to compare"
    if after.size < LEAST_EIGENVALUES:
        return "undecided", (
            f"the trained spectrum has {after.size} positive eigenvalues, at least {LEAST_EIGENVALUES} are required"
        )
    same = e.bulk_distance <= _SAME_BULK
    moved = not same or e.trained_edge is None or _moved(e)
    if e.tail is not None and e.tail.heavy and moved:
        fit = e.tail.fit
        return "heavy tail", (
            f"a power law of exponent {fit.alpha:.2f} +- {fit.standard_error:.2f} fits the largest {fit.n_tail} of "
            f"{after.size} eigenvalues, from {fit.x_min:.3g} to {after[-1]:.3g}{_rival(e)}"
        )
    if e.trained_edge is None:
        return "undecided", f"the trained bulk has no edge, but its tail is not heavy: {'; '.join(_objections(e))}"
    if e.spikes:
        count, listed = len(e.spikes), ", ".join(f"{s:.3g}" for s in e.spikes[:3])
        return "bulk + spikes", (
            f"{count} new eigenvalue{'s' * (count > 1)} ({listed}{', ...' * (count > 3)}) beyond "
            f"{e.trained_edge.threshold:.3g}, the edge {e.trained_edge.edge:.3g} of the bulk and its fluctuations; "
            f"the bulk has {'kept its shape' if same else 'changed'} ({distance})"
        )
    if same:
        count = len(e.kept_spikes)
        old = f"; {count} spike{'s were' if count > 1 else ' was'} present initially" if count else ""
        return "invariant bulk", (
            f"no new eigenvalue beyond {e.trained_edge.threshold:.3g}, and the bulk has kept its shape "
            f"({distance}, scale {e.scale:.3g}){old}"
        )
    return "undecided", f"the bulk has changed its shape ({distance}), but shows neither spikes nor a heavy tail"


def _rival(e: PhaseEvidence) -> str:
    """Return the alternative explanation of a heavy tail as text; empty if there is none."""
    if e.tail is None or e.trained_edge is None or not e.spikes or e.tail.end_p_value >= _STRAIGHT:
        return ""
    return (
        f"; or the bulk has stretched to {e.trained_edge.edge:.3g} and has {len(e.spikes)} spikes "
        f"(p {e.tail.end_p_value:.2g} for the end of the power law)"
    )


def _moved(e: PhaseEvidence) -> bool:
    """Return whether the edge of the bulk is beyond the threshold of the initial bulk at the trained scale."""
    if e.initial_edge is None or e.trained_edge is None:
        return False
    return e.trained_edge.edge > e.scale * e.initial_edge.threshold


def _objections(e: PhaseEvidence) -> tuple[str, ...]:
    return ("too few eigenvalues",) if e.tail is None else e.tail.objections or ("the bulk has not moved",)
