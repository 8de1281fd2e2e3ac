"""Open the run that a monitor writes: a new one, or one that is continued."""

from __future__ import annotations

import os
import warnings
from collections.abc import Mapping
from typing import Any

from torch import nn

from featlearn._utils.validation import check_option
from featlearn.errors import InputError
from featlearn.runs import Run
from featlearn.runs.launch import check_config, launch, run_to_continue
from featlearn.training._checkpoint import changed_tensors

Where = Run | str | os.PathLike[str] | None


def stored_start(
    run: Where, config: Mapping[str, Any] | None, resume: bool, model: nn.Module
) -> tuple[dict[str, Any] | None, int]:
    """Return the initial weights of a run that is continued, None if there are none, and the next step to count.

    Args:
        run: Run, folder or None, as in `featlearn.Monitor`. It is only read.
        config: Config of this launch.
        resume: Whether the run of a folder is continued.
        model: Model that is trained, without wrappers.

    Raises:
        InputError: The arguments contradict each other, or the run began with another config or architecture.
    """
    check_option("resume", resume, (True, False))
    if resume and run is None:
        raise InputError("resume=True needs run: there is no run to continue. Pass a folder.")
    if config is not None and (run is None or isinstance(run, Run)):
        raise InputError("config belongs to a run that the monitor makes: give it a folder as run, or leave config out")
    if run is None:
        return None, 0
    if isinstance(run, Run):
        return run.initial(), run.next_step
    old = run_to_continue(run) if resume else None
    if old is None:
        return None, 0
    check_config(old, config)
    start, last = old.initial(), old.last_step
    now = model.state_dict()
    if start is not None and (changed := changed_tensors(start, now)):
        told = [f"{name} was {_shape(start.get(name))} and is {_shape(now.get(name))}" for name in changed[:5]]
        raise InputError(
            f"model must have the architecture of the run in {str(old.path)!r} to continue it, got another: "
            f"{'; '.join(told)}. Pass the same architecture, or leave out resume=True to start a new run."
        )
    return start, 0 if last is None else last + 1


def open_run(run: Where, config: Mapping[str, Any] | None, resume: bool, start: Mapping[str, Any]) -> Run | None:
    """Open the run for writing, and keep the initial weights in it if it has none.

    Args:
        run: Run, folder or None, as in `featlearn.Monitor`.
        config: Config of this launch.
        resume: Whether the run of a folder is continued.
        start: Initial weights of this launch.
    """
    if run is None:
        return None
    opened, told = (run, None) if isinstance(run, Run) else launch(run, config, resume=resume)
    try:
        if resume and opened.next_step:
            # Trainers that continue begin with the step at which they ended.
            opened.repeat_from(opened.next_step - 1)
        if opened.initial() is None:
            opened.save_initial(dict(start))
        if told is not None:
            warnings.warn(told, UserWarning, stacklevel=5)  # where the monitor is made
    except BaseException:
        if opened is not run:
            opened.close()
        raise
    return opened


def _shape(value: Any) -> str:
    return "missing" if value is None else str(tuple(value.shape))
