"""Reader of a run: its metadata, metrics, texts, matrices and checkpoints."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

from featlearn._utils.validation import as_step, as_text, stored_moment, stored_settings
from featlearn.errors import RunStoreError
from featlearn.runs import _sql
from featlearn.runs._segments import first_steps, read_segments, source
from featlearn.runs._sql import Names
from featlearn.runs.database import Database
from featlearn.runs.lock import being_written
from featlearn.runs.step_files import load_newest, load_step, steps_of

if TYPE_CHECKING:
    import pandas as pd
    from torch import Tensor


class RunRecord:
    """Reader of a run, which another process may be writing.

    Args:
        path: Folder of the run.
        database: Database of the run.
    """

    def __init__(self, path: Path, database: Database) -> None:
        self.path = path
        self._database = database
        self.name, self.config, self.environment, self.started = parse_meta(self._meta(), database.path)

    def metrics(self, names: Names = None, layers: Names = None, *, segment: int | None = None) -> pd.DataFrame:
        """Return the metrics in long form.

        Args:
            names: Names of the metrics. None selects all.
            layers: Glob patterns of layer names. None selects all layers and the metrics of the run itself.
            segment: Number of the segment, from 1. None is the latest one; see `segments`.

        Returns:
            Table with the columns step, layer, name and value, ordered by step. The layer of a metric of the run itself
            is None.

        Raises:
            InputError: If a name or pattern matches nothing, or there is no such segment.
        """
        with self._database.reading() as connection:
            return _sql.read_table(connection, "metrics", names, layers, source(connection, "metrics", segment))

    def texts(self, names: Names = None, layers: Names = None, *, segment: int | None = None) -> pd.DataFrame:
        """Return the text values in long form.

        Args:
            names: Names of the values. None selects all.
            layers: Glob patterns of layer names. None selects all layers and the values of the run itself.
            segment: Number of the segment, from 1. None is the latest one; see `segments`.

        Returns:
            Table with the columns step, layer, name and value, as in `metrics`.

        Raises:
            InputError: If a name or pattern matches nothing, or there is no such segment.
        """
        with self._database.reading() as connection:
            return _sql.read_table(connection, "texts", names, layers, source(connection, "texts", segment))

    def series(self, name: str, layer: str | None = None, *, segment: int | None = None) -> pd.Series[Any]:
        """Return one metric over the steps.

        Args:
            name: Name of the metric.
            layer: Name of the layer. None selects the metric of the run itself.
            segment: Number of the segment, from 1. None is the latest one; see `segments`.

        Returns:
            Series of the values, indexed by step.

        Raises:
            InputError: If the metric was not logged for the layer, or there is no such segment.
        """
        with self._database.reading() as connection:
            return _sql.read_series(connection, as_text(name, "name"), layer, source(connection, "metrics", segment))

    def starts(self) -> pd.DataFrame:
        """Return one row per process that opened the run for writing.

        Returns:
            Table with the columns pid, process_started, began, seen (time of the last write), checkpoint (step from
            which the process continued) and environment.
        """
        with self._database.reading() as connection:
            return _sql.read_starts(connection)

    def segments(self) -> pd.DataFrame:
        """Return one row per segment of the run.

        A run has one segment unless steps went back in it; see `featlearn.runs.Run.log`. A segment shares the steps
        before its first own step with the segment before it.

        Returns:
            Table with the columns segment (number, from 1), first_step (first own step), last_step, and began (time;
            missing for the first segment).
        """
        with self._database.reading() as connection:
            return read_segments(connection)

    @property
    def last_step(self) -> int | None:
        """Largest step with a value in the latest segment; None before the first."""
        with self._database.reading() as connection:
            return _sql.last_step(connection)

    @property
    def is_empty(self) -> bool:
        """True if the run has no step, no checkpoint and no matrix."""
        return self.last_step is None and not self.checkpoint_steps() and not self.matrix_steps()

    @property
    def seconds(self) -> float | None:
        """Total time for which the run was written, up to its last values, in seconds; None for old versions."""
        with self._database.reading() as connection:
            return _sql.read_seconds(connection)

    @property
    def status(self) -> str:
        """Status of the run: running, finished, failed, or interrupted if its process ended without finishing it."""
        return status_of(self._meta, self.path, self._database.writes)

    @property
    def message(self) -> str:
        """Reason for a failure, or an empty string."""
        return self._meta().get("message", "")

    @property
    def writes(self) -> bool:
        """True if this process has opened the run for writing."""
        return self._database.writes

    def note(self, name: str) -> Any:
        """Return a value that `Run.save_note` stored; None if there is none.

        Args:
            name: Name of the note.
        """
        text = self._meta().get(f"note.{name}")
        return None if text is None else json.loads(text)

    def initial(self) -> dict[str, Any] | None:
        """Return the initial weights of the model; None if they were not saved."""
        folder = self.path / "initial"
        return load_step(folder, 0) if steps_of(folder) else None

    def matrices(self, step: int, *, segment: int | None = None) -> dict[str, Tensor]:
        """Return the matrices of a step, on the CPU.

        Args:
            step: Number of the step, one of `matrix_steps`.
            segment: Number of the segment, from 1. None is the latest one.

        Raises:
            InputError: If the step has no matrices, or there is no such segment.
        """
        return load_step(self.path / "matrices", as_step(step), self._first_steps(segment))

    def matrix_steps(self, *, segment: int | None = None) -> list[int]:
        """Return the steps that have matrices.

        Args:
            segment: Number of the segment, from 1. None is the latest one.
        """
        return steps_of(self.path / "matrices", self._first_steps(segment))

    def checkpoint(self, step: int | None = None, *, segment: int | None = None) -> tuple[int, dict[str, Any]] | None:
        """Return a checkpoint.

        Args:
            step: Step of the checkpoint. None selects the newest one that is not damaged.
            segment: Number of the segment, from 1. None is the latest one.

        Returns:
            Step and state of the checkpoint; None if the run has none.

        Raises:
            InputError: If the given step has no checkpoint, or there is no such segment.
            RunStoreError: If all checkpoints are damaged.
        """
        folder, firsts = self.path / "checkpoints", self._first_steps(segment)
        return (
            load_newest(folder, firsts) if step is None else (as_step(step), load_step(folder, as_step(step), firsts))
        )

    def checkpoint_steps(self, *, segment: int | None = None) -> list[int]:
        """Return the steps that have a checkpoint.

        Args:
            segment: Number of the segment, from 1. None is the latest one.
        """
        return steps_of(self.path / "checkpoints", self._first_steps(segment))

    def __repr__(self) -> str:
        several = len(self._first_steps(None))
        segments = f", segments={several}" if several > 1 else ""
        return f"Run({str(self.path)!r}, status={self.status!r}, last_step={self.last_step}{segments})"

    def _first_steps(self, segment: int | None) -> list[int]:
        with self._database.reading() as connection:
            return first_steps(connection, segment)

    def _meta(self) -> dict[str, str]:
        with self._database.reading() as connection:
            return _sql.read_meta(connection)


def parse_meta(meta: Mapping[str, str], database: Path) -> tuple[str, dict[str, Any], dict[str, Any], datetime]:
    """Return name, config, environment and start of a run from its database's table of metadata."""
    try:
        config, environment = stored_settings(meta["config"]), stored_settings(meta["environment"])
        return meta["name"], config, environment, stored_moment(meta["started"])
    except (LookupError, TypeError, ValueError) as error:
        raise RunStoreError(f"The database {str(database)!r} lacks metadata of a run: {error}") from error


def status_of(read: Callable[[], Mapping[str, str]], folder: Path, writes: bool = False) -> str:
    """Return the status of a run; one that is marked as running but has no writer is interrupted.

    Args:
        read: Function that reads the metadata of the run.
        folder: Folder of the run.
        writes: Whether this process is the writer.
    """
    status = read().get("status", "")
    # Twice, because the writer may have ended or started again between the two reads.
    for _ in range(2):
        if status != "running" or writes or being_written(folder):
            return status
        status = read().get("status", "")
    return "interrupted" if status == "running" else status
