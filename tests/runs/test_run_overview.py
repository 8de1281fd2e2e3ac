from __future__ import annotations

import itertools
import json
import math
import sqlite3
from contextlib import closing
from pathlib import Path

import pytest
import torch

from featlearn._utils.safetensors_file import read_tensor, tensor_shapes
from featlearn.errors import InputError, RunStoreError
from featlearn.runs import Run, overview


def _logged(folder: Path) -> Run:
    run = Run.create(folder / "run", {"lr": 0.1})
    for step in range(30):
        run.log(step, {"loss": 1.0 - step / 100})
        if step % 10 == 0:
            run.log_layers(step, {f"net.{layer}": {"nfc": step / 100, "reading": "lazy"} for layer in (0, 2, 10)})
    run.log(5, {"rare": math.nan})
    return run


def test_a_run_at_a_glance(tmp_path: Path) -> None:
    run = _logged(tmp_path)
    seen = overview.overview(run.path)
    assert (seen.name, seen.status, seen.last_step, seen.config) == ("run", "running", 29, {"lr": 0.1})
    assert seen.loss == ("loss", pytest.approx(0.71))
    assert list(seen.readings) == ["net.0", "net.2", "net.10"]
    run.close()
    assert overview.overview(run.path).status == "interrupted"


def test_names_are_found_in_small_and_in_large_databases(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = _logged(tmp_path)
    wanted = {None: ["loss", "rare"], "net.0": ["nfc"], "net.2": ["nfc"], "net.10": ["nfc"]}
    assert overview.quantities(run.path) == wanted
    monkeypatch.setattr(overview, "_SMALL", 0)
    assert overview.quantities(run.path) == wanted
    run.finish()


def test_curves_are_whole_or_the_least_and_largest_of_each_part(tmp_path: Path) -> None:
    run = _logged(tmp_path)
    run.finish()
    [loss] = overview.curves(run.path, "loss")
    assert (loss.layer, loss.steps, loss.total) == (None, list(range(30)), 30)
    [short] = overview.curves(run.path, "loss", width=10)
    assert (len(short.steps), short.total) == (10, 30)
    assert (max(short.values), min(short.values)) == (1.0, pytest.approx(0.71))
    [rare] = overview.curves(run.path, "rare")
    assert math.isnan(rare.values[0])
    assert [curve.layer for curve in overview.curves(run.path, "nfc")] == ["net.0", "net.2", "net.10"]
    assert [curve.steps for curve in overview.curves(run.path, "nfc", "net.2", first=5, last=15)] == [[10]]
    assert overview.curves(run.path, "nfc", "", first=0) == []
    assert overview.words(run.path, ("reading",))["net.10", "reading"] == [(0, 20, "lazy")]


@pytest.mark.parametrize("log", [False, True])
@pytest.mark.parametrize(("least", "most", "count"), [(0, 0, 5), (0, 9, 3), (3, 1000, 7), (0, 2**62, 4), (7, 7, 1)])
def test_parts_cover_every_step_once(least: int, most: int, count: int, log: bool) -> None:
    parts = overview._parts(least, most, count, log)
    assert (parts[0][0], parts[-1][1]) == (least, most)
    assert all(after[0] == before[1] + 1 for before, after in itertools.pairwise(parts))
    assert all(first <= last for first, last in parts)
    assert len(parts) <= count + 2


def test_a_run_of_the_first_version(tmp_path: Path) -> None:
    with closing(sqlite3.connect(tmp_path / "run.db")) as connection, connection:
        connection.execute("CREATE TABLE meta (key TEXT PRIMARY KEY, value TEXT) WITHOUT ROWID")
        connection.execute(
            "CREATE TABLE metrics (step, layer, name, value, PRIMARY KEY (step, layer, name)) WITHOUT ROWID"
        )
        meta = {"name": "old", "config": "{}", "environment": "{}", "started": "1.5", "status": "finished"}
        connection.executemany("INSERT INTO meta VALUES (?, ?)", meta.items())
        connection.execute("INSERT INTO metrics VALUES (3, '', 'loss', 0.5)")
        connection.execute("PRAGMA user_version = 1")
    seen = overview.overview(tmp_path)
    assert (seen.name, seen.seconds, seen.last_step, seen.readings) == ("old", None, 3, {})
    with closing(sqlite3.connect(tmp_path / "run.db")) as connection, connection:
        connection.execute("UPDATE meta SET value = ? WHERE key = 'config'", (json.dumps([1]),))
    with pytest.raises(RunStoreError, match="lacks metadata of a run"):
        overview.overview(tmp_path)


def test_one_tensor_of_many(tmp_path: Path) -> None:
    with Run.create(tmp_path / "run") as run:
        one = torch.arange(6.0).reshape(2, 3)
        run.save_matrices(4, {"a/b": one, "the same": one, "complex": torch.ones(2, dtype=torch.complex64)})
    file = tmp_path / "run" / "matrices" / "4.safetensors"
    assert {name: shape for name, shape in tensor_shapes(file).items() if name != "complex"} == {
        "a/b": (2, 3), "the same": (2, 3),
    }  # fmt: skip
    assert torch.equal(read_tensor(file, "the same"), one)
    with pytest.raises(InputError, match="no tensor 'c'; it has a/b"):
        read_tensor(file, "c")
    file.write_bytes(b"\x01")
    with pytest.raises(RunStoreError, match="damaged"):
        tensor_shapes(file)
    with pytest.raises(RunStoreError, match="there is no file"):
        tensor_shapes(file.with_name("5.safetensors"))
