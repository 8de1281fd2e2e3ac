"""A disk that fills up while something is written: an error, nothing lost that was written before, and no lock.

A small file system in memory, where this process may mount one; otherwise a limit of the size of files.
"""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from featlearn.runs import Run
from processes import run_code

KILOBYTES = 600


@pytest.fixture(scope="module")
def disk(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    path = tmp_path_factory.mktemp("disk")
    command = ["mount", "-t", "tmpfs", "-o", f"size={KILOBYTES}k", "tmpfs", str(path)]
    mounted = shutil.which("mount") is not None and subprocess.run(command, capture_output=True, check=False)
    if not mounted or mounted.returncode != 0:
        pytest.skip("no file system can be mounted here")
    yield path
    subprocess.run(["umount", str(path)], check=True)


@pytest.fixture
def folder(disk: Path) -> Iterator[Path]:
    yield disk
    for entry in disk.iterdir():
        shutil.rmtree(entry) if entry.is_dir() else entry.unlink()


# Fills the disk up to some kilobytes, and writes until there is an error.
SCRIPT = """
import os, sys, warnings
from pathlib import Path
import torch
from featlearn.errors import RunStoreError
from featlearn.runs import Run
from featlearn.training import Monitor

disk, way, left = Path(sys.argv[1]), sys.argv[2], int(sys.argv[3])

def fill(kilobytes=left):
    size = 1 << 16
    with open(disk / "other", "ab") as file:
        while (free := os.statvfs(disk).f_bavail * os.statvfs(disk).f_frsize - 1024 * kilobytes) > 0:
            file.write(bytes(min(free, size)))
            file.flush()

if way == "creation":
    fill()
    try:
        run = Run.create(disk / "run", {"lr": 0.1})
        for step in range(100_000):
            run.log(step, {"loss": float(step)})
    except RunStoreError as error:
        print("error:", error)
    raise SystemExit
if way == "monitor":
    warnings.simplefilter("ignore")
    X = torch.randn(20, 3)
    monitor = Monitor(torch.nn.Linear(3, 1), (X, X[:, :1]), run=disk / "run", every=1, measure="weights", budget=None)
    for step in range(60):
        if step == 10:
            fill()
        monitor.step(step, loss=float(step))
    monitor.close()
    assert monitor.series("loss").to_list() == [float(step) for step in range(60)]  # the others are in memory
    print("error: none")
    raise SystemExit
run = Run.create(disk / "run", {"lr": 0.1})
run.log(0, {"loss": 0.0})
run.save_matrices(0, {"a": torch.zeros(8, 8)})
run.save_checkpoint(0, {"model": torch.zeros(8)})
if way != "records":
    for step in range(1, 10):
        run.log(step, {"loss": float(step)})
fill()
try:
    if way == "records":
        for step in range(1, 100_000):
            run.log(step, {"loss": float(step)})
            print(step, flush=True)
    elif way == "checkpoint":
        run.save_checkpoint(5, {"model": torch.randn(300, 300)})
    elif way == "matrices":
        run.save_matrices(5, {"a": torch.randn(300, 300)})
    elif way == "close":
        for step in range(10, 100_000):
            run.log(step, {"loss": float(step)})
            print(step, flush=True)
            fill(0)
    raise SystemExit("nothing was raised")
except RunStoreError as error:
    print("error:", error)
if way == "close":
    try:
        run.finish()
    except RunStoreError as error:
        print("error:", error)
run.close()
"""


@pytest.mark.parametrize("left", [0, 4, 12, 40])
@pytest.mark.parametrize("way", ["creation", "records", "checkpoint", "matrices", "close", "monitor"])
def test_a_full_disk(folder: Path, way: str, left: int) -> None:
    done = run_code(SCRIPT, folder, way, left)
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert any(line.startswith("error:") for line in lines)
    if way != "monitor":
        assert "cannot be" in done.stdout
        assert "disk is full" in done.stdout or "No space left" in done.stdout
    written = [int(line) for line in lines if line.isdigit()]
    drafts = [path.name for path in folder.rglob(".*") if path.is_file()]
    assert drafts == []  # of files that did not fit
    if not Run.exists(folder / "run"):
        assert way == "creation"
    else:
        run = Run.open(folder / "run")
        assert run.status in ("interrupted", "finished", "failed")
        losses = run.series("loss").to_dict() if run.last_step is not None else {}
        assert set(written) <= set(losses)
        assert losses == {step: float(step) for step in range(len(losses))}
        if way == "monitor" and left < 40:
            assert 10 <= len(losses) < 60
        if way in ("checkpoint", "matrices"):
            assert run.checkpoint_steps() == [0]
            assert run.matrix_steps() == [0]
            assert len(losses) == 10
    os.unlink(folder / "other")  # there is room again
    with Run.open_or_create(folder / "run") as again:
        again.log(100_000, {"loss": 1.0})
        again.save_checkpoint(100_000, {"done": True})
    assert Run.open(folder / "run").status == "finished"
