"""Read tables from files, whole or in parts, and split off the target column."""

from __future__ import annotations

import csv
import gzip
import importlib
import os
import warnings
import zlib
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, overload

import numpy as np
import pandas as pd

from featlearn._utils.formatting import count, pick_text
from featlearn.errors import InputError

if TYPE_CHECKING:
    from numpy.typing import NDArray

__all__ = [
    "check_fields",
    "header_of",
    "parts_of",
    "read_frugally",
    "read_table",
    "read_whole",
    "split_target",
    "target_values",
]

_PART = 50_000
_CLASSES = 10
_EXACT = 2.0**24  # whole numbers up to here are exact in float32
_ROUNDING = 1e-6  # of a column's range; float32 does better where numbers are not far from zero, for their range
_MOMENTS = ("date", "time", "period", "interval")


def read_whole(path: Path) -> pd.DataFrame:
    """A table with a header line, refused in one sentence if it is none."""
    from featlearn.datasets import read_table

    frame = read_table(path)
    if not len(frame):
        raise InputError(f"{path.name} has a header and no rows")
    return frame


def read_frugally(path: Path, rows: int = _PART, exact: str | None = None) -> pd.DataFrame:
    """The same in parts: numbers as float32 where that is exact enough, texts as categories.

    A .csv file is read twice: what a column holds is known when all of it has been seen.

    Args:
        path: The file.
        rows: Of a part.
        exact: A column of numbers that are not to be rounded: labels are names.
    """
    if not _is_csv(path):
        return read_whole(path)
    header_of(path)  # says what is wrong with a file that is no table
    seen: dict[str, set[str]] = {}
    ranges: dict[str, _Range] = {}
    for part in parts_of(path, rows=rows):
        for name, column in part.items():
            held = seen.setdefault(str(name), set())
            if column.notna().any():
                held.add(_held(column))
                if held == {"number"}:
                    ranges.setdefault(str(name), _Range()).widen(column)
    kinds: dict[str, Any] = {}
    for name, held in seen.items():
        if held == {"number"}:
            if name != exact:
                kinds[name] = np.float32 if ranges[name].is_kept_by_float32 else np.float64
        elif held and held != {"boolean"}:
            kinds[name] = str
    parts = list(parts_of(path, kinds, rows=rows))
    if not parts or not sum(map(len, parts)):
        raise InputError(f"{path.name} has a header and no rows")
    return pd.DataFrame({name: _joined([part[name] for part in parts]) for name in parts[0].columns})


def header_of(path: Path) -> list[str]:
    """Names of the columns of a table."""
    from featlearn.datasets import read_table

    if not _is_csv(path):
        if path.suffix.lower() == ".parquet" and path.is_file():
            with _NoTable(path):
                return [str(name) for name in _parquet(path).read_schema(path).names]
        return [str(name) for name in read_table(path).columns]
    if not path.is_file() or path.stat().st_size == 0:
        read_table(path)  # raises what there is to say
    with _NoTable(path):
        check_fields(path, _separator(path))
        return [str(name) for name in pd.read_csv(path, nrows=0, sep=_separator(path)).columns]


def parts_of(
    path: Path, kinds: dict[str, Any] | None = None, columns: Sequence[str] | None = None, rows: int = _PART
) -> Iterator[pd.DataFrame]:
    """A table in parts, so that it need not be in memory as a whole.

    Args:
        path: The file.
        kinds: What columns hold, where that is known.
        columns: Only these.
        rows: Of a part.
    """
    with _NoTable(path):
        if _is_csv(path):
            check_fields(path, _separator(path))
            # All columns are read, for usecols would hide lines that have too many fields.
            with pd.read_csv(path, sep=_separator(path), chunksize=rows, dtype=kinds, low_memory=False) as read:
                for part in read:
                    yield part if columns is None else part[list(columns)]
        else:
            with _parquet(path).ParquetFile(path) as stored:
                for batch in stored.iter_batches(batch_size=rows, columns=columns):
                    yield batch.to_pandas(ignore_metadata=True)  # or a column might become the index, and be missed


def split_target(
    frame: pd.DataFrame, target: str, drop: Sequence[str], name: str
) -> tuple[pd.DataFrame, pd.Series[Any]]:
    """Inputs and target; rows without a target are left out, with a warning."""
    for column in (target, *drop):
        if column not in frame.columns:
            option = "--target" if column == target else "--drop"
            raise InputError(
                f"{name} has no column {column!r} ({option}): its columns are {pick_text(map(repr, frame.columns), 20)}"
            )
    if target in drop:
        raise InputError(f"{target!r} is the target and cannot be dropped")
    known = frame[target].notna()
    if not known.any():
        raise InputError(f"the column {target!r} of {name} is empty: there is nothing to learn")
    if not known.all():
        warnings.warn(
            f"{count(int((~known).sum()), 'row')} without a value of {target!r} left out", UserWarning, stacklevel=2
        )
    X = frame.loc[known].drop(columns=[target, *drop])
    if not X.shape[1]:
        raise InputError(f"{name} has no column left to learn {target!r} from")
    return X, frame.loc[known, target]


def target_values(y: pd.Series[Any], task: str) -> tuple[NDArray[Any], str, str]:
    """Targets as an estimator takes them, the task, and why it is this one.

    Args:
        y: Without gaps.
        task: ``"regression"``, ``"classification"``, or ``"auto"``: texts, booleans and a few different whole numbers
            are classes.
    """
    held = pd.api.types.infer_dtype(y)
    if held == "decimal":
        y = y.astype(np.float64)
    _check_target(y, held)
    numeric = pd.api.types.is_numeric_dtype(y.dtype) and not pd.api.types.is_bool_dtype(y.dtype)
    different = int(y.nunique())
    whole = numeric and bool((y % 1 == 0).all())
    why = "asked for"
    if task == "auto":
        few = whole and different <= min(_CLASSES, len(y) / 5)
        task = "classification" if few or not numeric else "regression"
        of = "whole numbers" if whole else "numbers" if numeric else "booleans" if held == "boolean" else "texts"
        why = f"{y.name!r} holds {different} different {of}"
    if task == "regression":
        try:
            return y.to_numpy(dtype=np.float64), task, why
        except (ValueError, TypeError):
            held_text = next(v for v in y if not isinstance(v, int | float))
            raise InputError(
                f"regression needs numbers, and {y.name!r} holds {held_text!r}: pass --task classification"
            ) from None
    if different < 2:
        raise InputError(f"{y.name!r} holds one value only, {y.iloc[0]!r}: there is nothing to tell apart")
    if different > max(1000, len(y) // 2):
        raise InputError(f"{y.name!r} holds {different:,} different values, too many for classes: --task regression")
    if whole:
        return _whole(y), task, why
    if numeric:
        broken = next(value for value in y if value % 1)
        raise InputError(f"{y.name!r} holds {broken}, which is no name of a class: pass --task regression")
    if held == "boolean":
        return y.to_numpy(dtype=bool), task, why
    return np.array([str(value) for value in y], dtype=object), task, why


def _check_target(y: pd.Series[Any], held: str) -> None:
    """Refuse what is neither a number nor a name."""
    if len(y) < 2:
        raise InputError(f"there is one row only with a value of {y.name!r}: nothing can be learned from it")
    if any(moment in held for moment in _MOMENTS):
        raise InputError(f"{y.name!r} holds moments, such as {y.iloc[0]}: make a number of them, such as days")
    if any(isinstance(value, list | dict | set | np.ndarray) for value in y):
        raise InputError(f"{y.name!r} holds several values a row: a target is one number or one text")
    if pd.api.types.is_float_dtype(y.dtype) and not np.isfinite(y.to_numpy(dtype=np.float64)).all():
        raise InputError(f"{y.name!r} holds an infinite number: leave its row out, or empty its field")


def _whole(y: pd.Series[Any]) -> NDArray[Any]:
    """Labels that are whole numbers, none of them changed."""
    if y.min() >= -(2**63) and y.max() < 2**63:
        return y.to_numpy(dtype=np.int64)
    return y.to_numpy(dtype=np.uint64 if pd.api.types.is_integer_dtype(y.dtype) else np.float64)


class _Range:
    """What is known of a column of numbers, of which parts have been seen."""

    def __init__(self) -> None:
        self.least, self.most, self.error = np.inf, -np.inf, 0.0

    def widen(self, column: pd.Series[Any]) -> None:
        """See another part."""
        values = column.to_numpy(dtype=np.float64)
        values = values[np.isfinite(values)]
        if len(values):
            with np.errstate(over="ignore", under="ignore"):
                error = np.abs(values.astype(np.float32) - values).max()
            self.error = max(self.error, float(error))
            self.least, self.most = min(self.least, float(values.min())), max(self.most, float(values.max()))

    @property
    def is_kept_by_float32(self) -> bool:
        """Whether rounding is small beside the range, and whole numbers stay what they are."""
        small = self.least >= -_EXACT and self.most <= _EXACT
        return small and self.error <= _ROUNDING * (self.most - self.least)


def _held(column: pd.Series[Any]) -> str:
    if pd.api.types.infer_dtype(column, skipna=True) == "boolean":
        return "boolean"
    return "number" if pd.api.types.is_numeric_dtype(column.dtype) else "text"


def _joined(parts: list[pd.Series[Any]]) -> pd.Series[Any]:
    """Parts of one column; texts become categories, which are kept once."""
    if any(pd.api.types.infer_dtype(part, skipna=True) == "string" for part in parts):
        joined = pd.api.types.union_categoricals([part.astype("category") for part in parts])
        return pd.Series(joined, name=parts[0].name)
    return pd.concat(parts, ignore_index=True)


class _NoTable:
    """Turns what pandas and pyarrow say of a file that is no table into one sentence."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __enter__(self) -> None:
        return None

    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> None:
        if isinstance(error, ValueError | EOFError | zlib.error | gzip.BadGzipFile) and not isinstance(
            error, InputError
        ):
            reason = str(error).strip().split("\n")[0]
            raise InputError(f"{self.path.name} cannot be read as a table: {reason}") from error


def _parquet(path: Path) -> Any:
    try:
        return importlib.import_module("pyarrow.parquet")
    except ImportError:
        raise InputError(
            f"reading {path.name} needs pyarrow, which is not installed: "
            "call pip install 'featlearn[tables]', or save the table as .csv"
        ) from None


def _is_csv(path: Path) -> bool:
    return path.name.lower().endswith((".csv", ".csv.gz", ".tsv", ".tsv.gz"))


def _separator(path: Path) -> str:
    return "\t" if ".tsv" in path.name.lower() else ","


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
