"""How long a page of the dashboard waits for its first data: 100 runs of 10,000 steps and 20 layers.

The list of 1,000 short runs is measured too: its first answer, the answers until all runs are read, and the time until
headless Chromium shows rows, if selenium and Chromium are installed.
"""

from __future__ import annotations

import json
import os
import shutil
import sqlite3
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager
from importlib.util import find_spec
from pathlib import Path

import numpy as np
from starlette.testclient import TestClient

from benchmarks.timing import Row, limited
from featlearn.dashboard import create_app
from featlearn.runs import Run

RUNS, STEPS, LAYERS = 100, 10_000, 20
MANY = 1000
VIEW_LIMIT = 1.0
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
                    while what == "the list of runs" and client.get(address).json()["loading"]:
                        pass  # the rest of the list, which the page shows as it comes
                    again[what] = min(again[what], _seconds(client, address))
    rows = [limited(title, what, first[what], "300 ms", LIMIT, 1.0) for what in pages]
    rows += [limited(title, f"{what}, again", again[what], "300 ms", LIMIT) for what in pages]
    return rows + list_rows()


def list_rows() -> list[Row]:
    """Times of the list of many runs: in the server, from its start, and in a browser."""
    title = f"dashboard of {MANY} runs, 200 steps"
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder)
        _make_many(root)
        part, whole, again, restarted = (
            min(times) for times in zip(*(_listed(root) for _ in range(TURNS)), strict=True)
        )
        with _new_cache():
            views = _browser_seconds(root)
    rows = [
        limited(title, "first answer", part, "1 s", VIEW_LIMIT, 1.0),
        limited(title, "all runs read", whole, "1 s", VIEW_LIMIT),
        limited(title, "all runs, again", again, "300 ms", LIMIT),
        limited(title, "all runs, server started again", restarted, "300 ms", LIMIT),
    ]
    names = ("rows in Chromium, new server", "rows in Chromium, again")
    return rows + [
        limited(title, name, seconds, "1 s", VIEW_LIMIT) for name, seconds in zip(names, views, strict=False)
    ]


def _listed(root: Path) -> tuple[float, float, float, float]:
    """Return the seconds of the first answer, of all parts, of the list again, and of the list of a second server."""
    with _new_cache():
        with TestClient(create_app(root), base_url="http://127.0.0.1") as client:
            client.get("/")
            began = time.perf_counter()
            answer = client.get("/api/runs").json()
            first = time.perf_counter() - began
            while answer["loading"]:
                answer = client.get("/api/runs", params={"after": answer["version"]}).json()
            whole, again = time.perf_counter() - began, _seconds(client, "/api/runs")
        with TestClient(create_app(root), base_url="http://127.0.0.1") as client:
            client.get("/")
            return first, whole, again, _seconds(client, "/api/runs")


@contextmanager
def _new_cache() -> Iterator[None]:
    """Use an empty cache folder, so that rows of earlier servers are not read."""
    before = os.environ.get("XDG_CACHE_HOME")
    with tempfile.TemporaryDirectory() as folder:
        os.environ["XDG_CACHE_HOME"] = folder
        try:
            yield
        finally:
            del os.environ["XDG_CACHE_HOME"]
            if before is not None:
                os.environ["XDG_CACHE_HOME"] = before


def _browser_seconds(root: Path) -> list[float]:
    """Return the seconds until rows are shown, with a new server and once more; nothing without a browser."""
    browser, driver = shutil.which("chromium"), shutil.which("chromedriver")
    if find_spec("selenium") is None or browser is None or driver is None:
        return []
    from selenium import webdriver
    from selenium.webdriver.chrome.service import Service

    options = webdriver.ChromeOptions()
    options.binary_location = browser
    for argument in ("--headless", "--no-sandbox", "--disable-gpu", "--disable-background-networking"):
        options.add_argument(argument)
    code = f"from featlearn.dashboard import serve\nserve({str(root)!r}, port=0, ready=lambda a: print(a, flush=True))"
    window = webdriver.Chrome(options=options, service=Service(driver))
    best = [np.inf, np.inf]
    try:
        for _ in range(TURNS):
            with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True) as server:
                assert server.stdout is not None
                address = server.stdout.readline().strip()
                for place in range(2):
                    window.get("about:blank")
                    began = time.perf_counter()
                    window.get(f"{address}#/runs")
                    while not window.execute_script("return document.querySelectorAll('tbody tr').length"):
                        time.sleep(0.005)
                    best[place] = min(best[place], time.perf_counter() - began)
                server.terminate()
    finally:
        window.quit()
    return best


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


def _make_many(root: Path) -> None:
    """Copies of a short run, each with a config of its own."""
    first = root / "run-0000"
    with Run.create(first) as run:
        for step in range(200):
            run.log(step, {"loss": 1 / (step + 1), "test_loss": 2 / (step + 1)})
            if step % 20 == 0:
                run.log_layers(step, {f"net.{i}": {"nfc": 0.5, "reading": "learning"} for i in range(3)})
    for place in range(MANY):
        folder = root / f"run-{place:04d}"
        if place:
            shutil.copytree(first, folder)
        config = {"lr": 10.0 ** -(place % 5), "seed": place // 5, "optimizer": "adam", "net": {"width": 64}}
        with closing(sqlite3.connect(folder / "run.db")) as connection, connection:
            connection.execute("PRAGMA synchronous = OFF")
            connection.execute("UPDATE meta SET value = ? WHERE key = 'config'", (json.dumps(config),))


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
