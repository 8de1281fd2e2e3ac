"""A run as it is read: its numbers and words, how it stands, and its files."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pandas as pd
from torch import Tensor

from featlearn.errors import RunStoreError
from featlearn.runs import tables
from featlearn.runs.database import Database
from featlearn.runs.lock import being_written
from featlearn.runs.step_files import load_newest, load_step, steps_of
from featlearn.runs.values import as_step, as_text, stored_moment, stored_settings

__all__ = ["RunRecord"]


class RunRecord:
    """What can be asked of a run, whoever writes it.

    Args:
        path: Its folder.
        database: Its database.
    """

    def __init__(self, path: Path, database: Database) -> None:
        self.path = path
        self._database = database
        meta = self._meta()
        try:
            self.name: str = meta["name"]
            self.config: dict[str, Any] = stored_settings(meta["config"])
            self.environment: dict[str, Any] = stored_settings(meta["environment"])
            self.started = stored_moment(meta["started"])
        except (LookupError, TypeError, ValueError) as error:
            raise RunStoreError(f"the database {str(database.path)!r} lacks what a run is made of: {error}") from error

    def metrics(
        self, names: str | Iterable[str] | None = None, layers: str | Iterable[str] | None = None
    ) -> pd.DataFrame:
        """Numbers in long form: columns step, layer, name and value, ordered by step.

        Args:
            names: Only these names.
            layers: Only layers that match these globs. The layer of a number of the run itself is None.
        """
        with self._database.reading() as connection:
            return tables.read_table(connection, "metrics", names, layers)

    def texts(
        self, names: str | Iterable[str] | None = None, layers: str | Iterable[str] | None = None
    ) -> pd.DataFrame:
        """Words in long form, as `metrics` gives numbers."""
        with self._database.reading() as connection:
            return tables.read_table(connection, "texts", names, layers)

    def series(self, name: str, layer: str | None = None) -> pd.Series[Any]:
        """The numbers of one name, of the run itself or of one layer, with the step as index."""
        with self._database.reading() as connection:
            return tables.read_series(connection, as_text(name, "name"), layer)

    def starts(self) -> pd.DataFrame:
        """When and by which process it was opened for writing, when that one wrote last, and from which checkpoint."""
        with self._database.reading() as connection:
            return tables.read_starts(connection)

    @property
    def last_step(self) -> int | None:
        """The largest step with a value."""
        with self._database.reading() as connection:
            return tables.last_step(connection)

    @property
    def is_empty(self) -> bool:
        """Whether nothing was recorded yet: no step, no checkpoint, no matrix."""
        return self.last_step is None and not self.checkpoint_steps() and not self.matrix_steps()

    @property
    def seconds(self) -> float | None:
        """How long it was being written in all, up to its last values; None where it is too old to tell."""
        starts = self.starts()
        return float((starts["seen"] - starts["began"]).dt.total_seconds().clip(lower=0).sum()) if len(starts) else None

    @property
    def status(self) -> str:
        """One of running, finished, failed, and interrupted: its process ended without a word."""
        status = self._meta().get("status", "")
        # Twice, because it may have ended or begun again between the two questions.
        for _ in range(2):
            if status != "running" or self._database.writes or being_written(self.path):
                return status
            status = self._meta().get("status", "")
        return "interrupted" if status == "running" else status

    @property
    def message(self) -> str:
        """Why it failed, or nothing."""
        return self._meta().get("message", "")

    @property
    def writes(self) -> bool:
        """Whether it is open for writing, here."""
        return self._database.writes

    def initial(self) -> dict[str, Any] | None:
        """The weights that the run began with; None if nobody has kept them."""
        folder = self.path / "initial"
        return load_step(folder, 0) if steps_of(folder) else None

    def matrices(self, step: int) -> dict[str, Tensor]:
        """The matrices of a step, on the CPU."""
        return load_step(self.path / "matrices", as_step(step))

    def matrix_steps(self) -> list[int]:
        """Steps with matrices."""
        return steps_of(self.path / "matrices")

    def checkpoint(self, step: int | None = None) -> tuple[int, dict[str, Any]] | None:
        """Step and state of the newest checkpoint that is whole, or of the one asked for; None if there are none."""
        folder = self.path / "checkpoints"
        return load_newest(folder) if step is None else (as_step(step), load_step(folder, as_step(step)))

    def checkpoint_steps(self) -> list[int]:
        """Steps with a checkpoint."""
        return steps_of(self.path / "checkpoints")

    def __repr__(self) -> str:
        return f"Run({str(self.path)!r}, status={self.status!r}, last_step={self.last_step})"

    def _meta(self) -> dict[str, str]:
        with self._database.reading() as connection:
            return tables.read_meta(connection)
