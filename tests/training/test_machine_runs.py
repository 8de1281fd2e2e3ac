"""A fit of a feature machine, written as a run."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from sklearn.datasets import load_wine

from featlearn import RFMClassifier, make_tabular
from featlearn.errors import InputError
from featlearn.runs import Run
from featlearn.training.rfm_run import log_machine, machine_config


def test_history_importances_and_matrix_are_in_the_run(tmp_path: Path) -> None:
    X, y = load_wine(return_X_y=True, as_frame=True)
    machine = make_tabular(RFMClassifier(n_iter=2)).fit(X[::2], y[::2])["estimator"]
    names = machine.feature_names()
    with Run.create(tmp_path / "run", machine_config(machine, names, "cultivar", {"table": "wine.csv"})) as run:
        log_machine(run, machine, names)
        with pytest.raises(InputError, match=r"features must be 13 unique names, .*got 12"):
            log_machine(run, machine, names[:-1])
    assert run.config["kind"] == "rfm"
    assert (run.config["features"], run.config["target"], run.config["task"]) == (names, "cultivar", "classification")
    assert (run.config["update"], run.config["table"]) == ("fact", "wine.csv")
    assert run.series("error").to_list() == machine.history_["error"].to_list()
    kept = machine.best_iteration_
    rows = run.metrics("importance")
    assert set(rows["step"]) == {kept}
    assert dict(zip(rows["layer"], rows["value"], strict=True)) == dict(
        zip(names, machine.feature_importances_, strict=True)
    )
    assert run.matrix_steps() == [kept]
    np.testing.assert_array_equal(run.matrices(kept)["feature_matrix"].numpy(), machine.feature_matrix_)
