"""Runs on disk: metrics in SQLite, matrices and checkpoints in safetensors.

Call `list`, `open`, `compare`, `export` and `remove` through the module: ``runs.open("first")``.
"""

from featlearn._utils.safetensors_file import load_nested, save_nested
from featlearn.runs._catalog import compare, compare_configs, export, list_runs, open_run, remove
from featlearn.runs._run import Run

list = list_runs
open = open_run

__all__ = [  # noqa: RUF022  # grouped by use
    # one run
    "Run",
    "open",
    "open_run",
    # several
    "compare",
    "compare_configs",
    "list",
    "list_runs",
    # export and delete
    "export",
    "remove",
    # states on disk
    "load_nested",
    "save_nested",
]
