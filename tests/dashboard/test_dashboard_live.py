"""Pages that stay open while runs are written, moved or removed, and while the server is stopped and started."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from dashboard_browser import Site, drawn, go, identifiers, text, visit, wait
from dashboard_runs import trained_run
from selenium import webdriver
from selenium.webdriver.common.by import By
from selenium.webdriver.common.keys import Keys

from processes import running

WRITER = """
import pathlib, sys, time
sys.path.insert(0, sys.argv[2])
from dashboard_runs import log_findings, log_step
from featlearn.runs import Run
folder, until = pathlib.Path(sys.argv[1]), time.monotonic() + 100
with Run.create(folder / "live", {"lr": 0.1}) as run:
    step = 0
    while not (folder / "stop").exists() and time.monotonic() < until:
        log_step(run, step, layers=3)
        layer = f"net.{step % 3}"
        fault = '[{"fault": "fault %d", "severity": "note", "confidence": 1, "evidence": "e", "advice": "a"}]' % step
        run.log(step, {"findings": fault}, layer=layer)
        step += 1
        time.sleep(0.15)
"""
SHOWN = "[...document.querySelectorAll('main .controls select, main .controls input')].map((c) => [c.value, c.checked])"
CHART = "document.querySelector('.chart')"
LAST = f"return {CHART}?.data ? Math.max(...{CHART}.data.flatMap((trace) => trace.x)) : -1"
NAMES = "return [...document.querySelectorAll('tbody td[data-title=Run] a')].map((a) => a.textContent)"
BANNER = "document.querySelector('.banner')"


@pytest.fixture
def site(tmp_path: Path) -> Iterator[Site]:
    result = Site(tmp_path)
    yield result
    result.stop()


@contextmanager
def complaints(browser: webdriver.Chrome, *expected: str) -> Iterator[None]:
    """Allow messages of the browser about requests without an answer, and leave the page before its server stops."""
    try:
        yield
    finally:
        browser.get("about:blank")
        lines = [line["message"] for line in browser.get_log("browser")]
    assert [line for line in lines if not any(part in line for part in expected)] == []


def banner(browser: webdriver.Chrome) -> str:
    """Text of the banner, "" if it is hidden."""
    return str(browser.execute_script(f"return {BANNER}.hidden ? '' : {BANNER}.textContent"))


def test_curves_maps_and_findings_grow_and_the_rest_stays(
    browser: webdriver.Chrome, site: Site, tmp_path: Path
) -> None:
    def state() -> object:
        focus = "document.activeElement.dataset.key ?? document.activeElement.outerHTML.slice(0, 60)"
        return browser.execute_script(f"return [{SHOWN}, scrollY, {focus}, location.hash, window.stayed]")

    def zoom(first: float, last: float) -> None:
        change = f"{{'xaxis.range[0]': {first}, 'xaxis.range[1]': {last}}}"
        browser.execute_script(f"{CHART}.emit('plotly_relayout', {change})")
        wait(lambda: f"from={first}&to={last}" in browser.current_url)

    def focus_and_scroll(selector: str) -> object:
        browser.execute_script("document.querySelector(arguments[0]).focus({preventScroll: true})", selector)
        browser.execute_script("scrollTo(0, 150); window.stayed = true")
        assert browser.execute_script("return scrollY") > 100
        return state()

    def later() -> None:
        """Until the page has read three further steps."""
        step = "return Number(/step (\\d+)/.exec(document.querySelector('.facts').textContent)[1])"
        now = browser.execute_script(step)
        wait(lambda: browser.execute_script(step) >= now + 3)

    with running(WRITER, tmp_path, Path(__file__).parent), complaints(browser):
        wait(lambda: identifiers(site))
        alone = f"#/run/{identifiers(site)['live']}"
        visit(browser, site.address, f"{alone}/curves?metric=nfc&metric=loss&metric=fact&metric=w.alpha&smooth=0.3")
        first = wait(lambda: max(browser.execute_script(LAST), 0))
        assert "running" in text(browser, ".facts")
        wait(lambda: browser.execute_script(LAST) > first + 3)
        zoom(1.5, 4.25)
        wait(lambda: browser.execute_script(f"return {CHART}.layout.xaxis.range") == [1.5, 4.25])
        before = focus_and_scroll("main select")
        times = f"return Number({CHART}.dataset.drawn)"
        turns = browser.execute_script(times)
        later()
        wait(lambda: browser.execute_script(times) > turns)
        assert browser.execute_script(f"return {CHART}.layout.xaxis.range") == [1.5, 4.25]
        assert state() == before

        go(browser, f"{alone}/map?metric=fact")
        size = f"return {CHART}?.data?.[0].z[0].length ?? 0"
        columns = wait(lambda: browser.execute_script(size))
        browser.execute_script("document.querySelector('main').style.minHeight = '2000px'")
        before = focus_and_scroll("main input[type=search]")
        wait(lambda: browser.execute_script(size) >= columns + 3)
        assert state() == before
        zoom(2, 5)
        wait(lambda: browser.execute_script(f"return {CHART}.layout.xaxis.range") == [2, 5])
        columns = browser.execute_script(size)
        wait(lambda: browser.execute_script(size) >= columns + 3)
        assert browser.execute_script(f"return {CHART}.layout.xaxis.range") == [2, 5]

        go(browser, f"{alone}/findings")
        rows = "return document.querySelectorAll('tbody tr').length"
        wait(lambda: browser.execute_script(rows) > 5)
        browser.find_element(By.CSS_SELECTOR, "button[data-key=steps]").send_keys(Keys.ENTER)
        first_row = "return document.querySelector('tbody tr').textContent"
        assert "fault 0" in browser.execute_script(first_row)
        before = focus_and_scroll("a[data-key*='fault 1']")
        assert "bar-" in str(before)
        count = browser.execute_script(rows)
        wait(lambda: browser.execute_script(rows) >= count + 3)
        assert state() == before
        assert "fault 0" in browser.execute_script(first_row)
        (tmp_path / "stop").touch()
        wait(lambda: "finished" in text(browser, ".facts"))
        assert browser.execute_script("return window.stayed")


def test_sliders_reach_steps_that_are_new(browser: webdriver.Chrome, site: Site, tmp_path: Path) -> None:
    with running(WRITER, tmp_path, Path(__file__).parent), complaints(browser):
        wait(lambda: identifiers(site))
        wait(lambda: len(list(tmp_path.glob("live/matrices/*"))) > 2)
        visit(browser, site.address, f"#/run/{identifiers(site)['live']}/spectra?at=3")
        most = "return Number(document.querySelector('input[type=range]').max)"
        before = browser.execute_script(most)
        slider = browser.find_element(By.CSS_SELECTOR, "input[type=range]")
        wait(lambda: browser.execute_script(most) > before)
        assert text(browser, "output") == "3"
        slider.send_keys(Keys.END)  # the same element
        wait(lambda: int(text(browser, "output")) > 3 * before)
        (tmp_path / "stop").touch()


def test_a_removed_run_is_one_sentence_and_can_return(browser: webdriver.Chrome, site: Site, tmp_path: Path) -> None:
    for name in ("first", "second", "third"):
        trained_run(tmp_path, name).finish()
    ids = identifiers(site)
    away = tmp_path.parent / f"{tmp_path.name}-away"
    with complaints(browser, "404"):
        visit(browser, site.address, f"#/run/{ids['first']}/curves?metric=loss")
        wait(lambda: drawn(browser))
        shutil.move(tmp_path / "first", away)
        wait(lambda: banner(browser))
        assert (
            banner(browser) == "The run does not exist. It may have been moved or removed; return to the list of runs."
        )
        assert drawn(browser) == ["Loss over the steps"]
        browser.refresh()
        wait(lambda: "The run does not exist." in text(browser))
        shutil.move(away, tmp_path / "first")
        wait(lambda: drawn(browser) == ["Loss over the steps"])
        assert banner(browser) == ""

        lines = f"return {CHART}?.data?.map((trace) => trace.meta)"
        visit(browser, site.address, f"#/compare?ids={','.join(ids[name] for name in ('first', 'second', 'third'))}")
        wait(lambda: browser.execute_script(lines) == ["first", "second", "third"])
        shutil.rmtree(tmp_path / "second")
        wait(lambda: browser.execute_script(lines) == ["first", "third"])
        go(browser, "#/runs")
        wait(lambda: sorted(browser.execute_script(NAMES)) == ["first", "third"])


def test_a_page_goes_on_when_its_server_is_back(browser: webdriver.Chrome, tmp_path: Path) -> None:
    run = trained_run(tmp_path, "live", steps=4)
    site = Site(tmp_path)
    with complaints(browser, "net::ERR_CONNECTION_REFUSED"):
        visit(browser, site.address, f"#/run/{identifiers(site)['live']}/curves?metric=loss&smooth=0.3")
        wait(lambda: drawn(browser))
        site.stop()
        wait(lambda: banner(browser))
        sentence = "The server does not respond. Check that `featlearn dashboard` is running."
        assert banner(browser) == sentence
        box = f"return [innerHeight, {BANNER}.getBoundingClientRect().top, {BANNER}.getAttribute('role')]"
        browser.execute_script("scrollTo(0, 10000)")
        height, top, role = browser.execute_script(box)
        assert (0 <= top < height, role) == (True, "alert")
        assert drawn(browser) == ["Loss over the steps"]
        run.log(9, {"loss": 0.5})
        site = Site(tmp_path, site.port)
        try:
            wait(lambda: browser.execute_script(LAST) == 9)
            assert banner(browser) == ""
            assert "smooth=0.3" in browser.current_url
            site.stop()
            browser.execute_script("location.hash = '#/ledger'")
            wait(lambda: sentence in text(browser))
            assert text(browser, "h1") == "Error"
            site = Site(tmp_path, site.port)
            wait(lambda: text(browser, "h1") == "Ledger of claims")
        finally:
            browser.get("about:blank")
            run.finish()
            site.stop()


def test_lists_grow_while_they_are_open(browser: webdriver.Chrome, site: Site, tmp_path: Path) -> None:
    trained_run(tmp_path, "first").finish()
    with complaints(browser):
        visit(browser, site.address, "#/runs?column=m%3Alast%3Aloss")
        wait(lambda: "1 run" in text(browser))
        browser.execute_script("window.stayed = true")
        run = trained_run(tmp_path, "second", steps=2)
        wait(lambda: browser.execute_script(NAMES) == ["second", "first"])
        assert "1 running" in text(browser)
        run.log(5, {"loss": 0.015625})
        run.finish()
        wait(lambda: "0.01563" in text(browser))
        wait(lambda: "running" not in text(browser, "[role=status]"))
        assert browser.execute_script("return window.stayed")
