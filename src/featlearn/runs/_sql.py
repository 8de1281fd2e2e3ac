"""Rows of a run's database, as pandas shows them."""

from __future__ import annotations

import difflib
import json
import sqlite3
from collections.abc import Iterable
from typing import Any

import numpy as np
import pandas as pd

from featlearn._utils.patterns import parse_patterns, select_matching
from featlearn.errors import InputError, RunStoreError

Row = tuple[int, str, str, float | str]


def write_rows(connection: sqlite3.Connection, rows: Iterable[Row]) -> None:
    """Write numbers to metrics and words to texts; the caller holds the transaction."""
    numbers: list[tuple[Any, ...]] = []
    words: list[tuple[Any, ...]] = []
    for row in rows:
        value = row[3]
        if isinstance(value, str):
            words.append(row)
        else:
            numbers.append(row if value == value else (*row[:3], None))  # SQLite has no NaN
    for table, other, taken in (("metrics", "texts", numbers), ("texts", "metrics", words)):
        if taken:
            connection.executemany(f"INSERT OR REPLACE INTO {table} VALUES (?, ?, ?, ?)", taken)
            # What is logged again replaces what was there, even where that was of the other kind.
            connection.executemany(
                f"DELETE FROM {other} WHERE step = ? AND layer = ? AND name = ?", [row[:3] for row in taken]
            )


def read_meta(connection: sqlite3.Connection) -> dict[str, str]:
    """What the run says of itself, word for word."""
    found = dict(connection.execute("SELECT key, value FROM meta").fetchall())
    _require("meta", found.values(), str)
    return found


def read_table(
    connection: sqlite3.Connection, table: str, names: str | Iterable[str] | None, layers: str | Iterable[str] | None
) -> pd.DataFrame:
    """Rows of metrics or texts, ordered by step, layer and name, with one query."""
    wanted = None if names is None else parse_patterns(names, "names")
    globs = None if layers is None else parse_patterns(layers, "layers")
    query, values = f"SELECT step, layer, name, value FROM {table}", []
    if wanted is not None:
        query, values = f"{query} WHERE name IN ({', '.join('?' * len(wanted))})", wanted
    rows = connection.execute(f"{query} ORDER BY step, layer, name", values).fetchall()
    if wanted is not None:
        _refuse_unknown(connection, table, wanted, {row[2] for row in rows})
    if globs is not None and rows:
        taken = set(select_matching(globs, sorted({row[1] for row in rows} - {""}), "layers", "layer of the run"))
        rows = [row for row in rows if row[1] in taken]
    steps, where, called, what = zip(*rows, strict=True) if rows else ((), (), (), ())
    _require("step", steps, int)  # numpy would cut a step of 1.5 down to 1
    _require("name", (*called, *where), str)
    _require("value", what, *((int, float, type(None)) if table == "metrics" else (str,)))
    return pd.DataFrame(
        {
            "step": np.array(steps, dtype=np.int64),
            "layer": pd.Series([layer or None for layer in where], dtype=object),
            "name": pd.Series(called, dtype=object),
            "value": np.array(what, dtype=np.float64) if table == "metrics" else pd.Series(what, dtype=object),
        }
    )


def read_series(connection: sqlite3.Connection, name: str, layer: str | None) -> pd.Series[Any]:
    """The values of one name by step."""
    rows = connection.execute(
        "SELECT step, value FROM metrics WHERE name = ? AND layer = ? ORDER BY step", (name, layer or "")
    ).fetchall()
    if not rows:
        where = {found[0] for found in connection.execute("SELECT DISTINCT layer FROM metrics WHERE name = ?", (name,))}
        if where and layer is None:
            raise InputError(f"{name!r} was logged for layers only: pass layer=, for instance {min(where)!r}")
        if where:
            near = difflib.get_close_matches(layer or "", where, n=1) or [min(where)]
            there = f"layer={near[0]!r}" if near[0] else "the run itself"
            raise InputError(f"{name!r} was not logged for layer={layer!r}, but for {there}")
        _refuse_unknown(connection, "metrics", [name], set())
    _require("step", (step for step, _ in rows), int)
    return pd.Series(
        np.array([value for _, value in rows], dtype=np.float64),
        index=pd.Index(np.array([step for step, _ in rows], dtype=np.int64), name="step"),
        name=name,
    )


def last_step(connection: sqlite3.Connection) -> int | None:
    """The largest step with a value."""
    found: int | None = connection.execute(
        "SELECT max(step) FROM (SELECT max(step) AS step FROM metrics UNION ALL SELECT max(step) FROM texts)"
    ).fetchone()[0]
    _require("step", [found], int, type(None))
    return found


def read_starts(connection: sqlite3.Connection) -> pd.DataFrame:
    """A row for each time that the run was opened for writing."""
    rows = connection.execute(
        "SELECT pid, process_started, began, seen, checkpoint, environment FROM starts ORDER BY id"
    ).fetchall()
    table = pd.DataFrame(rows, columns=["pid", "process_started", "began", "seen", "checkpoint", "environment"])
    for column in ("process_started", "began", "seen"):
        table[column] = pd.to_datetime(table[column].astype(float), unit="s", utc=True)
    table["environment"] = table["environment"].map(json.loads)
    return table.astype({"pid": "int64", "checkpoint": "Int64"})


def _require(what: str, values: Iterable[Any], *kinds: type) -> None:
    """SQLite keeps any kind of value in any column; refuse what no run has written."""
    if odd := set(map(type, values)).difference(kinds):
        raise RunStoreError(f"the database is damaged: it has {odd.pop().__name__} in the place of a {what}")


def _refuse_unknown(connection: sqlite3.Connection, table: str, wanted: list[str], found: set[str]) -> None:
    if found.issuperset(wanted):
        return
    there = [row[0] for row in connection.execute(f"SELECT DISTINCT name FROM {table} ORDER BY name")]
    for name in wanted:
        if there and name not in there:  # a run that has not logged yet is no mistake of the one who asks
            near = difflib.get_close_matches(name, there, n=3) or there[:3]
            raise InputError(f"the run has no {table} {name!r}; it has {len(there)}, for instance {', '.join(near)}")
