"""``featlearn reproduce``, as a user types it."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

CODE = "from featlearn.cli import app; app()"


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", CODE, "reproduce", *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=120)


def test_an_experiment_by_name_prints_and_writes_its_claims(tmp_path: Path) -> None:
    done = run("nfa-fig1", "--scale", "smoke", "--out", str(tmp_path))
    assert done.returncode == 0, done.stderr
    assert "3 claims" in done.stdout
    assert "Traceback" not in done.stderr
    for name in ("index.html", "nfa-fig1.html", "ledger.csv", "ledger.json", "nfa-fig1/figure-1.png"):
        assert (tmp_path / name).stat().st_size


def test_the_list() -> None:
    done = run("--list", "--paper", "nfa")
    assert done.returncode == 0
    assert "nfa-fig1" in done.stdout


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["nfa-fgi1"], "did you mean nfa-fig1"),
        (["nfa-fig1", "--scale", "huge"], "smoke, quick or full"),
    ],
    ids=["name", "scale"],
)
def test_what_cannot_be_done_is_one_sentence(arguments: list[str], message: str, tmp_path: Path) -> None:
    done = run(*arguments, "--out", str(tmp_path / "out"))
    assert done.returncode == 1
    assert done.stderr.startswith("featlearn: ")
    assert message in done.stderr
    assert len(done.stderr.strip().splitlines()) == 1
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("jobs", ["1", "2"])
def test_ctrl_c_keeps_what_was_measured(jobs: str, tmp_path: Path) -> None:
    arguments = ["nfa-fig1", "--scale", "full", "--jobs", jobs, "--out", str(tmp_path)]
    process = subprocess.Popen(
        [sys.executable, "-c", CODE, "reproduce", *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    points = tmp_path / "nfa-fig1" / "full" / "points"
    deadline = time.monotonic() + 90
    while not list(points.glob("*.safetensors")) and time.monotonic() < deadline:
        time.sleep(0.05)
    os.killpg(process.pid, signal.SIGINT)  # a terminal sends it to all processes of the command
    _, errors = process.communicate(timeout=30)
    assert process.returncode == 130
    assert "stopped. What was measured is kept in" in " ".join(errors.split())
    assert "Traceback" not in errors
    assert 1 <= len(list(points.glob("*.safetensors"))) < 10
