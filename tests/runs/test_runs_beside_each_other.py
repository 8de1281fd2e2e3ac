from __future__ import annotations

import math
import sys
from multiprocessing.connection import Connection
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import torch
from run_processes import heard, process

from featlearn import runs
from featlearn.errors import InputError, RunStoreError
from featlearn.runs import Run


@pytest.fixture
def root(tmp_path: Path) -> Path:
    with Run.create(tmp_path / "a", {"lr": 0.1, "net": {"width": 8, "depth": 2}, "steps": 10}) as run:
        run.log(0, {"loss": 1.0, "accuracy": 0.5, "word": "lazy"})
        run.log(10, {"loss": 0.1})
        run.log(0, {"nfc": 0.25}, layer="net.0")
    with Run.create(tmp_path / "deep" / "b", {"lr": 0.2, "net": {"width": 8}, "steps": 10.0}) as run:
        run.log(0, {"loss": 2.0})
        run.log(5, {"loss": math.nan})
    Run.create(tmp_path / "c", name="sea").close()
    return tmp_path


def test_runs_are_listed_with_their_settings(root: Path) -> None:
    (root / "bad").mkdir()
    (root / "bad" / "run.db").write_text("rubbish" * 100)
    (root / ".hidden").mkdir()
    (root / ".hidden" / "run.db").write_text("")
    table = runs.list(root)
    assert table["name"].to_list() == ["a", "b", "sea", "bad"]
    assert table["status"].to_list() == ["finished", "finished", "interrupted", "unreadable"]
    assert "not a database" in table["message"].iloc[3]
    assert table["last_step"].fillna(-1).to_list() == [10, 5, -1, -1]
    assert table["config.lr"].to_list()[:2] == [0.1, 0.2]
    assert table["config.net.depth"].to_list()[0] == 2
    assert table["path"].to_list()[1] == str(root / "deep" / "b")
    assert table["started"].is_monotonic_increasing or table["started"].iloc[:3].is_monotonic_increasing
    assert (table["seconds"].iloc[:3] >= 0).all()


def test_an_empty_folder_lists_no_runs_and_a_run_lists_itself(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (root / "empty").mkdir()
    empty = runs.list(root / "empty")
    assert len(empty) == 0
    assert {"name", "status", "started", "last_step", "seconds"} <= set(empty.columns)
    monkeypatch.chdir(root / "a")
    assert runs.list()["name"].to_list() == ["a"]
    with pytest.raises(InputError, match="root must be an existing folder"):
        runs.list(root / "nowhere")


def test_numbers_of_runs_stand_side_by_side(root: Path) -> None:
    table = runs.compare([root / "a", Run.open(root / "deep" / "b")], "loss")
    assert table.index.to_list() == [0, 5, 10]
    assert table.columns.to_list() == [("a", "loss"), ("b", "loss")]
    assert table["a", "loss"].fillna(-1).to_list() == [1.0, -1, 0.1]
    assert table["b", "loss"].fillna(-1).to_list() == [2.0, -1, -1]
    everything = runs.compare([root / "a", root / "deep" / "b"])
    assert everything.columns.to_list() == [("a", "accuracy"), ("a", "loss"), ("b", "accuracy"), ("b", "loss")]
    assert everything["b", "accuracy"].isna().all()
    assert runs.compare(root / "a", layer="net.0")["a", "nfc"].to_list() == [0.25]
    with pytest.raises(InputError, match="No run has metrics 'los'; the runs have accuracy, loss"):
        runs.compare([root / "a", root / "deep" / "b"], ["loss", "los"])
    with pytest.raises(InputError, match="at least one run"):
        runs.compare([])
    assert runs.compare(root / "c").shape == (0, 0)


def test_runs_of_one_name_are_told_apart(root: Path) -> None:
    with Run.create(root / "deep" / "a") as run:
        run.log(0, {"loss": 3.0})
    table = runs.compare([root / "a", root / "deep" / "a", root / "a"], "loss")
    assert table.columns.to_list() == [(str(root / "a"), "loss"), (str(root / "deep" / "a"), "loss")]


def test_settings_that_differ_are_shown(root: Path) -> None:
    table = runs.compare_configs([root / "a", root / "deep" / "b"])
    assert table.index.to_list() == ["lr", "net.depth"]
    assert table.loc["lr"].to_list() == [0.1, 0.2]
    assert table.loc["net.depth", "a"] == 2
    assert pd.isna(table.loc["net.depth", "b"])
    assert runs.compare_configs([root / "a"]).empty


@pytest.mark.parametrize("suffix", [".csv", ".parquet"])
def test_an_exported_run_is_read_back_to_the_bit(tmp_path: Path, suffix: str) -> None:
    numbers = [0.1, 1 / 3, 5e-324, -0.0, math.inf, -math.inf, math.nan, 1e300]
    with Run.create(tmp_path / "run") as run:
        for step, number in enumerate(numbers):
            run.log(step, {"x": number})
        run.log(0, {"y": 2.0}, layer='net."0",\n')
    target = tmp_path / "new" / f"table{suffix}"
    runs.export(tmp_path / "run", target)
    if suffix == ".csv":
        back = pd.read_csv(target, converters={"value": float})
    else:
        back = pd.read_parquet(target)
    assert back.columns.to_list() == ["run", "step", "layer", "name", "value"]
    mine = back[back["name"] == "x"]
    assert mine["value"].to_numpy().tobytes() == np.array(numbers).tobytes()
    assert mine["layer"].isna().all()
    assert set(back["run"]) == {"run"}
    assert back[back["name"] == "y"]["layer"].to_list() == ['net."0",\n']
    runs.export(run, target, names="y", layers="net.*")
    assert len(pd.read_csv(target) if suffix == ".csv" else pd.read_parquet(target)) == 1
    assert [path.name for path in target.parent.iterdir()] == [target.name]


def test_exports_that_cannot_be_made(root: Path) -> None:
    with pytest.raises(InputError, match=r"ends in \.csv or \.parquet"):
        runs.export(root / "a", root / "table.xlsx")
    (root / "folder.csv").mkdir()
    with pytest.raises(RunStoreError, match=r"folder\.csv' cannot be written: Is a directory"):
        runs.export(root / "a", root / "folder.csv")


def _export_without_pyarrow(pipe: Connection, run: Path, target: Path) -> None:
    sys.modules["pyarrow"] = None  # type: ignore[assignment]
    try:
        runs.export(run, target)
        pipe.send("it was written")
    except InputError as error:
        pipe.send(str(error))


def test_parquet_without_its_package_is_told(root: Path) -> None:
    with process(_export_without_pyarrow, root / "a", root / "table.parquet") as (_, pipe):
        assert "requires pyarrow" in heard(pipe)
    assert not (root / "table.parquet").exists()


def test_removing_a_run_takes_its_files_and_no_others(root: Path) -> None:
    with Run.open(root / "a", write=True) as run:
        run.save_checkpoint(11, {})
        run.save_matrices(1, {"x": torch.zeros(1)})
        with pytest.raises(RunStoreError, match="is being written"):
            runs.remove(root / "a")
    runs.remove(root / "a")
    assert not (root / "a").exists()
    (root / "deep" / "b" / "thesis.tex").write_text("mine")
    runs.remove(root / "deep" / "b")
    assert [path.name for path in (root / "deep" / "b").iterdir()] == ["thesis.tex"]
    with pytest.raises(RunStoreError, match="No run at"):
        runs.remove(root / "deep" / "b")
    with pytest.raises(RunStoreError, match="No run at"):
        runs.remove(root)
    assert runs.list(root)["name"].to_list() == ["sea"]
    with Run.create(root / "a") as run:
        assert run.checkpoint() is None


def test_damaged_runs_can_be_removed(tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "run.db").write_text("rubbish")
    runs.remove(tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_the_names_of_the_module() -> None:
    assert runs.open is runs.open_run
    assert runs.list is runs.list_runs
    for name in runs.__all__:
        assert hasattr(runs, name)


def test_large_whole_numbers_are_compared_exactly(tmp_path: Path) -> None:
    for name, value in (("a", 10**400), ("b", 10**400 + 1), ("c", 10**400)):
        Run.create(tmp_path / name, {"large": value, "one": 1.0 if name == "a" else 1}).close()
    assert list(runs.compare_configs([tmp_path / "a", tmp_path / "b"]).index) == ["large"]
    assert runs.compare_configs([tmp_path / "a", tmp_path / "c"]).empty
