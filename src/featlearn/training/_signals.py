"""Cheap signals of a training: gradients, updates and units of each layer, within a share of the training time."""

from __future__ import annotations

import math
import statistics
import time
import warnings
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from featlearn.capture import Forward, ModelSession, map_tensors
from featlearn.errors import FeatlearnError
from featlearn.layers import Layer, unwrap
from featlearn.training._activation_signals import ActivationLook, UnitSignals, look_at_activations
from featlearn.training._probe_data import ProbeRows, first_of
from featlearn.training._weight_signals import Updates, WeightSignals

SHARE = 0.01
"""Largest share of the training time for looks between the steps of the schedule."""
_SCHEDULED = 0.03  # share of all looks at the steps of the schedule, which may take some seconds more
FREE_SECONDS = 0.2
"""Seconds that looks at the steps of the schedule may take in any case."""
_ROWS = 64
_ENTRIES = 1 << 20  # of the inputs of one forward pass
_FAILURES = 3  # forward passes that may fail
_FREE = 2  # looks before the cost is known
_USUAL = 5  # looks whose median is the cost of the next one
SOON = 4
"""Calls after which a look is repeated."""

Layers = Callable[[], tuple[dict[str, Layer], dict[str, Layer]]]
"""Function that returns the layers of the model and of the initial model, by name."""


@dataclass
class Look:
    """Signals at one step.

    Attributes:
        step: Training step.
        call: Number of the step among those of this monitor, from 0.
        gradients: Norm of the last gradient of each layer.
        gradient_norm: Norm of the last gradient of the whole model; NaN if unknown.
        updates: Last updates of each layer.
        units: Units of each layer, in the order of their calls.
        outputs: Names of the layers whose outputs are those of the model.
        frozen: Names of the layers whose parameters do not require gradients.
        finite: Whether all weights are finite.
        precision: Names of the layers with weights of less than 32 bits.
    """

    step: int
    call: int
    gradients: dict[str, float] = field(default_factory=dict)
    gradient_norm: float = math.nan
    updates: dict[str, Updates] = field(default_factory=dict)
    units: dict[str, UnitSignals] = field(default_factory=dict)
    outputs: frozenset[str] = frozenset()
    frozen: frozenset[str] = frozenset()
    finite: bool = True
    precision: frozenset[str] = frozenset()

    @property
    def median_ratio(self) -> float:
        """Return the median update ratio of the layers; NaN if unknown."""
        ratios = [update.ratio for update in self.updates.values() if math.isfinite(update.ratio)]
        return statistics.median(ratios) if ratios else math.nan

    def table(self) -> dict[str | None, dict[str, float]]:
        """Return the finite signals as metrics, by layer; None is the model."""
        table: dict[str | None, dict[str, float]] = {None: {"signal.gradient_norm": self.gradient_norm}}
        for name, norm in self.gradients.items():
            table.setdefault(name, {})["signal.gradient_norm"] = norm
        for name, update in self.updates.items():
            numbers = {"signal.update_ratio": update.ratio, "signal.update_cosine": update.cosine}
            table.setdefault(name, {}).update(numbers)
        for name, units in self.units.items():
            numbers = table.setdefault(name, {})
            numbers |= {"signal.activation_scale": units.scale, "signal.activation_rank": units.rank}
            if units.dead is not None:
                numbers["signal.dead_share"] = units.dead / units.units
            if units.saturated is not None:
                numbers["signal.saturated_share"] = units.saturated / units.units
        finite = {name: {k: v for k, v in of.items() if math.isfinite(v)} for name, of in table.items()}
        return {name: of for name, of in finite.items() if of}


class Signals:
    """Signals of a training, taken at some of its steps so that they cost at most 1% of its time.

    A look needs the step before it, whose weights are kept in part, and whose backward pass is watched if no gradients
    are left at the calls. The first two looks are made in any case; later ones as soon as their time is within `SHARE`
    of the training time. Looks at the steps of the schedule, which are usually log-spaced, may take 3% and 0.2
    seconds.

    Args:
        model: Model in training.
        layers: Function that returns its layers and those of the initial model.
        rows: Rows of the monitor, of which the first 64 are passed through the model.
        forward: Forward function, as in `featlearn.probe`.
        due: Function that returns whether a step is in the schedule of measurements.
        clock: Function that returns a time in seconds.
        work: Function that returns the processor time of this process in seconds. On a shared machine looks are charged
            for what they work, not for what the system gives to others meanwhile. None charges all of the time, as on a
            device whose work takes no processor time.
        free_seconds: Seconds that looks at the steps of the schedule may take in any case.

    Attributes:
        spent: Time of all looks, in seconds.
    """

    def __init__(
        self,
        model: nn.Module,
        layers: Layers,
        rows: ProbeRows,
        forward: Forward | None,
        due: Callable[[int], bool] = lambda step: False,
        clock: Callable[[], float] = time.perf_counter,
        work: Callable[[], float] | None = None,
        free_seconds: float = FREE_SECONDS,
    ) -> None:
        self._model, self._find, self._forward, self._due = model, layers, forward, due
        self._clock, self._work = clock, work
        self._rows, self._free_seconds = rows, free_seconds
        self._few: list[Any] | None = None
        self.spent = 0.0
        self._charged = self._alone = 0.0  # for all looks, and for those between the steps of the schedule
        self._preparing = 0.0
        self._costs: deque[float] = deque(maxlen=_USUAL)  # of looks, with their preparation and what follows
        self._began: float | None = None
        self._call, self._step = -1, -1
        self._planned: int | None = None
        self._affordable = True
        self._looks = 0
        self._weights: WeightSignals | None = None
        self._session: ModelSession | None = None
        self._parameters: list[Tensor] = []
        self._failures = 0

    def step(
        self, step: int, *, wanted: bool = False, last: bool = False, measured: float = 0.0, together: bool = True
    ) -> Look | None:
        """Look at the model if the step is due and the time allows, or prepare a look at the next steps.

        Args:
            step: Number of the step. A repeated number is looked at once.
            wanted: Whether to look at this step if the time allows, as at the steps of the schedule.
            last: Whether training has ended, so that there is no other chance.
            measured: Time of all measurements so far, in seconds, which is not training time.
            together: Whether the processes of a sharded model decide at this step.

        Returns:
            The signals, or None.
        """
        if step == self._step and not last:
            return None
        before = self._read()
        began = before[0]
        self.close()  # also if the look that was prepared cannot be afforded now
        if self._began is None:
            self._began = began - measured
        self._step, self._call = step, self._call + 1
        trained = began - self._began - measured - self.spent
        usual = statistics.median(self._costs) if self._costs else 0.0
        alone = SHARE * trained >= self._alone + usual
        scheduled = max(SHARE, _SCHEDULED) * trained + self._free_seconds >= self._charged + usual
        alone, scheduled, wanted = self._agreed(alone, scheduled, wanted or self._due(step), together)
        self._affordable = scheduled
        free = self._looks < _FREE
        if self._planned is None and (alone or free):
            self._planned = self._call + 2
        planned = self._planned is not None and self._call >= self._planned
        look = None
        if last or not self._looks or planned or (wanted and (scheduled or free)):
            look = self._look(step)
            self._looks += 1
            self._planned = self._call + 2 if self._looks < _FREE else None
        # The two calls before a look keep weights; the last one also watches the backward pass.
        ahead = [self._planned == self._call + k or (self._due(step + k) and scheduled) for k in (1, 2)]
        if any(ahead) and not last:
            self._prepare(is_next=ahead[0])
        elif look is None:
            return None
        charge = self._charge(before, alone=not wanted)
        self._preparing += charge
        if look is not None:
            self._costs.append(self._preparing)
            self._preparing = 0.0
        return look

    def _agreed(self, alone: bool, scheduled: bool, wanted: bool, together: bool) -> tuple[bool, bool, bool]:
        """Return the decisions of this process, or those of the first one."""
        return alone, scheduled, wanted

    def look_soon(self) -> None:
        """Plan another look within a few steps, if the time allows."""
        if self._planned is None and self._affordable:
            self._planned = self._call + SOON

    @contextmanager
    def paying(self) -> Iterator[None]:
        """Add the time of what follows from a look, such as writing it, to its cost."""
        before = self._read()
        try:
            yield
        finally:
            charge = self._charge(before, alone=True)
            if self._costs:
                self._costs[-1] += charge

    def close(self) -> None:
        """Remove the hooks of a look that was prepared."""
        if self._weights is not None:
            self._weights.disarm()

    def _read(self) -> tuple[float, float]:
        """Return the time, and the processor time where that is what looks are charged for."""
        now = self._clock()
        return now, now if self._work is None else self._work()

    def _charge(self, before: tuple[float, float], *, alone: bool) -> float:
        """Add what was done since a reading to the cost of looks, and return that cost in seconds."""
        seconds, charge = (b - a for a, b in zip(before, self._read(), strict=True))
        charge = min(seconds, charge)  # threads work longer than they take
        self.spent += seconds
        self._charged += charge
        self._alone += charge * alone
        return charge

    def _prepare(self, is_next: bool) -> None:
        weights = self._up_to_date()
        weights.take_sample(self._call)
        if is_next and not weights.has_gradients():
            weights.arm()

    def _look(self, step: int) -> Look:
        weights = self._up_to_date()
        look = Look(step, self._call)
        look.gradients, look.gradient_norm = weights.gradient_norms()
        weights.take_sample(self._call)
        look.updates = weights.updates()
        look.finite = weights.is_finite()
        look.frozen, look.precision = weights.frozen(), weights.low_precision()
        if look.finite and self._failures < _FAILURES:
            activations = self._look_at_activations(weights)
            if activations is not None:
                look.units, look.outputs = activations.layers, activations.outputs
            else:
                look.finite = all(bool(torch.isfinite(p).all()) for p in weights.parameters)
        return look

    def _look_at_activations(self, weights: WeightSignals) -> ActivationLook | None:
        model = unwrap(self._model)
        try:
            if self._few is None:
                self._few = _few(self._rows)
            if self._session is None:
                self._session = ModelSession(model, forward=self._forward, train_mode="eval", operations=True)
            return look_at_activations(self._session, weights.layers, self._few)
        except FeatlearnError:  # the measurement warns
            self._session = None
            return None
        except Exception as error:  # a model can raise anything
            self._failures += 1
            if self._failures == _FAILURES:  # memory may be short for once, and a measurement warns too
                message = f"Activations are not looked at from step {self._step} on; training continues: {error}"
                warnings.warn(message, UserWarning, stacklevel=7)
            return None

    def _up_to_date(self) -> WeightSignals:
        """Return the signals of the weights, which start anew if parameters were replaced."""
        parameters: list[Tensor] = list(unwrap(self._model).parameters())
        same = len(parameters) == len(self._parameters)
        if self._weights is None or not same or any(a is not b for a, b in zip(parameters, self._parameters)):  # noqa: B905
            self.close()
            self._parameters, self._session = parameters, None
            self._weights = self._new_weights()
        return self._weights

    def _new_weights(self) -> WeightSignals:
        return WeightSignals(*self._find(), unwrap(self._model))


def _few(rows: ProbeRows) -> list[Any]:
    """Return the first rows in batches of limited size."""
    raws = first_of(rows.batches, _ROWS)
    entries: list[int] = []
    map_tensors(raws, lambda t: entries.append(t.numel()))
    count = min(_ROWS, rows.samples)
    at_a_time = max(1, int(count * _ENTRIES / max(sum(entries), 1)))
    return first_of(raws, _ROWS, at_a_time) if at_a_time < count else raws
