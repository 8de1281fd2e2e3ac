"""Write the ledger of all claims, as HTML pages and as records in JSON.

``ledger.json`` holds everything that a program needs to show the claims without this package, see `write_records`.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterable, Mapping, Sequence
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
from featlearn.reports import html
from featlearn.reports.html import cell, heading, link, paragraph

LEDGER_COLUMNS = ("experiment", "claim", "place", "published", "measured", "tolerance", "verdict", "note", "scale")

_VERSION = 3  # 1 had no source; 2 had no texts of published and measured numbers; all are read
_SHOWN = ("claim", "place", "published", "here", "tolerance", "verdict")  # titles of `Claim.texts`


@dataclass(frozen=True)
class Record:
    """Record of a run of an experiment: its claims, without figures and tables.

    Attributes:
        name: Name of the experiment.
        title: Title of the experiment.
        paper: Key of the experiment's paper, such as "nfa".
        covers: Tables and figures of the paper that the experiment reproduces.
        scale: Scale of the run: "smoke", "quick" or "full".
        seconds: Seconds of work.
        trouble: Reason why there is no result, in a sentence.
        remarks: Remarks on the result.
        claims: Claims with their measurements.
        source: Fingerprint of the source that all points were measured with; empty if there are several, or if it is
            unknown.
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
    """Return the record of a reproduction.

    Args:
        done: Reproduction from `featlearn.papers.runner.reproduce`.

    Example:
        >>> import tempfile
        >>> from featlearn.papers.ledger import record_of
        >>> from featlearn.papers.runner import reproduce
        >>> (done,) = reproduce(["adaptive-fig2"], "smoke", folder=tempfile.mkdtemp())
        >>> record = record_of(done)
        >>> record.name, record.covers, record.claims[0].verdict
        ('adaptive-fig2', ('figure 2', 'proposition 3'), 'reproduced')
    """
    e, remarks = done.experiment, done.result.remarks if done.result is not None else ""
    source = "" if done.stale else source_fingerprint(e.measure)
    run = (done.scale, round(done.seconds, 1), done.trouble)
    return Record(e.name, e.title, e.paper, e.covers, *run, remarks, done.claims, source)


def read_records(file: Path) -> list[Record]:
    """Return the records of a ``ledger.json``, of this or an earlier version.

    Args:
        file: Path of the file. If it does not exist, there are no records.

    Raises:
        InputError: The file is corrupt, or was written by a later version.

    Example:
        >>> import tempfile
        >>> from pathlib import Path
        >>> from featlearn.papers.ledger import read_records, record_of, write_records
        >>> from featlearn.papers.runner import reproduce
        >>> folder = Path(tempfile.mkdtemp())
        >>> (done,) = reproduce(["adaptive-fig2"], "smoke", folder=folder)
        >>> _ = write_records(folder / "ledger.json", [record_of(done)])
        >>> [(record.name, record.scale) for record in read_records(folder / "ledger.json")]
        [('adaptive-fig2', 'smoke')]
    """
    if not file.exists():
        return []
    try:
        ledger = json.loads(file.read_text(encoding="utf-8"))
        if ledger["schema_version"] not in range(1, _VERSION + 1):
            raise InputError(f"{file.name} was written by another version of featlearn. Remove it and run again.")
        return [_decode(record) for record in ledger["experiments"]]
    except (ValueError, KeyError, TypeError) as error:
        raise InputError(f"Corrupt ledger {str(file)!r}: {error}. Remove it and run again.") from error


def write_records(file: Path, records: list[Record]) -> list[Record]:
    """Add records to those of a file, in place of older ones of the same experiment, in the order of the papers.

    Claims of the other records become stale if they were measured with another version of the source. Beside the
    attributes of `Record` and `Claim`, the file holds for each record ``paper_title`` and ``stale`` (whether any of its
    claims is), and for each claim ``verdict``, ``published_text``, ``measured_text`` and ``tolerance_text``.

    Args:
        file: Path of a ``ledger.json``, which need not exist.
        records: Records to add.

    Returns:
        All records of the file.
    """
    known = {record.name: record for record in [*map(_dated, read_records(file)), *records]}
    order = {name: place for place, name in enumerate(all_experiments())}
    result = sorted(known.values(), key=lambda record: order.get(record.name, len(order)))
    ledger = {"schema_version": _VERSION, "experiments": [_encode(record) for record in result]}
    _write(file, json.dumps(ledger, indent=1))
    return result


def _dated(record: Record) -> Record:
    """Return a record of an earlier call with its claims marked as stale if the source has changed since."""
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
    def known(kind: type[Claim] | type[Record], values: Mapping[str, Any]) -> dict[str, Any]:
        return {field.name: values[field.name] for field in fields(kind) if field.name in values}

    claims = tuple(Claim(**known(Claim, c) | {"measured": tuple(c["measured"])}) for c in record["claims"])
    return Record(**known(Record, record) | {"covers": tuple(record["covers"]), "claims": claims})


def ledger_table(records: Iterable[Record]) -> pd.DataFrame:
    """Return a table with one row per claim, as texts for readers.

    Args:
        records: Records from `read_records` or `record_of`, whose claims have the numbers.

    Returns:
        Table with the columns `LEDGER_COLUMNS`.

    Example:
        >>> import tempfile
        >>> from featlearn.papers.ledger import ledger_table, record_of
        >>> from featlearn.papers.runner import reproduce
        >>> done = reproduce(["adaptive-fig2"], "smoke", folder=tempfile.mkdtemp())
        >>> table = ledger_table(map(record_of, done))
        >>> table["verdict"].value_counts().to_dict()
        {'reproduced': 5}
    """
    rows = [(record.name, *claim.texts, claim.note, record.scale) for record in records for claim in record.claims]
    return pd.DataFrame(rows, columns=list(LEDGER_COLUMNS))


def write_ledger(reproductions: Sequence[Reproduction], folder: str | os.PathLike[str]) -> Path:
    """Write one page per experiment, their figures and tables, and the index of all claims.

    Other experiments of earlier calls stay in the index; claims that were measured with another version of the source
    are shown as stale.

    Args:
        reproductions: Reproductions from `featlearn.papers.runner.reproduce`.
        folder: Folder for ``index.html``, ``ledger.csv``, ``ledger.json`` and one folder per experiment. Created if it
            does not exist.

    Returns:
        Path of the index page.

    Example:
        >>> import tempfile
        >>> from dataclasses import replace
        >>> from featlearn.papers.ledger import write_ledger
        >>> from featlearn.papers.runner import reproduce
        >>> (done,) = reproduce(["adaptive-fig2"], "smoke", folder=tempfile.mkdtemp())
        >>> quick = replace(done, result=replace(done.result, figures={}))  # drawing the figures takes longest
        >>> index = write_ledger([quick], tempfile.mkdtemp())
        >>> sorted(path.name for path in index.parent.iterdir())
        ['adaptive-fig2', 'adaptive-fig2.html', 'index.html', 'ledger.csv', 'ledger.json']
    """
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    for done in reproductions:
        write_page(done, folder)
    records = write_records(folder / "ledger.json", [record_of(done) for done in reproductions])
    _write(folder / "ledger.csv", ledger_table(records).to_csv(index=False))
    return _write(folder / "index.html", _index(records))


def write_page(done: Reproduction, folder: Path) -> Path:
    """Write the page of an experiment, ``NAME.html``, and its figures and tables in the folder ``NAME``.

    Args:
        done: Reproduction of the experiment.
        folder: Folder for the page, which must exist.

    Returns:
        Path of the page.
    """
    experiment, result = done.experiment, done.result
    title = f"{experiment.name}: {experiment.title}"
    parts = [paragraph(f"{PAPERS[experiment.paper]}: {', '.join(experiment.covers)}", soft=True), heading(title, 1)]
    if result is None:
        parts.append(paragraph(done.trouble))
    if done.stale:
        stale = (
            f"{done.stale} of {done.points[1]} points are stale: they were measured with another version of featlearn."
        )
        parts.append(paragraph(f"{stale} Run the experiment again without keeping them to get verdicts."))
    if done.claims:
        because = [(c.reason and f"tolerance: {c.reason}", c.note) for c in done.claims]
        notes = [cell("; ".join(text for text in texts if text)) for texts in because]
        rows = [[*_claim_cells(claim), note] for claim, note in zip(done.claims, notes, strict=True)]
        parts += [heading("Claims"), html.rows_table((*_SHOWN, "remarks"), rows)]
    if result is not None:
        if result.remarks:
            parts.append(paragraph(result.remarks))
        files = folder / experiment.name
        files.mkdir(parents=True, exist_ok=True)
        if result.figures:
            parts.append(heading("Figures"))
        for name, figure in result.figures.items():
            for ending in ("png", "svg", "pdf"):
                save_figure(figure, files / f"{_slug(name)}.{ending}")
            parts.append(html.picture(figure, name))
        for name, table in result.tables.items():
            _write(files / f"{_slug(name)}.csv", table.to_csv())
            parts += [heading(_capitalized(name)), html.frame_table(table)]
    total, measured = done.points
    points = f"{measured} of {total}" + (f", {done.stale} of them stale" if done.stale else "")
    settings = {"scale": done.scale, **done.settings, "points": points, "time": _minutes(done.seconds)}
    parts += [heading("Settings"), html.definitions(settings), f"<p>{link('index.html', 'All claims')}</p>"]
    return _write(folder / f"{experiment.name}.html", html.document(title, parts))


def markdown_ledger(records: Sequence[Record], pictures: Mapping[str, Sequence[tuple[str, str]]] | None = None) -> str:
    """Return the ledger as a page of the documentation in Markdown, one section per paper.

    Args:
        records: Records from `read_records` or `record_of`.
        pictures: Captions and addresses of pictures, by the name of the experiment. Default: none.

    Returns:
        Text of the page.

    Example:
        >>> import tempfile
        >>> from featlearn.papers.ledger import markdown_ledger, record_of
        >>> from featlearn.papers.runner import reproduce
        >>> done = reproduce(["adaptive-fig2"], "smoke", folder=tempfile.mkdtemp())
        >>> page = markdown_ledger([record_of(each) for each in done])
        >>> [line for line in page.splitlines() if line.startswith("#")]
        ['## Adaptive tangent features', '### adaptive-fig2: Effective penalties are sub-quadratic']
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
    parts = [heading("Claims of the papers and measurements", 1), paragraph(_summary(records), soft=True)]
    for title, chosen in _by_paper(records):
        rows = []
        for record in chosen:
            name = f"<td class='plain'>{link(f'{record.name}.html', record.name)}</td>"
            if not record.claims:
                rows.append([name, cell(record.trouble), *[cell("")] * 5])
            for claim in record.claims:
                rows.append([name, *_claim_cells(claim)])
                name = cell("")
        parts += [heading(title), html.rows_table(("experiment", *_SHOWN), rows)]
    return html.document("Ledger of claims", parts)


def _by_paper(records: Sequence[Record]) -> list[tuple[str, list[Record]]]:
    papers = [(title, [r for r in records if r.paper == paper]) for paper, title in PAPERS.items()]
    return [(title, chosen) for title, chosen in papers if chosen]


def _claim_cells(claim: Claim) -> list[str]:
    text, *others, verdict = claim.texts
    kind = verdict if verdict in ("reproduced", "differs") else "missing"
    return [cell(text), *(cell(other, "plain") for other in others), cell(verdict, kind)]


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
