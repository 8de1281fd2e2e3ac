"""``featlearn demo``, as a user types it."""

from __future__ import annotations

from typing import Any

import featlearn as fl


def test_demo_prints_the_table_and_writes_pictures_a_report_and_a_page(featlearn: Any) -> None:
    done = featlearn("demo")
    assert done.code == 0, done.err
    assert "NFC before" in done.out
    assert "128 x 32" in done.out
    assert done.err == ""  # the progress bar shows on terminals only
    folder = featlearn.folder / "demo"
    for name in ("features.png", "layers.png", "spectrum.png", "wine.png"):
        assert (folder / name).read_bytes().startswith(b"\x89PNG")
    report = fl.Report.load(folder / "report")
    assert f"{report['0'].nfc:.3f}" in done.out
    assert "The most important features are proline, flavanoids and alcohol" in done.out
    assert "The spectrum of the weights is bulk + spikes: 1 new eigenvalue" in done.out
    assert "demo/index.html" in done.out.splitlines()[-2]
    page = (folder / "index.html").read_text()
    assert page.count("data:image/png") == 5
    assert page.count("<table>") == 3
    assert "http" not in page.replace("http-equiv", "")


def test_demo_says_why_it_cannot_write(featlearn: Any) -> None:
    (featlearn.folder / "file").write_text("")
    assert "a file" in featlearn("demo", "--out", "file").sentence


def test_demo_and_fit_keep_runs_that_are_not_theirs(featlearn: Any) -> None:
    with fl.runs.Run.create(featlearn.folder / "mine" / "run", {"task": "mine"}) as run:
        run.log(0, {"loss": 1.0})
    (featlearn.folder / "t.csv").write_text("x,y\n" + "1,2\n" * 9)
    for command in (("demo",), ("fit", "t.csv", "--target", "y")):
        assert "was not written by this command" in featlearn(*command, "--out", "mine").sentence
    assert len(fl.runs.open(featlearn.folder / "mine" / "run").metrics()) == 1
