"""Fit a recursive feature machine to scikit-learn's wine table."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from matplotlib.figure import Figure
from sklearn.datasets import load_wine
from sklearn.model_selection import train_test_split

from featlearn.rfm import RFMClassifier, make_tabular

__all__ = ["WineFeatures", "wine_features"]


@dataclass(frozen=True, eq=False)
class WineFeatures:
    """What the machine has learned.

    Attributes:
        machine: The fitted estimator.
        score: Its accuracy on a quarter of the wines, left out.
        baseline: That of plain kernel regression.
    """

    machine: RFMClassifier
    score: float
    baseline: float

    @property
    def leading(self) -> list[str]:
        """The three measurements that count most, in words."""
        order = np.argsort(-self.machine.feature_importances_, kind="stable")[:3]
        return [self.machine.feature_names()[i].replace("_", " ") for i in order]

    def plot(self) -> Figure:
        """The feature matrix and its diagonal."""
        return self.machine.plot_features()


def wine_features(seed: int = 0) -> WineFeatures:
    """Fit the machine, and plain kernel regression, to three quarters of the wines.

    Args:
        seed: Of the split.
    """
    X, y = load_wine(return_X_y=True, as_frame=True)
    X, X_test, y, y_test = train_test_split(X, y, stratify=y, random_state=seed)
    fitted = [make_tabular(RFMClassifier(update=update)).fit(X, y) for update in ("fact", "none")]
    score, baseline = (float(model.score(X_test, y_test)) for model in fitted)
    return WineFeatures(fitted[0]["estimator"], score, baseline)
