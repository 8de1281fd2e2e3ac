"""Write the ledger of all claims, as pages and as records that can be read again."""

from __future__ import annotations

import json
import os
import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import pandas as pd

from featlearn._utils.atomic import atomic_write
from featlearn.errors import InputError
from featlearn.papers.claim import VERDICTS, Claim
from featlearn.papers.experiment import PAPERS
from featlearn.papers.fingerprint import source_fingerprint
from featlearn.papers.registry import all_experiments
from featlearn.papers.runner import Reproduction
from featlearn.plots import save_figure
from featlearn.reports.html import (
    cell,
    definitions,
    document,
    frame_table,
    heading,
    link,
    paragraph,
    picture,
    rows_table,
)

__all__ = [
    "LEDGER_COLUMNS",
    "Record",
    "ledger_table",
    "markdown_ledger",
    "read_records",
    "record_of",
    "write_ledger",
    "write_page",
    "write_records",
]

LEDGER_COLUMNS = ("experiment", "claim", "place", "published", "measured", "tolerance", "verdict", "note", "scale")


def ledger_table(records: Iterable[Record]) -> pd.DataFrame:
    """A row a claim, in words that are meant to be read; the claims' own attributes have the numbers."""
    rows = [
        (
            done.name,
            claim.text,
            claim.where,
            claim.published_text,
            claim.measured_text,
            _tolerance(claim),
            claim.verdict,
            claim.note,
            done.scale,
        )
        for done in records
        for claim in done.claims
    ]
    return pd.DataFrame(rows, columns=list(LEDGER_COLUMNS))


def write_ledger(reproductions: Sequence[Reproduction], folder: str | os.PathLike[str]) -> Path:
    """Write a page an experiment, their figures and tables, and the index of all claims.

    Experiments that are in the folder already stay in the index, unless they are among these; claims that were measured
    with another version of the source are shown as stale.

    Args:
        reproductions: From `featlearn.papers.runner`.
        folder: Where ``index.html``, ``ledger.csv``, ``ledger.json`` and a folder an experiment go.

    Returns:
        The index page.
    """
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    for done in reproductions:
        write_page(done, folder)
    records = write_records(folder / "ledger.json", [record_of(done) for done in reproductions])
    _write(folder / "ledger.csv", ledger_table(records).to_csv(index=False))
    index = folder / "index.html"
    _write(index, _index(records))
    return index


def write_page(done: Reproduction, folder: Path) -> Path:
    """Write one experiment's page, ``NAME.html``, and its figures and tables in the folder ``NAME``."""
    parts = [
        paragraph(f"{PAPERS[done.experiment.paper]}: {', '.join(done.experiment.covers)}", soft=True),
        heading(f"{done.experiment.name}: {done.experiment.title}", 1),
    ]
    if done.result is None:
        parts.append(paragraph(done.trouble))
    if done.stale:
        text = (
            f"{done.stale} of {done.points[1]} points are stale: they were measured with another version of featlearn."
        )
        parts.append(paragraph(f"{text} Run it again without keeping them to have verdicts."))
    if done.claims:
        parts += [heading("Claims"), _claims_table(done.claims)]
    if done.result is not None:
        if done.result.remarks:
            parts.append(paragraph(done.result.remarks))
        own = folder / done.experiment.name
        own.mkdir(parents=True, exist_ok=True)
        if done.result.figures:
            parts.append(heading("Figures"))
        for title, figure in done.result.figures.items():
            for ending in ("png", "svg", "pdf"):
                save_figure(figure, own / f"{_slug(title)}.{ending}")
            parts.append(picture(figure, title))
        for title, table in done.result.tables.items():
            _write(own / f"{_slug(title)}.csv", table.to_csv())
            parts += [heading(title[:1].upper() + title[1:]), frame_table(table)]
    parts += [
        heading("Settings"),
        definitions({"scale": done.scale, **done.settings, "points": _points(done), "time": _minutes(done.seconds)}),
        f"<p>{link('index.html', 'All claims')}</p>",
    ]
    page = folder / f"{done.experiment.name}.html"
    _write(page, document(f"{done.experiment.name}: {done.experiment.title}", parts))
    return page


def markdown_ledger(records: Sequence[Record], pictures: Mapping[str, Sequence[tuple[str, str]]] | None = None) -> str:
    """The ledger as a page of the documentation, a section a paper.

    Args:
        records: From `read_records` or `record_of`.
        pictures: Captions and addresses of pictures, by the experiment's name.
    """
    parts = [f"{_summary(records)}\n"]
    for paper, title in PAPERS.items():
        chosen = [done for done in records if done.paper == paper]
        if not chosen:
            continue
        parts.append(f"## {title}\n")
        for done in chosen:
            place = ", ".join(done.covers)
            parts.append(f"### {done.name}: {_markdown(done.title)}\n")
            parts.append(f"*{_markdown(place[:1].upper() + place[1:])}; {done.scale}, {_minutes(done.seconds)}.*\n")
            parts.append("| claim | place | published | here | tolerance | verdict |\n|---|---|---|---|---|---|")
            for claim in done.claims:
                fields = (
                    claim.text, claim.where, claim.published_text, claim.measured_text, _tolerance(claim), claim.verdict
                )  # fmt: skip
                parts.append("| " + " | ".join(map(_markdown, fields)) + " |")
            notes = [f"- *{_markdown(claim.text)}*: {_markdown(claim.note)}" for claim in done.claims if claim.note]
            if notes:
                parts.append("\n" + "\n".join(notes))
            if done.remarks:
                parts.append("\n" + _markdown(done.remarks))
            parts += [
                f"\n![{_markdown(caption)}]({address})" for caption, address in (pictures or {}).get(done.name, ())
            ]
            parts.append("")
    return "\n".join(parts)


def _index(records: Sequence[Record]) -> str:
    parts = [heading("What the papers say, and what came out here", 1), paragraph(_summary(records), soft=True)]
    for paper, title in PAPERS.items():
        chosen = [done for done in records if done.paper == paper]
        if not chosen:
            continue
        parts.append(heading(title))
        rows = []
        for done in chosen:
            name = f"<td class='plain'>{link(f'{done.name}.html', done.name)}</td>"
            if not done.claims:
                rows.append([name, cell(done.trouble), *[cell("")] * 5])
            for claim in done.claims:
                rows.append([name, *_claim_cells(claim)])
                name = cell("")
        columns = ("experiment", "claim", "place", "published", "here", "tolerance", "verdict")
        parts.append(rows_table(columns, rows))
    return document("Ledger of claims", parts)


def _claims_table(claims: Sequence[Claim]) -> str:
    rows = [[*_claim_cells(claim), cell(_because(claim))] for claim in claims]
    return rows_table(("claim", "place", "published", "here", "tolerance", "verdict", "remarks"), rows)


def _claim_cells(claim: Claim) -> list[str]:
    kind = claim.verdict if claim.verdict in ("reproduced", "differs") else "missing"
    return [
        cell(claim.text),
        cell(claim.where, "plain"),
        cell(claim.published_text, "plain"),
        cell(claim.measured_text, "plain"),
        cell(_tolerance(claim), "plain"),
        cell(claim.verdict, kind),
    ]


def _because(claim: Claim) -> str:
    return "; ".join(text for text in (claim.reason and f"tolerance: {claim.reason}", claim.note) if text)


def _tolerance(claim: Claim) -> str:
    return f"{claim.tolerance:.2g}" if claim.tolerance else ""


def _summary(records: Sequence[Record]) -> str:
    counts = Counter(claim.verdict for done in records for claim in done.claims)
    told = ", ".join(f"{counts[verdict]} {verdict}" for verdict in VERDICTS if counts[verdict])
    seconds = sum(done.seconds for done in records)
    return f"{sum(counts.values())} claims of {len(records)} experiments: {told}. {_minutes(seconds)} of work."


def _points(done: Reproduction) -> str:
    total, measured = done.points
    return f"{measured} of {total}" + (f", {done.stale} of them stale" if done.stale else "")


def _minutes(seconds: float) -> str:
    return f"{seconds:.0f} s" if seconds < 100 else f"{seconds / 60:.0f} min"


def _slug(title: str) -> str:
    return re.sub(r"[^a-z0-9]+", "-", title.lower()).strip("-") or "untitled"


def _markdown(text: str) -> str:
    return re.sub(r"([|*_`\[\]<>\\])", r"\\\1", text).replace("\n", " ")


def _write(path: Path, text: str) -> None:
    with atomic_write(path) as draft:
        draft.write_text(text, encoding="utf-8")


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
    with atomic_write(file) as draft:
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
