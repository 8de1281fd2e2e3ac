"""Tables of numbers, categories and gaps made ready for an estimator that wants numbers."""

from __future__ import annotations

import itertools
import warnings
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Self

import numpy as np
import pandas as pd
from numpy.typing import NDArray
from sklearn.base import BaseEstimator, TransformerMixin
from sklearn.pipeline import Pipeline
from sklearn.utils.validation import check_is_fitted

from featlearn.errors import InputError
from featlearn.rfm._frames import as_frame

# What pandas calls the contents of a column, once missing values are set aside.
_TIMES = {"datetime64", "datetime", "date", "time", "timedelta64", "timedelta", "period"}
_NUMBERS = {"floating", "integer", "mixed-integer-float", "decimal", "boolean"}


def make_tabular(estimator: Any, max_categories: int = 50) -> Pipeline:
    """A pipeline that takes a table as it is: a `TableEncoder` (step ``table``), then the estimator (``estimator``).

    Parameters are reached as ``table__max_categories`` and ``estimator__...``, the fitted estimator as
    ``pipeline["estimator"]``; it sees a frame, so that its ``feature_names_in_`` are readable names.

    Args:
        estimator: Any estimator in scikit-learn's manner.
        max_categories: See `TableEncoder`.

    >>> from sklearn.linear_model import Ridge
    >>> cars = pd.DataFrame({"age": [1.0, 9.0, None], "color": ["red", "blue", "red"]})
    >>> list(make_tabular(Ridge()).fit(cars, [3.0, 1.0, 2.0])["estimator"].feature_names_in_)
    ['age', 'age missing', 'color=blue', 'color=red']
    """
    if isinstance(estimator, type) or not hasattr(estimator, "fit"):
        raise InputError(f"make_tabular needs an estimator with fit, such as Ridge(), got {estimator!r}")
    return Pipeline([("table", TableEncoder(max_categories=max_categories)), ("estimator", estimator)])


class TableEncoder(TransformerMixin, BaseEstimator):  # type: ignore[misc]
    """Turns a table into a frame of float64 columns without gaps, all on one scale.

    What becomes of a column is decided by what it holds when `fit` sees it:

    - Numbers and booleans are standardized over the known values. A gap becomes 0, the mean. So does a constant.
    - Everything else is a category: a column of 0 and 1 for each, ``"color=red"``. A category that `fit` has not
      seen is 0 in all of them. Values of mixed types are told apart by their text.
    - Of more than ``max_categories`` categories the most frequent keep a column of their own, and the others share
      the last one, ``"color other"``, with those that `fit` has not seen.
    - A column with gaps gets a column of 0 and 1 beside it, ``"age missing"``.
    - Dates, times and durations are left out with a warning, columns that are all gaps without one.

    The scales go together: the squared distance of two independent standardized numbers is 2 on average, that of
    two different categories is 2, and that of a gap from a value is 2 as well (on average, among numbers). So no
    column counts more than another because of its kind.

    A frame's columns are found by name, in any order; further ones are ignored, and missing ones are an error. Frames
    are those of pandas, polars, pyarrow and other libraries (`featlearn.rfm._frames.as_frame`). An array is taken by
    position, and its columns are called x0, x1, ...; an array after a fit of a frame, or the other way round, is taken
    by position with a warning.

    Args:
        max_categories: Most columns that the categories of one column get, at least 2.

    Attributes:
        feature_names_in_: Names of the columns that `fit` has seen, if it was given a frame.
        n_features_in_: Their number.
    """

    def __init__(self, max_categories: int = 50) -> None:
        self.max_categories = max_categories

    def fit(self, X: Any, y: Any = None) -> Self:
        """Decide what becomes of each column of the table."""
        most = self.max_categories
        if isinstance(most, bool) or not isinstance(most, int | np.integer) or most < 2:
            raise InputError(f"max_categories must be an integer of at least 2, got {most!r}")
        frame, named = as_frame(X)
        for count, what in zip(frame.shape, ("sample", "feature"), strict=True):
            if not count:
                raise InputError(
                    f"the table is empty: 0 {what}(s) (shape={frame.shape}) while a minimum of 1 is required."
                )
        columns: list[_Number | _Category] = []
        times: list[str] = []
        for name in frame.columns:
            kind = _kind(frame[name])
            if kind == "time":
                times.append(name)
            elif kind == "number":
                columns.append(_number(name, frame[name]))
            elif kind == "category":
                columns.append(_category(name, frame[name], int(most)))
        if times:
            warnings.warn(
                f"columns of dates, times or durations are left out: {', '.join(times)}; make numbers of them, "
                "such as a year or a number of days, to have them used",
                UserWarning,
                stacklevel=2,
            )
        if not columns:
            raise InputError(f"no column can be used: all {frame.shape[1]} hold dates or nothing at all")
        self._columns = columns
        self.n_features_in_ = frame.shape[1]
        if named:
            self.feature_names_in_ = np.array(frame.columns, dtype=object)
        elif hasattr(self, "feature_names_in_"):
            del self.feature_names_in_  # of an earlier fit
        return self

    def transform(self, X: Any) -> pd.DataFrame:
        """The table in numbers, a row a row, with the index of the frame."""
        check_is_fitted(self, "n_features_in_")
        frame = self._aligned(X)
        values = np.concatenate([column.encode(frame[column.name]) for column in self._columns], axis=1)
        return pd.DataFrame(values, columns=pd.Index(self.get_feature_names_out()), index=frame.index)

    def get_feature_names_out(self, input_features: Any = None) -> NDArray[Any]:
        """Names of the columns that `transform` gives; ``input_features`` is there for scikit-learn's sake."""
        check_is_fitted(self, "n_features_in_")
        return np.array(_told_apart(name for column in self._columns for name in column.names), dtype=object)

    def _aligned(self, X: Any) -> pd.DataFrame:
        """The columns that were there at fit, under their names."""
        frame, named = as_frame(X)
        fitted = getattr(self, "feature_names_in_", None)
        if named and fitted is not None:
            if missing := [name for name in fitted if name not in frame.columns]:
                raise InputError(
                    f"the table lacks columns that were there at fit: {', '.join(missing)} "
                    f"(it has {', '.join(frame.columns[:20])}{', ...' if frame.shape[1] > 20 else ''})"
                )
            return frame
        if frame.shape[1] != self.n_features_in_:
            raise InputError(
                f"X has {frame.shape[1]} features, but {type(self).__name__} is expecting "
                f"{self.n_features_in_} features as input"
            )
        if named and not _numbered(frame.columns):
            self._warn_of_positions("X has feature names, but {} was fitted without feature names")
        if fitted is not None and not _numbered(fitted):
            self._warn_of_positions("X does not have valid feature names, but {} was fitted with feature names")
        names = [f"x{i}" for i in range(self.n_features_in_)] if fitted is None else fitted
        return frame.set_axis(pd.Index(names, dtype=object), axis=1)

    def _warn_of_positions(self, difference: str) -> None:
        """Warn in scikit-learn's words that columns are taken by position."""
        difference = difference.format(type(self).__name__)
        warnings.warn(f"{difference}: columns are taken by position", UserWarning, stacklevel=4)

    def __sklearn_tags__(self) -> Any:
        tags = super().__sklearn_tags__()
        tags.input_tags.allow_nan = True
        tags.input_tags.string = True
        tags.input_tags.categorical = True
        tags.transformer_tags.preserves_dtype = []  # always float64
        return tags


@dataclass(frozen=True)
class _Number:
    """A column of numbers: how it is standardized, and whether its gaps are marked."""

    name: str
    mean: float
    scale: float
    marked: bool

    @property
    def names(self) -> list[str]:
        return [self.name, f"{self.name} missing"] if self.marked else [self.name]

    def encode(self, series: pd.Series[Any]) -> NDArray[np.float64]:
        values = _floats(self.name, series)
        gaps = np.isnan(values)
        standardized = np.where(gaps, 0.0, (values - self.mean) / self.scale)
        return np.stack([standardized, gaps] if self.marked else [standardized], axis=1)


@dataclass(frozen=True)
class _Category:
    """A column of categories: those with a column of their own, and whether the others and gaps have one."""

    name: str
    kept: list[str]
    folded: bool
    marked: bool

    @property
    def names(self) -> list[str]:
        own = [f"{self.name}={value}" for value in self.kept]
        return own + [f"{self.name} other"] * self.folded + [f"{self.name} missing"] * self.marked

    def encode(self, series: pd.Series[Any]) -> NDArray[np.float64]:
        codes, texts = _codes(self.name, series)
        place = {value: i for i, value in enumerate(self.kept)}
        # One row more than there are categories, for the code -1 of gaps: it is the last row too.
        table = np.zeros((len(texts) + 1, len(self.names)))
        for i, text in enumerate(texts):
            if text in place:
                table[i, place[text]] = 1
            elif self.folded:
                table[i, len(self.kept)] = 1
        if self.marked:
            table[-1, -1] = 1
        return table[codes]


def _numbered(names: Iterable[str]) -> bool:
    """Return whether the names are those that pandas gives to the columns of an array."""
    return all(name == str(i) for i, name in enumerate(names))


def _kind(series: pd.Series[Any]) -> str | None:
    """``"number"``, ``"category"`` or ``"time"`` by what a column holds; None if it holds nothing."""
    held = series.dropna()
    if not len(held):
        return None
    if isinstance(series.dtype, pd.CategoricalDtype):
        return "category"
    if pd.api.types.is_numeric_dtype(series.dtype):  # booleans among them
        return "number"
    content = pd.api.types.infer_dtype(held)
    if content in _TIMES:
        return "time"
    return "number" if content in _NUMBERS else "category"


def _number(name: str, series: pd.Series[Any]) -> _Number:
    values = _floats(name, series)
    known = values[~np.isnan(values)]
    largest = float(np.abs(known).max()) or 1.0
    shares = known / largest  # their squares stay in range
    spread = float(shares.std())
    if spread <= 8 * np.finfo(np.float64).eps:  # what rounding leaves of a constant
        spread = np.inf
    return _Number(name, float(shares.mean()) * largest, spread * largest, len(known) < len(values))


def _category(name: str, series: pd.Series[Any], most: int) -> _Category:
    codes, texts = _codes(name, series)
    counts = Counter[str]()
    for text, count in zip(texts, np.bincount(codes[codes >= 0], minlength=len(texts)), strict=True):
        counts[text] += int(count)
    kept = sorted(counts, key=lambda text: (-counts[text], text))
    folded = len(kept) > most
    return _Category(name, sorted(kept[: most - 1] if folded else kept), folded, bool((codes < 0).any()))


def _floats(name: str, series: pd.Series[Any]) -> NDArray[np.float64]:
    """Numbers of a column with NaN for gaps."""
    if pd.api.types.is_complex_dtype(series.dtype):
        raise InputError(f"Complex data not supported: column {name!r} is complex; pass its real and imaginary parts")
    try:
        if _kind(series) == "time":  # pandas would count nanoseconds
            raise TypeError("dates are no numbers")
        values = series.to_numpy(dtype=np.float64, na_value=np.nan)
    except (ValueError, TypeError) as error:
        held = next((v for v in series.dropna() if not isinstance(v, int | float)), None)
        raise InputError(
            f"column {name!r} held numbers at fit, and now holds {held!r}: pass numbers or gaps"
        ) from error
    if np.isinf(values).any():
        raise InputError(f"column {name!r} holds infinity: make a number or a gap of it, neither inf nor -inf")
    return values


def _codes(name: str, series: pd.Series[Any]) -> tuple[NDArray[np.intp], list[str]]:
    """The code of each row's category, -1 for a gap, and the categories' texts."""
    try:
        codes, values = pd.factorize(series)
    except TypeError as error:
        raise InputError(
            f"column {name!r} must hold numbers, texts or categories, and each argument must be a string or a number: "
            f"{error}"
        ) from error
    return codes, [_text(value) for value in values]


def _text(value: Any) -> str:
    # A gap makes floats of a column's integers: 1 and 1.0 are one category.
    return str(int(value)) if isinstance(value, float | np.floating) and value.is_integer() else str(value)


def _told_apart(names: Iterable[str]) -> list[str]:
    """The names, with a number behind those that came before: a table may have a column "age missing" of its own."""
    taken: dict[str, None] = {}
    for name in names:
        others = (f"{name} ({i})" for i in itertools.count(2))
        taken[next(n for n in itertools.chain([name], others) if n not in taken)] = None
    return list(taken)
