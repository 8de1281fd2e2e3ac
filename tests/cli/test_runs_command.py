"""``featlearn runs``, as a user types it."""

from __future__ import annotations

from typing import Any

import pandas as pd
import torch

from featlearn.runs import Run


def test_runs_are_listed_shown_compared_exported_and_removed(featlearn: Any) -> None:
    folder = featlearn.folder
    for name, lr in (("a", 0.1), ("b", 0.2)):
        with Run.create(folder / "runs" / name, {"lr": lr, "net": {"width": 8}}) as run:
            for step in (0, 5):
                run.log(step, {"loss": lr / (step + 1)})
                run.log(step, {"nfc": 0.5 + lr, "seldom": float("nan")}, layer="block.[0]")
            run.log(5, {"reading": "aligned", "reason": "NFC 0.6"}, layer="block.[0]")
            run.save_matrices(5, {"M": torch.eye(2)})
    (folder / "runs" / "broken").mkdir()
    (folder / "runs" / "broken" / "run.db").write_bytes(b"junk" * 300)

    listed = featlearn("runs", "list", "runs")
    assert listed.code == 0
    assert "3 runs" in listed.out
    assert "unreadable" in listed.out
    table = featlearn("runs", "list", "runs", "--json").json
    assert [row["name"] for row in table] == ["a", "b", "broken"]
    assert featlearn("runs", "list", "runs/a/matrices").out == "no runs in runs/a/matrices\n"

    shown = featlearn("runs", "show", "runs/a")
    assert "net.width" in shown.out
    assert "0.0167" in shown.out
    assert "layer block.[0]: aligned, NFC 0.6" in shown.out
    assert "seldom" not in shown.out
    assert "seldom" in featlearn("runs", "show", "runs/a", "--all").out
    reported = featlearn("runs", "show", "runs/a", "--json").json
    assert reported["layers"] == {"block.[0]": {"nfc": 0.6}}
    assert reported["config"] == {"lr": 0.1, "net": {"width": 8}}

    compared = featlearn("runs", "compare", "runs/a", "runs/b", "--json").json
    assert compared["settings"] == {"lr": {"a": 0.1, "b": 0.2}}
    assert compared["last"]["b"]["loss"] == 0.2 / 6
    assert "width" not in featlearn("runs", "compare", "runs/a", "runs/b").out
    assert "twice" in featlearn("runs", "compare", "runs/a", "runs/a").sentence

    assert featlearn("runs", "export", "runs/a", "a.csv").code == 0
    assert len(pd.read_csv(folder / "a.csv")) == 6
    assert "ends in .csv or .parquet" in featlearn("runs", "export", "runs/a", "a.txt").sentence

    refused = featlearn("runs", "remove", "runs/a", stdin="n\n")
    assert refused.code == 1
    assert "Pass --yes" in featlearn("runs", "remove", "runs/a", "--json").sentence
    assert (folder / "runs/a/run.db").exists()
    assert featlearn("runs", "remove", "runs/a", stdin="y\n").code == 0
    assert featlearn("runs", "remove", "runs/b", "--yes", "--json").json == {"removed": "runs/b"}
    assert not (folder / "runs/b").exists()
    assert "runs/a" in featlearn("runs", "remove", "runs/a", "--yes").sentence


def test_numbers_of_runs_with_long_names_stand_under_their_run(featlearn: Any) -> None:
    names = [f"{letter}{'-the-same-long-ending' * 2}" for letter in "ab"]
    for number, name in enumerate(names):
        with Run.create(featlearn.folder / name, {"lr": number}) as run:
            run.log(0, {"loss": 10.0 + number})
    reported = featlearn("runs", "compare", *names).out
    row = next(line for line in reported.splitlines() if "loss" in line)
    assert [cell.strip() for cell in row.strip("│").split("│")][1:] == ["10", "11"]
    assert f": {names[0]}" in reported
