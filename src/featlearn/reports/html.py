"""Write self-contained HTML pages with tables and figures; all text is escaped."""

from __future__ import annotations

import base64
import io
import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from html import escape
from numbers import Real
from pathlib import Path
from typing import Any

import pandas as pd
from matplotlib.figure import Figure

from featlearn._utils.atomic import atomic_write
from featlearn._utils.formatting import short_number

__all__ = [
    "Section",
    "definitions",
    "document",
    "frame_table",
    "heading",
    "link",
    "paragraph",
    "picture",
    "rows_table",
    "write_report",
]

_STYLE = """
:root { color-scheme: light dark; --ink: #1a1a1a; --soft: #5a5a5a; --line: #d9d9d9; --paper: #ffffff; --band: #f5f6f8;
  --good: #00684a; --bad: #a8320a; --none: #5a5a5a; --link: #0b5cad; }
@media (prefers-color-scheme: dark) { :root { --ink: #e8e8e8; --soft: #a9a9a9; --line: #3a3d42; --paper: #16181c;
  --band: #1f2227; --good: #52c99a; --bad: #ff9a76; --none: #a9a9a9; --link: #7ab8f5; } }
* { box-sizing: border-box; }
body { margin: 0 auto; padding: 1.5rem 1rem 4rem; max-width: 68rem; background: var(--paper); color: var(--ink);
  font: 16px/1.5 system-ui, -apple-system, "Segoe UI", Roboto, sans-serif; }
h1 { font-size: 1.6rem; line-height: 1.25; margin: 0 0 .3rem; }
h2 { font-size: 1.2rem; margin: 2.2rem 0 .6rem; }
p { max-width: 46rem; margin: .4rem 0; }
.soft { color: var(--soft); }
a { color: var(--link); }
.wide { overflow-x: auto; }
table { border-collapse: collapse; font-size: .9rem; font-variant-numeric: tabular-nums; }
th, td { text-align: left; vertical-align: top; padding: .35rem .7rem; border-bottom: 1px solid var(--line); }
th { background: var(--band); font-weight: 600; white-space: nowrap; }
td.number { text-align: right; white-space: nowrap; }
td.plain { white-space: nowrap; }
.reproduced { color: var(--good); font-weight: 600; }
.differs { color: var(--bad); font-weight: 600; }
.missing { color: var(--none); }
figure { margin: 1rem 0 1.6rem; }
figure img { max-width: 100%; height: auto; background: #ffffff; border-radius: 4px; }
figcaption { color: var(--soft); font-size: .9rem; }
dl { display: grid; grid-template-columns: max-content 1fr; gap: .15rem 1rem; font-size: .9rem; }
dt { color: var(--soft); } dd { margin: 0; overflow-wrap: anywhere; }
"""


def document(title: str, parts: Iterable[str]) -> str:
    """The whole page; parts are HTML from this module's functions."""
    body = "\n".join(parts)
    policy = "default-src 'none'; img-src data:; style-src 'unsafe-inline'"
    return (
        '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f'<meta http-equiv="Content-Security-Policy" content="{policy}">\n'
        f"<title>{escape(title)}</title>\n<style>{_STYLE}</style>\n</head>\n<body>\n{body}\n</body>\n</html>\n"
    )


def heading(text: str, level: int = 2) -> str:
    """A heading."""
    return f"<h{level}>{escape(text)}</h{level}>"


def paragraph(text: str, *, soft: bool = False) -> str:
    """A paragraph; soft is for what is less important."""
    return f"<p{_kind('soft' if soft else '')}>{escape(text)}</p>"


def link(address: str, text: str) -> str:
    """A link to a page beside this one."""
    return f'<a href="{escape(address, quote=True)}">{escape(text)}</a>'


def definitions(items: Mapping[str, Any]) -> str:
    """Names and values, one below the other."""
    return "<dl>" + "".join(f"<dt>{escape(str(k))}</dt><dd>{escape(str(v))}</dd>" for k, v in items.items()) + "</dl>"


def rows_table(columns: Iterable[str], rows: Iterable[Iterable[str]]) -> str:
    """A table of cells that are HTML already: from `cell` and `link`."""
    head = "".join(f"<th>{escape(column)}</th>" for column in columns)
    body = "".join("<tr>" + "".join(row) + "</tr>\n" for row in rows)
    return f'<div class="wide"><table><thead><tr>{head}</tr></thead><tbody>\n{body}</tbody></table></div>'


def cell(content: Any, kind: str = "") -> str:
    """A cell of text; kind is a class of the style."""
    return f"<td{_kind(kind)}>{escape(str(content))}</td>"


def frame_table(frame: pd.DataFrame) -> str:
    """A pandas table with numbers as people write them."""
    columns = [_title(column) for column in frame.columns]
    named = frame.index.name is not None or not isinstance(frame.index, pd.RangeIndex)
    first = [str(frame.index.name or "")] if named else []
    rows = []
    for label, row in zip(frame.index, frame.itertuples(index=False, name=None), strict=True):
        cells = [cell(label, "plain")] if named else []
        rows.append(cells + [_value(value) for value in row])
    return rows_table(first + columns, rows)


def picture(figure: Figure, caption: str, dpi: int = 110) -> str:
    """A figure as a PNG within the page."""
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png", dpi=dpi, bbox_inches="tight", facecolor="white")
    data = base64.b64encode(buffer.getvalue()).decode()
    image = f'<img alt="{escape(caption, quote=True)}" src="data:image/png;base64,{data}">'
    return f"<figure>{image}<figcaption>{escape(caption)}</figcaption></figure>"


def _kind(name: str) -> str:
    return f' class="{name}"' if name else ""


def _title(column: Any) -> str:
    return " ".join(map(str, column)).strip() if isinstance(column, tuple) else str(column)


def _value(value: Any) -> str:
    if isinstance(value, bool):
        return cell("yes" if value else "no")
    if isinstance(value, Real):
        return cell(short_number(float(value)), "number")
    return cell(value)


@dataclass(frozen=True)
class Section:
    """A part of a report; everything in it is text, and shown as it is.

    Attributes:
        title: Its heading.
        words: Paragraphs at its top.
        tables: Caption to table, below the words.
        figures: Caption to figure, below the tables.
        settings: Names and values, at its end.
        remarks: Paragraphs that are less important, at its very end.
    """

    title: str
    words: tuple[str, ...] = ()
    tables: Mapping[str, pd.DataFrame] = field(default_factory=dict)
    figures: Mapping[str, Figure] = field(default_factory=dict)
    settings: Mapping[str, Any] = field(default_factory=dict)
    remarks: tuple[str, ...] = ()

    def parts(self) -> list[str]:
        """Its HTML."""
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
    """Write a page that holds everything it needs: it can be sent by mail, and opened without a network.

    Args:
        path: The file; one that exists is replaced.
        title: Of the page.
        lead: What it is about, in a sentence or two.
        sections: Its parts.

    Returns:
        The path.
    """
    parts = [heading(title, 1), paragraph(lead, soft=True)]
    for section in sections:
        parts += section.parts()
    target = Path(path)
    target.parent.mkdir(parents=True, exist_ok=True)
    with atomic_write(target) as draft:
        draft.write_text(document(title, parts), encoding="utf-8")
    return target
