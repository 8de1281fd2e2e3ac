"""Feature machines as runs, so that what shows a training shows a fit too."""

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
    """Settings of a run that holds a fit.

    ``kind`` is ``"rfm"``; ``features`` are the names of the machine's features in the order of its matrix, ``target``
    is what it predicts, ``task`` ``"classification"`` or ``"regression"``; then come the machine's own parameters.

    Args:
        machine: The estimator, fitted or not.
        features: Names of its features.
        target: Name of what it predicts.
        settings: Further ones, such as the file of the table.
    """
    own = {
        k: v for k, v in machine.get_params(deep=False).items() if v is None or isinstance(v, bool | int | float | str)
    }
    task = "classification" if isinstance(machine, RFMClassifier) else "regression"
    return {"kind": "rfm", "features": list(features), "target": target, "task": task, **own, **(settings or {})}


def log_machine(run: Run, machine: Machine, features: Sequence[str]) -> None:
    """Write the history, the importances and the feature matrix of a fitted machine to a run.

    A step is an iteration. Its numbers are those of ``machine.history_``, logged for the run itself. At the iteration
    that was kept there are further ``"importance"``, with the feature's name as its layer, and the matrix
    ``"feature_matrix"``.

    Args:
        run: Open for writing; made with `machine_config`.
        machine: Fitted.
        features: A name a feature, in the order of the matrix.
    """
    needed, names = len(machine.feature_importances_), len(set(features))
    if not len(features) == names == needed:
        raise InputError(f"each of the {needed} features needs a name of its own, got {names}")
    for line in machine.history_.reset_index().to_dict(orient="records"):
        step = int(line.pop("iteration"))
        run.log(step, {str(name): float(value) for name, value in line.items()})
    kept = int(machine.best_iteration_)
    shares = machine.feature_importances_.tolist()
    run.log_layers(
        kept, {name or "(no name)": {"importance": share} for name, share in zip(features, shares, strict=True)}
    )
    run.save_matrices(kept, {"feature_matrix": torch.from_numpy(machine.feature_matrix_.copy())})
