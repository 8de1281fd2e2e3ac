"""Output of commands: tables for the terminal, JSON for programs."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from numbers import Real
from pathlib import Path
from typing import Any

from rich.console import Console, Group
from rich.table import Table
from rich.text import Text

from featlearn._utils.json import to_json


def result_console() -> Console:
    """Return the console of results, on stdout, without syntax highlighting."""
    return Console(highlight=False)


def print_line(console: Console, text: str | Text) -> None:
    """Print a text as it is: without markup, and without line breaks at the width of the terminal."""
    console.print(text, markup=False, soft_wrap=True)


def print_json(value: Any) -> None:
    """Print one JSON value to stdout; NaN and infinity become null."""
    print(json.dumps(to_json(value), indent=1, allow_nan=False))


def text_table(columns: Mapping[str, str], rows: Iterable[Sequence[Any]], caption: str | None = None) -> Group:
    """Return a table for the terminal; texts are shown without markup.

    Args:
        columns: Format of each column by its title: ``"left"``, ``"right"``, ``"name"`` for names that are shortened
            if the terminal is too narrow, or ``"fold"`` for long texts, which may take several lines.
        rows: Rows with one cell per column; numbers are rounded.
        caption: Line below the table. None prints none.
    """
    cells = [[value if isinstance(value, Text) else Text(_cell(value)) for value in row] for row in rows]
    widths = [max([len(title), *(len(row[i]) for row in cells)]) for i, title in enumerate(columns)]
    room = result_console().width - sum(widths) - 3 * len(widths) - 1
    table = Table(header_style="bold")
    for i, (title, kind) in enumerate(columns.items()):
        table.add_column(
            Text(title), justify="right" if kind == "right" else "left", no_wrap=kind != "fold", overflow="fold"
        )
        if kind == "name" and room < 0:
            for row in cells:
                row[i] = Text(shorten(row[i].plain, max(widths[i] + room, 8)))
    for row in cells:
        table.add_row(*row)
    # Not the caption of the table, which would be as narrow as the table.
    return Group(table, Text(caption, "dim")) if caption else Group(table)


def print_files(console: Console, files: Iterable[tuple[Path | str, str]]) -> None:
    """Print the written files, one line per file."""
    listed = [(str(path), what) for path, what in files]
    width = max(len(path) for path, _ in listed)
    for path, what in listed:
        print_line(console, Text(f"  {path:{width}s}  ").append(what, style="dim"))


def shorten(name: str, most: int = 30) -> str:
    """Omit the beginning of a long name: the end of a layer's name is more specific."""
    return name if len(name) <= most else f"…{name[1 - most :]}"


def _cell(value: Any) -> str:
    if value is None or type(value).__name__ in ("NAType", "NaTType"):
        return "–"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if not isinstance(value, Real):
        return str(value)
    from featlearn._utils.formatting import short_number  # imports torch, which --help does not need

    return short_number(float(value))
