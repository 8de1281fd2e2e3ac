"""What a folder of reproductions says, as plain data that outlives the process."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from featlearn.errors import InputError
from featlearn.lab.experiments.claim import Claim
from featlearn.lab.experiments.experiment import PAPERS
from featlearn.lab.experiments.registry import all_experiments
from featlearn.lab.fingerprint import source_fingerprint
from featlearn.lab.reproduce import Reproduction
from featlearn.numerics.files import whole_file

__all__ = ["Record", "read_records", "record_of", "write_records"]

_VERSION = 2  # 1 had no source
_READ = (1, 2)


@dataclass(frozen=True)
class Record:
    """An experiment that was run: its claims, without figures and tables.

    Attributes:
        name: Name of the experiment.
        title: Title of the experiment.
        paper: Key of its paper.
        covers: Tables and figures that it stands for.
        scale: Scale that it was run at.
        seconds: Seconds of work.
        trouble: Why there is no result, in a sentence.
        remarks: Remarks on the result.
        claims: Claims with their measurements.
        source: Fingerprint of the source that all points were measured with; empty if there are several, or if it is
            not known.
    """

    name: str
    title: str
    paper: str
    covers: tuple[str, ...]
    scale: str
    seconds: float
    trouble: str
    remarks: str
    claims: tuple[Claim, ...]
    source: str = ""

    @property
    def paper_title(self) -> str:
        """The paper's name for people."""
        return PAPERS.get(self.paper, self.paper)


def record_of(done: Reproduction) -> Record:
    """What is kept of a reproduction."""
    experiment = done.experiment
    return Record(
        name=experiment.name,
        title=experiment.title,
        paper=experiment.paper,
        covers=experiment.covers,
        scale=done.scale,
        seconds=round(done.seconds, 1),
        trouble=done.trouble,
        remarks=done.result.remarks if done.result is not None else "",
        claims=done.claims,
        source="" if done.stale else source_fingerprint(experiment.measure),
    )


def read_records(file: Path) -> list[Record]:
    """Records that were written before; none if there is no file."""
    if not file.exists():
        return []
    try:
        found = json.loads(file.read_text(encoding="utf-8"))
        if found["schema_version"] not in _READ:
            raise InputError(f"{file.name} was written by another version of featlearn: remove it and run again")
        return [_decode(one) for one in found["experiments"]]
    except (ValueError, KeyError, TypeError) as error:
        raise InputError(f"{str(file)!r} is damaged ({error}): remove it and run again") from error


def write_records(file: Path, records: list[Record]) -> list[Record]:
    """Add records to those of the file, in place of older ones of the same experiment; in the papers' order.

    Claims of the others are stale if they were measured with another source than today's.
    """
    known = {record.name: record for record in [*map(_dated, read_records(file)), *records]}
    order = {name: place for place, name in enumerate(all_experiments())}
    found = sorted(known.values(), key=lambda record: order.get(record.name, len(order)))
    experiments = [asdict(r) | {"claims": [asdict(c) | {"verdict": c.verdict} for c in r.claims]} for r in found]
    with whole_file(file) as draft:
        text = json.dumps({"schema_version": _VERSION, "experiments": experiments}, indent=1)
        draft.write_text(text, encoding="utf-8")
    return found


def _dated(record: Record) -> Record:
    """Return a record of an earlier call with its claims marked as stale, or not, by today's source."""
    experiment = all_experiments().get(record.name)
    if experiment is None:
        return record
    stale = record.source != source_fingerprint(experiment.measure)
    return replace(record, claims=tuple(replace(claim, stale=stale) for claim in record.claims))


def _decode(one: dict[str, Any]) -> Record:
    claims = tuple(
        Claim(
            **{key: value for key, value in claim.items() if key != "verdict"} | {"measured": tuple(claim["measured"])}
        )
        for claim in one["claims"]
    )
    return Record(**one | {"claims": claims, "covers": tuple(one["covers"])})
