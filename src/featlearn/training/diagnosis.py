"""Diagnosis of a layer (lazy, learning, aligned, ...) from its metrics.

References:
    Boix-Adsera, Mallinar, Simon & Belkin (2025), https://arxiv.org/abs/2507.05644 (FACT).
    Beaglehole, Mitliagkas & Agarwala, "Feature learning as alignment", https://openreview.net/forum?id=JXCe2ZcUXr.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import asdict, astuple, dataclass, fields
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import pandas as pd


DIAGNOSES = {
    "untrained": "the layer has not changed",
    "collapsed": "the layer passes on few directions, or none",
    "at convergence": "the loss gradient balances weight decay",
    "heavy-tailed": "the spectrum of the weights follows a power law",
    "aligned": "the weights and the gradients share their directions, and training caused it",
    "learning": "the features are changing",
    "lazy": "the weights have hardly moved: the features are those of the start",
    "undecided": "the measured rows are too few to distinguish a layer that is learning from one that has converged",
}
"""Diagnoses and their meanings."""

FAULTS = {
    "dead units": "half of the units of a layer or more are zero on all rows",
    "dead layer": "all units of a layer are zero on all rows, so that nothing passes it",
    "vanishing gradients": "the gradient of a layer is negligible beside that of the model",
    "exploding gradients": "gradients grow by orders of magnitude through the layers or over the steps",
    "divergence": "the loss is not finite, far above its start, or back at its start",
    "learning rate too high": "updates are large beside the weights, and the loss does not fall",
    "learning rate too low": "updates are so small that the loss does not move",
    "lazy layer": "the loss fell, but the weights of the layer have hardly moved",
    "rank collapse": "the layer passes on few directions of those that it had at the start",
    "shuffled labels": "the labels fit the inputs no better than permuted labels do",
    "frozen layer": "the weights of the layer never change while those of others do",
    "saturation": "half of the units of a layer or more are at the limits of their activation",
    "loss spike": "the loss jumped above its recent values",
}
"""Faults that findings name, and their meanings."""

SEVERITIES = ("problem", "warning", "note")
"""Severities of findings, the worst first."""

_STILL = 1e-12
_CONVERGED, _FACT = 0.1, 0.95
_COLLAPSED = 0.1
_ALIGNED, _BY_TRAINING = 0.8, 0.5
_MOVED, _SHARE = 0.1, 0.1
_TAIL = 0.5  # largest share of the eigenvalues in a tail: beyond, the spectrum has no bulk that the tail could leave
_DEAD = 0.5
_TRIVIAL = 1 - 1e-6


@dataclass(frozen=True)
class Diagnosis:
    """Diagnosis of a layer.

    Attributes:
        word: Diagnosis, one of `DIAGNOSES`.
        text: Reason for the diagnosis, with the metrics that decided.
    """

    word: str
    text: str

    def __str__(self) -> str:
        return f"{self.word}: {self.text}"


@dataclass(frozen=True)
class Finding:
    """Fault, or remarkable state, of a layer or of the whole model.

    Attributes:
        fault: Fault, one of `FAULTS`.
        severity: Severity, one of `SEVERITIES`.
        confidence: Confidence, from 0 to 1.
        evidence: Clause with the numbers that decided.
        advice: Recommendation.
    """

    fault: str
    severity: str
    confidence: float
    evidence: str
    advice: str

    def __str__(self) -> str:
        return f"{self.severity}: {self.fault} ({self.confidence:.0%}): {self.evidence}"


class Findings(dict[str | None, list[Finding]]):
    """Findings by layer name, None for the whole model, the most severe of each first; prints as a report.

    Example:
        >>> from featlearn.training import Finding, Findings
        >>> dead = Finding("dead units", "problem", 0.95, "58 of 64 units never fire", "lower the learning rate")
        >>> print(Findings({"net.0": [dead]}))
        net.0  problem: dead units (95%): 58 of 64 units never fire
               Advice: lower the learning rate.
    """

    def __str__(self) -> str:
        names = {layer: "model" if layer is None else layer for layer, findings in self.items() if findings}
        width = max(map(len, names.values()), default=0) + 2
        order = sorted(
            ((layer, finding) for layer in names for finding in self[layer]), key=lambda pair: severity_key(pair[1])
        )
        lines = []
        for layer, finding in order:
            lines += [names[layer].ljust(width) + str(finding), " " * width + f"Advice: {finding.advice}."]
        return "\n".join(lines) or "no findings"

    def table(self) -> pd.DataFrame:
        """Return one row per finding, with the columns layer (None for the model) and the attributes of `Finding`."""
        import pandas as pd

        rows = [(layer, *astuple(finding)) for layer, findings in self.items() for finding in findings]
        return pd.DataFrame(rows, columns=["layer", *(f.name for f in fields(Finding))])

    def summary(self) -> set[tuple[str | None, str, str]]:
        """Return the layer, the fault and the severity of each finding."""
        return {(layer, f.fault, f.severity) for layer, findings in self.items() for f in findings}

    def texts(self) -> dict[str | None, str]:
        """Return the findings of each layer as a JSON list of objects, for the run store."""
        return {layer: json.dumps([asdict(f) for f in findings]) for layer, findings in self.items()}


def severity_key(finding: Finding) -> tuple[int, float]:
    """Return a key that sorts findings, the most severe and then the most certain first."""
    return SEVERITIES.index(finding.severity), -finding.confidence


def diagnose_layer(
    numbers: Mapping[str, float],
    phase: str | None = None,
    trivial: bool = False,
    part: bool = False,
    diverged: bool = False,
    trained: bool = False,
) -> Diagnosis:
    """Classify a layer from its metrics.

    The first criterion that holds decides. A criterion does not hold if its metrics were not measured.

    1. **collapsed**: all units of the layer are dead; or weights have changed and no gradient passes the layer, its
       spectrum is in the phase "rank collapse", or its effective rank is below a tenth of the initial one.
    2. **untrained**: the weights equal the initial ones.
    3. **at convergence**: relgrad is at most 0.1 and the cosine of FACT with ``W^T W`` is at least 0.95 (FACT paper,
       theorem 3.1: at a critical point they are equal).
    4. **heavy-tailed**: the spectrum of W is in the phase "heavy tail", with at most half of the eigenvalues in the
       tail.
    5. **aligned**: NFC is at least 0.8, and at least half of it is due to the change of the weights (C/UC ratio). Not
       for output layers, layers with half of their units dead or more, and models that diverged.
    6. **lazy**: the weights moved by less than a tenth, and the C/UC ratio is below a tenth.
    7. **undecided**: relgrad can be explained by sampling noise: it is at most three times ``relgrad_noise``, which is
       above 0.1 or not known.
    8. **learning**: all other cases.

    The theorem of criterion 3 holds for the loss of all training rows. On a part of them, relgrad is about
    ``relgrad_noise`` at a critical point too, so such a layer is not diagnosed as "at convergence". A relgrad below a
    third of the noise shows that the model was trained on exactly these rows, unless ``part`` is True.

    Args:
        numbers: Metrics of the layer, as in `featlearn.training.Snapshot`: ``nfc``, ``centered_ratio``,
            ``weight_change``, ``weight_norm``, ``fact``, ``relgrad``, ``relgrad_noise``, ``w.effective_rank``,
            ``w.initial_effective_rank``, ``w.alpha``, ``w.tail_share``, ``signal.dead_share``. Missing metrics were not
            measured.
        phase: Phase of the spectrum of W. None if not measured.
        trivial: Whether the layer has a single output or is the last of the model, so that its NFC is 1 by
            construction.
        part: Whether the rows are known to be only a part of the training data.
        diverged: Whether the training has diverged, so that the layer gets no diagnosis of success.
        trained: Whether other layers of the model have changed, or one of them is dead: a layer that passes no
            gradient is then collapsed, not untrained.

    Returns:
        The diagnosis and its reason.

    Example:
        >>> from featlearn.training import diagnose_layer
        >>> diagnose_layer({"nfc": 0.95, "centered_ratio": 0.9, "weight_change": 2.0}).word
        'aligned'
        >>> print(diagnose_layer({"nfc": 0.3, "centered_ratio": 0.01, "weight_change": 0.02}))
        lazy: the weights have moved by 2% of their start; NFC 0.30, 1% of it due to the change

    References:
        Boix-Adsera, Mallinar, Simon & Belkin (2025), https://arxiv.org/abs/2507.05644, theorem 3.1.
    """
    moved, nfc, share = (numbers.get(name, math.nan) for name in ("weight_change", "nfc", "centered_ratio"))
    relgrad, noise, fact = (numbers.get(name, math.nan) for name in ("relgrad", "relgrad_noise", "fact"))
    rank, initial_rank = (numbers.get(name, math.nan) for name in ("w.effective_rank", "w.initial_effective_rank"))
    # If the initial weights are zero, as in heads and adapters, the relative change is NaN or infinite.
    at_zero = "weight_change" in numbers and math.isnan(moved) and numbers.get("weight_norm") == 0
    dead = numbers.get("signal.dead_share", 0.0)
    if dead >= 1:
        return Diagnosis("collapsed", "the layer is dead: all of its units are zero on the looked-at rows")
    blocked = "nfc" in numbers and math.isnan(nfc)
    if (moved <= _STILL or at_zero) and not (blocked and trained):
        return Diagnosis("untrained", "the weights equal the initial ones" + _measured(nfc))
    if blocked:
        return Diagnosis("collapsed", "no gradient of the outputs passes the layer: it is dead or disconnected")
    if phase == "rank collapse" or rank < _COLLAPSED * initial_rank:
        return Diagnosis("collapsed", f"the effective rank changed from {initial_rank:.1f} to {rank:.1f}")
    noisy = noise > _CONVERGED and (0 if part else noise / 3) <= relgrad <= 3 * noise
    noisy |= part and not math.isnan(relgrad) and math.isnan(noise)
    if relgrad <= _CONVERGED and fact >= _FACT and not noisy and not diverged:
        gradient = f"the remaining gradient is {relgrad:.1%} of the weight decay"
        return Diagnosis("at convergence", f"{gradient}, and FACT matches W^T W (cosine {fact:.3f})")
    if phase == "heavy tail" and not numbers.get("w.tail_share", 0.0) > _TAIL:
        alpha = numbers.get("w.alpha", math.nan)
        return Diagnosis("heavy-tailed", f"the eigenvalues of W^T W follow a power law of exponent {alpha:.2f}")
    if nfc >= _ALIGNED and share >= _BY_TRAINING and not (trivial or diverged or dead >= _DEAD):
        return Diagnosis("aligned", f"NFC {nfc:.2f}, {share:.0%} of it due to the change of the weights")
    known = math.isfinite(moved)
    moving = f"the weights have moved by {moved:.0%} of their start" if known else "the weights have moved from zero"
    moving += _measured(nfc, share, trivial)
    moving += f"; {dead:.0%} of the units are dead" if dead >= _DEAD else ""
    moving += "; the training has diverged" if diverged else ""
    if moved < _MOVED and not share >= _SHARE:
        return Diagnosis("lazy", moving)
    if noisy:
        limits = f"relgrad {relgrad:.2g} can be explained by the sampling noise of these rows ({noise:.2g})"
        return Diagnosis("undecided", f"{limits}; measure on all training rows (samples=None)")
    return Diagnosis("learning", moving)


def _measured(nfc: float, ratio: float = math.nan, trivial: bool = False) -> str:
    parts = []
    if not math.isnan(nfc):
        parts.append("NFC is 1 by construction" if trivial and nfc > _TRIVIAL else f"NFC {nfc:.2f}")
    if not math.isnan(ratio):
        parts.append(f"{ratio:.0%} of it due to the change" if not trivial else f"C/UC {ratio:.2f}")
    return f"; {', '.join(parts)}" if parts else ""
