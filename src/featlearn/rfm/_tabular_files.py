"""Save fitted pipelines of `make_tabular` to one safetensors file that contains no code."""

from __future__ import annotations

import math
import os
from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

import numpy as np
from sklearn.pipeline import Pipeline
from sklearn.utils.validation import check_is_fitted

from featlearn.errors import InputError
from featlearn.rfm._base import BaseRFM
from featlearn.rfm._estimators import RFMClassifier, RFMRegressor
from featlearn.rfm._persistence import load_model, save_model
from featlearn.rfm._table_encoder import CategoryColumn, NumberColumn, TableEncoder

_KIND = "tabular"
_COLUMNS = 10_000_000  # of a table without names, which a damaged file must not make endless
_ESTIMATORS: dict[str, type[BaseRFM]] = {c.__name__: c for c in (RFMRegressor, RFMClassifier)}


def save_tabular(path: str | os.PathLike[str], pipeline: Pipeline, about: Mapping[str, Any] | None = None) -> None:
    """Write a fitted pipeline of a table and a recursive feature machine to one safetensors file.

    Columns, their kinds, categories, means and scales, class labels and parameters are JSON in its header; the
    model's arrays are its tensors.

    Args:
        path: The file; one that exists is replaced.
        pipeline: From `featlearn.make_tabular`, with `RFMRegressor` or `RFMClassifier` as its estimator.
        about: Anything that JSON can hold, such as the name of the target; `load_tabular` gives it back.
    """
    encoder, model = _parts(pipeline)
    tensors, described = model._stored()
    named = getattr(encoder, "feature_names_in_", None)
    table = {
        "max_categories": int(encoder.max_categories),
        "n_features": int(encoder.n_features_in_),
        "feature_names": None if named is None else [str(name) for name in named],
        "columns": [{"kind": column.kind, **asdict(column)} for column in encoder._columns],
    }
    save_model(path, tensors, {"kind": _KIND, "table": table, "machine": described, "about": dict(about or {})})


def load_tabular(path: str | os.PathLike[str]) -> tuple[Pipeline, dict[str, Any]]:
    """Read a pipeline that `save_tabular` has written; its predictions are the same to the bit.

    Returns:
        The pipeline, and what was said about it.
    """
    tensors, described = load_model(path, _KIND)
    try:
        told = described["machine"]
        if told["kind"] not in _ESTIMATORS:
            raise InputError(f"it holds a {told['kind']!r}")
        model = _ESTIMATORS[told["kind"]]._restored(tensors, told)
        encoder = _restored_encoder(described["table"])
        if len(encoder.get_feature_names_out()) != model.n_features_in_:
            raise InputError("its table and its model do not fit together")
        about = dict(described["about"])
    except (KeyError, TypeError, ValueError, AttributeError, IndexError, OverflowError, RuntimeError) as error:
        raise InputError(f"{str(path)!r} is damaged, or of another version of featlearn: {error}") from error
    return Pipeline([("table", encoder), ("estimator", model)]), about


def column_kinds(pipeline: Pipeline) -> dict[str, str]:
    """``"number"``, ``"category"`` or ``"unused"`` for each column of the table that a fitted pipeline has seen."""
    encoder, _ = _parts(pipeline)
    used = {column.name: column.kind for column in encoder._columns}
    names = getattr(encoder, "feature_names_in_", [f"x{i}" for i in range(encoder.n_features_in_)])
    return {str(name): used.get(str(name), "unused") for name in names}


def _parts(pipeline: Any) -> tuple[TableEncoder, BaseRFM]:
    steps = dict(getattr(pipeline, "steps", ()))
    encoder, model = steps.get("table"), steps.get("estimator")
    if not isinstance(encoder, TableEncoder) or type(model).__name__ not in _ESTIMATORS or len(steps) != 2:
        raise InputError(
            "a pipeline as make_tabular(RFMRegressor()) or make_tabular(RFMClassifier()) makes it is wanted, "
            f"got {type(pipeline).__name__} of {', '.join(type(s).__name__ for s in steps.values()) or 'nothing'}"
        )
    check_is_fitted(encoder, "n_features_in_")
    assert isinstance(model, BaseRFM)
    return encoder, model


def _restored_encoder(table: Mapping[str, Any]) -> TableEncoder:
    encoder = TableEncoder(max_categories=int(table["max_categories"]))
    named, columns = table["feature_names"], int(table["n_features"])
    if not 0 < columns <= _COLUMNS or (named is not None and len(named) != columns):
        raise InputError(f"its table has {columns} columns, and not as many names")
    encoder.n_features_in_ = columns
    if named is not None:
        encoder.feature_names_in_ = np.array([str(name) for name in named], dtype=object)
    encoder._columns = [_restored_column(dict(column)) for column in table["columns"]]
    names = set(getattr(encoder, "feature_names_in_", [f"x{i}" for i in range(encoder.n_features_in_)]))
    if not {column.name for column in encoder._columns} <= names:
        raise InputError("it uses columns that its table does not have")
    return encoder


def _restored_column(column: dict[str, Any]) -> NumberColumn | CategoryColumn:
    kind, name, marked = column.pop("kind"), str(column["name"]), bool(column["marked"])
    if kind == "number":
        mean, scale = float(column["mean"]), float(column["scale"])
        if not math.isfinite(mean) or not scale > 0:  # infinity is the scale of a constant
            raise InputError(f"its column {name!r} has mean {mean} and scale {scale}")
        return NumberColumn(name, mean, scale, marked)
    if kind == "category":
        return CategoryColumn(name, [str(value) for value in column["kept"]], bool(column["folded"]), marked)
    raise InputError(f"its column {name!r} is of the unknown kind {kind!r}")
