"""What a run was made with: versions, machine, command, commit."""

from __future__ import annotations

import os
import platform
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
import torch

_GIT_SECONDS = 5.0


def describe_environment(seed: int | None = None) -> dict[str, Any]:
    """Versions, platform, command, threads, seed, and the commit of the current directory.

    The name of the machine is left out: a run is often passed on.
    """
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


def process_started() -> float | None:
    """When this process began, in seconds since 1970, where the system tells it."""
    try:
        # The command's name may hold spaces and brackets; the fields after its last bracket do not.
        fields = Path("/proc/self/stat").read_text().rpartition(")")[2].split()
        boot = next(line for line in Path("/proc/stat").read_text().splitlines() if line.startswith("btime"))
        return float(boot.split()[1]) + int(fields[19]) / os.sysconf("SC_CLK_TCK")
    except (OSError, StopIteration, ValueError, IndexError):
        return None


def _git() -> dict[str, Any] | None:
    commit = _ask_git("rev-parse", "HEAD")
    if commit is None:
        return None
    changes = _ask_git("status", "--porcelain", "--untracked-files=no")
    return {"commit": commit, "dirty": None if changes is None else bool(changes)}


def _ask_git(*question: str) -> str | None:
    try:
        answer = subprocess.run(
            ["git", *question],
            capture_output=True,
            text=True,
            timeout=_GIT_SECONDS,
            check=True,
            stdin=subprocess.DEVNULL,
            # Otherwise `git status` takes a lock in a repository where somebody may be at work.
            env={**os.environ, "GIT_OPTIONAL_LOCKS": "0"},
        )
    except (OSError, subprocess.SubprocessError, UnicodeDecodeError):
        return None
    return answer.stdout.strip()
