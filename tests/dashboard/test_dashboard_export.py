from __future__ import annotations

import json
import re
import warnings
from html import unescape
from pathlib import Path
from typing import Any

import pytest
from dashboard_runs import EVIL, folder_of_runs, log_findings, log_step, trained_run

from featlearn.errors import InputError, RunStoreError
from featlearn.plots import PALETTE

pytest.importorskip("plotly")
pytest.importorskip("starlette")
from starlette.testclient import TestClient

from featlearn.dashboard import create_app, export_html
from featlearn.dashboard._app import STATIC
from featlearn.dashboard._export import bundle

HELD = re.compile(r'<script type="application/json" id="held">(.*?)</script>', re.DOTALL)


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> str:
    root = folder_of_runs(tmp_path_factory.mktemp("runs"))
    return export_html(root, root.parent / "out" / "page.html").read_text(encoding="utf-8")


def test_the_file_needs_nothing_from_elsewhere(page: str) -> None:
    policy = unescape(re.search(r'Content-Security-Policy" content="([^"]*)"', page)[1])
    assert policy.startswith("default-src 'none'; script-src 'sha256-")
    assert "http" not in policy
    assert "connect-src" not in policy
    assert "'self'" not in policy
    alone = re.sub(r"<script>.*?</script>", "", page, count=1, flags=re.DOTALL)  # plotly itself
    assert not re.search(r"(?:src|href)=[\"'](?!data:|#)", re.sub(r"<script.*?</script>", "", alone, flags=re.DOTALL))
    assert "@import" not in alone
    assert "https://" not in alone.replace("https://plotly.com", "")


def test_data_is_inert_and_whole(page: str) -> None:
    text = HELD.search(page)[1]
    assert "<" not in text
    held = json.loads(text, parse_constant=lambda word: pytest.fail(f"{word} is no JSON"))
    runs = {run["name"]: run["id"] for run in held["answers"]["runs"]["runs"]}
    assert set(runs) == {"first", "second", "wine", "damaged"}
    alone = f"runs/{runs['first']}"
    assert [curve["layer"] for curve in held["answers"][f"{alone}/series?name=nfc"]["curves"]] == [EVIL, "net.1"]
    assert f"{alone}/matrices/9/net.1%2Fagop" in held["answers"]
    assert held["answers"][f"{alone}/spectra/9?layer=net.1&kind=w"]["phase"] == "bulk + spikes"
    assert held["answers"]["ledger"]["claims"]


def segmented_run(root: Path, segments: int) -> None:
    """A run whose steps go back several times, with another loss in each segment."""
    run = trained_run(root, "again", steps=8)
    log_findings(run, steps=8)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for segment in range(2, segments + 1):
            run.log(4, {"loss": 10.0 * segment, f"only {segment}": 1.0})
            log_step(run, 6)
    run.finish()


def test_every_segment_is_in_the_file(tmp_path: Path) -> None:
    segmented_run(tmp_path / "runs", 3)
    held = held_by(export_html(tmp_path / "runs", tmp_path / "page.html"))
    with TestClient(create_app(tmp_path / "runs"), base_url="http://127.0.0.1:8050") as client:
        name = client.get("/api/runs").json()["runs"][0]["id"]
        alone = f"runs/{name}"
        assert held[alone]["file_segments"] == len(held[alone]["segment_list"]) == 3
        for segment in (1, 2):
            served = client.get(f"/api/{alone}?segment={segment}").json()
            assert held[f"{alone}?segment={segment}"]["matrix_steps"] == served["matrix_steps"]
            addresses = ["words", "findings", "series?name=loss", "series?name=nfc"]
            last = served["matrix_steps"][-1]
            addresses += [f"spectra/{last}?layer=net.1&kind=w", f"matrices/{last}/net.1%2Fagop"]
            for what in addresses:
                address = f"{alone}/{what}{'&' if '?' in what else '?'}segment={segment}"
                answer = client.get(f"/api/{address}").json()
                assert answer["curves" if "series" in what else "step" if "/" in what else what]
                if "matrices" not in what:  # rounded in the file
                    assert held[address] == answer, what
        assert held[f"{alone}/series?name=only%202&segment=2"]["curves"][0]["steps"] == [4]
        assert f"{alone}/series?name=only%203&segment=2" not in held
    losses = [
        held[f"{alone}/series?name=loss{query}"]["curves"][0]["values"] for query in ("&segment=1", "&segment=2", "")
    ]
    assert [values[4] for values in losses] == [0.2, 20.0, 30.0]


def test_the_latest_segments_of_many_are_in_the_file(tmp_path: Path) -> None:
    segmented_run(tmp_path / "runs", 11)
    held = held_by(export_html(tmp_path / "runs", tmp_path / "page.html"))
    (details,) = (
        answer
        for address, answer in held.items()
        if address.startswith("runs/") and address.count("/") == 1 and "?" not in address
    )
    assert (details["file_segments"], len(details["segment_list"])) == (8, 11)
    asked = {address.partition("segment=")[2].partition("&")[0] for address in held if "segment=" in address}
    assert asked == {str(segment) for segment in range(4, 11)}


def held_by(path: Path) -> dict[str, Any]:
    """Return the data of an exported file by address."""
    return dict(json.loads(HELD.search(path.read_text(encoding="utf-8"))[1])["answers"])


def test_modules_are_put_together(page: str) -> None:
    script = bundle()
    assert not re.search(r"^\s*(import|export) ", script, re.MULTILINE)
    names = re.findall(r"^(?:async function|function|const|let) (\w+)", script, re.MULTILINE)
    assert len(names) == len(set(names))
    assert script in page
    inner = [path.read_text() for path in STATIC.glob("*.js")]
    assert not any(re.search(r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|eval\(", text) for text in inner)
    assert json.dumps(PALETTE) in next(text for text in inner if "const PALETTE" in text)


def test_one_run_and_places_that_cannot_be(tmp_path: Path) -> None:
    root = folder_of_runs(tmp_path / "runs")
    target = export_html(root / "first", tmp_path / "one.html")
    assert '"single":true' in target.read_text(encoding="utf-8")
    assert [path.name for path in tmp_path.iterdir()] != []
    assert not list(tmp_path.glob(".one.html*"))
    with pytest.raises(InputError, match="root must be an existing folder"):
        export_html(tmp_path / "none", tmp_path / "x.html")
    with pytest.raises(RunStoreError, match="cannot be written"):
        export_html(root, root / "ledger.json" / "x.html")
