"""Steps that go back begin a segment: old values are kept, and the latest segment is read by default."""

from __future__ import annotations

import multiprocessing
import os
import signal
import sqlite3
import time
import warnings
from contextlib import closing
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
import torch

from featlearn.errors import InputError
from featlearn.runs import Run, export, list_runs
from featlearn.runs.overview import curves, overview


def write(folder: Path, steps: Any, value: float) -> None:
    with Run.open_or_create(folder) as run:
        for step in steps:
            run.log(step, {"loss": value + step, "word": f"{value}"})
            run.save_matrices(step, {"m": torch.full((1,), value)})


@pytest.fixture
def run(tmp_path: Path) -> Run:
    """Three segments: steps 0 to 9, again from 5 on, again from 7 on."""
    folder = tmp_path / "run"
    write(folder, range(10), 100.0)
    with pytest.warns(UserWarning, match=r"Step 5 goes back .* up to 9: segment 2 .* segment 1 are kept"):
        write(folder, range(5, 9), 200.0)
    with pytest.warns(UserWarning, match=r"Step 7 goes back .* up to 8: segment 3 .* segment 2 are kept"):
        write(folder, range(7, 12), 300.0)
    return Run.open(folder)


FIRST = [100.0 + step for step in range(10)]
SECOND = [*FIRST[:5], 205.0, 206.0, 207.0, 208.0]
THIRD = [*SECOND[:7], *(300.0 + step for step in range(7, 12))]


def test_every_segment_is_read_whole(run: Run, tmp_path: Path) -> None:
    for segment, wanted in ((1, FIRST), (2, SECOND), (3, THIRD), (None, THIRD)):
        assert run.series("loss", segment=segment).to_list() == wanted
        assert run.metrics("loss", segment=segment)["value"].to_list() == wanted
        texts = run.texts("word", segment=segment)["value"].to_list()
        assert [float(text) for text in texts] == [value - step for step, value in enumerate(wanted)]
        assert run.matrix_steps(segment=segment) == list(range(len(wanted)))
        stored = [float(run.matrices(step, segment=segment)["m"]) + step for step in range(len(wanted))]
        assert stored == wanted
        [curve] = curves(run.path, "loss", segment=segment)
        assert curve.values == wanted
        export(run, tmp_path / "table.csv", segment=segment)
        assert pd.read_csv(tmp_path / "table.csv")["value"].to_list() == wanted
    table = run.segments()
    assert table[["segment", "first_step", "last_step"]].to_numpy().tolist() == [[1, 0, 9], [2, 5, 8], [3, 7, 11]]
    assert run.last_step == 11
    assert "segments=3" in repr(run)
    assert overview(run.path).segments == 3
    assert list_runs(tmp_path)["segments"].to_list() == [3]
    for wrong in (0, 4, "first"):
        with pytest.raises(InputError, match="segment must be an integer from 1 to 3"):
            run.metrics(segment=wrong)


def test_a_segment_may_begin_before_the_one_before(tmp_path: Path) -> None:
    write(tmp_path / "run", range(10), 100.0)
    for first, value in ((5, 200.0), (0, 300.0), (1, 400.0)):
        with pytest.warns(UserWarning, match=f"Step {first} goes back"):
            write(tmp_path / "run", range(first, first + 3), value)
    run = Run.open(tmp_path / "run")
    assert run.series("loss", segment=1).to_list() == FIRST
    assert run.series("loss", segment=2).to_list() == SECOND[:8]
    assert run.series("loss", segment=3).to_list() == [300.0, 301.0, 302.0]
    assert run.series("loss").to_list() == [300.0, 401.0, 402.0, 403.0]
    assert float(run.matrices(2, segment=2)["m"]) == 100.0


def test_steps_go_back_in_one_process(tmp_path: Path) -> None:
    with Run.create(tmp_path / "run") as run:
        for step in range(5):
            run.log(step, {"loss": 1.0})
        run.log(3, {"test_loss": 7.0})  # late, but no loss of a later step
        run.log(4, {"loss": 2.0})  # gradient accumulation
        with pytest.warns(UserWarning, match="Step 0 goes back") as reported:
            run.log(0, {"loss": 3.0})
        for step in range(1, 3):
            run.log(step, {"loss": 3.0})
    assert len(reported) == 1
    assert reported[0].filename == __file__
    assert run.series("loss").to_list() == [3.0] * 3
    assert run.series("loss", segment=1).to_list() == [1.0, 1.0, 1.0, 1.0, 2.0]
    assert run.series("test_loss", segment=1).to_dict() == {3: 7.0}


def test_steps_after_a_checkpoint_are_repeated_while_they_are_the_same(tmp_path: Path) -> None:
    with Run.create(tmp_path / "run") as run:
        for step in range(10):
            run.log(step, {"loss": float(step), "nothing": float("nan"), "monitor.seconds": 1.0})
        run.save_checkpoint(6, {})
    with Run.open(tmp_path / "run", write=True) as run, warnings.catch_warnings():
        warnings.simplefilter("error")
        assert run.checkpoint() == (6, {})
        for step in range(6, 9):
            run.log(step, {"loss": float(step), "nothing": float("nan"), "monitor.seconds": 2.0})
        assert len(run.segments()) == 1
        assert run.last_step == 9  # nothing is lost if the process is killed now
        run.log(9, {"loss": -1.0})
        run.log(10, {"loss": -2.0})
    assert run.series("loss", segment=1).to_list() == [float(step) for step in range(10)]
    assert run.series("loss").to_list() == [*(float(step) for step in range(9)), -1.0, -2.0]


def test_checkpoints_of_an_old_segment_are_not_the_newest(tmp_path: Path) -> None:
    with Run.create(tmp_path / "run") as run:
        run.log(80, {"loss": 1.0})
        run.save_checkpoint(80, {"of": 1})
    with Run.open(tmp_path / "run", write=True) as run:
        with pytest.warns(UserWarning, match="Step 0 goes back"):
            run.log(0, {"loss": 1.0})
        run.save_checkpoint(20, {"of": 2})
    assert Run.open(tmp_path / "run").checkpoint() == (20, {"of": 2})
    assert Run.open(tmp_path / "run").checkpoint(segment=1) == (80, {"of": 1})


def _go_back(folder: Path, pipe: Any) -> None:
    warnings.simplefilter("ignore")
    with Run.open(folder, write=True) as run:
        for segment in range(1, 1000):
            for step in range(3):
                run.log(step, {f"x{number}": float(segment) for number in range(50)})
                pipe.send((segment, step))


def test_a_kill_loses_no_segment(tmp_path: Path) -> None:
    Run.create(tmp_path / "run").close()
    context = multiprocessing.get_context("fork")
    mine, theirs = context.Pipe()
    child = context.Process(target=_go_back, args=(tmp_path / "run", theirs))
    child.start()
    assert mine.poll(60)
    time.sleep(0.4)
    assert child.pid is not None
    os.kill(child.pid, signal.SIGKILL)
    child.join()
    segment, step = 1, 0
    while mine.poll():
        segment, step = mine.recv()
    assert segment > 2
    run = Run.open(tmp_path / "run")
    with closing(sqlite3.connect(tmp_path / "run" / "run.db")) as connection:
        assert connection.execute("PRAGMA integrity_check").fetchone() == ("ok",)
    count = len(run.segments())
    assert count in (segment, segment + 1)
    for number in range(1, count):
        table = run.metrics(segment=number)
        assert (len(table), set(table["value"])) == (150, {float(number)})
    assert run.metrics(segment=segment)["step"].max() >= step
