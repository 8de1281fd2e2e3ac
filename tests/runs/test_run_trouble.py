from __future__ import annotations

import os
import shutil
import sqlite3
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import closing, suppress
from pathlib import Path

import pytest
import torch
from run_processes import heard, hold_lock, log_forever, process, use_without_rights, values_of, write_small_files_only

from featlearn.errors import RunStoreError
from featlearn.runs import Run, list_runs
from featlearn.runs import database as trouble


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A disk of 2 MB."""
    folder = tmp_path / "disk"
    folder.mkdir()
    mounting = ["mount", "-t", "tmpfs", "-o", "size=2m", "tmpfs", str(folder)]
    try:
        subprocess.run(mounting, check=True, capture_output=True)
    except (OSError, subprocess.CalledProcessError):
        pytest.skip("only root may mount a small disk")
    try:
        yield folder
    finally:
        subprocess.run(["umount", "-l", str(folder)], check=True)


def _fill(path: Path) -> None:
    with path.open("wb", buffering=0) as filler:
        try:
            while True:
                filler.write(b"x" * 4096)
        except OSError:
            pass


@pytest.mark.slow  # mounts a disk, as root
def test_a_full_disk_takes_nothing_that_was_there(small_disk: Path) -> None:
    run = Run.create(small_disk / "run")
    run.log(0, values_of(0))
    run.save_checkpoint(0, {"weight": torch.ones(10)})
    run.save_matrices(0, {"weight": torch.ones(10)})
    _fill(small_disk / "filler")
    last = 0
    with pytest.raises(RunStoreError, match=r"run\.db' cannot be used: its disk is full"):  # noqa: PT012
        for step in range(1, 10_000):
            run.log(step, values_of(step))
            last = step
    for write in (
        lambda: run.save_checkpoint(1, {"weight": torch.ones(100_000)}),
        lambda: run.save_matrices(1, {"weight": torch.ones(100_000)}),
    ):
        with pytest.raises(RunStoreError, match=r"1\.safetensors' cannot be written: .*[Nn]o space left"):
            write()
    with pytest.raises(RunStoreError, match=str(small_disk / "other")):
        Run.create(small_disk / "other")
    for reader in (run, Run.open(small_disk / "run")):
        assert reader.last_step == last
        assert len(reader.metrics()) == len(values_of(0)) * (last + 1)
        assert reader.status == "running"
        assert reader.matrices(0)["weight"].sum() == 10
        result = reader.checkpoint(0)
        assert result is not None
        assert result[1]["weight"].sum() == 10
        assert reader.checkpoint_steps() == [0]
    (small_disk / "filler").unlink()
    run.log(last + 1, values_of(last + 1))
    run.save_checkpoint(1, {"weight": torch.ones(100_000)})
    run.finish()
    assert Run.open(small_disk / "run").last_step == last + 1
    Run.create(small_disk / "other").close()


@pytest.mark.slow  # mounts a disk, as root
def test_a_full_disk_does_not_hide_the_error_of_a_training(small_disk: Path, warnings_logged: list[str]) -> None:
    def train() -> None:
        with Run.create(small_disk / "run") as run:
            _fill(small_disk / "filler")
            with pytest.raises(RunStoreError):  # noqa: PT012
                for step in range(10_000):
                    run.log(step, values_of(step))
            raise ZeroDivisionError("of the training")

    with pytest.raises(ZeroDivisionError, match="of the training"):
        train()
    assert "could not be marked as failed" in warnings_logged[0]
    assert Run.open(small_disk / "run").status == "interrupted"


def test_a_database_that_may_not_grow_keeps_what_it_has(tmp_path: Path) -> None:
    run = Run.create(tmp_path / "run")
    run.log(0, values_of(0))
    with run._database.reading() as connection:
        pages = connection.execute("PRAGMA page_count").fetchone()[0]
        connection.execute(f"PRAGMA max_page_count = {pages + 2}")
    with pytest.raises(RunStoreError, match="its disk is full"):
        run.log(1, {f"m{index}": index / 3 for index in range(5000)})
    assert len(run.metrics()) == len(values_of(0))  # nothing of what did not fit
    with run._database.reading() as connection:
        connection.execute("PRAGMA max_page_count = 1000000")
    run.log(1, {f"m{index}": index / 3 for index in range(5000)})
    run.finish()
    assert len(run.metrics()) == len(values_of(0)) + 5000


def test_a_transaction_that_is_interrupted_leaves_nothing_and_lets_the_next_one_through(tmp_path: Path) -> None:
    def interrupted() -> None:
        with run._database.transaction() as connection:
            connection.execute("INSERT INTO metrics VALUES (7, '', 'half', 1.0)")
            raise KeyboardInterrupt

    with Run.create(tmp_path / "run") as run:
        with pytest.raises(KeyboardInterrupt):
            interrupted()
        run.log(0, {"loss": 1.0})
        assert run.metrics()["name"].to_list() == ["loss"]


def test_files_that_may_not_grow_leave_the_earlier_ones(tmp_path: Path) -> None:
    with process(write_small_files_only, tmp_path / "run") as (_, pipe):
        for kind in ("checkpoints", "matrices"):
            reported = heard(pipe)
            assert f"{tmp_path / 'run' / kind / '1.safetensors'}' cannot be written" in reported
            assert "File too large" in reported
        assert heard(pipe) == [0, 2]
    assert not list((tmp_path / "run" / "checkpoints").glob(".*"))
    result = Run.open(tmp_path / "run").checkpoint(0)
    assert result is not None
    assert result[1]["weight"].sum() == 10


@pytest.mark.parametrize("ended", ["finished", "killed"])
def test_a_run_in_a_folder_that_may_not_be_written_is_read(ended: str) -> None:
    top = Path(tempfile.mkdtemp())  # pytest's own folders are closed to other users
    folder = top / "run"
    try:
        if ended == "finished":
            with Run.create(folder) as run:
                run.log(0, {"loss": 0.0})
        else:
            with process(log_forever, folder) as (child, pipe):
                while heard(pipe) < 3:
                    pass
                child.kill()
                child.join()
        losses = Run.open(folder).series("loss").to_list()
        with Run.open(folder, write=True) if ended == "finished" else Run.open(folder) as run:
            writer = run if run.writes else None
            if writer is None:
                (folder / "matrices").mkdir()
                with Run.create(top / "other") as other:
                    other.save_matrices(0, {"a": torch.ones(2)})
                shutil.copy(top / "other" / "matrices" / "0.safetensors", folder / "matrices")
            else:
                writer.save_matrices(0, {"a": torch.ones(2)})
        for path in (top, *top.rglob("*")):
            path.chmod(0o555 if path.is_dir() else 0o444)
        with process(use_without_rights, folder) as (_, pipe):
            assert heard(pipe) == ("finished" if ended == "finished" else "interrupted", losses, [1.0, 1.0])
            assert heard(pipe) == f"{str(folder / 'run.lock')!r} cannot be locked: Permission denied"
            assert heard(pipe) == f"{str(folder / 'inner')!r} cannot be written: Permission denied"
            assert "not open for writing" in heard(pipe)
    finally:
        for path in (top, *top.rglob("*")):
            path.chmod(0o755)
        shutil.rmtree(top)


def test_a_database_in_a_read_only_folder_is_read_even_if_it_expects_a_log() -> None:
    # A reader that was at work when the writer ended keeps the database in its mode, and takes the files away after.
    top = Path(tempfile.mkdtemp())
    folder = top / "run"
    try:
        with Run.create(folder) as run:
            run.log(0, {"loss": 0.5})
            run.save_matrices(0, {"a": torch.ones(2)})
        with closing(sqlite3.connect(folder / "run.db")) as connection:
            assert connection.execute("PRAGMA journal_mode = WAL").fetchone() == ("wal",)
        assert not (folder / "run.db-wal").exists()
        for path in (top, *top.rglob("*")):
            path.chmod(0o555 if path.is_dir() else 0o444)
        with process(use_without_rights, folder) as (_, pipe):
            assert heard(pipe) == ("finished", [0.5], [1.0, 1.0])
    finally:
        for path in (top, *top.rglob("*")):
            path.chmod(0o755)
        shutil.rmtree(top)


def test_a_locked_database_is_told_and_used_again_once_it_is_free(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(trouble, "BUSY_SECONDS", 0.2)
    run = Run.create(tmp_path / "run")
    run.log(0, {"loss": 1.0})
    with process(hold_lock, tmp_path / "run" / "run.db") as (_, pipe):
        heard(pipe)
        with pytest.raises(RunStoreError, match=r"run\.db' cannot be used: another process has locked it"):
            run.log(1, {"loss": 2.0})
        with pytest.raises(RunStoreError, match="another process has locked it"):
            run.finish()
        assert run.series("loss").to_list() == [1.0]
        assert Run.open(tmp_path / "run").last_step == 0
        pipe.send("let go")
        heard(pipe)
        run.log(1, {"loss": 2.0})
        run.finish()
    assert Run.open(tmp_path / "run").series("loss").to_list() == [1.0, 2.0]


def test_a_lock_of_a_moment_is_waited_for(tmp_path: Path) -> None:
    with Run.create(tmp_path / "run") as run, process(hold_lock, tmp_path / "run" / "run.db") as (_, pipe):
        heard(pipe)
        pipe.send("let go")
        run.log(0, {"loss": 1.0})
        assert run.last_step == 0


@pytest.mark.parametrize("write", [False, True])
def test_what_is_no_database_is_named(tmp_path: Path, write: bool) -> None:
    folder = tmp_path / "run"
    folder.mkdir()
    (folder / "run.db").write_text("these are notes, and long enough to be taken for the head of a database. " * 20)
    with pytest.raises(RunStoreError, match=rf"{folder / 'run.db'}' cannot be used: it is not a database"):
        Run.open(folder, write=write)
    (folder / "run.db").write_bytes(b"")
    with pytest.raises(RunStoreError, match="is not a run of featlearn"):
        Run.open(folder, write=write)
    with closing(sqlite3.connect(folder / "run.db")) as connection:
        connection.execute("CREATE TABLE metrics (x)")
        connection.execute("PRAGMA user_version = 2")
    with pytest.raises(RunStoreError, match="is not a run of featlearn"):
        Run.open(folder, write=write)
    assert list_runs(tmp_path)["status"].to_list() == ["unreadable"]


def test_a_database_cut_short_is_told_and_never_read_wrongly(tmp_path: Path) -> None:
    with Run.create(tmp_path / "run") as run:
        for step in range(200):
            run.log(step, values_of(step))
    path = tmp_path / "run" / "run.db"
    whole = path.read_bytes()
    right = run.metrics()
    for length in (10, 100, 4096, 5000, len(whole) // 2):
        path.write_bytes(whole[:length])
        with pytest.raises(RunStoreError, match=r"run\.db'"):
            Run.open(tmp_path / "run").metrics()
    for length in (len(whole) - 4096, len(whole) - 1):  # what was cut off may not be needed
        path.write_bytes(whole[:length])
        with suppress(RunStoreError):
            assert Run.open(tmp_path / "run").metrics().equals(right)
    path.write_bytes(whole)
    assert len(Run.open(tmp_path / "run").metrics()) == 200 * len(values_of(0))


def test_a_run_without_its_settings_is_named(tmp_path: Path) -> None:
    Run.create(tmp_path / "run").close()
    with closing(sqlite3.connect(tmp_path / "run" / "run.db")) as connection, connection:
        connection.execute("UPDATE meta SET value = 'no json' WHERE key = 'config'")
    for write in (False, True, True):  # the lock is given back
        with pytest.raises(RunStoreError, match="lacks metadata of a run"):
            Run.open(tmp_path / "run", write=write)


def test_a_database_that_is_deleted_under_a_reader_is_told(tmp_path: Path) -> None:
    Run.create(tmp_path / "run").close()
    run = Run.open(tmp_path / "run")
    os.unlink(tmp_path / "run" / "run.db")
    with pytest.raises(RunStoreError, match="No run at"):
        run.metrics()
    assert not (tmp_path / "run" / "run.db").exists()
