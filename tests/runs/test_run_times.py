"""Times of steps: stored now and then, interpolated, without pauses, by segment."""

from __future__ import annotations

import math
import sqlite3
import warnings
from contextlib import closing
from pathlib import Path

import pytest

from featlearn.runs import Run
from featlearn.runs._axes import available_axes, positions
from featlearn.runs._times import StepClock


def stored(folder: Path) -> list[tuple[int, float]]:
    with closing(sqlite3.connect(folder / "run.db")) as connection:
        return connection.execute("SELECT step, time FROM times ORDER BY step").fetchall()


def test_a_fast_loop_stores_few_times_and_a_slow_one_each(tmp_path: Path) -> None:
    with Run.create(tmp_path / "run") as run:
        clock = StepClock(0.0)
        with run._database.transaction() as connection:
            for step in range(1000):  # a thousand steps per second
                clock.record(connection, step, step / 1000)
            for step in range(1000, 1010):  # one per second
                clock.record(connection, step, float(step - 999))
    steps = [step for step, _ in stored(tmp_path / "run")]
    assert steps[:3] == [0, 100, 200]
    assert steps[-9:] == list(range(1001, 1010))
    assert len(steps) < 30


def test_every_step_has_a_time_that_grows(tmp_path: Path) -> None:
    with Run.create(tmp_path / "run") as run:
        for step in range(0, 200, 2):
            run.log(step, {"loss": 1.0})
        run.log(51, {"late": 1.0})
    places = positions(tmp_path / "run", list(range(0, 200, 2)), "time").tolist()
    assert places == sorted(places)
    assert places[0] >= 0
    seconds = Run.open(tmp_path / "run").seconds
    assert seconds is not None
    assert places[-1] <= seconds


def test_pauses_do_not_count_and_segments_have_their_own_times(tmp_path: Path) -> None:
    with Run.create(tmp_path / "run") as run, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for step in (0, 10, 20, 10, 20):
            run.log(step, {"loss": float(step)})
    with closing(sqlite3.connect(tmp_path / "run" / "run.db")) as connection, connection:
        connection.execute("UPDATE starts SET began = 100, seen = 110")
        connection.execute("INSERT INTO starts (pid, began, seen, environment) VALUES (1, 1000, 1010, '{}')")
        for table in ("times", "old_times"):
            connection.execute(f"DELETE FROM {table}")
        connection.executemany("INSERT INTO times VALUES (?, ?)", [(0, 101), (10, 1001), (20, 1003)])
        connection.executemany("INSERT INTO old_times VALUES (1, ?, ?)", [(10, 105), (20, 109)])
    for segment, expected in ((None, [1, 11, 12, 13]), (2, [1, 11, 12, 13]), (1, [1, 5, 7, 9])):
        assert positions(tmp_path / "run", [0, 10, 15, 20], "time", segment).tolist() == pytest.approx(expected)


def test_a_run_of_an_older_version_has_no_times_or_its_own(tmp_path: Path) -> None:
    for name, metrics in (("none", {}), ("own", {"time": 2.5})):
        with Run.create(tmp_path / name) as run:
            run.log(3, {"loss": 1.0} | metrics)
        with closing(sqlite3.connect(tmp_path / name / "run.db")) as connection, connection:
            for table in ("times", "old_times"):
                connection.execute(f"DROP TABLE {table}")
            connection.execute("PRAGMA user_version = 3")
    assert available_axes(tmp_path / "none", ["loss"]) == ["step"]
    assert math.isnan(positions(tmp_path / "none", [3], "time")[0])
    assert available_axes(tmp_path / "own", ["loss", "time"]) == ["step", "time"]
    assert positions(tmp_path / "own", [3], "time").tolist() == [2.5]
