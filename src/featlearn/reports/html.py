"""Self-contained HTML pages with tables and figures; all text is escaped."""

from __future__ import annotations

import base64
import io
import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from numbers import Real
from pathlib import Path
from typing import Any

import pandas as pd
from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup
from matplotlib.figure import Figure

from featlearn._utils.atomic import atomic_write
from featlearn._utils.formatting import short_number

_ENVIRONMENT = Environment(
    loader=PackageLoader("featlearn.reports"),
    autoescape=True,
    undefined=StrictUndefined,
    trim_blocks=True,
    lstrip_blocks=True,
    keep_trailing_newline=True,
)
_WIDE = 7.0  # inches, from which on a picture scrolls on a phone instead of shrinking
_SHORT = 20  # characters of a text that stays in one line of a table
_PARTS = _ENVIRONMENT.get_template("parts.html").module


def document(title: str, parts: Iterable[str]) -> str:
    """Return a complete HTML document built from ``parts``, which are HTML from this module's functions."""
    return _ENVIRONMENT.get_template("page.html").render(title=title, parts=map(Markup, parts))


def heading(text: str, level: int = 2) -> str:
    """Return a heading."""
    return _part("heading", text, level)


def paragraph(text: str, *, soft: bool = False) -> str:
    """Return a paragraph, optionally in a softer color for less important text."""
    return _part("paragraph", text, soft)


def link(address: str, text: str) -> str:
    """Return a link to a page beside this one."""
    return _part("link", address, text)


def definitions(items: Mapping[str, Any]) -> str:
    """Return a list of names and values, one below the other."""
    return _part("definitions", list(items.items()))


def rows_table(columns: Iterable[str], rows: Iterable[Iterable[str]]) -> str:
    """Return a table of cells that are already HTML, from `cell` and `link`."""
    return _part("table", list(columns), [list(map(Markup, row)) for row in rows])


def cell(content: Any, kind: str = "") -> str:
    """Return a cell of text; ``kind`` is a class of the style sheet."""
    return _part("cell", content, kind)


def frame_table(frame: pd.DataFrame) -> str:
    """Return a table of a data frame, with rounded numbers."""
    columns = [_title(column) for column in frame.columns]
    named = frame.index.name is not None or not isinstance(frame.index, pd.RangeIndex)
    first = [str(frame.index.name or "")] if named else []
    rows = []
    for label, row in zip(frame.index, frame.itertuples(index=False, name=None), strict=True):
        cells = [cell(label, "plain")] if named else []
        rows.append(cells + [_value(value) for value in row])
    return rows_table(first + columns, rows)


def picture(figure: Figure, caption: str, dpi: int = 110) -> str:
    """Return a figure as a PNG within the page."""
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png", dpi=dpi, bbox_inches="tight", facecolor="white")
    wide = figure.get_figwidth() > _WIDE
    return _part("picture", base64.b64encode(buffer.getvalue()).decode(), caption, wide)


def _part(macro: str, *arguments: Any) -> str:
    return str(getattr(_PARTS, macro)(*arguments))


def _title(column: Any) -> str:
    return " ".join(map(str, column)).strip() if isinstance(column, tuple) else str(column)


def _value(value: Any) -> str:
    if isinstance(value, bool):
        return cell("yes" if value else "no")
    if isinstance(value, Real):
        return cell(short_number(float(value)), "number")
    return cell(value, "plain" if len(str(value)) <= _SHORT else "")


@dataclass(frozen=True)
class Section:
    """Section of a report. Its texts are plain text, which is escaped.

    Attributes:
        title: Heading of the section.
        words: Paragraphs at the top.
        tables: Tables by caption, below the paragraphs.
        figures: Figures by caption, below the tables.
        settings: Values by name, listed below the figures.
        remarks: Less important paragraphs, at the end.

    Example:
        >>> from featlearn.plots import importance_bars
        >>> from featlearn.reports import Section
        >>> figure = importance_bars(["age", "price"], [0.3, 0.7])
        >>> section = Section("Features", figures={"Importance of each column.": figure}, settings={"seed": 0})
        >>> section.parts()[0]
        '<h2>Features</h2>'
    """

    title: str
    words: tuple[str, ...] = ()
    tables: Mapping[str, pd.DataFrame] = field(default_factory=dict)
    figures: Mapping[str, Figure] = field(default_factory=dict)
    settings: Mapping[str, Any] = field(default_factory=dict)
    remarks: tuple[str, ...] = ()

    def parts(self) -> list[str]:
        """Return the parts of the section as HTML."""
        parts = [heading(self.title)]
        parts += [paragraph(text) for text in self.words]
        for caption, table in self.tables.items():
            parts.append(frame_table(table))
            if caption:
                parts.append(paragraph(caption, soft=True))
        parts += [picture(figure, caption) for caption, figure in self.figures.items()]
        if self.settings:
            parts.append(definitions(self.settings))
        parts += [paragraph(text, soft=True) for text in self.remarks]
        return parts


def write_report(path: str | os.PathLike[str], title: str, lead: str, sections: Iterable[Section]) -> Path:
    """Write a self-contained HTML page, which can be sent by mail and opened offline.

    Args:
        path: File to write. Its folder is created, and an existing file is replaced.
        title: Title of the page.
        lead: Introduction of one or two sentences.
        sections: Sections of the page.

    Returns:
        The path of the file.

    Example:
        >>> import tempfile, pandas as pd
        >>> from pathlib import Path
        >>> from featlearn.reports import Section, write_report
        >>> losses = Section("Losses", words=("Two seeds.",), tables={"Final loss": pd.DataFrame({"loss": [0.1, 0.2]})})
        >>> path = write_report(Path(tempfile.mkdtemp()) / "report.html", "My training", "All layers learn.", [losses])
        >>> "<h2>Losses</h2>" in path.read_text(encoding="utf-8")
        True
    """
    parts = [heading(title, 1), paragraph(lead, soft=True)]
    for section in sections:
        parts += section.parts()
    target = Path(path)
    target.parent.mkdir(parents=True, exist_ok=True)
    with atomic_write(target) as draft:
        draft.write_text(document(title, parts), encoding="utf-8")
    return target
