"""What is wrong with an argument is said in one sentence, and nothing is left half-fitted."""

from __future__ import annotations

import re

import numpy as np
import pandas as pd
import pytest
from scipy.sparse import csr_matrix
from sklearn.exceptions import NotFittedError
from sklearn.model_selection import GroupKFold, ShuffleSplit, TimeSeriesSplit

from featlearn.errors import FeatlearnError, InputError
from featlearn.rfm import RFMClassifier, RFMRegressor

source = np.random.default_rng(0)
X = source.normal(size=(40, 3))
Y = X[:, 0] * X[:, 1]
TWO = (Y > 0).astype(int)
NAN, INF = float("nan"), float("inf")


def refused(estimator, rows, targets, *options, kind: type[Exception] = ValueError) -> str:
    """The message with which `fit` refuses; the estimator must be as unfitted as it was before."""
    with pytest.raises(kind) as caught:
        estimator.fit(rows, targets, *options)
    with pytest.raises(NotFittedError):
        estimator.predict(X)
    message = str(caught.value)
    if isinstance(caught.value, FeatlearnError):
        assert "\n" not in message
        assert len(message) < 250
        assert not re.search(r"[.] [A-Z].*[.] [A-Z]|\barray\(|np[.]|  ", message), (
            message
        )  # the error and its fix, no dumps
    return message


# -- tables ------------------------------------------------------------------------------------------------------------


def with_entry(row: int, column: int, value: float) -> np.ndarray:
    rows = X.copy()
    rows[row, column] = value
    return rows


@pytest.mark.parametrize("estimator", [RFMRegressor, RFMClassifier])
@pytest.mark.parametrize(("value", "word"), [(NAN, "NaN"), (INF, "infinity"), (-INF, "infinity")])
def test_gaps_and_infinities_are_named(estimator, value: float, word: str) -> None:
    message = refused(estimator(), with_entry(7, 2, value), TWO)
    assert f"Input X contains {word} at row 7, column 2" in message
    assert ("make_tabular" in message) == (word == "NaN")
    frame = pd.DataFrame(with_entry(7, 2, value), columns=["age", "income", "height"])
    assert f"contains {word} at row 7, column 'height'" in refused(estimator(), frame, TWO)
    fitted = estimator(n_iter=0).fit(X, TWO)
    with pytest.raises(InputError, match=f"Input X contains {word} at row 7, column 2"):
        fitted.predict(with_entry(7, 2, value))


def test_gaps_of_pandas_are_gaps() -> None:
    frame = pd.DataFrame({"a": pd.array([1, None] * 20, dtype="Int64"), "b": X[:, 0]})
    assert "NaN at row 1, column 'a'" in refused(RFMRegressor(), frame, Y)


@pytest.mark.parametrize("value", [NAN, INF])
def test_gaps_in_targets(value: float) -> None:
    targets = Y.copy()
    targets[3] = value
    message = refused(RFMRegressor(), X, targets)
    assert re.search("y contains (NaN|infinity)", message)
    assert re.search("y contains (NaN|infinity)", refused(RFMRegressor(), X, np.column_stack([Y, targets])))
    labels = TWO.astype(float)
    labels[3] = value
    assert re.search("y contains (NaN|infinity)", refused(RFMClassifier(), X, labels))


@pytest.mark.parametrize("estimator", [RFMRegressor, RFMClassifier])
def test_tables_that_are_none(estimator) -> None:
    assert "could not convert string to float" in refused(estimator(), np.full((40, 3), "red"), TWO)
    assert "2D array" in refused(estimator(), X[:, 0], TWO)
    assert "dim" in refused(estimator(), X[:, :, None], TWO)
    assert "Complex data not supported" in refused(estimator(), X + 1j, TWO)
    assert "inconsistent numbers of samples" in refused(estimator(), X, TWO[:-1])
    assert "1 sample" in refused(estimator(), X[:1], TWO[:1])
    assert "0 sample" in refused(estimator(), X[:0], TWO[:0])
    assert "0 feature" in refused(estimator(), X[:, :0], TWO)
    assert "requires y to be passed" in refused(estimator(), X, None)
    assert "Sparse data was passed" in refused(estimator(), csr_matrix(X), TWO, kind=TypeError)


def test_targets_that_are_none() -> None:
    assert re.search("could not convert string|must be numbers", refused(RFMRegressor(), X, np.full(40, "red")))
    assert "Complex data not supported" in refused(RFMRegressor(), X, Y + 1j)
    assert "dim 3" in refused(RFMRegressor(), X, Y[:, None, None])
    assert "Unknown label type" in refused(RFMClassifier(), X, Y)
    assert "1d array" in refused(RFMClassifier(), X, np.column_stack([TWO, TWO]))


@pytest.mark.parametrize("label", [1, 0.0, "yes", True])
def test_one_class_is_no_classification(label) -> None:
    machine = RFMClassifier()
    with pytest.raises(InputError, match=r"y must have two classes or more, got one class only, "):
        machine.fit(X, np.array([label] * 40))
    with pytest.raises(InputError, match="one class only"):  # of those that count
        machine.fit(X, TWO, sample_weight=TWO)
    with pytest.raises(NotFittedError):
        machine.predict(X)


def test_a_constant_target_is_said_and_learned() -> None:
    with pytest.warns(UserWarning, match=r"y is constant \(2.5\): the model predicts this value everywhere"):
        machine = RFMRegressor().fit(X, np.full(40, 2.5))
    assert machine.predict(X + 1) == pytest.approx(2.5, abs=1e-12)
    weights = np.r_[np.ones(20), np.zeros(20)]
    with pytest.warns(UserWarning, match="y is constant"):  # where it counts
        RFMRegressor().fit(X, np.r_[np.full(20, 2.5), Y[:20]], sample_weight=weights)
    with pytest.warns(UserWarning, match="y is constant"):
        RFMRegressor().fit(X, np.full((40, 2), [1.0, 2.0]))


# -- weights -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("estimator", [RFMRegressor, RFMClassifier])
def test_weights_that_are_none(estimator) -> None:
    ones = np.ones(40)
    assert "egative" in refused(estimator(), X, TWO, -ones)
    assert "NaN" in refused(estimator(), X, TWO, NAN * ones)
    assert "infinity" in refused(estimator(), X, TWO, INF * ones)
    assert re.search("zero", refused(estimator(), X, TWO, 0 * ones))
    assert "(39,)" in refused(estimator(), X, TWO, ones[:-1])


# -- arguments ---------------------------------------------------------------------------------------------------------

KERNELS = "'laplace', 'gaussian', 'exponential', 'lpq', 'quadratic', 'polynomial', 'exp'"
UPDATES = "'fact', 'fact-geometric', 'nfa', 'none'"
NUMBERS = [0, -1.0, NAN, INF, "wide", True, None, [1.0]]
BAD = [
    *[({"bandwidth": value}, 'bandwidth must be a number above 0 or "loo", got') for value in NUMBERS],
    *[({"ridge": value}, 'ridge must be a number above 0 or "loo", got') for value in NUMBERS],
    *[({"power": value}, "power must be a finite number above 0, got") for value in NUMBERS],
    *[({"n_iter": value}, "n_iter must be an integer of at least 0") for value in (-1, 1.5, "3", True)],
    *[({"patience": value}, "patience must be an integer of at least 1, or None") for value in (0, 1.5, "3", False)],
    *[({"centers": value}, "centers must be an integer of at least 1, or None") for value in (0, -5, 2.5, "many")],
    *[({"subset": value}, "subset must be") for value in (1, 0, 0.5, "some", True)],
    *[({"kernel": value}, f"kernel must be one of {KERNELS}, got") for value in ("rbf", None, 3)],
    *[({"update": value}, f"update must be one of {UPDATES}, got") for value in ("agop", None)],
    *[({"rescale": value}, "rescale must be one of 'trace', 'max', None, got") for value in ("norm", True)],
    *[({"center_sampling": value}, "center_sampling must be 'uniform' or 'leverage', got") for value in ("x", None)],
    *[({"dtype": value}, "dtype must be 'float32' or 'float64', got") for value in ("float16", int, None, "double")],
    *[({"device": value}, "torch device such as 'cpu' or 'cuda', got") for value in ("gpu", "abacus")],
    *[({"kernel": "exponential", "exponent": q}, "exponent must be") for q in (0, 2.1, NAN)],
    *[({"kernel": "lpq", "norm": value}, "norm must be") for value in (0.9, 2.1, NAN, INF)],
    ({"kernel": "lpq", "norm": 1.2, "exponent": 1.3}, "exponent must be above 0 and at most 1.2"),
    ({"exponent": 0.5}, "exponent must be 1 for 'laplace', got 0.5. Pass kernel='exponential'."),
    *[({"kernel": "polynomial", "degree": value}, "degree must be an integer of at least 1") for value in (0, 2.5)],
    ({"kernel": "polynomial", "offset": -1.0}, "offset at least 0, got 2 and -1.0"),
    *[({"max_memory": value}, "max_memory must be") for value in ("lots", -1, 0)],
    *[({"validation": value}, "validation") for value in (1, 0, -3, True, False, 0.0, 1.0, -0.2, NAN, "cv", (X, Y, Y))],
    ({"validation": 0.001}, "must leave 1 to validate and 2 to fit, got 0.001 of 40 rows"),
    ({"validation": 0.99}, "must leave 1 to validate and 2 to fit, got 0.99 of 40 rows"),
]  # fmt: skip


@pytest.mark.parametrize(("settings", "words"), BAD, ids=[str(settings)[:60] for settings, _ in BAD])
def test_arguments_are_refused_with_what_is_valid(settings: dict, words: str) -> None:
    if settings.get("validation") is not None and isinstance(settings["validation"], tuple):
        with pytest.raises(InputError, match=words):
            RFMRegressor(**settings).fit(X, Y)
        return
    message = refused(RFMRegressor(**settings), X, Y, kind=InputError)
    assert words in message
    assert words in refused(RFMClassifier(**settings), X, TWO, kind=InputError)


def test_nothing_is_checked_before_fit() -> None:
    machine = RFMRegressor("nonsense", ridge=-1)
    assert machine.set_params(kernel="laplace", ridge="loo").fit(X, Y).score(X, Y) > 0.5


def test_more_centers_than_rows() -> None:
    with pytest.warns(UserWarning, match="centers=100 is more than the 40 distinct rows: all rows are centers"):
        machine = RFMRegressor(n_iter=1, centers=100).fit(X, Y)
    assert machine.dual_coef_.shape == (40, 1)
    with pytest.warns(UserWarning, match="more than the 20 distinct rows"):
        RFMRegressor(n_iter=0, centers=30).fit(np.concatenate([X[:20]] * 2), Y)


@pytest.mark.parametrize("dtype", ["float64", "float32"])
def test_memory_that_does_not_suffice(dtype: str) -> None:
    message = refused(RFMRegressor(max_memory="5 KB", dtype=dtype), X, Y, kind=InputError)
    assert "40 distinct rows" in message
    assert "centers=" in message
    assert ("float32" in message) == (dtype == "float64")
    enough = 40 * 40 * 8 / 0.9
    RFMRegressor(n_iter=0, max_memory=enough * 1.01).fit(X, Y)
    assert "distinct rows" in refused(RFMRegressor(max_memory=enough * 0.99), X, Y, kind=InputError)
    RFMRegressor(n_iter=0, max_memory="5 KB", centers=10, subset=20).fit(X, Y)


def test_a_splitter_must_leave_each_row_out_once() -> None:
    twice = [(np.arange(20, 40), np.arange(20)), (np.arange(20), np.arange(10, 40))]
    assert "leaves out some rows twice" in refused(RFMRegressor(validation=twice), X, Y, kind=InputError)
    assert "never leaves out some rows" in refused(RFMRegressor(validation=twice[:1]), X, Y, kind=InputError)
    assert "must leave out each row once" in refused(RFMRegressor(validation=TimeSeriesSplit(3)), X, Y)
    assert "must leave out each row once" in refused(RFMRegressor(validation=ShuffleSplit(5, random_state=0)), X, Y)
    assert "groups" in refused(RFMRegressor(validation=GroupKFold(3)), X, Y)
    assert "n_splits=100" in refused(RFMRegressor(validation=100), X, Y)


def test_held_out_rows_that_are_none() -> None:
    assert "X_val contains NaN at row 7, column 2" in refused(RFMRegressor(validation=(with_entry(7, 2, NAN), Y)), X, Y)
    assert "2 features" in refused(RFMRegressor(validation=(X[:, :2], Y)), X, Y)
    bad = Y.copy()
    bad[3] = NAN
    with pytest.raises(InputError, match="contains NaN at row 3"):
        RFMRegressor(validation=(X, bad)).fit(X, Y)
    with pytest.raises(InputError, match="labels of held-out rows"):
        RFMClassifier(validation=(X, TWO + 1)).fit(X, TWO)
    with pytest.raises(InputError, match="labels of held-out rows"):
        RFMClassifier(validation=(X, TWO[:-1])).fit(X, TWO)


# -- predicting --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("estimator", [RFMRegressor(), RFMClassifier()])
def test_unfitted_machines_say_so(estimator, tmp_path) -> None:
    calls = {"predict": (X,), "save": (tmp_path / "m",), "feature_frame": (), "feature_names": ()}
    if isinstance(estimator, RFMClassifier):
        calls |= {"predict_proba": (X,), "decision_function": (X,)}
    for name, arguments in calls.items():
        with pytest.raises(NotFittedError):
            getattr(estimator, name)(*arguments)
    assert not list(tmp_path.iterdir())


def test_tables_that_differ_from_the_fitted_one() -> None:
    frame = pd.DataFrame(X, columns=["a", "b", "c"])
    machine = RFMRegressor(n_iter=0).fit(frame, Y)
    unnamed = RFMRegressor(n_iter=0).fit(X, Y)
    with pytest.raises(ValueError, match="2 features, but RFMRegressor is expecting 3"):
        unnamed.predict(X[:, :2])
    with pytest.raises(ValueError, match="feature names"):
        machine.predict(frame.rename(columns={"a": "z"}))
    with pytest.raises(ValueError, match="feature names"):
        machine.predict(frame[["b", "a", "c"]])
    with pytest.warns(UserWarning, match="valid feature names"):
        machine.predict(X)
    with pytest.raises(ValueError, match="0 sample"):
        unnamed.predict(X[:0])


@pytest.mark.parametrize("limit", [0, -1.0, float("nan"), "1"])
def test_time_limits_that_are_refused(limit) -> None:
    with pytest.raises(InputError, match="time_limit"):
        RFMRegressor(time_limit=limit).fit(np.eye(5), np.arange(5.0))
