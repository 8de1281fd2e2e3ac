"""A process that has imported everything and forks for each command: ``python -m featlearn`` without the wait.

Reads a job a line, ``{"arguments", "folder", "stdin", "stdout", "stderr"}``; answers with the process id, and with the
exit code when the command has ended.
"""

from __future__ import annotations

import atexit
import gc
import importlib
import json
import os
import runpy
import signal
import sys
import traceback
from typing import Any, NoReturn

HEAVY = (
    "featlearn.reports", "featlearn.papers.runner", "featlearn.cli._input_data", "featlearn.datasets.tables",
    "sklearn.datasets", "sklearn.model_selection", "pyarrow.parquet", "typer.rich_utils", "rich.progress",
    "matplotlib.backends.backend_agg",
)  # fmt: skip


def become(job: dict[str, Any]) -> NoReturn:
    """Be the command: its folder, its files in place of the terminal, its arguments."""
    os.setsid()  # a signal to its group reaches the command and its children alone
    os.chdir(job["folder"])
    for number, key, flags in ((0, "stdin", os.O_RDONLY), (1, "stdout", os.O_WRONLY), (2, "stderr", os.O_WRONLY)):
        handle = os.open(job[key], flags)
        os.dup2(handle, number)
        os.close(handle)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    sys.argv = ["featlearn", *job["arguments"]]
    code: Any = 0
    try:
        runpy.run_module("featlearn", run_name="__main__", alter_sys=True)
    except SystemExit as end:
        code = end.code or 0
        if not isinstance(code, int):
            print(code, file=sys.stderr)
            code = 1
    except BaseException:
        traceback.print_exc()
        code = 1
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)  # what an interpreter frees at its end costs seconds, after torch


def main() -> None:
    for name in HEAVY:
        importlib.import_module(name)
    gc.freeze()  # pages that no collection touches are shared with the children
    commands = os.fdopen(os.dup(0), "rb", buffering=0)  # unbuffered: a child must not hold the next job
    while line := commands.readline():
        child = os.fork()
        if not child:
            become(json.loads(line))
        print(child, flush=True)
        print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)
    os._exit(0)


if __name__ == "__main__":
    main()
