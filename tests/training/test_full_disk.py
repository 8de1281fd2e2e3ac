"""A run whose disk is full is given up by the monitor that wrote it: no lock, and no status "running"."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from featlearn.runs import Run
from processes import run_code

# Files that may not grow stand for a disk that is full: only root may mount a small one.
SCRIPT = """
import json, resource, sys, warnings
import torch
from featlearn.errors import RunStoreError
from featlearn.runs import Run
from featlearn.training import Monitor

way, folder = sys.argv[1:]
warnings.simplefilter("ignore")
X = torch.randn(20, 3)
options = {"run": folder, "every": 1, "measure": "weights", "on_error": "raise" if way == "raise" else "warn"}
monitor = Monitor(torch.nn.Linear(3, 1), (X, X[:, :1]), **options)
monitor.step(0, loss=1.0)
_, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
resource.setrlimit(resource.RLIMIT_FSIZE, (4096, hard))

def train():
    for step in range(1, 50):
        monitor.step(step, loss=1.0)

if way == "with":
    with monitor:
        train()
elif way == "error":
    try:
        with monitor:
            train()
            raise ZeroDivisionError
    except ZeroDivisionError:
        pass
elif way == "raise":
    for what in (train, monitor.close):
        try:
            what()
        except RunStoreError:
            continue
        raise SystemExit("nothing was raised")
else:
    train()
    if way == "close":
        monitor.close()
resource.setrlimit(resource.RLIMIT_FSIZE, (hard, hard))
seen = None if way == "exit" else Run.open(folder).status
if way != "exit":
    with Run.open(folder, write=True) as run:  # another writer, once there is room
        run.log(100, {"loss": 2.0})
    assert run.status == "finished"
print(json.dumps([seen, Run.open(folder).series("loss").to_dict()]))
"""


@pytest.mark.parametrize("way", ["close", "with", "error", "raise", "exit"])
def test_a_full_disk_leaves_neither_a_lock_nor_a_running_run(way: str, tmp_path: Path) -> None:
    done = run_code(SCRIPT, way, tmp_path / "run")
    assert done.returncode == 0, done.stderr
    seen, losses = json.loads(done.stdout)
    run = Run.open(tmp_path / "run")
    if way == "exit":
        assert run.status == "interrupted"
    else:
        assert seen in ("interrupted", "failed")
        assert losses["100"] == 2.0
    assert losses["0"] == 1.0
    assert len(losses) < 50  # the disk was full
    with Run.open(tmp_path / "run", write=True) as again:
        again.log(101, {"loss": 3.0})


AGAIN = """
import json, resource, sys, warnings
import torch
from featlearn.runs import Run
from featlearn.runs.lock import being_written
from featlearn.training import Monitor
from pathlib import Path

folder = sys.argv[1]
X = torch.randn(20, 3)
model = torch.nn.Linear(3, 1)
options = {"run": folder, "every": 1, "measure": "weights"}
monitor = Monitor(model, (X, X[:, :1]), **options)
monitor.step(0, loss=1.0)
_, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
resource.setrlimit(resource.RLIMIT_FSIZE, (4096, hard))
with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter("default")
    for step in range(1, 50):
        monitor.step(step, loss=1.0)
    before = len(caught)
    monitor.close()
    monitor.close()
said = [str(warning.message) for warning in caught]
resource.setrlimit(resource.RLIMIT_FSIZE, (hard, hard))
left = [being_written(Path(folder)), Run.open(folder).status]
with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter("always")
    with Monitor(model, (X, X[:, :1]), **options) as monitor:  # beside it
        monitor.step(0, loss=3.0)
    assert len(caught) == 1, caught
    assert Run.open(folder + "-2").status == "finished"
with Monitor(model, (X, X[:, :1]), resume=True, **options) as monitor:  # in it
    monitor.step(60, loss=2.0)
print(json.dumps([said[:before], said[before:], left, Run.open(folder).status]))
"""


def test_what_a_full_disk_leaves_is_said_once_and_the_next_launch_works(tmp_path: Path) -> None:
    done = run_code(AGAIN, tmp_path / "run")
    assert done.returncode == 0, done.stderr
    before, closing, left, status = json.loads(done.stdout)
    assert len(before) == len(set(before)) == 1
    assert len(closing) <= 1
    assert left[0] is False
    assert left[1] in ("interrupted", "failed", "finished")
    assert status == "finished"
