"""What a monitor asks of a tracker."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol, runtime_checkable

__all__ = ["Tracker"]


@runtime_checkable
class Tracker(Protocol):
    """Somewhere that numbers go, step by step: TensorBoard, MLflow, Weights & Biases, or anything of yours."""

    def log(self, step: int, values: Mapping[str, float]) -> None:
        """Take numbers of a step; names of layers come first, ``net.0/nfc``."""

    def close(self) -> None:
        """Write what is left and let go of files."""
