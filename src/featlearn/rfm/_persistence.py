"""Save fitted estimators, and pipelines of `make_tabular`, to one safetensors file that contains no code."""

from __future__ import annotations

import math
import os
from collections.abc import Mapping
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import torch
from sklearn.pipeline import Pipeline
from sklearn.utils.validation import check_is_fitted
from torch import Tensor

from featlearn._utils.safetensors_file import open_state, stored_tensors, write_state
from featlearn.errors import InputError
from featlearn.rfm._base import BaseRFM
from featlearn.rfm._estimators import RFMClassifier, RFMRegressor
from featlearn.rfm._params import checked_settings, resolve_device
from featlearn.rfm._table_encoder import CategoryColumn, NumberColumn, TableEncoder
from featlearn.rfm.iteration import Coefficients
from featlearn.rfm.recursion import FittedRFM, Iteration
from featlearn.rfm.training_rows import TargetUnits

SCHEMA_VERSION = 2
"""Format of the files: coefficients are in units of standardized targets in version 2, in the user's units in 1."""
_VERSIONS = (1, 2)
_TABULAR = "tabular"
_MOST_COLUMNS = 10_000_000  # most columns of a table without names: a damaged file must not fill the memory
_ESTIMATORS: dict[str, type[BaseRFM]] = {c.__name__: c for c in (RFMRegressor, RFMClassifier)}
_RFM = TypeVar("_RFM", bound=BaseRFM)


def save_estimator(path: str | os.PathLike[str], estimator: BaseRFM) -> None:
    """Write a fitted estimator, with its parameters and history as JSON in the header."""
    _write(path, *_estimator_state(estimator))


def load_estimator(path: str | os.PathLike[str], kind: type[_RFM]) -> _RFM:
    """Read an estimator of this kind that `save_estimator` wrote."""
    with open_state(path, kind=kind.__name__, versions=_VERSIONS) as (stored, header):
        return _restore_estimator(kind, stored_tensors(stored), header, header["schema_version"])


def save_tabular(path: str | os.PathLike[str], pipeline: Pipeline, about: Mapping[str, Any] | None = None) -> None:
    """Write a fitted pipeline of `make_tabular` to one safetensors file, which contains no code.

    Columns, their kinds, categories, means and scales, class labels and parameters are JSON in the header of the file;
    the arrays of the estimator are its tensors.

    Args:
        path: File to write; an existing file is replaced.
        pipeline: Fitted pipeline of `featlearn.make_tabular` with `RFMRegressor` or `RFMClassifier`.
        about: Further information as JSON values, such as the name of the target; `load_tabular` returns it. None
            stores none.

    Raises:
        InputError: The pipeline is another one, or the path is a folder.

    Example:
        >>> import tempfile, pandas as pd, featlearn as fl
        >>> from pathlib import Path
        >>> cars = pd.DataFrame({"age": [1.0, 9.0, 4.0, 2.0], "color": ["red", "blue", "red", "blue"]})
        >>> pipeline = fl.make_tabular(fl.RFMRegressor(n_iter=1)).fit(cars, [9.0, 1.0, 5.0, 7.0])
        >>> file = Path(tempfile.mkdtemp()) / "cars.safetensors"
        >>> fl.save_tabular(file, pipeline, about={"target": "price"})
        >>> file.exists()
        True
    """
    encoder, estimator = _steps(pipeline)
    tensors, header = _estimator_state(estimator)
    names = getattr(encoder, "feature_names_in_", None)
    table = {
        "max_categories": int(encoder.max_categories),
        "n_features": int(encoder.n_features_in_),
        "feature_names": None if names is None else [str(name) for name in names],
        "columns": [{"kind": column.kind, **asdict(column)} for column in encoder._columns],
        "kinds": None if encoder.columns is None else dict(encoder.columns),
        "notes": encoder.notes_,
    }
    _write(path, tensors, {"kind": _TABULAR, "table": table, "machine": header, "about": dict(about or {})})


def load_tabular(path: str | os.PathLike[str]) -> tuple[Pipeline, dict[str, Any]]:
    """Read a pipeline from a file that `save_tabular` wrote; its predictions are bit-identical.

    Args:
        path: File to read.

    Returns:
        The fitted pipeline, and ``about`` of `save_tabular`.

    Raises:
        InputError: The file is missing, damaged, of another kind or of a newer version.

    Example:
        >>> import tempfile, pandas as pd, featlearn as fl
        >>> from pathlib import Path
        >>> cars = pd.DataFrame({"age": [1.0, 9.0, 4.0, 2.0], "color": ["red", "blue", "red", "blue"]})
        >>> pipeline = fl.make_tabular(fl.RFMRegressor(n_iter=1)).fit(cars, [9.0, 1.0, 5.0, 7.0])
        >>> file = Path(tempfile.mkdtemp()) / "cars.safetensors"
        >>> fl.save_tabular(file, pipeline, about={"target": "price"})
        >>> loaded, about = fl.load_tabular(file)
        >>> bool((loaded.predict(cars) == pipeline.predict(cars)).all()), about
        (True, {'target': 'price'})
    """
    with open_state(path, kind=_TABULAR, versions=_VERSIONS) as (stored, header):
        kind = _ESTIMATORS[header["machine"]["kind"]]
        estimator = _restore_estimator(kind, stored_tensors(stored), header["machine"], header["schema_version"])
        encoder = _restore_encoder(header["table"])
        if len(encoder.get_feature_names_out()) != estimator.n_features_in_:
            raise ValueError("its table and its estimator have different numbers of features")
        return Pipeline([("table", encoder), ("estimator", estimator)]), dict(header["about"])


def column_kinds(pipeline: Pipeline) -> dict[str, str]:
    """Return the kind of each column of the table of a fitted pipeline.

    Args:
        pipeline: Fitted pipeline of `featlearn.make_tabular` with `RFMRegressor` or `RFMClassifier`.

    Returns:
        Kind of each column by name: ``"number"``, ``"category"`` or ``"unused"``.

    Raises:
        InputError: The pipeline is another one.

    Example:
        >>> import pandas as pd, featlearn as fl
        >>> from featlearn.rfm import column_kinds
        >>> cars = pd.DataFrame({"age": [1.0, 9.0, 4.0], "color": ["red", "blue", "red"], "note": [None, None, None]})
        >>> pipeline = fl.make_tabular(fl.RFMRegressor(n_iter=1)).fit(cars, [9.0, 1.0, 5.0])
        >>> column_kinds(pipeline)
        {'age': 'number', 'color': 'category', 'note': 'unused'}
    """
    encoder, _ = _steps(pipeline)
    used = {column.name: column.kind for column in encoder._columns}
    return {name: used.get(name, "unused") for name in encoder.column_names()}


def _steps(pipeline: Any) -> tuple[TableEncoder, BaseRFM]:
    steps = dict(getattr(pipeline, "steps", ()))
    encoder, estimator = steps.get("table"), steps.get("estimator")
    if not isinstance(encoder, TableEncoder) or type(estimator).__name__ not in _ESTIMATORS or len(steps) != 2:
        names = ", ".join(type(step).__name__ for step in steps.values()) or "no steps"
        raise InputError(
            "pipeline must be made by make_tabular(RFMRegressor()) or make_tabular(RFMClassifier()), "
            f"got {type(pipeline).__name__} of {names}"
        )
    check_is_fitted(encoder, "n_features_in_")
    assert isinstance(estimator, BaseRFM)
    return encoder, estimator


def _write(path: str | os.PathLike[str], tensors: Mapping[str, Tensor], header: Mapping[str, Any]) -> None:
    if Path(path).is_dir():
        raise InputError(f"path must be a file, got {str(path)!r}, which is a folder")
    Path(path).parent.mkdir(parents=True, exist_ok=True)
    write_state(path, tensors, {"schema_version": SCHEMA_VERSION, **header})


def _estimator_state(estimator: BaseRFM) -> tuple[dict[str, Tensor], dict[str, Any]]:
    check_is_fitted(estimator, "feature_matrix_")
    model, units = estimator._model, estimator._units
    tensors = {"metric": model.metric, "centers": model.centers, "alpha": model.fit.alpha, "mean": model.mean}
    arrays = {"origin": estimator._center, "target_offset": units.offset, "target_scale": units.scale}
    tensors |= {name: torch.from_numpy(array) for name, array in arrays.items()}
    parameters = estimator.get_params(deep=False)
    plain = {name: value.item() if isinstance(value, np.generic) else value for name, value in parameters.items()}
    header = {
        "kind": type(estimator).__name__,
        "parameters": {k: v for k, v in plain.items() if v is None or isinstance(v, bool | int | float | str)},
        "fit": {key: getattr(model.fit, key) for key in ("bandwidth", "shift", "condition")},
        "machine": {key: getattr(model, key) for key in ("ridge", "best", "error")},
        "history": [asdict(line) for line in model.history],
        "n_features": estimator.n_features_in_,
        "feature_names": estimator.feature_names() if hasattr(estimator, "feature_names_in_") else None,
        **estimator._extra_state(),
    }
    return tensors, header


def _restore_estimator(
    kind: type[_RFM], tensors: Mapping[str, Tensor], header: Mapping[str, Any], version: int
) -> _RFM:
    estimator = kind(**header["parameters"])
    device = resolve_device(estimator.device)
    _check_arrays(tensors, header["n_features"], version)
    if not 0 < header["fit"]["bandwidth"] < math.inf:
        raise ValueError(f"its bandwidth is {header['fit']['bandwidth']}")
    estimator.n_features_in_ = header["n_features"]
    if header["feature_names"] is not None:
        estimator.feature_names_in_ = np.array([str(name) for name in header["feature_names"]], dtype=object)
        if len(estimator.feature_names_in_) != estimator.n_features_in_:
            raise ValueError(f"it has {estimator.n_features_in_} features and {len(estimator.feature_names_in_)} names")
    estimator._center = tensors["origin"].numpy()
    estimator._units = TargetUnits.none(tensors["mean"].numel())
    if version > 1:
        offset, scale = tensors["target_offset"].numpy(), tensors["target_scale"].numpy()
        estimator._units = replace(estimator._units, offset=offset, scale=scale)
    metric, centers, alpha, mean = (tensors[name].to(device) for name in ("metric", "centers", "alpha", "mean"))
    history = tuple(Iteration(**line) for line in header["history"])
    estimator._kernel = checked_settings(estimator, 0).kernel
    fit = Coefficients(alpha, **header["fit"])
    estimator._keep(FittedRFM(metric, centers, fit, mean, unseen=None, history=history, **header["machine"]))
    estimator._restore_extra(dict(header))
    return estimator


def _check_arrays(tensors: Mapping[str, Tensor], features: int, version: int) -> None:
    """Raise ValueError for arrays whose shapes, types or values do not fit together."""
    dtype, metric = tensors["alpha"].dtype, tensors["metric"]
    n, d, c = len(tensors["centers"]), features, tensors["mean"].numel()
    shapes = {"alpha": (n, c), "centers": (n, d), "mean": (c,), "origin": (d,), "metric": (d, d)[: metric.ndim]}
    units = {"target_offset": (c,), "target_scale": (c,)} if version > 1 else {}
    for name, shape in (shapes | units).items():
        array = tensors[name]
        expected = torch.float64 if name == "origin" or name in units else dtype
        if array.shape != shape or array.dtype != expected:
            raise ValueError(
                f"its {name} has shape {tuple(array.shape)} in {array.dtype}, expected {tuple(shape)} in {expected}"
            )
        if not array.is_floating_point() or not bool(array.isfinite().all()):
            raise ValueError(f"its {name} has values that are not finite numbers")
    if units and not bool((tensors["target_scale"] > 0).all()):
        raise ValueError("its target_scale has values that are not positive")


def _restore_encoder(table: Mapping[str, Any]) -> TableEncoder:
    kinds = table.get("kinds")
    given = None if kinds is None else {str(name): str(kind) for name, kind in kinds.items()}
    encoder = TableEncoder(int(table["max_categories"]), given)
    names, columns = table["feature_names"], int(table["n_features"])
    if not 0 < columns <= _MOST_COLUMNS or (names is not None and len(names) != columns):
        raise ValueError(f"its table has {columns} columns and a different number of names")
    encoder.n_features_in_ = columns
    if names is not None:
        encoder.feature_names_in_ = np.array([str(name) for name in names], dtype=object)
    encoder._columns = [_restore_column(column) for column in table["columns"]]
    encoder.notes_ = {str(name): str(note) for name, note in table.get("notes", {}).items()}
    if not {column.name for column in encoder._columns} <= set(encoder.column_names()):
        raise ValueError("it uses columns that its table does not have")
    return encoder


def _restore_column(column: Mapping[str, Any]) -> NumberColumn | CategoryColumn:
    kind, name, marked = column["kind"], str(column["name"]), bool(column["marked"])
    if kind == "number":
        mean, scale = float(column["mean"]), float(column["scale"])
        if not math.isfinite(mean) or not scale > 0:  # the scale of a constant is infinite
            raise ValueError(f"its column {name!r} has mean {mean} and scale {scale}")
        marks = column.get("marks")
        texts = None if marks is None else tuple(str(mark) for mark in marks)
        return NumberColumn(name, mean, scale, marked, texts, bool(column.get("date", False)))
    if kind == "category":
        return CategoryColumn(name, [str(value) for value in column["kept"]], bool(column["folded"]), marked)
    raise ValueError(f"its column {name!r} has the unknown kind {kind!r}")
