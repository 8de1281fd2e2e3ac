"""Encode tables of numbers, categories and missing values as numbers on one scale."""

from __future__ import annotations

import itertools
import warnings
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Self

import numpy as np
import pandas as pd
from numpy.typing import NDArray
from sklearn.base import BaseEstimator, TransformerMixin
from sklearn.pipeline import Pipeline
from sklearn.utils.validation import check_is_fitted

from featlearn._utils.validation import check_int, check_option
from featlearn.errors import InputError
from featlearn.rfm._column_types import KINDS, TIMES, ColumnType, column_type, days, text_numbers
from featlearn.rfm._frames import as_frame


def make_tabular(estimator: Any, max_categories: int = 50, columns: Mapping[str, str] | None = None) -> Pipeline:
    """Make a pipeline for tables: a `TableEncoder` (step ``table``), then the estimator (step ``estimator``).

    The parameters of the steps are ``table__max_categories`` and ``estimator__...``. The fitted estimator is
    ``pipeline["estimator"]``. It is fitted to a frame, so its ``feature_names_in_`` are names of the encoded columns.

    Args:
        estimator: Estimator with the interface of scikit-learn, such as `RFMRegressor`.
        max_categories: Maximum number of encoded columns for the categories of one column, at least 2.
        columns: Kinds of columns by name, as in `TableEncoder`. None recognizes them.

    Returns:
        Pipeline of encoder and estimator.

    Raises:
        InputError: The estimator is a class, or has no method ``fit``.

    Example:
        >>> from sklearn.linear_model import Ridge
        >>> cars = pd.DataFrame({"age": [1.0, 9.0, None], "color": ["red", "blue", "red"]})
        >>> list(make_tabular(Ridge()).fit(cars, [3.0, 1.0, 2.0])["estimator"].feature_names_in_)
        ['age', 'age missing', 'color=blue', 'color=red']
    """
    if isinstance(estimator, type) or not hasattr(estimator, "fit"):
        raise InputError(f"estimator must be an estimator with fit, such as Ridge(), got {estimator!r}")
    return Pipeline([("table", TableEncoder(max_categories, columns)), ("estimator", estimator)])


class TableEncoder(TransformerMixin, BaseEstimator):  # type: ignore[misc]
    """Encoder of a table as a frame of float64 columns without missing values, all on one scale.

    The encoding of a column depends on its values at `fit`:

    - Numbers and booleans are standardized over the known values. A missing value becomes 0, the mean, and so do the
      values of a constant column.
    - All other values are categories, with one column of 0 and 1 per category, ``"color=red"``. A category that is new
      after `fit` is 0 in all of these columns. Values of mixed types are compared by their text.
    - If there are more than ``max_categories`` categories, the most frequent ones have a column each. The others share
      the last column, ``"color other"``, with categories that are new after `fit`.
    - A column with missing values has an additional column of 0 and 1, ``"age missing"``.
    - Texts that are numbers, with a few marks such as "?" for missing values, are numbers. Texts with leading zeros,
      such as postal codes, are categories.
    - Texts nearly all of which differ (names, identifiers), dates and times are left out. Columns without any value are
      left out too.

    One warning per column says what is not obvious, and `notes_` keeps the sentences.

    All kinds of columns have the same scale: the squared distance of two independent standardized numbers is 2 on
    average, the one of two different categories is 2, and the one of a missing and a known value is 2 (on average, for
    numbers). scikit-learn's `ColumnTransformer` with `StandardScaler`, `SimpleImputer` and `OneHotEncoder` encodes
    common tables in the same way, but treats a missing value as a category, selects differently among equally frequent
    categories, and does not scale new values of constant, tiny and huge columns.

    Columns of a frame are matched by name, in any order; additional columns are ignored, and missing ones are an error.
    Frames of pandas, polars, pyarrow and other libraries are supported. Columns of an array are matched by position and
    named x0, x1, ...; an array after a fit to a frame, or a frame after a fit to an array, is matched by position with
    a warning.

    Args:
        max_categories: Maximum number of encoded columns for the categories of one column, at least 2.
        columns: Kinds of columns by name: "number", "category", "date" (as a number of days) or "drop". Other columns
            are recognized.

    Attributes:
        notes_: Sentences about columns that are read in another way than their types suggest, by name.
        feature_names_in_: Names of the columns at `fit`, if it was called with a frame.
        n_features_in_: Number of columns at `fit`.

    Example:
        >>> table = pd.DataFrame({"age": [1.0, 3.0], "color": ["red", "blue"]})
        >>> TableEncoder().fit_transform(table)
           age  color=blue  color=red
        0 -1.0         0.0        1.0
        1  1.0         1.0        0.0
    """

    def __init__(self, max_categories: int = 50, columns: Mapping[str, str] | None = None) -> None:
        self.max_categories = max_categories
        self.columns = columns

    def fit(self, X: Any, y: Any = None) -> Self:
        """Determine the encoding of each column of a table.

        Args:
            X: Frame, or array of shape ``(n, columns)``.
            y: Targets. Ignored.

        Returns:
            The fitted encoder.

        Raises:
            InputError: The table is empty, or has no column of numbers or categories.
        """
        most = check_int("max_categories", self.max_categories, 2)
        frame, named = as_frame(X)
        for count, what in zip(frame.shape, ("sample", "feature"), strict=True):
            if not count:
                raise InputError(f"X is empty: 0 {what}(s) (shape={frame.shape}) while a minimum of 1 is required.")
        given = _checked_kinds(self.columns, list(frame.columns))
        types = {name: column_type(name, frame[name], given.get(name)) for name in frame.columns}
        columns: list[NumberColumn | CategoryColumn] = [
            CategoryColumn.fit(name, frame[name], most)
            if of_column.kind == "category"
            else NumberColumn.fit(name, frame[name], of_column)
            for name, of_column in types.items()
            if of_column.kind
        ]
        self.notes_ = {name: of_column.note for name, of_column in types.items() if of_column.note}
        for note in self.notes_.values():
            warnings.warn(note, stacklevel=2)
        if not columns:
            raise InputError(
                f"X must have a column of numbers or categories, got {frame.shape[1]} of dates or no values"
            )
        self._columns = columns
        self.n_features_in_ = frame.shape[1]
        self.__dict__.pop("feature_names_in_", None)  # names of an earlier fit
        if named:
            self.feature_names_in_ = np.array(frame.columns, dtype=object)
        return self

    def transform(self, X: Any) -> pd.DataFrame:
        """Encode a table.

        Args:
            X: Frame with the columns of `fit`, or array of shape ``(n, columns)``.

        Returns:
            Frame of float64 columns, with one row per row of X and the index of X.

        Raises:
            InputError: Columns are missing, or a column of numbers has other values.
        """
        check_is_fitted(self, "n_features_in_")
        frame = self._aligned(X)
        values = np.concatenate([column.encode(frame[column.name]) for column in self._columns], axis=1)
        return pd.DataFrame(values, columns=pd.Index(self.get_feature_names_out()), index=frame.index)

    def get_feature_names_out(self, input_features: Any = None) -> NDArray[Any]:
        """Return the names of the encoded columns.

        Args:
            input_features: Names of the input columns. Ignored.

        Returns:
            Names of the encoded columns, in their order.
        """
        check_is_fitted(self, "n_features_in_")
        return np.array(_unique_names(name for column in self._columns for name in column.names), dtype=object)

    def column_names(self) -> list[str]:
        """Return the names of the columns at `fit`; x0, x1, ... for an array."""
        names = getattr(self, "feature_names_in_", None)
        return [f"x{i}" for i in range(self.n_features_in_)] if names is None else [str(name) for name in names]

    def _aligned(self, X: Any) -> pd.DataFrame:
        """Return a frame with the columns of `fit`, under their names."""
        frame, named = as_frame(X)
        fitted = getattr(self, "feature_names_in_", None)
        if named and fitted is not None:
            if missing := [name for name in fitted if name not in frame.columns]:
                columns = ", ".join([*frame.columns[:20], *["..."][: frame.shape[1] > 20]])
                raise InputError(f"X must have the columns of fit, but lacks {', '.join(missing)} (it has {columns})")
            return frame
        if frame.shape[1] != self.n_features_in_:
            raise InputError(
                f"X has {frame.shape[1]} features, but {type(self).__name__} is expecting "
                f"{self.n_features_in_} features as input"
            )
        names = frame.columns if named else fitted
        if names is not None and list(names) != [str(i) for i in range(len(names))]:  # not the default names of pandas
            given, before = ("has", "without") if named else ("does not have valid", "with")
            warnings.warn(
                f"X {given} feature names, but {type(self).__name__} was fitted {before} feature names: "
                "columns are taken by position",
                stacklevel=3,
            )
        return frame.set_axis(pd.Index(self.column_names(), dtype=object), axis=1)

    def __sklearn_tags__(self) -> Any:
        tags = super().__sklearn_tags__()
        tags.input_tags.allow_nan = tags.input_tags.string = tags.input_tags.categorical = True
        tags.transformer_tags.preserves_dtype = []  # always float64
        return tags


@dataclass(frozen=True)
class NumberColumn:
    """Encoding of a column of numbers.

    Attributes:
        name: Name of the column.
        mean: Mean of the known values.
        scale: Standard deviation of the known values; infinite for a constant.
        marked: Whether there is a column for missing values.
        marks: Texts that stand for missing values, for numbers that are stored as text; None for other columns.
        date: Whether the numbers are days of dates.
    """

    kind: ClassVar[str] = "number"
    name: str
    mean: float
    scale: float
    marked: bool
    marks: tuple[str, ...] | None = None
    date: bool = False

    @staticmethod
    def fit(name: str, series: pd.Series[Any], of_column: ColumnType) -> NumberColumn:
        """Compute mean and standard deviation of the known values; the scale of a constant is infinite."""
        read = NumberColumn(name, 0.0, 1.0, False, of_column.marks, of_column.kind == "date")
        values = read.values(series)
        known = values[~np.isnan(values)]
        largest = float(np.abs(known).max()) or 1.0
        shares = known / largest  # their squares do not overflow
        spread = float(shares.std())
        if spread <= 8 * np.finfo(np.float64).eps:  # constant up to rounding
            spread = np.inf
        mean, marked = float(shares.mean()) * largest, len(known) < len(values)
        return replace(read, mean=mean, scale=spread * largest, marked=marked)

    def values(self, series: pd.Series[Any]) -> NDArray[np.float64]:
        """Return the numbers of a column, with NaN for missing values."""
        if self.date:
            return days(self.name, series)
        if self.marks is not None and not pd.api.types.is_numeric_dtype(series.dtype):
            return text_numbers(self.name, series, self.marks)
        return _floats(self.name, series)

    @property
    def names(self) -> list[str]:
        """Names of the encoded columns."""
        return [self.name] + [f"{self.name} missing"] * self.marked

    def encode(self, series: pd.Series[Any]) -> NDArray[np.float64]:
        """Return the encoded columns, shape ``(n, len(names))``."""
        values = self.values(series)
        missing = np.isnan(values)
        standardized = np.where(missing, 0.0, (values - self.mean) / self.scale)
        return np.stack([standardized, missing][: len(self.names)], axis=1)


@dataclass(frozen=True)
class CategoryColumn:
    """Encoding of a column of categories.

    Attributes:
        name: Name of the column.
        kept: Categories with an encoded column each, sorted.
        folded: Whether there is a column for all other categories.
        marked: Whether there is a column for missing values.
    """

    kind: ClassVar[str] = "category"
    name: str
    kept: list[str]
    folded: bool
    marked: bool

    @staticmethod
    def fit(name: str, series: pd.Series[Any], most: int) -> CategoryColumn:
        """Keep the most frequent categories; among equally frequent ones the first by name."""
        codes, texts = _categories(name, series)
        counts = Counter(texts[code] for code in codes if code >= 0)
        kept = sorted(counts, key=lambda text: (-counts[text], text))
        folded = len(kept) > most
        return CategoryColumn(name, sorted(kept[: most - 1] if folded else kept), folded, bool((codes < 0).any()))

    @property
    def names(self) -> list[str]:
        """Names of the encoded columns."""
        names = [f"{self.name}={text}" for text in self.kept]
        return names + [f"{self.name} other"] * self.folded + [f"{self.name} missing"] * self.marked

    def encode(self, series: pd.Series[Any]) -> NDArray[np.float64]:
        """Return the encoded columns, shape ``(n, len(names))``."""
        codes, texts = _categories(self.name, series)
        width = len(self.names)
        place = {text: i for i, text in enumerate(self.kept)}
        other = len(self.kept) if self.folded else -1
        # Place -1 is a row of zeros. Missing values have code -1, which selects the last place.
        places = np.array([*(place.get(text, other) for text in texts), width - 1 if self.marked else -1])
        encoded: NDArray[np.float64] = np.eye(width + 1, width)[places[codes]]
        return encoded


def _checked_kinds(columns: Any, names: list[str]) -> dict[str, str]:
    """Return the kinds that the user gave to columns, after checking their names."""
    if columns is None:
        return {}
    if not isinstance(columns, Mapping):
        raise InputError(f"columns must be a mapping of names to kinds, got {type(columns).__name__}.")
    given = {str(name): check_option(f"columns[{name!r}]", kind, KINDS) for name, kind in columns.items()}
    if unknown := [name for name in given if name not in names]:
        raise InputError(f"columns must name columns of the table, got {', '.join(map(repr, unknown))}.")
    return given


def _floats(name: str, series: pd.Series[Any]) -> NDArray[np.float64]:
    """Return the numbers of a column, with NaN for missing values."""
    if pd.api.types.is_complex_dtype(series.dtype):
        raise InputError(f"Complex data not supported: column {name!r} is complex. Pass its real and imaginary parts.")
    try:
        if pd.api.types.infer_dtype(series.dropna()) in TIMES:  # pandas would return nanoseconds
            raise TypeError("dates are not numbers")
        values = series.to_numpy(dtype=np.float64, na_value=np.nan)
    except (ValueError, TypeError) as error:
        text = next((v for v in series.dropna() if not isinstance(v, int | float)), None)
        raise InputError(f"column {name!r} must hold numbers or missing values as at fit, got {text!r}") from error
    if np.isinf(values).any():
        raise InputError(f"column {name!r} must hold finite numbers or missing values, got infinity (inf or -inf)")
    return values


def _categories(name: str, series: pd.Series[Any]) -> tuple[NDArray[np.intp], list[str]]:
    """Return the code of each row's category, -1 for a missing value, and the text of each category."""
    try:
        codes, values = pd.factorize(series)
    except TypeError as error:
        raise InputError(
            f"column {name!r} must hold numbers, texts or categories, and each argument must be a string or a number: "
            f"{error}"
        ) from error
    # A missing value turns integers into floats: 1 and 1.0 are one category.
    whole = (isinstance(value, float | np.floating) and value.is_integer() for value in values)
    return codes, [str(int(value)) if integer else str(value) for value, integer in zip(values, whole, strict=True)]


def _unique_names(names: Iterable[str]) -> list[str]:
    """Append a number to repeated names: a table may have a column called "age missing"."""
    taken: dict[str, None] = {}
    for name in names:
        others = (f"{name} ({i})" for i in itertools.count(2))
        taken[next(n for n in itertools.chain([name], others) if n not in taken)] = None
    return list(taken)
