import datetime
import decimal
import pickle
import warnings

import numpy as np
import pandas as pd
import pytest
import scipy.sparse
from sklearn.base import clone, is_classifier
from sklearn.linear_model import LogisticRegression, Ridge
from sklearn.model_selection import GridSearchCV, cross_val_score
from sklearn.utils.estimator_checks import parametrize_with_checks

from featlearn.errors import InputError
from featlearn.rfm._table_encoder import TableEncoder, make_tabular


@parametrize_with_checks([TableEncoder()])
def test_scikit_learns_checks(estimator, check):
    check(estimator)


@pytest.fixture
def cars():
    return pd.DataFrame(
        {
            "age": [1.0, 3.0, np.nan, 8.0, 4.0, 4.0],
            "color": ["red", "blue", None, "red", "green", "blue"],
            "doors": pd.array([2, 4, 4, None, 2, 4], dtype="Int64"),
            "electric": [True, False, False, True, True, False],
            "rented": pd.array([True, None, False, False, True, True], dtype="boolean"),
            "size": pd.Categorical(["small", "large", "small", "large", "small", "small"]),
            "town": pd.array(["Ulm", pd.NA, "Bonn", "Ulm", "Bonn", "Ulm"], dtype="string"),
        },
        index=[10, 11, 12, 13, 14, 15],
    )


PRICES = np.array([3.0, 5.0, 1.0, 2.0, 4.0, 2.5])


def column(values, **settings):
    return TableEncoder(**settings).fit_transform(pd.DataFrame({"a": values}))


def test_names_values_and_index(cars):
    out = TableEncoder().fit_transform(cars)
    assert list(out.columns) == [
        "age",
        "age missing",
        "color=blue",
        "color=green",
        "color=red",
        "color missing",
        "doors",
        "doors missing",
        "electric",
        "rented",
        "rented missing",
        "size=large",
        "size=small",
        "town=Bonn",
        "town=Ulm",
        "town missing",
    ]
    assert (out.dtypes == np.float64).all()
    assert list(out.index) == list(cars.index)
    age = np.array([1.0, 3, 8, 4, 4])
    expected = np.insert((age - age.mean()) / age.std(), 2, 0.0)
    np.testing.assert_allclose(out["age"], expected, atol=1e-12)
    np.testing.assert_array_equal(out["age missing"], [0, 0, 1, 0, 0, 0])
    np.testing.assert_array_equal(out["color=red"], [1, 0, 0, 1, 0, 0])
    np.testing.assert_array_equal(out.filter(like="color").sum(axis=1), np.ones(6))
    np.testing.assert_allclose(out["electric"], [1, -1, -1, 1, 1, -1])
    np.testing.assert_array_equal(out["size=large"], [0, 1, 0, 1, 0, 0])
    np.testing.assert_array_equal(out["town missing"], [0, 1, 0, 0, 0, 0])
    assert out["rented"].iloc[1] == 0


def test_the_estimator_sees_readable_names_and_learns_from_every_kind(cars):
    pipeline = make_tabular(Ridge(alpha=1e-8)).fit(cars, PRICES)
    assert list(pipeline["estimator"].feature_names_in_) == list(pipeline[:-1].get_feature_names_out())
    assert list(pipeline.feature_names_in_) == list(cars.columns)
    np.testing.assert_allclose(pipeline.predict(cars), PRICES, atol=1e-4)
    labels = np.where(PRICES > 2.6, "dear", "cheap")
    classifier = make_tabular(LogisticRegression(C=1e4)).fit(cars, labels)
    assert is_classifier(classifier)
    assert (classifier.predict(cars) == labels).all()


def test_squared_distances_are_2_for_every_kind():
    rng = np.random.default_rng(0)
    n = 4000
    frame = pd.DataFrame({"number": 50 + 7 * rng.standard_normal(n), "flag": rng.random(n) < 0.2})
    for name in frame:
        out = TableEncoder().fit_transform(frame[[name]]).to_numpy()
        assert np.square(out - out[rng.permutation(n)]).sum(1).mean() == pytest.approx(2, rel=0.1)
    out = column(["a", "b", "c", None]).to_numpy()
    distances = np.square(out[:, None] - out[None]).sum(2)
    np.testing.assert_array_equal(distances, 2 * (1 - np.eye(4)))
    values = frame["number"].where(rng.random(n) < 0.5)
    out = TableEncoder().fit_transform(values.to_frame())
    gap = out["number missing"] == 1
    assert np.square(out[~gap].to_numpy() - out[gap].to_numpy()[0]).sum(1).mean() == pytest.approx(2, rel=0.1)


def test_new_categories_gaps_orders_and_columns_at_predict_time(cars):
    encoder = TableEncoder().fit(cars)
    new = cars.iloc[:2].assign(color=["violet", "red"], electric=[None, True], size=["huge", "small"], extra=1)
    out = encoder.transform(new[new.columns[::-1]])
    assert list(out.columns) == list(encoder.get_feature_names_out())
    assert (out.filter(regex="color|size").iloc[0] == 0).all()
    assert out["color=red"].iloc[1] == 1
    assert out["electric"].iloc[0] == 0
    pd.testing.assert_series_equal(out["age"], encoder.transform(cars)["age"].iloc[:2])
    with pytest.raises(InputError, match=r"columns of fit, but lacks age, town \(it has color"):
        encoder.transform(cars.drop(columns=["age", "town"]))
    with pytest.raises(InputError, match="'age' must hold numbers or missing values as at fit, got 'old'"):
        encoder.transform(cars.assign(age="old"))
    with pytest.raises(InputError, match="'age' must hold numbers or missing values as at fit"):
        encoder.transform(cars.assign(age=pd.Timestamp("2020-01-01")))
    everything_gone = pd.DataFrame(None, index=range(3), columns=cars.columns, dtype=object)
    assert np.isfinite(encoder.transform(everything_gone)).all(axis=None)
    assert encoder.transform(cars.iloc[:0]).shape == (0, 16)


def test_dates_and_durations_are_left_out_with_a_warning(cars):
    day = datetime.date(2020, 1, 1)
    stamps = pd.date_range("2020", periods=6).to_series(index=cars.index)
    frame = cars.assign(
        when=stamps,
        zoned=stamps.dt.tz_localize("UTC"),
        took=pd.to_timedelta(range(6), unit="s"),
        month=stamps.dt.to_period("M"),
        day=pd.Series([day, None, day, day, day, day], dtype=object, index=cars.index),
    )
    encoder = TableEncoder()
    with pytest.warns(UserWarning, match="is left out") as given:
        out = encoder.fit_transform(frame)
    texts = [str(one.message) for one in given]
    assert [text.split("'")[1] for text in texts] == ["when", "zoned", "took", "month", "day"]
    assert ["Pass columns" in text for text in texts] == [True, True, False, False, True]
    pd.testing.assert_frame_equal(out, TableEncoder().fit_transform(cars))
    pd.testing.assert_frame_equal(encoder.transform(frame), out)  # said once, at fit
    with (
        pytest.raises(InputError, match="column of numbers or categories, got 2 of dates"),
        pytest.warns(UserWarning, match="when"),
    ):
        TableEncoder().fit(frame[["when"]].assign(b=np.nan))


def test_rare_categories_share_a_column():
    values = ["c"] * 5 + ["a"] * 4 + ["b"] * 4 + ["other", "d", "e", None]
    assert list(column(values, max_categories=6)) == ["a=a", "a=b", "a=c", "a=d", "a=e", "a=other", "a missing"]
    encoder = TableEncoder(max_categories=3).fit(pd.DataFrame({"a": values}))
    out = encoder.transform(pd.DataFrame({"a": [*values, "never seen"]}))
    assert list(out) == ["a=a", "a=c", "a other", "a missing"]
    np.testing.assert_array_equal(out.sum(), [4, 5, 8, 1])
    np.testing.assert_array_equal(out.sum(axis=1), np.ones(18))
    assert out["a other"].iloc[-1] == 1
    many = column([f"user {i}" for i in range(500)], columns={"a": "category"})
    assert many.shape == (500, 50)
    assert many["a other"].sum() == 451


@pytest.mark.parametrize(
    "values",
    [
        [3, 3, 3],
        [0.1, 0.1, 0.1],
        [0.1 + 0.2, 0.3, 0.3],
        [True, True, True],
        [1e300, 1e300, 1e300],
        [5, np.nan, 5],
    ],
)
def test_constant_columns_become_0(values):
    assert (column(values)["a"] == 0).all()


def test_huge_and_tiny_numbers_are_standardized():
    for factor in (1e-300, 1e300):
        np.testing.assert_allclose(column(np.array([1.0, 2, 3]) * factor)["a"], column([1.0, 2, 3])["a"])
    np.testing.assert_allclose(column(np.array([1.0, 2, 3]) + 1e6)["a"], column([1.0, 2, 3])["a"], rtol=1e-6)


@pytest.mark.parametrize("gap", [np.nan, None, pd.NaT, pd.NA])
def test_columns_of_nothing_but_gaps_are_left_out(gap):
    frame = pd.DataFrame({"a": [1.0, 2.0], "empty": pd.Series([gap, gap], dtype=object)})
    encoder = TableEncoder().fit(frame)
    assert list(encoder.get_feature_names_out()) == ["a"]
    assert list(encoder.transform(frame.assign(empty="text now"))) == ["a"]


@pytest.mark.parametrize(
    ("values", "names"),
    [
        (pd.Series([1, "1", 2.5, "x", None], dtype=object), ["a=1", "a=2.5", "a=x", "a missing"]),
        (pd.Series([1, 2, None], dtype=object), ["a", "a missing"]),
        (pd.Series([True, None, False], dtype=object), ["a", "a missing"]),
        (pd.Series([decimal.Decimal("1.5"), None, decimal.Decimal(2)], dtype=object), ["a", "a missing"]),
        (pd.Series(["x", pd.NA, "y"], dtype="string"), ["a=x", "a=y", "a missing"]),
        (pd.Series(["x", None, "y"], dtype="str"), ["a=x", "a=y", "a missing"]),
        (pd.Series(["x", "y"], dtype=object), ["a=x", "a=y"]),
        (pd.Series([1, 2, 3], dtype="category"), ["a=1", "a=2", "a=3"]),
        (pd.Series([1.5, None], dtype="Float32"), ["a", "a missing"]),
        (pd.cut(pd.Series([1, 2, 3]), [0, 1.5, 4]), ["a=(0.0, 1.5]", "a=(1.5, 4.0]"]),
        (pd.arrays.SparseArray([0, 0, 1]), ["a"]),
        (np.array([1, 2, 3], dtype=np.uint8), ["a"]),
    ],
)
def test_kinds_of_columns(values, names):
    out = column(values)
    assert list(out) == names
    assert np.isfinite(out).all(axis=None)


def test_a_gap_that_makes_floats_of_integers_changes_no_category():
    encoder = TableEncoder().fit(pd.DataFrame({"a": pd.Categorical([1, 2, 1])}))
    for dtype in (np.float64, np.float32, object):
        out = encoder.transform(pd.DataFrame({"a": pd.Series([1.0, np.nan, 2.0], dtype=dtype)}))
        np.testing.assert_array_equal(out, [[1, 0], [0, 0], [0, 1]])


def test_arrays_are_numbers_by_position():
    X = np.array([[1.0, np.nan], [2.0, 5.0], [6.0, 7.0]])
    encoder = TableEncoder().fit(X)
    assert list(encoder.get_feature_names_out()) == ["x0", "x1", "x1 missing"]
    assert not hasattr(encoder, "feature_names_in_")
    named = TableEncoder().fit(pd.DataFrame(X, columns=["a", "b"]))
    with pytest.warns(UserWarning, match="was fitted with feature names: columns are taken by position"):
        np.testing.assert_array_equal(named.transform(X), encoder.transform(X))
    with pytest.warns(UserWarning, match="X has feature names, but TableEncoder was fitted without feature names"):
        np.testing.assert_array_equal(encoder.transform(pd.DataFrame(X, columns=["a", "b"])), encoder.transform(X))
    assert make_tabular(Ridge()).fit(X, [1, 2, 3]).predict(X).shape == (3,)
    with pytest.raises(InputError, match="X has 1 features, but TableEncoder is expecting 2"):
        encoder.transform(X[:, :1])
    mixed = np.array([[1, "a"], [2, "b"]], dtype=object)
    assert list(TableEncoder().fit(mixed).get_feature_names_out()) == ["x0", "x1=a", "x1=b"]
    assert list(named.fit(X).get_feature_names_out()) == ["x0", "x1", "x1 missing"]  # the old names are forgotten


def test_names_that_would_come_twice_are_told_apart():
    frame = pd.DataFrame({"age": [1, None], "age missing": [1, 2], 7: [1, 2]})
    assert list(TableEncoder().fit_transform(frame)) == ["age", "age missing", "age missing (2)", "7"]
    with pytest.raises(InputError, match="repeated names: 7"):
        TableEncoder().fit(frame.assign(**{"7": 1}))


def test_clone_pickle_and_grid_search(cars):
    pipeline = make_tabular(Ridge(), max_categories=7)
    assert clone(pipeline).get_params()["table__max_categories"] == 7
    frame, prices = pd.concat([cars] * 4, ignore_index=True), np.tile(PRICES, 4)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        search = GridSearchCV(pipeline, {"estimator__alpha": [1e-3, 10.0], "table__max_categories": [2, 10]}, cv=3)
        search.fit(frame, prices)
        assert cross_val_score(pipeline, frame, prices, cv=3).shape == (3,)
    assert search.best_params_ == {"estimator__alpha": 1e-3, "table__max_categories": 10}
    copy = pickle.loads(pickle.dumps(search.best_estimator_))
    np.testing.assert_array_equal(copy.predict(cars), search.predict(cars))


def test_the_table_is_left_as_it_was(cars):
    before = cars.copy(deep=True)
    TableEncoder().fit_transform(cars)
    pd.testing.assert_frame_equal(cars, before)


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda: make_tabular(Ridge), "such as Ridge()"),
        (lambda: make_tabular(None), "got None"),
        (lambda: column([1, 2], max_categories=1), "max_categories"),
        (lambda: column([1.0, np.inf]), "'a' must hold finite numbers or missing values, got infinity"),
        (lambda: column([1j, 2]), "omplex"),
        (lambda: column(pd.Series([[1], [2]], dtype=object)), "'a' must hold numbers, texts or categories"),
        (lambda: TableEncoder().fit(np.zeros(3)), "2D"),
        (lambda: TableEncoder().fit(scipy.sparse.eye(3)), "sparse"),
        (lambda: TableEncoder().fit(pd.DataFrame({"a": []})), "0 sample"),
    ],
)
def test_bad_arguments(call, words):
    with pytest.raises(InputError, match=words):
        call()
