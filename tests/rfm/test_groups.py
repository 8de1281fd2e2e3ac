"""Validation by groups of rows."""

from __future__ import annotations

import numpy as np
import pytest
from sklearn.model_selection import GroupKFold, LeaveOneGroupOut, StratifiedGroupKFold

from featlearn.errors import InputError
from featlearn.rfm import RFMClassifier, RFMRegressor, make_tabular

rng = np.random.default_rng(0)
GROUPS = np.repeat(np.arange(20), 6)
CENTERS = rng.standard_normal((20, 3))
X = CENTERS[GROUPS] + 0.05 * rng.standard_normal((120, 3))
Y = rng.standard_normal(20)[GROUPS] + 0.05 * rng.standard_normal(120)  # noise, the same in each group


def test_rows_of_a_group_are_left_out_together() -> None:
    alone = RFMRegressor(random_state=0).fit(X, Y)
    grouped = RFMRegressor(random_state=0).fit(X, Y, groups=GROUPS)
    assert alone.validation_error_ < 0.3 * Y.var()  # other rows of the group tell the answer
    assert grouped.validation_error_ > 0.8 * Y.var()


@pytest.mark.parametrize("validation", [4, GroupKFold(4), LeaveOneGroupOut()])
def test_groups_are_those_of_an_explicit_list_of_splits(validation) -> None:
    splitter = GroupKFold(4) if isinstance(validation, int) else validation
    names = np.array([f"patient {g:02d}" for g in GROUPS])
    splits = list(splitter.split(X, Y, GROUPS))
    options = {"random_state": 0, "n_iter": 2}
    given = RFMRegressor(validation=validation, **options).fit(X, Y, groups=names if validation == 4 else GROUPS)
    listed = RFMRegressor(validation=splits, **options).fit(X, Y)
    assert given.validation_error_ == pytest.approx(listed.validation_error_, rel=1e-9)
    assert given.ridge_ == listed.ridge_


def test_weights_classes_and_tables() -> None:
    labels = (Y > 0).astype(int)
    weights = rng.random(120)
    weights[:6] = 0.0
    options = {"random_state": 0, "n_iter": 1}
    given = RFMClassifier(validation=3, **options).fit(X, labels, weights, GROUPS)
    used = weights > 0
    folds = list(StratifiedGroupKFold(3).split(X[used], labels[used], GROUPS[used]))
    listed = RFMClassifier(validation=folds, **options).fit(X[used], labels[used], weights[used])
    assert given.validation_error_ == pytest.approx(listed.validation_error_, rel=1e-9)
    pipeline = make_tabular(RFMRegressor(**options)).fit(X, Y, estimator__groups=GROUPS)
    assert pipeline["estimator"].validation_error_ > 0.8 * Y.var()


def test_what_is_refused() -> None:
    for validation in (None, 0.2, (X[:9], Y[:9])):
        with pytest.raises(InputError, match="groups require validation='loo', a number of folds or a splitter"):
            RFMRegressor(validation=validation, bandwidth=1.0, ridge=0.1).fit(X, Y, groups=GROUPS)
    with pytest.raises(InputError, match=r"groups must be of shape \(120,\)"):
        RFMRegressor().fit(X, Y, groups=GROUPS[:5])
    with pytest.raises(InputError, match="at least two groups"):
        RFMRegressor().fit(X, Y, groups=np.zeros(120))
