"""SIGKILL at random instants: nothing that was logged is lost, and the run ends as if it had never been killed."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from processes import run_code

WORKER = Path(__file__).with_name("crash_worker.py")


@pytest.mark.parametrize("kills", [5, pytest.param(50, marks=pytest.mark.slow)])
def test_killed_at_random_instants(kills: int, tmp_path: Path) -> None:
    code = f"import sys, runpy; sys.argv[0] = {str(WORKER)!r}; runpy.run_path(sys.argv[0], run_name='__main__')"
    done = run_code(code, tmp_path, kills, 0, timeout=1200)
    assert done.returncode == 0, done.stderr[-3000:]
    reported = json.loads(done.stdout.splitlines()[-1])
    assert reported["kills"] == kills
    assert reported["in_training"] >= kills // 4  # or the kills fell before there was anything to lose
    if kills >= 50:
        assert all(reported["phases"].values()), reported["phases"]
