"""Diagnosis of a layer (lazy, learning, aligned, ...) from its metrics.

References:
    Boix-Adsera, Mallinar, Simon & Belkin (2025), https://arxiv.org/abs/2507.05644 (FACT).
    Beaglehole, Mitliagkas & Agarwala, "Feature learning as alignment", https://openreview.net/forum?id=JXCe2ZcUXr.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

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

_STILL = 1e-12
_CONVERGED, _FACT = 0.1, 0.95
_COLLAPSED = 0.1
_ALIGNED, _BY_TRAINING = 0.8, 0.5
_MOVED, _SHARE = 0.1, 0.1


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


def diagnose_layer(
    numbers: Mapping[str, float], phase: str | None = None, trivial: bool = False, part: bool = False
) -> Diagnosis:
    """Classify a layer from its metrics.

    The first criterion that holds decides. A criterion does not hold if its metrics were not measured.

    1. **untrained**: the weights equal the initial ones.
    2. **collapsed**: no gradient passes the layer; or its spectrum is in the phase "rank collapse", or its effective
       rank is below a tenth of the initial one.
    3. **at convergence**: relgrad is at most 0.1 and the cosine of FACT with ``W^T W`` is at least 0.95 (FACT paper,
       theorem 3.1: at a critical point they are equal).
    4. **heavy-tailed**: the spectrum of W is in the phase "heavy tail".
    5. **aligned**: NFC is at least 0.8, and at least half of it is due to the change of the weights (C/UC ratio).
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
            ``w.initial_effective_rank``, ``w.alpha``. Missing metrics were not measured.
        phase: Phase of the spectrum of W. None if not measured.
        trivial: Whether the layer has a single output, so that its NFC is always 1.
        part: Whether the rows are known to be only a part of the training data.

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
    if moved <= _STILL or at_zero:
        return Diagnosis("untrained", "the weights equal the initial ones" + _measured(nfc))
    if "nfc" in numbers and math.isnan(nfc):
        return Diagnosis("collapsed", "no gradient of the outputs passes the layer: it is dead or disconnected")
    if phase == "rank collapse" or rank < _COLLAPSED * initial_rank:
        return Diagnosis("collapsed", f"the effective rank changed from {initial_rank:.1f} to {rank:.1f}")
    noisy = noise > _CONVERGED and (0 if part else noise / 3) <= relgrad <= 3 * noise
    noisy |= part and not math.isnan(relgrad) and math.isnan(noise)
    if relgrad <= _CONVERGED and fact >= _FACT and not noisy:
        gradient = f"the remaining gradient is {relgrad:.1%} of the weight decay"
        return Diagnosis("at convergence", f"{gradient}, and FACT matches W^T W (cosine {fact:.3f})")
    if phase == "heavy tail":
        alpha = numbers.get("w.alpha", math.nan)
        return Diagnosis("heavy-tailed", f"the eigenvalues of W^T W follow a power law of exponent {alpha:.2f}")
    if nfc >= _ALIGNED and share >= _BY_TRAINING and not trivial:
        return Diagnosis("aligned", f"NFC {nfc:.2f}, {share:.0%} of it due to the change of the weights")
    known = math.isfinite(moved)
    moving = f"the weights have moved by {moved:.0%} of their start" if known else "the weights have moved from zero"
    moving += _measured(nfc, share, trivial)
    if moved < _MOVED and not share >= _SHARE:
        return Diagnosis("lazy", moving)
    if noisy:
        limits = f"relgrad {relgrad:.2g} can be explained by the sampling noise of these rows ({noise:.2g})"
        return Diagnosis("undecided", f"{limits}; measure on all training rows (samples=None)")
    return Diagnosis("learning", moving)


def _measured(nfc: float, ratio: float = math.nan, trivial: bool = False) -> str:
    parts = []
    if not math.isnan(nfc):
        parts.append("NFC is 1 for a single output" if trivial else f"NFC {nfc:.2f}")
    if not math.isnan(ratio):
        parts.append(f"{ratio:.0%} of it due to the change" if not trivial else f"C/UC {ratio:.2f}")
    return f"; {', '.join(parts)}" if parts else ""
