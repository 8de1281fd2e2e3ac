"""Functions that list, open, compare, export and remove runs."""

from __future__ import annotations

import csv
import json
import os
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from contextlib import suppress
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from featlearn._utils.atomic import atomic_write, file_trouble
from featlearn._utils.validation import as_folder, flat_settings
from featlearn.errors import InputError, RunStoreError
from featlearn.runs._run import Run
from featlearn.runs._segments import source
from featlearn.runs._sql import Names, read_rows
from featlearn.runs._summaries import as_number
from featlearn.runs.database import DATABASE_FILE, SIDE_FILES, read_database, require_run
from featlearn.runs.lock import WriterLock
from featlearn.runs.overview import overview
from featlearn.runs.step_files import FOLDERS, remove_all, tidy

if TYPE_CHECKING:
    import pandas as pd


def export(
    run: RunLike,
    path: str | os.PathLike[str],
    names: Names = None,
    layers: Names = None,
    *,
    segment: int | None = None,
) -> None:
    """Write the metrics of a run as a table in long form, with the columns run, step, layer, name and value.

    Args:
        run: Run, or its folder.
        path: File that ends in .csv or .parquet. An existing file is replaced.
        names: Names of the metrics. None exports all.
        layers: Glob patterns of layer names. None exports all layers and the metrics of the run itself.
        segment: Number of the segment, from 1. None exports the latest one; `Run.segments` lists them.

    Raises:
        InputError: If the file has another ending, or a name or pattern matches nothing.
        RunStoreError: If the run cannot be read or the file cannot be written.

    Example:
        >>> import tempfile, pandas as pd
        >>> from pathlib import Path
        >>> from featlearn.runs import Run, export
        >>> folder = Path(tempfile.mkdtemp())
        >>> with Run.create(folder / "first") as run:
        ...     run.log(10, {"loss": 0.5})
        >>> export(folder / "first", folder / "first.csv")
        >>> pd.read_csv(folder / "first.csv").iloc[0].to_dict()
        {'run': 'first', 'step': 10, 'layer': nan, 'name': 'loss', 'value': 0.5}
    """
    export_table(run, path, names, layers, segment)


def export_table(
    run: RunLike, path: str | os.PathLike[str], names: Names = None, layers: Names = None, segment: int | None = None
) -> int:
    """Write the table of `export`, and return the number of its rows; a .csv file requires neither pandas nor torch."""
    target = Path(path)
    if target.suffix not in (".csv", ".parquet"):
        raise InputError(f"path must be a file that ends in .csv or .parquet, got {os.fspath(path)!r}.")
    opened = as_run(run)
    with read_database(opened.path / DATABASE_FILE) as connection:
        rows = read_rows(connection, "metrics", names, layers, source(connection, "metrics", segment))
    with file_trouble(target):
        target.parent.mkdir(parents=True, exist_ok=True)
        with atomic_write(target) as draft:
            if target.suffix == ".csv":
                with draft.open("w", encoding="utf-8", newline="") as file:
                    writer = csv.writer(file, lineterminator="\n")
                    writer.writerow(["run", "step", "layer", "name", "value"])
                    # Without repr, a NaN would be written as an empty cell, like the layer of the run's own metrics.
                    writer.writerows([opened.name, *row[:3], repr(as_number(row[3]))] for row in rows)
            else:
                _write_parquet(draft, opened.name, rows)
    return len(rows)


def _write_parquet(draft: Path, name: str, rows: list[tuple[Any, ...]]) -> None:
    import pandas as pd

    table = pd.DataFrame(
        {
            "run": pd.Series([name] * len(rows), dtype=object),
            "step": np.array([row[0] for row in rows], dtype=np.int64),
            "layer": pd.Series([row[1] or None for row in rows], dtype=object),
            "name": pd.Series([row[2] for row in rows], dtype=object),
            "value": np.array([row[3] for row in rows], dtype=np.float64),
        }
    )
    try:
        table.to_parquet(draft, engine="pyarrow", index=False)
    except ImportError as error:
        raise InputError("A .parquet file requires pyarrow. Install it, or export to .csv.") from error


def remove(path: str | os.PathLike[str]) -> None:
    """Delete a run.

    Only files with the names of a run's files are deleted, none through a symbolic link, and the folder if it is empty
    afterwards.

    Args:
        path: Folder of the run.

    Raises:
        RunStoreError: If the folder has no run, or a process is writing the run.

    Example:
        >>> import tempfile
        >>> from pathlib import Path
        >>> from featlearn.runs import Run, remove
        >>> folder = Path(tempfile.mkdtemp()) / "first"
        >>> Run.create(folder).close()
        >>> remove(folder)
        >>> folder.exists()
        False
    """
    folder = as_folder(path)
    require_run(folder)
    lock = WriterLock(folder)
    try:
        tidy(folder)
        with file_trouble(folder, "removed"):
            for name in FOLDERS:
                remove_all(folder / name)
            # The database is deleted last: if the process ends before, the rest is still a run and can be removed.
            for name in (*SIDE_FILES, DATABASE_FILE):
                (folder / name).unlink(missing_ok=True)
            lock.path.unlink(missing_ok=True)
    finally:
        lock.release()
    with suppress(OSError):
        folder.rmdir()


RunLike = Run | str | os.PathLike[str]


def open_run(folder: str | os.PathLike[str], *, write: bool = False) -> Run:
    """Open an existing run; the same as `Run.open`.

    Args:
        folder: Folder of the run.
        write: Whether to open the run for writing. Only one process at a time can.

    Returns:
        The run.

    Raises:
        RunStoreError: If the folder has no run, the run is damaged, or another process is writing it.

    Example:
        >>> import tempfile
        >>> from pathlib import Path
        >>> from featlearn.runs import Run, open_run
        >>> folder = Path(tempfile.mkdtemp()) / "first"
        >>> with Run.create(folder, {"lr": 0.1}) as run:
        ...     run.log(0, {"loss": 0.5})
        >>> with open_run(folder) as run:
        ...     print(run.config["lr"], run.series("loss").to_dict())
        0.1 {0: 0.5}
    """
    return Run.open(folder, write=write)


def as_run(run: RunLike) -> Run:
    """Return a run, or the run in a folder."""
    return run if isinstance(run, Run) else Run.open(run)


def list_runs(root: str | os.PathLike[str] = ".") -> pd.DataFrame:
    """List the runs in a folder and its subfolders, the oldest first.

    Args:
        root: Folder to search. Subfolders whose names start with a dot are skipped.

    Returns:
        Table with one row per run and the columns path, name, status, message, started, last_step, seconds,
        segments (number of segments; last_step is that of the latest), and one column per setting, such as
        ``config.lr``. A run that cannot be read has the status "unreadable" and the error as its message.

    Raises:
        InputError: If the folder does not exist.

    Example:
        >>> import tempfile
        >>> from pathlib import Path
        >>> from featlearn.runs import Run, list_runs
        >>> folder = Path(tempfile.mkdtemp())
        >>> for lr in (0.1, 0.5):
        ...     with Run.create(folder / f"lr-{lr}", {"lr": lr}) as run:
        ...         run.log(0, {"loss": 1.0})
        >>> list_runs(folder)[["name", "status", "last_step", "config.lr"]].values.tolist()
        [['lr-0.1', 'finished', 0, 0.1], ['lr-0.5', 'finished', 0, 0.5]]
    """
    import pandas as pd

    rows = run_rows(root)
    columns = [*_COLUMNS, *dict.fromkeys(key for row in rows for key in row if key not in _COLUMNS)]
    table = pd.DataFrame(rows, columns=columns)
    table["started"] = pd.to_datetime(table["started"], utc=True)
    table = table.astype({"last_step": "Int64", "seconds": "float64", "segments": "Int64"})
    return table.sort_values(["started", "path"], na_position="last", ignore_index=True)


_COLUMNS = ("path", "name", "status", "message", "started", "last_step", "seconds", "segments")


def run_rows(root: str | os.PathLike[str]) -> list[dict[str, Any]]:
    """Return the rows of `list_runs` without pandas; a run that cannot be read has no start time."""
    top = as_folder(root)
    if not top.is_dir():
        raise InputError(f"root must be an existing folder, got {str(root)!r}.")
    latest = datetime.max.replace(tzinfo=UTC)
    return sorted(map(_row, _find(top)), key=lambda row: (row.get("started", latest), row["path"]))


def compare(runs: Iterable[RunLike] | RunLike, names: Names = None, layer: str | None = None) -> pd.DataFrame:
    """Return metrics of several runs side by side.

    Args:
        runs: Runs, or their folders.
        names: Names of the metrics. None selects all.
        layer: Name of the layer. None selects the metrics of the runs themselves.

    Returns:
        Table with one row per step and one column per run and metric; NaN where a run has no value.

    Raises:
        InputError: If no run has a metric, or there are no runs.

    Example:
        >>> import tempfile
        >>> from pathlib import Path
        >>> from featlearn.runs import Run, compare
        >>> folders = [Path(tempfile.mkdtemp()) / name for name in ("first", "second")]
        >>> for folder, loss in zip(folders, (0.5, 0.25)):
        ...     with Run.create(folder) as run:
        ...         run.log(10, {"loss": loss})
        >>> compare(folders, "loss").to_dict("list")
        {('first', 'loss'): [0.5], ('second', 'loss'): [0.25]}
    """
    import pandas as pd

    opened = _open_all(runs)
    columns: dict[tuple[str, str], pd.Series[Any]] = {}
    for label, run in opened.items():
        table = run.metrics()
        table = table[table["layer"].isna() if layer is None else table["layer"] == layer]
        for name, rows in table.groupby("name", sort=True):
            columns[label, str(name)] = pd.Series(rows["value"].to_numpy(), index=rows["step"].to_numpy())
    logged = list(dict.fromkeys(name for _, name in columns))
    wanted = logged if names is None else [names] if isinstance(names, str) else list(names)
    for name in wanted:
        if name not in logged:
            where = "" if layer is None else f" of layer {layer!r}"
            raise InputError(f"No run has metrics {name!r}{where}; the runs have {', '.join(logged) or 'none'}.")
    pairs = [(label, name) for label in opened for name in wanted]
    empty = pd.Series(dtype=np.float64, index=pd.Index([], dtype=np.int64))
    steps = np.unique(np.concatenate([np.array([], dtype=np.int64), *(column.index for column in columns.values())]))
    values = [columns.get(pair, empty).reindex(steps).to_numpy() for pair in pairs]
    return pd.DataFrame(
        np.column_stack(values) if values else np.empty((len(steps), 0)),
        index=pd.Index(steps, name="step"),
        columns=pd.MultiIndex.from_tuples(pairs, names=["run", "name"]),
    )


def compare_configs(runs: Iterable[RunLike] | RunLike) -> pd.DataFrame:
    """Return the settings in which runs differ.

    Args:
        runs: Runs, or their folders.

    Returns:
        Table with one row per setting and one column per run; NaN where a run does not have the setting.

    Raises:
        InputError: If there are no runs.

    Example:
        >>> import tempfile
        >>> from pathlib import Path
        >>> from featlearn.runs import Run, compare_configs
        >>> folders = [Path(tempfile.mkdtemp()) / name for name in ("first", "second")]
        >>> for folder, lr in zip(folders, (0.1, 0.5)):
        ...     Run.create(folder, {"lr": lr, "width": 64}).close()
        >>> compare_configs(folders).to_dict("index")
        {'lr': {'first': 0.1, 'second': 0.5}}
    """
    import pandas as pd

    settings = {label: flat_settings(run.config) for label, run in _open_all(runs).items()}
    differing = differing_settings(settings.values())
    columns = {label: [flat.get(name, np.nan) for name in differing] for label, flat in settings.items()}
    return pd.DataFrame(columns, index=pd.Index(differing, name="setting", dtype=object), dtype=object)


def differing_settings(settings: Collection[Mapping[str, Any]]) -> list[str]:
    """Return the names of the flat settings in which runs differ."""
    names = dict.fromkeys(name for flat in settings for name in flat)
    return [name for name in names if len({_compared(flat, name) for flat in settings}) > 1]


def _open_all(runs: Iterable[RunLike] | RunLike) -> dict[str, Run]:
    several: Sequence[RunLike] = [runs] if isinstance(runs, Run | str | os.PathLike) else list(runs)
    if not several:
        raise InputError("runs must contain at least one run to compare, got none.")
    opened = list({run.path.resolve(): run for run in map(as_run, several)}.values())
    times = Counter(run.name for run in opened)
    labels = [run.name if times[run.name] == 1 else str(run.path) for run in opened]
    if len(set(labels)) < len(labels):  # the name of a run may be the folder of another
        labels = [str(run.path) for run in opened]
    return dict(zip(labels, opened, strict=True))


def _compared(flat: Mapping[str, Any], name: str) -> str:
    """Return a text that is equal for equal settings: 1 equals 1.0 but not true; integers may exceed any float."""
    if name not in flat:
        return ""
    value = flat[name]
    whole = isinstance(value, float) and value.is_integer()
    return json.dumps(int(value) if whole else value, sort_keys=True)


def _find(top: Path) -> Iterable[Path]:
    for folder, inner, files in os.walk(top):
        if DATABASE_FILE in files:
            inner.clear()
            yield Path(folder)
        inner[:] = sorted(name for name in inner if not name.startswith("."))


def _row(path: Path) -> dict[str, Any]:
    try:
        summary = overview(path)
    except (RunStoreError, OSError) as error:
        return {"path": str(path), "name": path.absolute().name, "status": "unreadable", "message": str(error)}
    row = {name: getattr(summary, name) for name in ("name", "status", "message", "last_step", "seconds", "segments")}
    started = datetime.fromtimestamp(summary.started, UTC)
    return {"path": str(path), **row, "started": started, **flat_settings(summary.config, "config.")}
