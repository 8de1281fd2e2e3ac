"""Trains in a child process and kills it again and again; called by test_crash with a folder, kills and a seed.

The child is forked from a process that has imported everything, so that kills fall into the training.
"""

from __future__ import annotations

import json
import os
import random
import select
import signal
import sqlite3
import sys
import time
from pathlib import Path

import torch
import torch._dynamo  # optimizers load it, and it takes longer than the training
from safetensors.torch import save_file
from torch import nn

from featlearn.runs import Run
from featlearn.training import Monitor, fit

STEPS = 120


def train(folder: Path, pipe: int | None) -> None:
    """The training; each step whose loss is logged is told to the pipe."""
    g = torch.Generator().manual_seed(0)
    X = torch.randn(64, 6, generator=g)
    Y = (X[:, :1] * X[:, 1:2]).tanh()
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(1)
        model = nn.Sequential(nn.Linear(6, 12), nn.BatchNorm1d(12), nn.ReLU(), nn.Dropout(0.1), nn.Linear(12, 1))

    def report(step: int, loss: float) -> None:
        if pipe is not None:
            os.write(pipe, f"{json.dumps([step, loss])}\n".encode())

    with Run.open_or_create(folder, {"steps": STEPS}) as run:
        monitor = Monitor(model, (X, Y), run=run, every=10, budget=None, matrices=["nfm"], kernel_samples=16)
        fit(model, (X, Y), optimizer="adam", lr=0.02, schedule="cosine", steps=STEPS, batch_size=16, generator=2,
            run=run, checkpoint_every=3, monitor=monitor, callback=report)  # fmt: skip
        save_file({k: v.contiguous() for k, v in model.state_dict().items()}, folder / "final.safetensors")


def lives(folder: Path, seconds: float | None) -> tuple[bool, dict[int, float]]:
    """One life of the child, ended after so many seconds: whether it finished, and what it had logged."""
    read, write = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(read)
        status = 1
        try:
            train(folder, write)
            status = 0
        finally:
            os._exit(status)
    os.close(write)
    text, end = b"", None if seconds is None else time.monotonic() + seconds
    while True:
        left = None if end is None else max(0.0, end - time.monotonic())
        ready, _, _ = select.select([read], [], [], left)
        if not ready:
            os.kill(child, signal.SIGKILL)
            end = None  # read what is left in the pipe
            continue
        part = os.read(read, 65536)
        if not part:
            break
        text += part
    os.close(read)
    status = os.waitpid(child, 0)[1]
    if os.WIFEXITED(status) and os.WEXITSTATUS(status) != 0:
        raise SystemExit("the training failed by itself")
    lines = text.split(b"\n")[:-1]  # a line that is not whole was not told
    return os.WIFEXITED(status), dict(map(json.loads, lines))


def check(folder: Path, logged: dict[int, float]) -> None:
    """Nothing that was logged is lost, and the database is whole."""
    if not logged and not (folder / "run.db").exists():
        return
    connection = sqlite3.connect(folder / "run.db")
    try:
        assert connection.execute("PRAGMA integrity_check").fetchone() == ("ok",)
        query = "SELECT step, value FROM metrics WHERE name = 'loss' AND layer = ''"
        result = dict(connection.execute(query).fetchall())
    finally:
        connection.close()
    missing = {step for step, loss in logged.items() if result.get(step) != loss}
    assert not missing, f"lost: {sorted(missing)}"


def main(folder: Path, kills: int, seed: int) -> None:
    """Kill so many times, then let it finish."""
    torch.set_num_threads(1)
    rng = random.Random(seed)
    began = time.monotonic()
    assert lives(folder / "whole", None)[0]
    length = time.monotonic() - began
    done, made, in_training = False, 0, 0
    logged: dict[int, float] = {}
    while made < kills:
        done, reported = lives(folder / "killed", rng.uniform(0.0, 0.6 * length))
        logged |= reported
        check(folder / "killed", logged)
        made += not done
        in_training += not done and bool(reported)
        if done:  # too soon: another run, until there are enough kills
            compare(folder)
            for path in sorted((folder / "killed").rglob("*"), reverse=True):
                path.rmdir() if path.is_dir() else path.unlink()
            logged, done = {}, False
    finished, reported = lives(folder / "killed", None)
    assert finished
    check(folder / "killed", logged | reported)
    compare(folder)
    print(json.dumps({"kills": made, "in_training": in_training, "seconds": length}))


def compare(folder: Path) -> None:
    """The run that was killed is the run that was not, to the bit."""
    whole, killed = (Run.open(folder / name) for name in ("whole", "killed"))
    assert killed.status == "finished"
    a, b = ((folder / name / "final.safetensors").read_bytes() for name in ("whole", "killed"))
    assert a == b, "other weights"
    numbers = []
    for run in (whole, killed):
        frame = run.metrics()
        # Signals are taken when their time allows.
        timed = frame["name"].str.startswith(("monitor.", "signal."))
        numbers.append(frame[~timed].reset_index(drop=True))
    assert numbers[0].equals(numbers[1]), "other numbers"
    texts = [run.texts().query("name != 'findings'").reset_index(drop=True) for run in (whole, killed)]
    assert texts[0].equals(texts[1]), "other words"
    assert whole.matrix_steps() == killed.matrix_steps()
    for step in whole.matrix_steps():
        kept = killed.matrices(step)
        assert all(torch.equal(matrix, kept[name]) for name, matrix in whole.matrices(step).items())


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]))
