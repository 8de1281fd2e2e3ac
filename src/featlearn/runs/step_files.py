"""Files of a run that belong to a step: matrices and checkpoints."""

from __future__ import annotations

import os
import re
import warnings
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from featlearn._utils.atomic import file_trouble
from featlearn._utils.safetensors_file import load_nested, save_nested
from featlearn.errors import InputError, RunStoreError

FOLDERS = ("matrices", "checkpoints", "initial")

# The file of a step, with the number of its segment if that is not the first: 80.safetensors, 80.2.safetensors.
_STEP_FILE = re.compile(r"(0|[1-9][0-9]*)(?:\.([1-9][0-9]*))?\.safetensors")
# Names of incomplete files, of `atomic_write` and of safetensors.
_DRAFT = re.compile(r"\.(0|[1-9][0-9]*)(\.[1-9][0-9]*)?\.safetensors\.[0-9a-f]{12}|\.tmp[A-Za-z0-9]{6}")
_DATABASE_DRAFT = re.compile(r"\.run\.db\.[0-9a-f]{12}")


ONE_SEGMENT = (0,)
"""First steps of the segments of a run whose steps never go back."""


def save_step(folder: Path, step: int, state: Mapping[str, Any], firsts: Sequence[int] = ONE_SEGMENT) -> None:
    """Write the file of a step, replacing an existing one of the same segment."""
    with file_trouble(folder):
        folder.mkdir(exist_ok=True)
    save_nested(step_file(folder, step, firsts), state, {"kind": folder.name, "step": step})


def load_step(folder: Path, step: int, firsts: Sequence[int] = ONE_SEGMENT) -> dict[str, Any]:
    """Return the content of the file of a step."""
    file = step_file(folder, step, firsts)
    if not file.is_file():
        steps = steps_of(folder, firsts)
        last = f"the last step with {folder.name} is {steps[-1]}" if steps else f"it has no {folder.name} yet"
        raise InputError(f"The run in {str(folder.parent)!r} has no {folder.name} of step {step}: {last}.")
    state, header = load_nested(file)
    if not isinstance(state, dict) or (header.get("kind"), header.get("step")) != (folder.name, step):
        raise RunStoreError(f"{str(file)!r} does not hold the {folder.name} of step {step}.")
    return state


def load_newest(folder: Path, firsts: Sequence[int] = ONE_SEGMENT) -> tuple[int, dict[str, Any]] | None:
    """Return the newest step with an intact file, and its content; damaged files are skipped with a warning."""
    steps = steps_of(folder, firsts)
    for step in reversed(steps):
        try:
            return step, load_step(folder, step, firsts)
        except (RunStoreError, InputError) as error:
            warnings.warn(f"A file of the run is skipped: {error}", UserWarning, stacklevel=3)
    if steps:  # to start again silently would lose a training
        raise RunStoreError(f"All {len(steps)} files in {str(folder)!r} are damaged.")
    return None


def steps_of(folder: Path, firsts: Sequence[int] = ONE_SEGMENT) -> list[int]:
    """Return the steps that have a file, ascending.

    Args:
        folder: Folder of the files.
        firsts: First steps of the segments up to the one that is read. Files of other segments are ignored.
    """
    try:
        names = os.listdir(folder)
    except FileNotFoundError:
        return []
    except OSError as error:
        raise RunStoreError(f"{str(folder)!r} cannot be read: {error.strerror}.") from error
    files = [(int(match[1]), int(match[2] or 1)) for name in names if (match := _STEP_FILE.fullmatch(name))]
    return sorted(step for step, segment in files if segment == owner(step, firsts))


def remove_older(folder: Path, step: int, keep: int, firsts: Sequence[int] = ONE_SEGMENT) -> None:
    """Remove the files up to a step, except for the newest ones.

    Later steps are kept: if a run was continued from an earlier step, they are not older than this one.
    """
    for older in [other for other in steps_of(folder, firsts) if other <= step][:-keep]:
        file = step_file(folder, older, firsts)
        with file_trouble(file, "removed"):
            file.unlink(missing_ok=True)


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


def step_file(folder: Path, step: int, firsts: Sequence[int] = ONE_SEGMENT) -> Path:
    """Return the path of the file of a step in the segment that the step belongs to."""
    segment = owner(step, firsts)
    return folder / (f"{step}.safetensors" if segment == 1 else f"{step}.{segment}.safetensors")


def owner(step: int, firsts: Sequence[int]) -> int:
    """Return the number of the segment in which a step was made, of those that begin at ``firsts``."""
    return max(number for number, first in enumerate(firsts, 1) if first <= step)
