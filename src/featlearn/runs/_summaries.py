"""Last, smallest and largest values of the metrics of a run, for lists of many runs."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

from featlearn.runs._sql import check_cell
from featlearn.runs.database import DATABASE_FILE, read_database

Summary = tuple[float, float, float]
"""Last, smallest and largest value of a metric; NaN values are ignored unless there are no others."""

# The primary key begins with the step: the next step is found by one search, however many rows each step has.
STEPS = (
    "WITH RECURSIVE steps(step) AS (SELECT min(step) FROM metrics UNION ALL "
    "SELECT (SELECT min(step) FROM metrics WHERE step > steps.step) FROM steps WHERE steps.step IS NOT NULL) "
)


def metric_summaries(folder: Path, layer: str = "", name: str | None = None) -> dict[str, Summary]:
    """Return the last, the smallest and the largest value of metrics in the latest segment of a run.

    Args:
        folder: Folder of the run.
        layer: Name of the layer; "" selects the metrics of the run itself.
        name: Name of the metric. None selects all metrics of the layer.
    """
    only, values = ("", [layer]) if name is None else (" AND m.name = ?", [layer, name])
    query = (
        f"{STEPS} SELECT m.name, min(m.value), max(m.value), max(m.step) FROM steps CROSS JOIN metrics m "
        f"ON m.step = steps.step AND m.layer = ?{only} GROUP BY m.name"
    )
    result = {}
    with read_database(folder / DATABASE_FILE) as connection:
        for key, low, high, step in connection.execute(query, values).fetchall():
            last = "SELECT value FROM metrics WHERE step = ? AND layer = ? AND name = ?"
            (value,) = connection.execute(last, (step, layer, key)).fetchone()
            result[check_cell("text", key, str)] = (as_number(value), as_number(low), as_number(high))
    return result


def last_values(folder: Path) -> dict[str | None, dict[str, float]]:
    """Return the last value of each metric in the latest segment of a run, by layer; the run itself is None.

    Args:
        folder: Folder of the run.
    """
    # SQLite takes the value from the row with the largest step.
    query = "SELECT layer, name, value, max(step) FROM metrics GROUP BY layer, name"
    result: dict[str | None, dict[str, float]] = {}
    with read_database(folder / DATABASE_FILE) as connection:
        for layer, name, value, _ in connection.execute(query).fetchall():
            result.setdefault(check_cell("text", layer, str) or None, {})[name] = as_number(value)
    return result


def as_number(value: Any) -> float:
    """Return a stored value as a float; NULL is NaN."""
    return math.nan if value is None else float(check_cell("number", value, int, float))
