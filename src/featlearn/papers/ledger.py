"""Write the ledger of all claims, as pages and as records that can be read again.

``ledger.json`` holds everything that a reader needs to show the claims, without this package: see `write_records`.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any

import pandas as pd

from featlearn._utils.atomic import atomic_write
from featlearn.errors import InputError
from featlearn.papers.claim import Claim, verdict_counts
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

LEDGER_COLUMNS = ("experiment", "claim", "place", "published", "measured", "tolerance", "verdict", "note", "scale")

_VERSION = 3  # 1 had no source; 2 had no texts of published and measured numbers
_READ = (1, 2, 3)
_SHOWN = ("claim", "place", "published", "here", "tolerance", "verdict")  # titles of `Claim.texts`


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
        """Title of the paper."""
        return PAPERS.get(self.paper, self.paper)


def record_of(done: Reproduction) -> Record:
    """Return the record of a reproduction."""
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
    """Return the records of a ``ledger.json``, of this or an earlier version; none if there is no file."""
    if not file.exists():
        return []
    try:
        ledger = json.loads(file.read_text(encoding="utf-8"))
        if ledger["schema_version"] not in _READ:
            raise InputError(f"{file.name} was written by another version of featlearn: remove it and run again")
        return [_decode(record) for record in ledger["experiments"]]
    except (ValueError, KeyError, TypeError) as error:
        raise InputError(f"{str(file)!r} is damaged ({error}): remove it and run again") from error


def write_records(file: Path, records: list[Record]) -> list[Record]:
    """Add records to those of the file, in place of older ones of the same experiment; in the papers' order.

    Claims of the others are stale if they were measured with another source than today's. Beside the attributes of
    `Record` and `Claim`, the file holds for each record ``paper_title`` and ``stale``, whether any of its claims is;
    and for each claim ``verdict``, ``published_text``, ``measured_text`` and ``tolerance_text``.
    """
    known = {record.name: record for record in [*map(_dated, read_records(file)), *records]}
    order = {name: place for place, name in enumerate(all_experiments())}
    result = sorted(known.values(), key=lambda record: order.get(record.name, len(order)))
    ledger = {"schema_version": _VERSION, "experiments": [_encode(record) for record in result]}
    _write(file, json.dumps(ledger, indent=1))
    return result


def _dated(record: Record) -> Record:
    """Return a record of an earlier call with its claims marked as stale, or not, by today's source."""
    experiment = all_experiments().get(record.name)
    if experiment is None:
        return record
    stale = record.source != source_fingerprint(experiment.measure)
    return replace(record, claims=tuple(replace(claim, stale=stale) for claim in record.claims))


def _encode(record: Record) -> dict[str, Any]:
    derived = ("verdict", "published_text", "measured_text", "tolerance_text")
    claims = [asdict(claim) | {name: getattr(claim, name) for name in derived} for claim in record.claims]
    stale = any(claim.stale for claim in record.claims)
    return asdict(record) | {"paper_title": record.paper_title, "stale": stale, "claims": claims}


def _decode(record: Mapping[str, Any]) -> Record:
    claims = (_fields_of(Claim, claim) | {"measured": tuple(claim["measured"])} for claim in record["claims"])
    given = {"covers": tuple(record["covers"]), "claims": tuple(Claim(**claim) for claim in claims)}
    return Record(**_fields_of(Record, record) | given)


def _fields_of(kind: type[Claim] | type[Record], values: Mapping[str, Any]) -> dict[str, Any]:
    return {field.name: values[field.name] for field in fields(kind) if field.name in values}


def ledger_table(records: Iterable[Record]) -> pd.DataFrame:
    """Return a table with one row per claim, in texts for readers; the claims' attributes have the numbers."""
    rows = [(record.name, *claim.texts, claim.note, record.scale) for record in records for claim in record.claims]
    return pd.DataFrame(rows, columns=list(LEDGER_COLUMNS))


def write_ledger(reproductions: Sequence[Reproduction], folder: str | os.PathLike[str]) -> Path:
    """Write one page per experiment, their figures and tables, and the index of all claims.

    Experiments that are in the folder already stay in the index, unless they are among these; claims that were measured
    with another version of the source are shown as stale.

    Args:
        reproductions: Reproductions from `featlearn.papers.runner`.
        folder: Folder for ``index.html``, ``ledger.csv``, ``ledger.json`` and one folder per experiment.

    Returns:
        Path of the index page.
    """
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    for done in reproductions:
        write_page(done, folder)
    records = write_records(folder / "ledger.json", [record_of(done) for done in reproductions])
    _write(folder / "ledger.csv", ledger_table(records).to_csv(index=False))
    return _write(folder / "index.html", _index(records))


def write_page(done: Reproduction, folder: Path) -> Path:
    """Write one experiment's page, ``NAME.html``, and its figures and tables in the folder ``NAME``."""
    experiment, result = done.experiment, done.result
    title = f"{experiment.name}: {experiment.title}"
    parts = [paragraph(f"{PAPERS[experiment.paper]}: {', '.join(experiment.covers)}", soft=True), heading(title, 1)]
    if result is None:
        parts.append(paragraph(done.trouble))
    if done.stale:
        stale = (
            f"{done.stale} of {done.points[1]} points are stale: they were measured with another version of featlearn."
        )
        parts.append(paragraph(f"{stale} Run it again without keeping them to have verdicts."))
    if done.claims:
        rows = [[*_claim_cells(claim), cell(_because(claim))] for claim in done.claims]
        parts += [heading("Claims"), rows_table((*_SHOWN, "remarks"), rows)]
    if result is not None:
        if result.remarks:
            parts.append(paragraph(result.remarks))
        own = folder / experiment.name
        own.mkdir(parents=True, exist_ok=True)
        if result.figures:
            parts.append(heading("Figures"))
        for name, figure in result.figures.items():
            for ending in ("png", "svg", "pdf"):
                save_figure(figure, own / f"{_slug(name)}.{ending}")
            parts.append(picture(figure, name))
        for name, table in result.tables.items():
            _write(own / f"{_slug(name)}.csv", table.to_csv())
            parts += [heading(_capitalized(name)), frame_table(table)]
    total, measured = done.points
    points = f"{measured} of {total}" + (f", {done.stale} of them stale" if done.stale else "")
    settings = {"scale": done.scale, **done.settings, "points": points, "time": _minutes(done.seconds)}
    parts += [heading("Settings"), definitions(settings), f"<p>{link('index.html', 'All claims')}</p>"]
    return _write(folder / f"{experiment.name}.html", document(title, parts))


def markdown_ledger(records: Sequence[Record], pictures: Mapping[str, Sequence[tuple[str, str]]] | None = None) -> str:
    """Return the ledger as a page of the documentation, one section per paper.

    Args:
        records: Records from `read_records` or `record_of`.
        pictures: Captions and addresses of pictures, by the experiment's name.
    """
    parts = [f"{_summary(records)}\n"]
    for title, chosen in _by_paper(records):
        parts.append(f"## {title}\n")
        for record in chosen:
            place = _capitalized(", ".join(record.covers))
            parts.append(f"### {record.name}: {_markdown(record.title)}\n")
            parts.append(f"*{_markdown(place)}; {record.scale}, {_minutes(record.seconds)}.*\n")
            parts.append(f"| {' | '.join(_SHOWN)} |\n|{'---|' * len(_SHOWN)}")
            parts += [f"| {' | '.join(map(_markdown, claim.texts))} |" for claim in record.claims]
            notes = [f"- *{_markdown(claim.text)}*: {_markdown(claim.note)}" for claim in record.claims if claim.note]
            if notes:
                parts.append("\n" + "\n".join(notes))
            if record.remarks:
                parts.append("\n" + _markdown(record.remarks))
            shown = (pictures or {}).get(record.name, ())
            parts += [f"\n![{_markdown(caption)}]({address})" for caption, address in shown]
            parts.append("")
    return "\n".join(parts)


def _index(records: Sequence[Record]) -> str:
    parts = [heading("What the papers say, and what came out here", 1), paragraph(_summary(records), soft=True)]
    for title, chosen in _by_paper(records):
        rows = []
        for record in chosen:
            name = f"<td class='plain'>{link(f'{record.name}.html', record.name)}</td>"
            if not record.claims:
                rows.append([name, cell(record.trouble), *[cell("")] * 5])
            for claim in record.claims:
                rows.append([name, *_claim_cells(claim)])
                name = cell("")
        parts += [heading(title), rows_table(("experiment", *_SHOWN), rows)]
    return document("Ledger of claims", parts)


def _by_paper(records: Sequence[Record]) -> Iterator[tuple[str, list[Record]]]:
    for paper, title in PAPERS.items():
        if chosen := [record for record in records if record.paper == paper]:
            yield title, chosen


def _claim_cells(claim: Claim) -> list[str]:
    text, *others, verdict = claim.texts
    kind = verdict if verdict in ("reproduced", "differs") else "missing"
    return [cell(text), *(cell(other, "plain") for other in others), cell(verdict, kind)]


def _because(claim: Claim) -> str:
    return "; ".join(text for text in (claim.reason and f"tolerance: {claim.reason}", claim.note) if text)


def _summary(records: Sequence[Record]) -> str:
    counts = verdict_counts(claim for record in records for claim in record.claims)
    verdicts = ", ".join(f"{number} {verdict}" for verdict, number in counts.items())
    seconds = sum(record.seconds for record in records)
    return f"{sum(counts.values())} claims of {len(records)} experiments: {verdicts}. {_minutes(seconds)} of work."


def _minutes(seconds: float) -> str:
    return f"{seconds:.0f} s" if seconds < 100 else f"{seconds / 60:.0f} min"


def _capitalized(text: str) -> str:
    return text[:1].upper() + text[1:]


def _slug(title: str) -> str:
    return re.sub(r"[^a-z0-9]+", "-", title.lower()).strip("-") or "untitled"


def _markdown(text: str) -> str:
    return re.sub(r"([|*_`\[\]<>\\])", r"\\\1", text).replace("\n", " ")


def _write(path: Path, text: str) -> Path:
    with atomic_write(path) as draft:
        draft.write_text(text, encoding="utf-8")
    return path
