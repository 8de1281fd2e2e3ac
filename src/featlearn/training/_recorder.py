"""Open the run of a monitor, and write its numbers to that run, to memory and to trackers."""

from __future__ import annotations

import os
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from typing import Any, Literal

import pandas as pd
from torch import nn

from featlearn._utils.validation import check_option
from featlearn.errors import InputError, RunStoreError
from featlearn.runs import Run
from featlearn.runs.launch import check_config, launch, run_to_continue
from featlearn.training._checkpoint import changed_tensors
from featlearn.training._measurement import Snapshot
from featlearn.training.trackers import Tracker


class Recorder:
    """Keeps numbers, words and matrices; trouble with a disk or a tracker does not end a training.

    What the run has taken is not kept in memory as well; what it could not take is.

    Args:
        run: A run that is open for writing, or None.
        owns: Whether to finish the run at the end.
        trackers: Where numbers go besides.
        on_error: ``"warn"`` goes on when something cannot be written, ``"raise"`` does not.
    """

    def __init__(self, run: Run | None, owns: bool, trackers: Sequence[Tracker], on_error: str) -> None:
        check_option("on_error", on_error, ("warn", "raise"))
        self.run = run
        self._record = run  # can be read when it is closed
        self._owns, self._trackers, self._on_error = owns, list(trackers), on_error
        self._stored: pd.DataFrame | None = None
        self.snapshots: list[Snapshot] = []
        self._scalars: dict[int, dict[str, float]] = {}

    def numbers(self, step: int, numbers: dict[str, float]) -> None:
        """Take numbers of the whole training."""
        if not self._logged(step, {None: numbers}):
            self._scalars.setdefault(step, {}).update(numbers)
        self._track(step, numbers)

    def snapshot(self, found: Snapshot, cost: Mapping[str, float]) -> None:
        """Take a measurement, and what it has cost."""
        words = found.texts()
        table: dict[str | None, dict[str, float | str]] = {
            layer: {**numbers, **words.get(layer, {})} for layer, numbers in found.layers.items()
        }
        table[None] = {**found.model, **words.get(None, {}), **cost}
        if not self._logged(found.step, table):
            self.keep(found)
        elif found.matrices and self.run is not None:  # a run that takes no numbers is told of once
            with self._warn_or_raise("the matrices cannot be written", RunStoreError):
                self.run.save_matrices(found.step, found.matrices)
        flat = {f"{layer}/{name}": v for layer, numbers in found.layers.items() for name, v in numbers.items()}
        self._track(found.step, {**flat, **found.model, **cost})

    def keep(self, found: Snapshot) -> None:
        """Keep the numbers of a measurement in memory."""
        self.snapshots.append(replace(found, phases={}, matrices={}))

    def metrics(self) -> pd.DataFrame:
        """All numbers: columns step, layer, name, value."""
        rows: list[tuple[int, str | None, str, float]] = [
            (step, None, name, value) for step, values in self._scalars.items() for name, value in values.items()
        ]
        for found in self.snapshots:
            rows += [(found.step, None, name, value) for name, value in found.model.items()]
            rows += [(found.step, layer, n, v) for layer, numbers in found.layers.items() for n, v in numbers.items()]
        frame = pd.DataFrame(rows, columns=["step", "layer", "name", "value"])
        if self._record is not None:
            with self._warn_or_raise("the run cannot be read", RunStoreError):
                stored = self._record.metrics() if self._stored is None else self._stored
                frame = pd.concat([stored, frame], ignore_index=True) if rows else stored
        return frame.sort_values("step", kind="stable", ignore_index=True)

    def close(self, status: Literal["finished", "failed"]) -> None:
        """Close the trackers, and finish the run if it is ours."""
        trackers, self._trackers = self._trackers, []
        run, self.run = self.run, None
        try:
            for tracker in trackers:
                with self._warn_or_raise(f"{type(tracker).__name__} cannot be closed", Exception):
                    tracker.close()
        finally:
            if run is not None and self._owns and run.writes:
                try:
                    with self._warn_or_raise("the run cannot be finished", RunStoreError):
                        run.finish(status)
                finally:
                    self._give_up(run)

    def _give_up(self, run: Run) -> None:
        """Close a run that could not be finished: it counts as interrupted, and others may write it."""
        if run.writes:
            with suppress(RunStoreError):  # its files may be gone, and only the open connection has the numbers
                self._stored = run.metrics()
            run.close()

    def _logged(self, step: int, table: Mapping[str | None, Mapping[str, float | str]]) -> bool:
        """Whether there is a run, and it has taken numbers and words."""
        taken = False
        if self.run is not None:
            with self._warn_or_raise("the run cannot be written", RunStoreError):
                self.run.log_layers(step, table)
                taken = True
        return taken

    def _track(self, step: int, numbers: dict[str, float]) -> None:
        for tracker in self._trackers:
            with self._warn_or_raise(f"{type(tracker).__name__} takes no numbers", Exception):
                tracker.log(step, numbers)

    @contextmanager
    def _warn_or_raise(self, trouble: str, errors: type[Exception]) -> Iterator[None]:
        """What goes wrong in the block does not end the training, unless it is asked to."""
        try:
            yield
        except errors as error:
            if self._on_error == "raise":
                raise
            # Without the step, so that a disk that stays full is told once.
            warnings.warn(f"{trouble}, training goes on: {error}", UserWarning, stacklevel=4)


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
