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
# Names of incomplete files, of `atomic_write` and of safetensors.
_DRAFT = re.compile(r"\.(0|[1-9][0-9]*)\.safetensors\.[0-9a-f]{12}|\.tmp[A-Za-z0-9]{6}")
_DATABASE_DRAFT = re.compile(r"\.run\.db\.[0-9a-f]{12}")


def save_step(folder: Path, step: int, state: Mapping[str, Any]) -> None:
    """Write the file of a step, replacing an existing one."""
    with file_trouble(folder):
        folder.mkdir(exist_ok=True)
    save_nested(_file(folder, step), state, {"kind": folder.name, "step": step})


def load_step(folder: Path, step: int) -> dict[str, Any]:
    """Return the content of the file of a step."""
    file = _file(folder, step)
    if not file.is_file():
        steps = steps_of(folder)
        last = f"the last step with {folder.name} is {steps[-1]}" if steps else f"it has no {folder.name} yet"
        raise InputError(f"The run in {str(folder.parent)!r} has no {folder.name} of step {step}: {last}.")
    state, header = load_nested(file)
    if not isinstance(state, dict) or (header.get("kind"), header.get("step")) != (folder.name, step):
        raise RunStoreError(f"{str(file)!r} does not hold the {folder.name} of step {step}.")
    return state


def load_newest(folder: Path) -> tuple[int, dict[str, Any]] | None:
    """Return the newest step with an intact file, and its content; damaged files are skipped with a warning."""
    steps = steps_of(folder)
    for step in reversed(steps):
        try:
            return step, load_step(folder, step)
        except (RunStoreError, InputError) as error:
            warnings.warn(f"A file of the run is skipped: {error}", UserWarning, stacklevel=3)
    if steps:  # to start again silently would lose a training
        raise RunStoreError(f"All {len(steps)} files in {str(folder)!r} are damaged.")
    return None


def steps_of(folder: Path) -> list[int]:
    """Return the steps that have a file, ascending."""
    try:
        names = os.listdir(folder)
    except FileNotFoundError:
        return []
    except OSError as error:
        raise RunStoreError(f"{str(folder)!r} cannot be read: {error.strerror}.") from error
    return sorted(int(match[1]) for name in names if (match := _STEP_FILE.fullmatch(name)))


def remove_older(folder: Path, step: int, keep: int) -> None:
    """Remove the files up to a step, except for the newest ones.

    Later steps are kept: if a run was continued from an earlier step, they are not older than this one.
    """
    for older in [other for other in steps_of(folder) if other <= step][:-keep]:
        with file_trouble(_file(folder, older), "removed"):
            _file(folder, older).unlink(missing_ok=True)


def tidy(run: Path) -> None:
    """Remove incomplete files of killed processes; the caller holds the writer's lock."""
    for folder, names in ((run, _DATABASE_DRAFT), *((run / name, _DRAFT) for name in FOLDERS)):
        if folder == run or not folder.is_symlink():
            with file_trouble(folder, "tidied"):
                _remove_named(folder, names)


def remove_all(folder: Path) -> None:
    """Remove the files of all steps, and the folder if it is empty then; a symbolic link is not followed."""
    if folder.is_symlink():
        return
    with file_trouble(folder, "removed"):
        _remove_named(folder, _STEP_FILE)
    with suppress(OSError):  # it contains other files, or does not exist
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
