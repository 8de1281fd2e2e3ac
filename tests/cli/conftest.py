"""A fixture that runs commands as a user types them, each in a process of its own."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from processes import run_code

COMMAND = "import runpy; runpy.run_module('featlearn', run_name='__main__', alter_sys=True)"
ENVIRONMENT = {"COLUMNS": None, "FORCE_COLOR": None, "OMP_NUM_THREADS": "1"}


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

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def __call__(self, *arguments: object, stdin: str = "", meanwhile: Callable[[int], None] | None = None) -> Done:
        done = run_code(COMMAND, *arguments, cwd=self.folder, stdin=stdin, meanwhile=meanwhile, env=ENVIRONMENT)
        return Done(done.returncode, done.stdout, done.stderr)


@pytest.fixture
def featlearn(tmp_path: Path) -> Commands:
    return Commands(tmp_path)
