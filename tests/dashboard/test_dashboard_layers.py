"""Charts and lists of a run with many layers, of short ranges and of settings, as a reader sees them."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from dashboard_browser import Site, drawn, identifiers, size, text, visit, wait
from selenium import webdriver
from selenium.webdriver.common.by import By

from featlearn.runs import Run

LAYERS = ["embed", *(f"blocks.{block}.{part}" for block in range(12) for part in ("q", "k", "in", "out")), "head"]
KINDS = {layer: ["Linear", [64, 256]] for layer in LAYERS}
CHART = "document.querySelector('.chart')"
TICKS = "return [...document.querySelectorAll('.chart .{} text')].map((tick) => tick.textContent)"


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    """A run of 50 layers whose names are not in alphabetical order, and a sweep in which settings are missing."""
    root = tmp_path_factory.mktemp("layers")
    with Run.create(root / "deep", {"tokens": 123456789, "depth": 12, "lr": 3e-4}) as run:
        run.save_note("layers", KINDS)
        for step in [0, *(2**power for power in range(12))]:
            run.log(step, {"loss": 4 / (step + 1) ** 0.4, "ridge": 0.001})
            metrics = {"nfc": 0.1 + step / 5000, "reading": "lazy" if step < 64 else "learning", "reason": "moved"}
            # The head has no value at the start.
            run.log_layers(step, dict.fromkeys(LAYERS[: None if step else -1], metrics))
    for place in range(9):
        config = {"lr": [1e-4, 1e-3, 1e-2][place % 3], **{f"setting_{n}": place % (n + 2) for n in range(6)}}
        with Run.create(root / f"sweep-{place}", config | {"same": 1}) as run:
            run.log(0, {"loss": 1.0 + place})
    result = Site(root)
    yield result
    result.stop()


def test_layers_are_in_the_order_of_the_model(browser: webdriver.Chrome, site: Site) -> None:
    alone = f"#/run/{identifiers(site)['deep']}"
    visit(browser, site.address, f"{alone}/map")
    wait(lambda: drawn(browser))
    assert browser.execute_script(TICKS.format("ytick")) == [f"{layer} (Linear 64 × 256)" for layer in LAYERS]
    assert browser.execute_script(TICKS.format("xtick")) == ["0", "1", "10", "100", "1000"]
    assert "Gray cells have no value." in text(browser)
    visit(browser, site.address, f"{alone}/map?logx=0")
    wait(lambda: drawn(browser))
    first, last = browser.execute_script(f"return {CHART}.layout.xaxis.range")
    assert -1 <= first < 0
    assert 2048 < last < 2200
    visit(browser, site.address, f"{alone}/curves?metric=nfc")
    wait(lambda: drawn(browser))
    summary = "50 curves: embed (Linear 64 × 256)  head (Linear 64 × 256)"
    assert text(browser, ".key summary") == summary
    assert browser.execute_script(f"return {CHART}.data.map((trace) => trace.meta.split(' ')[0])") == LAYERS
    visit(browser, site.address, f"{alone}/words?layers=blocks.1.*+head")
    strips = "return [...document.querySelectorAll('.strip-name bdi')].map((name) => name.textContent)"
    assert browser.execute_script(strips) == [*(f"blocks.1.{part}" for part in ("q", "k", "in", "out")), "head"]
    assert len(browser.find_elements(By.CSS_SELECTOR, "article.layer")) == 5
    lasted = "return document.querySelector('.strip').getAttribute('aria-label')"
    assert browser.execute_script(lasted) == "lazy, steps 0 to 32; learning, steps 64 to 2048"


def test_axes_show_the_size_of_the_values(browser: webdriver.Chrome, site: Site) -> None:
    alone = f"#/run/{identifiers(site)['deep']}"
    visit(browser, site.address, f"{alone}/curves?metric=loss")
    wait(lambda: drawn(browser))
    ticks = browser.execute_script(TICKS.format("ytick"))
    assert len(ticks) >= 2
    assert all(float(tick) > 0 for tick in ticks)
    visit(browser, site.address, f"{alone}/curves?metric=ridge")
    wait(lambda: drawn(browser))
    assert browser.execute_script(f"return {CHART}.layout.yaxis.range") == [0, 0.002]
    visit(browser, site.address, f"{alone}/settings")
    assert "123456789" in text(browser)


@pytest.mark.parametrize(
    ("low", "high"),
    [(0.268, 0.2999), (0.1, 0.3), (1.0, 1.0001), (3.1e-7, 3.9e-7), (950.0, 1050.0), (0.268, 0.45), (2, 6)],
)
def test_narrow_logarithmic_axes_have_round_ticks(
    low: float, high: float, browser: webdriver.Chrome, site: Site
) -> None:
    visit(browser, site.address, "#/runs")
    script = "const [low, high, done] = arguments; import('/static/axes.js').then((m) => done(m.logTicks([low, high])))"
    axis = browser.execute_async_script(script, low, high)
    assert axis["type"] == "log"
    assert 3 <= len(axis["tickvals"]) <= 8
    assert all(low <= value <= high for value in axis["tickvals"])
    assert len(set(axis["ticktext"])) == len(axis["ticktext"])


@pytest.mark.parametrize(
    ("values", "expected"), [([0.01, 0.01 + 2e-18], [0, 0.02]), ([1.0, 1.001], None), ([0, 0], None)]
)
def test_constants_up_to_rounding_have_their_size(values, expected, browser: webdriver.Chrome, site: Site) -> None:
    visit(browser, site.address, "#/runs")
    script = "const [values, done] = arguments; import('/static/axes.js').then((m) => done(m.constantRange(values)))"
    assert browser.execute_async_script(script, values).get("range") == expected


def test_parallel_coordinates_start_with_settings_of_most_runs(browser: webdriver.Chrome, site: Site) -> None:
    axes = "return document.querySelectorAll('.chart')[2].layout.annotations.filter((a) => a.y < 0).map((a) => a.text)"
    for width, count in ((1280, 7), (390, 3)):
        size(browser, width)
        visit(browser, site.address, "#/sweeps")
        wait(lambda: len(drawn(browser)) == 3)
        titles = browser.execute_script(axes)
        assert titles[:2] == ["lr", "setting_0"]
        assert (len(titles), titles[-1].startswith("Loss")) == (count + 1, True)
        ends = """
        const chart = document.querySelectorAll('.chart')[2];
        const [frame, ...boxes] = [chart, ...chart.querySelectorAll('.annotation')]
          .map((node) => node.getBoundingClientRect());
        return boxes.filter((box) => box.left < frame.left - 1 || box.right > frame.right + 1).length;
        """
        assert browser.execute_script(ends) == 0
    assert "The first 3 of 7 selected settings fit on this screen." in text(browser)


def test_compare_without_runs_and_with_chosen_ones_first(browser: webdriver.Chrome, site: Site) -> None:
    visit(browser, site.address, "#/compare?ids=none")
    assert "Select runs below." in text(browser)
    assert "Select two runs to compare settings." in text(browser)
    ids = identifiers(site)
    visit(browser, site.address, f"#/compare?ids={ids['sweep-0']},{ids['deep']}")
    picks = (
        "return [...document.querySelectorAll('.picks input')].map((box) => [box.labels[0].textContent, box.checked])"
    )
    listed = browser.execute_script(picks)
    assert listed[:2] == [["sweep-0", True], ["deep", True]]
    assert [checked for _, checked in listed[2:]] == [False] * 8
