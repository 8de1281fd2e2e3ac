"""What the numbers of a layer say, in one word and one sentence, for people who have not read the papers."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

DIAGNOSES = {
    "untrained": "nothing has been learned yet",
    "collapsed": "the layer passes on few directions, or none",
    "at convergence": "the loss pulls as hard as weight decay holds: the features are final",
    "heavy-tailed": "the spectrum of the weights has become a power law",
    "aligned": "the weights and the gradients through them look at the same directions, and training made it so",
    "learning": "the features are changing",
    "lazy": "the weights have hardly moved: the layer works with the features that it started from",
    "undecided": "the rows that were measured are too few to tell a layer that is learning from one that has converged",
}
"""Each word and its meaning, in the order in which they are tried."""

_STILL = 1e-12
_CONVERGED, _FACT = 0.1, 0.95
_COLLAPSED = 0.1
_ALIGNED, _BY_TRAINING = 0.8, 0.5
_MOVED, _SHARE = 0.1, 0.1


@dataclass(frozen=True)
class Diagnosis:
    """One layer in plain words.

    Attributes:
        word: One of `DIAGNOSES`.
        text: A sentence with the numbers that decided.
    """

    word: str
    text: str

    def __str__(self) -> str:
        return f"{self.word}: {self.text}"


def diagnose_layer(
    numbers: Mapping[str, float], phase: str | None = None, trivial: bool = False, part: bool = False
) -> Diagnosis:
    """Read the numbers of a layer.

    The rule, in this order; what was not measured decides nothing:

    1. **untrained**: the weights are those of the start.
    2. **collapsed**: no gradient passes the layer; or its spectrum is in the phase "rank collapse", or its effective
       rank is below a tenth of the initial one.
    3. **at convergence**: relgrad is at most 0.1 and the cosine of FACT with ``W^T W`` at least 0.95 (FACT paper,
       theorem 3.1: at a critical point they are equal).
    4. **heavy-tailed**: the spectrum of W is in the phase "heavy tail".
    5. **aligned**: NFC at least 0.8, of which at least half is due to the change of the weights (C/UC ratio).
    6. **lazy**: the weights moved by less than a tenth, and the C/UC ratio is below a tenth.
    7. **undecided**: relgrad is what sampling noise alone gives: at most three times ``relgrad_noise``, which is above
       0.1 or not known.
    8. **learning**: otherwise.

    The theorem of rule 3 is about the loss of all training rows. On a part of them relgrad is about ``relgrad_noise``
    at a critical point as well, so that such a layer is not called "at convergence" either. A relgrad below a third of
    the noise shows that the model was trained on just these rows, unless they are known to be a part of the data.

    Args:
        numbers: As a `featlearn.training.Snapshot` has them: ``nfc``, ``centered_ratio``, ``weight_change``,
            ``weight_norm``, ``fact``, ``relgrad``, ``relgrad_noise``, ``w.effective_rank``,
            ``w.initial_effective_rank``, ``w.alpha``.
        phase: Of the spectrum of W.
        trivial: Whether the layer has one output: its NFC is 1 whatever it does.
        part: Whether the rows are known to be only a part of the training data.

    >>> read_layer({"nfc": 0.95, "centered_ratio": 0.9, "weight_change": 2.0}).word
    'aligned'
    """
    moved, nfc, share = (numbers.get(name, math.nan) for name in ("weight_change", "nfc", "centered_ratio"))
    relgrad, fact = numbers.get("relgrad", math.nan), numbers.get("fact", math.nan)
    rank, initial_rank = (numbers.get(name, math.nan) for name in ("w.effective_rank", "w.initial_effective_rank"))
    # Of a start at zero, as heads and adapters have it, the change has no share: it is NaN, or infinite.
    at_zero = "weight_change" in numbers and math.isnan(moved) and numbers.get("weight_norm") == 0
    if moved <= _STILL or at_zero:
        return Diagnosis("untrained", "the weights are those of the start" + _measured(NFC=nfc))
    if "nfc" in numbers and math.isnan(nfc):
        return Diagnosis("collapsed", "no gradient of the outputs passes the layer: it is dead or cut off")
    if phase == "rank collapse" or rank < _COLLAPSED * initial_rank:
        return Diagnosis("collapsed", f"its effective rank went from {initial_rank:.1f} to {rank:.1f}")
    noise = numbers.get("relgrad_noise", math.nan)
    noisy = noise > _CONVERGED and (0 if part else noise / 3) <= relgrad <= 3 * noise
    noisy |= part and not math.isnan(relgrad) and math.isnan(noise)
    if relgrad <= _CONVERGED and fact >= _FACT and not noisy:
        return Diagnosis(
            "at convergence",
            f"what is left of the gradient is {relgrad:.1%} of the weight decay, and FACT matches W^T W (cosine "
            f"{fact:.3f})",
        )
    if phase == "heavy tail":
        alpha = numbers.get("w.alpha", math.nan)
        return Diagnosis("heavy-tailed", f"the eigenvalues of W^T W follow a power law of exponent {alpha:.2f}")
    if nfc >= _ALIGNED and share >= _BY_TRAINING and not trivial:
        return Diagnosis("aligned", f"NFC {nfc:.2f}, of which the change of the weights makes {share:.0%}")
    known = math.isfinite(moved)
    moving = f"the weights have moved by {moved:.0%} of their start" if known else "the weights have moved from zero"
    if moved < _MOVED and not share >= _SHARE:
        return Diagnosis("lazy", moving + _measured(NFC=nfc, ratio=share, trivial=trivial))
    if noisy:
        return Diagnosis(
            "undecided",
            f"relgrad {relgrad:.2g} is what the sampling noise of these rows gives ({noise:.2g}), also at a critical "
            "point: measure on all training rows (samples=None)",
        )
    return Diagnosis("learning", moving + _measured(NFC=nfc, ratio=share, trivial=trivial))


def _measured(NFC: float = math.nan, ratio: float = math.nan, trivial: bool = False) -> str:
    parts = []
    if not math.isnan(NFC):
        parts.append("NFC is 1 for a single output" if trivial else f"NFC {NFC:.2f}")
    if not math.isnan(ratio):
        parts.append(f"{ratio:.0%} of it due to the change" if not trivial else f"C/UC {ratio:.2f}")
    return f"; {', '.join(parts)}" if parts else ""
