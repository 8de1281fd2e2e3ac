"""Metadata of a new run and its environment: versions, platform, command, commit."""

from __future__ import annotations

import json
import os
import platform
import subprocess
import sys
import time
from collections.abc import Mapping
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np

from featlearn._utils.validation import as_text

_GIT_SECONDS = 5.0


def describe_environment(seed: int | None = None) -> dict[str, Any]:
    """Return versions, platform, command, threads, seed, and the git commit of the current directory.

    The name of the machine is not included, since runs are often shared.
    """
    import torch

    return {
        "featlearn": version("featlearn"),
        "python": platform.python_version(),
        "torch": str(torch.__version__),
        "numpy": np.__version__,
        "platform": f"{platform.system()} {platform.release()} {platform.machine()}",
        "command": list(sys.argv),
        "threads": torch.get_num_threads(),
        "seed": seed,
        "git": _git(),
    }


def new_meta(path: Path, config: Mapping[str, Any], seed: int | None, name: str | None) -> dict[str, str]:
    """Return the metadata of a new run."""
    return {
        "name": path.absolute().name.encode("utf-8", "replace").decode() if name is None else as_text(name, "name"),
        "config": json.dumps(config),
        "environment": json.dumps(describe_environment(seed)),
        "started": repr(time.time()),
        "status": "running",
        "message": "",
    }


def process_started() -> float | None:
    """Return the start time of this process, in seconds since 1970; None if the system does not provide it."""
    try:
        # The name of the command may contain spaces and brackets; the fields after the last bracket do not.
        fields = Path("/proc/self/stat").read_text().rpartition(")")[2].split()
        boot = next(line for line in Path("/proc/stat").read_text().splitlines() if line.startswith("btime"))
        return float(boot.split()[1]) + int(fields[19]) / os.sysconf("SC_CLK_TCK")
    except (OSError, StopIteration, ValueError, IndexError):
        return None


def _git() -> dict[str, Any] | None:
    commit = _run_git("rev-parse", "HEAD")
    if commit is None:
        return None
    changes = _run_git("status", "--porcelain", "--untracked-files=no")
    return {"commit": commit, "dirty": None if changes is None else bool(changes)}


def _run_git(*arguments: str) -> str | None:
    # Without the variable, `git status` would take a lock in a repository that may be in use.
    env = {**os.environ, "GIT_OPTIONAL_LOCKS": "0"}
    options: dict[str, Any] = {"capture_output": True, "text": True, "stdin": subprocess.DEVNULL, "env": env}
    try:
        output: str = subprocess.run(["git", *arguments], timeout=_GIT_SECONDS, check=True, **options).stdout
    except (OSError, subprocess.SubprocessError, UnicodeDecodeError):
        return None
    return output.strip()
