"""Runs of recursive feature machines, so that the dashboard shows a fit like a training."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from featlearn.errors import InputError
from featlearn.rfm import RFMClassifier, RFMRegressor
from featlearn.runs import Run

Machine = RFMRegressor | RFMClassifier


def machine_config(
    machine: Machine, features: Sequence[str], target: str, settings: Mapping[str, Any] | None = None
) -> dict[str, Any]:
    """Return the config of a run that holds a fit.

    Args:
        machine: Estimator, fitted or not.
        features: Names of its features, in the order of its feature matrix.
        target: Name of the predicted column.
        settings: Further settings, such as the file of the table. None adds none.

    Returns:
        Config with ``kind`` (``"rfm"``), ``features``, ``target``, ``task`` (``"classification"`` or ``"regression"``),
        the parameters of the estimator, and the further settings.

    Example:
        >>> import featlearn as fl
        >>> from featlearn.training.rfm_run import machine_config
        >>> config = machine_config(fl.RFMRegressor(n_iter=3), ["age", "color"], "price", {"file": "cars.csv"})
        >>> [config[name] for name in ("kind", "task", "target", "n_iter", "file")]
        ['rfm', 'regression', 'price', 3, 'cars.csv']
    """
    parameters = machine.get_params(deep=False).items()
    plain = {name: value for name, value in parameters if value is None or isinstance(value, bool | int | float | str)}
    task = "classification" if isinstance(machine, RFMClassifier) else "regression"
    return {"kind": "rfm", "features": list(features), "target": target, "task": task, **plain, **(settings or {})}


def log_machine(run: Run, machine: Machine, features: Sequence[str]) -> None:
    """Log the history, the importances and the feature matrix of a fitted estimator to a run.

    Each iteration is a step, whose metrics are those of ``machine.history_``. The selected iteration also has the
    metric ``"importance"`` of each feature, with the name of the feature as layer, and the matrix ``"feature_matrix"``.

    Args:
        run: Run that is open for writing, created with `machine_config`.
        machine: Fitted estimator.
        features: Names of the features, in the order of the feature matrix. Each name must be unique.

    Raises:
        InputError: If there is not one unique name per feature.

    Example:
        >>> import tempfile, numpy as np, featlearn as fl
        >>> from featlearn.runs import Run
        >>> from featlearn.training.rfm_run import log_machine, machine_config
        >>> X = np.random.default_rng(0).standard_normal((100, 2))
        >>> machine, names = fl.RFMRegressor(n_iter=2).fit(X, X[:, 0]), ["age", "color"]
        >>> with Run.create(f"{tempfile.mkdtemp()}/fit", machine_config(machine, names, "price")) as run:
        ...     log_machine(run, machine, names)
        ...     print(run.series("importance", "age").round(2).to_dict())
        {2: 0.84}
    """
    needed, names = len(machine.feature_importances_), len(set(features))
    if not len(features) == names == needed:
        raise InputError(f"features must be {needed} unique names, one per feature, got {names}.")
    for line in machine.history_.reset_index().to_dict(orient="records"):
        step = int(line.pop("iteration"))
        run.log(step, {str(name): float(value) for name, value in line.items()})
    selected = int(machine.best_iteration_)
    shares = zip(features, machine.feature_importances_.tolist(), strict=True)
    run.log_layers(selected, {name or "(no name)": {"importance": share} for name, share in shares})
    run.save_matrices(selected, {"feature_matrix": torch.from_numpy(machine.feature_matrix_.copy())})
