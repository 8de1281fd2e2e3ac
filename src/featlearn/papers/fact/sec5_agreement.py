"""Sections 1 and 5 of the FACT paper: the features of FACT-RFM and NFA-RFM agree on most data.

References:
    Boix-Adsera, Mallinar, Simon & Belkin (2025), https://arxiv.org/abs/2507.05644, sections 1 and 5.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pandas as pd
import torch
from matplotlib.figure import Figure
from sklearn.preprocessing import StandardScaler

from featlearn.linalg import cosine, pearson
from featlearn.papers._figures import PALETTE, label, panels
from featlearn.papers.claim import at_least, holds
from featlearn.papers.experiment import Outcomes, Result, Values, experiment
from featlearn.papers.fact.rfm_runs import rows_as_they_are
from featlearn.papers.fact.table3 import SMALL, some_tables
from featlearn.rfm.iteration import Settings
from featlearn.rfm.kernels import make_kernel
from featlearn.rfm.recursion import iterates
from featlearn.rfm.training_rows import simplex

UPDATES = {"fact": "FACT-RFM", "fact-geometric": "FACT-RFM, geometric"}


@dataclass(frozen=True)
class Config:
    """Configuration: sets of table 3, of which ``group`` are measured per point."""

    names: tuple[str, ...]
    n_iter: int = 5
    shift: float = 1.0
    group: int = 40


def _points(config: Config) -> list[dict[str, Any]]:
    groups = [config.names[i : i + config.group] for i in range(0, len(config.names), config.group)]
    return [{"names": names, "n_iter": config.n_iter, "shift": config.shift} for names in groups]


def _measure(names: Sequence[str], n_iter: int, shift: float) -> Values:
    """Measure cosines with M of NFA-RFM after each update, from the same rows, ridge and bandwidth."""
    values: dict[str, Any] = {}
    for table in some_tables(names):
        X = torch.from_numpy(StandardScaler().fit_transform(table.X))
        problem = rows_as_they_are(X, torch.from_numpy(simplex(table.classes)[table.y]))
        metrics = {}
        for update in ("nfa", *UPDATES):
            settings = Settings(
                make_kernel("laplace"), update, bandwidth=10.0, ridge=shift / problem.total, n_iter=n_iter, judge=False
            )
            metrics[update] = [metric for metric, _ in iterates(problem, settings)][1:]
        values[table.name] = {"d": X.shape[1], "n": len(X)}
        for update in UPDATES:
            cosines = [cosine(a, b) for a, b in zip(metrics[update], metrics["nfa"], strict=False)]
            correlation = pearson(metrics[update][-1], metrics["nfa"][-1])
            values[table.name] |= {update: cosines, f"{update}, Pearson": correlation}
    return values


@experiment(
    "fact-agreement",
    "Features of FACT-RFM and NFA-RFM are alike",
    covers=("section 5 (agreement of M)",),
    smoke=Config(names=("bundled-iris", "bundled-wine")),
    quick=Config(names=SMALL[:60]),
    full=Config(names=SMALL),
    measure=_measure,
    points=_points,
    data=("uci121",),
)
def _conclude(config: Config, outcomes: Outcomes) -> Result:
    rows = [
        {"set": name, "n": values["n"], "d": values["d"]}
        | {f"{update}, update {t + 1}": value for update in UPDATES for t, value in enumerate(values[update])}
        | {f"{update}, Pearson": values[f"{update}, Pearson"] for update in UPDATES}
        for sets in outcomes.values
        for name, values in sets.items()
    ]
    table = pd.DataFrame(rows)
    claims = []
    for update, name in UPDATES.items():
        first = f"M of {name} and of NFA-RFM are highly correlated: cosine above .9 after one update"
        for text, t in ((first, 1), (f"the same after {config.n_iter} updates", config.n_iter)):
            cosines = table[f"{update}, update {t}"]
            reason, note = "'in most settings': more than half of the sets", f"median {cosines.median():.3f}"
            claims.append(holds(text, "section 5", cosines > 0.9, share=0.5, reason=reason, note=note))
    middle = float(table[f"fact-geometric, update {config.n_iter}"].median())
    claims.append(at_least("median cosine over sets, geometric form", "section 5", 0.9, [middle], 0.0,
                           "'highly correlated', without a number"))  # fmt: skip
    return Result(
        claims,
        {"cosine of M with NFA-RFM's, by set": table},
        {"agreement": _figure(config, table)},
        "Laplace kernel of bandwidth 10 on standardized columns, 1 added to the diagonal of K, all rows of a set; each "
        "method follows its own M. A cosine of positive definite matrices is high by itself where M stays near I: the "
        "Pearson correlation after the last update is in the table.",
    )


def _figure(config: Config, table: pd.DataFrame) -> Figure:
    fig, ((left, right),) = panels(6.4, 2.8, 1, 2)
    updates = np.arange(1, config.n_iter + 1)
    for (update, name), color in zip(UPDATES.items(), PALETTE, strict=False):
        values = table[[f"{update}, update {t}" for t in updates]].to_numpy()
        low, middle, high = np.quantile(values, [0.25, 0.5, 0.75], axis=0)
        left.plot(updates, middle, color=color, marker="o", markersize=4, label=name)
        left.fill_between(updates, low, high, color=color, alpha=0.18, linewidth=0)
        right.plot(np.sort(values[:, -1])[::-1], color=color, label=name)
    title = "median and quartiles over sets"
    label(left, "update", "cosine with M of NFA-RFM", title, xticks=updates, ylim=(0, 1.03), legend="lower left")
    label(right, "sets, from the most alike to the least", title=f"after {config.n_iter} updates", ylim=(0, 1.03))
    return fig
