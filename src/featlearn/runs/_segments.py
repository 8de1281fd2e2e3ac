"""Segments of a run, which begin where the steps of a training go back."""

from __future__ import annotations

import sqlite3
import time
from collections.abc import Iterable
from typing import TYPE_CHECKING

from featlearn._utils.validation import check_int
from featlearn.runs._sql import Row, check_cell

if TYPE_CHECKING:
    import pandas as pd

_TABLES = ("metrics", "texts")
_COLUMNS = {"metrics": "step, layer, name, value", "texts": "step, layer, name, value", "times": "step, time"}
_COSTS = "monitor."  # time of measurements, which differs when a training is repeated


def first_steps(connection: sqlite3.Connection, segment: int | None = None) -> list[int]:
    """Return the first own step of each segment, in order, up to a segment; None is the latest.

    The tables metrics, texts and times hold the latest segment. The rows of an earlier segment from the step on at
    which the next one began are in old_metrics, old_texts and old_times; the rows before that step belong to both
    segments.
    """
    stored = connection.execute("SELECT first FROM segments ORDER BY id").fetchall()
    firsts = [0, *(check_cell("step", row[0], int) for row in stored)]
    return firsts if segment is None else firsts[: check_int("segment", segment, 1, len(firsts), optional=True)]


def source(connection: sqlite3.Connection, table: str, segment: int | None) -> str:
    """Return the SQL expression of the rows of a segment: a table, or a union of parts of tables.

    Args:
        connection: Connection to the database.
        table: Name of the table, "metrics", "texts" or "times".
        segment: Number of the segment, from 1. None is the latest.
    """
    firsts = first_steps(connection)
    if segment is None or check_int("segment", segment, 1, len(firsts), optional=True) == len(firsts):
        return table
    columns, parts, end = _COLUMNS[table], [], ""
    bound = None
    for number in range(segment, len(firsts)):
        first = firsts[number]  # of the next segment
        if bound is None or first < bound:
            parts.append(f"SELECT {columns} FROM old_{table} WHERE segment = {number} AND step >= {first}{end}")
            bound, end = first, f" AND step < {first}"
    return f"({' UNION ALL '.join([*parts, f'SELECT {columns} FROM {table} WHERE step < {bound}'])})"


def begin_segment(connection: sqlite3.Connection, step: int, start: int | None) -> int:
    """Start a segment at a step and return its number; the caller holds the transaction.

    Args:
        connection: Connection to the database.
        step: First step of the segment. Rows from this step on are moved to the tables of old rows.
        start: Number of the writing process in the table starts.
    """
    number = len(first_steps(connection))
    for table, columns in _COLUMNS.items():
        moved = f"SELECT ?, {columns} FROM {table} WHERE step >= ?"
        connection.execute(f"INSERT INTO old_{table} {moved}", (number, step))
        connection.execute(f"DELETE FROM {table} WHERE step >= ?", (step,))
    row = (number + 1, step, time.time(), start)
    connection.execute("INSERT INTO segments (id, first, began, start) VALUES (?, ?, ?, ?)", row)
    return number + 1


def goes_back(connection: sqlite3.Connection, rows: Iterable[Row]) -> bool:
    """Return whether one of the values was logged for a later step too."""
    later = " UNION ALL ".join(f"SELECT 1 FROM {t} WHERE step > ?1 AND layer = ?2 AND name = ?3" for t in _TABLES)
    return any(connection.execute(f"{later} LIMIT 1", row[:3]).fetchone() is not None for row in rows)


def differs(connection: sqlite3.Connection, rows: Iterable[Row]) -> bool:
    """Return whether one of the values was logged for its step with another value; times of the monitor may differ."""
    same = " UNION ALL ".join(f"SELECT value FROM {t} WHERE step = ?1 AND layer = ?2 AND name = ?3" for t in _TABLES)
    for row in rows:
        stored = connection.execute(same, row[:3]).fetchone()
        value = row[3] if row[3] == row[3] else None  # a NaN is stored as NULL
        if stored is not None and stored[0] != value and not row[2].startswith(_COSTS):
            return True
    return False


def segment_rows(connection: sqlite3.Connection) -> list[tuple[int, int, int | None, float | None]]:
    """Return number, first own step, last step and start time of each segment; the first has no start time."""
    firsts = first_steps(connection)
    began = {
        number: check_cell("time", moment, float)
        for number, moment in connection.execute("SELECT id, began FROM segments")
    }
    rows = []
    for number, first in enumerate(firsts, 1):
        tables = [source(connection, table, number) for table in _TABLES]
        largest = [connection.execute(f"SELECT max(step) FROM {table}").fetchone()[0] for table in tables]
        last = max((step for step in largest if step is not None), default=None)
        rows.append((number, first, last, began.get(number)))
    return rows


def read_segments(connection: sqlite3.Connection) -> pd.DataFrame:
    """Return one row per segment: its number, first own step, last step, and the time when it began."""
    import pandas as pd

    table = pd.DataFrame(segment_rows(connection), columns=["segment", "first_step", "last_step", "began"])
    table["began"] = pd.to_datetime(table["began"].astype(float), unit="s", utc=True)
    return table.astype({"segment": "int64", "first_step": "int64", "last_step": "Int64"})
