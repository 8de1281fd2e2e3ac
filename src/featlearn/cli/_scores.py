"""How well a machine does on rows that it has not seen: cross-validation, beside a baseline."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from featlearn._utils.formatting import count
from featlearn.errors import InputError

if TYPE_CHECKING:
    import pandas as pd
    from numpy.typing import NDArray


@dataclass(frozen=True)
class Scores:
    """Scores of the folds.

    Attributes:
        metric: What they are.
        folds: One a fold.
    """

    metric: str
    folds: tuple[float, ...]

    @property
    def mean(self) -> float:
        """Over the folds."""
        return float(np.mean(self.folds))

    @property
    def deviation(self) -> float:
        """Standard deviation over the folds."""
        return float(np.std(self.folds, ddof=1))

    def __str__(self) -> str:
        return f"{self.mean:.4f} ± {self.deviation:.4f}"

    def numbers(self) -> dict[str, Any]:
        """For programs."""
        return {
            "metric": self.metric.lower().replace("²", "2"),
            "mean": self.mean,
            "std": self.deviation,
            "folds": list(self.folds),
        }


def splits_of(y: NDArray[Any], folds: int, task: str, seed: int) -> list[tuple[NDArray[np.intp], NDArray[np.intp]]]:
    """Shuffled folds; those of a classification have the same shares of the classes."""
    from sklearn.model_selection import KFold, StratifiedKFold

    if folds == 0:
        return []
    if folds < 2 or len(y) < 2 * folds:
        raise InputError(
            f"{count(folds, 'fold')} of {count(len(y), 'row')} cannot be left out: --cv takes 0 (no "
            f"cross-validation), or from 2 to {len(y) // 2} folds"
        )
    kind = StratifiedKFold if task == "classification" else KFold
    if task == "classification" and folds > (most := int(np.unique(y, return_counts=True)[1].max())):
        raise InputError(f"no class has as many as {folds} rows: pass --cv {max(most, 2)} or 0")
    splits = list(kind(folds, shuffle=True, random_state=seed).split(np.zeros(len(y)), y))
    if task == "classification" and any(len(np.unique(y[train])) < 2 for train, _ in splits):
        labels, rows = np.unique(y, return_counts=True)
        rare = int(rows.argmin())
        raise InputError(
            f"the class {labels.tolist()[rare]!r} has {count(int(rows[rare]), 'row')} only, and without it there is "
            "nothing to tell apart: pass --cv 0"
        )
    return splits


def cross_validate(
    make: Callable[[], Any],
    X: pd.DataFrame,
    y: NDArray[Any],
    splits: list[tuple[NDArray[np.intp], NDArray[np.intp]]],
    task: str,
    advance: Callable[[], None],
) -> Scores:
    """Fit on all folds but one, and score on that one, for each.

    Args:
        make: A fresh estimator.
        X: The table.
        y: Targets.
        splits: From `splits_of`.
        task: ``"classification"``, scored by the share that is right, or ``"regression"``, by R².
        advance: Called after each fit.
    """
    found = []
    for train, test in splits:
        model = make().fit(X.iloc[train], y[train])
        found.append(float(model.score(X.iloc[test], y[test])))
        advance()
    return Scores("accuracy" if task == "classification" else "R²", tuple(found))
