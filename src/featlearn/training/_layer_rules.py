"""Rules for faults of one layer: from signals and measurements to conditions with evidence.

Each rule has two thresholds: a fault begins beyond the first, and ends below the second.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

from featlearn.training._activation_signals import UnitSignals
from featlearn.training._loss_history import NEAR_START, LossHistory
from featlearn.training._signals import Look
from featlearn.training.diagnosis import Finding

VANISHED = 1e-4
"""Share of the gradient of the model below which that of a layer has vanished."""
LEARNED = 0.5
"""Share of the initial loss below which a training has learned something."""

_DEAD, _DEAD_ENDS = 0.5, 0.35  # share of units
_SEVERE = 0.9  # share of units from which on a fault is a problem, and certain
_SATURATED, _SATURATED_ENDS = 0.5, 0.35
_VANISHED_ENDS = 1e-3
_EARLY = 5  # calls in which layers that start near zero may block gradients, of which ever more pass
_MORE = 1.2  # growth of a gradient that is passed by ever more
_LAZY, _LAZY_ENDS = 0.03, 0.06  # change of the weights
_BY_CHANGE = 0.1  # C/UC ratio of a layer that is not lazy
_COLLAPSED, _COLLAPSED_ENDS = 0.05, 0.1  # share of the bulk of the singular values at the start
_SHRUNK, _SHRUNK_ENDS = 1e-3, 1e-2  # variation of the outputs over that at the start
_FEW, _FEW_ENDS = 0.15, 0.25  # share of the directions that the outputs of the model need, or of those at the start
_FROZEN_SHARE = 1 / 3  # largest share of frozen layers that is remarkable


@dataclass(frozen=True)
class Condition:
    """Result of a rule at one look.

    Attributes:
        layer: Layer, None for the whole model.
        finding: Finding with the present numbers.
        holds: Whether the fault is beyond its first threshold.
        ended: Whether it is below its second threshold.
        certain: Whether one look is enough.
    """

    layer: str | None
    finding: Finding
    holds: bool
    ended: bool
    certain: bool = False


@dataclass
class Situation:
    """Present look, and what is known from earlier ones.

    Attributes:
        look: Present signals.
        losses: Losses.
        measured: Numbers of the last measurement of each layer.
        collapsed: Layers whose spectrum of W was in the phase "rank collapse" at the last measurement.
        first: Signals of the units of each layer at the first look.
        norms: Gradient norms of the model at earlier looks.
        largest: Largest median update ratio of the layers so far, with its step.
        before: Look before the present one.
        ratios: Numbers of calls, and median update ratios of the layers at them, of the last looks.
        gain: Largest scale of the outputs of a layer over that of the first one, at the last look that had them.
        spikes: Number of loss spikes at the look before.
        label_p: p-value of `label_p_value`; None if it is not known.
        explained: Whether a problem was found before, which explains a loss that does not fall.
    """

    look: Look
    losses: LossHistory
    measured: Mapping[str, Mapping[str, float]] = field(default_factory=dict)
    collapsed: frozenset[str] = frozenset()
    first: Mapping[str, UnitSignals] = field(default_factory=dict)
    norms: tuple[float, ...] = ()
    largest: tuple[float, int] = (0.0, 0)
    before: Look | None = None
    ratios: tuple[tuple[int, float], ...] = ()
    gain: float = math.nan
    spikes: int = 0
    label_p: float | None = None
    explained: bool = False

    @property
    def hidden(self) -> list[str]:
        """Names of the layers whose outputs are not those of the model."""
        names = dict.fromkeys([*self.look.units, *self.look.gradients, *self.look.updates])
        return [name for name in names if name not in self.look.outputs]

    @property
    def directions(self) -> float:
        """Number of directions in which the outputs of the model have to vary: classes need one less than there are."""
        return max((self.look.units[name].units - 1 for name in self.look.outputs), default=0)

    def share_before(self, name: str) -> float:
        """Return the share of a layer in the gradient of the model at the look before; NaN if unknown."""
        if self.before is None or not self.before.gradient_norm > 0:
            return math.nan
        return self.before.gradients.get(name, math.nan) / self.before.gradient_norm

    def is_warming_up(self, power: float) -> bool:
        """Return whether updates grow as in a warm-up, over the looks since an eighth of the present number of steps.

        Args:
            power: Power of the number of steps with which they grow at least.
        """
        recent = [(call, ratio) for call, ratio in self.ratios if 8 * call >= self.look.call and ratio > 0 and call > 0]
        if len({call for call, _ in recent}) < 2:
            return False
        calls, ratios = ([math.log(value) for value in values] for values in zip(*recent, strict=True))
        return statistics.linear_regression(calls, ratios).slope > power

    @property
    def learned(self) -> float:
        """Share of the initial loss that is left; NaN if unknown."""
        return self.losses.level() / self.losses.start if self.losses.start > 0 else math.nan


def dead(s: Situation) -> Iterator[Condition]:
    """Yield dead units and dead layers."""
    for name, units in s.look.units.items():
        if units.dead is None or name in s.look.outputs:
            continue
        share = units.dead / units.units
        evidence = f"{units.dead} of {units.units} units never fire on {units.rows} rows"
        advice = "lower the learning rate, initialize again, or use an activation with a slope below zero (leaky ReLU)"
        severity = "problem" if share >= _SEVERE else "warning"
        finding = Finding("dead units", severity, 0.95 if share >= _SEVERE else 0.8, evidence, advice)
        alive = share < 1
        yield Condition(name, finding, alive and share >= _DEAD, not alive or share < _DEAD_ENDS, share >= _SEVERE)
        evidence = f"all {units.units} units are zero on {units.rows} rows, so that no gradient passes the layer"
        advice = "look for large negative biases and for a step with too large an update; initialize the layer again"
        yield Condition(name, Finding("dead layer", "problem", 0.98, evidence, advice), not alive, alive, certain=True)


def saturation(s: Situation) -> Iterator[Condition]:
    """Yield layers whose units are at the limits of their activation."""
    for name, units in s.look.units.items():
        if units.saturated is None or name in s.look.outputs:
            continue
        share = units.saturated / units.units
        evidence = (
            f"{units.saturated} of {units.units} units are at a limit of their activation on most rows; "
            f"the pre-activations have a root mean square of {units.scale:.3g}"
        )
        advice = "scale the weights or inputs of the layer down, normalize its inputs, or lower the learning rate"
        severe = share >= _SEVERE
        finding = Finding("saturation", "problem" if severe else "warning", 0.95 if severe else 0.8, evidence, advice)
        yield Condition(name, finding, share >= _SATURATED, share < _SATURATED_ENDS, severe)


def vanishing_gradients(s: Situation) -> Iterator[Condition]:
    """Yield layers whose gradient is negligible beside that of the model."""
    total = s.look.gradient_norm
    if not total > 0 or not math.isfinite(total):
        return
    for name, norm in s.look.gradients.items():
        if name in s.look.frozen:
            continue
        share = norm / total
        if s.look.call < _EARLY and not 0 < share < _MORE * s.share_before(name):
            continue
        evidence = f"the gradient has a norm of {norm:.2g}, {share:.1g} of that of the model ({total:.2g})"
        advice = "use residual connections or normalization, a larger initialization, or ReLU or GELU"
        finding = Finding("vanishing gradients", "problem", 0.9, evidence, advice)
        twice = s.share_before(name) < VANISHED
        yield Condition(name, finding, share < VANISHED, share > _VANISHED_ENDS, certain=twice)


def lazy_layer(s: Situation) -> Iterator[Condition]:
    """Yield hidden layers that hardly moved while the loss fell."""
    for name, update in s.look.updates.items():
        if name in s.look.outputs or name in s.look.frozen or not math.isfinite(update.moved):
            continue
        by_change = s.measured.get(name, {}).get("centered_ratio", math.nan)
        evidence = f"the loss fell to {s.learned:.0%} of its start, and the weights moved by {update.moved:.2%}"
        if math.isfinite(by_change):
            evidence += f"; {by_change:.0%} of the NFC is due to the change"
        advice = (
            "if features should be learned, scale the initialization or the output of the model down, or use a smaller "
            "width or a larger learning rate; in fine-tuning this is normal"
        )
        holds = 0 < update.moved < _LAZY and s.learned < LEARNED and not by_change >= _BY_CHANGE
        finding = Finding("lazy layer", "note", 0.8, evidence, advice)
        yield Condition(name, finding, holds, update.moved > _LAZY_ENDS or by_change >= 2 * _BY_CHANGE)


def rank_collapse(s: Situation) -> Iterator[Condition]:
    """Yield layers that pass on few directions of those that they had at the start."""
    advice = "lower the weight decay and the learning rate, and start again from before the collapse"
    for name in s.hidden:
        units, first, update = s.look.units.get(name), s.first.get(name), s.look.updates.get(name)
        weights = outputs = scale = math.nan
        parts = []
        if update is not None and update.top > 0:
            # All shrink in a model that is normalized, too; one whose loss is that of its start passes nothing on.
            weights = update.bulk if s.learned > NEAR_START else max(update.bulk, update.bulk / update.top)
            parts.append(
                f"the median singular value is {update.bulk:.2g} of that at the start, the largest {update.top:.2g}"
            )
        if units is not None and first is not None and first.rank > 0 and first.spread > 0:
            scale = units.spread / first.spread
            outputs = units.rank / min(first.rank, s.directions) if s.directions >= 1 else math.nan
            parts.append(f"the outputs vary in {units.rank:.1f} directions, {first.rank:.1f} at the start")
            parts += [f"by {scale:.1g} times as much"] if scale < _SHRUNK_ENDS else []
        if not parts:
            continue
        holds = name in s.collapsed or weights < _COLLAPSED or outputs < _FEW or scale < _SHRUNK
        ended = not (weights < _COLLAPSED_ENDS or outputs < _FEW_ENDS or scale < _SHRUNK_ENDS)
        finding = Finding("rank collapse", "warning", 0.8, "; ".join(parts), advice)
        yield Condition(name, finding, holds, ended and name not in s.collapsed)


def frozen_layer(s: Situation) -> Iterator[Condition]:
    """Yield layers that never change: by mistake, with gradients, or by a few frozen parameters."""
    moving = [name for name, update in s.look.updates.items() if update.ratio > 0]
    if not moving:
        return
    for name, update in s.look.updates.items():
        if name in s.look.frozen:
            others = len(s.look.updates) - len(s.look.frozen)
            few = len(s.look.frozen) <= _FROZEN_SHARE * len(s.look.updates)
            evidence = f"requires_grad is False here, and True in {others} other layers"
            finding = Finding("frozen layer", "note", 0.6, evidence, "call requires_grad_(True) if it should train")
            yield Condition(name, finding, few, not few)
            continue
        gradient = s.look.gradients.get(name, math.nan)
        still = update.moved == 0 or (math.isnan(update.moved) and update.ratio == 0)
        evidence = (
            f"the weights are those of the start after {s.look.call} steps, although their gradient has a norm of "
            f"{gradient:.2g}, and {len(moving)} other layers change"
        )
        advice = "pass the parameters of the layer to the optimizer, and check the learning rate of its group"
        if name in s.look.precision:
            advice += "; updates may be rounded away in half precision: keep the weights in float32"
        holds = still and gradient > VANISHED * s.look.gradient_norm and s.look.call > 0
        yield Condition(name, Finding("frozen layer", "problem", 0.95, evidence, advice), holds, not still)


RULES = (dead, saturation, vanishing_gradients, lazy_layer, rank_collapse, frozen_layer)
"""Rules for faults of one layer."""
