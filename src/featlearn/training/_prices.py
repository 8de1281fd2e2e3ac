"""Prices of the parts of a measurement in seconds: guessed from operations, corrected by measurements."""

from __future__ import annotations

import statistics
import time
from collections import deque
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import nn

from featlearn.capture import ModelSession, Sizes
from featlearn.errors import FeatlearnError
from featlearn.training._probe_data import ProbeRows, first_of

_GROWTH = 2  # doublings of the rows from one measurement to the next, since prices are extrapolated
FREE = 1.25
"""A larger size is taken anyway if it takes at most this factor longer than the smallest one."""
_TIMED_ROWS = 16
_FEW_ROWS = 2


class Passes(NamedTuple):
    """Time of a forward and backward pass, which is linear in the number of rows.

    Attributes:
        seconds: Time of a pass without rows, in seconds.
        per_row: Time per row, in seconds.
        whole: Whether the model takes whole batches only.
    """

    seconds: float
    per_row: float
    whole: bool = False

    def of(self, rows: int) -> float:
        """Return the time of a pass in seconds."""
        return self.seconds + rows * self.per_row


def time_passes(model: nn.Module, rows: ProbeRows, sizes: Sizes, memory: int, forward: Any) -> Passes:
    """Time forward and backward passes of two and of sixteen rows, or of a batch if the model takes no fewer.

    Args:
        model: Model to measure.
        rows: Rows to measure on.
        sizes: Sizes of one sample.
        memory: Maximum memory in bytes.
        forward: Forward function, as in `featlearn.probe`.
    """
    session = ModelSession(model, forward=forward, train_mode="eval", operations=True)
    many = max(_FEW_ROWS, min(_TIMED_ROWS, rows.samples, int(memory / (2 * sizes.graph))))
    few = min(_FEW_ROWS, rows.samples)

    def timed(raw: Any) -> float:
        batch, began = session.batch(raw), time.perf_counter()
        trace = session.trace(batch)
        trace.gradients(trace.output, torch.ones_like(trace.output))
        return time.perf_counter() - began

    with session.open():
        try:
            # The first pass loads libraries and allocates memory.
            _, small, large = (timed(first_of(rows.batches, n, n)[0]) for n in (few, few, many))
        except FeatlearnError:
            raise
        except Exception:  # a model that takes whole batches only
            taken = rows.batches[0]
            timed(taken)
            return Passes(0.0, timed(taken) / max(1, session.batch(taken).size or 1), whole=True)
    per_row = max(large - small, 0.0) / max(many - few, 1)
    return Passes(max(small - few * per_row, 0.0), per_row)


class Level(NamedTuple):
    """Size of a part.

    Attributes:
        outputs: Outputs of the probe or of the tangent kernel: "exact", "auto" or a number of random vectors.
        rows: Number of rows.
        both: Whether gradients of the initial model are taken too, for the double-centered quantities.
    """

    outputs: str | int
    rows: int
    both: bool = True


class Price:
    """Estimate of the time of a part: proportional to a first guess, by a factor learned from measurements.

    The factor is the median of the last three, so that one measurement which the system delayed does not count; the
    lower one of two, since the first measurement of a size also makes searches and checks.

    Args:
        guess: Time in seconds by size, from operations.
        caution: Factor before the first measurement.
    """

    def __init__(self, guess: Mapping[Level, float], caution: float = 1.0) -> None:
        self.guess, self._caution = guess, caution
        self._factors: deque[float] = deque(maxlen=3)

    def of(self, level: Level) -> float:
        """Return the time of a size in seconds."""
        return self.guess[level] * (statistics.median_low(self._factors) if self._factors else self._caution)

    def learn(self, level: Level, seconds: float) -> None:
        """Correct the estimate by the time that a measurement took, in seconds."""
        self._factors.append(seconds / self.guess[level])


@dataclass
class Part:
    """Part of a measurement in sizes from the smallest to the largest.

    Attributes:
        levels: The sizes.
        price: Time by size.
        at: Index of the size of the last measurement; -1 before the first.
        started: Size in which the initial model is measured; it is measured again for another size. Not used for
            features, of which both models are measured each time.
    """

    levels: list[Level]
    price: Price
    at: int = -1
    started: Level | None = None

    def cost(self, index: int, initial: bool) -> float:
        """Return the time of a size, with the initial model if it is not measured in this size yet."""
        again = initial and self.levels[index] != self.started
        return self.price.of(self.levels[index]) * (2.0 if again else 1.0)

    def largest(self, allowed: float, limit: float, initial: bool) -> int | None:
        """Return the index of the largest size within the time, None if there is none.

        Args:
            allowed: Time that the part should take. The smallest size may take more.
            limit: Time that it may take at most.
            initial: Whether the part measures the initial model once per size.
        """
        if not self.cost(0, initial) <= limit:
            return None
        allowed = min(limit, max(allowed, FREE * self.cost(0, initial)))
        top = len(self.levels) - 1 if self.at < 0 else min(self.at + _GROWTH, len(self.levels) - 1)
        return next((i for i in range(top, 0, -1) if self.cost(i, initial) <= allowed), 0)


class Turns:
    """Work that layers take turns in: those whose turn was longest ago are next.

    Args:
        guess: Time in seconds by layer name, from operations.
        fixed: Time without any layer, in seconds.
        at_first: Factor of the time of a layer's first turn, such as 2 if the initial model is measured too.
        caution: Factor of the time of a layer that had no turn yet, beyond ``at_first``.
    """

    def __init__(self, guess: Mapping[str, float], fixed: float, at_first: float = 1.0, caution: float = 1.0) -> None:
        self._guess, self._fixed = guess, fixed
        self._at_first, self._caution = at_first, caution
        self._factors: deque[float] = deque(maxlen=3)
        self._turns: dict[str, int] = {}
        self._count = 0

    @property
    def names(self) -> Collection[str]:
        """Names of the layers."""
        return self._guess.keys()

    def cost(self, names: Collection[str]) -> float:
        """Return the time of some layers in seconds."""
        factor = statistics.median_low(self._factors) if self._factors else 1.0
        cautious = sum(self._first_guess(name) * (1.0 if name in self._turns else self._caution) for name in names)
        return self._fixed + factor * cautious

    def affordable(self, limit: float) -> list[str]:
        """Return the layers that are next, as many as fit into a time in seconds."""
        order = sorted(self._guess, key=lambda name: (self._turns.get(name, -1), self._guess[name]))
        chosen: list[str] = []
        for name in order:
            if self.cost([*chosen, name]) > limit:
                break
            chosen.append(name)
        return chosen

    def next_cost(self) -> float:
        """Return the time of the layer that is next."""
        name = min(self._guess, key=lambda name: (self._turns.get(name, -1), self._guess[name]), default=None)
        return self._fixed if name is None else self.cost([name])

    def learn(self, names: Collection[str], seconds: float, turn: bool = True) -> None:
        """Correct the guess by the time that some layers took.

        Args:
            names: Names of the layers.
            seconds: Their time in seconds.
            turn: Whether it was their turn.
        """
        if not names:
            return
        guess = self._fixed + sum(map(self._first_guess, names))
        self._factors.append(seconds / guess)
        if turn:
            self._count += 1
            self._turns |= dict.fromkeys(names, self._count)

    def _first_guess(self, name: str) -> float:
        return self._guess[name] * (1.0 if name in self._turns else self._at_first)
