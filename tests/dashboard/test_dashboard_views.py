"""Data of the views of many runs and of one run: parts of the list, columns of layers, findings, axes, segments."""

from __future__ import annotations

import json
import shutil
import sqlite3
import time
import warnings
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from dashboard_runs import EVIL, log_findings, log_step, trained_run

from featlearn.dashboard._finding_data import findings
from featlearn.dashboard._run_index import Store
from featlearn.dashboard._run_list import RunList
from featlearn.runs import Run

pytest.importorskip("starlette")
pytest.importorskip("plotly")
from starlette.testclient import TestClient

from featlearn.dashboard import create_app


def client_of(root: Path) -> TestClient:
    return TestClient(create_app(root), base_url="http://127.0.0.1:8050")


def names(answer: dict[str, Any]) -> list[str]:
    return sorted(row["name"] for row in answer["runs"])


def test_a_long_list_comes_in_parts_and_later_only_what_changed(tmp_path: Path) -> None:
    for place in range(5):
        trained_run(tmp_path, f"run-{place}", steps=2).finish()
    listed = RunList(Store(tmp_path))
    part = listed.rows(seconds=0)
    assert (len(part["runs"]), part["loading"], part["complete"]) == (1, 4, True)
    rest = listed.rows(part["version"], seconds=None)
    assert (len(rest["runs"]), rest["loading"], rest["complete"]) == (4, 0, False)
    assert names({"runs": part["runs"] + rest["runs"]}) == [f"run-{place}" for place in range(5)]
    assert listed.rows(rest["version"])["runs"] == []
    with Run.open(tmp_path / "run-3", write=True) as run:
        run.log(2, {"loss": 0.125})
    now = listed.rows(rest["version"])
    assert (names(now), now["complete"], now["runs"][0]["metrics"]["loss"]) == (["run-3"], False, [0.125, 0.125, 1.0])
    shutil.rmtree(tmp_path / "run-1")
    for version in (now["version"], rest["version"], "", "another.7", "x"):  # a page that missed it, and a new page
        again = listed.rows(version)
        assert (again["complete"], names(again)) == (True, ["run-0", "run-2", "run-3", "run-4"])


def test_an_unchanged_run_is_opened_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    opened = []
    connect = sqlite3.connect
    for place in range(3):
        trained_run(tmp_path, f"run-{place}", steps=2).finish()
    time.sleep(0.15)  # a file that has just been written is read again
    listed = RunList(Store(tmp_path))
    listed.rows()
    monkeypatch.setattr(sqlite3, "connect", lambda *a, **k: opened.append(a) or connect(*a, **k))
    assert len(listed.rows()["runs"]) == 3
    assert opened == []


def test_columns_of_layers(tmp_path: Path) -> None:
    for place in range(2):
        trained_run(tmp_path, f"run-{place}").finish()
    Run.create(tmp_path / "other").finish()
    with client_of(tmp_path) as client:
        assert list(client.get("/api/layers").json()) == [EVIL, "net.1"]
        result = client.get("/api/values", params={"layer": "net.1", "name": "nfc"}).json()
        assert (sorted(result["values"].values()), result["loading"]) == ([[0.55, 0.0, 0.55]] * 2, 0)
        assert client.get("/api/values", params={"layer": "net.1", "name": "none"}).json()["values"] == {}
        assert client.get("/api/values?layer=net.1").status_code == 400


def test_layers_by_pattern_and_means(tmp_path: Path) -> None:
    with Run.create(tmp_path / "run") as run:
        for step in range(40):
            layers = {f"blocks.{i}.attn.q": {"nfc": step + i} for i in range(70)} | {"head": {"nfc": 0.0}}
            run.log_layers(step, layers)
    with client_of(tmp_path) as client:
        address = f"/api/runs/{client.get('/api/runs').json()['runs'][0]['id']}/series?name=nfc"
        assert client.get(address).json()["left_out"] == 7
        some = client.get(f"{address}&layers=blocks.1%3F.attn.*+head").json()
        assert [curve["layer"] for curve in some["curves"]] == [*(f"blocks.{i}.attn.q" for i in range(10, 20)), "head"]
        assert client.get(f"{address}&layers=none.*").json()["curves"] == []
        means = client.get(f"{address}&mean=1&width=10").json()
        assert (len(means["curves"]), means["left_out"]) == (71, 0)
        assert means["curves"][1]["steps"] == list(range(0, 40, 4))
        assert means["curves"][1]["values"] == [step + 2.5 for step in range(0, 40, 4)]


def test_findings_are_intervals(tmp_path: Path) -> None:
    run = trained_run(tmp_path)
    log_findings(run)
    run.finish()
    with client_of(tmp_path) as client:
        name = client.get("/api/runs").json()["runs"][0]["id"]
        result = client.get(f"/api/runs/{name}/findings").json()
    keys = ("layer", "fault", "severity", "first", "last", "open")
    assert [tuple(finding[key] for key in keys) for finding in result["findings"]] == [
        (None, "loss spike", "note", 5, 6, False),
        (EVIL, "lazy layer", "warning", 2, 11, True),
        ("net.1", "dead units", "problem", 3, 8, False),
    ]
    dead = result["findings"][2]
    assert (dead["evidence"], dead["confidence"], result["damaged"]) == ("6 of 8 units never fire", 0.9, 0)


@pytest.mark.parametrize(
    "value",
    [
        "",
        "{",
        "[" * 5000,
        "null",
        '{"fault": "x"}',
        "[1, null, []]",
        '[{"fault": 3}]',
        '[{"fault": "a"}, {"fault": "a"}]',
    ],
)
def test_texts_that_are_not_findings_are_counted(tmp_path: Path, value: str) -> None:
    with Run.create(tmp_path / "run") as run:
        run.log(0, {"findings": value}, layer="net.0")
    store = Store(tmp_path)
    result = findings(store, store.runs()[0])
    assert result["damaged"] == 1
    assert len(result["findings"]) <= 1


def test_odd_parts_of_a_finding_are_replaced(tmp_path: Path) -> None:
    odd = [{"fault": EVIL, "severity": EVIL, "confidence": 1e308, "evidence": 3, "advice": "a" * 10_000}]
    with Run.create(tmp_path / "run") as run:
        run.log(0, {"findings": json.dumps(odd).replace("1e+308", "NaN")}, layer=EVIL)
    store = Store(tmp_path)
    (finding,) = findings(store, store.runs()[0])["findings"]
    assert (finding["severity"], finding["confidence"], finding["evidence"]) == ("note", None, "")
    assert (finding["fault"], len(finding["advice"]), finding["open"]) == (EVIL, 500, True)


def test_time_and_epochs_of_steps(tmp_path: Path) -> None:
    with Run.create(tmp_path / "run") as run:
        for step in range(0, 30, 10):
            run.log(step, {"loss": 1.0, **({"epoch": step / 20} if step < 20 else {})})
    with closing(sqlite3.connect(tmp_path / "run" / "run.db")) as connection, connection:
        # Two processes with a pause of 1,000 seconds between them.
        connection.execute("UPDATE starts SET began = 100, seen = 104")
        connection.execute("INSERT INTO starts (pid, began, seen, environment) VALUES (1, 1104, 1110, '{}')")
        connection.execute("DELETE FROM times")
        connection.executemany("INSERT INTO times VALUES (?, ?)", [(0, 101), (10, 104), (20, 1106)])
    shutil.copytree(tmp_path / "run", tmp_path / "old")
    with closing(sqlite3.connect(tmp_path / "old" / "run.db")) as connection, connection:
        connection.execute("DROP TABLE times")
        connection.execute("DROP TABLE old_times")
        connection.execute("PRAGMA user_version = 3")
    with client_of(tmp_path) as client:
        ids = {run["path"]: run["id"] for run in client.get("/api/runs").json()["runs"]}
        expected = {("run", "time"): [1, 4, 6], ("old", "time"): [None] * 3}
        expected |= {(name, "epoch"): [0, 0.5, None] for name in ids}
        for (name, axis), positions in expected.items():
            (curve,) = client.get(f"/api/runs/{ids[name]}/series?name=loss&axis={axis}").json()["curves"]
            assert (curve["x"], curve["steps"]) == (positions, [0, 10, 20]), (name, axis)
        axes = {name: client.get(f"/api/runs/{ids[name]}").json()["axes"] for name in ids}
        assert axes == {"run": ["step", "time", "epoch"], "old": ["step", "epoch"]}
        assert client.get(f"/api/runs/{ids['run']}/series?name=loss&axis=moon").status_code == 400


def test_every_view_of_an_earlier_segment(tmp_path: Path) -> None:
    run = trained_run(tmp_path, steps=8)
    log_findings(run, steps=8)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        run.log(4, {"loss": 7.0, "findings": "[]"}, layer=EVIL)
        log_step(run, 5)
    run.finish()
    with client_of(tmp_path) as client:
        address = f"/api/runs/{client.get('/api/runs').json()['runs'][0]['id']}"
        details = client.get(address).json()
        assert details["segment_list"] == [
            {"segment": 1, "first": 0, "last": 7}, {"segment": 2, "first": 4, "last": 5},
        ]  # fmt: skip
        assert details["matrix_steps"] == [0, 3]
        assert client.get(f"{address}?segment=1").json()["matrix_steps"] == [0, 3, 6]
        for segment, steps in ((1, list(range(8))), (2, [0, 1, 2, 3, 5])):
            query = f"segment={segment}"
            (loss,) = client.get(f"{address}/series?name=loss&layer=&axis=time&{query}").json()["curves"]
            assert loss["steps"] == steps
            assert None not in loss["x"]
            words = client.get(f"{address}/words?{query}").json()["words"]
            assert next(line for line in words if line["name"] == "reading")["stretches"][0][1] == steps[-1]
        assert client.get(f"{address}/matrices/6/net.1/agop?segment=1").status_code == 200
        assert client.get(f"{address}/matrices/6/net.1/agop").status_code == 404
        assert client.get(f"{address}/spectra/6?kind=w&layer=net.1&segment=1").json()["phase"] == "bulk + spikes"
        ends = [client.get(f"{address}/findings?segment={n}").json()["findings"] for n in (1, 2)]
        lazy = [next(f for f in found if f["fault"] == "lazy layer") for found in ends]
        assert [(finding["last"], finding["open"]) for finding in lazy] == [(7, True), (4, False)]
        for wrong in ("3", "0", "x"):
            for what in ("", "/words", "/findings", "/series?name=loss"):
                separator = "&" if "?" in what else "?"
                assert client.get(f"{address}{what}{separator}segment={wrong}").status_code == 400
