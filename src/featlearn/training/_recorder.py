"""Where a monitor's numbers go: a run on disk, or memory where there is none, and trackers besides."""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from typing import Literal

import pandas as pd

from featlearn._utils.validation import check_option
from featlearn.errors import RunStoreError
from featlearn.runs import Run
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
