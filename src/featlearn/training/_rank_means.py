"""Scalars of a training, averaged over the processes of `torch.distributed`."""

from __future__ import annotations

from typing import Any

import torch

from featlearn.features import in_processes

EVERY = 10
"""Steps after which the processes exchange their scalars."""


class RankMeans:
    """Scalars of recent steps, which are kept until the processes exchange them; a single process keeps none."""

    def __init__(self) -> None:
        self._kept: dict[int, dict[str, float]] = {}

    def add(self, step: int, numbers: dict[str, float]) -> None:
        """Add the scalars of a step on this process."""
        self._kept.setdefault(step, {}).update(numbers)

    def take(self, *, together: bool) -> dict[int, dict[str, float]]:
        """Return the scalars by step, and keep none.

        Args:
            together: Whether to average over the processes that have them, which must all call this.
        """
        kept, self._kept = self._kept, {}
        if not (together and in_processes()):
            return kept
        gathered: list[Any] = [None] * torch.distributed.get_world_size()
        torch.distributed.all_gather_object(gathered, kept)
        values: dict[int, dict[str, list[float]]] = {}
        for of_process in gathered:
            for step, numbers in of_process.items():
                for name, value in numbers.items():
                    values.setdefault(step, {}).setdefault(name, []).append(value)
        return {
            step: {name: sum(several) / len(several) for name, several in values[step].items()}
            for step in sorted(values)
        }
