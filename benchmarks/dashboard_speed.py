"""How long a page of the dashboard waits for its first data: 100 runs of 10,000 steps and 20 layers."""

from __future__ import annotations

import os
import sqlite3
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
from starlette.testclient import TestClient

from benchmarks.timing import Row, limited
from featlearn.dashboard import create_app
from featlearn.runs import Run

RUNS, STEPS, LAYERS = 100, 10_000, 20
NAMES = ("centered_nfc", "nfc", "weight_change")
LIMIT = 0.3
TURNS = 3


def dashboard_rows() -> list[Row]:
    """Each page's first answer from a server that has just been started, and the same answer again."""
    title = f"dashboard of {RUNS} runs, {STEPS} steps, {LAYERS} layers, {len(NAMES)} numbers a layer"
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder)
        _make(root)
        with TestClient(create_app(root), base_url="http://127.0.0.1") as client:
            name = client.get("/api/runs").json()["runs"][0]["id"]
        pages = {
            "the list of runs": "/api/runs",
            "a run": f"/api/runs/{name}",
            "a curve of the run": f"/api/runs/{name}/series?name=loss&width=800",
            "a curve for each layer": f"/api/runs/{name}/series?name=nfc&width=800",
        }
        first: dict[str, float] = dict.fromkeys(pages, np.inf)
        again: dict[str, float] = dict.fromkeys(pages, np.inf)
        for _ in range(TURNS):
            with TestClient(create_app(root), base_url="http://127.0.0.1") as client:
                client.get("/")  # the machinery itself
                for what, address in pages.items():
                    first[what] = min(first[what], _seconds(client, address))
                    again[what] = min(again[what], _seconds(client, address))
    rows = [limited(title, what, first[what], "300 ms", LIMIT, 1.0) for what in pages]
    return rows + [limited(title, f"{what}, again", again[what], "300 ms", LIMIT) for what in pages]


def _seconds(client: TestClient, address: str) -> float:
    began = time.perf_counter()
    answer = client.get(address)
    seconds = time.perf_counter() - began
    assert answer.status_code == 200, answer.text
    return seconds


def _make(root: Path) -> None:
    """One database of the full size, under a hundred names: to fill a hundred of them would take minutes."""
    first = root / "run-000"
    Run.create(first, {"lr": 0.1, "net": {"width": 512}}).finish()
    connection = sqlite3.connect(first / "run.db", isolation_level=None)
    connection.execute("PRAGMA synchronous = OFF")
    connection.execute("BEGIN")
    connection.executemany("INSERT INTO metrics VALUES (?, ?, ?, ?)", _values())
    words = ((step, f"net.{layer}", "reading", "learning") for step in range(0, STEPS, 100) for layer in range(LAYERS))
    connection.executemany("INSERT INTO texts VALUES (?, ?, ?, ?)", words)
    connection.execute("COMMIT")
    connection.close()
    for place in range(1, RUNS):
        folder = root / f"run-{place:03d}"
        folder.mkdir()
        os.link(first / "run.db", folder / "run.db")


def _values() -> Iterator[tuple[int, str, str, float]]:
    layers = sorted(f"net.{layer}" for layer in range(LAYERS))
    values = iter(np.random.default_rng(0).random(STEPS * (LAYERS * len(NAMES) + 1)).tolist())
    for step in range(STEPS):
        yield step, "", "loss", next(values)
        for layer in layers:
            for name in NAMES:
                yield step, layer, name, next(values)


if __name__ == "__main__":
    for row in dashboard_rows():
        print(f"{row.candidate:32} {row.figure:>9}  {row.limit}  {row.met}")
