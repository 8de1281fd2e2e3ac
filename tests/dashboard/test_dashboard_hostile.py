"""Damaged runs, names that are no text, and addresses that cannot be: each is told, and none ends a page."""

from __future__ import annotations

import os
import shutil
import sqlite3
from contextlib import closing
from pathlib import Path

import pytest
import torch
from dashboard_runs import trained_run

from featlearn.errors import InputError
from featlearn.runs import Run

pytest.importorskip("starlette")
pytest.importorskip("plotly")
from starlette.testclient import TestClient

from featlearn.dashboard import create_app, export_html, serve
from featlearn.dashboard._server import address

DAMAGES = {
    "deep": "UPDATE meta SET value = '" + '{"a":' * 900 + "1" + "}" * 900 + "' WHERE key = 'config'",
    "deeper": "UPDATE meta SET value = '" + "[" * 200_000 + "' WHERE key = 'environment'",
    "text-step": "UPDATE metrics SET step = 'soon' WHERE step = 11",
    "real-step": "UPDATE metrics SET step = 1.5 WHERE step = 1",
    "blob-text": "UPDATE texts SET layer = x'00ff' WHERE layer = 'net.1'",
    "blob-layer": "UPDATE metrics SET layer = x'00ff' WHERE layer = 'net.1'",
    "inf-started": "UPDATE meta SET value = 'inf' WHERE key = 'started'",
}


def client_of(root: Path, **options: str) -> TestClient:
    return TestClient(create_app(root, **options), base_url="http://127.0.0.1:8050", follow_redirects=False)


def test_one_damaged_run_takes_no_page_down(tmp_path: Path) -> None:
    root = tmp_path / "runs"
    trained_run(root, "good").finish()
    for name, statement in DAMAGES.items():
        shutil.copytree(root / "good", root / name)
        with closing(sqlite3.connect(root / name / "run.db")) as connection:
            connection.execute(statement)
            connection.commit()
    with Run.create(root / "odd-matrices") as run:
        run.save_matrices(0, {"net/w.eigenvalues": torch.tensor([1e308, 1e-320, -1.0, float("inf")]).double()})
        run.save_matrices(1, {"net/w.eigenvalues": torch.zeros(0), "net/agop": torch.zeros(2, 0)})
    (root / "deep").joinpath("ledger.json").write_text("[" * 200_000)
    with client_of(root) as client:
        listed = client.get("/api/runs")
        assert listed.status_code == 200
        runs = {run["path"]: run for run in listed.json()["runs"]}
        assert runs["good"]["status"] == "finished"
        unreadable = {path for path, run in runs.items() if run["status"] == "unreadable"}
        assert unreadable == {"deep", "deeper", "text-step", "blob-text", "inf-started"}
        for run in runs.values():
            for what in (
                "",
                "/series?name=nfc",
                "/words",
                "/spectra/0?kind=w&layer=net",
                "/spectra/1?kind=w&layer=net",
            ):
                answer = client.get(f"/api/runs/{run['id']}{what}")
                assert answer.status_code in (200, 400, 404), (run["path"], what)
                assert answer.status_code == 200 or answer.json()["error"]
        ledger = client.get("/api/ledger")
        assert (ledger.status_code, len(ledger.json()["troubles"])) == (200, 1)
    assert export_html(root, tmp_path / "page.html").stat().st_size > 1_000_000


def test_an_error_that_nobody_thought_of_is_a_sentence(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: object) -> None:
        raise ZeroDivisionError

    monkeypatch.setattr("featlearn.dashboard._run_list.RunList.rows", broken)
    with client_of(tmp_path) as client:
        answer = client.get("/api/runs")
    assert (answer.status_code, "cannot be read (ZeroDivisionError)" in answer.json()["error"]) == (500, True)


def test_names_that_collide_or_are_no_text(tmp_path: Path) -> None:
    root = Path(os.fsdecode(os.fsencode(tmp_path) + b"/r\xff"))
    root.mkdir()
    for folder, name in (("a", "dup"), ("b", "dup")):
        Run.create(root / folder, {"lr": folder}, name=name).finish()
    Run.create(root / "c", {"lr": "c"}, name="c").finish()
    plainly = tmp_path / "plain"
    shutil.copytree(root, plainly)
    with closing(sqlite3.connect(plainly / "c" / "run.db")) as connection:
        connection.execute("UPDATE meta SET value = ? WHERE key = 'name'", (str(plainly / "a"),))
        connection.commit()
    with client_of(plainly) as client:
        ids = {run["path"]: run["id"] for run in client.get("/api/runs").json()["runs"]}
        result = client.get("/api/compare", params={"ids": ",".join(ids.values())})
        assert result.status_code == 200
        assert result.json()["settings"] == [{"setting": "lr", "values": {ids[path]: path for path in ids}}]
    (root / "d").mkdir()
    (root / "d" / "run.db").write_text("no database")
    assert "<title>r?: featlearn</title>" in export_html(root, tmp_path / "page.html").read_text(encoding="utf-8")
    (tmp_path / "ok2.csv").write_text("mine")
    with pytest.raises(InputError, match=r"ends in \.html"):
        export_html(root, tmp_path / "ok2.csv")
    assert (tmp_path / "ok2.csv").read_text() == "mine"


def test_addresses_that_can_be_opened_and_hosts_that_are_not_ours(tmp_path: Path) -> None:
    token = "a+b&c#d%41 and more of it"
    with client_of(tmp_path, token=token) as client:
        opened = address("127.0.0.1", 8050, token)
        assert client.get(opened).status_code == 303
    for host in ("300.1.1.1", "192.0.2.1", "a" * 70):
        with pytest.raises(InputError, match="must be an address of this machine"):
            serve(tmp_path, host=host, token="a" * 20)
