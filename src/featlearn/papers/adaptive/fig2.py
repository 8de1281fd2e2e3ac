"""Figure 2 of the paper on adaptive tangent features: effective penalties are sub-quadratic.

References:
    LeJeune & Alemohammad (2023), https://arxiv.org/abs/2308.15478, figure 2.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pandas as pd
from matplotlib.figure import Figure
from numpy.typing import NDArray

from featlearn.adaptive import PENALTIES, penalty_curves
from featlearn.papers._figures import PALETTE, label, panels
from featlearn.papers.claim import about, at_most, holds
from featlearn.papers.experiment import Outcomes, Result, Values, experiment

Array = NDArray[np.float64]
SIDES = {"square": ("square",), "absolute": ("absolute",), "square and absolute": ("square", "absolute")}
LABELS = {
    "v^2": "$v^2$",
    "square": "$\\omega_1 = (v-1)^2$",
    "absolute": "$\\omega_2 = |v-1|$",
    "square and absolute": "$\\omega_3 = \\omega_1 \\oplus \\omega_2$",
}


@dataclass(frozen=True)
class Config:
    """Configuration: largest v, number of places v, and size of the grid of the search for comparison."""

    largest: float = 5.0
    places: int = 41
    grid: int = 1500


def searched(sides: Sequence[str], v: Array, grid: int) -> Array:
    """Return ``min over s >= 1 of sum_i w_i(s_i) + v^2 / (prod s)^2`` over a grid, by its definition alone."""
    s = 1 + 3.0 * np.linspace(0, 1, grid) ** 2  # no minimizer lies beyond 4 up to v = 20
    costs, product = PENALTIES[sides[0]](s), s
    for side in sides[1:]:
        costs, product = costs[:, None] + PENALTIES[side](s), product[:, None] * s
    return np.array([(costs + (x / product) ** 2).min() for x in v])


def _measure(largest: float, places: int, grid: int) -> Values:
    v = np.linspace(0, largest, places)
    small, far = np.array([1e-3]), np.array([1e3, 1e4])
    fine = np.linspace(0, largest, 2001)
    near, ends, curves = penalty_curves(small), penalty_curves(far), penalty_curves(fine)
    values: dict[str, Any] = {"v": fine, "curves": dict(curves)}
    for name, sides in SIDES.items():
        direct = searched(sides, v, grid)
        by_square = np.diff(curves[name]) / np.maximum(np.diff(fine**2), 1e-300)
        values[name] = {
            "error": float(np.abs(penalty_curves(v)[name] - direct).max()),
            "near zero": float(near[name][0] / small[0] ** 2),
            "exponent": float(np.log10(ends[name][1] / ends[name][0])),
            "below the square": bool((curves[name] <= fine**2 + 1e-12).all()),
            "increasing": bool((np.diff(curves[name]) > 0).all()),
            "concave": bool((np.diff(by_square) <= 1e-9).all()),
        }
    return values


@experiment(
    "adaptive-fig2",
    "Effective penalties are sub-quadratic",
    covers=("figure 2", "proposition 3"),
    smoke=Config(places=11, grid=400),
    quick=Config(),
    full=Config(places=81, grid=3000),
    measure=_measure,
    over={},
)
def _conclude(config: Config, outcomes: Outcomes) -> Result:
    (values,) = outcomes.values
    table = pd.DataFrame([{"penalty": name} | dict(values[name]) for name in SIDES])
    claims = (
        at_most("closed forms against a search over s", "figure 2", 0.0, table["error"], 1e-4,
                "the search is on a grid and can only be too high"),
        holds("all are sub-quadratic: below v^2", "figure 2", table["below the square"]),
        about("w~(v) / v^2 as v goes to 0", "figure 2", 1.0, table["near zero"], 0.01,
              "at v = .001; what is left is of the order of v"),
        holds("v^2 -> w~(v) is increasing and concave", "proposition 3", table["increasing"] & table["concave"]),
        about("power of v in the tail of the square's effective penalty", "section 3.2", 1.0,
              table["exponent"][:1], 0.01, "between v = 1,000 and 10,000"),
    )  # fmt: skip
    return Result(
        claims,
        {"curves": table},
        {"figure 2": _figure(values)},
        "The third curve is the effective form of the joint penalty. Its tail, and that of the absolute value, are "
        "slower than |v|: powers of 1/2 and 2/3.",
    )


def _figure(values: Values) -> Figure:
    v, curves = np.asarray(values["v"]), values["curves"]
    fig, ((ax,),) = panels(4.4, 3.0)
    for name, color, line in zip(LABELS, ("#999999", *PALETTE), (":", "-", "--", "-."), strict=False):
        ax.plot(v, np.asarray(curves[name]), color=color, linestyle=line, label=LABELS[name])
    limits: dict[str, Any] = {"xlim": (0, v.max()), "ylim": (0, 1.15 * float(np.asarray(curves["square"])[-1]))}
    label(ax, "v", "effective penalty $\\tilde{\\omega}(v)$", legend="lower right", **limits)
    return fig
