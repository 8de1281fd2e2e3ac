"""Findings over the steps of a training, with hysteresis."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace

from featlearn.spectra import Phase
from featlearn.training import _layer_rules, _training_rules
from featlearn.training._activation_signals import UnitSignals
from featlearn.training._layer_rules import Condition, Situation
from featlearn.training._loss_history import LossHistory
from featlearn.training._measurement import Key, Snapshot
from featlearn.training._signals import Look
from featlearn.training.diagnosis import Finding, Findings, severity_key

_IN_A_ROW = 2  # looks at which a fault must hold to begin, and have ended to end
_NORMS = 9
_RATIOS = 32


@dataclass
class _State:
    present: Finding | None = None
    held: int = 0
    ended: int = 0


class Hysteresis:
    """Findings that begin when their condition held at two looks in a row, and end when it clearly failed at two.

    A certain condition begins a finding at once. While a condition is between its two thresholds, or its quantities are
    missing, the finding stays as it is.
    """

    def __init__(self) -> None:
        self._states: dict[tuple[str | None, str], _State] = {}

    def update(self, conditions: Iterable[Condition]) -> None:
        """Take the conditions of one look into account.

        Args:
            conditions: Conditions; faults without one stay as they are.
        """
        for condition in conditions:
            state = self._states.setdefault((condition.layer, condition.finding.fault), _State())
            state.held = state.held + 1 if condition.holds else 0
            state.ended = state.ended + 1 if condition.ended and not condition.holds else 0
            if condition.holds and (state.present or condition.certain or state.held >= _IN_A_ROW):
                state.present = condition.finding
            elif state.ended >= _IN_A_ROW:
                state.present = None

    @property
    def suspected(self) -> bool:
        """Return whether a fault was beyond its threshold for the first time, so that another look would decide."""
        return any(state.held == 1 and state.present is None for state in self._states.values())

    def present(self) -> Findings:
        """Return the present findings, the most severe first."""
        result = Findings()
        for (layer, _), state in self._states.items():
            if state.present is not None:
                result.setdefault(layer, []).append(state.present)
        for findings in result.values():
            findings.sort(key=severity_key)
        return result


class Diagnostician:
    """Findings of a training from its losses, looks and measurements.

    Args:
        losses: Losses, which the caller adds to.
        test_labels: Function that returns the p-value of `label_p_value`, or None. It is called once, when the loss has
            not fallen for long.
    """

    def __init__(self, losses: LossHistory, test_labels: Callable[[], float | None] = lambda: None) -> None:
        self._losses, self._test_labels = losses, test_labels
        self._faults = Hysteresis()
        self._norms: deque[float] = deque(maxlen=_NORMS)
        self._ratios: deque[tuple[int, float]] = deque(maxlen=_RATIOS)
        self._first: dict[str, UnitSignals] = {}
        self._largest, self._spikes = (0.0, 0), 0
        self._situation: Situation | None = None
        self._label_p: float | None = None
        self._gain = math.nan
        self._tested = False
        self._measured: dict[str, Mapping[str, float]] = {}
        self._collapsed: frozenset[str] = frozenset()
        self._phases: dict[Key, tuple[str, str]] = {}

    def look(self, look: Look) -> None:
        """Take the signals of a step into account.

        Args:
            look: Signals.
        """
        if math.isfinite(look.median_ratio):
            self._largest = max(self._largest, (look.median_ratio, look.step))
            self._ratios.append((look.call, look.median_ratio))
        scales = [units.scale for units in look.units.values() if units.scale > 0]
        self._gain = max(scales) / scales[0] if scales else self._gain
        for name, units in look.units.items():
            self._first.setdefault(name, units)
        before = None if self._situation is None else self._situation.look
        self._situation = Situation(
            look, self._losses, self._measured, self._collapsed, self._first, tuple(self._norms), self._largest,
            before, tuple(self._ratios), self._gain, self._spikes,
        )  # fmt: skip
        self._apply(*_layer_rules.RULES, *_training_rules.RULES)
        self._spikes = self._losses.spikes
        if math.isfinite(look.gradient_norm):
            self._norms.append(look.gradient_norm)

    def new_losses(self) -> None:
        """Take the losses since the last look into account, together with its signals."""
        if self._situation is not None:
            self._apply(*_training_rules.LOSS_RULES)

    @property
    def suspects(self) -> bool:
        """Return whether another look would decide whether there is a fault."""
        return self._faults.suspected

    def measured(self, snapshot: Snapshot) -> Snapshot:
        """Take a measurement into account, before the look at the same step.

        Args:
            snapshot: Measurement.

        Returns:
            The measurement with settled phases, whose names change when two measurements in a row agree.
        """
        self._measured.update(snapshot.layers)
        phases = {key: self._settled(key, phase) for key, phase in snapshot.phases.items()}
        self._collapsed = frozenset(
            layer for (layer, kind), of in phases.items() if kind == "w" and of.name == "rank collapse" and layer
        )
        return replace(snapshot, phases=phases)

    def findings(self) -> Findings:
        """Return the present findings."""
        return self._faults.present()

    def _apply(self, *rules: Callable[[Situation], Iterable[Condition]]) -> None:
        """Apply rules to the present situation."""
        assert self._situation is not None
        if not self._tested and self._is_stuck():
            self._tested, self._label_p = True, self._test_labels()
        explained = any(f.severity == "problem" for of_layer in self.findings().values() for f in of_layer)
        self._situation = situation = replace(self._situation, label_p=self._label_p, explained=explained)
        self._faults.update(condition for rule in rules for condition in rule(situation))

    def _settled(self, key: Key, phase: Phase) -> Phase:
        settled, last = self._phases.get(key, (phase.name, phase.name))
        settled = phase.name if phase.name == last or settled == "undecided" else settled
        self._phases[key] = (settled, phase.name)
        if settled == phase.name:
            return phase
        reason = f"as at the last measurements; this one alone is {phase.name}: {phase.reason}"
        return replace(phase, name=settled, reason=reason)  # type: ignore[arg-type]

    def _is_stuck(self) -> bool:
        losses = self._losses
        return losses.count >= _training_rules.LEAST_STEPS and losses.near_start > 0.5 * losses.count
