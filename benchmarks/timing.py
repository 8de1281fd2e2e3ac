"""Times that can be compared: the candidates take turns, and each counts by its best turn."""

from __future__ import annotations

import gc
import statistics
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


def limited(
    benchmark: str, candidate: str, seconds: float, reference: str, base: float, limit: float | None = None
) -> Row:
    """A line of the table; a limit is at most so many times the reference, a negative one at least."""
    ratio = seconds / base
    if limit is None:
        return Row(benchmark, candidate, seconds, reference, ratio)
    met = ratio <= limit if limit > 0 else ratio >= -limit
    return Row(benchmark, candidate, seconds, reference, ratio, f"{'<=' if limit > 0 else '>='} {abs(limit):g}", met)


def best_times(candidates: Mapping[str, Callable[[], object]], turns: int = 5) -> dict[str, float]:
    """Seconds of each candidate's fastest turn.

    The machine is shared: taking turns spreads a slow minute over all candidates, and the minimum is the
    statistic that noise, which only ever adds, disturbs least.
    """
    return {name: min(times) for name, times in _all_times(candidates, turns).items()}


def median_times(candidates: Mapping[str, Callable[[], object]], turns: int = 5) -> dict[str, float]:
    """Seconds of each candidate's middle turn."""
    return {name: statistics.median(times) for name, times in _all_times(candidates, turns).items()}


def _all_times(candidates: Mapping[str, Callable[[], object]], turns: int) -> dict[str, list[float]]:
    times: dict[str, list[float]] = {name: [] for name in candidates}
    for turn in range(turns + 1):
        for name, run in candidates.items():
            gc.collect()
            began = time.perf_counter()
            run()
            if turn:  # the first turn warms up
                times[name].append(time.perf_counter() - began)
    return times
