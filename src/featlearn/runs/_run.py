"""Write a run: its configuration, metrics, matrices, checkpoints and status."""

from __future__ import annotations

import json
import logging
import os
import time
import warnings
import weakref
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Any, Literal, Self

from torch import Tensor

from featlearn._utils.atomic import file_trouble
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
)
from featlearn.errors import InputError, RunStoreError
from featlearn.runs import _sql
from featlearn.runs._environment import describe_environment, process_started
from featlearn.runs.database import DATABASE_FILE, Database, create_database, require_run
from featlearn.runs.lock import WriterLock
from featlearn.runs.reader import RunRecord
from featlearn.runs.step_files import remove_all, remove_older, save_step, tidy

_LOG = logging.getLogger("featlearn")

Value = float | int | bool | str


class Run(RunRecord):
    """A run on disk, made by `Run.create` or `Run.open`.

    What `log` returned from outlives the process, whenever and however it ends. One process writes a run at a time,
    any number read it meanwhile. Used in a ``with`` block, it ends as finished, or as failed if the block raises.

    Attributes:
        path: Its folder.
        name: Its name; that of the folder, unless it was given another.
        config: Its settings.
        environment: Versions, platform, command, seed and commit when it was created.
        started: When it was created.

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
        self._repeats: int | None = None  # the step from which on they may be logged again
        # Also when the run is forgotten or the program ends.
        self._end = None if lock is None else weakref.finalize(self, _release, database, lock)
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
        """Make a run in a folder that holds none, and open it for writing.

        Args:
            folder: Its folder, made if need be.
            config: Its settings: a mapping, nested or not, of what JSON can hold.
            seed: The seed it runs with, kept with the environment.
            name: Its name; that of the folder by default.
        """
        path = as_folder(folder)
        if seed is not None and not is_int(seed):
            raise InputError(f"seed must be an integer or None, got {seed!r}")
        meta = _described(path, as_settings(config), seed, name)
        with file_trouble(path):
            path.mkdir(parents=True, exist_ok=True)
        lock = WriterLock(path)
        try:
            if os.path.lexists(path / DATABASE_FILE):
                raise RunStoreError(
                    f"{str(path)!r} holds a run already: open it with write=True, or choose another folder"
                )
            return cls._made(path, lock, meta)
        except BaseException:
            lock.release()
            raise

    @classmethod
    def claim(cls, folder: str | os.PathLike[str], config: Mapping[str, Any] | None = None) -> Self | None:
        """Begin a run in a folder that holds none, or one in which nothing was recorded yet.

        Args:
            folder: Its folder, made if need be.
            config: Config of the run. None is an empty one, or that of the run that is taken over.

        Returns:
            The run, open for writing; None if the folder holds a run with steps or checkpoints, which is not touched.
        """
        path = as_folder(folder)
        meta = _described(path, as_settings(config), None, None)
        if os.path.lexists(path / DATABASE_FILE) and not cls.open(path).is_empty:
            return None  # without waiting for a writer
        with file_trouble(path):
            path.mkdir(parents=True, exist_ok=True)
        lock = WriterLock(path)
        try:
            if os.path.lexists(path / DATABASE_FILE):
                old = cls.open(path)
                if not old.is_empty:
                    lock.release()
                    return None
                kept = old.config if config is None else as_settings(config)
                meta = _described(path, kept, old.environment.get("seed"), old.name)
                remove_all(path / "initial")  # of a launch that recorded nothing
            return cls._made(path, lock, meta)
        except BaseException:
            lock.release()
            raise

    @classmethod
    def open(cls, folder: str | os.PathLike[str], *, write: bool = False) -> Self:
        """Open a run that is there.

        Args:
            folder: Its folder.
            write: Write to it: it counts as running again. Only one process at a time may.
        """
        path = as_folder(folder)
        require_run(path)
        if not write:
            return cls(path)
        lock = WriterLock(path)
        try:
            return cls._begin(path, lock)
        except BaseException:
            lock.release()
            raise

    @classmethod
    def open_or_create(cls, folder: str | os.PathLike[str], config: Mapping[str, Any] | None = None) -> Self:
        """The run of a folder, for writing: the one that is there, or a new one with these settings.

        Args:
            folder: Its folder, made if need be.
            config: Settings of a new run; those of one that is there stay, with a warning if these differ.
        """
        if not cls.exists(folder):
            return cls.create(folder, config)
        run = cls.open(folder, write=True)
        if config is not None and (changed := changed_settings(run.config, as_settings(config))):
            told = f"the run in {str(run.path)!r} keeps the config it was made with: {changed}"
            try:
                warnings.warn(told, UserWarning, stacklevel=2)
            except UserWarning:
                run.close()
                raise
        return run

    @staticmethod
    def exists(folder: str | os.PathLike[str]) -> bool:
        """Whether a folder holds a run."""
        return (as_folder(folder) / DATABASE_FILE).is_file()

    at = RenamedAttribute("open_or_create")
    is_in = RenamedAttribute("exists")

    @classmethod
    def _made(cls, path: Path, lock: WriterLock, meta: Mapping[str, str]) -> Self:
        create_database(path / DATABASE_FILE, meta)
        return cls._begin(path, lock, json.loads(meta["environment"]))

    @classmethod
    def _begin(cls, path: Path, lock: WriterLock, environment: Mapping[str, Any] | None = None) -> Self:
        run = cls(path, lock)
        try:
            tidy(path)
            last = run.last_step
            run._earlier = -1 if last is None else last
            now = time.time()
            here = environment or describe_environment(run.environment.get("seed"))
            row = (os.getpid(), process_started(), now, now, json.dumps(here))
            with run._database.transaction() as connection:
                connection.execute("UPDATE meta SET value = 'running' WHERE key = 'status'")
                connection.execute("UPDATE meta SET value = '' WHERE key = 'message'")
                run._start = connection.execute(
                    "INSERT INTO starts (pid, process_started, began, seen, environment) VALUES (?, ?, ?, ?, ?)", row
                ).lastrowid
        except BaseException:
            run.close()
            raise
        return run

    def log(self, step: int, values: Mapping[str, Value], *, layer: str | None = None) -> None:
        """Keep values of a step, all or none; when it returns, they outlive the process.

        A value that was logged by the same name for the same step and layer is replaced: a run that is taken up again
        repeats steps. Going back below the steps of an earlier process without having loaded a `checkpoint` is warned
        of, once.

        Args:
            step: An integer of 0 or more.
            values: Name to number or word; tensors of one element are numbers too.
            layer: The layer they belong to, if it is not the run itself.
        """
        self._write(step, {_as_layer(layer): values})

    def log_layers(self, step: int, table: Mapping[str | None, Mapping[str, Value]]) -> None:
        """Keep values of several layers, ``{layer: {name: value}}``, all or none; the layer None is the run itself."""
        if not isinstance(table, Mapping):
            raise InputError(f"the table must map layers to names and values, got {type(table).__name__}")
        self._write(step, {_as_layer(layer): values for layer, values in table.items()})

    def _write(self, step: int, table: Mapping[str, Mapping[str, Value]]) -> None:
        at = as_step(step)
        rows = []
        for layer, values in table.items():
            if not isinstance(values, Mapping):
                raise InputError(f"values must map names to numbers or words, got {type(values).__name__}")
            rows += [(at, layer, as_text(name, "name"), as_value(value, name)) for name, value in values.items()]
        self._watch_step(at)
        with self._database.transaction() as connection:
            _sql.write_rows(connection, rows)
            connection.execute("UPDATE starts SET seen = ? WHERE id = ?", (time.time(), self._start))

    def save_matrices(self, step: int, matrices: Mapping[str, Tensor]) -> None:
        """Keep the matrices of a step; those kept for it before are replaced."""
        at = as_step(step)
        if not isinstance(matrices, Mapping) or not matrices:
            raise InputError(f"matrices must map at least one name to a tensor, got {type(matrices).__name__}")
        for name, matrix in matrices.items():
            if not isinstance(matrix, Tensor):
                raise InputError(f"the matrix {name!r} must be a tensor, got {type(matrix).__name__}")
            as_text(name, "the name of a matrix")
        self._database.require_writing()
        if at <= self._earlier and at in self.matrix_steps():
            self._watch_step(at)
        save_step(self.path / "matrices", at, matrices)

    def save_checkpoint(self, step: int, state: Mapping[str, Any], *, keep: int = 2) -> None:
        """Keep a state to go on from.

        Args:
            step: An integer of 0 or more.
            state: A nest of mappings, lists and tuples of tensors, arrays and plain values, as `save_nested` takes it.
            keep: How many checkpoints to keep up to this step; older ones go once this one is in its place.
        """
        at = as_step(step)
        if not isinstance(state, Mapping):
            raise InputError(f"the state must be a mapping, got {type(state).__name__}")
        check_int("keep", keep)
        self._database.sync()  # no checkpoint may outlive the values that were logged before it
        save_step(self.path / "checkpoints", at, state)
        remove_older(self.path / "checkpoints", at, keep)

    def checkpoint(self, step: int | None = None) -> tuple[int, dict[str, Any]] | None:
        """Step and state of the newest checkpoint that is whole, or of the one asked for; None if there are none."""
        found = super().checkpoint(step)
        if found is not None and self.writes:
            with self._database.transaction() as connection:
                connection.execute("UPDATE starts SET checkpoint = ? WHERE id = ?", (found[0], self._start))
            self.repeat_from(found[0])
        return found

    @property
    def next_step(self) -> int:
        """The step after the last one that earlier processes logged; 0 in a new run."""
        return self._earlier + 1

    def repeat_from(self, step: int) -> None:
        """Allow steps from this one on to be logged again, without the warning of `log`.

        Args:
            step: An integer of 0 or more, such as the step of a checkpoint that training continues from.
        """
        self._repeats = as_step(step)

    def _watch_step(self, step: int) -> None:
        if step > self._earlier or (self._repeats is not None and step >= self._repeats):
            return
        warnings.warn(
            f"step {step} goes back in the run in {str(self.path)!r}, which has steps up to {self._earlier} of an "
            "earlier process: values that are logged again are replaced",
            UserWarning,
            stacklevel=4,
        )
        self._repeats = 0  # said once

    def save_initial(self, state: Mapping[str, Any]) -> None:
        """Keep the weights that the run began with, which all later ones are compared with.

        Args:
            state: As in `save_checkpoint`.
        """
        self._database.require_writing()
        save_step(self.path / "initial", 0, state)

    def finish(self, status: Literal["finished", "failed"] = "finished", message: str = "") -> None:
        """End the run and close it for writing.

        Args:
            status: How it ended.
            message: Why.
        """
        check_option("status", status, ("finished", "failed"))
        told = as_text(message, "message", empty=True)
        with self._database.transaction() as connection:
            connection.execute("UPDATE meta SET value = ? WHERE key = 'status'", (status,))
            connection.execute("UPDATE meta SET value = ? WHERE key = 'message'", (told,))
            connection.execute("UPDATE starts SET seen = ? WHERE id = ?", (time.time(), self._start))
        self.close()

    def close(self) -> None:
        """Close it for writing; a run that was not finished counts as interrupted. It can still be read."""
        if self._end is not None:
            self._end()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            if self.writes and error is None:
                self.finish()
            elif self.writes:
                told = f"{type(error).__name__}: {error}".encode("utf-8", "replace").decode()
                self.finish("failed", told)
        except RunStoreError as trouble:
            if error is None:
                raise
            _LOG.warning("the run could not be marked as failed: %s", trouble)  # the block's own error is to be seen
        finally:
            self.close()


def _described(path: Path, config: Mapping[str, Any], seed: int | None, name: str | None) -> dict[str, str]:
    """What a new run says of itself."""
    return {
        "name": path.absolute().name.encode("utf-8", "replace").decode() if name is None else as_text(name, "name"),
        "config": json.dumps(config),
        "environment": json.dumps(describe_environment(seed)),
        "started": repr(time.time()),
        "status": "running",
        "message": "",
    }


def _as_layer(layer: str | None) -> str:
    return "" if layer is None else as_text(layer, "layer")


def _release(database: Database, lock: WriterLock) -> None:
    try:
        database.close()
    finally:
        lock.release()
