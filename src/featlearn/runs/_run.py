"""Run on disk: configuration, metrics, matrices, checkpoints and status."""

from __future__ import annotations

import json
import logging
import os
import sqlite3
import time
import warnings
import weakref
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Self

from featlearn._utils.public_names import RenamedAttribute
from featlearn._utils.validation import (
    as_folder,
    as_settings,
    as_step,
    as_text,
    as_value,
    changed_settings,
    check_int,
    check_option,
    is_int,
    is_tensor,
)
from featlearn.errors import InputError, RunStoreError
from featlearn.runs import _sql
from featlearn.runs._environment import describe_environment, new_meta, process_started
from featlearn.runs._reader import RunRecord
from featlearn.runs._segments import begin_segment, differs, goes_back
from featlearn.runs._times import StepClock
from featlearn.runs.database import DATABASE_FILE, Database, create_database, require_run
from featlearn.runs.lock import WriterLock, close_and_release, locked, warn_or_close
from featlearn.runs.step_files import remove_all, remove_older, save_step, steps_of, tidy

if TYPE_CHECKING:
    from torch import Tensor

_LOG = logging.getLogger("featlearn")

Value = float | int | bool | str


class Run(RunRecord):
    """Run on disk, created by `Run.create` or opened by `Run.open`.

    Logged values are kept even if the process is killed. One process at a time writes a run, and any number can read it
    meanwhile. In a ``with`` block, the run ends as finished, or as failed if the block raises.

    Args:
        path: Folder of the run.
        lock: Lock of the writer. None opens the run for reading.

    Attributes:
        path: Folder of the run.
        name: Name of the run. Default: that of the folder.
        config: Config of the run.
        environment: Versions, platform, command, seed and commit when the run was created.
        started: Time when the run was created.

    Example:
        >>> import tempfile
        >>> with Run.create(Path(tempfile.mkdtemp()) / "first", {"lr": 0.1}) as run:
        ...     run.log(0, {"loss": 0.5})
        >>> run.status, run.series("loss").to_list()
        ('finished', [0.5])
    """

    def __init__(self, path: Path, lock: WriterLock | None = None) -> None:
        database = Database(path / DATABASE_FILE, write=lock is not None)
        self._start: int | None = None
        self._earlier = -1  # the last step that an earlier writer logged
        self._last = -1  # the last step of the latest segment
        self._has_written = False
        self._any_order = False
        self._repeated = range(0)  # steps that are logged once more, with the same values
        self._clock = StepClock(time.time())
        # Also called when the run is garbage-collected or the program ends.
        self._end = None if lock is None else weakref.finalize(self, close_and_release, database, lock)
        try:
            super().__init__(path, database)
        except BaseException:
            self.close()
            raise

    @classmethod
    def create(
        cls,
        folder: str | os.PathLike[str],
        config: Mapping[str, Any] | None = None,
        *,
        seed: int | None = None,
        name: str | None = None,
    ) -> Self:
        """Create a run in a folder without one, and open it for writing.

        Args:
            folder: Folder of the run, created if it does not exist.
            config: Config of the run: a mapping, possibly nested, of JSON values. None is an empty config.
            seed: Random seed of the run, stored in the environment.
            name: Name of the run. None uses the name of the folder.

        Returns:
            The run, open for writing.

        Raises:
            InputError: If an argument is not valid.
            RunStoreError: If the folder already holds a run, or cannot be written.
        """
        path = as_folder(folder)
        if seed is not None and not is_int(seed):
            raise InputError(f"seed must be an integer or None, got {seed!r}.")
        meta = new_meta(path, as_settings(config), seed, name)
        with locked(path, create=True) as lock:
            if os.path.lexists(path / DATABASE_FILE):
                raise RunStoreError(
                    f"{str(path)!r} already holds a run. Open it with write=True, or choose another folder."
                )
            return cls._create(path, lock, meta)

    @classmethod
    def claim(cls, folder: str | os.PathLike[str], config: Mapping[str, Any] | None = None) -> Self | None:
        """Start a run in a folder that holds none, or one in which nothing was recorded yet.

        Args:
            folder: Folder of the run, created if it does not exist.
            config: Config of the run. None is an empty config, or that of an empty run that is reused.

        Returns:
            The run, open for writing; None if the folder holds a run with steps or checkpoints, which is not changed.
        """
        path = as_folder(folder)
        meta = new_meta(path, as_settings(config), None, None)
        if os.path.lexists(path / DATABASE_FILE) and not cls.open(path).is_empty:
            return None  # without waiting for a writer
        with locked(path, create=True) as lock:
            if os.path.lexists(path / DATABASE_FILE):
                old = cls.open(path)
                if not old.is_empty:
                    lock.release()
                    return None
                settings = old.config if config is None else as_settings(config)
                meta = new_meta(path, settings, old.environment.get("seed"), old.name)
                remove_all(path / "initial")  # of a launch that recorded nothing
            return cls._create(path, lock, meta)

    @classmethod
    def open(cls, folder: str | os.PathLike[str], *, write: bool = False) -> Self:
        """Open an existing run.

        Args:
            folder: Folder of the run.
            write: Whether to open the run for writing, which sets its status to running. Only one process at a time
                can write.

        Returns:
            The run.

        Raises:
            RunStoreError: If the folder has no run, the run is damaged, or another process is writing it.
        """
        path = as_folder(folder)
        require_run(path)
        if not write:
            return cls(path)
        with locked(path) as lock:
            return cls._begin(path, lock)

    @classmethod
    def open_or_create(cls, folder: str | os.PathLike[str], config: Mapping[str, Any] | None = None) -> Self:
        """Open the run of a folder for writing, or create one.

        Args:
            folder: Folder of the run, created if it does not exist.
            config: Config of a new run. An existing run keeps its config, with a warning if this one differs.

        Returns:
            The run, open for writing.

        Raises:
            RunStoreError: If the run cannot be written.
        """
        if not cls.exists(folder):
            return cls.create(folder, config)
        run = cls.open(folder, write=True)
        if config is not None and (changed := changed_settings(run.config, as_settings(config))):
            warn_or_close(run, f"The run in {str(run.path)!r} keeps its original config: {changed}.", stacklevel=3)
        return run

    @staticmethod
    def exists(folder: str | os.PathLike[str]) -> bool:
        """Return whether a folder holds a run.

        Args:
            folder: Folder, which need not exist.
        """
        return (as_folder(folder) / DATABASE_FILE).is_file()

    at = RenamedAttribute("open_or_create")
    is_in = RenamedAttribute("exists")

    @classmethod
    def _create(cls, path: Path, lock: WriterLock, meta: Mapping[str, str]) -> Self:
        create_database(path / DATABASE_FILE, meta)
        return cls._begin(path, lock, json.loads(meta["environment"]))

    @classmethod
    def _begin(cls, path: Path, lock: WriterLock, environment: Mapping[str, Any] | None = None) -> Self:
        run = cls(path, lock)
        try:
            tidy(path)
            last = run.last_step
            run._earlier = run._last = -1 if last is None else last
            now = time.time()
            current = environment or describe_environment(run.environment.get("seed"))
            row = (os.getpid(), process_started(), now, now, json.dumps(current))
            insert = "INSERT INTO starts (pid, process_started, began, seen, environment) VALUES (?, ?, ?, ?, ?)"
            with run._database.transaction() as connection:
                _sql.set_status(connection, "running", "")
                run._start = connection.execute(insert, row).lastrowid
        except BaseException:
            run.close()
            raise
        return run

    def log(self, step: int, values: Mapping[str, Value], *, layer: str | None = None) -> None:
        """Log values of a step, all or none. When it returns, they are kept even if the process is killed.

        Steps do not go back within a *segment* of a run. A new segment begins, with a warning, if the first step that a
        process logs is lower than the last step of the run, or if a name is logged for a lower step than before. It
        shares the steps before its first one with the segment before it, whose later values are kept and can be read
        with ``segment=``; by default the latest segment is read. These repeats do not begin a segment:

        - The last step: a value of the same name, step and layer is replaced (gradient accumulation logs a step several
          times, and a resumed trainer begins with the step at which it ended).
        - A lower step of names that have no later values, such as the result of a validation that took several steps.
        - Steps after a `checkpoint` that was loaded, as long as they have the same values as before. The first value
          that differs begins a segment, without a warning.

        Args:
            step: Number of the step, an integer of at least 0.
            values: Numbers or strings by name. Tensors of one element are numbers.
            layer: Name of the layer of the values. None is the run itself.

        Raises:
            InputError: If an argument is not valid.
            RunStoreError: If the run is not open for writing, or cannot be written.
        """
        self._write(step, {_as_layer(layer): values})

    def log_layers(self, step: int, table: Mapping[str | None, Mapping[str, Value]]) -> None:
        """Log values of several layers, all or none.

        Args:
            step: Number of the step, an integer of at least 0.
            table: Values by layer and name, ``{layer: {name: value}}``. The layer None is the run itself.

        Raises:
            InputError: If an argument is not valid.
            RunStoreError: If the run is not open for writing, or cannot be written.
        """
        if not isinstance(table, Mapping):
            raise InputError(f"table must map layers to names and values, got {type(table).__name__}.")
        self._write(step, {_as_layer(layer): values for layer, values in table.items()})

    def _write(self, step: int, table: Mapping[str, Mapping[str, Value]]) -> None:
        at = as_step(step)
        rows = []
        for layer, values in table.items():
            if not isinstance(values, Mapping):
                raise InputError(f"values must map names to numbers or strings, got {type(values).__name__}.")
            rows += [(at, layer, as_text(name, "name"), as_value(value, name)) for name, value in values.items()]
        with self._order(at, lambda connection: self._goes_back(connection, at, rows)) as connection:
            now = time.time()
            _sql.write_rows(connection, rows)
            self._clock.record(connection, at, now)
            connection.execute("UPDATE starts SET seen = ? WHERE id = ?", (now, self._start))
        self._last = max(self._last, at)

    def save_matrices(self, step: int, matrices: Mapping[str, Tensor]) -> None:
        """Save the matrices of a step, replacing those saved before.

        Args:
            step: Number of the step, an integer of at least 0.
            matrices: Tensors by name, at least one.

        Raises:
            InputError: If an argument is not valid.
            RunStoreError: If the run is not open for writing, or cannot be written.
        """
        at = as_step(step)
        if not isinstance(matrices, Mapping) or not matrices:
            raise InputError(f"matrices must map at least one name to a tensor, got {type(matrices).__name__}.")
        for name, matrix in matrices.items():
            if not is_tensor(matrix):
                raise InputError(f"The matrix {name!r} must be a tensor, got {type(matrix).__name__}.")
            as_text(name, "the name of a matrix")
        self._database.writable()
        self._save("matrices", at, matrices)

    def save_checkpoint(self, step: int, state: Mapping[str, Any], *, keep: int = 2) -> None:
        """Save a state from which a training can be resumed.

        Args:
            step: Number of the step, an integer of at least 0.
            state: Nested mappings, lists and tuples of tensors, arrays and plain values, as in `save_nested`.
            keep: Number of checkpoints to keep up to this step. Older ones are removed once this one is complete.

        Raises:
            InputError: If an argument is not valid.
            RunStoreError: If the run is not open for writing, or cannot be written.
        """
        at = as_step(step)
        if not isinstance(state, Mapping):
            raise InputError(f"state must be a mapping, got {type(state).__name__}.")
        check_int("keep", keep)
        self._database.sync()  # a checkpoint must not be newer than the values logged before it
        firsts = self._save("checkpoints", at, state)
        remove_older(self.path / "checkpoints", at, keep, firsts)

    def _save(self, kind: str, step: int, content: Mapping[str, Any]) -> list[int]:
        """Write the file of a step, in a new segment if the step goes back, and return the first steps of segments."""
        steps = steps_of(self.path / kind, self._first_steps(None))
        # Files of steps that are repeated are replaced: the values of these steps are compared.
        back = bool(steps) and step < steps[-1] and step not in self._repeated
        with self._order(step, lambda connection: back or (step < self._last and not self._has_written)):
            pass
        firsts = self._first_steps(None)
        save_step(self.path / kind, step, content, firsts)
        return firsts

    @contextmanager
    def _order(self, step: int, goes_back: Callable[[sqlite3.Connection], bool]) -> Iterator[sqlite3.Connection]:
        """Yield a connection in a transaction, in which a segment begins first if the step goes back."""
        last, segment = self._last, None
        with self._database.transaction() as connection:
            if not self._any_order and goes_back(connection):
                segment = begin_segment(connection, step, self._start)
            yield connection
        expected = step in self._repeated
        self._has_written = True
        if segment is not None:
            self._last, self._repeated = step, range(0)
        if segment is not None and not expected:
            message = (
                f"Step {step} goes back in the run in {str(self.path)!r}, which has steps up to {last}: segment "
                f"{segment} of the run begins, and the later values of segment {segment - 1} are kept."
            )
            warnings.warn(message, UserWarning, stacklevel=5)  # at the call of log

    def _goes_back(self, connection: sqlite3.Connection, step: int, rows: list[_sql.Row]) -> bool:
        if step in self._repeated:
            return differs(connection, rows)
        if step >= self._last:
            return False
        return not self._has_written or goes_back(connection, rows)

    def checkpoint(self, step: int | None = None, *, segment: int | None = None) -> tuple[int, dict[str, Any]] | None:
        """Return a checkpoint. The steps after it can then be logged again; see `log`.

        Args:
            step: Step of the checkpoint. None selects the newest one that is not damaged.
            segment: Number of the segment, from 1. None is the latest one.

        Returns:
            Step and state of the checkpoint; None if the run has none.

        Raises:
            InputError: If the given step has no checkpoint, or there is no such segment.
            RunStoreError: If all checkpoints are damaged.
        """
        result = super().checkpoint(step, segment=segment)
        if result is not None and self.writes:
            with self._database.transaction() as connection:
                connection.execute("UPDATE starts SET checkpoint = ? WHERE id = ?", (result[0], self._start))
            self.repeat_from(result[0])
        return result

    @property
    def next_step(self) -> int:
        """Step after the last one that earlier processes logged; 0 in a new run."""
        return self._earlier + 1

    def repeat_from(self, step: int) -> None:
        """Allow the steps from this one on to be logged once more with the same values, as after loading a checkpoint.

        The first value that differs begins a segment, without the warning of `log`.

        Args:
            step: Number of the step, an integer of at least 0, such as that of a checkpoint.
        """
        self._repeated = range(as_step(step), self._last + 1)

    def ignore_order(self) -> None:
        """Allow steps in any order: values that are logged again are replaced, and no segment begins."""
        self._any_order = True

    def save_note(self, name: str, value: Any) -> None:
        """Store a small JSON value beside the metrics, replacing an earlier one of this name.

        Args:
            name: Name of the note.
            value: Value that JSON can hold.
        """
        with self._database.transaction() as connection:
            _sql.set_meta(connection, {f"note.{as_text(name, 'name')}": json.dumps(value)})

    def save_initial(self, state: Mapping[str, Any]) -> None:
        """Save the initial weights, which later weights are compared with.

        Args:
            state: State of the model, as in `save_checkpoint`.
        """
        self._database.writable()
        save_step(self.path / "initial", 0, state)

    def finish(self, status: Literal["finished", "failed"] = "finished", message: str = "") -> None:
        """Set the final status of the run and close it for writing.

        Args:
            status: Status of the run, "finished" or "failed".
            message: Reason for the status, for instance an error message.

        Raises:
            RunStoreError: If the run is not open for writing, or cannot be written.
        """
        check_option("status", status, ("finished", "failed"))
        reason = as_text(message, "message", empty=True)
        with self._database.transaction() as connection:
            _sql.set_status(connection, status, reason)
            connection.execute("UPDATE starts SET seen = ? WHERE id = ?", (time.time(), self._start))
        self.close()

    def close(self) -> None:
        """Close the run for writing. A run that was not finished counts as interrupted; it can still be read."""
        if self._end is not None:
            self._end()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        try:
            if self.writes and error is None:
                self.finish()
            elif self.writes:
                self.finish("failed", f"{type(error).__name__}: {error}".encode("utf-8", "replace").decode())
        except RunStoreError as failure:
            if error is None:
                raise
            _LOG.warning("the run could not be marked as failed: %s", failure)  # the error of the block is raised
        finally:
            self.close()


def _as_layer(layer: str | None) -> str:
    return "" if layer is None else as_text(layer, "layer")
