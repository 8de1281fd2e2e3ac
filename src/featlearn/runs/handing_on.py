"""Runs given away: as a table for other programs, or to nobody."""

from __future__ import annotations

import os
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path

import pandas as pd

from featlearn.errors import InputError
from featlearn.numerics.files import whole_file
from featlearn.runs.database import DATABASE_FILE, SIDE_FILES, require_run
from featlearn.runs.listing import RunLike, as_run
from featlearn.runs.lock import WriterLock
from featlearn.runs.step_files import FOLDERS, remove_all, tidy
from featlearn.runs.trouble import file_trouble
from featlearn.runs.values import as_folder

__all__ = ["export", "remove"]


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
        with whole_file(target) as draft:
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
