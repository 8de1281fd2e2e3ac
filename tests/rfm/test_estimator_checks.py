"""scikit-learn's own checks, whole."""

from __future__ import annotations

from typing import Any

from sklearn.utils.estimator_checks import parametrize_with_checks

from featlearn.rfm import RFMClassifier, RFMRegressor


@parametrize_with_checks([RFMRegressor(n_iter=2), RFMClassifier(n_iter=2)])  # two of five updates: half the time
def test_scikit_learn(estimator: Any, check: Any) -> None:
    check(estimator)
