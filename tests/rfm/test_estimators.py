"""The estimators as their users meet them: labels, weights, files, names, and what must not matter."""

from __future__ import annotations

import json
import pickle
import zipfile
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import safetensors
import safetensors.torch
import torch
from matplotlib import pyplot as plt
from sklearn.base import clone
from sklearn.metrics import log_loss
from sklearn.model_selection import GridSearchCV, KFold, PredefinedSplit, cross_val_score

from featlearn.errors import InputError
from featlearn.rfm import RFMClassifier, RFMRegressor, _hyperparameters, make_tabular
from featlearn.rfm.feature_updates import root_of
from featlearn.rfm.training_rows import fit_calibration, simplex

source = np.random.default_rng(0)
X = source.normal(size=(80, 4))
Z = source.normal(size=(30, 4))
Y = X[:, 0] * X[:, 1] + np.sin(X[:, 2]) + 0.1 * source.normal(size=80)
Y_THERE = Z[:, 0] * Z[:, 1] + np.sin(Z[:, 2])
TWO = (Y > 0).astype(int)
THREE = np.digitize(Y, [-0.4, 0.5])


def draws(n: int, classes: int, seed: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Rows, labels drawn from known probabilities, and these."""
    random = np.random.default_rng(seed)
    rows = random.normal(size=(n, 5))
    logits = np.column_stack([2 * rows[:, 0] + rows[:, 1], np.zeros(n), -1.5 * rows[:, 0]])[:, :classes]
    chances = np.exp(logits) / np.exp(logits).sum(axis=1, keepdims=True)
    return rows, (chances.cumsum(axis=1) < random.random((n, 1))).sum(axis=1), chances


# -- labels and probabilities ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "labels",
    [
        np.array(["no", "yes"]),
        np.array(["no", "yes"], dtype=object),
        np.array([-1, 1]),
        np.array([3, 7]),
        np.array([False, True]),
        np.array([0.0, 1.0]),
        np.array([2, 5, 11]),
        np.array(["ant", "bee", "cat"]),
    ],
    ids=lambda labels: f"{labels.dtype} {labels[0]}",
)
def test_any_labels_give_the_same_machine(labels: np.ndarray) -> None:
    places = TWO if len(labels) == 2 else THREE
    plain = RFMClassifier(n_iter=2).fit(X, places)
    named = RFMClassifier(n_iter=2).fit(X, labels[places])
    assert list(named.classes_) == list(labels)
    assert named.classes_.dtype == labels.dtype
    answers = named.predict(Z)
    assert answers.dtype == labels.dtype
    assert (answers == labels[plain.predict(Z)]).all()
    assert (named.predict_proba(Z) == plain.predict_proba(Z)).all()
    assert named.score(X, labels[places]) > 0.9


@pytest.mark.parametrize("target", [TWO, THREE], ids=["two", "three"])
@pytest.mark.parametrize("validation", ["loo", 5, 0.25, None])
def test_answers_scores_and_probabilities_agree(target: np.ndarray, validation) -> None:
    machine = RFMClassifier(n_iter=2, validation=validation).fit(X, target)
    scores, probabilities, answers = (f(Z) for f in (machine.decision_function, machine.predict_proba, machine.predict))
    k = len(machine.classes_)
    assert probabilities.shape == (30, k)
    assert probabilities.sum(axis=1) == pytest.approx(1.0, abs=1e-12)
    assert (probabilities >= 0).all()
    assert (machine.classes_[probabilities.argmax(axis=1)] == answers).all()
    if k == 2:
        assert scores.shape == (30,)
        assert (answers == (scores > 0)).all()
    else:
        assert scores.shape == (30, k)
        assert (answers == scores.argmax(axis=1)).all()
        assert scores.sum(axis=1) == pytest.approx(0.0, abs=1e-10)


def test_two_classes_are_a_regression_on_minus_one_and_one() -> None:
    machine = RFMClassifier(n_iter=2).fit(X, TWO)
    regression = RFMRegressor(n_iter=2).fit(X, 2.0 * TWO - 1)
    shift = (machine.offsets_[1] - machine.offsets_[0]) / 2 / machine.sharpness_
    assert machine.decision_function(Z) == pytest.approx(regression.predict(Z) + shift, rel=1e-12)
    raw = RFMClassifier(n_iter=2, validation=None, bandwidth=2.0, ridge=1e-2).fit(X, TWO)
    same = RFMRegressor(n_iter=2, validation=None, bandwidth=2.0, ridge=1e-2).fit(X, 2.0 * TWO - 1)
    assert raw.decision_function(Z) == pytest.approx(same.predict(Z), rel=1e-12)
    assert machine.feature_matrix_ == pytest.approx(regression.feature_matrix_, rel=1e-12)


@pytest.mark.parametrize("k", [2, 3, 7])
def test_corners_of_the_simplex(k: int) -> None:
    corners = simplex(k)
    assert corners.shape == (k, k - 1)
    assert corners @ corners.T == pytest.approx((k * np.eye(k) - 1) / (k - 1), abs=1e-12)
    assert corners.sum(axis=0) == pytest.approx(0, abs=1e-12)


def test_three_classes_do_not_depend_on_their_order() -> None:
    machine = RFMClassifier(n_iter=2).fit(X, THREE)
    turned = RFMClassifier(n_iter=2).fit(X, (THREE + 1) % 3)
    assert turned.predict_proba(Z)[:, [1, 2, 0]] == pytest.approx(machine.predict_proba(Z), abs=1e-6)


@pytest.mark.parametrize("sharpness", [0.5, 2.0])
def test_sharpness_is_found_again(sharpness: float) -> None:
    random = np.random.default_rng(0)
    scores = random.normal(size=(20_000, 3))
    chances = np.exp(sharpness * scores)
    chances /= chances.sum(axis=1, keepdims=True)
    labels = (chances.cumsum(axis=1) < random.random((20_000, 1))).sum(axis=1)
    # Its standard error is about 1 / sqrt(20,000 * 0.5) = 0.01.
    fitted, offsets = fit_calibration(scores, np.eye(3)[labels])
    assert fitted == pytest.approx(sharpness, abs=0.05)
    assert offsets == pytest.approx(np.zeros(3), abs=0.05)


@pytest.mark.parametrize("classes", [2, 3])
@pytest.mark.parametrize("validation", ["loo", pytest.param(5, marks=pytest.mark.slow)])
def test_probabilities_are_calibrated(classes: int, validation) -> None:
    """Over 6 tables of 200 noisy rows; the limits are about twice what was measured.

    A class's log-loss exceeds the best possible by 0.03 to 0.08 where the shares of the classes alone exceed it by 0.25
    to 0.43. With ten bins of 3,000 rows the calibration error of true probabilities would be 0.02.
    """
    excesses, useless, calibration, confidence = [], [], [], []
    for seed in range(6):
        rows, labels, chances = draws(3200, classes, seed)
        machine = RFMClassifier(validation=validation).fit(rows[:200], labels[:200])
        result, wanted = machine.predict_proba(rows[200:]), labels[200:]
        best = log_loss(wanted, chances[200:])
        excesses.append(log_loss(wanted, result) - best)
        useless.append(log_loss(wanted, np.tile(np.bincount(labels[:200]) / 200, (3000, 1))) - best)
        bins = np.minimum((10 * result[:, 0]).astype(int), 9)
        gaps = [np.sum(result[bins == b, 0] - (wanted[bins == b] == 0)) for b in range(10)]
        calibration.append(np.abs(gaps).sum() / 3000)
        confidence.append(result.max(axis=1).mean() - (result.argmax(axis=1) == wanted).mean())
    assert np.mean(excesses) < 0.4 * np.mean(useless)
    assert np.mean(calibration) < 0.08
    assert -0.05 < np.mean(confidence) < 0.05  # surer than right, or the other way round


def test_classes_that_are_told_apart_wholly_have_finite_sharpness() -> None:
    rows = np.concatenate([X + 10, X - 10])
    machine = RFMClassifier(n_iter=1).fit(rows, np.repeat([0, 1], 80))
    assert 1.0 < machine.sharpness_ < 100.0
    assert machine.predict_proba(rows).max(axis=1).min() > 0.9


# -- weights -----------------------------------------------------------------------------------------------------------

WEIGHTS = source.integers(0, 4, size=80)
assert (WEIGHTS == 0).sum() > 5


def fitted_pair(estimator, target: np.ndarray):
    """Fitted with weights, and on rows repeated as often; rows of weight zero are not there."""
    weighted = clone(estimator).fit(X, target, sample_weight=WEIGHTS)
    return weighted, clone(estimator).fit(np.repeat(X, WEIGHTS, axis=0), np.repeat(target, WEIGHTS))


@pytest.mark.parametrize("settings", [{}, {"validation": None}, {"ridge": 1e-3, "bandwidth": 2.0}, {"diagonal": True}])
def test_a_weight_is_a_repetition_and_zero_is_absence(settings: dict) -> None:
    weighted, repeated = fitted_pair(RFMRegressor(n_iter=2, **settings), Y)
    assert weighted.predict(Z) == pytest.approx(repeated.predict(Z), abs=1e-9)
    assert weighted.feature_matrix_ == pytest.approx(repeated.feature_matrix_, abs=1e-9)
    assert weighted.validation_error_ == pytest.approx(repeated.validation_error_, rel=1e-9, nan_ok=True)
    weighted, repeated = fitted_pair(RFMClassifier(n_iter=2, **settings), THREE)
    assert weighted.predict_proba(Z) == pytest.approx(repeated.predict_proba(Z), abs=1e-8)


def test_repetitions_may_have_different_targets() -> None:
    """Two targets at one row: their mean is learned, their distance counts in the error."""
    doubled = np.concatenate([X, X])
    machine = RFMRegressor(n_iter=1, ridge=1e-3, bandwidth=2.0)
    apart = clone(machine).fit(doubled, np.concatenate([Y - 1, Y + 1]))
    together = clone(machine).fit(doubled, np.concatenate([Y, Y]))
    assert apart.predict(Z) == pytest.approx(together.predict(Z), abs=1e-9)
    assert apart.validation_error_ == pytest.approx(together.validation_error_ + 1, rel=1e-9)


def test_weights_of_classes_multiply_those_of_rows() -> None:
    factors = {0: 3.0, 1: 0.5}
    by_class = RFMClassifier(n_iter=1, class_weight=factors).fit(X, TWO, sample_weight=WEIGHTS)
    by_row = RFMClassifier(n_iter=1).fit(X, TWO, sample_weight=WEIGHTS * np.where(TWO, 0.5, 3.0))
    assert (by_class.predict_proba(Z) == by_row.predict_proba(Z)).all()


def test_balanced_classes_count_the_same() -> None:
    rare = np.r_[np.flatnonzero(TWO)[:8], np.flatnonzero(TWO == 0)]
    plain = RFMClassifier(n_iter=1).fit(X[rare], TWO[rare])
    balanced = RFMClassifier(n_iter=1, class_weight="balanced").fit(X[rare], TWO[rare])
    assert balanced.decision_function(Z).mean() > plain.decision_function(Z).mean() + 0.1
    assert balanced.intercept_ == pytest.approx(0.0, abs=1e-12)  # the mean of -1 and 1
    counts = np.bincount(TWO[rare])
    by_hand = RFMClassifier(n_iter=1, class_weight={c: len(rare) / 2 / counts[c] for c in (0, 1)}).fit(
        X[rare], TWO[rare]
    )
    assert (by_hand.predict_proba(Z) == balanced.predict_proba(Z)).all()


# -- outputs and scikit-learn's company --------------------------------------------------------------------------------


def test_several_outputs() -> None:
    both = np.column_stack([Y, X[:, 3] ** 2])
    machine = RFMRegressor(n_iter=2).fit(X, both)
    assert machine.predict(Z).shape == (30, 2)
    assert machine.dual_coef_.shape == (80, 2)
    assert machine.score(X, both) > 0.9
    assert RFMRegressor(n_iter=1).fit(X, Y[:, None]).predict(Z).shape == (30, 1)
    assert RFMRegressor(n_iter=1).fit(X, Y).predict(Z).shape == (30,)
    # The same output twice is one output, with twice the error.
    twice = RFMRegressor(n_iter=2).fit(X, np.column_stack([Y, Y]))
    once = RFMRegressor(n_iter=2).fit(X, Y)
    assert twice.predict(Z) == pytest.approx(np.column_stack([once.predict(Z)] * 2), abs=1e-7)
    assert twice.validation_error_ == pytest.approx(2 * once.validation_error_, rel=1e-7)


def test_clones_searches_and_copies() -> None:
    machine = RFMRegressor("gaussian", n_iter=1, ridge=1e-3).fit(X, Y)
    assert clone(machine).get_params() == machine.get_params()
    assert not hasattr(clone(machine), "feature_matrix_")
    assert (clone(machine).fit(X, Y).predict(Z) == machine.predict(Z)).all()
    copied = pickle.loads(pickle.dumps(machine))
    assert (copied.predict(Z) == machine.predict(Z)).all()
    search = GridSearchCV(
        RFMClassifier(n_iter=1), {"update": ["fact", "none"], "kernel": ["laplace", "gaussian"]}, cv=3
    )
    search.fit(X, TWO)
    assert set(search.best_params_) == {"update", "kernel"}
    assert np.isfinite(search.cv_results_["mean_test_score"]).all()
    assert cross_val_score(RFMRegressor(n_iter=1), X, Y, cv=3).mean() > 0.3


def test_learned_attributes() -> None:
    machine = RFMRegressor(n_iter=3).fit(X, Y)
    history = machine.history_
    assert list(history.index) == list(range(machine.n_iter_))
    assert history.loc[machine.best_iteration_, "error"] == machine.validation_error_ == history["error"].min()
    assert history.loc[machine.best_iteration_, "bandwidth"] == machine.bandwidth_
    assert history.loc[machine.best_iteration_, "ridge"] == machine.ridge_
    assert machine.feature_matrix_ == pytest.approx(machine.feature_matrix_.T, abs=1e-12)
    assert np.linalg.eigvalsh(machine.feature_matrix_)[0] > -1e-12
    assert machine.feature_matrix_.trace() == pytest.approx(4.0)
    assert machine.feature_importances_ == pytest.approx(machine.feature_matrix_.diagonal() / 4)
    assert set(machine.feature_importances_.argsort()[-2:]) == {0, 1}  # the product is most of Y
    assert machine.intercept_ == pytest.approx(Y.mean())
    assert machine.condition_ > 1
    diagonal = RFMRegressor(n_iter=1, diagonal=True).fit(X, Y).feature_matrix_
    assert (diagonal == np.diag(diagonal.diagonal())).all()


def test_predictions_are_what_the_attributes_say() -> None:
    machine = RFMRegressor(n_iter=2, validation=None, ridge=1e-3, bandwidth=2.0).fit(X, Y)
    center = machine._center + machine._model.centers.numpy()
    steps = Z[:, None] - center[None]
    distances = np.sqrt(np.einsum("nmd,de,nme->nm", steps, machine.feature_matrix_, steps))
    wanted = np.exp(-distances / machine.bandwidth_) @ machine.dual_coef_ + machine.intercept_
    assert machine.predict(Z) == pytest.approx(wanted[:, 0], abs=1e-9)


# -- files -------------------------------------------------------------------------------------------------------------

FRAME = pd.DataFrame(X, columns=["a", "b", "c", "d"])
LABELS = {
    "texts": np.array(["no", "yes"]),
    "objects": np.array(["no", "yes"], dtype=object),
    "integers": np.array([-1, 4]),
    "booleans": np.array([False, True]),
    "floats": np.array([0.0, 2.0], dtype=np.float32),
    "three": np.array(["ant", "bee", "cat"]),
}


@pytest.mark.parametrize("labels", LABELS)
def test_a_classifier_comes_back_from_its_file(labels: str, tmp_path: Path) -> None:
    names = LABELS[labels]
    machine = RFMClassifier(n_iter=1).fit(X, names[TWO if len(names) == 2 else THREE])
    machine.save(tmp_path / "machine.safetensors")
    result = RFMClassifier.load(tmp_path / "machine.safetensors")
    assert result.predict_proba(Z) == pytest.approx(machine.predict_proba(Z), abs=1e-12)  # to the bit: test_found.py
    assert (result.predict(Z) == machine.predict(Z)).all()
    assert result.classes_.dtype == machine.classes_.dtype
    assert result.predict(Z).dtype == machine.predict(Z).dtype


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"diagonal": True},
        {"dtype": "float32"},
        {"centers": 20},
        {"subset": 40},
        {"kernel": "lpq", "norm": 1.5, "exponent": 0.7},
        {"kernel": "polynomial", "degree": 3},
        {"validation": None, "ridge": 1e-3, "bandwidth": 2.0},
        {"validation": (FRAME[:10], Y[:10]), "random_state": np.random.RandomState(0)},
        {"validation": KFold(4), "fit_intercept": False},
    ],
    ids=lambda settings: " ".join(settings) or "plain",
)
def test_a_regressor_comes_back_from_its_file(settings: dict, tmp_path: Path) -> None:
    machine = RFMRegressor(n_iter=1, **settings).fit(FRAME, Y)
    machine.save(str(tmp_path / "new" / "machine"))
    result = RFMRegressor.load(tmp_path / "new" / "machine")
    test_rows = pd.DataFrame(Z, columns=FRAME.columns)
    near = 1e-3 if settings.get("dtype") == "float32" else 1e-10
    assert result.predict(test_rows) == pytest.approx(machine.predict(test_rows), abs=near)  # to the bit: test_found.py
    pd.testing.assert_frame_equal(result.feature_frame(), machine.feature_frame())
    pd.testing.assert_frame_equal(result.history_, machine.history_)
    learned = [name for name in vars(machine) if name.endswith("_") and not name.startswith("_")]
    for name in set(learned) - {"history_", "feature_names_in_"}:
        assert np.array_equal(getattr(result, name), getattr(machine, name), equal_nan=True), name
    assert result.n_features_in_ == 4
    result.save(tmp_path / "again")  # and once more round
    assert RFMRegressor.load(tmp_path / "again").predict(test_rows) == pytest.approx(
        result.predict(test_rows), abs=near
    )


def test_several_outputs_come_back_in_their_shape(tmp_path: Path) -> None:
    machine = RFMRegressor(n_iter=1).fit(X, np.column_stack([Y, Y**2]))
    machine.save(tmp_path / "m")
    assert RFMRegressor.load(tmp_path / "m").predict(Z) == pytest.approx(machine.predict(Z), abs=1e-10)


def test_a_file_is_data_alone(tmp_path: Path) -> None:
    path = tmp_path / "m"
    RFMClassifier(n_iter=1).fit(X, np.where(TWO, "yes", "no")).save(path)
    assert not zipfile.is_zipfile(path)
    with pytest.raises(pickle.UnpicklingError):
        pickle.loads(path.read_bytes())
    with safetensors.safe_open(path, framework="np") as stored:
        described = json.loads(stored.metadata()["featlearn"])
        assert {stored.get_tensor(name).dtype for name in stored.keys()} == {np.dtype(np.float64)}  # noqa: SIM118
    assert described["schema_version"] == 2
    assert described["kind"] == "RFMClassifier"


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    path = tmp_path / "machine"
    RFMRegressor(n_iter=1).fit(X, Y).save(path)
    return path


@pytest.mark.parametrize("size", [0, 4, 100, 0.5, 0.99])
def test_a_file_that_was_cut_off(saved: Path, size: float) -> None:
    whole = saved.read_bytes()
    saved.write_bytes(whole[: size if isinstance(size, int) else int(size * len(whole))])
    with pytest.raises(InputError, match="is damaged, or was not written by featlearn"):
        RFMRegressor.load(saved)


def test_files_of_others(saved: Path) -> None:
    for content in (b"\x80\x04K\x01.", b"age,income\n1,2\n", b"{}" * 100):
        saved.write_bytes(content)
        with pytest.raises(InputError, match="is damaged, or was not written by featlearn"):
            RFMRegressor.load(saved)
    for metadata in (None, {"format": "pt"}, {"featlearn": "not json"}):
        safetensors.torch.save_file({"weight": torch.ones(3)}, saved, metadata)
        with pytest.raises(InputError, match="is damaged, or was not written by featlearn"):
            RFMRegressor.load(saved)
    with pytest.raises(InputError, match="there is no file"):
        RFMRegressor.load(saved.parent / "elsewhere")


def test_a_file_of_the_wrong_kind_or_format(saved: Path) -> None:
    with pytest.raises(InputError, match="holds a RFMRegressor, not a RFMClassifier"):
        RFMClassifier.load(saved)
    safetensors.torch.save_file({"weight": torch.ones(3)}, saved, {"featlearn": '{"schema_version": 99}'})
    with pytest.raises(InputError, match="has format 99, and this featlearn reads 1"):
        RFMRegressor.load(saved)


def test_a_failed_save_leaves_the_old_file_whole(saved: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before = saved.read_bytes()
    other = RFMRegressor(n_iter=0).fit(X, -Y)

    def half_written(tensors, path, metadata) -> None:
        Path(path).write_bytes(b"half")
        raise OSError("No space left on device")

    monkeypatch.setattr(safetensors.torch, "save_file", half_written)
    with pytest.raises(OSError, match="No space left"):
        other.save(saved)
    assert saved.read_bytes() == before
    assert [path.name for path in saved.parent.iterdir()] == ["machine"]
    monkeypatch.undo()
    other.save(saved)
    assert RFMRegressor.load(saved).predict(Z) == pytest.approx(other.predict(Z), abs=1e-10)
    assert [path.name for path in saved.parent.iterdir()] == ["machine"]


def test_labels_that_no_file_can_hold(tmp_path: Path) -> None:
    days = np.array(["2024-01-01", "2024-01-02"], dtype="datetime64[D]")
    machine = RFMClassifier(n_iter=0).fit(X, TWO)
    machine.classes_ = days
    with pytest.raises(InputError, match="must be texts, numbers or booleans to be saved, got datetime"):
        machine.save(tmp_path / "m")
    with pytest.raises(InputError, match="is a folder"):
        RFMRegressor(n_iter=0).fit(X, Y).save(tmp_path)


# -- tables, names, pictures -------------------------------------------------------------------------------------------


def test_names_reach_the_feature_matrix() -> None:
    frame = pd.DataFrame(X, columns=["age", "income", "height", "nothing"])
    machine = RFMRegressor(n_iter=1).fit(frame, Y)
    result = machine.feature_frame()
    assert list(result.index) == list(result.columns) == list(frame.columns)
    assert (result.to_numpy() == machine.feature_matrix_).all()
    assert RFMRegressor(n_iter=0).fit(X, Y).feature_names() == ["x0", "x1", "x2", "x3"]


@pytest.mark.parametrize("columns", [None, ["a", "b", "c", "d"]])
def test_features_are_drawn(columns) -> None:
    figure = (
        RFMRegressor(n_iter=1)
        .fit(pd.DataFrame(X, columns=columns) if columns else X, Y)
        .plot_features(top=3, title="What counts")
    )
    texts = {text.get_text() for axes in figure.axes for text in axes.get_xticklabels() + axes.get_yticklabels()}
    assert (columns or ["x0"])[0] in texts
    figure.canvas.draw()
    plt.close(figure)


def test_a_table_as_it_comes() -> None:
    random = np.random.default_rng(1)
    n = 300
    frame = pd.DataFrame({
        "income": random.lognormal(10, 1, n),
        "color": random.choice(["red", "blue", "green"], n),
        "member": random.random(n) < 0.5,
        "visits": pd.array(random.integers(0, 9, n), dtype="Int64"),
        "size": pd.Categorical(random.choice(["S", "L"], n)),
    })  # fmt: skip
    bought = np.where((frame["color"] == "red") ^ frame["member"], "yes", "no")
    frame.loc[random.random(n) < 0.1, "income"] = np.nan
    frame.loc[random.random(n) < 0.1, "visits"] = pd.NA
    frame.loc[random.random(n) < 0.1, "size"] = np.nan
    model = make_tabular(RFMClassifier()).fit(frame[:200], bought[:200])
    assert model.score(frame[200:], bought[200:]) > 0.9
    importances = model["estimator"].feature_frame()
    assert {"income", "income missing", "color=red", "member", "visits missing", "size=L"} <= set(importances.index)
    strongest = importances.to_numpy().diagonal().argsort()[::-1][:2]
    assert set(importances.index[strongest]) == {"color=red", "member"}
    assert model.predict_proba(frame[200:]).shape == (100, 2)
    assert set(model.predict(frame[200:])) == {"yes", "no"}


def test_the_history_is_told_on_request_only(capsys: pytest.CaptureFixture[str]) -> None:
    RFMRegressor(n_iter=2).fit(X, Y).predict(Z)
    assert capsys.readouterr() == ("", "")
    machine = RFMRegressor(n_iter=2, verbose=True).fit(X, Y)
    out, err = capsys.readouterr()
    assert out == ""
    assert "rank of M" in err
    assert f"* {machine.best_iteration_}" in err
    assert sum(line.rstrip().endswith(" s") for line in err.splitlines()) == machine.n_iter_
    machine.predict(Z)
    assert capsys.readouterr() == ("", "")


# -- what must not change ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", [None, 3])
def test_no_global_state_and_no_argument_is_touched(seed) -> None:
    np.random.seed(7)  # noqa: NPY002  # the state in question
    torch.manual_seed(7)
    before = np.random.get_state()[1].copy(), torch.get_rng_state()  # noqa: NPY002
    rows, labels, weights, test_rows = X.copy(), THREE.copy(), np.abs(Y).copy(), Z.copy()
    for settings in ({}, {"centers": 20, "center_sampling": "leverage"}, {"validation": 0.2, "subset": 30}):
        machine = RFMClassifier(n_iter=1, random_state=seed, **settings).fit(rows, labels, weights)
        machine.predict_proba(test_rows)
    assert (np.random.get_state()[1] == before[0]).all()  # noqa: NPY002
    assert torch.equal(torch.get_rng_state(), before[1])
    assert (rows == X).all()
    assert (labels == THREE).all()
    assert (weights == np.abs(Y)).all()
    assert (test_rows == Z).all()
    assert torch.get_default_dtype() == torch.float32


def test_read_only_and_oddly_laid_out_arrays() -> None:
    rows, targets = np.asfortranarray(X), Y[::-1].copy()[::-1]
    rows.flags.writeable = targets.flags.writeable = False
    result = RFMRegressor(n_iter=1).fit(rows, targets).predict(np.repeat(Z, 2, axis=0)[::2])
    assert result == pytest.approx(RFMRegressor(n_iter=1).fit(X, Y).predict(Z), abs=1e-12)
    assert RFMRegressor(n_iter=1).fit(X.tolist(), Y.tolist()).predict(Z.tolist()) == pytest.approx(result, abs=1e-12)


@pytest.mark.parametrize("settings", [{}, {"random_state": 1}, {"centers": 30}, {"subset": 30}, {"validation": 0.2}])
def test_two_fits_have_the_same_bits(settings: dict) -> None:
    first, second = (RFMRegressor(n_iter=2, **settings).fit(X, Y) for _ in range(2))
    assert (first.predict(Z) == second.predict(Z)).all()
    assert (first.feature_matrix_ == second.feature_matrix_).all()


@pytest.mark.parametrize(
    ("n", "settings"),
    [(80, {}), (80, {"random_state": 5}), (80, {"subset": 30}), (80, {"centers": 20}), (220, {"n_iter": 1}),
     (260, {"n_iter": 2, "subset": 80})],
)  # fmt: skip
def test_the_order_of_rows_does_not_matter(n: int, settings: dict, monkeypatch: pytest.MonkeyPatch) -> None:
    if n > 80:  # the paths of more than 500 and 1,000 rows, at a fifth of their size
        monkeypatch.setattr(_hyperparameters, "TUNING_ROWS", 100)
        monkeypatch.setattr(_hyperparameters, "_ENOUGH", 200)
    random = np.random.default_rng(2)
    rows = random.normal(size=(n, 4))
    targets = rows[:, 0] * rows[:, 1] + 0.1 * random.normal(size=n)
    order = random.permutation(n)
    first = RFMRegressor(**settings).fit(rows, targets)
    second = RFMRegressor(**settings).fit(rows[order], targets[order])
    assert second.best_iteration_ == first.best_iteration_
    assert np.abs(second.predict(Z) - first.predict(Z)).max() < 1e-6


@pytest.mark.parametrize("kernel", ["laplace", "gaussian", "exponential", "lpq"])
def test_the_origin_does_not_matter_to_one_machine(kernel: str) -> None:
    """With everything fixed; see test_found.py for choices made on the way."""
    settings = {"kernel": kernel, "ridge": 1e-3, "bandwidth": 2.0, "validation": None, "n_iter": 2}
    first = RFMRegressor(**settings).fit(X, Y)
    second = RFMRegressor(**settings).fit(X + 1000.0, Y)
    # Adding 1000 leaves 1e-13 of rounding in the rows.
    assert np.abs(second.predict(Z + 1000.0) - first.predict(Z)).max() < 1e-9


@pytest.mark.parametrize("kernel", ["laplace", "gaussian", "quadratic"])
def test_a_constant_column_does_not_matter_to_one_machine(kernel: str) -> None:
    settings = {"kernel": kernel, "ridge": 1e-3, "bandwidth": 2.0, "validation": None, "n_iter": 2, "rescale": None}
    constant = 0.0 if kernel == "quadratic" else 5.0
    first = RFMRegressor(**settings).fit(X, Y)
    second = RFMRegressor(**settings).fit(np.column_stack([X, np.full(80, constant)]), Y)
    assert np.abs(second.predict(np.column_stack([Z, np.full(30, constant)])) - first.predict(Z)).max() < 1e-9
    assert np.abs(second.feature_matrix_[4]).max() < 1e-9
    assert np.isfinite(second.predict(np.column_stack([Z, Z[:, 0]]))).all()


@pytest.mark.parametrize("estimator", [RFMRegressor(), RFMClassifier()], ids=["regressor", "classifier"])
def test_equal_rows_and_columns_are_harmless(estimator) -> None:
    rows = np.column_stack([X, X[:, 0], np.zeros(80)])
    rows[:40] = rows[40:]
    machine = clone(estimator).fit(rows, TWO)
    assert np.isfinite(machine.predict(rows)).all()
    assert np.isfinite(machine.feature_matrix_).all()
    assert np.isfinite(machine.history_.to_numpy()).all()


def test_all_rows_equal_leave_the_mean() -> None:
    rows = np.ones((20, 3))
    targets = np.arange(20.0)
    assert RFMRegressor().fit(rows, targets).predict(rows[:2]) == pytest.approx([9.5, 9.5])
    chances = RFMClassifier().fit(rows, np.arange(20) < 5).predict_proba(rows[:2])
    assert chances == pytest.approx(np.array([[0.75, 0.25]] * 2))


@pytest.mark.parametrize("n", [2, 3, 4, 6])
def test_very_few_rows(n: int) -> None:
    assert np.isfinite(RFMRegressor().fit(X[:n], Y[:n]).predict(Z)).all()
    assert np.isfinite(RFMClassifier().fit(X[:n], np.arange(n) % 2).predict_proba(Z)).all()


def test_single_precision_is_near() -> None:
    settings = {"n_iter": 2, "ridge": 1e-3, "bandwidth": 2.0, "validation": None}
    wide = RFMRegressor(**settings).fit(X + 100, Y)
    narrow = RFMRegressor(dtype="float32", **settings).fit(X + 100, Y)
    # A ridge of 1e-3 leaves a condition of 1e3: 1e-7 becomes some 1e-4.
    assert np.abs(narrow.predict(Z + 100) - wide.predict(Z + 100)).max() < 1e-3 * Y.std()
    assert narrow.predict(Z).dtype == np.float64
    chosen = [RFMClassifier(dtype=dtype).fit(X, TWO).predict_proba(Z) for dtype in ("float32", "float64")]
    assert np.abs(chosen[0] - chosen[1]).max() < 0.1  # ridges are chosen from shorter lists


def test_refitting_forgets_the_past() -> None:
    machine = RFMClassifier(n_iter=1).fit(pd.DataFrame(X, columns=["a", "b", "c", "d"]), np.where(TWO, "yes", "no"))
    machine.fit(X[:50, :2], THREE[:50])
    fresh = RFMClassifier(n_iter=1).fit(X[:50, :2], THREE[:50])
    assert (machine.predict_proba(Z[:, :2]) == fresh.predict_proba(Z[:, :2])).all()
    assert machine.feature_names() == ["x0", "x1"]
    assert set(vars(machine)) == set(vars(fresh))
    regressor = RFMRegressor(n_iter=1).fit(X, np.column_stack([Y, Y])).fit(X[:, :3], Y)
    assert regressor.predict(Z[:, :3]).shape == (30,)


# -- what judges -------------------------------------------------------------------------------------------------------

GROUPS = np.arange(80) // 20


@pytest.mark.parametrize(
    "validation",
    ["loo", 5, KFold(4, shuffle=True, random_state=0), PredefinedSplit(GROUPS), 0.2, (Z, Y_THERE), None,
     list(KFold(3).split(X))],
    ids=["loo", "5", "splitter", "groups", "share", "held out", "none", "list of splits"],
)  # fmt: skip
@pytest.mark.parametrize("subset", [None, 30])
def test_ways_of_validation(validation, subset) -> None:
    machine = RFMRegressor(n_iter=2, validation=validation, subset=subset).fit(X, Y)
    assert machine.score(X, Y) > 0.9
    assert len(machine.dual_coef_) == 80  # all rows are in the last solve
    assert machine.intercept_ == pytest.approx(Y.mean())
    if validation is not None:
        assert 0 < machine.validation_error_ < 1.5 * Y.var()
        assert machine.best_iteration_ == machine.history_["error"].idxmin()
    else:
        assert machine.best_iteration_ == 2


def test_held_out_rows_are_not_in_the_fit() -> None:
    machine = RFMRegressor(n_iter=1, ridge=1e-3, bandwidth=2.0, validation=(Z, Z[:, 0])).fit(X, Y)
    best = machine.best_iteration_
    plain = RFMRegressor(n_iter=best, ridge=1e-3, bandwidth=2.0, validation=None).fit(X, Y)
    assert machine.predict(Z) == pytest.approx(plain.predict(Z), abs=1e-9)
    assert machine.validation_error_ == pytest.approx(np.mean((plain.predict(Z) - Z[:, 0]) ** 2), rel=1e-9)


def test_groups_are_left_out_whole() -> None:
    """Rows of a group are near copies: single rows left out are told by their fellows, groups are not."""
    random = np.random.default_rng(0)
    groups = np.repeat(np.arange(30), 5)
    rows = random.normal(size=(30, 4))[groups] + 1e-3 * random.normal(size=(150, 4))
    targets = random.normal(size=30)[groups]
    single = RFMRegressor(update="none").fit(rows, targets)
    whole = RFMRegressor(update="none", validation=PredefinedSplit(groups)).fit(rows, targets)
    assert single.validation_error_ < 0.1 * targets.var()
    assert whole.validation_error_ > 0.5 * targets.var()


def test_labels_held_out_may_be_any() -> None:
    names = np.array(["ant", "bee", "cat"])
    machine = RFMClassifier(n_iter=1, validation=(X[:20], names[THREE[:20]])).fit(X[20:], names[THREE[20:]])
    assert np.isfinite(machine.sharpness_)
    with pytest.raises(InputError, match="labels of held-out rows must be among the classes"):
        RFMClassifier(n_iter=1, validation=(X[:2], ["ant", "dog"])).fit(X, names[THREE])


@pytest.mark.parametrize("kernel", ["laplace", "lpq", "polynomial"])
def test_what_predictions_keep_is_not_in_pickles_and_changes_no_bit(kernel: str, tmp_path: Path) -> None:
    rows = np.random.default_rng(0).normal(size=(60, 4))
    model = RFMRegressor(kernel, n_iter=1).fit(rows[:40], rows[:40, 0] * rows[:40, 1])
    before = pickle.dumps(model)
    first = model.predict(rows)
    assert (model.predict(rows) == first).all()
    assert pickle.dumps(model) == before
    assert (pickle.loads(before).predict(rows) == first).all()
    model.save(tmp_path / "model")
    assert (RFMRegressor.load(tmp_path / "model").predict(rows) == first).all()
    k = model._kernel
    root = root_of(model._model.metric)
    u, centers = ((torch.from_numpy(part) @ root) for part in (rows - model._center, model._model.centers.numpy()))
    expected = k.matrix(u, centers, model.bandwidth_) @ model._model.fit.alpha + model._model.mean
    np.testing.assert_allclose(first, model._units.restore(expected.numpy())[:, 0], rtol=1e-12)
