"""A claim of a paper: what it says, what came out here, and whether that is the same."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, replace
from statistics import fmean, stdev
from typing import Literal

from featlearn._utils.formatting import short_number
from featlearn.errors import InputError

Verdict = Literal["reproduced", "differs", "stale", "not tried at this size", "data not present"]
VERDICTS: tuple[Verdict, ...] = ("reproduced", "differs", "stale", "not tried at this size", "data not present")

Relation = Literal["about", "at least", "at most", "holds"]


@dataclass(frozen=True)
class Claim:
    """One statement of a paper, held against measurement; made by `about`, `at_least`, `at_most`, `holds`, `not_tried`.

    Attributes:
        text: The statement, e.g. "NFC of the first layer".
        where: Its place in the paper, e.g. "figure 1".
        relation: How measured and published belong together. "holds" has a 1 for each seed on which a statement is
            true, and a 0 for the others.
        published: The paper's number; of "holds" the share of seeds that is asked for.
        measured: One number a seed.
        tolerance: How far their mean may be off.
        reason: Where the tolerance comes from.
        note: What is to be said of it: another setting, what was tried, why it differs.
        missing: Why nothing was measured, if nothing was.
        stale: Whether it rests on measurements of another version of the source; the verdict is then "stale".
    """

    text: str
    where: str
    relation: Relation
    published: float
    measured: tuple[float, ...] = ()
    tolerance: float = 0.0
    reason: str = ""
    note: str = ""
    missing: Literal["", "not tried at this size", "data not present"] = ""
    stale: bool = False

    @property
    def mean(self) -> float:
        """Mean over seeds; NaN if nothing was measured."""
        return fmean(self.measured) if self.measured else math.nan

    @property
    def spread(self) -> float:
        """Standard deviation over seeds; NaN with fewer than two."""
        return stdev(self.measured) if len(self.measured) > 1 else math.nan

    @property
    def verdict(self) -> Verdict:
        """Whether the mean over seeds is what the paper says, within the tolerance; NaN differs."""
        if self.missing:
            return self.missing
        if self.stale:
            return "stale"
        gap = self.mean - self.published
        allowed = self.tolerance + 1e-12 * abs(self.published)  # .3 + .6 is not .9
        agrees = {
            "about": abs(gap) <= allowed,
            "at least": gap >= -allowed,
            "at most": gap <= allowed,
            "holds": gap >= -allowed,
        }[self.relation]
        return "reproduced" if agrees else "differs"

    @property
    def published_text(self) -> str:
        """Published number for readers."""
        if self.relation == "holds":
            return "holds" if self.published == 1 else f"in {self.published:.0%} of seeds"
        sign = {"about": "", "at least": "≥ ", "at most": "≤ "}[self.relation]
        return sign + short_number(self.published)

    @property
    def measured_text(self) -> str:
        """Mean and deviation over seeds for readers."""
        if self.missing:
            return "–"
        if self.relation == "holds":
            return f"{sum(self.measured):.0f} of {len(self.measured)}"
        spread = f" ± {short_number(self.spread, 2)}" if len(self.measured) > 1 else ""
        return short_number(self.mean) + spread

    @property
    def tolerance_text(self) -> str:
        """Tolerance for readers; empty if there is none."""
        return f"{self.tolerance:.2g}" if self.tolerance else ""

    @property
    def texts(self) -> tuple[str, ...]:
        """Statement, place, published and measured number, tolerance and verdict for readers."""
        return (self.text, self.where, self.published_text, self.measured_text, self.tolerance_text, self.verdict)

    def remark(self, note: str) -> Claim:
        """Return the same claim with a note."""
        return replace(self, note=note)


def about(
    text: str, where: str, published: float, measured: Iterable[float], tolerance: float, reason: str, note: str = ""
) -> Claim:
    """Claim that the mean over seeds is the published number, within a tolerance."""
    return _compared("about", text, where, published, measured, tolerance, reason, note)


def at_least(
    text: str, where: str, published: float, measured: Iterable[float], tolerance: float = 0.0, reason: str = "",
    note: str = "",
) -> Claim:  # fmt: skip
    """Claim that the mean over seeds is no smaller than the published number."""
    return _compared("at least", text, where, published, measured, tolerance, reason, note)


def at_most(
    text: str, where: str, published: float, measured: Iterable[float], tolerance: float = 0.0, reason: str = "",
    note: str = "",
) -> Claim:  # fmt: skip
    """Claim that the mean over seeds is no larger than the published number."""
    return _compared("at most", text, where, published, measured, tolerance, reason, note)


def holds(text: str, where: str, seeds: Iterable[bool], share: float = 1.0, reason: str = "", note: str = "") -> Claim:
    """Claim that a statement in words is true on at least a share of the seeds."""
    return _compared("holds", text, where, share, map(float, seeds), 0.0, reason, note)


def not_tried(text: str, where: str, published: float, note: str, relation: Relation = "about") -> Claim:
    """Return a claim on a part of the paper's experiment that this size leaves out."""
    return Claim(text, where, relation, published, note=note, missing="not tried at this size")


def verdict_counts(claims: Iterable[Claim]) -> dict[Verdict, int]:
    """Return how many claims have each verdict, in the order of `VERDICTS`, without verdicts that none has."""
    counts = Counter(claim.verdict for claim in claims)
    return {verdict: counts[verdict] for verdict in VERDICTS if counts[verdict]}


def _compared(
    relation: Relation,
    text: str,
    where: str,
    published: float,
    measured: Iterable[float],
    tolerance: float,
    reason: str,
    note: str,
) -> Claim:
    numbers = tuple(float(value) for value in measured)
    if not numbers:
        raise InputError(f"the claim {text!r} has no measurement: use not_tried where nothing was measured")
    if not (tolerance >= 0 and math.isfinite(tolerance)):
        raise InputError(f"the tolerance of {text!r} must be a number of at least 0, got {tolerance!r}")
    return Claim(text, where, relation, published, numbers, tolerance, reason, note)
