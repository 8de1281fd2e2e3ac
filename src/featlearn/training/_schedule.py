"""Schedule of measurements: at equal distances, log-spaced, at given steps, or limited by a time budget."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from typing import Literal

from featlearn.errors import InputError
from featlearn.features import in_processes
from featlearn.training._plan import MeasurementPlan
from featlearn.training._sizing import Sizing

Every = int | str | Iterable[int]
_PER_DECADE = 8
_DEFAULT_SHARE = 0.05
_CATCH_UP = 10  # steps between decisions about a measurement that is late, if processes must agree on them
_KEPT = 0.08  # share of the budget that is kept for the measurement at the end
_BESIDES = 0.4  # largest share of the budget that other times than those of measurements count for
_LEAST = 1.3  # time of a small measurement over the smallest one


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

    Args:
        share: Maximum time of measurements over time of training, such as 0.05 for 5%. None sets no limit.
        clock: Function that returns a time in seconds.

    Example:
        >>> from featlearn.training import Budget
        >>> now = 0.0
        >>> budget = Budget(0.05, clock=lambda: now)
        >>> budget.pay(1.0)  # a measurement of one second
        >>> now = 11.0
        >>> budget.used, budget.available  # ten seconds of training
        (0.1, -0.5)
        >>> now = 101.0
        >>> budget.available
        4.0
    """

    def __init__(self, share: float | None, clock: Callable[[], float] = time.perf_counter) -> None:
        if share is not None and (isinstance(share, bool) or not 0 < share < math.inf):
            raise InputError(f"budget must be a share of the training time above 0, such as 0.05, got {share!r}.")
        self.share = share
        self.spent = 0.0
        self._clock = clock
        self._began = clock()
        self._until = 0.0  # training time at the last measurement

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

    @property
    def available(self) -> float:
        """Time that measurements may take now, in seconds; negative if too much was spent."""
        return math.inf if self.share is None else self.share * self.trained - self.spent

    @property
    def income(self) -> float:
        """Time that became available since the last measurement, in seconds."""
        return math.inf if self.share is None else self.share * max(self.trained - self._until, 0.0)

    def pay(self, seconds: float) -> None:
        """Add the time of a measurement, or of writing it.

        Args:
            seconds: Time in seconds.
        """
        self.spent += seconds
        self._until = self.trained


class Schedule:
    """Steps and sizes of the measurements of a monitor.

    A step that ``every="log"`` asks for is measured later if the budget does not allow it yet.

    Args:
        every: Steps to measure at, as in `featlearn.Monitor`.
        budget: Share of the training time, as in `featlearn.Monitor`.

    Attributes:
        budget: Budget of time.
        due: Function that returns whether a step is one to measure at.
    """

    def __init__(self, every: Every, budget: float | str | None) -> None:
        self.due = step_rule(every)
        auto = isinstance(budget, str)
        if auto and budget != "auto":
            raise InputError(f'budget must be a share of the training time, "auto" or None, got {budget!r}.')
        self.budget = Budget(_DEFAULT_SHARE if isinstance(budget, str) else budget)
        self._log = isinstance(every, str)
        self._honored = auto and not self._log
        self._late = False
        self._writing = 0.0

    def asks(self, step: int) -> bool:
        """Return whether to decide about a measurement at a step; all processes give the same answer."""
        if self.due(step):
            self._late = self._log
            return True
        return self._late and (not in_processes() or step % _CATCH_UP == 0)

    def choose(
        self, sizing: Sizing | None, last: bool, besides: float = 0.0
    ) -> MeasurementPlan | Literal["all"] | None:
        """Return the size of a measurement now, "all" for the largest one, None for no measurement.

        Args:
            sizing: Sizes and their times; None if the model could not be run before the first measurement.
            last: Whether the training has ended.
            besides: Time that the monitor takes beside the measurements, in seconds: of preparing them, and of signals.
                It counts as far as it leaves most of the budget to measurements.
        """
        budget = self.budget
        if sizing is None:
            return "all" if not budget.spent or budget.available > 0 else None
        if not budget.spent and not last:
            return sizing.first(complete=self._honored)
        counted = min(besides, _BESIDES * (budget.share or 0.0) * max(budget.trained, 0.0))
        available, income = budget.available - self._writing - counted, budget.income
        if self._honored:
            return sizing.fitted(max(available, 0.0), income, complete=True)
        if last:  # in any case: a small measurement is short for trainings that are long enough to be limited
            return sizing.fitted(max(available, _LEAST * sizing.least), income)
        available -= _KEPT * (budget.share or 0.0) * budget.trained
        return sizing.fitted(available, income) if available >= sizing.least else None

    def measured(self, writing: float) -> None:
        """Take note of a measurement.

        Args:
            writing: Time of writing it, in seconds.
        """
        self.budget.pay(writing)
        self._writing, self._late = writing, False
