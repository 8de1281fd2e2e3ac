"""A fixture that runs commands as a user types them, each in a process of its own."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest


@dataclass(frozen=True)
class Done:
    """What a command left behind."""

    code: int
    out: str
    err: str

    @property
    def json(self) -> Any:
        assert self.code == 0, self.err
        return json.loads(self.out)

    @property
    def sentence(self) -> str:
        """The one line of trouble."""
        assert self.code == 1, (self.out, self.err)
        assert "Traceback" not in self.err
        last = self.err.strip().splitlines()[-1]
        assert last.startswith("featlearn: ")
        assert self.out == ""
        return last


class Commands:
    """Runs ``featlearn ...`` in a folder."""

    def __init__(self, process: subprocess.Popen[str], folder: Path) -> None:
        self._process, self.folder = process, folder

    def __call__(self, *arguments: object, stdin: str = "", meanwhile: Callable[[int], None] | None = None) -> Done:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        files = {name: self.folder / f".{name}" for name in ("stdin", "stdout", "stderr")}
        for name, file in files.items():
            file.write_text(stdin if name == "stdin" else "", encoding="utf-8")
        job = {"arguments": [str(a) for a in arguments], "folder": str(self.folder)}
        self._process.stdin.write(json.dumps(job | {k: str(v) for k, v in files.items()}) + "\n")
        self._process.stdin.flush()
        pid = int(self._process.stdout.readline())
        if meanwhile is not None:
            meanwhile(pid)
        code = int(self._process.stdout.readline())
        out, err = (files[name].read_text(encoding="utf-8") for name in ("stdout", "stderr"))
        return Done(code, out, err)


@pytest.fixture(scope="session")
def _zygote() -> Iterator[subprocess.Popen[str]]:
    environment = {k: v for k, v in os.environ.items() if k not in ("COLUMNS", "FORCE_COLOR")} | {
        "OMP_NUM_THREADS": "1"
    }
    command = [sys.executable, str(Path(__file__).with_name("zygote.py"))]
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment | {"OMP_NUM_THREADS": "1"}
    ) as process:
        yield process
        assert process.stdin
        process.stdin.close()


@pytest.fixture
def featlearn(_zygote: subprocess.Popen[str], tmp_path: Path) -> Commands:
    return Commands(_zygote, tmp_path)
