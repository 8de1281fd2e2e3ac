"""Numbers for TensorBoard."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

from featlearn.training.trackers.extras import needed

__all__ = ["TensorBoardTracker"]


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
