"""At which steps a monitor measures: every so many, at log-spaced ones, at chosen ones, or as a time budget allows."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable
from typing import Any

from featlearn.errors import InputError

Every = int | str | Iterable[int]
_PER_DECADE = 8


def step_rule(every: Every) -> Callable[[int], bool]:
    """Whether a step is one to measure at.

    Args:
        every: A number k for the steps 0, k, 2k, ...; ``"log"`` for 0 and about eight steps a decade; or the steps
            themselves.

    >>> due = step_rule("log")
    >>> [step for step in range(20) if due(step)]
    [0, 1, 2, 3, 4, 6, 7, 10, 13, 18]
    """
    if isinstance(every, str):
        if every != "log":
            raise InputError(f'every must be a number of steps, "log" or a list of steps, got {every!r}')
        return _is_log_step
    if isinstance(every, bool):
        raise InputError(f'every must be a number of steps, "log" or a list of steps, got {every!r}')
    if isinstance(every, int):
        if every < 1:
            raise InputError(f"every must be at least 1 step, got {every}")
        return lambda step: step % every == 0
    steps = _as_steps(every)
    return lambda step: step in steps


def _as_steps(every: Any) -> frozenset[int]:
    try:
        given = {float(step) for step in every}
        steps = frozenset(int(step) for step in given if step == int(step) and step >= 0)
    except (TypeError, ValueError):
        raise InputError(f'every must be a number of steps, "log" or a list of steps, got {every!r}') from None
    if not steps or len(steps) != len(given):
        raise InputError(f"steps to measure at must be whole numbers from 0 on, at least one, got {every!r}")
    return steps


def _is_log_step(step: int) -> bool:
    if step <= 1:
        return True
    place = round(_PER_DECADE * math.log10(step))
    return any(round(10 ** (near / _PER_DECADE)) == step for near in (place - 1, place, place + 1))


class Budget:
    """Keeps what measuring costs under a share of the time spent training.

    The first measurement is always made: nothing is known of its cost, and everything later is compared with it. After
    that one is made as soon as it, and those before it, together take no more than the share, judged by the dearest
    so far. So a training that lasts ``cost / share`` or longer keeps the budget; a shorter one pays for the first only.

    Args:
        share: Of the training time, 0.05 for 5%; None measures whenever asked.
        clock: Seconds, rising; for tests.
    """

    def __init__(self, share: float | None, clock: Callable[[], float] = time.perf_counter) -> None:
        if share is not None and not 0 < share < math.inf:
            raise InputError(f"budget must be a share of the training time above 0, such as 0.05, got {share!r}")
        self.share = share
        self.spent = 0.0
        self._last = self._dearest = 0.0
        self._clock = clock
        self._began = clock()

    def begin(self) -> None:
        """Training begins now: what was done since the budget was made is no part of it."""
        self._began = self._clock() - self.spent

    @property
    def trained(self) -> float:
        """Seconds since the start that went into training."""
        return self._clock() - self._began - self.spent

    @property
    def used(self) -> float:
        """Time spent measuring over time spent training."""
        trained = self.trained
        return self.spent / trained if trained > 0 else math.inf if self.spent else 0.0

    def allows(self) -> bool:
        """Whether one more measurement is within the budget."""
        if self.share is None or not self.spent:
            return True
        return self.spent + self._dearest <= self.share * self.trained

    def pay(self, seconds: float, again: bool = False) -> None:
        """Tell what a measurement took.

        Args:
            seconds: Time.
            again: Whether it is more of the last one: numbers are written after they are measured.
        """
        self.spent += seconds
        self._last = seconds + (self._last if again else 0.0)
        self._dearest = max(self._dearest, self._last)
