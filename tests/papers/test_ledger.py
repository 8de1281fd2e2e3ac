from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pandas as pd
import pytest

from featlearn.errors import InputError
from featlearn.papers.claim import about, holds, not_tried
from featlearn.papers.experiment import Experiment, Outcome, Result
from featlearn.papers.ledger import markdown_ledger, read_records, record_of, write_ledger
from featlearn.papers.runner import Reproduction
from featlearn.plots import new_figure
from featlearn.reports.html import definitions, document, frame_table, heading, paragraph

SCRIPT = "<script>alert(1)</script>"


@dataclass(frozen=True)
class Config:
    seeds: tuple[int, ...] = (0,)


def _measure() -> Mapping[str, Any]:
    return {}


def _conclude(config: Config, outcomes: Sequence[Outcome]) -> Result:
    raise NotImplementedError


def reproduction(name: str, *claims: Any, **changes: Any) -> Reproduction:
    experiment = Experiment(
        name, f"title of {name} {SCRIPT}", (f"figure | 1 {SCRIPT}",), {}, lambda c: [], _measure, _conclude
    )
    figure = new_figure(2, 1)
    figure.subplots().plot([0, 1])
    table = pd.DataFrame({"value": [1.23456789, 2.0], "name": [SCRIPT, "b"]})
    result = Result(claims, {f"a table {SCRIPT}": table}, {f"a figure {SCRIPT}": figure}, f"remarks {SCRIPT}")
    given: dict[str, Any] = {"result": result, "seconds": 12.0, "points": (1, 1)} | changes
    return Reproduction(experiment, "quick", {"n": 3, "evil": SCRIPT}, **given)


GOOD = about("a number", "figure 1", 0.93, [0.92, 0.94], 0.03, "seeds", note=f"a note {SCRIPT}")
BAD = holds("a statement", "text", [True, False])
LEFT = not_tried("more", "figure 1", 2.0, "too large")


class _Tags(HTMLParser):
    def __init__(self) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.addresses: list[str] = []
        self.depth: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.addresses += [value or "" for name, value in attrs if name in ("src", "href")]
        if tag not in ("meta", "img", "br"):
            self.depth.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.depth.pop() == tag


def parsed(text: str) -> _Tags:
    result = _Tags()
    result.feed(text)
    assert not result.depth
    return result


def test_pages_hold_everything_and_nothing_that_runs(tmp_path: Path) -> None:
    index = write_ledger([reproduction("nfa-fig1", GOOD, BAD, LEFT)], tmp_path)
    for page in (index, tmp_path / "nfa-fig1.html"):
        tags = parsed(page.read_text())
        assert "script" not in tags.tags
        assert all(a.startswith("data:") or a in ("index.html", "nfa-fig1.html") for a in tags.addresses)
        assert "default-src 'none'" in page.read_text()
    assert "&lt;script&gt;" in page.read_text()
    names = {path.name for path in (tmp_path / "nfa-fig1").iterdir()}
    assert {Path(name).suffix for name in names} == {".png", ".svg", ".pdf", ".csv"}
    assert pd.read_csv(tmp_path / "ledger.csv")["verdict"].tolist() == [
        "reproduced",
        "differs",
        "not tried at this size",
    ]


def test_experiments_of_other_calls_stay_in_the_index(tmp_path: Path) -> None:
    write_ledger([reproduction("nfa-fig1", GOOD)], tmp_path)
    write_ledger([reproduction("nfa-zzz", BAD)], tmp_path)
    write_ledger([reproduction("nfa-fig1", GOOD, LEFT)], tmp_path)
    records = read_records(tmp_path / "ledger.json")
    assert [(r.name, len(r.claims)) for r in records] == [("nfa-fig1", 2), ("nfa-zzz", 1)]
    assert records[0].claims == (GOOD, LEFT)
    assert "3 claims of 2 experiments" in (tmp_path / "index.html").read_text()


def test_missing_data_have_a_row(tmp_path: Path) -> None:
    done = reproduction("nfa-fig1", result=None, trouble="put it there", missing_data=True)
    text = write_ledger([done], tmp_path).read_text()
    assert "data not present" in text
    assert "put it there" in (tmp_path / "nfa-fig1.html").read_text()


def test_a_damaged_ledger_is_told(tmp_path: Path) -> None:
    for content in ("{", "[]", json.dumps({"schema_version": 99, "experiments": []})):
        (tmp_path / "ledger.json").write_text(content)
        with pytest.raises(InputError, match=r"ledger.json"):
            read_records(tmp_path / "ledger.json")


def test_the_file_can_be_shown_without_the_experiments(tmp_path: Path) -> None:
    missing = reproduction("nfa-fig2", result=None, trouble="put it there", missing_data=True)
    write_ledger([reproduction("nfa-fig1", GOOD, BAD, LEFT), missing], tmp_path)
    ledger = json.loads((tmp_path / "ledger.json").read_text())
    assert ledger["schema_version"] == 3
    first, second = ledger["experiments"]
    assert first["paper_title"] == "Feature learning as alignment (NFA)"
    assert first["covers"] == [f"figure | 1 {SCRIPT}"]
    assert first["stale"] is False
    shown = ("text", "published_text", "measured_text", "tolerance_text", "verdict")
    assert [tuple(claim[name] for name in shown) for claim in first["claims"]] == [
        ("a number", "0.93", "0.93 ± 0.014", "0.03", "reproduced"),
        ("a statement", "holds", "1 of 2", "", "differs"),
        ("more", "2", "–", "", "not tried at this size"),
    ]
    assert second["trouble"] == "put it there"
    write_ledger([reproduction("nfa-fig1", GOOD, stale=1)], tmp_path)
    first = json.loads((tmp_path / "ledger.json").read_text())["experiments"][0]
    assert first["stale"] is True
    assert [claim["verdict"] for claim in first["claims"]] == ["stale"]


@pytest.mark.parametrize("version", [1, 2])
def test_ledgers_of_earlier_versions_can_be_read(version: int, tmp_path: Path) -> None:
    file = tmp_path / "ledger.json"
    write_ledger([reproduction("nfa-fig1", GOOD, BAD)], tmp_path)
    before = read_records(file)
    ledger = json.loads(file.read_text()) | {"schema_version": version}
    for record in ledger["experiments"]:
        for name in ("paper_title", "stale", *(["source"] if version == 1 else [])):
            del record[name]
        for claim in record["claims"]:
            for name in ("published_text", "measured_text", "tolerance_text"):
                del claim[name]
    file.write_text(json.dumps(ledger))
    (record,) = read_records(file)
    assert record.claims == before[0].claims
    assert record.source == ("" if version == 1 else before[0].source)


def test_the_ledger_as_markdown() -> None:
    text = markdown_ledger([record_of(reproduction("nfa-fig1", GOOD, BAD))])
    rows = [line for line in text.splitlines() if line.startswith("| a ")]
    assert len(rows) == 2
    assert all(line.replace("\\|", "").count("|") == 7 for line in rows)
    assert "<script>" not in text
    assert "1 reproduced, 1 differs" in text


def test_parts_of_a_page_are_escaped() -> None:
    page = document(SCRIPT, [heading(SCRIPT), paragraph(SCRIPT, soft=True), definitions({SCRIPT: SCRIPT})])
    assert "script" not in parsed(page).tags
    table = frame_table(pd.DataFrame({("a", SCRIPT): [True, False]}, index=pd.Index([SCRIPT, "b"], name=SCRIPT)))
    assert "script" not in parsed(table).tags
    assert "yes" in table
