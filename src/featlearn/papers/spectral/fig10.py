"""Figure 10(c) of the paper on spectral evolution: training against the initial kernel, as samples grow.

References:
    Wang, Engel, Sarwate, Dumitriu & Chiang (2022), https://arxiv.org/abs/2211.06506, figure 10(c).
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from matplotlib.figure import Figure

from featlearn.papers._figures import BLACK, draw_lines, label, panels
from featlearn.papers.claim import holds
from featlearn.papers.experiment import Outcomes, Result, Values, experiment
from featlearn.training import DivergenceError
from featlearn.training.two_layer import new_student, train_student

_METHODS = {
    "lazy": "lazy training",
    "gd": "GD, constant rate",
    "sgd": "SGD, constant rate",
    "growing": "SGD, rate ~ n/d",
}


@dataclass(frozen=True)
class Config:
    """Configuration: d, ratios n/d, rates, training lengths and seeds; the width is 2.5 d."""

    d: int = 200
    ratios: tuple[float, ...] = (1.0, 2.0, 3.0, 4.0)
    constant: float = 5.0
    growing: float = 4.5
    steps: int = 1500
    epochs: int = 60
    seeds: tuple[int, ...] = (0, 1, 2)


def _measure(d: int, ratio: float, constant: float, growing: float, steps: int, epochs: int, seed: int) -> Values:
    student = new_student(round(ratio * d), round(2.5 * d), d, tau=0.0, noise=0.3, generator=seed)

    def error(**training: Any) -> float:
        try:
            return train_student(student, generator=seed, stop_loss=1e-4, **training).test_error
        except DivergenceError:
            return math.nan

    return {
        "lazy": student.lazy_error,
        "gd": error(lr=constant, steps=steps),
        "sgd": error(lr=constant, batch_size=32, epochs=epochs),
        "growing": error(lr=growing * ratio, batch_size=32, epochs=epochs),
        "bound": student.task.teacher.kernel_lower_bounds().linear,
    }


@experiment(
    "spectral-fig10",
    "When training beats the kernel of the start",
    covers=("figure 10 (c)",),
    smoke=Config(20, (1.0, 2.0), 1.0, 1.0, 5, 2, (0,)),
    quick=Config(seeds=(0, 1)),
    full=Config(400, (1.0, 2.0, 3.0, 4.0), seeds=(0, 1, 2)),
    measure=_measure,
    over={"seed": "seeds", "ratio": "ratios"},
)
def _conclude(config: Config, outcomes: Outcomes) -> Result:
    last = outcomes.values_by("ratio")[config.ratios[-1]]
    where = "figure 10(c)"
    claims = (
        holds("with many samples SGD at a rate that grows with n/d does better than lazy training", where,
              [values["growing"] < values["lazy"] for values in last]),
        holds("SGD at a constant rate does not", where, [values["sgd"] >= values["lazy"] for values in last]),
        holds("nor does gradient descent", where, [values["gd"] >= values["lazy"] for values in last]),
        holds("lazy training stays above the kernel lower bound", where,
              [values["lazy"] >= values["bound"] for _, values in outcomes]),
    )  # fmt: skip
    table = outcomes.table({"n/d": "ratio"}, "seed")
    return Result(
        claims, {"test errors": table}, {"figure 10c": _figure(outcomes)},
        f"d = {config.d}. The rate grows like {config.growing:g} n/d; beyond about 20 training diverges at this size, "
        "so that n/d ends where it does. The bound is |P_{>1} f*|^2 of the teacher's Hermite coefficients.",
    )  # fmt: skip


def _figure(outcomes: Outcomes) -> Figure:
    fig, ((ax,),) = panels(5.2, 3.4)
    # The mean over trainings that did not diverge; NaN if all did.
    means = outcomes.table("ratio").groupby("ratio", sort=False).mean()
    draw_lines(ax, means.index, {text: means[name] for name, text in _METHODS.items()}, marked=True)
    bound = outcomes[0].values["bound"]
    ax.axhline(bound, color=BLACK, linestyle="--", linewidth=1, label="kernel lower bound")
    label(ax, "n / d", "test error", log="y", legend={"fontsize": 7})
    return fig
