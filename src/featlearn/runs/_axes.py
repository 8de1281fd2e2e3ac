"""Positions of steps on other axes than the steps: training time, and epochs."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from featlearn.runs._times import elapsed
from featlearn.runs.database import DATABASE_FILE, read_database
from featlearn.runs.overview import curves

AXES = ("step", "time", "epoch")
"""Axes on which values can be shown."""

_RESOLUTION = 4000  # values of a metric between which positions are interpolated


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

    The time is the one for which processes wrote the run up to the step, in seconds, without the pauses between the
    processes. Runs of older versions have no times; there, a metric "time" is used if it was logged. Positions between
    stored values are interpolated.

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
            result = elapsed(connection, steps, segment)
        if not np.isnan(result).all():
            return result
    known = curves(folder, axis, "", width=_RESOLUTION, segment=segment)
    if not known:
        return np.full(len(steps), math.nan)
    return np.interp(steps, known[0].steps, known[0].values, left=math.nan, right=math.nan)
