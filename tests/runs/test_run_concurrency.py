from __future__ import annotations

import os
import random
import signal
import sqlite3
import time
from contextlib import closing
from pathlib import Path

import pytest
from run_processes import (
    VALUES,
    all_heard,
    die_with_a_journal,
    fork_a_worker,
    heard,
    hold_a_moment,
    log_and_finish,
    log_forever,
    process,
    save_checkpoints_forever,
    values_of,
)

from featlearn.errors import RunStoreError
from featlearn.runs import Run, list_runs, remove


def test_a_run_is_read_while_it_is_written(tmp_path: Path) -> None:
    with process(log_forever, tmp_path / "run") as (child, pipe):
        reported = heard(pipe)
        reader = Run.open(tmp_path / "run")
        seen: list[int] = []
        end = time.monotonic() + 20
        while len(seen) < 10 or seen[-1] == seen[0]:
            assert time.monotonic() < end
            while pipe.poll():
                reported = pipe.recv()
            table = reader.metrics()
            assert (table.groupby("step").size() == VALUES).all()  # a step is there whole or not at all
            assert reader.status == "running"
            seen.append(table["step"].iloc[-1])
            assert seen[-1] >= reported
        assert seen == sorted(seen)
        child.kill()
        child.join()
        assert reader.status == "interrupted"


def test_several_runs_are_written_at_once_under_one_root(tmp_path: Path) -> None:
    with (
        process(log_and_finish, tmp_path / "a", 60) as (_, a),
        process(log_and_finish, tmp_path / "b", 60) as (_, b),
        process(log_and_finish, tmp_path / "deeper" / "c", 60) as (_, c),
    ):
        assert [heard(pipe) for pipe in (a, b, c)] == ["done"] * 3
    table = list_runs(tmp_path).sort_values("name")
    assert table["name"].to_list() == ["a", "b", "c"]
    assert table["status"].to_list() == ["finished"] * 3
    assert table["last_step"].to_list() == [59] * 3
    for path in table["path"]:
        assert len(Run.open(path).metrics()) == 60 * VALUES


def test_a_second_writer_is_refused_and_told_who_writes(tmp_path: Path) -> None:
    with process(log_forever, tmp_path / "run") as (child, pipe):
        heard(pipe)
        for work in (lambda: Run.open(tmp_path / "run", write=True), lambda: remove(tmp_path / "run")):
            with pytest.raises(RunStoreError, match=f"is being written by process {child.pid}"):
                work()
        before = Run.open(tmp_path / "run").last_step
        assert before is not None
        while heard(pipe) <= before:  # the first writer is not disturbed
            pass
        child.kill()
        child.join()
    with Run.open(tmp_path / "run", write=True) as run:
        assert run.last_step is not None
        run.log(run.last_step + 1, values_of(0))


def test_a_reader_who_asks_for_the_status_does_not_keep_a_writer_out(tmp_path: Path) -> None:
    Run.create(tmp_path / "run").close()
    with process(hold_a_moment, tmp_path / "run" / "run.lock", 0.1) as (_, pipe):
        heard(pipe)
        Run.open(tmp_path / "run", write=True).close()
        assert pipe.poll()  # it had to wait


def test_nothing_that_log_returned_from_is_lost_to_a_kill(tmp_path: Path) -> None:
    chance = random.Random(0)
    folder = tmp_path / "run"
    for round_ in range(8):
        with process(log_forever, folder) as (child, pipe):
            first = heard(pipe)
            time.sleep(chance.uniform(0, 0.15))
            child.kill()
            child.join()
            reported = [first, *all_heard(pipe)]
        run = Run.open(folder)
        assert run.status == "interrupted"
        assert run.last_step in (reported[-1], reported[-1] + 1)  # the last may have been kept and not yet told
        assert run.series("loss").to_list() == [float(step) for step in range(run.last_step + 1)]
        assert (run.metrics().groupby("step").size() == VALUES).all()
        with closing(sqlite3.connect(folder / "run.db")) as connection:
            assert connection.execute("PRAGMA integrity_check").fetchall() == [("ok",)]
        assert len(run.starts()) == round_ + 1
    with Run.open(folder, write=True) as run:
        run.log(10**6, {"loss": 0.0})
    assert run.status == "finished"


def test_a_run_killed_while_it_is_made_is_there_or_not(tmp_path: Path) -> None:
    chance = random.Random(1)
    for index in range(12):
        folder = tmp_path / str(index)
        with process(log_forever, folder) as (child, _):
            end = time.monotonic() + 30
            while not folder.exists():  # it has begun
                assert time.monotonic() < end
            time.sleep(chance.uniform(0, 0.02))
            child.kill()
            child.join()
        if (folder / "run.db").exists():
            assert Run.open(folder).status == "interrupted"
            run = Run.open(folder, write=True)
        else:
            run = Run.create(folder)
        with run:
            run.log(run.next_step, {"loss": 0.0})
        assert not list(folder.glob(".*"))
    assert set(list_runs(tmp_path)["status"]) == {"finished"}
    assert len(list_runs(tmp_path)) == 12


def test_a_kill_in_the_middle_of_a_checkpoint_leaves_the_one_before(tmp_path: Path) -> None:
    folder = tmp_path / "run" / "checkpoints"
    with process(save_checkpoints_forever, tmp_path / "run", 10_000_000) as (child, pipe):
        assert heard(pipe) == 0
        end = time.monotonic() + 30
        while not (drafts := list(folder.glob(".*"))) or not _size(drafts[0]):
            assert time.monotonic() < end
        child.kill()
        child.join()
        reported = max([0, *all_heard(pipe)])
    assert list(folder.glob(".*")), "the kill came too late to leave anything"
    result = Run.open(tmp_path / "run").checkpoint()
    assert result is not None
    assert result[0] >= reported
    assert (result[1]["weight"] == result[0]).all()
    with Run.open(tmp_path / "run", write=True) as run:
        assert not list(folder.glob(".*"))
        again = run.checkpoint()
        assert again is not None
        assert again[0] == result[0]


def _size(path: Path) -> int:
    try:
        return path.stat().st_size
    except FileNotFoundError:
        return 0


def test_a_worker_forked_from_the_writer_neither_writes_nor_keeps_a_dead_run_alive(tmp_path: Path) -> None:
    with process(fork_a_worker, tmp_path / "run") as (child, pipe):
        worker, reported = heard(pipe)
        try:
            assert f"can be written by process {child.pid} only, not by its forks" in reported
            assert reported.endswith("it reads 1")
            assert Run.open(tmp_path / "run").status == "running"
            child.kill()
            child.join()
            os.kill(worker, 0)  # it lives on
            assert Run.open(tmp_path / "run").status == "interrupted"
            with Run.open(tmp_path / "run", write=True) as run:
                assert run.last_step == 0
        finally:
            os.kill(worker, signal.SIGKILL)


def test_a_reader_takes_back_what_a_writer_without_a_log_left_half_done(tmp_path: Path) -> None:
    with Run.create(tmp_path / "run") as run:
        for step in range(300):
            run.log(step, values_of(step))
    with process(die_with_a_journal, tmp_path / "run" / "run.db") as (child, pipe):
        heard(pipe)
        child.kill()
        child.join()
    assert (tmp_path / "run" / "run.db-journal").stat().st_size > 0
    again = Run.open(tmp_path / "run")
    assert again.series("loss").to_list() == [float(step) for step in range(300)]
    assert again.last_step == 299
