"""Section 3 of the tangent features paper as an estimator: adaptive against lazy features and trained networks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import pandas as pd

from featlearn.lab.experiments.adaptive.comparison import METHODS, TASKS, AdaptiveComparison, adaptive_comparison
from featlearn.lab.experiments.claim import holds
from featlearn.lab.experiments.experiment import Experiment, Outcome, Result

__all__ = ["EXPERIMENT", "Config"]


@dataclass(frozen=True)
class Config:
    """See `adaptive_comparison`."""

    tasks: tuple[str, ...] = tuple(TASKS)
    steps: int = 3000
    width: int = 128
    seeds: tuple[int, ...] = (0, 1, 2)


def _points(config: Config) -> list[dict[str, Any]]:
    shared = {"steps": config.steps, "width": config.width}
    return [shared | {"task": task, "seed": seed} for task in config.tasks for seed in config.seeds]


def _measure(task: str, seed: int, steps: int, width: int) -> Mapping[str, Any]:
    scores = adaptive_comparison([task], [seed], steps, width).scores
    return {str(method): float(r2) for method, r2 in zip(scores["method"], scores["R2"], strict=True)}


def _conclude(config: Config, outcomes: Sequence[Outcome]) -> Result:
    found = AdaptiveComparison(
        pd.DataFrame(
            [
                {"task": point["task"], "seed": point["seed"], "method": method, "R2": values[method]}
                for point, values in outcomes
                for method in METHODS
            ]
        )
    )
    wide = found.scores.pivot(index=["task", "seed"], columns="method", values="R2").loc[list(config.tasks)]
    means = wide.groupby("task", sort=False).mean()
    claims = (
        holds("adaptive features learn structure that the fixed ones do not: better than lazy regression",
              "section 3.2", wide["adaptive"] > wide["lazy"], share=0.5, reason="the paper has no experiment: more "
              "often than not",
              note=", ".join(f"{task}: {row['lazy']:.2f} to {row['adaptive']:.2f}" for task, row in means.iterrows())),
        holds("real networks outperform their fixed tangent features", "introduction", wide["trained"] > wide["lazy"],
              share=0.5, reason="more often than not",
              note=", ".join(f"{task}: {row['trained']:.2f}" for task, row in means.iterrows())),
    )  # fmt: skip
    return Result(
        claims,
        {"R^2 on test rows": wide.reset_index()},
        {"comparison": found.plot()},
        f"Networks of {config.width} ReLUs: their tangent features fixed, adapted (penalty (z - 1)^2), and the "
        "networks themselves trained by Adam. The paper has the model and no such experiment.",
    )


EXPERIMENT = Experiment(
    name="adaptive-features",
    title="Adaptive features against lazy ones and trained networks",
    covers=("section 3 (as an estimator)",),
    scales={
        "smoke": Config(tasks=("digits 3, 8",), steps=50, width=8, seeds=(0,)),
        "quick": Config(),
        "full": Config(seeds=tuple(range(10))),
    },
    points=_points,
    measure=_measure,
    conclude=_conclude,
)
