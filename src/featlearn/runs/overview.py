"""Overviews of runs for pages that show many: few rows and one connection per run."""

from __future__ import annotations

import re
import sqlite3
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from featlearn.runs import _sql
from featlearn.runs._reader import parse_meta, status_of
from featlearn.runs._segments import first_steps, source
from featlearn.runs._sql import check_cell
from featlearn.runs._summaries import STEPS, as_number
from featlearn.runs.database import DATABASE_FILE, read_database

_SMALL = 8_000_000  # bytes; in a smaller database every row is read to find the names
_SAMPLED = 64  # number of steps with metrics of layers that are read in a larger one


@dataclass(frozen=True)
class Overview:
    """Summary of a run for a list of runs.

    Attributes:
        name: Name of the run.
        status: Status, as in `featlearn.runs.Run`.
        message: Reason for a failure, or an empty string.
        started: Start time, in seconds since 1970.
        seconds: Total time for which the run was written, in seconds; None for old versions.
        last_step: Largest step with a value in the latest segment; None before the first.
        config: Config of the run.
        environment: Versions, platform, command.
        loss: Name and last value of the first recorded metric out of loss, train_loss, test_loss, score and cv_score.
        readings: Last diagnosis of each layer.
        segments: Number of segments. All other values are those of the latest one.
    """

    name: str
    status: str
    message: str
    started: float
    seconds: float | None
    last_step: int | None
    config: dict[str, Any]
    environment: dict[str, Any]
    loss: tuple[str, float] | None
    readings: dict[str, str] = field(default_factory=dict)
    segments: int = 1


@dataclass(frozen=True, eq=False)
class Curve:
    """Curve of a metric over the steps.

    Attributes:
        layer: Name of the layer; None is the run itself.
        steps: Steps, ascending.
        values: Values at the steps; NaN where a NaN was logged.
        total: Number of values in the requested range.
    """

    layer: str | None
    steps: list[int]
    values: list[float]
    total: int


def overview(folder: Path) -> Overview:
    """Return the overview of the run in a folder."""
    path = folder / DATABASE_FILE
    with read_database(path) as connection:
        meta = _sql.read_meta(connection)
        status = status_of(lambda: _sql.read_meta(connection), folder)
        last = _sql.last_step(connection)
        seconds = _sql.read_seconds(connection)
        loss = _last_loss(connection, last)
        readings = _last_readings(connection)
        segments = len(first_steps(connection))
    name, config, environment, started = parse_meta(meta, path)
    message, began = meta.get("message", ""), started.timestamp()
    return Overview(name, status, message, began, seconds, last, config, environment, loss, readings, segments)


def quantities(folder: Path, segment: int | None = None) -> dict[str | None, list[str]]:
    """Return the names of the metrics of each layer, and of the run itself under None.

    In a large database, the names of layers are those of a sample of the steps at which layers were measured; the names
    of the run itself are complete. Both are then those of the latest segment.

    Args:
        folder: Folder of the run.
        segment: Number of the segment, from 1. None is the latest one.
    """
    path = folder / DATABASE_FILE
    with read_database(path) as connection:
        if path.stat().st_size <= _SMALL:
            pairs = set(
                connection.execute(f"SELECT DISTINCT layer, name FROM {source(connection, 'metrics', segment)}")
            )
        else:
            pairs = _sampled_names(connection)
        result: dict[str | None, list[str]] = {}
        for layer, name in sorted(pairs, key=lambda pair: (natural_order(pair[0]), check_cell("text", pair[1], str))):
            result.setdefault(layer or None, []).append(name)
        return result


def curves(
    folder: Path,
    name: str,
    layer: str | None = None,
    *,
    width: int = 800,
    first: int | None = None,
    last: int | None = None,
    log: bool = False,
    segment: int | None = None,
    mean: bool = False,
) -> list[Curve]:
    """Return a metric over the steps, for each layer that has it, at the resolution of a screen.

    The steps are divided into half as many parts as there are pixels, and each part gives its smallest and its largest
    value, so a peak of a single step stays visible. If there are at most as many values as pixels, all are returned.
    With ``mean``, there is one part per pixel, and each gives the mean of its values at its first step.

    Args:
        folder: Folder of the run.
        name: Name of the metric.
        layer: Name of the layer; "" selects the run itself, None all layers and the run.
        width: Width in pixels.
        first: First step. None starts at the first recorded step.
        last: Last step. None ends at the last recorded step.
        log: Whether the axis of the steps is logarithmic.
        segment: Number of the segment, from 1. None is the latest one.
        mean: Whether to return means instead of smallest and largest values.

    Returns:
        One curve per layer, in natural order.
    """
    where, values = "step BETWEEN ? AND ? AND name = ?", [name]
    if layer is not None:
        where, values = f"{where} AND layer = ?", [name, layer]
    with read_database(folder / DATABASE_FILE) as connection:
        table = source(connection, "metrics", segment)
        # Two queries: SQLite finds either end at once, but reads every row for both.
        least, most = (connection.execute(f"SELECT {end}(step) FROM {table}").fetchone()[0] for end in ("min", "max"))
        if least is None:
            return []
        least, most = max(least, first or 0), most if last is None else min(most, last)
        rows: list[tuple[Any, ...]] = []
        # One query per part, in the order of the primary key: to sort all rows by part would take twice as long.
        extremes = "avg(value), avg(value)" if mean else "min(value), max(value)"
        # A step has one value per layer at most: fewer steps than pixels are not reduced.
        count = 0 if most - least < width else max(width if mean else width // 2, 1)
        for start, end in _parts(least, most, count, log) if count else ():
            query = (
                f"SELECT layer, min(step), max(step), {extremes}, count(*) FROM {table} WHERE {where} GROUP BY layer"
            )
            rows += connection.execute(query, (start, end, *values))
        rows = [row for row in rows if row[0] is not None]
        if sum(row[5] for row in rows) <= width * len({row[0] for row in rows}):
            query = f"SELECT layer, step, step, value, value, 1 FROM {table} WHERE {where} ORDER BY step"
            rows = connection.execute(query, (least, most, *values)).fetchall()
        return _as_curves(rows)


def _parts(least: int, most: int, count: int, log: bool) -> list[tuple[int, int]]:
    """Return the first and last steps of parts that cover a range."""
    if most < least:
        return []
    if log:
        edges = np.unique(np.geomspace(max(least, 1), most + 1, count + 1).astype(np.int64)) if most else np.array([1])
        starts = [least, *(int(edge) for edge in edges if least < edge <= most)]
    else:
        length = -(-(most - least + 1) // count)
        starts = list(range(least, most + 1, length))
    return [(start, end - 1) for start, end in zip(starts, [*starts[1:], most + 1], strict=True)]


def words(
    folder: Path, names: tuple[str, ...], segment: int | None = None
) -> dict[tuple[str | None, str], list[tuple[int, int, str]]]:
    """Return text values over the steps as intervals ``(first step, last step, text)``, by layer and name.

    Args:
        folder: Folder of the run.
        names: Names of the values, such as "reading".
        segment: Number of the segment, from 1. None is the latest one.
    """
    marks = ", ".join("?" * len(names))
    with read_database(folder / DATABASE_FILE) as connection:
        table = source(connection, "texts", segment)
        query = f"SELECT layer, name, step, value FROM {table} WHERE name IN ({marks}) ORDER BY step"
        result: dict[tuple[str | None, str], list[tuple[int, int, str]]] = {}
        for layer, name, cell, value in connection.execute(query, names).fetchall():
            step = check_cell("step", cell, int)
            intervals = result.setdefault((layer or None, name), [])
            if intervals and intervals[-1][2] == value:
                intervals[-1] = (intervals[-1][0], step, value)
            else:
                intervals.append((step, step, check_cell("text", value, str)))
        return dict(sorted(result.items(), key=lambda item: (natural_order(item[0][0] or ""), item[0][1])))


def _as_curves(rows: list[tuple[Any, ...]]) -> list[Curve]:
    grouped: dict[str, list[tuple[Any, ...]]] = {}
    for row in rows:
        grouped.setdefault(row[0], []).append(row)
    result = []
    for layer in sorted(grouped, key=natural_order):
        points: list[tuple[Any, Any]] = []
        for _, start, end, low, high, count in grouped[layer]:
            points.append((start, low))
            if count > 1 and low != high and low is not None:
                points.append((end, high))
        steps = [check_cell("step", step, int) for step, _ in points]
        values = [as_number(value) for _, value in points]
        result.append(Curve(layer or None, steps, values, sum(row[5] for row in grouped[layer])))
    return result


def _sampled_names(connection: sqlite3.Connection) -> set[tuple[str, str]]:
    of_run = "SELECT DISTINCT m.layer, m.name FROM steps CROSS JOIN metrics m ON m.step = steps.step AND m.layer = ''"
    pairs = set(connection.execute(f"{STEPS} {of_run}").fetchall())
    layers = "SELECT 1 FROM metrics m WHERE m.step = steps.step AND m.layer > ''"
    measured = connection.execute(f"{STEPS} SELECT step FROM steps WHERE EXISTS ({layers})").fetchall()
    for place in np.unique(np.linspace(0, len(measured) - 1, min(len(measured), _SAMPLED)).astype(int)).tolist():
        query = "SELECT layer, name FROM metrics WHERE step = ? AND layer > ''"
        pairs.update(connection.execute(query, measured[place]))
    return pairs


def _last_loss(connection: sqlite3.Connection, last: int | None) -> tuple[str, float] | None:
    # Among the last steps only: a search for a name that was never logged would read every row.
    query = "SELECT value FROM metrics WHERE step > ? AND layer = '' AND name = ? ORDER BY step DESC LIMIT 1"
    for name in ("loss", "train_loss", "test_loss", "score", "cv_score"):
        row = connection.execute(query, ((last or 0) - 200, name)).fetchone()
        if row is not None:
            return name, as_number(row[0])
    return None


def _last_readings(connection: sqlite3.Connection) -> dict[str, str]:
    """Return the last diagnosis of each layer: within a budget, layers take turns."""
    # SQLite takes the other columns from the row with the largest step.
    query = "SELECT layer, value, max(step) FROM texts WHERE name = 'reading' GROUP BY layer"
    rows = connection.execute(query).fetchall()
    last = max((step for *_, step in rows), default=None)
    # A damaged name at an earlier step does not end a list of runs.
    rows = [row for row in rows if isinstance(row[0], str) or row[2] == last]
    return {str(layer): str(word) for layer, word, _ in sorted(rows, key=lambda row: natural_order(row[0]))}


def natural_order(text: str) -> list[tuple[int, str]]:
    """Return a key that sorts names by the numbers in them: 2 before 10."""
    return [
        (int(part), "") if part.isascii() and part.isdigit() and len(part) < 18 else (-1, part)
        for part in re.split(r"([0-9]+)", check_cell("text", text, str))
    ]
