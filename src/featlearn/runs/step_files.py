"""Files of a run that belong to a step: matrices and checkpoints."""

from __future__ import annotations

import os
import re
import warnings
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from featlearn._utils.atomic import file_trouble
from featlearn._utils.safetensors_file import load_nested, save_nested
from featlearn.errors import InputError, RunStoreError

FOLDERS = ("matrices", "checkpoints", "initial")

_STEP_FILE = re.compile(r"(0|[1-9][0-9]*)\.safetensors")
# What is half written: by `atomic_write`, and by safetensors itself.
_DRAFT = re.compile(r"\.(0|[1-9][0-9]*)\.safetensors\.[0-9a-f]{12}|\.tmp[A-Za-z0-9]{6}")
_DATABASE_DRAFT = re.compile(r"\.run\.db\.[0-9a-f]{12}")


def save_step(folder: Path, step: int, state: Mapping[str, Any]) -> None:
    """Write the file of a step; one that exists is replaced."""
    with file_trouble(folder):
        folder.mkdir(exist_ok=True)
    save_nested(_file(folder, step), state, {"kind": folder.name, "step": step})


def load_step(folder: Path, step: int) -> dict[str, Any]:
    """What the file of a step holds."""
    if not _file(folder, step).is_file():
        steps = steps_of(folder)
        there = f"the last one is that of step {steps[-1]}" if steps else "there are none yet"
        raise InputError(f"the run in {str(folder.parent)!r} has no {folder.name} of step {step}: {there}")
    state, header = load_nested(_file(folder, step))
    if not isinstance(state, dict) or (header.get("kind"), header.get("step")) != (folder.name, step):
        raise RunStoreError(f"{str(_file(folder, step))!r} does not hold the {folder.name} of step {step}")
    return state


def load_newest(folder: Path) -> tuple[int, dict[str, Any]] | None:
    """The newest step whose file is whole, and what it holds; a damaged one is passed over with a warning."""
    steps = steps_of(folder)
    for step in reversed(steps):
        try:
            return step, load_step(folder, step)
        except (RunStoreError, InputError) as error:
            warnings.warn(f"a file of the run is passed over: {error}", UserWarning, stacklevel=3)
    if steps:
        # To begin anew in silence would cost the user a training.
        raise RunStoreError(f"none of the {len(steps)} files in {str(folder)!r} is whole")
    return None


def steps_of(folder: Path) -> list[int]:
    """Steps that have a file, in order."""
    try:
        names = os.listdir(folder)
    except FileNotFoundError:
        return []
    except OSError as error:
        raise RunStoreError(f"{str(folder)!r} cannot be read: {error.strerror}") from error
    return sorted(int(found[1]) for name in names if (found := _STEP_FILE.fullmatch(name)))


def remove_older(folder: Path, step: int, keep: int) -> None:
    """Of the files up to a step, keep the newest ones.

    Later steps stay: where a run was taken up again from an earlier step, they are not older than this one.
    """
    for older in [there for there in steps_of(folder) if there <= step][:-keep]:
        with file_trouble(_file(folder, older), "removed"):
            _file(folder, older).unlink(missing_ok=True)


def tidy(run: Path) -> None:
    """Remove what killed processes left half written; the caller holds the writer's lock."""
    for folder, names in ((run, _DATABASE_DRAFT), *((run / name, _DRAFT) for name in FOLDERS)):
        if folder == run or not folder.is_symlink():
            with file_trouble(folder, "tidied"):
                _remove_named(folder, names)


def remove_all(folder: Path) -> None:
    """Remove the files of all steps, and the folder if nothing else is in it; one that is a link is left alone."""
    if folder.is_symlink():
        return
    with file_trouble(folder, "removed"):
        _remove_named(folder, _STEP_FILE)
    with suppress(OSError):  # something else is in it, or it was never there
        folder.rmdir()


def _remove_named(folder: Path, names: re.Pattern[str]) -> None:
    try:
        inside = list(os.scandir(folder))
    except (FileNotFoundError, NotADirectoryError):
        return
    for entry in inside:
        if names.fullmatch(entry.name) and not entry.is_dir(follow_symlinks=False):
            Path(entry.path).unlink(missing_ok=True)


def _file(folder: Path, step: int) -> Path:
    return folder / f"{step}.safetensors"
