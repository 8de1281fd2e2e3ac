"""All pages by keyboard and screen reader: names, landmarks, titles, focus, and contrast in both themes."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from typing import Any

import pytest
from dashboard_browser import Site, drawn, go, identifiers, size, text, visit, wait
from dashboard_runs import folder_of_runs, log_findings, log_step, trained_run
from selenium import webdriver
from selenium.webdriver.common.by import By
from selenium.webdriver.common.keys import Keys

CONTROLS = {
    "button",
    "link",
    "checkbox",
    "combobox",
    "searchbox",
    "textbox",
    "slider",
    "spinbutton",
    "DisclosureTriangle",
}
TABS = ("curves", "map", "words", "findings", "spectra", "matrices", "settings")
TAB = {"type": "rawKeyDown", "key": "Tab", "code": "Tab", "windowsVirtualKeyCode": 9}
LEAST_CONTRAST = 4.5
CONTRAST = """
const pixel = Object.assign(document.createElement('canvas'), {width: 1, height: 1});
const canvas = pixel.getContext('2d', {willReadFrequently: true});
const rgba = (color) => {
  canvas.clearRect(0, 0, 1, 1); canvas.fillStyle = color; canvas.fillRect(0, 0, 1, 1);
  const [r, g, b, a] = canvas.getImageData(0, 0, 1, 1).data;
  return [r, g, b, a / 255];
};
const over = ([r, g, b, a], under) => [r, g, b].map((part, i) => part * a + under[i] * (1 - a));
const light = (color) => {
  const linear = (part) => (part <= 0.04045 ? part / 12.92 : ((part + 0.055) / 1.055) ** 2.4);
  const [r, g, b] = color.map((part) => linear(part / 255));
  return 0.2126 * r + 0.7152 * g + 0.0722 * b;
};
const parents = (node) => (node ? [...parents(node.parentElement), node] : []);
const behind = (node) => parents(node).filter((one) => !(one instanceof SVGElement))
  .reduce((under, one) => over(rgba(getComputedStyle(one).backgroundColor), under), [255, 255, 255]);
const [least] = arguments;
const found = [];
let count = 0;
const check = (node, color, words) => {
  const style = getComputedStyle(node);
  const box = node.getBoundingClientRect();
  const paths = parents(node);
  if (box.width < 2 || box.height < 2 || style.visibility === 'hidden') return;
  if (paths.some((one) => one.disabled || one.hidden)) return;
  const under = behind(node);
  const [r, g, b, a] = rgba(color);
  const opacity = paths.reduce((product, one) => product * Number(getComputedStyle(one).opacity), a);
  const [high, low] = [light(over([r, g, b, opacity], under)), light(under)].sort((x, y) => y - x);
  const ratio = (high + 0.05) / (low + 0.05);
  count += 1;
  const name = node.className.baseVal ?? node.className;
  if (ratio < least) found.push(`${ratio.toFixed(2)} ${name} ${words.slice(0, 40)}`);
};
const walker = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
while (walker.nextNode()) {
  const node = walker.currentNode.parentElement;
  const words = walker.currentNode.textContent.trim();
  if (!words || ['SCRIPT', 'STYLE', 'NOSCRIPT', 'OPTION'].includes(node.tagName)) continue;
  check(node, node instanceof SVGElement ? getComputedStyle(node).fill : getComputedStyle(node).color, words);
}
for (const node of document.querySelectorAll('select, input')) check(node, getComputedStyle(node).color, node.id);
for (const node of document.querySelectorAll('[placeholder]')) {
  check(node, getComputedStyle(node, '::placeholder').color, node.placeholder);
}
return [count, found];
"""
REACHABLE = """
const seen = (node) => node.checkVisibility() && node.getClientRects().length && !node.disabled;
return [...document.querySelectorAll('button, select, input, a[href], summary')].filter(seen).map((node, place) => {
  node.dataset.place = place;
  return [String(place), node.outerHTML.slice(0, 160)];
});
"""
FOCUSED = """
const node = document.activeElement;
const style = getComputedStyle(node);
const box = node.getBoundingClientRect();
const drawn = style.outlineStyle !== 'none' && parseFloat(style.outlineWidth) >= 1;
return [node.dataset.place ?? null, drawn && box.bottom > 0 && box.top < innerHeight];
"""


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    root = folder_of_runs(tmp_path_factory.mktemp("site"))
    run = trained_run(root, "found", layers=10)
    log_findings(run)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        log_step(run, 6, layers=10)
    run.finish()
    result = Site(root)
    yield result
    result.stop()


@pytest.fixture(scope="module")
def pages(site: Site) -> dict[str, int]:
    """Addresses of all pages, with the number of their charts."""
    ids = identifiers(site)
    charts = {"curves?segment=1": 4, "map": 1, "spectra": 1, "matrices": 2}
    tabs = {
        f"#/run/{ids['found']}/{tab}": charts.get(tab, 0) for tab in (*TABS, "curves?segment=1", "findings?segment=1")
    }
    tabs[f"#/run/{ids['found']}/curves"] = 4
    features = {f"#/run/{ids['wine']}/{tab}": count for tab, count in (("features", 3), ("curves", 3), ("matrices", 1))}
    lists = {"#/runs?group=s%3Alr&open=0.1&column=m%3Abest%3Aloss&column=s%3Alr": 0, "#/runs?filter=none%3C1": 0}
    many = {"#/sweeps": 3, "#/compare": 1, "#/compare?ids=none": 0, "#/ledger": 0}
    return lists | many | tabs | features | {f"#/run/{ids['damaged']}": 0}


def open_page(browser: webdriver.Chrome, site: Site, pages: dict[str, int], where: str) -> None:
    if browser.current_url.startswith(site.address):
        go(browser, where)
    else:
        visit(browser, site.address, where)
    wait(lambda: len(drawn(browser)) >= pages[where])


def tree(browser: webdriver.Chrome) -> list[dict[str, Any]]:
    """Nodes of the accessibility tree: role, name, description, and whether they can be focused."""
    nodes = browser.execute_cdp_cmd("Accessibility.getFullAXTree", {})["nodes"]
    return [
        {
            **{key: str(node.get(key, {}).get("value", "")) for key in ("role", "name", "description")},
            "focusable": any(p["name"] == "focusable" and p["value"]["value"] for p in node.get("properties", ())),
        }
        for node in nodes
        if not node["ignored"]
    ]


def test_all_controls_charts_and_pages_have_names(browser: webdriver.Chrome, site: Site, pages: dict[str, int]) -> None:
    titles = {}
    for where in pages:
        open_page(browser, site, pages, where)
        nodes = tree(browser)
        roles = [node["role"] for node in nodes]
        controls = [node for node in nodes if node["role"] in CONTROLS]
        assert len(controls) >= 6, where
        assert [node for node in controls if not node["name"].strip()] == [], where
        others = {node["role"] for node in nodes if node["focusable"]} - CONTROLS
        assert others <= {"RootWebArea", "main", "option"}, where  # nothing else can be focused
        for landmark in ("main", "banner"):
            assert roles.count(landmark) == 1, (where, landmark)
        assert all(node["name"] for node in nodes if node["role"] == "navigation"), where
        charts = [node for node in nodes if node["role"] == "image" and node["name"] in drawn(browser)]
        assert len(charts) == len(drawn(browser)) == pages[where], where
        assert [node["name"] for node in charts if len(node["description"]) < 10] == [], where
        assert browser.execute_script("return document.querySelectorAll('h1').length") == 1, where
        assert browser.execute_script("return document.documentElement.lang") == "en"
        scopes = "return [...document.querySelectorAll('th')].filter((th) => !['col', 'row'].includes(th.scope)).length"
        assert browser.execute_script(scopes) == 0, where
        heads = "return [...document.querySelectorAll('table')].filter((t) => !t.querySelector('thead th')).length"
        assert browser.execute_script(heads) == 0, where
        ids = "const all = [...document.querySelectorAll('main [id]:not(svg *)')].map((n) => n.id); "
        ids += "return all.length - new Set(all).size"
        assert browser.execute_script(ids) == 0, where
        titles[where.partition("?")[0]] = browser.title
    assert all(title.endswith(": featlearn") for title in titles.values())
    assert len(set(titles.values())) == len(titles)


def test_the_tab_key_reaches_every_control_and_the_focus_is_seen(
    browser: webdriver.Chrome, site: Site, pages: dict[str, int]
) -> None:
    for where in pages:
        open_page(browser, site, pages, where)
        wanted = dict(browser.execute_script(REACHABLE))
        reached, unseen = set(), []
        for _ in range(len(wanted) + 30):
            browser.execute_cdp_cmd("Input.dispatchKeyEvent", TAB)
            place, seen = browser.execute_script(FOCUSED)
            if place in reached:
                break
            if place is not None:
                reached.add(place)
                unseen += [] if seen else [wanted[place]]
        assert [wanted[place] for place in sorted(wanted.keys() - reached)] == [], where
        assert unseen == [], where


def test_texts_have_contrast_in_both_themes(browser: webdriver.Chrome, site: Site, pages: dict[str, int]) -> None:
    redrawn = """
    const ink = getComputedStyle(document.documentElement).getPropertyValue('--ink').trim();
    return [...document.querySelectorAll('.chart')].every((chart) => chart.layout.font.color === ink);
    """
    for where in pages:
        open_page(browser, site, pages, where)
        papers = set()
        for theme in ("dark", "light"):
            emulate_theme(browser, theme)
            wait(lambda: browser.execute_script(redrawn))
            papers.add(browser.execute_script("return getComputedStyle(document.documentElement).backgroundColor"))
            count, faint = browser.execute_script(CONTRAST, LEAST_CONTRAST)
            assert count >= 10, where
            assert faint == [], (where, theme)
        assert len(papers) == 2


def emulate_theme(browser: webdriver.Chrome, theme: str) -> None:
    features = [{"name": "prefers-color-scheme", "value": theme}]
    browser.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": features})


def test_the_legend_of_many_curves_opens_by_key(browser: webdriver.Chrome, site: Site, pages: dict[str, int]) -> None:
    where = next(where for where in pages if where.endswith("/curves"))
    visit(browser, site.address, f"{where}?metric=nfc")
    wait(lambda: drawn(browser))
    assert text(browser, ".key summary").startswith("10 curves: <b>x</b>")
    listed = "return [...document.querySelectorAll('.key-list span')].filter((s) => s.checkVisibility()).length"
    assert browser.execute_script(listed) == 0
    browser.find_element(By.CSS_SELECTOR, ".key summary").send_keys(Keys.ENTER)
    assert browser.execute_script(listed) == 10


def test_no_page_scrolls_sideways_on_a_phone(browser: webdriver.Chrome, site: Site, pages: dict[str, int]) -> None:
    size(browser, 390)
    for where in pages:
        open_page(browser, site, pages, where)
        assert browser.execute_script("return document.documentElement.scrollWidth") <= 390, where
