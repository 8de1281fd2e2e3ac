"""A claim of a paper: what it says, what came out here, and whether that is the same."""

from __future__ import annotations

import math
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
        """Over seeds; NaN if nothing was measured."""
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
        """The paper's side, for people."""
        if self.relation == "holds":
            return "holds" if self.published == 1 else f"in {self.published:.0%} of seeds"
        sign = {"about": "", "at least": "≥ ", "at most": "≤ "}[self.relation]
        return sign + short_number(self.published)

    @property
    def measured_text(self) -> str:
        """Our side: mean and deviation over seeds."""
        if self.missing:
            return "–"
        if self.relation == "holds":
            return f"{sum(self.measured):.0f} of {len(self.measured)}"
        spread = f" ± {short_number(self.spread, 2)}" if len(self.measured) > 1 else ""
        return short_number(self.mean) + spread

    def remark(self, note: str) -> Claim:
        """The same claim with a note."""
        return replace(self, note=note)


def about(
    text: str, where: str, published: float, measured: Iterable[float], tolerance: float, reason: str, note: str = ""
) -> Claim:
    """The mean over seeds is the published number, within a tolerance."""
    return Claim(text, where, "about", published, _numbers(text, measured), _checked(text, tolerance), reason, note)


def at_least(
    text: str, where: str, published: float, measured: Iterable[float], tolerance: float = 0.0, reason: str = "",
    note: str = "",
) -> Claim:  # fmt: skip
    """The mean over seeds is no smaller than the published number."""
    return Claim(text, where, "at least", published, _numbers(text, measured), _checked(text, tolerance), reason, note)


def at_most(
    text: str, where: str, published: float, measured: Iterable[float], tolerance: float = 0.0, reason: str = "",
    note: str = "",
) -> Claim:  # fmt: skip
    """The mean over seeds is no larger than the published number."""
    return Claim(text, where, "at most", published, _numbers(text, measured), _checked(text, tolerance), reason, note)


def holds(text: str, where: str, seeds: Iterable[bool], share: float = 1.0, reason: str = "", note: str = "") -> Claim:
    """A statement in words is true on at least a share of the seeds."""
    return Claim(text, where, "holds", share, _numbers(text, map(float, seeds)), 0.0, reason, note)


def not_tried(text: str, where: str, published: float, note: str, relation: Relation = "about") -> Claim:
    """Part of the paper's experiment that this size leaves out."""
    return Claim(text, where, relation, published, note=note, missing="not tried at this size")


def _numbers(text: str, measured: Iterable[float]) -> tuple[float, ...]:
    found = tuple(float(value) for value in measured)
    if not found:
        raise InputError(f"the claim {text!r} has no measurement: use not_tried where nothing was measured")
    return found


def _checked(text: str, tolerance: float) -> float:
    if not (tolerance >= 0 and math.isfinite(tolerance)):
        raise InputError(f"the tolerance of {text!r} must be a number of at least 0, got {tolerance!r}")
    return tolerance
