"""Validate the parameters and the input of the estimators."""

from __future__ import annotations

import math
import numbers
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from sklearn.model_selection import GroupKFold, StratifiedGroupKFold, check_cv

from featlearn._utils.validation import check_int, check_number, check_option, is_int, is_number
from featlearn.errors import InputError
from featlearn.rfm.feature_updates import UPDATES
from featlearn.rfm.iteration import Settings
from featlearn.rfm.kernels import make_kernel

AUTO_SUBSET = 5000
"""Number of rows above which M is learned on subsets, by default."""


def checked_settings(estimator: Any, seed: int) -> Settings:
    """Return the validated settings of an estimator; ``subset`` and ``centers`` may exceed the number of rows.

    Args:
        estimator: Estimator with the parameters of `featlearn.RFMRegressor`.
        seed: Seed of the centers.

    Raises:
        InputError: A parameter is not allowed.
    """
    p: dict[str, Any] = estimator.get_params(deep=False)
    p |= {name: str(value) for name, value in p.items() if isinstance(value, str)}  # numpy.str_ becomes str
    subset = AUTO_SUBSET if isinstance(p["subset"], str) and p["subset"] == "auto" else p["subset"]
    if subset is not None and not is_int(subset, 2):
        raise InputError(f'subset must be "auto", an integer of at least 2, or None, got {subset!r}')
    return Settings(
        kernel=make_kernel(p["kernel"], **{name: p[name] for name in ("exponent", "norm", "degree", "offset")}),
        update=check_option("update", p["update"], UPDATES),
        power=check_number("power", p["power"], above=0),
        rescale=check_option("rescale", p["rescale"], ("trace", "max", None)),
        bandwidth=_number_or_loo("bandwidth", p["bandwidth"]),
        ridge=_number_or_loo("ridge", p["ridge"]),
        n_iter=check_int("n_iter", p["n_iter"], 0),
        diagonal=bool(p["diagonal"]),
        subset=_int_or_none("subset", subset, 2),
        judge=p["validation"] is not None,
        patience=_int_or_none("patience", p["patience"], 1),
        centers=_int_or_none("centers", p["centers"], 1),
        center_sampling=check_option("center_sampling", p["center_sampling"], ("uniform", "leverage")),
        seed=seed,
        time_limit=None if p["time_limit"] is None else check_number("time_limit", p["time_limit"], above=0),
    )


def _number_or_loo(name: str, value: Any) -> float | None:
    if isinstance(value, str) and value == "loo":
        return None
    if not is_number(value) or not value > 0:
        raise InputError(f'{name} must be a number above 0 or "loo", got {value!r}')
    return float(value)


def _int_or_none(name: str, value: Any, least: int) -> int | None:
    return None if value is None else check_int(name, value, least, optional=True)


def resolve_dtype(dtype: Any) -> torch.dtype:
    """Return float32 or float64 from a name or a type.

    Raises:
        InputError: The dtype is another one.
    """
    name = dtype.__name__ if isinstance(dtype, type) else str(dtype).removeprefix("torch.")
    resolved: torch.dtype = getattr(torch, check_option("dtype", name, ("float32", "float64")))
    return resolved


def resolve_device(device: Any) -> torch.device:
    """Return a device that is available; None is a GPU if there is one.

    Raises:
        InputError: The device is unknown or not available.
    """
    if device is None:
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        resolved = torch.device(device)
        torch.empty(0, device=resolved)  # fails for a device that is not available
    except (RuntimeError, TypeError, AssertionError) as error:
        raise InputError(f"device must be an available torch device such as 'cpu' or 'cuda', got {device!r}") from error
    return resolved


def check_finite(name: str, array: NDArray[Any], columns: Any = None) -> None:
    """Raise an InputError with the position of the first NaN or infinity.

    Args:
        name: Name of the array, for the message.
        array: Numbers, shape ``(n,)`` or ``(n, columns)``.
        columns: Names of the columns. None shows their numbers.
    """
    wrong = ~np.isfinite(array)
    if not wrong.any():
        return
    row, *column = np.argwhere(wrong)[0]
    missing = np.isnan(array[(row, *column)])
    place = f"row {row}"
    if column:
        place += f", column {column[0] if columns is None else repr(columns[column[0]])}"
    fix = ". Impute it, or wrap the estimator in make_tabular." if missing and name == "X" else ""
    raise InputError(f"Input {name} contains {'NaN' if missing else 'infinity'} at {place}{fix}")


def check_range(name: str, array: NDArray[Any], dtype: torch.dtype) -> None:
    """Raise an InputError if a sum of squares of the numbers could overflow in the dtype."""
    most = math.sqrt(torch.finfo(dtype).max / array.size) / 4
    if (largest := float(np.abs(array).max())) > most:
        raise InputError(f"{name} must be below {most:.0e} in {dtype}, got values up to {largest:.1e}. Scale it.")


def _wrong_validation(validation: Any) -> InputError:
    given = repr(validation) if isinstance(validation, str | int | float) else f"a {type(validation).__name__}"
    return InputError(
        'validation must be "loo", None, a share between 0 and 1, a number of folds, a splitter '
        f"or a tuple (X_val, y_val), got {given}"
    )


_GROUP_FOLDS = 5


def fold_numbers(
    validation: Any, X: NDArray[Any], y: NDArray[Any], classifier: bool, groups: NDArray[Any] | None = None
) -> NDArray[np.int64] | None:
    """Return the fold number of each row; None if ``validation`` does not define folds.

    Args:
        validation: Number of folds, splitter, or list of pairs (training rows, rows left out). "loo", None, a share of
            rows and a tuple ``(X_val, y_val)`` do not define folds.
        X: Rows, shape ``(n, d)``.
        y: Targets, for a stratified splitter.
        classifier: Whether y are classes: a number of folds is then stratified.
        groups: Group of each row, shape ``(n,)``: folds consist of whole groups, five of them for "loo". None stands
            for single rows.

    Raises:
        InputError: ``validation`` is not allowed, or does not go with groups, or its folds do not leave out each row
            exactly once.
    """
    pair = isinstance(validation, tuple) and len(validation) == 2
    loo = isinstance(validation, str) and validation == "loo"
    if groups is not None and (validation is None or isinstance(validation, float) or pair):
        raise InputError(f"groups require validation='loo', a number of folds or a splitter, got {validation!r}")
    if groups is not None and loo:
        validation = min(_GROUP_FOLDS, len(np.unique(groups)))
        if validation < 2:
            raise InputError("groups must contain at least two groups, got one")
    elif validation is None or isinstance(validation, float) or pair or loo:
        return None
    if isinstance(validation, str | tuple):
        raise _wrong_validation(validation)
    counted = isinstance(validation, numbers.Integral)
    if counted and not is_int(validation, 2):
        raise InputError(f"validation must have at least 2 folds, got {validation!r}")
    if counted or hasattr(validation, "split"):
        if counted and groups is not None:
            splitter = (StratifiedGroupKFold if classifier else GroupKFold)(int(validation))
        else:
            splitter = check_cv(int(validation) if counted else validation, y, classifier=classifier)
        splits = [left_out for _, left_out in splitter.split(X, y, groups)]
    else:  # a list of splits, as in scikit-learn
        try:
            splits = [np.asarray(left_out, dtype=np.intp) for _, left_out in validation]
        except (TypeError, ValueError) as error:
            raise _wrong_validation(validation) from error
    folds = np.full(len(X), -1, dtype=np.int64)
    for number, left_out in enumerate(splits):
        if (folds[left_out] >= 0).any():
            raise InputError("validation must leave out each row once, got a splitter that leaves out some rows twice")
        folds[left_out] = number
    if (folds < 0).any():
        raise InputError("validation must leave out each row once, got a splitter that never leaves out some rows")
    return folds
