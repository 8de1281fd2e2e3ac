"""Tables from files."""

from __future__ import annotations

import os
import zlib
from collections.abc import Iterable
from pathlib import Path
from typing import Any, overload

import pandas as pd

from featlearn.errors import InputError

__all__ = ["read_table"]

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
        # All at once: in parts, "01" would be a number in one of them and a text in the next.
        return pd.read_csv(path, sep=_SEPARATORS[ending], low_memory=False)
    except ImportError as error:
        raise InputError(
            f"reading {path.name} needs pyarrow, which is not installed: "
            "call pip install 'featlearn[tables]', or save the table as .csv"
        ) from error
    except pd.errors.EmptyDataError:
        raise InputError(f"{path.name} is empty: a table starts with a line of column names") from None
    except (ValueError, OSError, EOFError, zlib.error) as error:  # pandas' and pyarrow's own errors are among them
        reason = str(error).strip().split("\n")[0]
        raise InputError(f"{path.name} cannot be read as a {ending} table: {reason}") from error


def _tables_in(folder: Path) -> str:
    if not folder.is_dir():
        return f"there is no folder {str(folder)!r} either"
    found = sorted(f.name for f in folder.iterdir() if f.name.lower().endswith(_ENDINGS))
    return f"the tables in that folder are {_listed(found)}" if found else "that folder holds no table"


def _listed(names: Iterable[Any], most: int = 20) -> str:
    every = [repr(name) for name in names]
    return ", ".join(every[:most]) + (f" and {len(every) - most} more" if len(every) > most else "")
