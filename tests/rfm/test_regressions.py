"""Faults that were found from outside: each test says what a user would have met."""

from __future__ import annotations

import functools
import json
import warnings
import weakref
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import safetensors
import safetensors.torch
import torch
from sklearn.base import clone
from sklearn.exceptions import NotFittedError
from sklearn.model_selection import PredefinedSplit

from featlearn.errors import FeatlearnError, InputError
from featlearn.rfm import RFMClassifier, RFMRegressor, _hyperparameter_search, _hyperparameters, iteration
from featlearn.rfm._dense_solver import KernelSolver
from featlearn.rfm.training_rows import some_rows

source = np.random.default_rng(0)
X = source.normal(size=(80, 4))
Z = source.normal(size=(30, 4))
Y = X[:, 0] * X[:, 1] + np.sin(X[:, 2]) + 0.1 * source.normal(size=80)
TWO = (Y > 0).astype(int)
THREE = np.digitize(Y, [-0.4, 0.5])
FIXED = {"ridge": 1e-3, "bandwidth": 2.0, "validation": None}


# -- wrong numbers -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("dtype", "distance"), [("float64", 1e9), ("float32", 1e3)])
def test_one_far_row_does_not_make_all_others_equal(dtype: str, distance: float) -> None:
    """A row so far away that its kernel is 0 takes no part; what rounding its distances leave is not the others'."""
    far = np.concatenate([X, [[distance, 0.0, 0.0, 0.0]]])
    plain = RFMRegressor(n_iter=0, fit_intercept=False, dtype=dtype, **FIXED).fit(X, Y)
    settings = {**FIXED, "ridge": 1e-3 * 80 / 81}  # the same n lambda
    result = RFMRegressor(n_iter=0, fit_intercept=False, dtype=dtype, **settings).fit(far, np.append(Y, 0.0))
    assert np.abs(result.predict(Z) - plain.predict(Z)).max() < (1e-6 if dtype == "float64" else 1e-2)


def tables() -> list[tuple[np.ndarray, np.ndarray, np.ndarray]]:
    """Noisy ones, on which several iterates are about as good."""
    result = []
    for seed in range(4):
        random = np.random.default_rng(seed)
        rows, test_rows = random.normal(size=(80, 4)), random.normal(size=(30, 4))
        result.append((rows, rows[:, 0] * rows[:, 1] + 0.3 * random.normal(size=80), test_rows))
    return result


@functools.cache
def plain_predictions(update: str = "fact") -> list[np.ndarray]:
    """Predictions of fits to the tables as they are, made once for all tests."""
    return [RFMRegressor(update=update).fit(rows, targets).predict(test_rows) for rows, targets, test_rows in tables()]


CHANGES = {
    "another origin": lambda rows: rows + 1000.0,
    "another unit": lambda rows: rows * 3.0,
    "a constant column": lambda rows: np.column_stack([rows, np.full(len(rows), 3.0)]),
}


@pytest.mark.parametrize("change", CHANGES)
def test_what_says_nothing_does_not_choose_the_iterate(change: str) -> None:
    """The folds that judge iterates must not depend on the bits of the rows."""
    changed = CHANGES[change]
    for (rows, targets, test_rows), plain in zip(tables(), plain_predictions(), strict=True):
        machine = RFMRegressor().fit(changed(rows), targets)
        assert np.abs(machine.predict(changed(test_rows)) - plain).max() < 1e-6


@pytest.mark.parametrize("diagonal", [False, True])
def test_a_constant_column_has_no_part_in_the_trace(diagonal: bool) -> None:
    rows, targets, test_rows = tables()[0]
    given = RFMRegressor(bandwidth=3.0, ridge=1e-3, n_iter=2, diagonal=diagonal)
    changed = CHANGES["a constant column"]
    predicted = clone(given).fit(rows, targets).predict(test_rows)
    machine = given.fit(changed(rows), targets)
    assert np.abs(machine.predict(changed(test_rows)) - predicted).max() < 1e-9
    assert machine.feature_importances_[-1] == 0


@pytest.mark.parametrize("factor", [1 / 80, 1000.0])
@pytest.mark.parametrize("update", ["none", "fact"])
def test_the_unit_of_weights_does_not_matter(factor: float, update: str) -> None:
    """The solve ``K + n lambda W^-1`` does not know it; the ridges to choose from must not either."""
    for (rows, targets, test_rows), plain in zip(tables(), plain_predictions(update), strict=True):
        scaled = RFMRegressor(update=update).fit(rows, targets, sample_weight=np.full(80, factor))
        assert np.abs(scaled.predict(test_rows) - plain).max() < 1e-6


@pytest.mark.parametrize("value", [0.1, 7.0, 1e9])
def test_a_constant_target_teaches_nothing(value: float) -> None:
    with pytest.warns(UserWarning, match="y is constant"):
        machine = RFMRegressor().fit(X, np.full((80, 2), value))
    assert (machine.feature_matrix_ == np.eye(4)).all()  # not what rounding says
    assert machine.predict(Z) == pytest.approx(value, rel=1e-12)
    assert machine.n_iter_ == 1


def test_rows_beyond_the_range_of_squares_are_refused_or_right() -> None:
    """Predictions of NaN without a word, or an error of LAPACK, help nobody."""
    for rows, settings in [(X * 1e200, {}), (X * 1e200, FIXED), (X * 1e30, {"dtype": "float32"})]:
        try:
            machine = RFMRegressor(n_iter=1, **settings).fit(rows, Y)
        except FeatlearnError:
            continue
        assert np.isfinite(machine.predict(rows)).all()


def test_targets_beyond_the_range_of_squares_are_refused_or_right() -> None:
    try:
        machine = RFMRegressor(n_iter=1).fit(X, Y * 1e200)
    except FeatlearnError:
        return
    assert machine.predict(Z) / 1e200 == pytest.approx(RFMRegressor(n_iter=1).fit(X, Y).predict(Z), rel=1e-6)


# -- weights and classes -----------------------------------------------------------------------------------------------


def test_without_validation_outputs_are_read_as_probabilities() -> None:
    """As the documentation says; leave-one-out errors that M has seen make them too sure, and only below 1,000 rows."""
    machine = RFMClassifier(n_iter=1, validation=None).fit(X, TWO)
    assert np.isnan(machine.sharpness_)
    shares = np.clip((machine.decision_function(Z) + 1) / 2, 0, 1)
    assert machine.predict_proba(Z)[:, 1] == pytest.approx(shares, abs=1e-12)


def test_a_class_of_weight_zero_is_not_there() -> None:
    weights = (THREE != 2).astype(float)
    weighted = RFMClassifier(n_iter=1).fit(X, THREE, sample_weight=weights)
    removed = RFMClassifier(n_iter=1).fit(X[THREE != 2], THREE[THREE != 2])
    assert list(weighted.classes_) == list(removed.classes_)
    assert weighted.predict_proba(Z) == pytest.approx(removed.predict_proba(Z), abs=1e-9)


def test_a_class_weight_of_zero_leaves_one_class_only() -> None:
    with pytest.raises(InputError, match="one class only"):
        RFMClassifier(n_iter=1, class_weight={0: 0.0, 1: 1.0}).fit(X, TWO)


@pytest.mark.parametrize("weights", ["zero", "repeated"])
def test_balanced_classes_count_the_rows_that_are_there(weights: str) -> None:
    counts = np.where(np.arange(80) % 3 == 0, 0 if weights == "zero" else 3, 1)
    counts[TWO == 1] = 1  # or both classes change alike
    weighted = RFMClassifier(n_iter=1, class_weight="balanced").fit(X, TWO, sample_weight=counts)
    repeated = RFMClassifier(n_iter=1, class_weight="balanced").fit(
        np.repeat(X, counts, axis=0), np.repeat(TWO, counts)
    )
    assert weighted.intercept_ == pytest.approx(0.0, abs=1e-9)
    assert weighted.predict_proba(Z) == pytest.approx(repeated.predict_proba(Z), abs=1e-8)


def test_a_splitter_speaks_of_the_rows_it_was_made_for() -> None:
    """Rows of weight zero are removed from the table, and must be from its splits."""
    folds, weights = np.arange(80) % 5, np.where(np.arange(80) < 10, 0.0, 1.0)
    weighted = RFMRegressor(n_iter=1, validation=PredefinedSplit(folds)).fit(X, Y, sample_weight=weights)
    removed = RFMRegressor(n_iter=1, validation=PredefinedSplit(folds[10:])).fit(X[10:], Y[10:])
    assert weighted.predict(Z) == pytest.approx(removed.predict(Z), abs=1e-9)


@pytest.mark.parametrize("classifier", [False, True])
def test_a_failed_fit_does_not_mix_two_machines(classifier: bool) -> None:
    """Afterwards a machine predicts as before, or says that it is not fitted."""
    estimator, targets, others = (RFMClassifier, TWO, THREE) if classifier else (RFMRegressor, Y, np.c_[Y, Y])
    machine = estimator(n_iter=1).fit(X, targets)
    before = machine.predict_proba(Z) if classifier else machine.predict(Z)
    with pytest.raises(InputError):
        machine.set_params(max_memory=10).fit(X + 5.0, others)
    try:
        after = machine.predict_proba(Z) if classifier else machine.predict(Z)
    except NotFittedError:
        return
    assert after.shape == before.shape
    assert (after == before).all()


# -- files -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["a", "ab", "abc", "abcd", "abcde", "abcdef", "abcdefg", "abcdefgh"])
def test_a_machine_from_a_file_predicts_the_same_bits(name: str, tmp_path: Path) -> None:
    """Whatever the length of the header, which decides where in memory the tensors lie, and so how they are summed."""
    columns = [name, "x", "y", "z"]
    machine = RFMRegressor(n_iter=1).fit(pd.DataFrame(X, columns=columns), Y)
    machine.save(tmp_path / "m")
    result, test_rows = RFMRegressor.load(tmp_path / "m"), pd.DataFrame(Z, columns=columns)
    assert (result.predict(test_rows) == machine.predict(test_rows)).all()


@pytest.mark.parametrize("settings", [{"kernel": "polynomial", "degree": np.int64(3)},
                                      {"kernel": "exponential", "exponent": np.float32(0.5)},
                                      {"kernel": "lpq", "norm": np.float32(1.5), "exponent": np.int64(1)}])  # fmt: skip
def test_numbers_of_numpy_come_back_from_a_file(settings: dict, tmp_path: Path) -> None:
    """A search over ``np.arange`` sets such; left out of the file, the kernel would be another."""
    machine = RFMRegressor(n_iter=1, **settings).fit(X, Y)
    machine.save(tmp_path / "m")
    assert RFMRegressor.load(tmp_path / "m").predict(Z) == pytest.approx(machine.predict(Z), rel=1e-9)


def described(path: Path) -> tuple[dict, dict]:
    with safetensors.safe_open(path, framework="pt") as stored:
        tensors = {name: stored.get_tensor(name).clone() for name in stored.keys()}  # noqa: SIM118  # not a dict
        return tensors, json.loads(stored.metadata()["featlearn"])


DAMAGES = {
    "no tensor alpha": lambda tensors, said: tensors.pop("alpha"),
    "no fit": lambda tensors, said: said.pop("fit"),
    "no parameters": lambda tensors, said: said.pop("parameters"),
    "a parameter from the future": lambda tensors, said: said["parameters"].update(depth=3),
    "a kernel from the future": lambda tensors, said: said["parameters"].update(kernel="matern"),
    "no classes": lambda tensors, said: said.pop("classes"),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_file_that_lacks_something_is_named(damage: str, tmp_path: Path) -> None:
    path = tmp_path / "m"
    RFMClassifier(n_iter=0).fit(X, TWO).save(path)
    tensors, said = described(path)
    DAMAGES[damage](tensors, said)
    safetensors.torch.save_file(tensors, path, {"featlearn": json.dumps(said)})
    with pytest.raises(InputError):
        RFMClassifier.load(path)


@pytest.mark.parametrize("text", ["[]", "3", "null"])
def test_a_header_that_is_no_description(text: str, tmp_path: Path) -> None:
    safetensors.torch.save_file({"weight": torch.ones(2)}, tmp_path / "m", {"featlearn": text})
    with pytest.raises(InputError):
        RFMRegressor.load(tmp_path / "m")


# -- memory ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("validation", [None, "loo"])
def test_one_matrix_of_all_rows_at_a_time(validation, monkeypatch: pytest.MonkeyPatch) -> None:
    """The documentation says one n x n matrix, and memory is checked for one."""
    alive: weakref.WeakSet[KernelSolver] = weakref.WeakSet()
    most = [0.0]

    class Watched(KernelSolver):
        def __init__(self, *arguments, **options) -> None:
            super().__init__(*arguments, **options)
            alive.add(self)
            most[0] = max(most[0], sum(solver._buffer.numel() for solver in alive) / 80**2)

    for module in (iteration, _hyperparameter_search):
        monkeypatch.setattr(module, "KernelSolver", Watched)
    monkeypatch.setattr(_hyperparameters, "TUNING_ROWS", 10)  # below, a few matrices are allowed,
    monkeypatch.setattr(_hyperparameters, "_ENOUGH", 10)  # and one per fold while more rows are needed
    RFMRegressor(n_iter=3, ridge=1e-3, bandwidth=2.0, validation=validation).fit(X, Y)
    assert 0 < most[0] <= 1.0


# -- messages ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("label", [1, "yes", True])
def test_labels_are_quoted_as_users_write_them(label) -> None:
    with pytest.raises(InputError) as caught:
        RFMClassifier().fit(X, np.array([label] * 80))
    assert "np." not in str(caught.value)
    with pytest.raises(InputError, match="held-out") as caught:
        RFMClassifier(validation=(X[:1], [5])).fit(X, TWO)
    assert "np." not in str(caught.value)


WRONG = [
    {"kernel": "polynomial", "degree": "a"},
    {"kernel": "polynomial", "degree": float("nan")},
    {"kernel": "polynomial", "offset": "a"},
    {"kernel": "polynomial", "offset": float("nan")},
    {"kernel": "polynomial", "offset": float("inf")},
    {"kernel": "lpq", "norm": "x"},
    {"kernel": "exponential", "exponent": "1"},
    {"device": 7.5},
    {"device": "cuda:99"},
    {"n_iter": None},
]


@pytest.mark.parametrize("settings", WRONG, ids=str)
def test_arguments_of_the_wrong_type_are_refused_like_others(settings: dict) -> None:
    with pytest.raises(InputError):
        RFMRegressor(**settings).fit(X, Y)


@pytest.mark.parametrize("dtype", [np.float32, np.dtype("float32")])
def test_types_of_numpy_are_types(dtype) -> None:
    assert (RFMRegressor(dtype=dtype, **FIXED).fit(X, Y).predict(Z)
            == RFMRegressor(dtype="float32", **FIXED).fit(X, Y).predict(Z)).all()  # fmt: skip


@pytest.mark.parametrize(
    "validation",
    [(X[:10], np.ones((10, 2))), (X[:10], np.ones(20)), (X[:10], np.ones(7)), (X[:10], ["a"] * 10), [X[:10], Y[:10]], X,
     {"folds": 5}],
    ids=["two outputs", "twice as many", "too few", "texts", "a list", "rows alone", "a dict"],
)  # fmt: skip
def test_held_out_rows_that_do_not_fit_are_refused(validation) -> None:
    """The first two were taken without a word, and gave an error over targets that are none."""
    with pytest.raises(InputError) as caught:
        RFMRegressor(n_iter=1, validation=validation).fit(X, Y)
    assert len(str(caught.value)) < 250  # no dump of the rows


def test_a_wrong_tuple_is_not_printed_whole() -> None:
    with pytest.raises(InputError) as caught:
        RFMRegressor(validation=(X, Y, Y)).fit(X, Y)
    assert len(str(caught.value)) < 250


def test_a_window_within_one_fold_is_said() -> None:
    """Nobody is left to judge it; ``float division by zero`` does not say so."""
    folds = PredefinedSplit((np.arange(80) > 5).astype(int))
    with pytest.raises(InputError, match="subset"):
        RFMRegressor(subset=3, validation=folds).fit(X, Y)


def test_memory_with_centers_asks_for_a_smaller_subset() -> None:
    with pytest.raises(InputError, match="subset="):
        RFMRegressor(centers=20, subset=None, max_memory=100).fit(X, Y)


@pytest.mark.parametrize("estimator", [RFMRegressor(), RFMClassifier()])
def test_drawing_before_fitting(estimator) -> None:
    with pytest.raises(NotFittedError):
        estimator.plot_features()


def test_warnings_point_to_the_users_line() -> None:
    for call in (
        lambda: RFMRegressor(n_iter=0, centers=100).fit(X, Y),
        lambda: RFMRegressor(n_iter=0).fit(X, np.ones(80)),
    ):
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            call()
        assert [Path(warning.filename).name for warning in caught] == ["test_regressions.py"]


def test_a_share_held_out_depends_on_no_order_and_parts_no_equal_rows() -> None:
    random = np.random.default_rng(0)
    rows = np.repeat(random.normal(size=(30, 3)), 3, axis=0)
    order = random.permutation(90)
    for seed in (None, 4):
        result = some_rows(rows, 0.2, None if seed is None else np.random.RandomState(seed))
        again = some_rows(rows[order], 0.2, None if seed is None else np.random.RandomState(seed))
        assert result.sum() == 18
        assert (result[order] == again).all()
        assert (result.reshape(30, 3).sum(1) % 3 == 0).all()
    assert (result != some_rows(rows, 0.2, None)).any()
