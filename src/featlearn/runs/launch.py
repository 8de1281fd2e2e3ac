"""Launch of a training, which gets a new run unless it continues one explicitly."""

from __future__ import annotations

import itertools
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from featlearn._utils.validation import as_folder, as_settings, changed_settings
from featlearn.errors import InputError, RunLockedError, RunStoreError
from featlearn.runs._run import Run
from featlearn.runs.database import DATABASE_FILE
from featlearn.runs.lock import LOCK_FILE


def run_to_continue(folder: str | os.PathLike[str]) -> Run | None:
    """Return the run of a folder for reading; None if there is no run, or one without steps and checkpoints."""
    path = as_folder(folder)
    if not os.path.lexists(path / DATABASE_FILE):
        return None
    run = Run.open(path)
    return None if run.is_empty else run


def check_config(run: Run, config: Mapping[str, Any] | None) -> None:
    """Raise if a run is to be continued with another config.

    Args:
        run: Run with steps.
        config: Config of the launch. None is not compared.

    Raises:
        InputError: If the configs differ; the message names each setting that does.
    """
    if config is not None and (changed := changed_settings(run.config, as_settings(config))):
        raise InputError(
            f"config must be that of the run in {str(run.path)!r} to continue it, got another: {changed}. "
            "Pass the same config, or omit resume=True to start a new run."
        )


def launch(
    folder: str | os.PathLike[str], config: Mapping[str, Any] | None = None, *, resume: bool = False
) -> tuple[Run, str | None]:
    """Open the run of a new training for writing.

    The run is created in ``folder``, or in the first free one of ``folder-2``, ``folder-3``, ... if ``folder`` holds a
    run with steps, one that another process writes, or one that cannot be read. Processes that launch at the same time
    get different runs: the writer's lock decides.

    Args:
        folder: Folder of the run, created if it does not exist.
        config: Config of the run. None is an empty config, or that of a run without steps that is reused.
        resume: Whether to continue the run in ``folder`` if it has steps.

    Returns:
        The run, and a message that names its folder if it differs from ``folder``, else None.

    Raises:
        InputError: If the run is to be continued with another config.
        RunStoreError: If the folder or the run to continue cannot be written.
    """
    path = as_folder(folder)
    if resume:
        if (old := run_to_continue(path)) is not None:
            check_config(old, config)
            return Run.open(path, write=True), None
        if (run := Run.claim(path, config)) is not None:
            return run, None
        return launch(path, config, resume=True)  # another process has logged steps meanwhile
    reason = ""
    for candidate in _candidates(path):
        try:
            run, why = Run.claim(candidate, config), ""
        except RunLockedError as error:
            run, why = None, str(error)
        except RunStoreError as error:
            if not os.path.lexists(candidate / DATABASE_FILE):
                raise  # the folder cannot be written, and neither can the next one
            run, why = None, f"the run in {str(candidate)!r} cannot be used ({error})"
        if run is not None and not reason:
            return run, None
        if run is not None:
            new = f"this training is written to the new run {str(candidate)!r}"
            return run, f"{reason}: {new} (pass resume=True to continue the old run instead)"
        if not reason and not why:
            last = Run.open(path).last_step
            extent = "checkpoints" if last is None else f"steps up to {last}"
            why = f"{str(path)!r} already holds a run with {extent}"
        reason = reason or why
    raise AssertionError("the candidates do not end")


def _candidates(path: Path) -> Iterator[Path]:
    """Yield the folder itself, then numbered folders beside it that do not contain other files."""
    yield path
    named = path if path.name not in ("", "..") else Path(os.path.abspath(path))
    for number in itertools.count(2):
        beside = named.with_name(f"{named.name}-{number}")
        if not os.path.lexists(beside):
            yield beside
        elif beside.is_dir():
            inside = os.listdir(beside)
            # A folder with only a lock may belong to a process that is about to create a run.
            if DATABASE_FILE in inside or set(inside) <= {LOCK_FILE}:
                yield beside
