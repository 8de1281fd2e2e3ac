"""List, open, compare, export and remove runs."""

from __future__ import annotations

import json
import os
from collections import Counter
from collections.abc import Iterable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from featlearn._utils.atomic import atomic_write, file_trouble
from featlearn._utils.validation import as_folder, flat_settings
from featlearn.errors import InputError, RunStoreError
from featlearn.runs._run import Run
from featlearn.runs.database import DATABASE_FILE, SIDE_FILES, require_run
from featlearn.runs.lock import WriterLock
from featlearn.runs.reader import overview
from featlearn.runs.step_files import FOLDERS, remove_all, tidy


def export(
    run: RunLike,
    path: str | os.PathLike[str],
    names: str | Iterable[str] | None = None,
    layers: str | Iterable[str] | None = None,
) -> None:
    """Write the numbers of a run as a table in long form, with the columns run, step, layer, name and value.

    Args:
        run: A run, or its folder.
        path: A file that ends in .csv or .parquet; one that exists is replaced.
        names: Only these names.
        layers: Only layers that match these globs.
    """
    target = Path(path)
    if target.suffix not in (".csv", ".parquet"):
        raise InputError(f"a run is exported to a file that ends in .csv or .parquet, got {os.fspath(path)!r}")
    opened = as_run(run)
    table = opened.metrics(names, layers)
    table.insert(0, "run", pd.Series([opened.name] * len(table), dtype=object))
    with file_trouble(target):
        target.parent.mkdir(parents=True, exist_ok=True)
        with atomic_write(target) as draft:
            if target.suffix == ".csv":
                # Otherwise a NaN would be nothing, and nothing is what the layer of the run's own numbers is.
                table["value"] = table["value"].map(repr)
                table.to_csv(draft, index=False)
            else:
                try:
                    table.to_parquet(draft, engine="pyarrow", index=False)
                except ImportError as error:
                    raise InputError(
                        "a .parquet file needs the package pyarrow: install it, or export to .csv"
                    ) from error


def remove(path: str | os.PathLike[str]) -> None:
    """Delete a run.

    Only files that bear the names of a run's are deleted, none through a link, and the folder if nothing else is in it.

    Args:
        path: Its folder; one that holds no run, or one that is being written, is refused.
    """
    folder = as_folder(path)
    require_run(folder)
    lock = WriterLock(folder)
    try:
        tidy(folder)
        with file_trouble(folder, "removed"):
            for name in FOLDERS:
                remove_all(folder / name)
            # The database goes last: what is left if the process ends before is still a run, and can be removed.
            for name in (*SIDE_FILES, DATABASE_FILE):
                (folder / name).unlink(missing_ok=True)
            lock.path.unlink(missing_ok=True)
    finally:
        lock.release()
    with suppress(OSError):
        folder.rmdir()


RunLike = Run | str | os.PathLike[str]


def open_run(folder: str | os.PathLike[str], *, write: bool = False) -> Run:
    """Open a run that is there; see `Run.open`."""
    return Run.open(folder, write=write)


def as_run(run: RunLike) -> Run:
    """A run, or the one in a folder."""
    return run if isinstance(run, Run) else Run.open(run)


def list_runs(root: str | os.PathLike[str] = ".") -> pd.DataFrame:
    """A row for each run at or under a folder, the oldest first.

    Columns are path, name, status, message, started, last_step, seconds, and the settings as ``config.lr``. A run that
    cannot be read has the status "unreadable", and the message says why.
    """
    top = as_folder(root)
    if not top.is_dir():
        raise InputError(f"there is no folder {str(root)!r}")
    rows = [_row(path) for path in _find(top)]
    columns = ["path", "name", "status", "message", "started", "last_step", "seconds"]
    columns += [column for column in dict.fromkeys(key for row in rows for key in row) if column not in columns]
    table = pd.DataFrame(rows, columns=columns)
    table["started"] = pd.to_datetime(table["started"], utc=True)
    table = table.astype({"last_step": "Int64", "seconds": "float64"})
    return table.sort_values(["started", "path"], na_position="last", ignore_index=True)


def compare(
    runs: Iterable[RunLike] | RunLike, names: str | Iterable[str] | None = None, layer: str | None = None
) -> pd.DataFrame:
    """Numbers of several runs side by side: a row a step, a column for each run and name.

    Args:
        runs: Runs, or their folders.
        names: Only these names; one that a run does not have is NaN there.
        layer: Numbers of this layer, instead of those of the runs themselves.
    """
    opened = _open_all(runs)
    wanted = None if names is None else [names] if isinstance(names, str) else list(names)
    columns: dict[tuple[str, str], pd.Series[Any]] = {}
    for label, run in opened.items():
        table = run.metrics()
        table = table[table["layer"].isna() if layer is None else table["layer"] == layer]
        for name, rows in table.groupby("name", sort=True):
            columns[label, str(name)] = pd.Series(rows["value"].to_numpy(), index=rows["step"].to_numpy())
    there = list(dict.fromkeys(name for _, name in columns))
    for name in there if wanted is None else wanted:
        if name not in there:
            where = "" if layer is None else f" of layer {layer!r}"
            raise InputError(f"none of the runs has metrics {name!r}{where}; they have {', '.join(there) or 'none'}")
    pairs = [(label, name) for label in opened for name in (there if wanted is None else wanted)]
    empty = pd.Series(dtype=np.float64, index=pd.Index([], dtype=np.int64))
    steps = np.unique(np.concatenate([np.array([], dtype=np.int64), *(column.index for column in columns.values())]))
    values = [columns.get(pair, empty).reindex(steps).to_numpy() for pair in pairs]
    return pd.DataFrame(
        np.column_stack(values) if values else np.empty((len(steps), 0)),
        index=pd.Index(steps, name="step"),
        columns=pd.MultiIndex.from_tuples(pairs, names=["run", "name"]),
    )


def compare_configs(runs: Iterable[RunLike] | RunLike) -> pd.DataFrame:
    """The settings in which runs differ: a row a setting, a column a run; NaN where a run does not have it."""
    settings = {label: flat_settings(run.config) for label, run in _open_all(runs).items()}
    names = dict.fromkeys(name for flat in settings.values() for name in flat)
    differing = [name for name in names if len({_compared(flat, name) for flat in settings.values()}) > 1]
    return pd.DataFrame(
        {
            label: pd.Series([flat.get(name, np.nan) for name in differing], dtype=object)
            for label, flat in settings.items()
        }
    ).set_index(pd.Index(differing, name="setting", dtype=object))


def _open_all(runs: Iterable[RunLike] | RunLike) -> dict[str, Run]:
    several: Sequence[RunLike] = [runs] if isinstance(runs, Run | str | os.PathLike) else list(runs)
    if not several:
        raise InputError("there are no runs to compare")
    opened = list({run.path.resolve(): run for run in map(as_run, several)}.values())
    times = Counter(run.name for run in opened)
    labels = [run.name if times[run.name] == 1 else str(run.path) for run in opened]
    if len(set(labels)) < len(labels):  # a run may be called as the folder of another
        labels = [str(run.path) for run in opened]
    return dict(zip(labels, opened, strict=True))


def _compared(flat: dict[str, Any], name: str) -> str:
    if name not in flat:
        return ""
    value = flat[name]
    # 1 and 1.0 are one setting, 1 and true are not; integers may be larger than any float.
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
        seen = overview(path)
    except (RunStoreError, OSError) as error:
        return {"path": str(path), "name": path.absolute().name, "status": "unreadable", "message": str(error)}
    row = {name: getattr(seen, name) for name in ("name", "status", "message", "last_step", "seconds")}
    started = pd.Timestamp(seen.started, unit="s", tz="UTC")
    return {"path": str(path), **row, "started": started, **flat_settings(seen.config, "config.")}
