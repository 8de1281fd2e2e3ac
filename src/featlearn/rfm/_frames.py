"""Convert tables of other libraries and arrays to pandas frames."""

from __future__ import annotations

import importlib
from typing import Any

import numpy as np
import pandas as pd
from scipy.sparse import issparse

from featlearn.errors import InputError


def as_frame(X: Any) -> tuple[pd.DataFrame, bool]:
    """Return a table as a pandas frame with unique text names, and whether the table has column names.

    Frames of pandas, polars and other libraries have names: objects with ``to_pandas``, ``__arrow_c_stream__``,
    ``__dataframe__``, or ``columns`` and ``__getitem__``. Everything else is converted to an array with columns x0, x1,
    ..., as in scikit-learn.

    Args:
        X: Table in memory, shape ``(rows, columns)``.

    Raises:
        InputError: X is not a table in memory, is sparse, or has repeated names.
    """
    frame = _named(X)
    if frame is not None:
        frame = frame.set_axis(pd.Index([str(name) for name in frame.columns], dtype=object), axis=1)
        if not frame.columns.is_unique:
            repeated = ", ".join(sorted(set(frame.columns[frame.columns.duplicated()])))
            raise InputError(f"columns must have different names, got repeated names: {repeated}")
        return frame, True
    if issparse(X):
        raise InputError("X must be a dense array or a frame, got a sparse matrix. Pass X.toarray().")
    array = np.asarray(X)
    if array.ndim != 2:
        raise InputError(
            f"Expected 2D array, got {array.ndim}D array instead. Reshape your data, with X.reshape(-1, 1) for one "
            "column or X.reshape(1, -1) for one row."
        )
    frame = pd.DataFrame(array, columns=pd.Index([f"x{i}" for i in range(array.shape[1])], dtype=object))
    return frame.infer_objects(), False


def _named(X: Any) -> pd.DataFrame | None:
    """Convert a frame of another library to pandas; None if X has no column names."""
    if isinstance(X, pd.DataFrame):
        return X
    if isinstance(X, np.ndarray | type):
        return None
    library = type(X).__module__.partition(".")[0]
    kind = f"{library} {type(X).__name__}"
    # First of all checks: the columns of a LazyFrame cost a query.
    if hasattr(X, "collect") or hasattr(X, "compute"):
        raise InputError(f"X must be a table in memory, got a {kind}. Pass X.collect(), or X.compute() for dask.")
    try:
        if library == "polars":  # to_pandas of polars needs pyarrow; a series has no columns
            return _by_column(X, X.columns) if hasattr(X, "columns") else None
        if hasattr(X, "to_pandas"):
            frame = X.to_pandas()
            return frame if isinstance(frame, pd.DataFrame) else None
        if hasattr(X, "__arrow_c_stream__"):
            return _from_arrow(X)
        if hasattr(X, "__dataframe__"):
            return pd.api.interchange.from_dataframe(X)
        if hasattr(X, "columns") and hasattr(X, "__getitem__"):
            return _by_column(X, X.columns)
    except InputError:
        raise
    except Exception as error:
        raise InputError(
            f"X must be a table with columns, got a {kind} that cannot be read ({error}). Convert it to pandas."
        ) from error
    if hasattr(X, "columns") or hasattr(X, "column_names"):  # by position, columns could be in any order
        raise InputError(f"X must be a table whose columns can be read by name, got a {kind}. Convert it to pandas.")
    return None


def _by_column(X: Any, names: Any) -> pd.DataFrame:
    columns = [_series(X[name]) for name in names]
    if not columns:
        return pd.DataFrame(index=pd.RangeIndex(len(X)))
    return pd.concat(columns, axis=1, keys=range(len(columns))).set_axis(pd.Index(list(names), dtype=object), axis=1)


def _series(column: Any) -> pd.Series[Any]:
    """Return one column with missing values as NaN or None."""
    try:
        values = column.to_numpy() if hasattr(column, "to_numpy") else np.asarray(column)
        if values.ndim == 1:
            return pd.Series(values).infer_objects()
    except Exception:  # for 128-bit integers and nested values
        if not hasattr(column, "to_list"):
            raise
    return pd.Series(column.to_list(), dtype=object).infer_objects()


def _from_arrow(X: Any) -> pd.DataFrame:
    try:
        pyarrow = importlib.import_module("pyarrow")  # not a dependency, and without types
    except ImportError as error:
        raise InputError("X is an Arrow stream, which requires pyarrow. Install it, or pass a pandas frame.") from error
    return pd.DataFrame(pyarrow.table(X).to_pandas())
