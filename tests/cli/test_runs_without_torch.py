"""Commands that list, show and export runs start quickly: they import neither torch nor pandas nor scipy."""

from __future__ import annotations

import json
import subprocess
import sys
import warnings
from pathlib import Path

import pytest

from featlearn.runs import Run, export

HEAVY = ("torch", "pandas", "scipy", "sklearn", "matplotlib", "pyarrow")
CODE = f"""
import atexit, json, sys
sys.argv[0] = "featlearn"
atexit.register(lambda: print(json.dumps([name for name in {HEAVY} if name in sys.modules]), file=sys.stderr))
from featlearn.cli import app
app()
"""


def run_command(*arguments: str) -> tuple[str, list[str]]:
    """Output of a command in an interpreter of its own, and the heavy packages that it has imported."""
    done = subprocess.run([sys.executable, "-c", CODE, *arguments], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    return done.stdout, json.loads(done.stderr.splitlines()[-1])


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    with Run.create(tmp_path / "a", {"lr": 0.1}) as run, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for step in (0, 1, 2, 1):
            run.log(step, {"loss": 1.0 + step, "note": "text"})
            run.log(step, {"nfc": 0.5, "gap": float("nan")}, layer='net.0, "quoted"')
    return tmp_path


def test_no_command_on_runs_imports_torch(folder: Path) -> None:
    run, table = str(folder / "a"), folder / "a.csv"
    for arguments in (
        ["--help"],
        ["runs", "--help"],
        ["runs", "list", str(folder)],
        ["runs", "list", str(folder), "--json"],
        ["runs", "show", run, "--all"],
        ["runs", "show", run, "--json"],
        ["runs", "export", run, str(table)],
    ):
        output, imported = run_command(*arguments)
        assert imported == [], arguments
        assert output


def test_the_check_notices_an_import(folder: Path) -> None:
    assert "pandas" in run_command("runs", "compare", str(folder / "a"), str(other_run(folder)))[1]


def other_run(folder: Path) -> Path:
    Run.create(folder / "b", {"lr": 0.2}).finish()
    return folder / "b"


def test_an_export_has_the_values_of_the_segment(folder: Path) -> None:
    for segment, losses in (("1", ["1.0", "2.0", "3.0"]), ("2", ["1.0", "2.0"])):
        run_command("runs", "export", str(folder / "a"), str(folder / "a.csv"), "--segment", segment)
        lines = (folder / "a.csv").read_text().splitlines()
        assert lines[0] == "run,step,layer,name,value"
        assert [line.split(",")[-1] for line in lines if ",,loss," in line] == losses
        assert lines[2] == 'a,0,"net.0, ""quoted""",gap,nan'
    export(folder / "a", folder / "same.csv")
    assert (folder / "same.csv").read_text() == (folder / "a.csv").read_text()
