"""Figures 3(a), 8 and 17(a) of the paper on spectral evolution: alignment, change and tails during training.

References:
    Wang, Engel, Sarwate, Dumitriu & Chiang (2022), https://arxiv.org/abs/2211.06506, figures 3(a), 8 and 17(a).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from matplotlib.figure import Figure
from torch import nn

from featlearn.datasets import TeacherTask
from featlearn.errors import FeatlearnError
from featlearn.kernels import ck, kernel_target_alignment
from featlearn.papers._figures import PALETTE, label, label_outer, panels
from featlearn.papers.claim import Claim, holds
from featlearn.papers.experiment import Groups, Outcomes, Result, Values, experiment
from featlearn.papers.spectral.table1 import Config, case_points
from featlearn.spectra import power_law
from featlearn.training.two_layer import hidden_weight, spectral_case


class _Watched:
    """Callback that returns numbers of the weights and the conjugate kernel; its first call sets the reference."""

    def __init__(self) -> None:
        self.start: torch.Tensor | None = None

    def __call__(self, model: nn.Module, task: TeacherTask) -> Values:
        w = hidden_weight(model)
        if self.start is None:
            self.start = w
        change = w - self.start
        values = torch.linalg.eigvalsh(w.mT @ w)
        kernel = ck(model, task.X, dtype=torch.float64)
        return {
            "KTA": kernel_target_alignment(kernel, task.y),
            "operator": float(torch.linalg.matrix_norm(change, 2)),
            "frobenius": float(change.norm()),
            **dict(zip(("alpha", "weighted alpha", "log alpha norm"), _tail(values), strict=True)),
        }


def _tail(values: torch.Tensor) -> tuple[float, float, float]:
    try:
        fit = power_law(values)
    except FeatlearnError:  # too few eigenvalues for a tail
        return np.nan, np.nan, np.nan
    return fit.alpha, fit.weighted_alpha_paper, float(torch.logsumexp(fit.alpha * values[values > 0].log(), 0))


def _measure(case: int, size: Sequence[int], seed: int, **training: Any) -> Values:
    n, h, d = size
    watched = spectral_case(case, (n, h, d), generator=seed, watch=_Watched(), every="log", **training).watched
    return {name: watched[name].to_numpy() for name in watched.columns}


@experiment(
    "spectral-fig17",
    "Alignment, change and tails while the network trains",
    covers=("figure 3 (a)", "figure 8", "figure 17 (a)"),
    smoke=Config((80, 60, 40), (1, 4), (0,), epochs=3, rate=5.0),
    quick=Config(cases=(1, 3, 4), seeds=(0,)),
    full=Config((2000, 1500, 1000), (1, 3, 4), rate=22.0, adam_batch=16),
    measure=_measure,
    points=case_points,
)
def _conclude(config: Config, outcomes: Outcomes) -> Result:
    by_case = outcomes.values_by("case")

    def ends(values: Values) -> Values:
        return {name: float(curve[-1]) for name, curve in values.items() if name != "step"}

    rises = [values["KTA"][-1] > values["KTA"][0] for values in outcomes.values]
    claims = _claims(by_case) if {1, 4} <= set(by_case) else []
    claims.append(holds("the kernel target alignment of CK ends above where it began", "figure 3(a)", rises))
    table = outcomes.table("case", "seed", values=ends)
    return Result(
        claims, {"at the end": table}, {"figures 3a, 8 and 17a": _figure(by_case)},
        "Weighted alpha is the paper's alpha times the largest eigenvalue; the literature has its logarithm. Tails are "
        "fitted by maximum likelihood above the threshold of least Kolmogorov-Smirnov distance.",
    )  # fmt: skip


def _claims(by_case: Groups) -> list[Claim]:
    tails = by_case[4]
    return [
        holds("case 4: alpha falls as the tail grows heavy", "figure 17(a)",
              [run["alpha"][-1] < run["alpha"][0] for run in tails]),
        holds("case 4: most of alpha's fall comes early, in the first tenth of the steps", "figure 17(a)",
              [_early(run["step"], run["alpha"]) > 0.5 for run in tails]),
        holds("case 4: the alignment is larger than in the other cases", "figure 3(a)",
              [all(run["KTA"][-1] > other[i]["KTA"][-1] for case, other in by_case.items() if case != 4)
               for i, run in enumerate(tails)]),
        holds("weights move much less in case 1 than in case 4", "figure 8",
              [10 * run["frobenius"][-1] < four["frobenius"][-1] for run, four in zip(by_case[1], tails, strict=True)]),
    ]  # fmt: skip


def _early(steps: Any, values: Any) -> float:
    """Return the share of a total change that has happened after a tenth of the steps."""
    steps, values = np.asarray(steps, dtype=float), np.asarray(values, dtype=float)
    total = values[-1] - values[0]
    return float((np.interp(steps[-1] / 10, steps, values) - values[0]) / total) if total else 0.0


def _figure(by_case: Groups) -> Figure:
    titles = {"KTA": "KTA of CK", "operator": "$|W_t - W_0|$", "frobenius": "$|W_t - W_0|_F$"}
    titles |= {"alpha": "alpha", "weighted alpha": "weighted alpha", "log alpha norm": "log alpha-norm"}
    fig, axes = panels(9.6, 5.0, 2, 3)
    for ax, (name, title) in zip(axes.flat, titles.items(), strict=True):
        for (case, group), color in zip(by_case.items(), PALETTE, strict=False):
            steps = np.asarray(group[0]["step"], dtype=float)
            ax.plot(steps / max(1, steps[-1]), group[0][name], color=color, label=f"case {case}")
        label(ax, title=title, log="y" if name in ("operator", "frobenius", "weighted alpha") else "")
    label_outer(axes, "share of the training")
    axes[0, 0].legend(fontsize=8)
    return fig
