"""Rules for faults of the whole training: divergence, exploding gradients, learning rates, labels.

Each rule has two thresholds: a fault begins beyond the first, and ends below the second.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterator

from featlearn.training._layer_rules import VANISHED, Condition, Situation
from featlearn.training._loss_history import LossHistory
from featlearn.training.diagnosis import Finding

_FAR, _FAR_ENDS, _VERY_FAR = 3.0, 1.5, 30.0  # loss over its start
_LOST, _BACK = 0.5, 0.9  # shares of the initial loss: progress that is lost again
_GROWN, _GROWN_ENDS = 100.0, 10.0  # gradient norm over its usual value
_GAIN, _GAIN_ENDS = 300.0, 100.0  # scale of the activations of one layer over that of the first
_LARGE, _VERY_LARGE = 10.0, 1e3  # gradient norm beside a gain
_DEPTH, _DEPTH_ENDS = 1e4, 1e3  # gradient norm of one layer over that of the output layer
_LOOKS = 3  # looks from which a usual value is known
_RAPID, _FAST, _VERY_FAST = 0.07, 0.1, 0.3  # update ratios
_STUCK, _FALLEN, _HALF, _SOLVED = 0.8, 0.6, 0.5, 0.1  # shares of the initial loss
_RISEN, _UNSOLVED = 1.5, 0.3  # loss over its lowest level, if at least this share of the initial loss is left
_DECAY = 0.9  # cosine of an update with weight decay
_FIRST, _LONG_STEPS = 20, 100  # calls before a loss that does not fall is remarkable
_ROUGH = 0.3  # change of the loss from step to step
_SLOW, _SLOW_ENDS = 3e-5, 1e-4  # update ratios
_NO_PROGRESS = 0.95  # share of the initial loss
_WARM = 0.5  # power of the number of steps with which the update ratio grows in a warm-up
_LEAST_SLOW = 24  # losses before the absence of progress by tiny updates is a fault
LEAST_STEPS = 50
"""Losses before the absence of progress is a fault."""
_INDEPENDENT, _DEPENDENT = 0.02, 0.01  # p-values
_LONG, _LONG_ENDS = 0.5, 0.3  # share of the steps near the initial loss


def has_diverged(losses: LossHistory) -> bool:
    """Return whether the loss is not finite or far above its start."""
    return not losses.finite or (losses.start > 0 and losses.level(4) > _FAR * losses.start)


def divergence(s: Situation) -> Iterator[Condition]:
    """Yield a loss that is not finite, far above its start, or back at its start."""
    losses = s.losses
    advice = "stop, go back to the last good checkpoint, lower the learning rate, and clip gradients"
    if not losses.finite or not s.look.finite:
        what = "the loss" if not losses.finite else "a weight"
        finding = Finding("divergence", "problem", 1.0, f"{what} is NaN or infinite", advice)
        yield Condition(None, finding, holds=True, ended=False, certain=True)
        return
    if not losses.start > 0:
        return
    level, over = losses.level(4), losses.level(4) / losses.start
    lost = losses.lowest < _LOST * losses.start and losses.level() > _BACK * losses.start
    evidence = f"the loss is {level:.3g}, {over:.1f} times its start of {losses.start:.3g}"
    if lost:
        evidence += f", and was {losses.lowest:.3g}"
    finding = Finding("divergence", "problem", 0.95 if over > _FAR else 0.85, evidence, advice)
    yield Condition(None, finding, over > _FAR or lost, over < _FAR_ENDS and not lost, over > _VERY_FAR)


def exploding_gradients(s: Situation) -> Iterator[Condition]:
    """Yield gradients that grow over the steps or through the layers.

    A constant factor of all gradients, such as that of a GradScaler, is not growth.
    """
    norm = s.look.gradient_norm
    advice = "clip gradients, use normalization or residual connections, and a smaller initialization"
    reasons, beyond, ended = [], False, True
    if len(s.norms) >= _LOOKS and (usual := statistics.median(s.norms)) > 0:
        beyond |= norm > _GROWN * usual
        ended &= norm < _GROWN_ENDS * usual
        growth = f"the gradient has a norm of {norm:.2g}, usually {usual:.2g}"
        reasons += [growth] if norm > _GROWN_ENDS * usual else []
    certain = s.gain > _GAIN and norm > _VERY_LARGE
    beyond |= s.gain > _GAIN and not norm < _LARGE
    ended &= s.gain < _GAIN_ENDS or norm < _LARGE
    growth = f"activations grow {s.gain:.2g}-fold through the layers"
    growth += f", and the gradient has a norm of {norm:.2g}" if math.isfinite(norm) else ""
    reasons += [growth] if s.gain > _GAIN_ENDS else []
    last = max((s.look.gradients.get(name, 0.0) for name in s.look.outputs), default=0.0)
    if last > 0:
        spread = max(s.look.gradients.values()) / last
        beyond |= spread > _DEPTH
        ended &= spread < _DEPTH_ENDS
        growth = f"the gradient of a layer has {spread:.2g} times the norm of that of the output layer"
        reasons += [growth] if spread > _DEPTH_ENDS else []
    finding = Finding("exploding gradients", "problem", 0.9, "; ".join(reasons), advice)
    yield Condition(None, finding, beyond, ended, certain)


def learning_rate(s: Situation) -> Iterator[Condition]:
    """Yield a learning rate that is too high or too low for the loss to fall."""
    ratios = [u.ratio for u in s.look.updates.values() if u.ratio > 0]
    cosines = [u.cosine for u in s.look.updates.values() if math.isfinite(u.cosine)]
    cosine = statistics.median(cosines) if cosines else math.nan
    if not math.isfinite(s.learned) and s.losses.finite:
        return
    largest, step = s.largest
    rough = s.losses.roughness()
    decays = [u.decay for u in s.look.updates.values() if math.isfinite(u.decay)]
    level, lowest = s.losses.level(), s.losses.lowest
    lost = not (s.losses.finite and s.look.finite) or (s.learned > _UNSOLVED and level > _RISEN * lowest)
    stuck = (largest > _FAST and (s.learned > _STUCK or lost or (rough > _ROUGH and s.learned > _UNSOLVED))) or (
        largest > _VERY_FAST and s.learned > _SOLVED
    )
    slowly = largest > _RAPID and s.look.call >= _LONG_STEPS and s.learned > _HALF
    by_decay = bool(decays) and statistics.median(decays) > _DECAY
    evidence = f"an update changed the weights by {largest:.0%} at step {step}"
    evidence += "" if math.isnan(cosine) else f", the last two updates have a cosine of {cosine:.2f}"
    evidence += f", and the loss is {level:.3g} ({s.losses.start:.3g} at the start)"
    if rough > _ROUGH:
        evidence += f" and changes by {rough:.0%} from step to step"
    confidence = 0.9 if largest > _VERY_FAST else 0.75 if stuck else 0.6
    severity = "problem" if stuck else "warning"
    advice = "lower the learning rate tenfold, or use a warm-up"
    finding = Finding("learning rate too high", severity, confidence, evidence, advice)
    fallen = s.learned < (_SOLVED if largest > _VERY_FAST else _FALLEN if largest > _FAST else _HALF)
    diverged = has_diverged(s.losses) or not s.look.finite
    holds = (stuck or slowly) and not by_decay and (diverged or s.look.call >= _FIRST)
    certain = stuck and largest > _VERY_FAST and s.learned > _STUCK
    yield Condition(None, finding, holds, fallen and not lost, certain)
    if not ratios or s.losses.count < _LEAST_SLOW:
        return
    fastest = max(ratios)
    evidence = (
        f"the largest update of a layer is {fastest:.1g} of its weights, and the loss went from "
        f"{s.losses.start:.4g} to {s.losses.level():.4g} in {s.losses.count} steps"
    )
    evidence += f"; successive updates have a cosine of {cosine:.2f}" if cosine > 0 else ""
    finding = Finding("learning rate too low", "warning", 0.85, evidence, "raise the learning rate tenfold or more")
    blocked = any(norm < VANISHED * s.look.gradient_norm for norm in s.look.gradients.values())
    slow = fastest < _SLOW and s.learned > _NO_PROGRESS and not (s.is_warming_up(_WARM) or blocked)
    yield Condition(None, finding, slow, fastest > _SLOW_ENDS or s.learned < 0.9)


def shuffled_labels(s: Situation) -> Iterator[Condition]:
    """Yield labels that fit the inputs no better than permuted ones, in a training whose loss hardly fell for long."""
    if s.label_p is None or s.losses.count < LEAST_STEPS:
        return
    near = s.losses.near_start / s.losses.count
    evidence = (
        "nearest neighbors among the inputs agree in their labels no more than with permuted labels "
        f"(p = {s.label_p:.2f}), and the loss was above 80% of its start in {near:.0%} of the steps"
    )
    advice = "check that inputs and labels are paired: shuffled together, read in the same order, indexed alike"
    finding = Finding("shuffled labels", "warning", 0.6 + 0.3 * near, evidence, advice)
    holds = s.label_p > _INDEPENDENT and near > _LONG and not s.explained
    yield Condition(None, finding, holds, s.label_p < _DEPENDENT or near < _LONG_ENDS)


def loss_spike(s: Situation) -> Iterator[Condition]:
    """Yield jumps of the loss since the last look."""
    new = s.losses.spikes - s.spikes
    evidence = f"the loss jumped {s.losses.spikes} times, the last time by step {s.look.step}"
    advice = "if jumps are frequent, clip gradients, lower the learning rate, or look at the batches of these steps"
    yield Condition(None, Finding("loss spike", "note", 0.9, evidence, advice), new > 0, new == 0, certain=True)


LOSS_RULES = (divergence, learning_rate, shuffled_labels)
"""Rules for faults that show in the losses, and need no other look."""
RULES = (divergence, exploding_gradients, learning_rate, shuffled_labels, loss_spike)
"""Rules for faults of the whole training."""
