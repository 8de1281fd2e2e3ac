"""Losses of a training in constant memory: their level, their start, and sudden jumps."""

from __future__ import annotations

import math
import statistics
from collections import deque
from itertools import pairwise

_RECENT = 32
_LEAST = 8  # losses before a jump can be recognized
REVISED_EVERY = _LEAST
"""Number of losses after which a new level is known."""
_DEVIATIONS = 8.0  # normal losses exceed their median by so many deviations in fewer than one of 10^12 steps
_LEAST_JUMP = math.log(1.5)
_NORMAL = 1.4826  # standard deviation of a normal distribution over its median absolute deviation
_STARTING = 3
NEAR_START = 0.8
"""Share of the initial loss above which a loss counts as near the start."""


class LossHistory:
    """Losses of a training, one per step, in constant memory and a few microseconds per step.

    Attributes:
        count: Number of losses.
        start: Initial loss, the median of the first three; NaN before any.
        lowest: Lowest recent median so far; infinite before eight losses.
        near_start: Number of losses above 0.8 times the initial one.
        finite: Whether the last loss is finite.
        spikes: Number of jumps so far.
        recent: Last 32 finite losses.
    """

    def __init__(self) -> None:
        self.count = self.near_start = self.spikes = 0
        self.start, self.lowest, self.finite = math.nan, math.inf, True
        self.recent: deque[float] = deque(maxlen=_RECENT)
        self._first: list[float] = []

    def add(self, loss: float) -> bool:
        """Add a loss, and return whether it jumps above the recent ones.

        A loss is a jump if its logarithm exceeds the median of the recent ones by eight robust standard deviations
        (from the median absolute deviation) and by a factor of 1.5. Losses that can be negative are compared without
        the logarithm, and must exceed the median by half of its size.

        Args:
            loss: Loss of the present step.
        """
        self.count += 1
        self.finite = math.isfinite(loss)
        if not self.finite:
            return False
        jump = self._is_jump(loss)
        self.spikes += jump
        if len(self._first) < _STARTING:
            self._first.append(loss)
            self.start = statistics.median(self._first)
        self.near_start += self.start > 0 and loss > NEAR_START * self.start
        self.recent.append(loss)
        if self.count % _LEAST == 0:
            self.lowest = min(self.lowest, self.level())
        return jump

    def level(self, last: int = _LEAST) -> float:
        """Return the median of the last losses; NaN before any.

        Args:
            last: Number of losses, at most 32.
        """
        values = list(self.recent)[-last:]
        return statistics.median(values) if values else math.nan

    def roughness(self) -> float:
        """Return the median change from one recent loss to the next, over their median; NaN before eight losses."""
        values = list(self.recent)
        if len(values) < _LEAST:
            return math.nan
        level = statistics.median(values)
        steps = [abs(b - a) for a, b in pairwise(values)]
        return statistics.median(steps) / level if level > 0 else math.nan

    def _is_jump(self, loss: float) -> bool:
        if len(self.recent) < _LEAST:
            return False
        positive = loss > 0 and min(self.recent) > 0
        values = [math.log(value) for value in self.recent] if positive else list(self.recent)
        value = math.log(loss) if positive else loss
        center = statistics.median(values)
        deviation = _NORMAL * statistics.median(abs(v - center) for v in values)
        least = _LEAST_JUMP if positive else 0.5 * abs(center)
        return value - center > max(_DEVIATIONS * deviation, least)
