"""Read tables from files, whole or in parts, and split off the target column."""

from __future__ import annotations

import csv
import gzip
import importlib
import io
import os
import re
import warnings
import zlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, cast, overload

import numpy as np
import pandas as pd

from featlearn._utils.formatting import count, pick_text
from featlearn.errors import InputError

if TYPE_CHECKING:
    from numpy.typing import NDArray

_PathLike = str | os.PathLike[str]
_SEPARATORS = {".csv": ",", ".csv.gz": ",", ".tsv": "\t", ".tsv.gz": "\t"}
_PARQUET = ".parquet"
_UNNAMED_INDEX = re.compile(r"__index_level_\d+__")
_ENDINGS = (*_SEPARATORS, _PARQUET)
_PART = 50_000
_CLASSES = 10
_EXACT = 2.0**24  # whole numbers up to here are exact in float32
_ROUNDING = 1e-6  # largest share of a column's range; float32 rounds less unless numbers are far from zero
_MOMENTS = ("date", "time", "period", "interval")


@overload
def read_table(path: _PathLike, target: None = None) -> pd.DataFrame: ...


@overload
def read_table(path: _PathLike, target: str) -> tuple[pd.DataFrame, pd.Series[Any]]: ...


def read_table(path: _PathLike, target: str | None = None) -> pd.DataFrame | tuple[pd.DataFrame, pd.Series[Any]]:
    """Read a table with a header line, and split off the column to predict.

    Args:
        path: File in the format ``.csv``, ``.csv.gz``, ``.tsv``, ``.tsv.gz`` or ``.parquet``, which requires pyarrow.
        target: Name of the column to predict. None does not split the table.

    Returns:
        The whole frame, or with a target the frame of the other columns and the target's column.

    Raises:
        InputError: The file is missing or cannot be read, or has no column ``target``.

    Example:
        >>> import tempfile, pandas as pd
        >>> from pathlib import Path
        >>> from featlearn.datasets import read_table
        >>> file = Path(tempfile.mkdtemp()) / "cars.csv"
        >>> pd.DataFrame({"age": [1, 4], "color": ["red", "blue"], "price": [9.5, 6.0]}).to_csv(file, index=False)
        >>> X, y = read_table(file, target="price")
        >>> list(X.columns), y.tolist()
        (['age', 'color'], [9.5, 6.0])
    """
    path = Path(path)
    with _opened(path) as (file, separator):
        if separator is None:
            frame = pd.read_parquet(file, engine="pyarrow")
            # An index with a name is a column, as in every other format and as in parts of a table.
            named = [name for name in frame.index.names if name is not None]
            frame = frame.reset_index(level=named) if named else frame
        else:
            # Not in parts: "01" could be a number in one part and a text in another.
            frame = pd.read_csv(file, sep=separator, low_memory=False)
    if target is None:
        return frame
    _check_column(frame, target, path.name)
    return frame.drop(columns=target), frame[target]


def read_whole(path: Path) -> pd.DataFrame:
    """Read a table with at least one row."""
    return _with_rows(read_table(path), path)


def read_frugally(path: Path, rows: int = _PART, exact: str | None = None) -> pd.DataFrame:
    """Read a table in parts, with numbers as float32 where that is exact enough, and texts as categories.

    A .csv file is read twice, since the kind of a column depends on all of its values.

    Args:
        path: File to read.
        rows: Number of rows per part.
        exact: Column of numbers that must not be rounded, such as labels. None allows rounding of all columns.

    Returns:
        The table.

    Raises:
        InputError: The file is missing, cannot be read, or has no rows.
    """
    if _ending(path) == _PARQUET:
        return read_whole(path)
    seen: dict[str, set[str]] = {}
    ranges: dict[str, _Range] = {}
    for part in parts_of(path, rows=rows):
        for name, column in part.items():
            kinds_seen = seen.setdefault(str(name), set())
            if column.notna().any():
                kinds_seen.add(_kind(column))
                if kinds_seen == {"number"}:
                    ranges.setdefault(str(name), _Range()).widen(column)
    dtypes: dict[str, Any] = {}
    for name, kinds_seen in seen.items():
        if kinds_seen == {"number"}:
            if name != exact:
                dtypes[name] = np.float32 if ranges[name].is_kept_by_float32 else np.float64
        elif kinds_seen and kinds_seen != {"boolean"}:
            dtypes[name] = str
    parts = list(parts_of(path, dtypes, rows=rows))
    return _with_rows(pd.DataFrame({name: _joined([part[name] for part in parts]) for name in parts[0].columns}), path)


def parts_of(
    path: Path,
    dtypes: dict[str, Any] | None = None,
    select: Callable[[list[str]], Sequence[str]] | None = None,
    rows: int = _PART,
) -> Iterator[pd.DataFrame]:
    """Read a table in parts, so that it need not fit into memory; the file is opened once.

    A table without rows gives one part without rows.

    Args:
        path: File to read.
        dtypes: Types of columns by name. None infers all types.
        select: Function from the names of all columns to those to read. None reads all columns.
        rows: Number of rows per part.

    Yields:
        Successive parts of the table.

    Raises:
        InputError: The file is missing or cannot be read.
    """
    with _opened(path) as (file, separator):
        if separator is None:
            stored = importlib.import_module("pyarrow.parquet").ParquetFile(file)
            names = [name for name in stored.schema_arrow.names if not _UNNAMED_INDEX.fullmatch(name)]
            columns = names if select is None else list(select(names))
            batches = stored.iter_batches(batch_size=rows, columns=columns)
            # Without the metadata of pandas, which could turn a column into the index.
            yield from (batch.to_pandas(ignore_metadata=True) for batch in batches)
            if not stored.metadata.num_rows:
                yield stored.read(columns=columns).to_pandas(ignore_metadata=True)
        else:
            # All columns are read: usecols would hide lines with too many fields.
            with pd.read_csv(file, sep=separator, chunksize=rows, dtype=dtypes, low_memory=False) as parts:
                columns = None
                for part in parts:
                    if columns is None and select is not None:
                        columns = list(select([str(name) for name in part.columns]))
                    yield part if columns is None else part[columns]


def split_target(
    frame: pd.DataFrame, target: str, drop: Sequence[str], name: str
) -> tuple[pd.DataFrame, pd.Series[Any]]:
    """Split a table into inputs and target; rows without a target are left out, with a warning.

    Args:
        frame: Table with all columns.
        target: Name of the target column.
        drop: Names of columns to leave out.
        name: Name of the table, for messages.

    Returns:
        Frame of the inputs, and the target column.

    Raises:
        InputError: A column is missing, the target is empty or dropped, or no input is left.
    """
    for column in (target, *drop):
        _check_column(frame, column, name, " (--target)" if column == target else " (--drop)")
    if target in drop:
        raise InputError(f"{target!r} is the target and cannot be dropped")
    known = frame[target].notna()
    if not known.any():
        raise InputError(f"the target column {target!r} of {name} must have values, got an empty column")
    if not known.all():
        warnings.warn(f"{count(int((~known).sum()), 'row')} without a value of {target!r} left out", stacklevel=2)
    X = frame.loc[known].drop(columns=[target, *drop])
    if not X.shape[1]:
        raise InputError(f"{name} must have columns besides the target {target!r} and dropped ones, got none")
    return X, frame.loc[known, target]


def target_values(y: pd.Series[Any], task: str) -> tuple[NDArray[Any], str, str]:
    """Return targets for an estimator, the task, and the reason for this task.

    Args:
        y: Targets without missing values.
        task: Task: ``"regression"``, ``"classification"``, or ``"auto"``, which treats texts, booleans and a few
            different whole numbers as classes.

    Raises:
        InputError: The targets do not allow the task.
    """
    kind = _kind(y)
    numeric = kind == "number"
    if numeric and not pd.api.types.is_numeric_dtype(y.dtype):  # decimals
        y = y.astype(np.float64)
    _check_target(y, kind)
    different = int(y.nunique())
    whole = numeric and bool((y % 1 == 0).all())
    why = "asked for"
    if task == "auto":
        few = whole and different <= min(_CLASSES, len(y) / 5)
        task = "classification" if few or not numeric else "regression"
        kinds = "whole numbers" if whole else "numbers" if numeric else "booleans" if kind == "boolean" else "texts"
        why = f"{y.name!r} holds {different} different {kinds}"
    if task == "regression":
        try:
            return y.to_numpy(dtype=np.float64), task, why
        except (ValueError, TypeError):
            text = next(v for v in y if not isinstance(v, int | float))
            raise InputError(
                f"{y.name!r} must hold numbers for regression, got {text!r}. Pass --task classification."
            ) from None
    if different < 2:
        raise InputError(f"{y.name!r} must hold two classes or more, got one value only, {y.iloc[0]!r}")
    if different > (most := max(1000, len(y) // 2)):
        raise InputError(f"{y.name!r} must hold at most {most:,} classes, got {different:,}. Pass --task regression.")
    if whole:
        return _whole(y), task, why
    if numeric:
        broken = next(value for value in y if value % 1)
        raise InputError(
            f"{y.name!r} must hold whole numbers or texts for classes, got {broken}. Use --task regression."
        )
    if kind == "boolean":
        return y.to_numpy(dtype=bool), task, why
    return np.array([str(value) for value in y], dtype=object), task, why


def _check_target(y: pd.Series[Any], kind: str) -> None:
    """Raise an InputError for targets that are neither numbers nor names."""
    if len(y) < 2:
        raise InputError(f"{y.name!r} must have values in at least 2 rows, got one row only")
    if kind == "moment":
        raise InputError(f"{y.name!r} must hold numbers or texts, got moments such as {y.iloc[0]}. Convert them.")
    if any(isinstance(value, list | dict | set | np.ndarray) for value in y):
        raise InputError(f"{y.name!r} must hold one number or one text per row, got several values in a row")
    if pd.api.types.is_float_dtype(y.dtype) and not np.isfinite(y.to_numpy(dtype=np.float64)).all():
        raise InputError(f"{y.name!r} must hold finite numbers, got an infinite number. Remove it or its row.")


def _whole(y: pd.Series[Any]) -> NDArray[Any]:
    """Return whole numbers without rounding."""
    if y.min() >= -(2**63) and y.max() < 2**63:
        return y.to_numpy(dtype=np.int64)
    return y.to_numpy(dtype=np.uint64 if pd.api.types.is_integer_dtype(y.dtype) else np.float64)


class _Range:
    """Range and rounding of a column of numbers that is read in parts."""

    def __init__(self) -> None:
        self.least, self.most, self.error = np.inf, -np.inf, 0.0

    def widen(self, column: pd.Series[Any]) -> None:
        """Include another part of the column."""
        values = column.to_numpy(dtype=np.float64)
        values = values[np.isfinite(values)]
        if len(values):
            with np.errstate(over="ignore", under="ignore"):
                error = np.abs(values.astype(np.float32) - values).max()
            self.error = max(self.error, float(error))
            self.least, self.most = min(self.least, float(values.min())), max(self.most, float(values.max()))

    @property
    def is_kept_by_float32(self) -> bool:
        """True if rounding to float32 is small compared with the range, and keeps whole numbers exact."""
        small = self.least >= -_EXACT and self.most <= _EXACT
        return small and self.error <= _ROUNDING * (self.most - self.least)


def _kind(column: pd.Series[Any]) -> str:
    """Return "number", "boolean", "moment" or "text" by the values of a column."""
    content = pd.api.types.infer_dtype(column, skipna=True)
    if content == "boolean":
        return "boolean"
    if any(moment in content for moment in _MOMENTS):
        return "moment"
    return "number" if content == "decimal" or pd.api.types.is_numeric_dtype(column.dtype) else "text"


def _joined(parts: list[pd.Series[Any]]) -> pd.Series[Any]:
    """Join parts of one column; texts become categories, which are kept once."""
    if any(_kind(part) == "text" for part in parts):
        joined = pd.api.types.union_categoricals([part.astype("category") for part in parts])
        return pd.Series(joined, name=parts[0].name)
    return pd.concat(parts, ignore_index=True)


def _with_rows(frame: pd.DataFrame, path: Path) -> pd.DataFrame:
    if not len(frame):
        raise InputError(f"{path.name} must have rows, got a header and no rows")
    return frame


def _check_column(frame: pd.DataFrame, column: str, name: str, option: str = "") -> None:
    if column not in frame.columns:
        columns = pick_text(map(repr, frame.columns), 20)
        raise InputError(f"{name} has no column {column!r}{option}: its columns are {columns}")


def _ending(path: Path) -> str:
    """Return the ending of a table's file, after a check that the file exists."""
    ending = next((e for e in sorted(_ENDINGS, key=len, reverse=True) if path.name.lower().endswith(e)), None)
    if ending is None:
        raise InputError(f"a table must be one of {', '.join(_ENDINGS)} files, got {path.name!r}")
    if not path.is_file():
        raise InputError(f"there is no file {str(path)!r}: {_tables_in(path.parent)}")
    return ending


@contextmanager
def _opened(path: Path) -> Iterator[tuple[IO[bytes], str | None]]:
    """Open a table once, and yield its bytes and its separator, None for Parquet.

    Errors of pandas and pyarrow in the block become an InputError of one line.
    """
    ending = _ending(path)
    separator = _SEPARATORS.get(ending)
    try:
        with gzip.open(path) if ending.endswith(".gz") else open(path, "rb") as opened:
            file = cast("IO[bytes]", opened)
            if separator is not None:
                _check_fields(file, path.name, separator)
            yield file, separator
    except ImportError as error:
        raise InputError(
            f"reading {path.name} needs pyarrow, which is not installed. "
            "Run pip install 'featlearn[tables]', or save the table as .csv."
        ) from error
    except InputError:
        raise
    except pd.errors.EmptyDataError:
        raise InputError(f"{path.name} is empty. A table must start with a line of column names.") from None
    except (ValueError, OSError, EOFError, zlib.error) as error:  # base classes of the errors of pandas and pyarrow
        reason = str(error).strip().split("\n")[0]
        raise InputError(f"{path.name} cannot be read as a {ending} table: {reason}") from error


def _check_fields(file: IO[bytes], name: str, separator: str) -> None:
    """Raise an InputError if lines have more fields than the header, so that their columns are ambiguous.

    Pandas takes the first field of such lines as a name of the row. This is correct for tables written by R, where each
    line has one field more than the header. A separator at the end of each line also adds a field, but an empty one.
    """
    lines = io.TextIOWrapper(file, encoding="utf-8-sig", newline="")
    rows = (row for row in csv.reader(lines, delimiter=separator) if row)
    named, last, wide = True, "field", 0
    try:
        wide, first = len(next(rows, ())), next(rows, [])
        if len(first) > wide:
            last = first[-1]
            named = len(first) == wide + 1
            for row in rows:
                named = named and len(row) == wide + 1
                last = last or row[-1]
    except csv.Error:  # pandas reports the error, if it is one for pandas too
        named, last = True, "field"
    lines.detach()
    file.seek(0)
    if not named or not last.strip():
        fix = "Remove the separator at the end of each line." if named else "Give each line as many as the header."
        raise InputError(f"{name} has lines with more fields than its header, which has {wide}. {fix}")


def _tables_in(folder: Path) -> str:
    if not folder.is_dir():
        return f"there is no folder {str(folder)!r} either"
    tables = sorted(f.name for f in folder.iterdir() if f.name.lower().endswith(_ENDINGS))
    if not tables:
        return "that folder holds no table"
    return f"the tables in that folder are {pick_text(map(repr, tables), 20)}"
