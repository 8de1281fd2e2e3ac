from __future__ import annotations

import math

import numpy as np
import pytest
from sklearn.kernel_ridge import KernelRidge
from sklearn.metrics import r2_score

from featlearn.errors import InputError
from featlearn.papers import adaptive_comparison
from featlearn.papers.adaptive.sec3_estimator import METHODS, TASKS


def test_a_row_a_task_seed_and_method() -> None:
    result = adaptive_comparison(["digits 3, 8"], seeds=[0, 1], steps=200)
    assert len(result.scores) == 2 * len(METHODS)
    table = result.table()
    first = result.scores.query("method == 'lazy'")["R2"]
    assert table.loc["digits 3, 8", ("R2", "lazy")] == pytest.approx(first.mean())
    assert table.loc["digits 3, 8", ("s.e.", "lazy")] == pytest.approx(first.std() / math.sqrt(2))
    assert table.loc["digits 3, 8", ("wins over lazy", "")] in (0.0, 0.5, 1.0)
    assert result.scores["R2"].min() > 0.6  # sixty images tell most threes from eights
    assert len(result.plot().axes[0].patches) == len(METHODS)


@pytest.mark.parametrize("name", TASKS)
def test_rows_to_learn_from_and_rows_to_judge_by_are_others(name: str) -> None:
    X, y, X_test, y_test = TASKS[name](3)
    assert len(X) == len(y)
    assert len(X_test) == len(y_test)
    assert not {row.tobytes() for row in X} & {row.tobytes() for row in X_test}
    again = TASKS[name](3)
    np.testing.assert_array_equal(X, again[0])
    assert not np.array_equal(X, TASKS[name](4)[0])
    ridge = KernelRidge(kernel="rbf", alpha=0.1).fit(X, y)
    assert r2_score(y_test, ridge.predict(X_test)) < 0.95  # none is trivial


def test_an_unknown_task_is_refused() -> None:
    with pytest.raises(InputError, match=r"tasks must be one of 'x1 x2', .*got 'x1'"):
        adaptive_comparison(["x1"])
