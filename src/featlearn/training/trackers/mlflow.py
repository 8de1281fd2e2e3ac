"""Numbers for MLflow."""

from __future__ import annotations

import re
import time
from collections.abc import Mapping

from featlearn.training.trackers.extras import needed

__all__ = ["MLflowTracker"]

_BATCH = 1000  # what a server takes in one request


class MLflowTracker:
    """Writes metrics to a run of MLflow: a local SQLite or file store, or a server.

    Through a client of its own: the global state of ``mlflow``, its active run and address, is left alone.

    Args:
        uri: Of the store, ``"sqlite:///mlflow.db"``; None takes MLflow's own choice.
        experiment: Name of the experiment, made if it is not there.
        run_name: Of a new run.
        run_id: Of a run that goes on, instead.
    """

    def __init__(
        self,
        uri: str | None = None,
        experiment: str = "featlearn",
        run_name: str | None = None,
        run_id: str | None = None,
    ) -> None:
        mlflow = needed("mlflow", "tracking")
        self._metric = mlflow.entities.Metric
        self._client = mlflow.MlflowClient(tracking_uri=uri)
        if run_id is None:
            found = self._client.get_experiment_by_name(experiment)
            number = self._client.create_experiment(experiment) if found is None else found.experiment_id
            run_id = self._client.create_run(number, run_name=run_name).info.run_id
        self.run_id: str = str(run_id)

    def log(self, step: int, values: Mapping[str, float]) -> None:
        """Take numbers of a step; characters that MLflow does not allow in names become underscores."""
        now = int(time.time() * 1000)
        metrics = [self._metric(_allowed(name), value, now, step) for name, value in values.items()]
        for first in range(0, len(metrics), _BATCH):
            self._client.log_batch(self.run_id, metrics=metrics[first : first + _BATCH])

    def close(self) -> None:
        """Mark the run as finished."""
        self._client.set_terminated(self.run_id)


def _allowed(name: str) -> str:
    return re.sub(r"[^\w\-. /]", "_", name)
