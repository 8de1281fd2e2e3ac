"""Trackers for TensorBoard, MLflow and Weights & Biases, whose packages are imported on first use."""

from __future__ import annotations

import importlib
import os
import re
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

from featlearn.errors import MissingPackageError


def needed(module: str, extra: str) -> Any:
    """Import a module of an optional package.

    Args:
        module: Name of the module.
        extra: Extra of featlearn that installs it.

    Returns:
        The module.

    Raises:
        MissingPackageError: If it cannot be imported.
    """
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise MissingPackageError(
            f"{module} cannot be imported ({error}). Install it with pip install 'featlearn[{extra}]'."
        ) from error


_BATCH = 1000  # maximum number of metrics per request


class MLflowTracker:
    """Tracker that writes metrics to a run of MLflow in a local SQLite or file store, or on a server.

    It uses a separate client: the global state of ``mlflow``, its active run and address, does not change.

    Args:
        uri: Address of the store, such as ``"sqlite:///mlflow.db"``. None uses MLflow's default.
        experiment: Name of the experiment, which is created if it does not exist.
        run_name: Name of a new run. None lets MLflow choose one.
        run_id: Identifier of a run to continue. None creates a new run.
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
            old = self._client.get_experiment_by_name(experiment)
            number = self._client.create_experiment(experiment) if old is None else old.experiment_id
            run_id = self._client.create_run(number, run_name=run_name).info.run_id
        self.run_id: str = str(run_id)

    def log(self, step: int, values: Mapping[str, float]) -> None:
        """Log metrics of a step. Characters that MLflow does not allow in names become underscores.

        Args:
            step: Number of the step.
            values: Metrics by name.
        """
        now = int(time.time() * 1000)
        allowed = [(re.sub(r"[^\w\-. /]", "_", name), value) for name, value in values.items()]
        metrics = [self._metric(name, value, now, step) for name, value in allowed]
        for first in range(0, len(metrics), _BATCH):
            self._client.log_batch(self.run_id, metrics=metrics[first : first + _BATCH])

    def close(self) -> None:
        """Mark the run as finished."""
        self._client.set_terminated(self.run_id)


class TensorBoardTracker:
    """Tracker that writes scalars to an event file, shown by ``tensorboard --logdir folder``.

    Args:
        folder: Folder of the event file.
    """

    def __init__(self, folder: str | os.PathLike[str]) -> None:
        needed("tensorboard", "tracking")
        self._writer = needed("torch.utils.tensorboard", "tracking").SummaryWriter(str(Path(folder)))

    def log(self, step: int, values: Mapping[str, float]) -> None:
        """Log metrics of a step.

        Args:
            step: Number of the step.
            values: Metrics by name.
        """
        for name, value in values.items():
            self._writer.add_scalar(name, value, step)

    def close(self) -> None:
        """Write pending metrics and close the event file."""
        self._writer.close()


@runtime_checkable
class Tracker(Protocol):
    """Protocol of receivers of metrics: TensorBoard, MLflow, Weights & Biases, or any class with these methods."""

    def log(self, step: int, values: Mapping[str, float]) -> None:
        """Log metrics of a step.

        Args:
            step: Number of the step.
            values: Metrics by name. The name of a layer is a prefix, as in ``net.0/nfc``.
        """

    def close(self) -> None:
        """Write pending metrics and close files."""


class WandbTracker:
    """Tracker that writes metrics to a run of Weights & Biases, offline by default.

    Args:
        project: Name of the project.
        folder: Folder of the run's files. None uses the default of ``wandb``.
        mode: ``"offline"`` sends nothing (``wandb sync`` can send the files later), ``"online"`` sends metrics.
        options: Options of ``wandb.init``, such as ``name`` or ``config``.
    """

    def __init__(
        self,
        project: str = "featlearn",
        folder: str | os.PathLike[str] | None = None,
        mode: str = "offline",
        **options: Any,
    ) -> None:
        wandb = needed("wandb", "tracking")
        self._run = wandb.init(
            project=project, dir=None if folder is None else str(folder), mode=mode, reinit="create_new", **options
        )
        # Metrics of a step are logged in several calls, and the counter of W&B only increases.
        self._run.define_metric("step", hidden=True)
        self._run.define_metric("*", step_metric="step")

    @property
    def folder(self) -> str:
        """Folder of the run's files."""
        return str(self._run.dir)

    def log(self, step: int, values: Mapping[str, float]) -> None:
        """Log metrics of a step.

        Args:
            step: Number of the step.
            values: Metrics by name.
        """
        self._run.log({**values, "step": step})

    def close(self) -> None:
        """Write pending metrics and finish the run."""
        self._run.finish()
