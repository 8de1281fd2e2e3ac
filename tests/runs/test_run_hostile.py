"""Files beside a run that are not its own, rows that no run has written, and names that collide."""

from __future__ import annotations

import os
import shutil
import signal
import sqlite3
from contextlib import closing
from pathlib import Path

import pytest
import torch

from featlearn.errors import RunStoreError
from featlearn.runs import Run, compare, compare_configs, list_runs, overview, remove
from featlearn.runs.lock import being_written

DEEP = '{"a":' * 200 + "1" + "}" * 200
DAMAGES = {
    "deep": f"UPDATE meta SET value = '{DEEP}' WHERE key = 'config'",
    "deeper": "UPDATE meta SET value = '" + "[" * 200_000 + "' WHERE key = 'environment'",
    "list": "UPDATE meta SET value = '[]' WHERE key = 'config'",
    "blob-name": "UPDATE meta SET value = x'00ff' WHERE key = 'name'",
    "text-step": "UPDATE metrics SET step = 'soon' WHERE step = 2",
    "real-step": "UPDATE metrics SET step = 2.5 WHERE step = 2",
    "inf-started": "UPDATE meta SET value = 'inf' WHERE key = 'started'",
    "far-started": "UPDATE meta SET value = '1e11' WHERE key = 'started'",
    "text-began": "UPDATE starts SET began = 'then'",
}
INNER = {
    "blob-layer": "UPDATE metrics SET layer = x'00ff' WHERE layer = 'net' AND step = 1",
    "blob-text": "UPDATE texts SET layer = x'00ff' WHERE step = 1",
    "inner-step": "UPDATE metrics SET step = 0.5 WHERE step = 1",
}


def _damaged(root: Path) -> None:
    with Run.create(root / "good", {"lr": 0.1}) as run:
        for step in range(3):
            run.log_layers(step, {None: {"loss": 1.0}, "net": {"nfc": 0.5, "reading": "lazy"}})
    for name, statement in (DAMAGES | INNER).items():
        shutil.copytree(root / "good", root / name)
        with closing(sqlite3.connect(root / name / "run.db")) as connection:
            connection.execute(statement)
            connection.commit()


def test_one_damaged_run_does_not_end_the_list(tmp_path: Path) -> None:
    _damaged(tmp_path)
    table = list_runs(tmp_path).set_index(list_runs(tmp_path)["path"].map(os.path.basename))
    assert set(table.index) == {"good", *DAMAGES, *INNER}
    assert table.loc["good", "status"] == "finished"
    assert {name for name, row in table.iterrows() if row["status"] == "unreadable"} == set(DAMAGES)
    assert table.loc[list(DAMAGES), "message"].str.contains("run.db|damaged").all()
    for name in DAMAGES.keys() - {"text-began"}:
        with pytest.raises(RunStoreError, match="The database"):
            overview.overview(tmp_path / name)
    for name in INNER:
        with pytest.raises(RunStoreError, match="damaged"):
            (Run.open(tmp_path / name).metrics if name != "blob-text" else Run.open(tmp_path / name).texts)()
        looks = (
            lambda at: overview.quantities(at),
            lambda at: overview.curves(at, "nfc"),
            lambda at: overview.words(at, ("reading",)),
        )
        refused = 0
        for look in looks:
            try:
                look(tmp_path / name)
            except RunStoreError:
                refused += 1
        assert refused >= 1, name


def test_removing_spares_what_only_looks_like_the_runs(tmp_path: Path) -> None:
    outside = tmp_path / "outside"
    outside.mkdir()
    (outside / "0.safetensors").write_text("mine")
    (outside / ".0.safetensors.0123456789ab").write_text("mine")
    with Run.create(tmp_path / "run") as run:
        run.save_checkpoint(1, {"a": 1})
        run.save_matrices(1, {"x": torch.zeros(1)})
    folder = tmp_path / "run"
    mine = [
        folder / "checkpoints" / "best_model.safetensors",
        folder / "checkpoints" / ".tmp-of-mine",
        folder / "checkpoints" / ".notes.0123456789ab",
        folder / ".notes.0123456789ab",
    ]
    for file in mine:
        file.write_text("mine")
    (folder / "checkpoints" / "7.safetensors").mkdir()
    (folder / "initial").symlink_to(outside, target_is_directory=True)
    (folder / "matrices" / "2.safetensors").symlink_to(outside / "0.safetensors")
    Run.open(folder, write=True).close()
    remove(folder)
    assert all(file.read_text() == "mine" for file in mine)
    assert sorted(os.listdir(outside)) == [".0.safetensors.0123456789ab", "0.safetensors"]
    assert sorted(os.listdir(folder)) == [".notes.0123456789ab", "checkpoints", "initial"]
    assert not (folder / "checkpoints" / "1.safetensors").exists()


def test_names_that_collide_and_a_lock_that_is_a_pipe(tmp_path: Path) -> None:
    for folder, name, lr in (("a", "dup", 1), ("b", "dup", 2), ("c", str(tmp_path / "a"), 3)):
        with Run.create(tmp_path / folder, {"lr": lr}, name=name) as run:
            run.log(0, {"loss": float(lr)})
    folders = [tmp_path / folder for folder in "abc"]
    assert compare_configs(folders).loc["lr"].to_dict() == {str(f): lr for lr, f in enumerate(folders, 1)}
    assert compare(folders).loc[0].to_list() == [1.0, 2.0, 3.0]

    (tmp_path / "a" / "run.lock").unlink(missing_ok=True)
    os.mkfifo(tmp_path / "a" / "run.lock")

    def too_long(*_: object) -> None:
        raise AssertionError("it waits for the other end of the pipe")

    before = signal.signal(signal.SIGALRM, too_long)
    signal.alarm(5)
    try:
        assert not being_written(tmp_path / "a")
        with pytest.raises(RunStoreError, match="must be a regular file"):
            Run.open(tmp_path / "a", write=True)
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)
