"""``featlearn reproduce``, as a user types it."""

from __future__ import annotations

import os
import signal
import time
from typing import Any

import pytest

from featlearn.runs import load_nested, save_nested


@pytest.mark.parametrize("form", ["text", pytest.param("json", marks=pytest.mark.slow)])
def test_an_experiment_by_name_prints_and_writes_its_claims(form: str, featlearn: Any) -> None:
    done = featlearn("reproduce", "nfa-fig1", "--scale", "smoke", "--out", "found", *["--json"] * (form == "json"))
    assert done.code == 0, done.err
    if form == "json":
        assert [claim["experiment"] for claim in done.json["claims"]] == ["nfa-fig1"] * 3
    else:
        assert "3 claims" in done.out
    for name in ("index.html", "nfa-fig1.html", "ledger.csv", "ledger.json", "nfa-fig1/figure-1.png"):
        assert (featlearn.folder / "found" / name).stat().st_size
    if form == "text":
        for point in (featlearn.folder / "found" / "nfa-fig1" / "smoke" / "points").iterdir():
            save_nested(point, load_nested(point)[0])  # as an older version wrote them
        kept = featlearn("reproduce", "nfa-fig1", "--scale", "smoke", "--out", "found", "--keep-stale")
        assert kept.code == 0, kept.err
        assert "3 claims: 3 stale" in kept.out
        assert "stale" in (featlearn.folder / "found" / "nfa-fig1.html").read_text()


def test_the_list(featlearn: Any) -> None:
    done = featlearn("reproduce", "--list", "--paper", "nfa")
    assert done.code == 0
    assert "nfa-fig1" in done.out
    listed = featlearn("reproduce", "--list", "--paper", "fact", "--json").json
    assert {experiment["paper"] for experiment in listed} == {"fact"}


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["nfa-fgi1"], "Did you mean nfa-fig1"),
        (["nfa-fig1", "--scale", "huge"], "'smoke', 'quick', 'full'"),
        (["--paper", "other"], "'nfa', 'fact', 'adaptive'"),
    ],
    ids=["name", "scale", "paper"],
)
def test_what_cannot_be_done_is_one_sentence(arguments: list[str], message: str, featlearn: Any) -> None:
    done = featlearn("reproduce", *arguments, "--out", "out")
    assert message in done.sentence
    assert len(done.err.strip().splitlines()) == 1
    assert not (featlearn.folder / "out").exists()


@pytest.mark.parametrize("jobs", ["1", pytest.param("2", marks=pytest.mark.slow)])
def test_ctrl_c_keeps_what_was_measured(jobs: str, featlearn: Any) -> None:
    points = featlearn.folder / "nfa-fig1" / "full" / "points"

    def interrupt(pid: int) -> None:
        deadline = time.monotonic() + 90
        while not list(points.glob("*.safetensors")) and time.monotonic() < deadline:
            time.sleep(0.05)
        os.killpg(pid, signal.SIGINT)  # a terminal sends it to all processes of the command

    done = featlearn("reproduce", "nfa-fig1", "--scale", "full", "--jobs", jobs, "--out", ".", meanwhile=interrupt)
    assert done.code == 130
    assert "stopped. Measurements are stored in" in done.err
    assert "Traceback" not in done.err
    assert 1 <= len(list(points.glob("*.safetensors"))) < 10
