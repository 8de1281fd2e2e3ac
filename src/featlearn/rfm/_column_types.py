"""Recognize what the columns of a table hold: numbers, also as text, categories, times, and identifiers."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from featlearn.errors import InputError

KINDS = ("number", "category", "date", "drop")
"""Kinds that a user can give to a column."""

# Names of pandas for the contents of a column without its missing values.
TIMES = {"datetime64", "datetime", "date", "time", "timedelta64", "timedelta", "period"}
_DATES = {"datetime64", "datetime", "date"}
_NUMBERS = {"floating", "integer", "mixed-integer-float", "decimal", "boolean"}
_MARKS = frozenset({"", "?", "-", "--", ".", "na", "n/a", "n.a.", "nan", "null", "none", "missing", "unknown"})
_MOST_MARKS, _MARKED_SHARE, _FEWEST_NUMBERS = 2, 0.1, 10  # for other texts among numbers
_FEWEST_IDS, _UNIQUE_SHARE = 30, 0.9
_DATE = re.compile(r"\d{4}-\d{1,2}-\d{1,2}([T ]\d.*)?|\d{1,2}[/.]\d{1,2}[/.]\d{4}")
_CODE = re.compile(r"[+-]?0\d+")
_DAY = np.timedelta64(1, "D")


@dataclass(frozen=True)
class ColumnType:
    """Kind of a column.

    Attributes:
        kind: "number", "category", "date", or "" for a column that is not used.
        marks: Texts that stand for missing values, for numbers that are stored as text; None for other columns.
        note: Sentence about a column that is read in another way than its type suggests; empty for others.
    """

    kind: str
    marks: tuple[str, ...] | None = None
    note: str = ""


def column_type(name: str, series: pd.Series[Any], given: str | None = None) -> ColumnType:
    """Determine the kind of a column by its values.

    Args:
        name: Name of the column.
        series: Values.
        given: Kind that the user gave to the column, one of `KINDS`. None recognizes it.

    Raises:
        InputError: The values are not of the given kind.
    """
    known = series.dropna()
    if given == "drop" or not len(known):
        return ColumnType("")
    if given == "category":
        return ColumnType("category")
    if given == "date":
        days(name, series)
        return ColumnType("date")
    if given == "number":
        if not _is_text(known):
            return ColumnType("number")
        marks, others = _split(known)
        if others or not len(marks) < len(set(_texts(known))):
            raise InputError(f"column {name!r} must hold numbers, got {min([*others, *marks])!r}.")
        return ColumnType("number", marks)
    return _recognized(name, series, known)


def _recognized(name: str, series: pd.Series[Any], known: pd.Series[Any]) -> ColumnType:
    if isinstance(series.dtype, pd.CategoricalDtype):
        return ColumnType("category")
    if pd.api.types.is_numeric_dtype(series.dtype):  # includes booleans
        return ColumnType("number")
    content = pd.api.types.infer_dtype(known)
    if content in TIMES:
        how = _as_days(name) if content in _DATES else ". Convert it to a number to use it"
        return ColumnType("", None, f"column {name!r} holds dates or times and is left out{how}")
    if content in _NUMBERS:
        return ColumnType("number")
    if not _is_text(known):
        return ColumnType("category")
    texts = _texts(known)
    marks, others = _split(known)
    numbers = len(set(texts)) - len(marks) - len(others)
    if others and len(others) <= _MOST_MARKS and numbers >= _FEWEST_NUMBERS:
        share = sum(text in others for text in texts) / len(texts)
        if share <= _MARKED_SHARE:
            marks, others = (*marks, *others), ()
    if numbers and not others:
        if any(_CODE.fullmatch(text) for text in texts):
            return ColumnType("category")  # postal codes and the like
        missing = f", with {' and '.join(map(repr, marks))} for missing values" if marks else ""
        note = f"column {name!r} holds numbers as text{missing}: it is read as numbers{_other(name, 'category')}"
        return ColumnType("number", marks, note)
    filled = [text for text in texts if text.lower() not in _MARKS]
    if filled and all(_DATE.fullmatch(text) for text in filled):
        return ColumnType("", None, f"column {name!r} holds dates as text and is left out{_as_days(name)}")
    distinct = len(set(filled))
    if len(filled) >= _FEWEST_IDS and distinct >= _UNIQUE_SHARE * len(filled):
        note = f"column {name!r} has {distinct:,} different texts in {len(filled):,} rows, like names or identifiers"
        return ColumnType("", None, f"{note}, and is left out{_other(name, 'category')}")
    return ColumnType("category")


def text_numbers(name: str, series: pd.Series[Any], marks: Iterable[str]) -> NDArray[np.float64]:
    """Return the numbers of a column of texts, with NaN for missing values.

    Args:
        name: Name of the column.
        series: Values; numbers are accepted too.
        marks: Texts that stand for missing values.

    Raises:
        InputError: A text is neither a number nor a mark.
    """
    missing = _MARKS | set(marks)
    values = np.full(len(series), np.nan)
    for place, value in enumerate(series):
        if isinstance(value, str):
            text = value.strip()
            number = _number(text)
            if number is None and text not in missing and text.lower() not in missing:
                raise InputError(f"column {name!r} must hold numbers or missing values as at fit, got {value!r}")
            values[place] = np.nan if number is None else number
        elif not pd.isna(value):
            values[place] = float(value)
    return values


def days(name: str, series: pd.Series[Any]) -> NDArray[np.float64]:
    """Return the days since 1970-01-01 of a column of dates, with NaN for missing values.

    Args:
        name: Name of the column.
        series: Dates, times, or texts of them.

    Raises:
        InputError: A value is not a date.
    """
    kept = series.map(lambda value: None if isinstance(value, str) and value.strip().lower() in _MARKS else value)
    try:
        dates = pd.to_datetime(kept, utc=True, format="mixed" if _is_text(kept.dropna()) else None)
    except (ValueError, TypeError, OverflowError) as error:
        raise InputError(f"column {name!r} must hold dates, such as 2026-01-31: {error}") from error
    values = dates.dt.tz_localize(None).to_numpy(dtype="datetime64[ns]")
    result: NDArray[np.float64] = (values - np.datetime64(0, "D")) / _DAY
    return result


def _is_text(known: pd.Series[Any]) -> bool:
    return len(known) > 0 and pd.api.types.infer_dtype(known) == "string"


def _texts(known: pd.Series[Any]) -> list[str]:
    return [text.strip() for text in known]


def _split(known: pd.Series[Any]) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Return the texts that are marks of missing values, and those that are neither marks nor numbers."""
    words = sorted({text for text in _texts(known) if _number(text) is None})
    marks = tuple(word for word in words if word.lower() in _MARKS)
    return marks, tuple(word for word in words if word.lower() not in _MARKS)


def _number(text: str) -> float | None:
    """Return the finite number that a text is; None if it is none."""
    if "_" in text:  # Python's separator of digits
        return None
    try:
        value = float(text)
    except ValueError:
        return None
    return value if np.isfinite(value) else None


def _as_days(name: str) -> str:
    return f". Pass columns={{{name!r}: 'date'}} to use it as a number of days"


def _other(name: str, kind: str) -> str:
    return f". Pass columns={{{name!r}: {kind!r}}} to change this"
