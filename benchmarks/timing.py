"""Times that can be compared: the candidates take turns, and each counts by its best turn."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from typing import Any


@dataclass(frozen=True)
class Row:
    """One line of the table: how often the reference's time a candidate takes."""

    benchmark: str
    candidate: str
    seconds: float
    reference: str
    ratio: float
    limit: str = ""
    met: bool | None = None

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        return asdict(self)


def best_times(candidates: Mapping[str, Callable[[], object]], turns: int = 5) -> dict[str, float]:
    """Seconds of each candidate's fastest turn.

    The machine is shared: taking turns spreads a slow minute over all candidates, and the minimum is the
    statistic that noise, which only ever adds, disturbs least.
    """
    best = dict.fromkeys(candidates, float("inf"))
    for turn in range(turns + 1):
        for name, run in candidates.items():
            gc.collect()
            began = time.perf_counter()
            run()
            if turn:  # the first turn warms up
                best[name] = min(best[name], time.perf_counter() - began)
    return best
