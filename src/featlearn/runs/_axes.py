"""Positions of steps on other axes than the steps: training time, and epochs."""

from __future__ import annotations

import math
import sqlite3
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from featlearn.runs._segments import source
from featlearn.runs._summaries import as_number
from featlearn.runs.database import DATABASE_FILE, read_database
from featlearn.runs.overview import curves

AXES = ("step", "time", "epoch")
"""Axes on which values can be shown."""

_RESOLUTION = 4000  # values of a metric between which positions are interpolated
_AT_ONCE = 900  # parameters of a query; old versions of SQLite allow 999


def available_axes(folder: Path, metrics: Sequence[str]) -> list[str]:
    """Return the axes that a run has: time if the times of its steps are stored, or a metric of that name was logged.

    Args:
        folder: Folder of the run.
        metrics: Names of the metrics of the run itself.
    """
    with read_database(folder / DATABASE_FILE) as connection:
        timed = connection.execute("SELECT 1 FROM times LIMIT 1").fetchone() is not None
    return ["step", *(axis for axis in AXES[1:] if axis in metrics or (axis == "time" and timed))]


def positions(folder: Path, steps: Sequence[int], axis: str, segment: int | None = None) -> NDArray[np.float64]:
    """Return the positions of steps on an axis; NaN where it is unknown.

    The time is the one for which processes wrote the run up to the first value of the step, in seconds, without the
    pauses between the processes. Runs of older versions have no times; there, a metric "time" is used if it was logged.
    Positions between the values of a metric are interpolated.

    Args:
        folder: Folder of the run.
        steps: Steps, ascending.
        axis: Name of the axis, one of `AXES`.
        segment: Number of the segment, from 1. None is the latest one.
    """
    if axis == "step":
        return np.array(steps, dtype=np.float64)
    if axis == "time":
        with read_database(folder / DATABASE_FILE) as connection:
            result = _elapsed(connection, steps, segment)
        if not np.isnan(result).all():
            return result
    known = curves(folder, axis, "", width=_RESOLUTION, segment=segment)
    if not known:
        return np.full(len(steps), math.nan)
    return np.interp(steps, known[0].steps, known[0].values, left=math.nan, right=math.nan)


def _elapsed(connection: sqlite3.Connection, steps: Sequence[int], segment: int | None) -> NDArray[np.float64]:
    table = source(connection, "times", segment)
    moments: dict[int, float] = {}
    for start in range(0, len(steps), _AT_ONCE):
        some = steps[start : start + _AT_ONCE]
        query = f"SELECT step, time FROM {table} WHERE step IN ({', '.join('?' * len(some))})"
        moments |= {step: as_number(moment) for step, moment in connection.execute(query, some)}
    times = np.array([moments.get(step, math.nan) for step in steps])
    spans = [
        (as_number(began), as_number(seen)) for began, seen in connection.execute("SELECT began, seen FROM starts")
    ]
    spent = sum((np.clip(times, began, max(seen, began)) - began for began, seen in spans), np.zeros(len(steps)))
    return np.where(np.isnan(times), math.nan, spent)
