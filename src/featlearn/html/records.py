"""What a folder of reproductions says, as plain data that outlives the process."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from featlearn.errors import InputError
from featlearn.lab.experiments.claim import Claim
from featlearn.lab.experiments.experiment import PAPERS
from featlearn.lab.experiments.registry import all_experiments
from featlearn.lab.reproduce import Reproduction
from featlearn.numerics.files import whole_file

__all__ = ["Record", "read_records", "record_of", "write_records"]

_VERSION = 1


@dataclass(frozen=True)
class Record:
    """An experiment that was run: its claims, without figures and tables."""

    name: str
    title: str
    paper: str
    covers: tuple[str, ...]
    scale: str
    seconds: float
    trouble: str
    remarks: str
    claims: tuple[Claim, ...]

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
    )


def read_records(file: Path) -> list[Record]:
    """Records that were written before; none if there is no file."""
    if not file.exists():
        return []
    try:
        found = json.loads(file.read_text(encoding="utf-8"))
        if found["schema_version"] != _VERSION:
            raise InputError(f"{file.name} was written by another version of featlearn: remove it and run again")
        return [_decode(one) for one in found["experiments"]]
    except (ValueError, KeyError, TypeError) as error:
        raise InputError(f"{str(file)!r} is damaged ({error}): remove it and run again") from error


def write_records(file: Path, records: list[Record]) -> list[Record]:
    """Add records to those of the file, in place of older ones of the same experiment; in the papers' order."""
    known = {record.name: record for record in [*read_records(file), *records]}
    order = {name: place for place, name in enumerate(all_experiments())}
    found = sorted(known.values(), key=lambda record: order.get(record.name, len(order)))
    experiments = [asdict(r) | {"claims": [asdict(c) | {"verdict": c.verdict} for c in r.claims]} for r in found]
    with whole_file(file) as draft:
        text = json.dumps({"schema_version": _VERSION, "experiments": experiments}, indent=1)
        draft.write_text(text, encoding="utf-8")
    return found


def _decode(one: dict[str, Any]) -> Record:
    claims = tuple(
        Claim(
            **{key: value for key, value in claim.items() if key != "verdict"} | {"measured": tuple(claim["measured"])}
        )
        for claim in one["claims"]
    )
    return Record(**one | {"claims": claims, "covers": tuple(one["covers"])})
