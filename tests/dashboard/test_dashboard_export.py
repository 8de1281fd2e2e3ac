from __future__ import annotations

import json
import re
from html import unescape
from pathlib import Path

import pytest
from dashboard_runs import EVIL, folder_of_runs

from featlearn.errors import InputError, RunStoreError
from featlearn.plots import PALETTE

pytest.importorskip("plotly")
from featlearn.dashboard import export_html
from featlearn.dashboard._app import STATIC
from featlearn.dashboard._export import bundle


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
    text = re.search(r'<script type="application/json" id="held">(.*?)</script>', page, re.DOTALL)[1]
    assert "<" not in text
    held = json.loads(text, parse_constant=lambda word: pytest.fail(f"{word} is no JSON"))
    runs = {run["name"]: run["id"] for run in held["answers"]["runs"]["runs"]}
    assert set(runs) == {"first", "second", "wine", "damaged"}
    alone = f"runs/{runs['first']}"
    assert [curve["layer"] for curve in held["answers"][f"{alone}/series?name=nfc"]["curves"]] == [EVIL, "net.1"]
    assert f"{alone}/matrices/9/net.1%2Fagop" in held["answers"]
    assert held["answers"][f"{alone}/spectra/9?layer=net.1&kind=w"]["phase"] == "bulk + spikes"
    assert held["answers"]["ledger"]["claims"]


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
