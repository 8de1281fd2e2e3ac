"""The list of a server that is started again: unchanged runs come from a file, and from nothing but a sound one."""

from __future__ import annotations

import shutil
import sqlite3
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from dashboard_runs import log_step, trained_run

from featlearn._utils.json import encode_json
from featlearn.dashboard import _row_cache
from featlearn.dashboard._run_index import Store
from featlearn.dashboard._run_list import RunList
from featlearn.runs import Run


@pytest.fixture
def root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Four runs, of which one is running."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(_row_cache, "FEWEST", 3)
    for name in ("first", "second", "third"):
        trained_run(tmp_path / "runs", name, steps=3).finish()
    run = trained_run(tmp_path / "runs", "running", steps=3)
    time.sleep(0.15)  # a file that has just been written is read again
    yield tmp_path / "runs"
    run.finish()


@pytest.fixture
def opened(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Names of the runs whose databases are opened."""
    result: list[str] = []
    connect = sqlite3.connect

    def noting(database: Any, *arguments: Any, **options: Any) -> Any:
        result.append(
            next(name for name in ("first", "second", "third", "running") if f"/runs/{name}/" in str(database))
        )
        return connect(database, *arguments, **options)

    monkeypatch.setattr(sqlite3, "connect", noting)
    return result


def rows_of(root: Path) -> list[dict[str, Any]]:
    return RunList(Store(root)).rows(seconds=None)["runs"]


def file_of(root: Path) -> Path:
    (file,) = (root.parent / "cache").glob("featlearn/dashboard/*")
    return file


def test_a_second_server_opens_only_what_is_written(root: Path, opened: list[str]) -> None:
    before = rows_of(root)
    assert set(opened) == {"first", "second", "third", "running"}
    opened.clear()
    again = RunList(Store(root))
    assert sorted(map(encode_json, again.rows(seconds=None)["runs"])) == sorted(map(encode_json, before))
    assert set(opened) == {"running"}
    opened.clear()
    again.rows(seconds=None)
    assert set(opened) <= {"running"}
    assert file_of(root).parent.stat().st_mode & 0o077 == 0


def test_changed_and_removed_runs_are_not_taken_from_the_file(root: Path, opened: list[str]) -> None:
    rows_of(root)
    with Run.open(root / "first", write=True) as run:
        log_step(run, 3)
        run.log(4, {"loss": 0.125})
    shutil.rmtree(root / "second")
    opened.clear()
    again = RunList(Store(root))
    rows = {row["name"]: row for row in again.rows(seconds=None)["runs"]}
    assert set(rows) == {"first", "third", "running"}
    assert rows["first"]["metrics"]["loss"][0] == 0.125
    assert set(opened) == {"first", "running"}
    with Run.open(root / "third", write=True) as run:
        run.log(9, {"loss": 0.25})
        rows = {row["name"]: row for row in again.rows(seconds=None)["runs"]}
        assert (rows["third"]["metrics"]["loss"][0], rows["third"]["last_step"]) == (0.25, 9)


DAMAGES: dict[str, Callable[[bytes], bytes]] = {
    "empty": lambda data: b"",
    "half": lambda data: data[: len(data) // 2],
    "another number": lambda data: data.replace(b"0.333333", b"0.444444"),
    "another version": lambda data: data.replace(b"featlearn ", b"featlearn 9", 1),
    "deep": lambda data: b"[" * 200_000,
    "no text": lambda data: b"\xff" * 1000,
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_file_is_ignored_and_replaced(root: Path, opened: list[str], damage: str) -> None:
    expected = sorted(map(repr, rows_of(root)))
    file = file_of(root)
    sound = file.read_bytes()
    file.write_bytes(DAMAGES[damage](sound))
    assert file.read_bytes() != sound
    opened.clear()
    assert sorted(map(repr, rows_of(root))) == expected
    assert {"first", "second", "third"} <= set(opened)
    assert file.read_bytes() == sound


def test_a_folder_that_cannot_be_written_and_few_runs_need_no_file(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (root.parent / "cache").write_text("not a folder")
    assert len(rows_of(root)) == 4
    (root.parent / "cache").unlink()
    monkeypatch.setattr(_row_cache, "FEWEST", 4)
    assert len(rows_of(root)) == 4
    assert not (root.parent / "cache").exists()
