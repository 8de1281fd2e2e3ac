"""Recorder of a monitor, which writes metrics to a run, to memory and to trackers."""

from __future__ import annotations

import os
import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Literal

from torch import nn

from featlearn._utils.validation import check_int, check_option
from featlearn.errors import InputError, RunStoreError
from featlearn.layers import Layer
from featlearn.runs import Run
from featlearn.runs.launch import check_config, launch, run_to_continue
from featlearn.training._checkpoint import changed_tensors
from featlearn.training._identity import Continuation, note_weights
from featlearn.training._measurement import Snapshot
from featlearn.training.trackers import Tracker

if TYPE_CHECKING:
    import pandas as pd


class Recorder:
    """Recorder of metrics, diagnoses and matrices; an error of a disk or a tracker does not end the training.

    Metrics that the run could not store are kept in memory.

    Args:
        run: Run that is open for writing, or None.
        owns: Whether to finish the run at the end.
        trackers: Trackers that receive the metrics too.
        on_error: ``"warn"`` turns errors of the run and of trackers into warnings, ``"raise"`` raises them.
        model: Model that is trained. A record of its weights is stored with each measurement and at the end, and
            compared when the run is continued. None stores no record.
        mark: Hash of the measured rows, stored in a new run and compared when a run is continued. None if unknown.
        layers: Layers of the model by name, whose kinds and shapes are stored in a new run.
    """

    def __init__(
        self,
        run: Run | None,
        owns: bool,
        trackers: Sequence[Tracker],
        on_error: str,
        model: nn.Module | None = None,
        mark: str | None = None,
        layers: Mapping[str, Layer] | None = None,
    ) -> None:
        check_option("on_error", on_error, ("warn", "raise"))
        self.run = run
        self._record = run  # can be read when it is closed
        self._owns, self._trackers, self._on_error = owns, list(trackers), on_error
        self._stored: pd.DataFrame | None = None
        self.snapshots: list[Snapshot] = []
        self._looks: list[Snapshot] = []  # signals between measurements, and beside them
        self._scalars: dict[int, dict[str, float]] = {}
        self._latest: dict[str | None, int] = {}  # last step of each metric in memory
        self._old: list[tuple[dict[int, dict[str, float]], list[Snapshot]]] = []
        self._reported: set[str] = set()
        self._model = model
        self._continued: Continuation | None = None
        if run is not None and model is not None:
            with self._warn_or_raise("The run cannot be read", RunStoreError):
                if run.next_step:
                    self._continued = Continuation(run, model, mark)
                if mark is not None and run.note("rows") is None:
                    run.save_note("rows", mark)
        if run is not None and layers:
            with self._warn_or_raise("The run cannot be written", RunStoreError):
                if run.note("layers") is None:
                    shapes = {name: [layer.kind, list(layer.shape[1:])] for name, layer in layers.items()}
                    run.save_note("layers", shapes)

    def numbers(self, step: int, numbers: dict[str, float]) -> None:
        """Record metrics of the whole training."""
        self._compare(step)
        if not self._log(step, {None: numbers}):
            self._rewind(step, numbers)
            self._scalars.setdefault(step, {}).update(numbers)
        self._track(step, numbers)

    def table(self, step: int, table: Mapping[str | None, Mapping[str, float | str]]) -> None:
        """Record metrics and texts of layers, and of the model (None), beside those of measurements."""
        self._compare(step)
        numbers = {
            layer: {name: value for name, value in of.items() if not isinstance(value, str)}
            for layer, of in table.items()
        }
        if not self._log(step, table):
            layers = {layer: of for layer, of in numbers.items() if layer is not None}
            self._rewind(step, ["signals"])
            self._looks.append(Snapshot(step, layers, numbers.get(None, {})))
        flat = {
            name if layer is None else f"{layer}/{name}": v for layer, of in numbers.items() for name, v in of.items()
        }
        if flat:
            self._track(step, flat)

    def snapshot(self, snapshot: Snapshot) -> None:
        """Record a measurement."""
        self._compare(snapshot.step)
        texts = snapshot.texts()
        table: dict[str | None, dict[str, float | str]] = {
            layer: {**numbers, **texts.get(layer, {})} for layer, numbers in snapshot.layers.items()
        }
        table[None] = {**snapshot.model, **texts.get(None, {})}
        if not self._log(snapshot.step, table):
            self.keep(snapshot)
        elif self.run is not None:  # one warning is enough for a run that cannot be written
            with self._warn_or_raise("The matrices cannot be written", RunStoreError):
                if snapshot.matrices:
                    self.run.save_matrices(snapshot.step, snapshot.matrices)
        flat = {f"{layer}/{name}": v for layer, numbers in snapshot.layers.items() for name, v in numbers.items()}
        self._track(snapshot.step, {**flat, **snapshot.model})

    def note_weights(self) -> None:
        """Record the weights of the model, with which a run is compared that is continued after a kill."""
        if self.run is not None and self._model is not None:
            with self._warn_or_raise("The run cannot be written", RunStoreError):
                note_weights(self.run, self._model, closed=False)

    def keep(self, snapshot: Snapshot) -> None:
        """Keep the metrics of a measurement in memory."""
        self._rewind(snapshot.step, [None])
        self.snapshots.append(replace(snapshot, phases={}, matrices={}))

    def _rewind(self, step: int, names: Iterable[str | None]) -> None:
        """Start a segment of the metrics in memory if one of them goes back; None is the measurement."""
        if any(self._latest.get(name, -1) > step for name in names):
            self._old.append((dict(self._scalars), self.snapshots + self._looks))
            self._scalars = {s: values for s, values in self._scalars.items() if s < step}
            self.snapshots = [snapshot for snapshot in self.snapshots if snapshot.step < step]
            self._looks = [look for look in self._looks if look.step < step]
            last, number = max(self._latest.values()), len(self._old) + 1
            self._latest = {}
            message = f"Step {step} goes back in the monitor, which has steps up to {last}: segment {number} begins."
            warnings.warn(message, UserWarning, stacklevel=6)
        self._latest.update(dict.fromkeys(names, step))

    def metrics(self, segment: int | None = None) -> pd.DataFrame:
        """Return the metrics of a segment, None is the latest, with the columns step, layer, name, value."""
        import pandas as pd

        scalars, snapshots = self._scalars, self.snapshots + self._looks
        if segment is not None and self._record is not None:
            return self._record.metrics(segment=segment)
        if segment is not None and check_int("segment", segment, 1, len(self._old) + 1, optional=True) <= len(
            self._old
        ):
            scalars, snapshots = self._old[segment - 1]
        tables: list[tuple[int, str | None, Mapping[str, float]]] = [(s, None, v) for s, v in scalars.items()]
        for snapshot in snapshots:
            tables.append((snapshot.step, None, snapshot.model))
            tables += [(snapshot.step, layer, values) for layer, values in snapshot.layers.items()]
        rows = [(step, layer, name, value) for step, layer, values in tables for name, value in values.items()]
        frame = pd.DataFrame(rows, columns=["step", "layer", "name", "value"])
        if self._record is not None:
            with self._warn_or_raise("The run cannot be read", RunStoreError):
                stored = self._record.metrics() if self._stored is None else self._stored
                frame = pd.concat([stored, frame], ignore_index=True) if rows else stored
        return frame.sort_values("step", kind="stable", ignore_index=True)

    def close(self, status: Literal["finished", "failed"], trained: bool) -> None:
        """Close the trackers, and finish the run if the recorder owns it; record the weights if they are trained."""
        trackers, self._trackers = self._trackers, []
        run, self.run = self.run, None
        try:
            for tracker in trackers:
                with self._warn_or_raise(f"{type(tracker).__name__} cannot be closed", Exception):
                    tracker.close()
        finally:
            if run is not None and self._owns and run.writes:
                try:
                    if trained and self._model is not None:
                        with suppress(RunStoreError):  # a disk that is full is reported below
                            note_weights(run, self._model, closed=status == "finished")
                    with self._warn_or_raise("The run cannot be finished", RunStoreError):
                        run.finish(status)
                finally:
                    if run.writes:  # close it anyway: it counts as interrupted, and another process can write it
                        with suppress(RunStoreError):  # its files may be gone, but the open connection has the metrics
                            self._stored = run.metrics()
                        run.close()

    def _compare(self, step: int) -> None:
        """Warn once, at the first step, if the model or the rows are not those of the run that is continued."""
        continued, self._continued = self._continued, None
        if continued is not None and (message := continued.message(step)):
            warnings.warn(message, UserWarning, stacklevel=6)

    def _log(self, step: int, table: Mapping[str | None, Mapping[str, float | str]]) -> bool:
        """Write metrics and texts to the run; return whether there is a run and it has stored them."""
        if self.run is not None:
            with self._warn_or_raise("The run cannot be written", RunStoreError):
                self.run.log_layers(step, table)
                return True
        return False

    def _track(self, step: int, numbers: dict[str, float]) -> None:
        for tracker in self._trackers:
            with self._warn_or_raise(f"{type(tracker).__name__} cannot log metrics", Exception):
                tracker.log(step, numbers)

    @contextmanager
    def _warn_or_raise(self, failure: str, errors: type[Exception]) -> Iterator[None]:
        """Turn errors of the block into warnings, unless ``on_error`` is "raise"."""
        try:
            yield
        except errors as error:
            if self._on_error == "raise":
                raise
            # Without the step, so that the warning of a full disk appears once.
            message = f"{failure}; training continues: {error}"
            if message not in self._reported:
                self._reported.add(message)
                warnings.warn(message, UserWarning, stacklevel=4)


Where = Run | str | os.PathLike[str] | None


def stored_start(
    run: Where, config: Mapping[str, Any] | None, resume: bool, model: nn.Module
) -> tuple[dict[str, Any] | None, int]:
    """Return the initial weights of a run that is continued, None if it has none, and the number of the next step.

    Args:
        run: Run, folder or None, as in `featlearn.Monitor`. It is only read.
        config: Config of this launch.
        resume: Whether the run of a folder is continued.
        model: Model that is trained, without wrappers.

    Raises:
        InputError: If the arguments contradict each other, or the run began with another config or architecture.
    """
    check_option("resume", resume, (True, False))
    if resume and run is None:
        raise InputError("resume=True requires run: there is no run to continue. Pass a folder.")
    if config is not None and (run is None or isinstance(run, Run)):
        raise InputError("config requires a run that the monitor creates. Pass a folder as run, or omit config.")
    if run is None:
        return None, 0
    if isinstance(run, Run):
        return run.initial(), run.next_step
    old = run_to_continue(run) if resume else None
    if old is None:
        return None, 0
    check_config(old, config)
    start, now, last = old.initial(), model.state_dict(), old.last_step
    if start is not None and (changed := changed_tensors(start, now)):
        differences = [f"{name} was {_shape(start.get(name))} and is {_shape(now.get(name))}" for name in changed[:5]]
        raise InputError(
            f"model must have the architecture of the run in {str(old.path)!r} to continue it, got another: "
            f"{'; '.join(differences)}. Pass the same architecture, or omit resume=True to start a new run."
        )
    return start, 0 if last is None else last + 1


def open_run(run: Where, config: Mapping[str, Any] | None, resume: bool, start: Mapping[str, Any]) -> Run | None:
    """Open the run for writing, and store the initial weights if it has none.

    Args:
        run: Run, folder or None, as in `featlearn.Monitor`.
        config: Config of this launch.
        resume: Whether the run of a folder is continued.
        start: Initial weights of this launch.
    """
    if run is None:
        return None
    opened, message = (run, None) if isinstance(run, Run) else launch(run, config, resume=resume)
    try:
        if opened.initial() is None:
            opened.save_initial(dict(start))
        if message is not None:
            warnings.warn(message, UserWarning, stacklevel=5)  # at the call of Monitor(...)
    except BaseException:
        if opened is not run:
            opened.close()
        raise
    return opened


def _shape(value: Any) -> str:
    return "missing" if value is None else str(tuple(value.shape))
