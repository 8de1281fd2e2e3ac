from __future__ import annotations

import gc
import os
import sqlite3
import subprocess
import threading
import time
from contextlib import closing
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from featlearn.errors import InputError, RunStoreError
from featlearn.runs import Run


def test_settings_and_environment_are_kept(tmp_path: Path) -> None:
    config = {"lr": 0.1, "net": {"widths": (8, 4), "bias": True}, "data": tmp_path, "n": np.int64(3), "none": None}
    with Run.create(tmp_path / "first", config, seed=17) as run:
        pass
    again = Run.open(tmp_path / "first")
    for one in (run, again):
        assert one.path == tmp_path / "first"
        assert one.name == "first"
        assert one.config == {
            "lr": 0.1,
            "net": {"widths": [8, 4], "bias": True},
            "data": str(tmp_path),
            "n": 3,
            "none": None,
        }
        assert one.environment["seed"] == 17
        assert one.environment["torch"] == torch.__version__
        assert one.environment["threads"] == torch.get_num_threads()
        assert {"python", "numpy", "featlearn", "platform", "command", "git"} <= set(one.environment)
        assert os.uname().nodename not in str(one.environment["platform"]).split()
        assert abs(one.started - datetime.now(UTC)) < timedelta(minutes=5)
    assert Run.create(tmp_path / "second", name="a name").name == "a name"


def test_the_commit_and_whether_files_differ_from_it_are_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("GIT_CEILING_DIRECTORIES", str(tmp_path.parent))
    with Run.create("none") as run:
        assert run.environment["git"] is None

    def git(*words: str) -> str:
        who = ("-c", "user.name=n", "-c", "user.email=e@e")
        return subprocess.run(["git", *who, *words], check=True, capture_output=True, text=True).stdout.strip()

    git("init")
    (tmp_path / "code.py").write_text("1")
    git("add", "code.py")
    git("commit", "-m", "first")
    with Run.create("clean") as run:
        assert run.environment["git"] == {"commit": git("rev-parse", "HEAD"), "dirty": False}
    (tmp_path / "code.py").write_text("2")
    with Run.create("dirty") as run:
        assert run.environment["git"]["dirty"] is True


@pytest.mark.parametrize(
    ("config", "reported"),
    [
        ({"a": {"b": [1, object()]}}, r"config\.a\.b\.1 must be a number"),
        ({"a": torch.zeros(2)}, r"config\.a must be"),
        ({3: 1}, r"a name in config must be a non-empty string, got 3"),
        ({"a": "\ud800"}, r"config\.a must be text"),
        ([1], r"config must be a mapping"),
    ],
)
def test_settings_that_json_cannot_hold_are_refused_by_name(tmp_path: Path, config: Any, reported: str) -> None:
    with pytest.raises(InputError, match=reported):
        Run.create(tmp_path / "run", config)
    assert not (tmp_path / "run").exists()


def test_settings_that_contain_themselves_are_refused(tmp_path: Path) -> None:
    config: dict[str, Any] = {}
    config["again"] = config
    with pytest.raises(InputError, match="contain itself"):
        Run.create(tmp_path / "run", config)


def test_how_a_run_ends_is_told(tmp_path: Path) -> None:
    with Run.create(tmp_path / "good") as run:
        assert run.status == "running"
        assert Run.open(tmp_path / "good").status == "running"
    assert run.status == Run.open(tmp_path / "good").status == "finished"

    def fail() -> None:
        with Run.create(tmp_path / "bad"):
            raise ValueError("the loss is \ud800 NaN")

    with pytest.raises(ValueError, match="the loss"):
        fail()
    bad = Run.open(tmp_path / "bad")
    assert (bad.status, bad.message) == ("failed", "ValueError: the loss is ? NaN")

    left = Run.create(tmp_path / "left")
    left.close()
    left.close()
    assert left.status == Run.open(tmp_path / "left").status == "interrupted"

    with Run.create(tmp_path / "said") as said:
        said.finish("failed", "by hand")
    assert (said.status, said.message) == ("failed", "by hand")
    with Run.create(tmp_path / "odd") as odd, pytest.raises(InputError, match="'finished' or 'failed'"):
        odd.finish("running")  # type: ignore[arg-type]


def test_a_run_is_taken_up_again_and_each_start_is_counted(tmp_path: Path) -> None:
    with Run.create(tmp_path / "run", seed=5) as run:
        run.log(0, {"loss": 1.0})
        run.save_checkpoint(0, {"step": 0})
    with pytest.raises(RuntimeError), Run.open(tmp_path / "run", write=True) as run:  # noqa: PT012
        assert run.status == "running"
        assert run.message == ""
        result = run.checkpoint()
        assert result is not None
        assert result[0] == 0
        run.log(1, {"loss": 0.5})
        raise RuntimeError("again")
    with Run.open(tmp_path / "run", write=True) as run:
        assert run.message == ""
        starts = run.starts()
    assert starts["pid"].to_list() == [os.getpid()] * 3
    assert starts["checkpoint"].fillna(-1).to_list() == [-1, 0, -1]
    assert starts["environment"].iloc[2]["seed"] == 5
    assert (starts["process_started"] < starts["began"]).all()
    assert (starts["began"] <= starts["seen"]).all()
    assert run.series("loss").to_list() == [1.0, 0.5]
    assert run.seconds is not None
    assert 0 <= run.seconds < 60


def test_seconds_run_up_to_the_last_values(tmp_path: Path) -> None:
    run = Run.create(tmp_path / "run")
    time.sleep(0.05)
    run.log(0, {"loss": 1.0})
    seconds = run.seconds
    assert seconds is not None
    assert seconds >= 0.05
    time.sleep(0.05)
    run.close()
    assert run.seconds == seconds


def test_a_forgotten_run_lets_the_next_writer_in(tmp_path: Path) -> None:
    Run.create(tmp_path / "run").log(0, {"loss": 1.0})
    gc.collect()
    with Run.open(tmp_path / "run", write=True) as run:
        assert run.last_step == 0


def test_one_writer_at_a_time_even_in_one_process(tmp_path: Path) -> None:
    with Run.create(tmp_path / "run") as run:
        for again in (lambda: Run.open(tmp_path / "run", write=True), lambda: Run.create(tmp_path / "run")):
            with pytest.raises(RunStoreError, match=f"being written by process {os.getpid()}"):
                again()
        run.log(0, {"loss": 1.0})
    with pytest.raises(RunStoreError, match="already holds a run"):
        Run.create(tmp_path / "run")


def test_threads_of_the_writer_may_log_at_once(tmp_path: Path) -> None:
    with Run.create(tmp_path / "run") as run:

        def work(name: str) -> None:
            for step in range(50):
                run.log(step, {name: step})

        threads = [threading.Thread(target=work, args=(f"m{index}",)) for index in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert len(run.metrics()) == 200


def test_a_finished_run_is_one_plain_file(tmp_path: Path) -> None:
    with Run.create(tmp_path / "run") as run:
        run.log(0, {"loss": 1.0})
        assert (tmp_path / "run" / "run.db-wal").exists()
    assert sorted(path.name for path in (tmp_path / "run").iterdir()) == ["run.db", "run.lock"]
    with closing(sqlite3.connect(tmp_path / "run" / "run.db")) as connection:
        assert connection.execute("PRAGMA journal_mode").fetchone() == ("delete",)


def test_folders_that_are_none(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    for make in (Run.create, Run.open):
        with pytest.raises(InputError, match="is a file"):
            make(tmp_path / "file")
        for odd in ("", None, 3, "a\0b"):
            with pytest.raises(InputError, match="run must be the path of a folder"):
                make(odd)  # type: ignore[arg-type]
    with pytest.raises(RunStoreError, match=r"cannot be written: Not a directory"):
        Run.create(tmp_path / "file" / "run")
    for write in (False, True):
        with pytest.raises(RunStoreError, match=r"No run at .*(there is no file 'run\.db'|the folder does not exist)"):
            Run.open(tmp_path / "nowhere", write=write)
    assert not (tmp_path / "nowhere").exists()
    with pytest.raises(InputError, match="seed must be an integer"):
        Run.create(tmp_path / "run", seed=0.5)  # type: ignore[arg-type]
    with pytest.raises(InputError, match="name must be a non-empty string"):
        Run.create(tmp_path / "run", name="")


def test_odd_folder_names_work(tmp_path: Path) -> None:
    for name in ("a b", "50%?x=1#y", "ü λ", "quote'\""):
        with Run.create(tmp_path / name) as run:
            run.log(0, {"loss": 1.0})
        assert Run.open(tmp_path / name).series("loss").to_list() == [1.0]
        assert run.name == name


def test_what_a_deleted_database_left_does_not_reach_the_new_one(tmp_path: Path) -> None:
    old = Run.create(tmp_path / "run")
    old.log(0, {"old": 1.0})
    left = (tmp_path / "run" / "run.db-wal").read_bytes()
    old.close()
    (tmp_path / "run" / "run.db").unlink()
    (tmp_path / "run" / "run.db-wal").write_bytes(left)
    with Run.create(tmp_path / "run") as run:
        run.log(0, {"new": 1.0})
        assert run.metrics()["name"].to_list() == ["new"]
