"""Arguments of the estimators, checked: every message says what is valid."""

from __future__ import annotations

import math
import numbers
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from sklearn.model_selection import check_cv

from featlearn._utils.memory import memory_limit
from featlearn.errors import InputError
from featlearn.rfm.feature_updates import UPDATES
from featlearn.rfm.iteration import Settings
from featlearn.rfm.kernels import make_kernel

AUTO_SUBSET = 5000
"""Rows from which M is learned on subsets, unless told otherwise."""


def checked_settings(estimator: Any, seed: int) -> Settings:
    """What the model is told, from the estimator's parameters; `subset` and `centers` are not yet clipped."""
    p = estimator.get_params(deep=False)
    kernel = make_kernel(
        p["kernel"], exponent=p["exponent"], norm=p["norm"], degree=p["degree"], offset=p["offset"]
    )  # fmt: skip
    _one_of("update", p["update"], UPDATES)
    _one_of("rescale", p["rescale"], ("trace", "max", None))
    _one_of("center_sampling", p["center_sampling"], ("uniform", "leverage"))
    subset = AUTO_SUBSET if p["subset"] == "auto" else _integer("subset", p["subset"], 2, '"auto" or an integer')
    return Settings(
        kernel=kernel,
        update=p["update"],
        power=_positive("power", p["power"]),
        rescale=p["rescale"],
        bandwidth=None if p["bandwidth"] == "loo" else _positive("bandwidth", p["bandwidth"], 'or "loo"'),
        ridge=None if p["ridge"] == "loo" else _positive("ridge", p["ridge"], 'or "loo"'),
        n_iter=_integer("n_iter", p["n_iter"], 0, optional=False) or 0,
        diagonal=bool(p["diagonal"]),
        subset=subset,
        judge=p["validation"] is not None,
        patience=_integer("patience", p["patience"], 1),
        centers=_integer("centers", p["centers"], 1),
        center_sampling=p["center_sampling"],
        seed=seed,
    )


def _one_of(name: str, value: Any, valid: tuple[Any, ...]) -> None:
    if value not in valid:
        raise InputError(f"{name} must be one of {', '.join(map(str, valid))}, got {value!r}")


def _positive(name: str, value: Any, otherwise: str = "") -> float:
    if isinstance(value, bool) or not isinstance(value, numbers.Real) or not 0 < float(value) < math.inf:
        raise InputError(f"{name} must be a number above 0 {otherwise}".rstrip() + f", got {value!r}")
    return float(value)


def _integer(name: str, value: Any, least: int, form: str = "an integer", optional: bool = True) -> int | None:
    """An integer of at least ``least``; None stays None where it may be."""
    if value is None and optional:
        return None
    if isinstance(value, bool) or not isinstance(value, numbers.Integral) or value < least:
        raise InputError(f"{name} must be {form} of at least {least}{', or None' if optional else ''}, got {value!r}")
    return int(value)


def resolve_dtype(dtype: Any) -> torch.dtype:
    """float32 or float64 from a name or a type."""
    known = {"float32": torch.float32, "float64": torch.float64}
    name = dtype.__name__ if isinstance(dtype, type) else str(dtype).removeprefix("torch.")
    if name not in known:
        raise InputError(f"dtype must be float32 or float64, got {dtype!r}")
    return known[name]


def resolve_device(device: Any) -> torch.device:
    """The device asked for; None is a GPU if there is one."""
    if device is None:
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        found = torch.device(device)
        torch.empty(0, device=found)  # a device that can be named need not be there
    except (RuntimeError, TypeError, AssertionError) as error:
        raise InputError(f"device must be an available torch device such as 'cpu' or 'cuda', got {device!r}") from error
    return found


def check_finite(name: str, array: NDArray[Any], columns: Any = None) -> None:
    """Refuse NaN and infinity, and say where the first one is."""
    wrong = ~np.isfinite(array)
    if not wrong.any():
        return
    where = np.argwhere(wrong)[0]
    value = array[tuple(where)]
    place = f"row {where[0]}"
    if array.ndim == 2:
        label = repr(columns[where[1]]) if columns is not None else str(where[1])
        place += f", column {label}"
    cure = ": impute it, or wrap the estimator in make_tabular" if np.isnan(value) and name == "X" else ""
    raise InputError(f"Input {name} contains {'NaN' if np.isnan(value) else 'infinity'} at {place}{cure}")


def check_range(name: str, array: NDArray[Any], dtype: torch.dtype) -> None:
    """Refuse numbers whose squares, summed, are beyond the dtype."""
    most = math.sqrt(torch.finfo(dtype).max / array.size) / 4
    if (largest := float(np.abs(array).max())) > most:
        raise InputError(f"{name} has values up to {largest:.1e}, too large for {dtype}: scale it to below {most:.0e}")


def check_memory(rows: int, dtype: torch.dtype, max_memory: Any, direct: bool) -> None:
    """Refuse a solve that does not fit, before anything is allocated."""
    needed = rows * rows * dtype.itemsize
    free = memory_limit(max_memory)
    if needed > 0.9 * free:
        smaller = ", or dtype='float32'" if dtype == torch.float64 else ""
        raise InputError(
            f"the direct solve of {rows:,} distinct rows needs {needed / 1e9:.3g} GB and {free / 1e9:.3g} GB are free: "
            f"pass {'centers=2000 (Nystrom centers)' if direct else 'a smaller subset=, such as 2000'}{smaller}"
        )


def wrong_validation(validation: Any) -> InputError:
    """The error for what cannot judge."""
    given = repr(validation) if isinstance(validation, str | int | float) else f"a {type(validation).__name__}"
    return InputError(
        'validation must be "loo", None, a share between 0 and 1, a number of folds, a splitter '
        f"or a tuple (X_val, y_val), got {given}"
    )


def fold_numbers(validation: Any, X: NDArray[Any], y: NDArray[Any], classifier: bool) -> NDArray[np.int64] | None:
    """The fold of each row, from a number of folds or a splitter; None if ``validation`` is neither."""
    if validation is None or isinstance(validation, str | float | tuple):
        return None
    if isinstance(validation, numbers.Integral) and (validation is True or validation is False or validation < 2):
        raise InputError(f"validation needs at least 2 folds, got {validation!r}")
    counted = isinstance(validation, numbers.Integral)
    if counted or hasattr(validation, "split"):
        splitter = check_cv(int(validation) if counted else validation, y, classifier=classifier)
        splits = [left_out for _, left_out in splitter.split(X, y)]
    else:  # splits in a list, as scikit-learn takes them too
        try:
            splits = [np.asarray(left_out, dtype=np.intp) for _, left_out in validation]
        except (TypeError, ValueError) as error:
            raise wrong_validation(validation) from error
    folds = np.full(len(X), -1, dtype=np.int64)
    for number, left_out in enumerate(splits):
        if (folds[left_out] >= 0).any():
            raise InputError("the splitter of validation must leave each row out once: some come twice")
        folds[left_out] = number
    if (folds < 0).any():
        raise InputError("the splitter of validation must leave each row out once: some never are")
    return folds
