"""Processes for tests, forked from one that has imported featlearn: a new interpreter would take seconds each.

``conftest.py`` names what that process imports. Tests of what an import loads start an interpreter of their own.
"""

from __future__ import annotations

import atexit
import multiprocessing
import os
import sys
import tempfile
import traceback
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import torch
import torch.distributed

CONTEXT = multiprocessing.get_context("forkserver")


@dataclass(frozen=True)
class Done:
    """Exit code and output of a process."""

    returncode: int
    stdout: str
    stderr: str


@contextmanager
def running(
    code: str,
    *arguments: object,
    env: Mapping[str, str | None] | None = None,
    cwd: Path | None = None,
    stdin: str = "",
) -> Iterator[tuple[BaseProcess, Path]]:
    """Run Python code in a process of its own, which is killed when the block ends.

    Args:
        code: Code of the program.
        arguments: Its arguments, from ``sys.argv[1]`` on.
        env: Environment variables to set; None removes one.
        cwd: Folder to run in. None is the current one.
        stdin: What it reads.

    Yields:
        The process, and the folder with its files ``stdout`` and ``stderr``.
    """
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "stdin").write_text(stdin, encoding="utf-8")
        values = [str(a) for a in arguments]
        child = CONTEXT.Process(target=_become, args=(code, values, dict(env or {}), str(cwd or Path.cwd()), folder))
        child.start()
        try:
            yield child, Path(folder)
        finally:
            child.kill()
            child.join()


def run_code(
    code: str,
    *arguments: object,
    timeout: float = 300,
    meanwhile: Callable[[int], None] | None = None,
    **options: Any,
) -> Done:
    """Run Python code in a process of its own, and return its exit code and output.

    Args:
        code: Code of the program.
        arguments: Its arguments, from ``sys.argv[1]`` on.
        timeout: Seconds after which the test fails.
        meanwhile: Called with the process's id while it runs.
        options: As `running` takes them.
    """
    with running(code, *arguments, **options) as (child, folder):
        if meanwhile is not None:
            assert child.pid is not None
            meanwhile(child.pid)
        child.join(timeout)
        assert child.exitcode is not None, f"the process did not end within {timeout:g} seconds"
        return Done(child.exitcode, (folder / "stdout").read_text(), (folder / "stderr").read_text())


def run_ranks(worker: Callable[..., None], *arguments: Any, timeout: float = 180, ranks: int = 2) -> None:
    """Run ``worker(rank, *arguments)`` in processes of one gloo group, and raise what they raise."""
    with tempfile.TemporaryDirectory() as folder:
        context = torch.multiprocessing.start_processes(
            _rank, (worker, folder, arguments, ranks), nprocs=ranks, join=False, start_method="forkserver"
        )
        for _ in range(int(timeout)):
            if context.join(timeout=1):
                return
        for process in context.processes:
            process.kill()
    raise AssertionError("a process was left waiting for the other")


def _rank(rank: int, worker: Callable[..., None], folder: str, arguments: tuple[Any, ...], ranks: int) -> None:
    torch.set_num_threads(1)
    torch.distributed.init_process_group(
        "gloo", init_method=f"file://{folder}/store", rank=rank, world_size=ranks, timeout=timedelta(seconds=60)
    )
    # The reducer of DistributedDataParallel must not hold the last reference to its group: that of gloo, destroyed by
    # it, waits for a thread that waits for the interpreter.
    group = torch.distributed.group.WORLD
    worker(rank, *arguments)
    torch.distributed.barrier(group)
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)


def _become(code: str, arguments: list[str], env: dict[str, str | None], cwd: str, folder: str) -> None:
    os.setsid()  # a signal to its group reaches it and its children alone
    os.chdir(cwd)
    for number, name in enumerate(("stdin", "stdout", "stderr")):
        handle = os.open(f"{folder}/{name}", os.O_WRONLY | os.O_CREAT if number else os.O_RDONLY)
        os.dup2(handle, number)
        os.close(handle)
    # By lines, as a terminal's: what a process prints is to be read while it runs.
    sys.stdin, sys.stdout, sys.stderr = (open(n, "w" if n else "r", 1, closefd=False) for n in range(3))  # noqa: SIM115
    for name, value in env.items():
        os.environ.pop(name, None)
        if value is not None:
            os.environ[name] = value
    sys.argv = ["-c", *arguments]
    status: Any = 0
    try:
        exec(compile(code, "<code>", "exec"), {"__name__": "__main__"})
    except SystemExit as end:
        status = end.code or 0
    except BaseException:
        traceback.print_exc()
        status = 1
    if not isinstance(status, int):
        print(status, file=sys.stderr)
        status = 1
    atexit._run_exitfuncs()  # which processes of `multiprocessing` leave out
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)
