"""Fixtures of the tests in a browser; the module of a test has the fixture `site`."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from dashboard_browser import Site
    from selenium import webdriver


@pytest.fixture(scope="session", autouse=True)
def _own_cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """A cache folder of the tests: servers keep the rows of many runs in that of the user."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("cache")))
        yield


@pytest.fixture(scope="session")
def driver() -> Iterator[webdriver.Chrome]:
    from selenium import webdriver
    from selenium.webdriver.chrome.service import Service

    options = webdriver.ChromeOptions()
    options.binary_location = str(shutil.which("chromium"))
    for argument in (
        "--headless=new", "--no-sandbox", "--disable-gpu", "--disable-background-networking", "--disable-dev-shm-usage",
        "--host-resolver-rules=MAP * ~NOTFOUND , EXCLUDE 127.0.0.1", "--window-size=1280,900",
    ):  # fmt: skip
        options.add_argument(argument)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    result = webdriver.Chrome(options=options, service=Service(str(shutil.which("chromedriver"))))
    yield result
    result.quit()


@pytest.fixture
def browser(driver: webdriver.Chrome, site: Site) -> Iterator[webdriver.Chrome]:
    from dashboard_browser import size

    size(driver, 1280)
    driver.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": []})
    driver.get("about:blank")
    driver.get_log("browser")
    yield driver
    complaints = [line["message"] for line in driver.get_log("browser") if line["level"] in ("SEVERE", "WARNING")]
    assert complaints == []
    assert driver.execute_script("return window.broken") is None
