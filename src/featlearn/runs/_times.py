"""Times of the steps of a run: written now and then, read as the time for which processes wrote the run."""

from __future__ import annotations

import math
import sqlite3
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from featlearn.runs._segments import source
from featlearn.runs._summaries import as_number

_SECONDS = 0.1
_PART = 1 / 2000  # of the time since the run was opened, so that long runs have thousands of times, not millions


class StepClock:
    """Writer of the times of steps, which are interpolated when they are read.

    A time for each step would double the cost of logging in a loop of fast steps.

    Args:
        now: Time at which the run was opened, in seconds since 1970.
    """

    def __init__(self, now: float) -> None:
        self._opened = now
        self._last = -math.inf
        self._step = -1

    def record(self, connection: sqlite3.Connection, step: int, now: float) -> None:
        """Store the time of a step if enough time has passed, or the steps go back; the caller holds the transaction.

        Args:
            connection: Connection to the database.
            step: Number of the step.
            now: Current time, in seconds since 1970.
        """
        if now - self._last >= max(_SECONDS, _PART * (now - self._opened)) or step < self._step:
            connection.execute("INSERT OR IGNORE INTO times VALUES (?, ?)", (step, now))
            self._last = now
        self._step = step


def elapsed(connection: sqlite3.Connection, steps: Sequence[int], segment: int | None) -> NDArray[np.float64]:
    """Return the time for which processes wrote the run up to each step, in seconds, without pauses between them.

    Args:
        connection: Connection to the database.
        steps: Steps, ascending.
        segment: Number of the segment, from 1. None is the latest one.

    Returns:
        Times of the steps; NaN before the first stored time.
    """
    rows = connection.execute(f"SELECT step, time FROM {source(connection, 'times', segment)} ORDER BY step").fetchall()
    if not rows:
        return np.full(len(steps), math.nan)
    stored = np.array([int(step) for step, _ in rows])
    times = np.array([as_number(moment) for _, moment in rows])
    spent = np.zeros(len(rows))
    for began, seen in connection.execute("SELECT began, seen FROM starts").fetchall():
        spent += np.clip(times, as_number(began), max(as_number(began), as_number(seen))) - as_number(began)
    # A value that was logged late for a lower step does not make it later than the steps after it.
    spent = np.minimum.accumulate(spent[::-1])[::-1]
    return np.interp(steps, stored, spent, left=math.nan)
