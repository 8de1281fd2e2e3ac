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
import warnings
from pathlib import Path
from typing import Any

import torch
import torch._dynamo  # optimizers load it, and it takes longer than the training
from safetensors.torch import save_file
from torch import nn

from featlearn.runs import Run
from featlearn.training import Monitor, fit

STEPS = 120
PHASES = {
    "start": ("_run.py", "_begin"),  # of the first launch, and of each later one
    "creation": ("database.py", "create_database"),
    "initial weights": ("_run.py", "save_initial"),
    "matrices": ("_run.py", "save_matrices"),
    "checkpoint": ("step_files.py", "save_step"),
    "loading": ("_run.py", "checkpoint"),
    "end": ("_run.py", "finish"),
    "close": ("database.py", "close"),
}
"""Files and functions during which a life is ended."""
_EVENTS = 60  # calls and returns of a function, with those of all that it calls, after which a life may end


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


def end_in(phase: str, call: int, events: int) -> None:
    """Kill this process in a call of a function, between two of the calls that it makes."""
    file, function = PHASES[phase]
    left = [call, events]

    def note(frame: Any, event: str, argument: Any) -> None:
        code = frame.f_code
        if left[0] and event == "call" and code.co_name == function and code.co_filename.endswith(f"runs/{file}"):
            left[0] -= 1
        if not left[0]:
            left[1] -= 1
            if left[1] <= 0:
                os.kill(os.getpid(), signal.SIGKILL)

    sys.setprofile(note)


def lives(
    folder: Path, seconds: float | None, phase: tuple[str, int, int] | None = None
) -> tuple[bool, dict[int, float]]:
    """One life of the child, ended after so many seconds or in a phase: whether it finished, and what it had logged."""
    read, write = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(read)
        status = 1
        try:
            if phase is not None:
                end_in(*phase)
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


def check(folder: Path, logged: dict[int, float], done: bool) -> None:
    """Nothing that was logged is lost, all files can be read, and the status is that of what happened."""
    if not logged and not (folder / "run.db").exists():
        return
    connection = sqlite3.connect(folder / "run.db")
    try:
        assert connection.execute("PRAGMA integrity_check").fetchone() == ("ok",)
        # A training that was killed before its first checkpoint begins again, in a new segment.
        query = "SELECT step, value FROM {} WHERE name = 'loss' AND layer = ''"
        result = {step: {value} for step, value in connection.execute(query.format("metrics"))}
        for step, value in connection.execute(query.format("old_metrics")):
            result.setdefault(step, set()).add(value)
    finally:
        connection.close()
    missing = {step for step, loss in logged.items() if loss not in result.get(step, ())}
    assert not missing, f"lost: {sorted(missing)}"
    run = Run.open(folder)
    assert run.status == ("finished" if done else "interrupted"), run.status
    assert not run.metrics().empty or not logged
    run.checkpoint()
    for step in run.matrix_steps():
        run.matrices(step)


def finished(folder: Path) -> bool:
    """Whether a run says that it ended."""
    return Run.exists(folder) and Run.open(folder).status == "finished"


def main(folder: Path, kills: int, seed: int) -> None:
    """Kill so many times, then let it finish."""
    torch.set_num_threads(1)
    warnings.filterwarnings("ignore", message=".*goes back")  # before the first checkpoint
    rng = random.Random(seed)
    began = time.monotonic()
    assert lives(folder / "whole", None)[0]
    length = time.monotonic() - began
    made, in_training, phases = 0, 0, dict.fromkeys(PHASES, 0)
    logged: dict[int, float] = {}
    while made < kills:
        phase, before = None, finished(folder / "killed")
        if kills > 10 and made % 2:  # each second life ends where files are written; the profiler takes time
            name = min(phases, key=lambda name: (phases[name], rng.random()))
            phase = name, rng.choice((1, 1, 2, 5)), rng.randint(1, _EVENTS)
        done, reported = lives(folder / "killed", None if phase else rng.uniform(0.0, 0.6 * length), phase)
        logged |= reported
        # A kill may come after the last write, or before the first one to a run that had ended.
        may_end = done or before or ((folder / "killed" / "final.safetensors").exists() and STEPS - 1 in logged)
        check(folder / "killed", logged, may_end and finished(folder / "killed"))
        made += not done
        in_training += not done and bool(reported)
        if phase:
            phases[phase[0]] += not done
        if done or rng.random() < 0.1:  # too soon: another run, until there are enough kills
            if done:
                compare(folder)
            for path in sorted((folder / "killed").rglob("*"), reverse=True):
                path.rmdir() if path.is_dir() else path.unlink()
            logged = {}
    done, reported = lives(folder / "killed", None)
    assert done
    check(folder / "killed", logged | reported, True)
    compare(folder)
    print(json.dumps({"kills": made, "in_training": in_training, "phases": phases, "seconds": length}))


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
