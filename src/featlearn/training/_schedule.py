"""Schedule of measurements: at equal distances, log-spaced, at given steps, or limited by a time budget."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable
from contextlib import suppress

from featlearn.errors import InputError

Every = int | str | Iterable[int]
_PER_DECADE = 8


def step_rule(every: Every) -> Callable[[int], bool]:
    """Return a function that returns whether to measure at a step.

    Args:
        every: A number k for the steps 0, k, 2k, ...; ``"log"`` for 0 and about eight steps per decade; or a list of
            steps.

    >>> due = step_rule("log")
    >>> [step for step in range(20) if due(step)]
    [0, 1, 2, 3, 4, 6, 7, 10, 13, 18]
    """
    if isinstance(every, str) and every == "log":
        return _is_log_step
    if isinstance(every, int) and not isinstance(every, bool) and every >= 1:
        return lambda step: step % every == 0
    given: set[float] = set()
    with suppress(TypeError, ValueError):  # raises the error below
        given = set() if isinstance(every, int | str) else {float(step) for step in every}
    if not given or not all(step >= 0 and step.is_integer() for step in given):
        raise InputError(
            f'every must be a number of steps of at least 1, "log" or a list of steps from 0 on, got {every!r}.'
        )
    return lambda step: step in given


def _is_log_step(step: int) -> bool:
    if step <= 1:
        return True
    place = round(_PER_DECADE * math.log10(step))
    return any(round(10 ** (near / _PER_DECADE)) == step for near in (place - 1, place, place + 1))


class Budget:
    """Time budget of a monitor, which limits the time of measurements to a share of the training time.

    The first measurement is always made, since its cost is not known in advance. Another one is made as soon as the
    time of all measurements, including the next one, is within the share; the next one is assumed to take as long as
    the longest so far. A training that lasts ``cost / share`` or longer stays within the budget; a shorter one exceeds
    it by its first measurement only.

    Args:
        share: Maximum time of measurements over time of training, such as 0.05 for 5%. None sets no limit.
        clock: Function that returns a time in seconds.

    Example:
        >>> from featlearn.training import Budget
        >>> now = 0.0
        >>> budget = Budget(0.05, clock=lambda: now)
        >>> budget.pay(1.0)  # a measurement of one second
        >>> now = 11.0
        >>> budget.used, budget.allows()  # ten seconds of training
        (0.1, False)
        >>> now = 100.0
        >>> budget.allows()
        True
    """

    def __init__(self, share: float | None, clock: Callable[[], float] = time.perf_counter) -> None:
        if share is not None and not 0 < share < math.inf:
            raise InputError(f"budget must be a share of the training time above 0, such as 0.05, got {share!r}.")
        self.share = share
        self.spent = 0.0
        self._last = self._dearest = 0.0
        self._clock = clock
        self._began = clock()

    def begin(self) -> None:
        """Start the training time now; the time since the budget was created does not count."""
        self._began = self._clock() - self.spent

    @property
    def trained(self) -> float:
        """Training time so far in seconds, without measurements."""
        return self._clock() - self._began - self.spent

    @property
    def used(self) -> float:
        """Time of measurements over time of training."""
        trained = self.trained
        return self.spent / trained if trained > 0 else math.inf if self.spent else 0.0

    def allows(self) -> bool:
        """Return whether one more measurement is within the budget."""
        if self.share is None or not self.spent:
            return True
        return self.spent + self._dearest <= self.share * self.trained

    def pay(self, seconds: float, again: bool = False) -> None:
        """Add the time of a measurement.

        Args:
            seconds: Time in seconds.
            again: Whether the time belongs to the last measurement, for instance that of writing it.
        """
        self.spent += seconds
        self._last = seconds + (self._last if again else 0.0)
        self._dearest = max(self._dearest, self._last)
