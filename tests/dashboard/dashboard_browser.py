"""A server and a real browser for the tests of the pages."""

from __future__ import annotations

import shutil
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("starlette")
pytest.importorskip("uvicorn")
pytest.importorskip("plotly")
pytest.importorskip("selenium")
import uvicorn
from selenium import webdriver

from featlearn.dashboard import create_app

if not (shutil.which("chromium") and shutil.which("chromedriver")):
    pytest.skip("chromium and chromedriver are not on the PATH: the pages are not tried", allow_module_level=True)

SECONDS = 20.0


class Site:
    """A server in a thread and its address."""

    def __init__(self, root: Path, port: int = 0) -> None:
        self.root = root
        config = uvicorn.Config(create_app(root), host="127.0.0.1", port=port, log_level="warning", access_log=False)
        self._server = uvicorn.Server(config)
        self._thread = threading.Thread(target=self._server.run, daemon=True)
        self._thread.start()
        wait(lambda: self._server.started)
        self.port = int(self._server.servers[0].sockets[0].getsockname()[1])
        self.address = f"http://127.0.0.1:{self.port}"

    def stop(self) -> None:
        self._server.should_exit = True
        self._thread.join(SECONDS)


def wait(condition: Callable[[], Any]) -> Any:
    end = time.monotonic() + SECONDS
    while not (result := condition()):
        assert time.monotonic() < end, "waited in vain"
        time.sleep(0.05)
    return result


def size(driver: webdriver.Chrome, width: int) -> None:
    metrics = {"width": width, "height": 900, "deviceScaleFactor": 1, "mobile": width < 500}
    driver.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", metrics)


def visit(driver: webdriver.Chrome, address: str, where: str) -> None:
    driver.get("about:blank")
    driver.get(f"{address}/{where}" if address.startswith("http") else f"{address}{where}")
    wait(lambda: driver.execute_script("return document.querySelector('main')?.dataset.turn"))


def go(driver: webdriver.Chrome, where: str) -> None:
    """To another page of the same site, as a link leads there."""
    turn = "return document.querySelector('main').dataset.turn"
    before = driver.execute_script(turn)
    driver.execute_script("location.hash = arguments[0]", where)
    wait(lambda: driver.execute_script(turn) != before)


def text(driver: webdriver.Chrome, where: str = "main") -> str:
    return str(driver.execute_script("return document.querySelector(arguments[0])?.textContent ?? ''", where))


def drawn(driver: webdriver.Chrome) -> list[str]:
    """Labels of the charts that are drawn."""
    script = "return [...document.querySelectorAll('.chart[data-drawn]')].map((c) => c.getAttribute('aria-label'))"
    return list(driver.execute_script(script))


def identifiers(site: Site) -> dict[str, str]:
    from featlearn.dashboard._run_index import Store

    return {run.where: run.id for run in Store(site.root).runs()}
