"""Which of the phases of the spectral paper a trained spectrum is in, and why."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np
from matplotlib.figure import Figure
from numpy.typing import NDArray

from featlearn.errors import InputError
from featlearn.plots import spectrum_histogram
from featlearn.spectra._bulk_and_spikes import LEAST_EIGENVALUES, MARGIN, EmpiricalEdge, edge_scale, empirical_edge
from featlearn.spectra._compare import histogram, ks_distance, qq
from featlearn.spectra._laws import Law
from featlearn.spectra._ranks import effective_rank, positive_eigenvalues, stable_rank
from featlearn.spectra._tail_evidence import TailEvidence, tail_evidence

Array = NDArray[np.float64]
PhaseName = Literal["invariant bulk", "bulk + spikes", "heavy tail", "rank collapse", "undecided"]

_SAME_BULK = 0.1
_GONE = 0.01
_MANY = 0.1
_NARROW = 1e-6
_STRAIGHT = 0.5  # p-values of the end of a tail above which spikes need not be spoken of; see `tail_evidence`
_BINS = 40


def phase(initial: Any, trained: Any, *, size: int | None = None, margin: float = MARGIN) -> Phase:
    r"""Name the phase of a trained spectrum against its start (spectral paper, table 1 and section 5).

    The spectra are of a positive semi-definite matrix: ``W^T W``, a conjugate kernel, a tangent kernel. The rule,
    in this order; all of it but the first holds for spectra of any scale, which is that of the medians:

    1. **rank collapse**: at least a tenth of the eigenvalues that were positive have fallen below a hundredth of
       their counterparts, rank by rank, while the largest has not.
    2. **heavy tail**: `tail_evidence` finds a power law, and the bulk has moved: its own edge is beyond the initial
       threshold, or the bulks differ. This is the paper's notion, "an extreme of bulk + spikes, where a fraction of
       the eigenvalues move out of the initial bulk" (section 5.3). A bulk that stayed and spikes of many sizes are no
       tail. The reason says where a bulk that has stretched, with a few spikes, would explain the tail as well.
    3. **bulk + spikes**: eigenvalues exceed the bulk's own edge (`empirical_edge`) by more than ``margin``
       Tracy-Widom scales, and the largest of the initial bulk by half as many, and are not spikes of the start. One
       of the start that has stayed within ``margin sqrt(2 / n)`` of its value, which are so many standard deviations
       of a spike, is not new.
    4. **invariant bulk**: nothing of all this, and the bulks are at a Kolmogorov-Smirnov distance of at most 0.1:
       nowhere has more than a tenth of the eigenvalues crossed.
    5. **undecided**: otherwise, and where there are fewer than 50 positive eigenvalues at the start.

    What it can and cannot do, measured at 300 x 200 (100 draws each): two draws of one law are an invariant bulk in
    99.7% (of 300); a signal of 1.5 times `bbp_threshold` is found in 97% of draws and one of 1.25 times in 29%; entries
    of Cauchy's law are a heavy tail in all, Student's of 2 degrees of freedom in 84%, of 3 in 9% (else spikes);
    eigenvalues of a power law in 97% up to alpha = 3. A bulk that has stretched and has three or more spikes of
    different sizes is a heavy tail in all draws, one with a single spike in none. Adam's case 4 of the paper, at half
    its size, is of that kind; W, CK and NTK of eleven trainings were all called heavy tails, as in the paper.

    A bulk is what is positive and no spike; bulks are compared after division by their medians. A heavy tail that was
    there at the start and has not changed is an invariant bulk: the phase is about training.

    Eigenvalues do not show whether the norms of rows and columns alone explain a phase: a matrix whose rows have many
    sizes has spikes or a heavy tail without a signal. Where the matrix is known, ask `against_norms`; `weight_spectra`
    and `featlearn.Monitor` do.

    Args:
        initial: Eigenvalues at the start, in any order, or the law that they follow.
        trained: Eigenvalues after training, in any order. Their number may differ from the initial one if both are
            of one law, so of the same ratios of sizes: ranks are then compared at equal shares.
        size: Dimension of the matrix, if zeros were left out of the eigenvalues.
        margin: Of a spike, in Tracy-Widom scales.

    >>> from featlearn.spectra import marchenko_pastur
    >>> law = marchenko_pastur(300, 100)
    >>> bulk = law.quantile([(i + 0.5) / 98 for i in range(98)]).tolist()
    >>> phase(law, [*bulk, 4.0, 5.0]).name
    'bulk + spikes'
    """
    after, zeros = positive_eigenvalues(trained, "trained eigenvalues")
    if size is not None:
        if size < after.size + zeros:
            raise InputError(f"size is the dimension of the matrix: at least {after.size + zeros}, got {size}")
        zeros = size - after.size
    before, zeros_before = _start(initial, after.size + zeros, size)
    if before.size < LEAST_EIGENVALUES:
        reason = f"the start has {before.size} positive eigenvalues, and {LEAST_EIGENVALUES} are needed"
        return Phase("undecided", reason, None, before, after, initial if isinstance(initial, Law) else None)
    evidence = _gather(initial, before, after, (zeros_before, zeros), margin)
    name, reason = _decide(evidence, before, after)
    return Phase(name, reason, evidence, before, after, initial if isinstance(initial, Law) else None)


@dataclass(frozen=True, eq=False)
class PhaseEvidence:
    """What `phase` decided from. Pairs are (initial, trained).

    Attributes:
        zeros: Numbers of eigenvalues that are zero.
        collapsed: Share of the initially positive eigenvalues that are gone.
        top_ratio: Largest trained eigenvalue over the largest initial one.
        scale: Ratio of the medians of the bulks.
        bulk_distance: Kolmogorov-Smirnov distance of the bulks, divided by their medians.
        raw_distance: The same without the division.
        initial_edge: Edge of the initial bulk; None if it has none.
        trained_edge: Edge of the trained bulk, with its threshold and all the spikes.
        spikes: The new ones, the largest first.
        kept_spikes: Those that were there at the start.
        tail: Of the trained spectrum.
        stable_ranks: ``sum lambda / lambda_max``.
        effective_ranks: ``exp`` of the entropy.
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
    """A named phase.

    Attributes:
        name: "invariant bulk", "bulk + spikes", "heavy tail", "rank collapse" or "undecided".
        reason: The numbers that decided, in a sentence.
        evidence: All the numbers; None where there was too little to measure.
        initial: The positive initial eigenvalues, ascending; quantiles if a law was given.
        trained: The positive trained eigenvalues, ascending.
        law: The law, if one was given as the start.
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
        """Histograms of both spectra beside their Q-Q plot; logarithmic for tails and collapses."""
        if not self.trained.size:
            raise InputError("all the trained eigenvalues are zero: there is nothing to draw")
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
    """Positive eigenvalues at the start, and the number of zeros; a law gives quantiles."""
    if isinstance(initial, Law):
        positive = max(1, round((1 - initial.atom) * count))
        shares = initial.atom + (1 - initial.atom) * (np.arange(positive) + 0.5) / positive
        return initial.quantile(shares).numpy(), count - positive
    values, zeros = positive_eigenvalues(initial, "initial eigenvalues")
    if not values.size:
        raise InputError(f"all {zeros} initial eigenvalues are zero: there is nothing to compare with")
    return values, zeros if size is None else size - values.size


def _gather(initial: Any, before: Array, after: Array, zeros: tuple[int, int], margin: float) -> PhaseEvidence:
    if isinstance(initial, Law):
        right, scale = initial.edges[1], edge_scale(initial, before.size + zeros[0])
        start: EmpiricalEdge | None = EmpiricalEdge(right, scale, right + margin * scale, before[:0])
    else:
        start = empirical_edge(before, margin=margin)
    own = empirical_edge(after, margin=margin) if after.size >= LEAST_EIGENVALUES else None
    old = _bulk(before, start)
    bulk = _bulk(after, own) if after.size else np.zeros(1)
    middle = float(np.median(bulk)) / float(np.median(old))
    # A spike at the edge is found in one draw and missed in the next: it is new if the start has nothing like it.
    floor = 0.0 if own is None else middle * float(old[-1]) + margin / 2 * own.scale
    new, kept = _match(start, own, middle, margin * math.sqrt(2 / before.size), floor)
    return PhaseEvidence(
        zeros=zeros,
        collapsed=_collapsed(before, after, zeros),
        top_ratio=float(after[-1] / before[-1]) if after.size else 0.0,
        scale=middle,
        bulk_distance=ks_distance(bulk, middle * old) if middle else 1.0,
        raw_distance=ks_distance(bulk, old),
        initial_edge=start,
        trained_edge=own,
        spikes=new,
        kept_spikes=kept,
        tail=tail_evidence(after) if after.size else None,
        stable_ranks=(stable_rank(before), stable_rank(after) if after.size else 0.0),
        effective_ranks=(effective_rank(before), effective_rank(after) if after.size else 0.0),
    )


def _bulk(values: Array, edge: EmpiricalEdge | None) -> Array:
    """What is not beyond the edge; all of it if there is none."""
    return values if edge is None else values[: values.size - edge.spikes.size]


def _collapsed(before: Array, after: Array, zeros: tuple[int, int]) -> float:
    """Share of the initially positive ranks at which the trained eigenvalue is gone."""
    shares = (zeros[0] + np.arange(before.size) + 0.5) / (zeros[0] + before.size)
    trained = np.quantile(np.concatenate([np.zeros(zeros[1]), after]), shares, method="hazen")
    # Weight decay alone lowers all of them: it is no collapse, so the largest sets the scale where it has fallen.
    scale = min(1.0, float(after[-1] / before[-1])) if after.size else 1.0
    return float(np.mean(trained <= _GONE * scale * before))


def _match(
    start: EmpiricalEdge | None, own: EmpiricalEdge | None, scale: float, tolerance: float, floor: float
) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """Spikes of the trained spectrum: new ones, and those that a spike of the start explains."""
    left = [] if start is None else [float(s) * scale for s in start.spikes]
    new, kept = [], []
    for spike in [] if own is None else own.spikes.tolist():
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
        return "rank collapse", f"{e.collapsed:.0%} of the positive eigenvalues have gone, {ranks}"
    if high - low <= _NARROW * high:
        return "undecided", "the initial eigenvalues are all equal (an orthogonal start?): there is no bulk to compare"
    if after.size < LEAST_EIGENVALUES:
        return "undecided", f"{after.size} positive trained eigenvalues are too few: {LEAST_EIGENVALUES} are needed"
    same = e.bulk_distance <= _SAME_BULK
    moved = not same or e.trained_edge is None or _moved(e)
    if e.tail is not None and e.tail.heavy and moved:
        fit = e.tail.fit
        return "heavy tail", (
            f"a power law of exponent {fit.alpha:.2f} +- {fit.standard_error:.2f} fits the largest {fit.n_tail} of "
            f"{after.size} eigenvalues, from {fit.x_min:.3g} to {after[-1]:.3g}{_rival(e)}"
        )
    if e.trained_edge is None:
        return "undecided", f"the trained bulk has no edge, yet no heavy tail: {'; '.join(_objections(e))}"
    if e.spikes:
        count, listed = len(e.spikes), ", ".join(f"{s:.3g}" for s in e.spikes[:3])
        return "bulk + spikes", (
            f"{count} new eigenvalue{'s' * (count > 1)} ({listed}{', ...' * (count > 3)}) beyond "
            f"{e.trained_edge.threshold:.3g}, the edge {e.trained_edge.edge:.3g} of the bulk and its fluctuations; "
            f"the bulk has {'kept its shape' if same else 'changed'} ({distance})"
        )
    if same:
        old = f"; {len(e.kept_spikes)} spikes were there at the start" if e.kept_spikes else ""
        return "invariant bulk", (
            f"no new eigenvalue beyond {e.trained_edge.threshold:.3g}, and the bulk has kept its shape "
            f"({distance}, scale {e.scale:.3g}){old}"
        )
    return "undecided", f"the bulk has changed its shape ({distance}), but shows neither spikes nor a heavy tail"


def _rival(e: PhaseEvidence) -> str:
    """The other reading of a heavy tail, where there is one."""
    if e.tail is None or e.trained_edge is None or not e.spikes or e.tail.end_p_value >= _STRAIGHT:
        return ""
    return (
        f"; or the bulk has stretched to {e.trained_edge.edge:.3g} and has {len(e.spikes)} spikes "
        f"(p {e.tail.end_p_value:.2g} for the end of the power law)"
    )


def _moved(e: PhaseEvidence) -> bool:
    """Whether the bulk reaches beyond what the initial bulk, at the trained scale, allows."""
    if e.initial_edge is None or e.trained_edge is None:
        return False
    return e.trained_edge.edge > e.scale * e.initial_edge.threshold


def _objections(e: PhaseEvidence) -> tuple[str, ...]:
    return ("too few eigenvalues",) if e.tail is None else e.tail.objections or ("the bulk has not moved",)
