"""Figure 28 of the paper on spectral evolution: change by three steps, as networks and data grow.

References:
    Wang, Engel, Sarwate, Dumitriu & Chiang (2022), https://arxiv.org/abs/2211.06506, figure 28.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np

from featlearn.papers.claim import about, at_most, holds
from featlearn.papers.experiment import Outcomes, Result, Values, experiment
from featlearn.papers.spectral.fig9 import changes_by_training, growth, growth_figure, standard_error


@dataclass(frozen=True)
class Config:
    """Configuration: sizes n, trials per size, steps, rate; ReLU as in the figure, and tanh, which the lemma covers."""

    sizes: tuple[int, ...] = (100, 200, 400, 800)
    trials: int = 10
    steps: int = 3
    lr: float = 1.0
    activations: tuple[str, ...] = ("relu", "tanh")


def _measure(n: int, seed: int, activation: str, steps: int, lr: float) -> Values:
    setting: dict[str, Any] = {"ratios": (0.6, 1.2), "teacher": "tanh", "noise": 0.2, "first": True, "stop_loss": None}
    changes = changes_by_training(n, seed, activation=activation, lr=lr, steps=steps, **setting)
    # The figure has W itself, not W over sqrt d.
    return changes | {name: v * math.sqrt(round(0.6 * n)) for name, v in changes.items() if name.startswith("W ")}


@experiment(
    "spectral-fig28",
    "What three steps change, as networks and data grow together",
    covers=("figure 28",),
    smoke=Config((20, 40), 1),
    quick=Config(),
    full=Config((100, 200, 400, 800, 1600), 25),
    measure=_measure,
    over={"activation": "activations", "seed": "trials", "n": "sizes"},
)
def _conclude(config: Config, outcomes: Outcomes) -> Result:
    rows = outcomes.by("activation")
    relu = rows["relu"]
    reason = "twice the standard error over trials, and .1 for sizes that are not infinite"

    def exponent(text: str, published: float, name: str, where: str = "figure 28") -> Any:
        exponents = growth(relu, name)
        return about(
            f"exponent of n in {text}", where, published, exponents, 0.1 + 2 * standard_error(exponents), reason
        )

    outputs = growth(relu, "output")
    slow = growth(relu, "NTK frobenius")
    claims = [
        exponent("|W_3 - W_0|_F", -0.5, "W frobenius", "figure 28(a), lemma B.2"),
        exponent("|W_3 - W_0|", -0.5, "W operator", "figure 28(a)"),
        exponent("the largest row of W_3 - W_0", -0.5, "W rows", "figure 28(a)").remark(
            "Faster here. It would be surprising otherwise: the leading part of the change is the outer product of v "
            "with a vector, and its largest row is |v|_inf / |v| of it, which falls like sqrt(log h / h) itself."
        ),
        exponent("|CK_3 - CK_0|_F", -1.0, "CK frobenius", "figure 28(b), lemma 5.1"),
        exponent("|NTK_3 - NTK_0|", -1.0, "NTK operator", "figure 28(c)"),
        holds("|NTK_3 - NTK_0|_F falls more slowly than 1/n", "section B.2",
              [float(np.mean(slow)) - 2 * standard_error(slow) > -1]),
        at_most("exponent of n in the change of outputs, a bound", "after lemma B.2", -0.5, outputs,
                0.1 + 2 * standard_error(outputs), reason, note="C / sqrt n is met, and far from sharp: about 1/n"),
    ]  # fmt: skip
    if "tanh" in rows:
        smooth = growth(rows["tanh"], "NTK frobenius")
        claims.append(
            holds("with a bounded second derivative (tanh) |NTK_3 - NTK_0|_F falls at least like 1/n", "lemma 5.1",
                  [float(np.mean(smooth)) <= -1 + 2 * standard_error(smooth)])
        )  # fmt: skip
    mean = outcomes.table("activation", "n").groupby(["activation", "n"], sort=False).mean().reset_index()
    return Result(
        claims, {"means over trials": mean}, {"figure 28": growth_figure(rows)},
        "The rate is not told; it is 1 for nn.MSELoss here. A bound of order C/n is also met by what falls faster; the "
        "figure says that the rates are exact.",
    )  # fmt: skip
