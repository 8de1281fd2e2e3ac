"""Trackers for TensorBoard, MLflow and Weights & Biases, whose packages are imported when they are used."""

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
        module: Its name.
        extra: The extra of featlearn that installs it.
    """
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise MissingPackageError(
            f"{module} cannot be imported ({error}): install it with pip install 'featlearn[{extra}]'"
        ) from error


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


class TensorBoardTracker:
    """Writes scalars to an event file, which ``tensorboard --logdir folder`` shows.

    Args:
        folder: Where the event file goes.
    """

    def __init__(self, folder: str | os.PathLike[str]) -> None:
        needed("tensorboard", "tracking")
        self._writer = needed("torch.utils.tensorboard", "tracking").SummaryWriter(str(Path(folder)))

    def log(self, step: int, values: Mapping[str, float]) -> None:
        """Take numbers of a step."""
        for name, value in values.items():
            self._writer.add_scalar(name, value, step)

    def close(self) -> None:
        """Write what is left."""
        self._writer.close()


@runtime_checkable
class Tracker(Protocol):
    """Somewhere that numbers go, step by step: TensorBoard, MLflow, Weights & Biases, or anything of yours."""

    def log(self, step: int, values: Mapping[str, float]) -> None:
        """Take numbers of a step; names of layers come first, ``net.0/nfc``."""

    def close(self) -> None:
        """Write what is left and let go of files."""


class WandbTracker:
    """Writes metrics to a run of Weights & Biases; offline, unless told otherwise.

    Args:
        project: Name of the project.
        folder: Where the run's files go.
        mode: ``"offline"`` sends nothing (``wandb sync`` does, later), ``"online"`` does.
        options: Of ``wandb.init``, such as ``name`` or ``config``.
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
        # Numbers of a step come in several calls, and W&B's own counter refuses to go back.
        self._run.define_metric("step", hidden=True)
        self._run.define_metric("*", step_metric="step")

    @property
    def folder(self) -> str:
        """Where the run's files are."""
        return str(self._run.dir)

    def log(self, step: int, values: Mapping[str, float]) -> None:
        """Take numbers of a step."""
        self._run.log({**values, "step": step})

    def close(self) -> None:
        """Write what is left and end the run."""
        self._run.finish()
