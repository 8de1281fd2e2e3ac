"""Units and origins of the outputs change nothing but the units and origins of the predictions."""

from __future__ import annotations

import json
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import safetensors
import safetensors.torch
from sklearn.metrics import r2_score
from sklearn.model_selection import GroupKFold

from featlearn.errors import InputError
from featlearn.rfm import RFMClassifier, RFMRegressor, load_tabular, make_tabular, save_tabular
from featlearn.rfm.training_rows import TargetUnits, target_units

source = np.random.default_rng(3)
X = source.normal(size=(70, 5))
Z = source.normal(size=(40, 5))


def outputs_of(rows: np.ndarray) -> np.ndarray:
    return np.column_stack([rows[:, 0] * rows[:, 1], np.sin(2 * rows[:, 3]) + rows[:, 4], rows[:, 2] ** 2])


Y = outputs_of(X) + 0.1 * source.normal(size=(70, 3))
UNITS = [
    (np.array([1.0, 1000.0, 1.0]), np.zeros(3)),
    (np.array([1e-9, 1.0, -1e9]), np.array([0.0, 0.0, 3e9])),
    (np.array([-1.0, 0.037, 12.0]), np.array([1e3, -50.0, 7.0])),
]
FIXED: dict[str, Any] = {"ridge": 1e-3, "bandwidth": 3.0}
_PLAIN: dict[Any, RFMRegressor] = {}  # fits in the first units, by parameters and targets


def assert_equivariant(make: Any, targets: np.ndarray, scale: np.ndarray, shift: np.ndarray, tolerance: float) -> None:
    key = (repr(make().get_params()), targets.tobytes())
    if key not in _PLAIN:
        _PLAIN[key] = make().fit(X, targets)
    plain = _PLAIN[key]
    other = make().fit(X, targets * scale + shift)
    wanted = plain.predict(Z).reshape(len(Z), -1)
    result = (other.predict(Z).reshape(len(Z), -1) - shift) / scale
    assert np.abs(result - wanted).max() < tolerance * targets.std()
    assert other.best_iteration_ == plain.best_iteration_
    assert other.ridge_ == pytest.approx(plain.ridge_, rel=1e-9)
    assert np.abs(other.feature_matrix_ - plain.feature_matrix_).max() < tolerance * np.abs(plain.feature_matrix_).max()
    assert other.dual_coef_ / scale == pytest.approx(plain.dual_coef_, abs=tolerance * np.abs(plain.dual_coef_).max())


def test_a_unit_does_not_move_the_other_output() -> None:
    """The second output times 1000 moved the first one's R2 from .836 to .352."""
    rows, test_rows = np.random.default_rng(0).normal(size=(2, 300, 10))

    def two(rows: np.ndarray) -> np.ndarray:
        return np.column_stack([rows[:, 0] * rows[:, 1], rows[:, 5] + np.sin(rows[:, 6])])

    scores = []
    for unit in (1.0, 1000.0, 1e-6):
        machine = RFMRegressor(n_iter=2, random_state=0).fit(rows, two(rows) * [1.0, unit])
        scores.append(r2_score(two(test_rows)[:, 0], machine.predict(test_rows)[:, 0]))
    assert scores[0] > 0.7
    assert scores == pytest.approx([scores[0]] * 3, abs=1e-9)


@pytest.mark.parametrize("update", ["fact", "fact-geometric", "nfa", "none"])
@pytest.mark.parametrize(("scale", "shift"), UNITS, ids=["thousand", "far apart", "signs and shifts"])
@pytest.mark.parametrize(
    "settings",
    [{}, FIXED, {"rescale": None, **FIXED}, {"diagonal": True, "rescale": "max"}],
    ids=["loo", "fixed", "not rescaled", "diagonal"],
)
def test_predictions_follow_units(update: str, scale: np.ndarray, shift: np.ndarray, settings: dict[str, Any]) -> None:
    assert_equivariant(lambda: RFMRegressor(update=update, n_iter=2, **settings), Y, scale, shift, 1e-6)


@pytest.mark.parametrize(
    "settings",
    [
        {"kernel": "gaussian"},
        {"kernel": "lpq", "norm": 1.5},
        {"kernel": "quadratic"},
        {"kernel": "polynomial", "update": "nfa"},
        {"kernel": "exp", **FIXED, "ridge": 1e-2},
        {"centers": 25},
        {"centers": 25, "center_sampling": "leverage", "random_state": 1, **FIXED},
        {"subset": 40},
        {"validation": 5},
        {"validation": 0.3, "random_state": 0},
        {"validation": None, "rescale": None, **FIXED},
        {"kernel": "laplace", "power": 1.0, "update": "nfa", "rescale": "max"},
    ],
    ids=str,
)
@pytest.mark.parametrize("outputs", [1, 3])
def test_predictions_follow_units_in_every_way_to_fit(settings: dict[str, Any], outputs: int) -> None:
    for scale, shift in UNITS[1:]:
        assert_equivariant(
            lambda: RFMRegressor(n_iter=2, **settings), Y[:, :outputs], scale[-outputs:], shift[-outputs:], 1e-6
        )


@pytest.mark.parametrize("settings", [{}, FIXED, {"centers": 25, **FIXED}, {"update": "nfa"}], ids=str)
def test_predictions_follow_units_in_float32(settings: dict[str, Any]) -> None:
    """A far origin would take all digits of float32."""
    for scale, shift in [*UNITS, (np.array([1.0, 1e25, 1.0]), np.array([1e7, 0.0, -1e7]))]:
        assert_equivariant(lambda: RFMRegressor(n_iter=2, dtype="float32", **settings), Y, scale, shift, 1e-3)


def test_predictions_follow_units_of_weighted_and_repeated_rows() -> None:
    scale, shift = UNITS[2]
    weights = source.uniform(0, 2, size=70) * (np.arange(70) % 7 > 0)
    rows, targets = np.concatenate([X, X[:20]]), np.concatenate([Y, Y[:20] + 0.5])
    weights = np.concatenate([weights, weights[:20]])
    plain = RFMRegressor(n_iter=2).fit(rows, targets, weights)
    other = RFMRegressor(n_iter=2).fit(rows, targets * scale + shift, weights)
    assert (other.predict(Z) - shift) / scale == pytest.approx(plain.predict(Z), abs=1e-8)
    # A row of weight 0 may hold any number.
    wild = np.where(weights[:, None] > 0, targets, 1e300)
    assert (RFMRegressor(n_iter=2).fit(rows, wild, weights).predict(Z) == plain.predict(Z)).all()


def test_held_out_rows_are_in_the_same_units() -> None:
    scale, shift = UNITS[1]
    plain = RFMRegressor(n_iter=2, validation=(Z, outputs_of(Z))).fit(X, Y)
    other = RFMRegressor(n_iter=2, validation=(Z, outputs_of(Z) * scale + shift)).fit(X, Y * scale + shift)
    assert (other.predict(Z) - shift) / scale == pytest.approx(plain.predict(Z), abs=1e-6)
    fixed = RFMRegressor(update="none", validation=(Z, outputs_of(Z) * scale + shift), **FIXED).fit(
        X, Y * scale + shift
    )
    squares = ((fixed.predict(Z) - outputs_of(Z) * scale - shift) ** 2).mean(0)
    assert fixed.validation_error_ == pytest.approx(squares.sum(), rel=1e-9)
    assert fixed.history_.standardized_error[0] == pytest.approx((squares / (Y * scale).var(0)).sum(), rel=1e-7)


def test_without_an_intercept_the_scale_alone_is_taken_out() -> None:
    scale = UNITS[1][0]
    for targets in (Y, Y + 5.0):
        make = lambda: RFMRegressor(n_iter=2, fit_intercept=False)  # noqa: E731
        assert_equivariant(make, targets, scale, np.zeros(3), 1e-6)
    machine = RFMRegressor(update="none", fit_intercept=False, **FIXED).fit(X, Y)
    assert (machine.intercept_ == 0).all()


@pytest.mark.parametrize("constant", [0.0, 1.0, 0.1, -1e12, 1e-12])
@pytest.mark.parametrize("fit_intercept", [True, False])
def test_a_constant_output_is_nothing_to_the_others(constant: float, fit_intercept: bool) -> None:
    targets = np.column_stack([Y[:, 0], np.full(70, constant), Y[:, 1]])
    make = lambda **more: RFMRegressor(n_iter=2, fit_intercept=fit_intercept, **more)  # noqa: E731
    result = make().fit(X, targets).predict(Z)
    if fit_intercept or not constant:
        assert result[:, [0, 2]] == pytest.approx(make().fit(X, Y[:, :2]).predict(Z), abs=1e-8)
        assert result[:, 1] == pytest.approx(constant, rel=1e-15)
    else:  # without an intercept a constant is a function to learn
        assert result[:, [0, 2]] == pytest.approx(make().fit(X, targets * [1, -7 / constant, 1]).predict(Z)[:, [0, 2]])
    held = np.column_stack([outputs_of(Z)[:, 0], constant + 1e9 * Z[:, 0], outputs_of(Z)[:, 1]])
    if fit_intercept:  # what is constant in the fit has no say in the choices
        judged = make(validation=(Z, held)).fit(X, targets).predict(Z)[:, [0, 2]]
        assert judged == pytest.approx(make(validation=(Z, held[:, [0, 2]])).fit(X, Y[:, :2]).predict(Z), abs=1e-8)


def test_a_constant_up_to_rounding() -> None:
    targets = np.column_stack([Y[:, 0], 1e20 * (0.1 + np.spacing(0.1) * (np.arange(70) % 2))])
    result = RFMRegressor(n_iter=2).fit(X, targets)
    assert result.predict(Z)[:, 0] == pytest.approx(RFMRegressor(n_iter=2).fit(X, Y[:, 0]).predict(Z), abs=1e-8)
    with warnings.catch_warnings(action="ignore"):
        assert RFMRegressor().fit(X, np.full(70, 0.1)).predict(Z) == pytest.approx(0.1, rel=1e-15)


def test_a_ridge_means_the_same_in_any_unit() -> None:
    """Kernel ridge regression is linear in y: with a given ridge and M it is that of the raw targets."""
    from sklearn.kernel_ridge import KernelRidge

    scale, shift = UNITS[1]
    targets = Y * scale + shift
    machine = RFMRegressor("gaussian", update="none", ridge=1e-3, bandwidth=2.0).fit(X, targets)
    theirs = KernelRidge(kernel="rbf", gamma=1 / 4, alpha=70 * 1e-3).fit(X, targets - targets.mean(0))
    assert machine.predict(Z) == pytest.approx(theirs.predict(Z) + targets.mean(0), rel=1e-7)
    assert machine.dual_coef_[np.abs(machine.dual_coef_[:, 0]).argsort()] == pytest.approx(
        theirs.dual_coef_[np.abs(theirs.dual_coef_[:, 0]).argsort()], rel=1e-5
    )
    assert machine.intercept_ == pytest.approx(targets.mean(0))


def test_errors_are_in_the_users_units() -> None:
    """The error of leaving rows out, by leaving them out."""
    scale, shift = UNITS[2]
    targets = Y * scale + shift
    folds = np.arange(70) % 4
    machine = RFMRegressor(update="none", validation=GroupKFoldOf(folds), **FIXED).fit(X, targets)
    squares = np.empty_like(targets)
    for fold in range(4):
        kept = folds != fold
        share = FIXED | {"ridge": FIXED["ridge"] * 70 / kept.sum()}  # n lambda stays that of all rows
        squares[~kept] = (
            RFMRegressor(update="none", **share).fit(X[kept], targets[kept]).predict(X[~kept]) - targets[~kept]
        ) ** 2
    assert machine.validation_error_ == pytest.approx(squares.mean(0).sum(), rel=1e-9)
    assert machine.history_.error[0] == machine.validation_error_
    assert machine.history_.standardized_error[0] == pytest.approx((squares.mean(0) / targets.var(0)).sum(), rel=1e-9)
    # One output: one error is the other in another unit, and the kept iterate has the least of both.
    single = RFMRegressor(n_iter=3).fit(X, 1e3 * Y[:, 0])
    assert single.history_.error.to_numpy() == pytest.approx(
        single.history_.standardized_error.to_numpy() * (1e3 * Y[:, 0]).var(), rel=1e-9
    )
    several = RFMRegressor(n_iter=3).fit(X, Y * [1.0, 1e4, 1.0])
    assert several.best_iteration_ == several.history_.standardized_error.idxmin()
    assert several.validation_error_ == several.history_.error[several.best_iteration_]


class GroupKFoldOf:
    """A splitter with given folds."""

    def __init__(self, folds: np.ndarray) -> None:
        self.folds = folds

    def split(self, X: Any, y: Any = None, groups: Any = None) -> Any:
        return GroupKFold(len(set(self.folds))).split(X, y, self.folds)

    def get_n_splits(self, *_: Any) -> int:
        return len(set(self.folds))


def test_classes_have_no_unit() -> None:
    machine = RFMClassifier(n_iter=1).fit(X, (Y[:, 0] > 0.5).astype(int))
    assert (machine._units.scale == 1).all()
    assert (machine._units.offset == 0).all()
    assert machine.history_.error.tolist() == machine.history_.standardized_error.tolist()


# -- files -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_files_keep_the_units(tmp_path: Path, dtype: str) -> None:
    scale, shift = UNITS[2]
    machine = RFMRegressor(n_iter=1, dtype=dtype).fit(X, Y * scale + shift)
    machine.save(tmp_path / "m")
    loaded = RFMRegressor.load(tmp_path / "m")
    assert (loaded.predict(Z) == machine.predict(Z)).all()
    assert (loaded.dual_coef_ == machine.dual_coef_).all()
    pd.testing.assert_frame_equal(loaded.history_, machine.history_)
    pipeline = make_tabular(RFMRegressor(n_iter=1, dtype=dtype)).fit(X, Y * scale + shift)
    save_tabular(tmp_path / "t", pipeline)
    assert (load_tabular(tmp_path / "t")[0].predict(Z) == pipeline.predict(Z)).all()


def rewritten(path: Path, change: Any) -> None:
    with safetensors.safe_open(path, framework="pt") as stored:
        described = json.loads(stored.metadata()["featlearn"])
        tensors = {name: stored.get_tensor(name).clone() for name in stored.keys()}  # noqa: SIM118
    change(tensors, described)
    safetensors.torch.save_file(tensors, path, {"featlearn": json.dumps(described)})


def test_files_of_the_first_format_are_read(tmp_path: Path) -> None:
    machine = RFMRegressor(n_iter=1).fit(X, Y * 7 + 3)
    machine.save(tmp_path / "m")

    def as_before(tensors: dict[str, Any], described: dict[str, Any]) -> None:
        described["schema_version"] = 1
        scale, offset = tensors.pop("target_scale"), tensors.pop("target_offset")
        tensors["alpha"] = tensors["alpha"] * scale
        tensors["mean"] = tensors["mean"] * scale + offset
        for line in described["history"]:
            del line["standardized_error"]

    rewritten(tmp_path / "m", as_before)
    loaded = RFMRegressor.load(tmp_path / "m")
    assert loaded.predict(Z) == pytest.approx(machine.predict(Z), abs=1e-10)
    assert loaded.dual_coef_ == pytest.approx(machine.dual_coef_)
    assert loaded.history_.error.tolist() == machine.history_.error.tolist()


@pytest.mark.parametrize("name", ["target_scale", "target_offset"])
@pytest.mark.parametrize("wrong", ["missing", "nan", "shape", "dtype", "negative"])
def test_damaged_units_are_refused(tmp_path: Path, name: str, wrong: str) -> None:
    if (name, wrong) == ("target_offset", "negative"):
        return  # an offset may be
    RFMRegressor(n_iter=0).fit(X, Y).save(tmp_path / "m")

    def damage(tensors: dict[str, Any], described: dict[str, Any]) -> None:
        if wrong == "missing":
            del tensors[name]
        elif wrong == "nan":
            tensors[name][0] = float("nan")
        elif wrong == "shape":
            tensors[name] = tensors[name][:2].clone()
        elif wrong == "dtype":
            tensors[name] = tensors[name].float()
        else:
            tensors[name][0] = -1.0

    rewritten(tmp_path / "m", damage)
    with pytest.raises(InputError, match="damaged"):
        RFMRegressor.load(tmp_path / "m")


# -- the units themselves ----------------------------------------------------------------------------------------------


def test_target_units_are_weighted_moments() -> None:
    weights = source.uniform(0.1, 2, size=70)
    units = target_units(Y, weights)
    assert units.offset == pytest.approx(np.average(Y, axis=0, weights=weights))
    assert units.scale**2 == pytest.approx(np.average((Y - units.offset) ** 2, axis=0, weights=weights))
    assert units.restore(units.standardize(Y)) == pytest.approx(Y, abs=1e-14)
    order = source.permutation(70)
    again = target_units(Y[order], weights[order])
    assert (again.offset == units.offset).all()  # not even rounding
    assert (again.scale == units.scale).all()
    bare = target_units(Y, weights, centered=False)
    assert (bare.offset == 0).all()
    assert bare.scale**2 == pytest.approx(np.average(Y**2, axis=0, weights=weights))
    huge = target_units(Y * 1e-300, weights)
    assert huge.scale * 1e300 == pytest.approx(units.scale)
    none = TargetUnits.none(3)
    assert (none.restore(none.standardize(Y)) == Y).all()
