"""Claim of a paper: the statement, the numbers measured here, and the verdict."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, replace
from statistics import fmean, stdev
from typing import Literal, get_args

from featlearn._utils.formatting import short_number
from featlearn.errors import InputError

Verdict = Literal["reproduced", "differs", "stale", "not tried at this size", "data not present"]
VERDICTS: tuple[Verdict, ...] = get_args(Verdict)

Relation = Literal["about", "at least", "at most", "holds"]


@dataclass(frozen=True)
class Claim:
    """One statement of a paper, compared with measurements.

    Claims are made by `about`, `at_least`, `at_most`, `holds` and `not_tried`.

    Attributes:
        text: The statement, e.g. "NFC of the first layer".
        where: Place of the statement in the paper, e.g. "figure 1".
        relation: Relation between measured and published number. With "holds", the measured numbers are 1 for each seed
            on which the statement is true, and 0 for the others.
        published: Number published in the paper; with "holds", the share of seeds that is required.
        measured: Measured numbers, one per seed.
        tolerance: Largest accepted deviation of their mean.
        reason: Reason for the tolerance.
        note: Note for readers: another setting, what was tried, why the numbers differ.
        missing: Reason why nothing was measured; empty if something was.
        stale: Whether the claim rests on measurements of another version of the source; the verdict is then "stale".

    Raises:
        InputError: There are no measured numbers although ``missing`` is empty, or the tolerance is negative or not
            finite.

    Example:
        >>> from featlearn.papers.claim import about
        >>> claim = about("NFC of the first layer", "figure 1", 0.93, [0.92, 0.95], 0.03, "spread over ten seeds")
        >>> claim.verdict
        'reproduced'
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

    def __post_init__(self) -> None:
        if not self.measured and not self.missing:
            raise InputError(f"measured must not be empty, got no number for {self.text!r}. Otherwise use not_tried.")
        if not (self.tolerance >= 0 and math.isfinite(self.tolerance)):
            raise InputError(
                f"tolerance must be a finite number of at least 0, got {self.tolerance!r} ({self.text!r})."
            )

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
        """Verdict: "reproduced" if the mean over seeds agrees with the paper within the tolerance; NaN differs."""
        if self.missing:
            return self.missing
        if self.stale:
            return "stale"
        gap = self.mean - self.published
        allowed = self.tolerance + 1e-12 * abs(self.published)  # .3 + .6 is not .9
        agrees = {"about": abs(gap) <= allowed, "at most": gap <= allowed}.get(self.relation, gap >= -allowed)
        return "reproduced" if agrees else "differs"

    @property
    def published_text(self) -> str:
        """Published number for readers."""
        if self.relation == "holds":
            return "holds" if self.published == 1 else f"in {self.published:.0%} of seeds"
        return {"about": "", "at least": "≥ ", "at most": "≤ "}[self.relation] + short_number(self.published)

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
        """Return the same claim with a note.

        Args:
            note: Note for readers, in place of an earlier one.
        """
        return replace(self, note=note)


def about(
    text: str, where: str, published: float, measured: Iterable[float], tolerance: float, reason: str, note: str = ""
) -> Claim:
    """Return the claim that the mean over seeds is the published number, within a tolerance.

    Args:
        text: Statement of the paper, e.g. "NFC of the first layer".
        where: Place of the statement in the paper, e.g. "figure 1".
        published: Number published in the paper.
        measured: Measured numbers, one per seed.
        tolerance: Largest accepted deviation of their mean.
        reason: Reason for the tolerance.
        note: Note for readers.

    Raises:
        InputError: There are no measured numbers, or the tolerance is negative or not finite.
    """
    return Claim(text, where, "about", published, tuple(map(float, measured)), tolerance, reason, note)


def at_least(
    text: str, where: str, published: float, measured: Iterable[float], tolerance: float = 0.0, reason: str = "",
    note: str = "",
) -> Claim:  # fmt: skip
    """Return the claim that the mean over seeds is at least the published number.

    Args:
        text: Statement of the paper, e.g. "NFC of the first layer".
        where: Place of the statement in the paper, e.g. "figure 1".
        published: Number published in the paper.
        measured: Measured numbers, one per seed.
        tolerance: Largest accepted deviation of their mean below the published number. Default: none.
        reason: Reason for the tolerance.
        note: Note for readers.

    Raises:
        InputError: There are no measured numbers, or the tolerance is negative or not finite.
    """
    return Claim(text, where, "at least", published, tuple(map(float, measured)), tolerance, reason, note)


def at_most(
    text: str, where: str, published: float, measured: Iterable[float], tolerance: float = 0.0, reason: str = "",
    note: str = "",
) -> Claim:  # fmt: skip
    """Return the claim that the mean over seeds is at most the published number.

    Args:
        text: Statement of the paper, e.g. "NFC of the first layer".
        where: Place of the statement in the paper, e.g. "figure 1".
        published: Number published in the paper.
        measured: Measured numbers, one per seed.
        tolerance: Largest accepted deviation of their mean above the published number. Default: none.
        reason: Reason for the tolerance.
        note: Note for readers.

    Raises:
        InputError: There are no measured numbers, or the tolerance is negative or not finite.
    """
    return Claim(text, where, "at most", published, tuple(map(float, measured)), tolerance, reason, note)


def holds(text: str, where: str, seeds: Iterable[bool], share: float = 1.0, reason: str = "", note: str = "") -> Claim:
    """Return the claim that a statement without a number is true on at least a share of the seeds.

    Args:
        text: Statement of the paper.
        where: Place of the statement in the paper, e.g. "figure 1".
        seeds: Whether the statement is true, for each seed.
        share: Required share of the seeds. Default: all.
        reason: Reason for the share.
        note: Note for readers.

    Raises:
        InputError: There are no seeds.
    """
    return Claim(text, where, "holds", share, tuple(map(float, seeds)), 0.0, reason, note)


def not_tried(text: str, where: str, published: float, note: str, relation: Relation = "about") -> Claim:
    """Return a claim on a part of the paper's experiment that this size leaves out.

    Args:
        text: Statement of the paper.
        where: Place of the statement in the paper, e.g. "figure 1".
        published: Number published in the paper; with "holds", the share of seeds that is required.
        note: Reason why it was not tried.
        relation: Relation between measured and published number.
    """
    return Claim(text, where, relation, published, note=note, missing="not tried at this size")


def verdict_counts(claims: Iterable[Claim]) -> dict[Verdict, int]:
    """Return the number of claims with each verdict, in the order of `VERDICTS`, without verdicts that no claim has."""
    counts = Counter(claim.verdict for claim in claims)
    return {verdict: counts[verdict] for verdict in VERDICTS if counts[verdict]}
