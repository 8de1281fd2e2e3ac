"""Tables from files."""

from __future__ import annotations

import csv
import gzip
import os
import zlib
from collections.abc import Iterable
from pathlib import Path
from typing import Any, overload

import pandas as pd

from featlearn.errors import InputError

__all__ = ["check_fields", "read_table"]

_SEPARATORS = {".csv": ",", ".csv.gz": ",", ".tsv": "\t", ".tsv.gz": "\t"}
_ENDINGS = (*_SEPARATORS, ".parquet")


@overload
def read_table(path: str | os.PathLike[str], target: None = None) -> pd.DataFrame: ...


@overload
def read_table(path: str | os.PathLike[str], target: str) -> tuple[pd.DataFrame, pd.Series[Any]]: ...


def read_table(
    path: str | os.PathLike[str], target: str | None = None
) -> pd.DataFrame | tuple[pd.DataFrame, pd.Series[Any]]:
    """Read a table with a header line, and split off the column to predict.

    Args:
        path: A ``.csv``, ``.csv.gz``, ``.tsv``, ``.tsv.gz`` or ``.parquet`` file; Parquet needs pyarrow.
        target: Name of the column to predict.

    Returns:
        The whole frame, or with a target the frame of the other columns and the target's column.
    """
    path = Path(path)
    ending = next((e for e in sorted(_ENDINGS, key=len, reverse=True) if path.name.lower().endswith(e)), None)
    if ending is None:
        raise InputError(
            f"a table is read from {', '.join(_ENDINGS)} files, got {path.name!r}: save it as one of these"
        )
    if not path.is_file():
        raise InputError(f"there is no file {str(path)!r}: {_tables_in(path.parent)}")
    frame = _read(path, ending)
    if target is None:
        return frame
    if target not in frame.columns:
        raise InputError(f"{path.name} has no column {target!r}: its columns are {_listed(frame.columns)}")
    return frame.drop(columns=target), frame[target]


def _read(path: Path, ending: str) -> pd.DataFrame:
    try:
        if ending == ".parquet":
            return pd.read_parquet(path, engine="pyarrow")
        check_fields(path, _SEPARATORS[ending])
        # All at once: in parts, "01" would be a number in one of them and a text in the next.
        return pd.read_csv(path, sep=_SEPARATORS[ending], low_memory=False)
    except ImportError as error:
        raise InputError(
            f"reading {path.name} needs pyarrow, which is not installed: "
            "call pip install 'featlearn[tables]', or save the table as .csv"
        ) from error
    except InputError:
        raise
    except pd.errors.EmptyDataError:
        raise InputError(f"{path.name} is empty: a table starts with a line of column names") from None
    except (ValueError, OSError, EOFError, zlib.error) as error:  # pandas' and pyarrow's own errors are among them
        reason = str(error).strip().split("\n")[0]
        raise InputError(f"{path.name} cannot be read as a {ending} table: {reason}") from error


def check_fields(path: Path, separator: str) -> None:
    """Refuse a file whose lines have more fields than its header, for then nobody knows which belongs to what.

    Pandas takes the first field of such lines as a name of the row. That is right for tables that R has written, where
    every line has one field more than the header; a separator at the end of every line looks the same but for its
    last field, which is empty.
    """
    with (
        gzip.open(path, "rt", encoding="utf-8-sig", newline="")
        if path.name.lower().endswith(".gz")
        else open(path, encoding="utf-8-sig", newline="") as lines
    ):
        rows = (row for row in csv.reader(lines, delimiter=separator) if row)
        try:
            wide, first = len(next(rows, ())), next(rows, [])
            if len(first) <= wide:
                return
            last = first[-1]
            named = len(first) == wide + 1
            for row in rows:
                named = named and len(row) == wide + 1
                last = last or row[-1]
        except csv.Error:  # pandas says what is wrong, if it is wrong for pandas as well
            return
    if not named or not last.strip():
        why = "their last field is empty: remove the separator at the end of each line" if named else "not all the same"
        raise InputError(
            f"{path.name} has lines with more fields than its header, which has {wide}; {why}"
            f"{'' if named else ': give each line as many as the header'}"
        )


def _tables_in(folder: Path) -> str:
    if not folder.is_dir():
        return f"there is no folder {str(folder)!r} either"
    found = sorted(f.name for f in folder.iterdir() if f.name.lower().endswith(_ENDINGS))
    return f"the tables in that folder are {_listed(found)}" if found else "that folder holds no table"


def _listed(names: Iterable[Any], most: int = 20) -> str:
    every = [repr(name) for name in names]
    return ", ".join(every[:most]) + (f" and {len(every) - most} more" if len(every) > most else "")
