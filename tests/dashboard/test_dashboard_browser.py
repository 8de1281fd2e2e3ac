"""The pages in a real browser, against a real server."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from dashboard_browser import Site, drawn, go, identifiers, text, visit, wait
from dashboard_runs import EVIL, folder_of_runs, trained_run
from selenium import webdriver
from selenium.webdriver.common.by import By
from selenium.webdriver.common.keys import Keys

from featlearn.dashboard import export_html


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    result = Site(folder_of_runs(tmp_path_factory.mktemp("site")))
    yield result
    result.stop()


def test_the_list_is_sorted_searched_and_leads_on(browser: webdriver.Chrome, site: Site) -> None:
    visit(browser, site.address, "")
    names = "return [...document.querySelectorAll('tbody td[data-title=Run] a')].map((a) => a.textContent)"
    assert browser.execute_script(names) == ["wine", "second", "first", "damaged"]
    assert "not a database" in text(browser)
    button = browser.find_element(By.CSS_SELECTOR, "button[data-key=name]")
    button.send_keys(Keys.ENTER)
    assert browser.execute_script(names) == ["damaged", "first", "second", "wine"]
    assert browser.execute_script("return document.activeElement.dataset.key") == "name"
    search = browser.find_element(By.ID, "search")
    search.send_keys("lr 0.2")
    assert browser.execute_script(names) == ["second"]
    search.send_keys(" nothing")
    assert "No run matches" in text(browser)
    search.clear()
    search.send_keys(Keys.SPACE)
    for name in ("first", "second"):
        browser.find_element(By.CSS_SELECTOR, f"input[aria-label='select {name} to compare']").click()
    browser.find_element(By.LINK_TEXT, "Compare 2 selected").click()
    wait(lambda: "NFC of several runs" in drawn(browser))
    assert browser.execute_script("return document.querySelector('.chart').data.length") == 2
    assert "lr" in text(browser)
    assert "net.width" not in text(browser)


def test_curves_and_names_that_are_only_text(browser: webdriver.Chrome, site: Site) -> None:
    visit(browser, site.address, f"#/run/{identifiers(site)['first']}")
    wait(lambda: len(drawn(browser)) >= 4)
    assert "NFC over the steps" in drawn(browser)
    legends = "return [...document.querySelectorAll('.legendtext')].map((t) => t.textContent)"
    assert any("<img src=x onerror=window.broken=1>" in legend for legend in browser.execute_script(legends))
    assert browser.execute_script("return document.querySelectorAll('main img, main b').length") == 0
    choose = browser.find_elements(By.CSS_SELECTOR, "main .grid select")[0]
    choose.send_keys("Spikes of W")
    wait(lambda: "Spikes of W over the steps" in drawn(browser))


def test_words_phases_and_spectra(browser: webdriver.Chrome, site: Site) -> None:
    alone = f"#/run/{identifiers(site)['first']}"
    visit(browser, site.address, f"{alone}/words")
    assert EVIL in text(browser)
    assert "The features are changing." in text(browser)
    go(browser, f"{alone}/spectra")
    wait(lambda: browser.find_elements(By.CSS_SELECTOR, ".chart[data-drawn]"))
    assert "A few eigenvalues have left the bulk" in text(browser)
    assert browser.execute_script("return document.querySelectorAll('.strip .p-spikes').length") == 2
    assert "new spike" in browser.execute_script("return document.querySelector('.chart').data.map((t) => t.name)")


def test_the_slider_changes_the_heat_map(browser: webdriver.Chrome, site: Site) -> None:
    visit(browser, site.address, f"#/run/{identifiers(site)['first']}/matrices")
    step = "return document.querySelector('.chart')?.dataset.step"
    wait(lambda: browser.execute_script(step) == "9")
    corner = "return document.querySelector('.chart').data[0].z[0][0]"
    before = browser.execute_script(corner)
    browser.find_element(By.CSS_SELECTOR, "input[type=range]").send_keys(Keys.ARROW_LEFT)
    wait(lambda: browser.execute_script(step) == "6")
    assert browser.execute_script(corner) != before
    assert text(browser, "output") == "6"


def test_a_feature_machine(browser: webdriver.Chrome, site: Site) -> None:
    visit(browser, site.address, f"#/run/{identifiers(site)['wine']}")
    wait(lambda: len(drawn(browser)) == 3)
    assert "ridge" in text(browser, "dl.numbers")  # the same at all iterations: told, and not drawn
    assert "classification of cultivar from 3 features" in text(browser)
    bars = "return document.querySelectorAll('.chart')[1].data[0].x"
    assert browser.execute_script(bars) == pytest.approx([0, 1 / 3, 2 / 3])
    assert any("<i>hue</i>" in label for label in browser.execute_script(
        "return [...document.querySelectorAll('.chart text')].map((t) => t.textContent)"))  # fmt: skip


def test_the_ledger_is_filtered(browser: webdriver.Chrome, site: Site) -> None:
    visit(browser, site.address, "#/ledger")
    assert "NFC <b>of</b> the first layer" in text(browser)
    browser.find_element(By.CSS_SELECTOR, "main select").send_keys("differs")
    wait(lambda: "1 claims, 0 reproduced" in text(browser))
    assert "NFC <b>of</b>" not in text(browser)
    assert browser.current_url.endswith("#/ledger?verdict=differs")
    browser.find_element(By.CSS_SELECTOR, "button[data-key=where]").send_keys(Keys.ENTER)
    assert browser.execute_script("return document.activeElement.dataset.key") == "where"
    address = browser.current_url
    browser.refresh()
    wait(lambda: "1 claims, 0 reproduced" in text(browser))
    assert browser.current_url == address
    assert browser.execute_script("return document.querySelector('th[aria-sort=ascending]').textContent") == "Source ↑"
    browser.back()
    browser.back()
    wait(lambda: "2 claims, 1 reproduced" in text(browser))
    visit(browser, site.address, "#/ledger?verdict=nothing&paper=none&sort=nothing")
    assert "2 claims, 1 reproduced" in text(browser)


def test_trouble_is_told(browser: webdriver.Chrome, site: Site, tmp_path: Path) -> None:
    visit(browser, site.address, f"#/run/{identifiers(site)['damaged']}")
    assert "This run cannot be read" in text(browser)
    empty = Site(tmp_path)
    try:
        visit(browser, empty.address, "")
        assert "No runs yet" in text(browser)
        assert "monitor = featlearn.Monitor(" in text(browser)
        trained_run(tmp_path, "late").finish()
        wait(lambda: "late" in text(browser))
    finally:
        browser.get("about:blank")
        empty.stop()


def test_light_and_dark_are_kept(browser: webdriver.Chrome, site: Site) -> None:
    visit(browser, site.address, f"#/run/{identifiers(site)['first']}")
    paper = "return getComputedStyle(document.documentElement).backgroundColor"
    wait(lambda: drawn(browser))
    light = browser.execute_script(paper)
    ink = "return document.querySelector('.chart').layout.font.color"
    before = browser.execute_script(ink)
    browser.find_element(By.CSS_SELECTOR, "button.theme").click()
    assert browser.execute_script(paper) != light
    wait(lambda: browser.execute_script(ink) != before)
    visit(browser, site.address, "")
    assert browser.execute_script("return document.documentElement.dataset.theme") == "dark"
    browser.execute_script("localStorage.clear()")


def test_the_saved_page_works_alone(browser: webdriver.Chrome, site: Site, tmp_path: Path) -> None:
    address = export_html(site.root, tmp_path / "saved.html").as_uri()
    result = identifiers(site)
    visit(browser, address, "")
    assert "exported page" in text(browser, "header")
    go(browser, f"#/run/{result['first']}")
    wait(lambda: len(drawn(browser)) >= 4)
    go(browser, f"#/run/{result['first']}/matrices")
    wait(lambda: len(drawn(browser)) == 2)
    go(browser, f"#/compare?ids={result['first']},{result['second']}")
    wait(lambda: len(drawn(browser)) == 1)
    assert browser.execute_script("return document.querySelector('.chart').data.length") == 2
    assert "0.2" in text(browser, "tbody")
