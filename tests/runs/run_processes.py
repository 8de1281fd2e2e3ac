"""Processes that the tests of runs start, let work and kill."""

from __future__ import annotations

import fcntl
import os
import resource
import sqlite3
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import torch

from featlearn.errors import RunStoreError
from featlearn.runs import Run
from processes import CONTEXT

VALUES = 20


@contextmanager
def process(work: Callable[..., None], *arguments: Any) -> Iterator[tuple[BaseProcess, Connection]]:
    """A process that works, and the end of a pipe on which it tells; it is killed when the block ends."""
    here, test_rows = CONTEXT.Pipe()
    child = CONTEXT.Process(target=work, args=(test_rows, *arguments), daemon=True)
    child.start()
    test_rows.close()
    try:
        yield child, here
    finally:
        child.kill()
        child.join()
        child.close()
        here.close()


def heard(pipe: Connection, seconds: float = 30) -> Any:
    assert pipe.poll(seconds), "the process said nothing"
    return pipe.recv()


def all_heard(pipe: Connection) -> list[Any]:
    """What a process that is dead has told to its end."""
    reported = []
    with suppress(EOFError, OSError):
        while True:
            reported.append(pipe.recv())
    return reported


def values_of(step: int) -> dict[str, float]:
    return {"loss": float(step), **{f"m{index}": step + index / 7 for index in range(VALUES - 1)}}


def log_forever(pipe: Connection, folder: Path) -> None:
    run = Run.open(folder, write=True) if (folder / "run.db").exists() else Run.create(folder)
    step = 0 if run.last_step is None else run.last_step + 1
    while True:
        run.log(step, values_of(step))
        pipe.send(step)
        step += 1


def log_and_finish(pipe: Connection, folder: Path, steps: int) -> None:
    with Run.create(folder, {"folder": folder.name}) as run:
        for step in range(steps):
            run.log(step, values_of(step))
    pipe.send("done")


def save_checkpoints_forever(pipe: Connection, folder: Path, numel: int) -> None:
    run = Run.create(folder)
    step = 0
    while True:
        run.save_checkpoint(step, {"weight": torch.full((numel,), float(step))})
        pipe.send(step)
        step += 1


def hold_lock(pipe: Connection, database: Path) -> None:
    connection = sqlite3.connect(database, isolation_level=None)
    connection.execute("BEGIN EXCLUSIVE")
    pipe.send("locked")
    pipe.recv()
    connection.execute("ROLLBACK")
    connection.close()
    pipe.send("free")


def hold_a_moment(pipe: Connection, lock: Path, seconds: float) -> None:
    """What a reader does for an instant, drawn out."""
    with lock.open() as file:
        fcntl.flock(file, fcntl.LOCK_SH)
        pipe.send("held")
        time.sleep(seconds)
        pipe.send("soon free")


def fork_a_worker(pipe: Connection, folder: Path) -> None:
    run = Run.create(folder)
    run.log(0, {"loss": 1.0})
    worker = os.fork()
    if worker == 0:
        try:
            run.log(1, {"loss": 1.0})
            reported = "it wrote"
        except RunStoreError as error:
            reported = f"{error}; it reads {len(run.series('loss'))}"
        pipe.send((os.getpid(), reported))
        time.sleep(60)
        os._exit(0)
    time.sleep(60)


def write_small_files_only(pipe: Connection, folder: Path) -> None:
    run = Run.create(folder)
    run.save_checkpoint(0, {"weight": torch.ones(10)})
    resource.setrlimit(resource.RLIMIT_FSIZE, (200_000, resource.RLIM_INFINITY))
    for write in (
        lambda: run.save_checkpoint(1, {"weight": torch.ones(1_000_000)}),
        lambda: run.save_matrices(1, {"weight": torch.ones(1_000_000)}),
    ):
        try:
            write()
            pipe.send("it was written")
        except RunStoreError as error:
            pipe.send(str(error))
    resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
    run.save_checkpoint(2, {"weight": torch.ones(1_000_000)})
    pipe.send(run.checkpoint_steps())


def use_without_rights(pipe: Connection, folder: Path) -> None:
    if os.getuid() == 0:
        os.setuid(65534)
    run = Run.open(folder)
    pipe.send((run.status, run.series("loss").to_list(), run.matrices(0)["a"].tolist()))
    for work in (
        lambda: Run.open(folder, write=True),
        lambda: Run.create(folder / "inner"),
        lambda: run.log(5, {"loss": 1.0}),
    ):
        try:
            work()
            pipe.send("it was written")
        except RunStoreError as error:
            pipe.send(str(error))


def die_with_a_journal(pipe: Connection, database: Path) -> None:
    connection = sqlite3.connect(database, isolation_level=None)
    connection.execute("PRAGMA journal_mode = DELETE")
    connection.execute("PRAGMA cache_size = 2")  # so that pages go to the file before the end
    connection.execute("BEGIN IMMEDIATE")
    connection.execute("UPDATE metrics SET value = -1")
    connection.executemany(
        "INSERT INTO metrics VALUES (?, '', 'rubbish', 1.0)", [(step,) for step in range(100_000, 105_000)]
    )
    pipe.send("half way")
    time.sleep(60)
