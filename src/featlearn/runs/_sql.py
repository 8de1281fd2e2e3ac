"""Queries of a run's database, with results as pandas tables."""

from __future__ import annotations

import difflib
import json
import sqlite3
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

import numpy as np

from featlearn._utils.patterns import parse_patterns, select_matching
from featlearn.errors import InputError, RunStoreError

if TYPE_CHECKING:  # commands that list and export runs do without pandas
    import pandas as pd

Row = tuple[int, str, str, float | str]
Names = str | Iterable[str] | None
"""Name or names of values, or patterns of layers; None selects all."""


def write_rows(connection: sqlite3.Connection, rows: Iterable[Row]) -> None:
    """Write numbers to the table metrics and strings to the table texts; the caller holds the transaction."""
    numbers: list[tuple[Any, ...]] = []
    texts: list[tuple[Any, ...]] = []
    for row in rows:
        if isinstance(row[3], str):
            texts.append(row)
        else:
            numbers.append(row if row[3] == row[3] else (*row[:3], None))  # SQLite has no NaN
    for table, other, written in (("metrics", "texts", numbers), ("texts", "metrics", texts)):
        if written:
            connection.executemany(f"INSERT OR REPLACE INTO {table} VALUES (?, ?, ?, ?)", written)
            # A value that is logged again replaces the old one, also one of the other kind.
            delete = f"DELETE FROM {other} WHERE step = ? AND layer = ? AND name = ?"
            connection.executemany(delete, [row[:3] for row in written])


def set_status(connection: sqlite3.Connection, status: str, message: str) -> None:
    """Set the status and the message of the run; the caller holds the transaction."""
    set_meta(connection, {"status": status, "message": message})


def set_meta(connection: sqlite3.Connection, values: Mapping[str, str]) -> None:
    """Set metadata of the run; the caller holds the transaction."""
    connection.executemany("INSERT OR REPLACE INTO meta VALUES (?, ?)", values.items())


def read_meta(connection: sqlite3.Connection) -> dict[str, str]:
    """Return the metadata of the run, as strings."""
    result = dict(connection.execute("SELECT key, value FROM meta").fetchall())
    _require("meta", result.values(), str)
    return result


def read_rows(
    connection: sqlite3.Connection, table: str, names: Names, layers: Names, rows_from: str | None = None
) -> list[tuple[Any, ...]]:
    """Return steps, layers, names and values of metrics or texts, ordered by step, layer and name, with one query.

    Args:
        connection: Connection to the database.
        table: Name of the table, "metrics" or "texts".
        names: Names of the values. None selects all.
        layers: Glob patterns of layer names. None selects all.
        rows_from: SQL expression of the rows of an earlier segment. None is the table itself, the latest segment.
    """
    wanted = None if names is None else parse_patterns(names, "names")
    globs = None if layers is None else parse_patterns(layers, "layers")
    query, values = f"SELECT step, layer, name, value FROM {rows_from or table}", []
    if wanted is not None:
        query, values = f"{query} WHERE name IN ({', '.join('?' * len(wanted))})", wanted
    rows = connection.execute(f"{query} ORDER BY step, layer, name", values).fetchall()
    if wanted is not None:
        _refuse_unknown(connection, table, wanted, {row[2] for row in rows})
    if globs is not None and rows:
        selected = set(select_matching(globs, sorted({row[1] for row in rows} - {""}), "layers", "layer of the run"))
        rows = [row for row in rows if row[1] in selected]
    steps, owners, keys, cells = _columns(rows)
    _require("step", steps, int)  # numpy would truncate a step of 1.5 to 1
    _require("name", (*keys, *owners), str)
    _require("value", cells, *((int, float, type(None)) if table == "metrics" else (str,)))
    return rows


def read_table(
    connection: sqlite3.Connection, table: str, names: Names, layers: Names, rows_from: str | None = None
) -> pd.DataFrame:
    """Return the rows of `read_rows` as a table."""
    import pandas as pd

    steps, owners, keys, cells = _columns(read_rows(connection, table, names, layers, rows_from))
    return pd.DataFrame(
        {
            "step": np.array(steps, dtype=np.int64),
            "layer": pd.Series([layer or None for layer in owners], dtype=object),
            "name": pd.Series(keys, dtype=object),
            "value": np.array(cells, dtype=np.float64) if table == "metrics" else pd.Series(cells, dtype=object),
        }
    )


def read_series(
    connection: sqlite3.Connection, name: str, layer: str | None, rows_from: str = "metrics"
) -> pd.Series[Any]:
    """Return the values of a metric by step, from the table metrics or the SQL expression of an earlier segment."""
    import pandas as pd

    query = f"SELECT step, value FROM {rows_from} WHERE name = ? AND layer = ? ORDER BY step"
    rows = connection.execute(query, (name, layer or "")).fetchall()
    if not rows:
        owned = connection.execute(f"SELECT DISTINCT layer FROM {rows_from} WHERE name = ?", (name,))
        owners = {row[0] for row in owned}
        if owners and layer is None:
            raise InputError(f"{name!r} was logged for layers only. Pass layer=, for instance {min(owners)!r}.")
        if owners:
            near = difflib.get_close_matches(layer or "", owners, n=1) or [min(owners)]
            owner = f"layer={near[0]!r}" if near[0] else "the run itself"
            raise InputError(f"{name!r} was not logged for layer={layer!r}, but for {owner}.")
        _refuse_unknown(connection, "metrics", [name], set())
    steps, values = zip(*rows, strict=True) if rows else ((), ())
    _require("step", steps, int)
    index = pd.Index(np.array(steps, dtype=np.int64), name="step")
    return pd.Series(np.array(values, dtype=np.float64), index=index, name=name)


def last_step(connection: sqlite3.Connection) -> int | None:
    """Return the largest step with a value; None if there is none."""
    largest = "SELECT max(step) AS step FROM metrics UNION ALL SELECT max(step) FROM texts"
    result: int | None = connection.execute(f"SELECT max(step) FROM ({largest})").fetchone()[0]
    _require("step", [result], int, type(None))
    return result


def read_starts(connection: sqlite3.Connection) -> pd.DataFrame:
    """Return one row per process that opened the run for writing."""
    import pandas as pd

    columns = ["pid", "process_started", "began", "seen", "checkpoint", "environment"]
    rows = connection.execute(f"SELECT {', '.join(columns)} FROM starts ORDER BY id").fetchall()
    table = pd.DataFrame(rows, columns=columns)
    for column in ("process_started", "began", "seen"):
        table[column] = pd.to_datetime(table[column].astype(float), unit="s", utc=True)
    table["environment"] = table["environment"].map(json.loads)
    return table.astype({"pid": "int64", "checkpoint": "Int64"})


def read_seconds(connection: sqlite3.Connection) -> float | None:
    """Return the total time for which processes wrote the run, in seconds; None for old versions."""
    spans = connection.execute("SELECT began, seen FROM starts").fetchall()
    for span in spans:
        _require("time", span, int, float)
    return sum(max(seen - began, 0.0) for began, seen in spans) if spans else None


def _columns(rows: list[tuple[Any, ...]]) -> tuple[tuple[Any, ...], ...]:
    return tuple(zip(*rows, strict=True)) if rows else ((), (), (), ())


def _require(what: str, values: Iterable[Any], *kinds: type) -> None:
    """Raise unless all values are of some types: SQLite stores any type in any column."""
    if odd := set(map(type, values)).difference(kinds):
        raise RunStoreError(f"The database is damaged: it has a value of type {odd.pop().__name__} as {what}.")


def check_cell(what: str, value: Any, *kinds: type) -> Any:
    """Return a value of some types, or raise RunStoreError."""
    if not isinstance(value, kinds):
        raise RunStoreError(f"The database is damaged: it has {value!r} as {what}.")
    return value


def _refuse_unknown(connection: sqlite3.Connection, table: str, wanted: list[str], known: set[str]) -> None:
    if known.issuperset(wanted):
        return
    logged = [row[0] for row in connection.execute(f"SELECT DISTINCT name FROM {table} ORDER BY name")]
    for name in wanted:
        if logged and name not in logged:  # an empty run may log the name later
            near = difflib.get_close_matches(name, logged, n=3) or logged[:3]
            raise InputError(f"The run has no {table} {name!r}; it has {len(logged)}, for instance {', '.join(near)}.")
