"""Pages of many runs and views of one, in a real browser: filters, groups, sweeps, maps, findings, addresses."""

from __future__ import annotations

import json
import shutil
import sqlite3
import warnings
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from urllib.parse import quote

import pytest
from dashboard_browser import Site, drawn, go, identifiers, text, visit, wait
from dashboard_runs import EVIL, log_findings, log_step, trained_run
from selenium import webdriver
from selenium.webdriver.common.by import By
from selenium.webdriver.common.keys import Keys

from featlearn.dashboard import export_html
from featlearn.runs import Run

NAMES = "return [...document.querySelectorAll('tbody td[data-title=Run] a')].map((a) => a.textContent)"
CHART = "return document.querySelector('.chart')"


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    """130 short runs, and one with findings and two segments."""
    root = tmp_path_factory.mktemp("many")
    with Run.create(root / "run-000") as run:
        for step in range(4):
            run.log(step, {"loss": 1 / (1 + step)})
            run.log(step, {"nfc": float(step)}, layer="net.0")
    for place in range(130):  # copies: to create a run takes longer
        folder, lr = root / f"run-{place:03d}", 10.0 ** -(place % 3 + 1)
        if place:
            shutil.copytree(root / "run-000", folder)
        optimizer, net = EVIL if place % 2 else "adam", {"width": 2**place % 7}
        config = {"lr": lr, "seed": place // 3, "optimizer": optimizer, "net": net}
        with closing(sqlite3.connect(folder / "run.db")) as connection, connection:
            meta = (("config", json.dumps(config)), ("name", folder.name), ("started", str(1.7e9 + place)))
            connection.executemany("UPDATE meta SET value = ?2 WHERE key = ?1", meta)
            connection.execute("UPDATE metrics SET value = value * ? WHERE name = 'loss'", (1 + place,))
            connection.execute("UPDATE metrics SET value = value * ? WHERE name = 'nfc'", (lr,))
    run = trained_run(root, "found", steps=12)
    log_findings(run)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        log_step(run, 6)
    run.finish()
    result = Site(root)
    yield result
    result.stop()


def open_page(browser: webdriver.Chrome, site: Site, where: str) -> None:
    visit(browser, site.address, where)


def test_filters_choose_runs_and_say_what_is_unknown(browser: webdriver.Chrome, site: Site) -> None:
    open_page(browser, site, "#/runs")
    wait(lambda: "131 runs" in text(browser))
    search = browser.find_element(By.ID, "search")
    for expression, count in (
        ("lr<0.05 seed>=40", 6), ("lr=0.1 optimizer=adam", 22), ("loss.min<0.6", 3), ("loss.max>129", 1),
        ("width=1", 44),
        ("optimizer=ad*", 65), ("optimizer!=adam seed=0", 1), ("run-00", 10), ("status=finished run-129", 1),
        ('name="run-001"', 1),
    ):  # fmt: skip
        search.clear()
        search.send_keys(expression)
        wait(lambda wanted=f"{count} of 131 runs": wanted in text(browser))
    search.clear()
    search.send_keys(f"nothing<3 {EVIL}=1")
    assert "No run has the setting or metric “nothing”" in text(browser)
    assert "No run matches" in text(browser)


def test_columns_groups_and_parts_stay_in_the_address(browser: webdriver.Chrome, site: Site) -> None:
    open_page(browser, site, "#/runs?column=m%3Amax%3Aloss&sort=m%3Amax%3Aloss&down=1")
    wait(lambda: "131 runs" in text(browser))
    wait(lambda: browser.execute_script(NAMES)[:2] == ["run-129", "run-128"])
    header = browser.find_element(By.CSS_SELECTOR, "th[aria-sort=descending]")
    assert header.text.startswith("Loss, max")
    browser.find_element(By.CSS_SELECTOR, "button[data-key=next]").click()
    assert "runs 101 to 131 of 131" in text(browser)
    group = next(
        s for s in browser.find_elements(By.CSS_SELECTOR, "select") if "optimizer" in s.text and "status" in s.text
    )
    group.send_keys("lr")
    wait(lambda: len(browser.find_elements(By.CSS_SELECTOR, ".group-row")) == 3)
    row = browser.find_element(By.CSS_SELECTOR, ".group-row")
    assert "44 runs" in row.text or "43 runs" in row.text
    assert "±" in row.text
    browser.find_element(By.CSS_SELECTOR, "button.group").send_keys(Keys.ENTER)
    button = "return document.querySelector('button.group').getAttribute('aria-expanded')"
    assert browser.execute_script(button) == "true"
    assert browser.execute_script("return document.activeElement.className") == "group"
    address, members = browser.current_url, browser.execute_script(NAMES)
    browser.refresh()
    wait(lambda: browser.execute_script(NAMES) == members)
    assert browser.current_url == address
    browser.back()
    wait(lambda: browser.execute_script(button) == "false")
    layer = "l%3Alast%3Anet.0%3Anfc"
    open_page(browser, site, f"#/runs?filter=run-000&column={layer}")
    wait(lambda: "0.3" in text(browser, "td[data-title^='net.0: NFC']"))


def test_sweeps_show_groups_of_runs(browser: webdriver.Chrome, site: Site) -> None:
    open_page(browser, site, "#/sweeps?filter=run-&group=lr&x=lr")
    wait(lambda: any("over the steps, by lr" in label for label in drawn(browser)))
    counts = f"{CHART}s[1]".replace("querySelector('.chart')s[1]", "querySelectorAll('.chart')[1]")
    wait(
        lambda: (
            sum(browser.execute_script(f"{counts}.data.filter((t) => t.customdata).map((t) => t.customdata[0])")) == 130
        )
    )
    means = browser.execute_script(f"{counts}.data.filter((t) => t.customdata).map((t) => t.y[0])")
    expected = [sum(range(1 + first, 131, 3)) / len(range(first, 130, 3)) for first in (2, 1, 0)]
    assert means == pytest.approx(expected)
    assert browser.execute_script(f"{CHART}.layout.xaxis.type") == "log"
    lines = "return document.querySelectorAll('.chart')[2].data.flatMap((t) => t.x).filter((x) => x === null).length"
    assert browser.execute_script(lines) == 130


def test_an_address_reproduces_curves_and_back_returns(browser: webdriver.Chrome, site: Site) -> None:
    alone = f"#/run/{identifiers(site)['found']}/curves"
    open_page(browser, site, f"{alone}?metric=nfc&layers=net.*&smooth=0.5&from=2&to=5&segment=1&step=3")
    wait(lambda: drawn(browser))
    traces = browser.execute_script(f"{CHART}.data.map((t) => t.meta)")
    assert traces == ["net.1 (not smoothed)", "net.1"]
    assert browser.execute_script(f"{CHART}.layout.xaxis.range") == [2, 5]
    assert browser.execute_script(f"{CHART}.layout.shapes[0].x0") == 3
    smooth, raw = (browser.execute_script(f"{CHART}.data[{place}].y") for place in (1, 0))
    assert raw == pytest.approx([step / 20 for step in range(2, 6)])
    assert smooth[1] == pytest.approx((0.25 * raw[0] + 0.5 * raw[1]) / 0.75)
    browser.find_element(By.CSS_SELECTOR, ".range button").click()
    wait(lambda: "from=" not in browser.current_url)
    wait(lambda: len(browser.execute_script(f"{CHART}.data[0].x")) == 12)
    dragged = "{'xaxis.range[0]': 1.5, 'xaxis.range[1]': 4.25}"
    browser.execute_script(f"document.querySelector('.chart').emit('plotly_relayout', {dragged})")
    wait(lambda: "from=1.5&to=4.25" in browser.current_url)
    wait(lambda: browser.execute_script(f"{CHART}.data[0].x") == [1, 2, 3, 4, 5])
    browser.find_element(By.CSS_SELECTOR, "main .controls input[type=checkbox]").send_keys(Keys.SPACE)
    assert browser.execute_script("return document.activeElement.type") == "checkbox"  # not lost with the old controls
    browser.find_element(By.CSS_SELECTOR, "main .controls input[type=checkbox]").send_keys(Keys.SPACE)
    browser.find_element(By.CSS_SELECTOR, ".range button").click()
    segment = browser.find_element(By.CSS_SELECTOR, "main select")
    segment.send_keys("2")
    wait(lambda: max(browser.execute_script(f"{CHART}?.data?.[0].x ?? [99]")) == 6)
    browser.back()
    wait(lambda: max(browser.execute_script(f"{CHART}?.data?.[0].x ?? [0]")) == 11)


def test_a_map_of_layers_and_findings_that_lead_to_curves(browser: webdriver.Chrome, site: Site) -> None:
    alone = f"#/run/{identifiers(site)['found']}"
    open_page(browser, site, f"{alone}/map?segment=1")
    wait(lambda: drawn(browser) == ["NFC by layer and step"])
    assert browser.execute_script(f"{CHART}.data[0].z") == [[pytest.approx(s / 20) for s in range(12)]] * 2
    assert "2 rows and 12 columns, values from 0 to 0.55" in text(browser, ".chart-tools p")
    open_page(browser, site, f"{alone}/findings?segment=1")
    assert "3 findings, 1 of which still hold" in text(browser)
    assert "6 of 8 units never fire" in text(browser)
    assert "look at <b>dead units</b>" in text(browser).lower()
    browser.find_element(By.CSS_SELECTOR, "a[aria-label^='net.1, dead units']").send_keys(Keys.ENTER)
    wait(lambda: "/curves?" in browser.current_url and drawn(browser))
    assert "step=3" in browser.current_url
    assert "segment=1" in browser.current_url


def test_compare_any_number_of_runs_and_metrics(browser: webdriver.Chrome, site: Site) -> None:
    ids = identifiers(site)
    wanted = [ids[f"run-{place:03d}"] for place in range(60)]
    open_page(browser, site, f"#/compare?ids={','.join([*wanted, ids['found']])}")
    wait(lambda: drawn(browser))  # a metric that all of them have
    assert drawn(browser) == ["Loss of several runs"]
    assert browser.execute_script(f"{CHART}.data.length") == 61
    assert "61 runs" in text(browser)
    add = browser.find_elements(By.CSS_SELECTOR, "main .controls select")
    next(select for select in add if "metric …" in select.text).send_keys("NFC")
    wait(lambda: sorted(drawn(browser)) == ["Loss of several runs", "NFC of several runs"])
    address = browser.current_url
    browser.refresh()
    wait(lambda: sorted(drawn(browser)) == ["Loss of several runs", "NFC of several runs"])
    assert browser.current_url == address


def test_downloads_are_what_is_shown(browser: webdriver.Chrome, site: Site, tmp_path: Path) -> None:
    folder = tmp_path / "downloads"
    folder.mkdir()
    browser.execute_cdp_cmd("Browser.setDownloadBehavior", {"behavior": "allow", "downloadPath": str(folder)})
    open_page(browser, site, f"#/run/{identifiers(site)['found']}/curves?metric=nfc&layers=net.1")
    wait(lambda: drawn(browser))
    for button in browser.find_elements(By.CSS_SELECTOR, ".chart-tools button"):
        assert "NFC over the steps" in (button.get_attribute("aria-label") or "")
        button.click()
    files = {kind: folder / f"nfc-over-the-steps.{kind}" for kind in ("csv", "png", "svg")}
    wait(lambda: all(file.exists() and file.stat().st_size for file in files.values()))
    lines = files["csv"].read_text().splitlines()
    assert lines[:3] == ["name,x,y,value", "net.1,0,0,", "net.1,1,0.05,"]
    assert files["png"].read_bytes().startswith(b"\x89PNG")
    assert "<svg" in files["svg"].read_text()


def test_names_like_formulas_are_quoted_in_downloads(browser: webdriver.Chrome, site: Site) -> None:
    open_page(browser, site, "#/runs")
    script = """
    const done = arguments[0];
    import('/static/chart_text.js').then((m) => done(m.tableOfChart([
      {type: 'scatter', meta: '=1+1', x: [1], y: [null]}, {type: 'scatter', meta: 'a,"b"', x: ['-2'], y: [-2]}])));
    """
    assert browser.execute_async_script(script).split("\r\n")[1:] == ["'=1+1,1,,", '"a,""b""",\'-2,-2,']


HOSTILE = [
    "<img src=x onerror=window.broken=1>",
    "__proto__",
    "constructor",
    "%",
    "javascript:alert(1)",
    "a" * 3000,
    "*" * 200 + "b",
]


@pytest.mark.parametrize("page", ["runs", "sweeps", "compare", "ledger", "curves", "map", "words"])
def test_hostile_addresses_are_only_text(browser: webdriver.Chrome, site: Site, page: str) -> None:
    path = f"run/{identifiers(site)['found']}/{page}" if page in ("curves", "map", "words") else page
    names = (
        "filter", "sort", "column", "group", "metric", "layer", "layers", "x", "y", "color", "axis", "segment", "from",
        "to", "smooth", "page", "step", "open", "statistic", "band", "at", "verdict", "paper",
    )  # fmt: skip
    visit(browser, site.address, "#/settings")
    for value in HOSTILE:
        query = "&".join(f"{name}={quote(value)}" for name in names)
        go(browser, f"#/{path}?{query}&filter=name%3D{quote(value)}&column=s%3A{quote(quote(value))}")
        assert browser.execute_script("return document.querySelectorAll('main img').length") == 0
        assert browser.execute_script("return window.broken ?? Object.prototype.broken ?? null") is None
        if page == "map" and len(value) > 500:
            assert "layers must be text of at most 500 characters" in text(browser)
            assert ["400" in line["message"] for line in browser.get_log("browser")] == [True]
    go(browser, f"#/{path}")


def test_the_saved_page_has_the_new_views(browser: webdriver.Chrome, site: Site, tmp_path: Path) -> None:
    address = export_html(site.root, tmp_path / "saved.html").as_uri()
    ids = identifiers(site)
    visit(browser, address, "#/runs?filter=lr%3C0.05&group=s%3Alr&column=l%3Alast%3Anet.0%3Anfc")
    assert "86 of 131 runs" in text(browser)
    assert len(browser.find_elements(By.CSS_SELECTOR, ".group-row")) == 2
    go(browser, "#/sweeps?group=lr")
    wait(lambda: len(drawn(browser)) == 3)
    go(browser, f"#/run/{ids['found']}/findings")
    assert "2 findings" in text(browser) or "3 findings" in text(browser)
    go(browser, f"#/run/{ids['found']}/curves?metric=nfc&axis=time&layers=net.*")
    wait(lambda: drawn(browser))
    places = browser.execute_script(f"{CHART}.data[0].x")
    assert places == sorted(places)
    assert len(places) > 3
    go(browser, f"#/run/{ids['found']}/map")
    wait(lambda: drawn(browser))
    browser.find_element(By.CSS_SELECTOR, "main select").send_keys("1")
    cells = f"{CHART}?.data?.[0].z[0].length ?? 0"
    wait(lambda: browser.execute_script(cells) == 12)
    assert "segment=1" in browser.current_url
    for tab, expected in (
        ("findings", "3 findings, 1 of which"),
        ("words", "learning"),
        ("spectra", "bulk"),
        ("matrices", "20 × 20"),
    ):
        go(browser, f"#/run/{ids['found']}/{tab}?segment=1")
        wait(lambda wanted=expected: wanted in text(browser, ".tab-body"))
        assert "does not contain" not in text(browser)
    go(browser, f"#/run/{ids['found']}/curves?metric=nfc&axis=time&segment=1")
    wait(lambda: len(browser.execute_script(f"{CHART}?.data?.[0].x ?? []")) == 12)
    assert None not in browser.execute_script(f"{CHART}.data[0].x")
