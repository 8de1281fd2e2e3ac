"""Read runs: all of one, or an overview with few rows and one connection for pages that show many."""

from __future__ import annotations

import re
import sqlite3
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
from torch import Tensor

from featlearn._utils.validation import as_step, as_text, stored_moment, stored_settings
from featlearn.errors import RunStoreError
from featlearn.runs import _sql
from featlearn.runs.database import DATABASE_FILE, Database
from featlearn.runs.lock import being_written
from featlearn.runs.step_files import load_newest, load_step, steps_of

_SMALL = 8_000_000  # bytes of a database of which every row is looked at to find the names
_SAMPLED = 64  # steps, of those that have numbers of layers, in a larger one

# The primary key begins with the step: the next step is one search away, however many rows a step has.
_STEPS = (
    "WITH RECURSIVE steps(step) AS (SELECT min(step) FROM metrics UNION ALL "
    "SELECT (SELECT min(step) FROM metrics WHERE step > steps.step) FROM steps WHERE steps.step IS NOT NULL) "
)


class RunRecord:
    """Reader of a run, which another process may be writing.

    Args:
        path: Its folder.
        database: Its database.
    """

    def __init__(self, path: Path, database: Database) -> None:
        self.path = path
        self._database = database
        self.name, self.config, self.environment, self.started = _parse_meta(self._meta(), database.path)

    def metrics(
        self, names: str | Iterable[str] | None = None, layers: str | Iterable[str] | None = None
    ) -> pd.DataFrame:
        """Numbers in long form: columns step, layer, name and value, ordered by step.

        Args:
            names: Only these names.
            layers: Only layers that match these globs. The layer of a number of the run itself is None.
        """
        with self._database.reading() as connection:
            return _sql.read_table(connection, "metrics", names, layers)

    def texts(
        self, names: str | Iterable[str] | None = None, layers: str | Iterable[str] | None = None
    ) -> pd.DataFrame:
        """Words in long form, as `metrics` gives numbers."""
        with self._database.reading() as connection:
            return _sql.read_table(connection, "texts", names, layers)

    def series(self, name: str, layer: str | None = None) -> pd.Series[Any]:
        """The numbers of one name, of the run itself or of one layer, with the step as index."""
        with self._database.reading() as connection:
            return _sql.read_series(connection, as_text(name, "name"), layer)

    def starts(self) -> pd.DataFrame:
        """When and by which process it was opened for writing, when that one wrote last, and from which checkpoint."""
        with self._database.reading() as connection:
            return _sql.read_starts(connection)

    @property
    def last_step(self) -> int | None:
        """The largest step with a value."""
        with self._database.reading() as connection:
            return _sql.last_step(connection)

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
        """Status of the run: running, finished, failed, or interrupted if its process ended without finishing it."""
        return _status(self._meta, self.path, self._database.writes)

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
            return _sql.read_meta(connection)


def _parse_meta(meta: Mapping[str, str], database: Path) -> tuple[str, dict[str, Any], dict[str, Any], datetime]:
    """Return name, config, environment and start of a run from its database's table of metadata."""
    try:
        config, environment = stored_settings(meta["config"]), stored_settings(meta["environment"])
        return meta["name"], config, environment, stored_moment(meta["started"])
    except (LookupError, TypeError, ValueError) as error:
        raise RunStoreError(f"the database {str(database)!r} lacks what a run is made of: {error}") from error


def _status(read: Callable[[], Mapping[str, str]], folder: Path, writes: bool = False) -> str:
    """Return the status of a run: a running one without a writer is interrupted.

    Args:
        read: Reads the metadata of the run.
        folder: Folder of the run.
        writes: Whether this process is the writer.
    """
    status = read().get("status", "")
    # Twice, because it may have ended or begun again between the two questions.
    for _ in range(2):
        if status != "running" or writes or being_written(folder):
            return status
        status = read().get("status", "")
    return "interrupted" if status == "running" else status


@dataclass(frozen=True)
class Overview:
    """What a list of runs shows of one.

    Attributes:
        name: Of the run.
        status: As `Run.status` has it.
        message: Why it failed, or nothing.
        started: Seconds since 1970.
        seconds: How long it was being written; None where it is too old to tell.
        last_step: The largest step with a value; None before the first.
        config: Its settings.
        environment: Versions, platform, command.
        loss: The last value of the first that is there of loss, train_loss, test_loss, score and cv_score, with its
            name.
        readings: Layer -> word, of the last measurement.
    """

    name: str
    status: str
    message: str
    started: float
    seconds: float | None
    last_step: int | None
    config: dict[str, Any]
    environment: dict[str, Any]
    loss: tuple[str, float] | None
    readings: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True, eq=False)
class Curve:
    """One quantity over the steps.

    Attributes:
        layer: Whose; None is the run itself.
        steps: In order.
        values: NaN where a NaN was logged.
        total: How many values there are in the range that was asked for.
    """

    layer: str | None
    steps: list[int]
    values: list[float]
    total: int


def overview(folder: Path) -> Overview:
    """Look at the run in a folder once."""
    database = Database(folder / DATABASE_FILE)
    with database.reading() as connection:
        meta = _sql.read_meta(connection)
        status = _status(lambda: _sql.read_meta(connection), folder)
        last = _sql.last_step(connection)
        starts = connection.execute("SELECT began, seen FROM starts").fetchall()
        spans = [max(_number(seen) - _number(began), 0.0) for began, seen in starts]
        loss = _last_loss(connection, last)
        readings = _last_words(connection, "reading")
    name, config, environment, started = _parse_meta(meta, database.path)
    return Overview(
        name=name,
        status=status,
        message=meta.get("message", ""),
        started=started.timestamp(),
        seconds=sum(spans) if spans else None,
        last_step=last,
        config=config,
        environment=environment,
        loss=loss,
        readings=readings,
    )


def quantities(folder: Path) -> dict[str | None, list[str]]:
    """Names of the numbers of each layer, and of the run itself as None.

    In a large database names of layers are those of some of the steps at which layers were measured; the names of the
    run itself are complete.
    """
    path = folder / DATABASE_FILE
    with Database(path).reading() as connection:
        if path.stat().st_size <= _SMALL:
            pairs = connection.execute("SELECT DISTINCT layer, name FROM metrics").fetchall()
        else:
            pairs = _sampled_names(connection)
        found: dict[str | None, list[str]] = {}
        for layer, name in sorted(pairs, key=lambda pair: (natural_order(pair[0]), _word(pair[1]))):
            found.setdefault(layer or None, []).append(name)
        return found


def curves(
    folder: Path,
    name: str,
    layer: str | None = None,
    *,
    width: int = 800,
    first: int | None = None,
    last: int | None = None,
    log: bool = False,
) -> list[Curve]:
    """A quantity over the steps, for every layer that has it, with no more detail than a screen shows.

    Steps are cut into half as many parts as there are pixels, and of each part the least and the largest value are
    given: a peak of a single step is still seen. Where there are no more values than pixels, all are given.

    Args:
        folder: Of the run.
        name: Of the quantity.
        layer: Only this one; "" is the run itself, None all layers and the run.
        width: Pixels.
        first: The first step that is asked for.
        last: The last one.
        log: Whether the axis of the steps is logarithmic.
    """
    where, asked = "step BETWEEN ? AND ? AND name = ?", [name]
    if layer is not None:
        where, asked = f"{where} AND layer = ?", [name, layer]
    with Database(folder / DATABASE_FILE).reading() as connection:
        # Two questions: SQLite finds either end at once, but looks at every row for both.
        least, most = (connection.execute(f"SELECT {end}(step) FROM metrics").fetchone()[0] for end in ("min", "max"))
        if least is None:
            return []
        least, most = max(least, first or 0), most if last is None else min(most, last)
        rows: list[tuple[Any, ...]] = []
        # One question a part, in the order of the primary key: to sort all rows by part would take twice as long.
        for start, end in _parts(least, most, max(width // 2, 1), log):
            rows += connection.execute(
                f"SELECT layer, min(step), max(step), min(value), max(value), count(*) "
                f"FROM metrics WHERE {where} GROUP BY layer",
                (start, end, *asked),
            )
        rows = [row for row in rows if row[0] is not None]
        if sum(row[5] for row in rows) <= width * len({row[0] for row in rows}):
            rows = connection.execute(
                f"SELECT layer, step, step, value, value, 1 FROM metrics WHERE {where} ORDER BY step",
                (least, most, *asked),
            ).fetchall()
        return _as_curves(rows)


def _parts(least: int, most: int, count: int, log: bool) -> list[tuple[int, int]]:
    """The first and last steps of parts that cover a range."""
    if most < least:
        return []
    if log:
        edges = np.unique(np.geomspace(max(least, 1), most + 1, count + 1).astype(np.int64)) if most else np.array([1])
        starts = [least, *(int(edge) for edge in edges if least < edge <= most)]
    else:
        length = -(-(most - least + 1) // count)
        starts = list(range(least, most + 1, length))
    return [(start, end - 1) for start, end in zip(starts, [*starts[1:], most + 1], strict=True)]


def words(folder: Path, names: tuple[str, ...]) -> dict[tuple[str | None, str], list[tuple[int, int, str]]]:
    """Words over the steps as stretches ``(first step, last step, word)``, by layer and name.

    Args:
        folder: Of the run.
        names: Of the words, such as "reading".
    """
    marks = ", ".join("?" * len(names))
    with Database(folder / DATABASE_FILE).reading() as connection:
        rows = connection.execute(
            f"SELECT layer, name, step, value FROM texts WHERE name IN ({marks}) ORDER BY step", names
        ).fetchall()
        found: dict[tuple[str | None, str], list[tuple[int, int, str]]] = {}
        for layer, name, step, value in rows:
            stretches = found.setdefault((layer or None, name), [])
            if stretches and stretches[-1][2] == value:
                stretches[-1] = (stretches[-1][0], _step(step), value)
            else:
                stretches.append((_step(step), _step(step), _word(value)))
        return dict(sorted(found.items(), key=lambda item: (natural_order(item[0][0] or ""), item[0][1])))


def _as_curves(rows: list[tuple[Any, ...]]) -> list[Curve]:
    grouped: dict[str, list[tuple[Any, ...]]] = {}
    for row in rows:
        grouped.setdefault(row[0], []).append(row)
    found = []
    for layer in sorted(grouped, key=natural_order):
        steps: list[int] = []
        values: list[float] = []
        for _, start, end, low, high, count in grouped[layer]:
            pair = ((start, low),) if count == 1 or low == high or low is None else ((start, low), (end, high))
            for step, value in pair:
                steps.append(_step(step))
                values.append(_number(value))
        found.append(Curve(layer or None, steps, values, sum(row[5] for row in grouped[layer])))
    return found


def _step(value: Any) -> int:
    if not isinstance(value, int):
        raise RunStoreError(f"the database is damaged: it has {value!r} in the place of a step")
    return value


def _word(value: Any) -> str:
    if not isinstance(value, str):
        raise RunStoreError(f"the database is damaged: it has {value!r} in the place of a word")
    return value


def _number(value: Any) -> float:
    if value is None:
        return np.nan
    if not isinstance(value, int | float):
        raise RunStoreError(f"the database is damaged: it has {value!r} in the place of a number")
    return float(value)


def _sampled_names(connection: sqlite3.Connection) -> list[tuple[str, str]]:
    own = connection.execute(
        f"{_STEPS} SELECT DISTINCT m.layer, m.name FROM steps CROSS JOIN metrics m "
        "ON m.step = steps.step AND m.layer = ''"
    ).fetchall()
    measured = [
        row[0]
        for row in connection.execute(
            f"{_STEPS} SELECT step FROM steps WHERE EXISTS "
            "(SELECT 1 FROM metrics m WHERE m.step = steps.step AND m.layer > '')"
        )
    ]
    places = np.unique(np.linspace(0, len(measured) - 1, min(len(measured), _SAMPLED)).astype(int)).tolist()
    pairs = set(own)
    for place in places:
        pairs.update(
            connection.execute("SELECT layer, name FROM metrics WHERE step = ? AND layer > ''", (measured[place],))
        )
    return list(pairs)


def _last_loss(connection: sqlite3.Connection, last: int | None) -> tuple[str, float] | None:
    # Among the last steps only: a search for what was never logged would look at every row.
    for name in ("loss", "train_loss", "test_loss", "score", "cv_score"):
        row = connection.execute(
            "SELECT value FROM metrics WHERE step > ? AND layer = '' AND name = ? ORDER BY step DESC LIMIT 1",
            ((last or 0) - 200, name),
        ).fetchone()
        if row is not None:
            return name, _number(row[0])
    return None


def _last_words(connection: sqlite3.Connection, name: str) -> dict[str, str]:
    row = connection.execute("SELECT step FROM texts WHERE name = ? ORDER BY step DESC LIMIT 1", (name,)).fetchone()
    if row is None:
        return {}
    found = connection.execute("SELECT layer, value FROM texts WHERE step = ? AND name = ?", (row[0], name)).fetchall()
    return {str(layer): str(word) for layer, word in sorted(found, key=lambda pair: natural_order(pair[0]))}


def natural_order(text: str) -> list[tuple[int, str]]:
    """Layers in the order in which people count: 2 before 10."""
    return [
        (int(part), "") if part.isascii() and part.isdigit() and len(part) < 18 else (-1, part)
        for part in re.split(r"([0-9]+)", _word(text))
    ]
