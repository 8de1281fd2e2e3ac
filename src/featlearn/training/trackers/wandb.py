"""Numbers for Weights & Biases."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

from featlearn.training.trackers.extras import needed

__all__ = ["WandbTracker"]


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
