"""Runs on file systems without shared memory, where SQLite has no write-ahead log.

SQLite's own VFS "unix-dotfile" (locks are files) and "unix-none" (no locks) are without it on any file system.
"""

from __future__ import annotations

import sqlite3
import time
from contextlib import ExitStack, closing
from pathlib import Path
from typing import Any

import pytest

from featlearn.runs import Run, database, list_runs
from processes import running

CONNECT = database._connect


def without_wal(vfs: str) -> Any:
    """Return a function that opens databases with a VFS that has no shared memory."""

    def connect(path: Path, mode: str, **options: Any) -> sqlite3.Connection:
        return CONNECT(path, f"{mode}&vfs={vfs}", **options)

    return connect


@pytest.fixture
def dotfile(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(database, "_connect", without_wal("unix-dotfile"))


def test_the_rollback_journal_takes_the_place_of_the_log(tmp_path: Path, dotfile: None) -> None:
    with Run.create(tmp_path / "run", {"lr": 0.1}) as run:
        mode = run._database.writable().execute("PRAGMA journal_mode").fetchone()[0]
        assert mode == "delete"
        assert run._database.writable().execute("PRAGMA synchronous").fetchone() == (2,)  # full
        for step in range(20):
            run.log(step, {"loss": 1.0 / (step + 1)})
        run.save_note("kind", "shared")
        assert Run.open(tmp_path / "run").last_step == 19  # read meanwhile
        assert Run.open(tmp_path / "run").status == "running"
    assert not (tmp_path / "run" / "run.db-wal").exists()
    again = Run.open(tmp_path / "run")
    assert again.status == "finished"
    assert again.series("loss").to_list() == [1.0 / (step + 1) for step in range(20)]


WRITER = """
import sys
from pathlib import Path
sys.path[:0] = [sys.argv[1]]
import test_shared_file_systems as test
from featlearn.runs import Run, database
database._connect = test.without_wal(sys.argv[2])
root, number, forever = Path(sys.argv[3]), int(sys.argv[4]), sys.argv[5] == "forever"
for part in range(2):
    with Run.create(root / f"run-{number}-{part}", {"number": number, "part": part}) as run:
        step = 0
        while forever or step < 60:
            run.log(step, {"loss": number + step / 100})
            print(step, flush=True)
            step += 1
"""


def test_eight_processes_write_into_one_folder(tmp_path: Path, dotfile: None) -> None:
    root, seen = tmp_path / "runs", set()
    with ExitStack() as stack:
        arguments = [[WRITER, Path(__file__).parent, "unix-dotfile", root, number, "once"] for number in range(8)]
        started = [stack.enter_context(running(*given)) for given in arguments]
        end = time.monotonic() + 120
        while any(child.exitcode is None for child, _ in started):
            assert time.monotonic() < end
            if root.is_dir():
                seen |= set(list_runs(root)["status"])
            time.sleep(0.05)
        assert [(child.exitcode, (folder / "stderr").read_text()) for child, folder in started] == [(0, "")] * 8
    assert seen <= {"running", "finished"}
    assert len(list_runs(root)) == 16
    for number in range(8):
        for part in range(2):
            run = Run.open(root / f"run-{number}-{part}")
            assert (run.status, run.config) == ("finished", {"number": number, "part": part})
            assert run.series("loss").to_list() == [number + step / 100 for step in range(60)]


def test_a_killed_writer_loses_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(database, "_connect", without_wal("unix-none"))  # a lock of the other VFS would stay for ever
    for life in range(3):
        with running(WRITER, Path(__file__).parent, "unix-none", tmp_path, life, "forever") as (child, folder):
            end = time.monotonic() + 60
            while not (folder / "stdout").exists() or (folder / "stdout").read_text().count("\n") < 20 + 7 * life:
                assert time.monotonic() < end
                time.sleep(0.005)
            child.kill()
            child.join()
            reported = len((folder / "stdout").read_text().split("\n")[:-1])
        run = Run.open(tmp_path / f"run-{life}-0")
        assert run.status == "interrupted"
        losses = run.series("loss").to_list()
        assert len(losses) - reported in (0, 1)
        assert losses == [life + step / 100 for step in range(len(losses))]
        with Run.open(tmp_path / f"run-{life}-0", write=True) as again:
            again.log(len(losses), {"loss": 0.0})
        with closing(sqlite3.connect(tmp_path / f"run-{life}-0" / "run.db")) as connection:
            assert connection.execute("PRAGMA integrity_check").fetchone() == ("ok",)
