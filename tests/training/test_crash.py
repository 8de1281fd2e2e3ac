"""SIGKILL at random instants: nothing that was logged is lost, and the run ends as if it had never been killed."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

WORKER = Path(__file__).with_name("crash_worker.py")


@pytest.mark.parametrize("kills", [5, pytest.param(50, marks=pytest.mark.slow)])
def test_killed_at_random_instants(kills: int, tmp_path: Path) -> None:
    command = [sys.executable, str(WORKER), str(tmp_path), str(kills), "0"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    told = json.loads(done.stdout.splitlines()[-1])
    assert told["kills"] == kills
    assert told["in_training"] >= kills // 3  # or the kills fell before there was anything to lose
