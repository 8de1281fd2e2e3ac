from __future__ import annotations

import json
import sqlite3
from contextlib import closing
from pathlib import Path

import pytest

from featlearn.errors import RunStoreError
from featlearn.runs import Run, list_runs
from featlearn.runs.database import safest_journal


def _old_run(folder: Path) -> Path:
    """A run as version 1 of the schema wrote it."""
    folder.mkdir()
    with closing(sqlite3.connect(folder / "run.db")) as connection, connection:
        connection.execute("CREATE TABLE meta (key TEXT PRIMARY KEY, value TEXT) WITHOUT ROWID")
        connection.execute(
            "CREATE TABLE metrics (step INTEGER NOT NULL, layer TEXT NOT NULL, name TEXT NOT NULL, value, "
            "PRIMARY KEY (step, layer, name)) WITHOUT ROWID"
        )
        meta = {
            "schema_version": "1",
            "name": "old",
            "config": json.dumps({"lr": 0.5}),
            "environment": json.dumps({"torch": "2.0"}),
            "started": "1700000000.5",
            "status": "finished",
            "message": "",
        }
        connection.executemany("INSERT INTO meta VALUES (?, ?)", meta.items())
        rows = [(0, "", "loss", 1.5), (0, "net.0", "nfc", None), (1, "", "loss", 0.5)]
        connection.executemany("INSERT INTO metrics VALUES (?, ?, ?, ?)", rows)
        connection.execute("PRAGMA user_version = 1")
    return folder


def _asked(folder: Path, query: str) -> list[tuple[object, ...]]:
    with closing(sqlite3.connect(folder / "run.db")) as connection:
        return connection.execute(query).fetchall()


def test_an_old_run_is_read_as_it_is(tmp_path: Path) -> None:
    folder = _old_run(tmp_path / "run")
    before = (folder / "run.db").read_bytes()
    run = Run.open(folder)
    assert (run.name, run.config, run.status, run.last_step, run.seconds) == ("old", {"lr": 0.5}, "finished", 1, None)
    assert run.started.year == 2023
    assert run.series("loss").to_list() == [1.5, 0.5]
    assert run.metrics("nfc")["value"].isna().all()
    assert run.texts().empty
    assert run.starts().empty
    assert list_runs(tmp_path)["name"].to_list() == ["old"]
    assert (folder / "run.db").read_bytes() == before
    assert [path.name for path in folder.iterdir()] == ["run.db"]


def test_an_old_run_is_brought_up_to_date_when_it_is_written(tmp_path: Path) -> None:
    folder = _old_run(tmp_path / "run")
    with Run.open(folder, write=True) as run:
        run.log(2, {"loss": 0.25, "reading": "lazy"})
    assert _asked(folder, "PRAGMA user_version") == [(4,)]
    assert _asked(folder, "SELECT value FROM meta WHERE key = 'schema_version'") == [("4",)]
    again = Run.open(folder)
    assert again.series("loss").to_list() == [1.5, 0.5, 0.25]
    assert again.texts()["value"].to_list() == ["lazy"]
    assert len(again.starts()) == 1
    with Run.open(folder, write=True) as run:
        assert len(run.starts()) == 2


def test_a_migration_that_fails_leaves_the_old_run(tmp_path: Path) -> None:
    folder = _old_run(tmp_path / "run")
    with closing(sqlite3.connect(folder / "run.db")) as connection:
        connection.execute("CREATE TABLE starts (odd)")  # in the way of the second statement
    with pytest.raises(RunStoreError, match="table starts already exists"):
        Run.open(folder, write=True)
    assert _asked(folder, "PRAGMA user_version") == [(1,)]
    assert _asked(folder, "SELECT count(*) FROM sqlite_master WHERE name = 'texts'") == [(0,)]
    with closing(sqlite3.connect(folder / "run.db")) as connection:
        connection.execute("DROP TABLE starts")
    with Run.open(folder, write=True) as run:
        assert run.series("loss").to_list() == [1.5, 0.5]


def test_new_runs_have_the_current_version(tmp_path: Path) -> None:
    Run.create(tmp_path / "run").close()
    assert _asked(tmp_path / "run", "PRAGMA user_version") == [(4,)]
    assert _asked(tmp_path / "run", "SELECT value FROM meta WHERE key = 'schema_version'") == [("4",)]


@pytest.mark.parametrize("write", [False, True])
def test_a_newer_run_is_refused_and_left_alone(tmp_path: Path, write: bool) -> None:
    Run.create(tmp_path / "run").close()
    with closing(sqlite3.connect(tmp_path / "run" / "run.db")) as connection:
        connection.execute("PRAGMA user_version = 5")
    before = (tmp_path / "run" / "run.db").read_bytes()
    with pytest.raises(RunStoreError, match=r"run\.db' has schema 5, but this featlearn reads up to 4"):
        Run.open(tmp_path / "run", write=write)
    assert (tmp_path / "run" / "run.db").read_bytes() == before


def test_the_journal_is_the_old_one_where_processes_share_no_memory(tmp_path: Path) -> None:
    # A layer of SQLite without locks and shared memory, as on some network file systems.
    with closing(sqlite3.connect(f"file:{tmp_path}/a.db?vfs=unix-none", uri=True, isolation_level=None)) as connection:
        assert safest_journal(connection) == "delete"
        assert connection.execute("PRAGMA synchronous").fetchone() == (2,)
    with closing(sqlite3.connect(tmp_path / "b.db", isolation_level=None)) as connection:
        assert safest_journal(connection) == "wal"
        assert connection.execute("PRAGMA synchronous").fetchone() == (1,)
