"""Frames of other libraries: columns by name, whatever their order."""

from __future__ import annotations

import datetime
import warnings
from typing import Any

import numpy as np
import pandas as pd
import polars as pl
import pyarrow as pa
import pytest
from sklearn.linear_model import Ridge

from featlearn.errors import InputError
from featlearn.rfm import RFMClassifier, RFMRegressor, load_tabular, make_tabular, save_tabular
from featlearn.rfm._frames import as_frame
from featlearn.rfm._table_encoder import TableEncoder

source = np.random.default_rng(0)
N = 60
FRAME = pd.DataFrame(
    {
        "age": source.normal(40, 10, N),
        "doors": source.integers(2, 6, N),
        "color": source.choice(["red", "blue", "green"], N),
        "diesel": source.random(N) < 0.4,
    }
)
PRICE = FRAME["age"] - 3 * FRAME["doors"] + 5 * (FRAME["color"] == "red") + 2 * FRAME["diesel"]


class Duck:
    """A frame of nobody: columns and items."""

    def __init__(self, frame: pd.DataFrame) -> None:
        self._frame = frame
        self.columns = list(frame.columns)

    def __getitem__(self, name: str) -> Any:
        return self._frame[name].tolist()

    def __len__(self) -> int:
        return len(self._frame)


class Stream:
    """Nothing but Arrow's stream."""

    def __init__(self, frame: pd.DataFrame) -> None:
        self._table = pa.Table.from_pandas(frame, preserve_index=False)

    def __arrow_c_stream__(self, requested_schema: Any = None) -> Any:
        return self._table.__arrow_c_stream__(requested_schema)


FRAMES = {
    "pandas": lambda frame: frame,
    "polars": lambda frame: pl.DataFrame({name: frame[name].tolist() for name in frame}),
    "pyarrow": lambda frame: pa.Table.from_pandas(frame, preserve_index=False),
    "record batch": lambda frame: pa.RecordBatch.from_pandas(frame, preserve_index=False),
    "stream": Stream,
    "duck": Duck,
}


@pytest.mark.parametrize("fitted", FRAMES)
@pytest.mark.parametrize("predicted", FRAMES)
def test_columns_are_taken_by_name(fitted: str, predicted: str) -> None:
    """A polars frame with its columns in another order was predicted by position, without a word."""
    model = make_tabular(Ridge()).fit(FRAMES[fitted](FRAME), PRICE)
    wanted = model.predict(FRAMES[fitted](FRAME))
    assert wanted == pytest.approx(make_tabular(Ridge()).fit(FRAME, PRICE).predict(FRAME), abs=1e-9)
    other = FRAME.assign(extra="x")[["diesel", "extra", "color", "age", "doors"]]
    assert model.predict(FRAMES[predicted](other)) == pytest.approx(wanted, abs=1e-9)
    assert list(model[0].feature_names_in_) == list(FRAME)
    with pytest.raises(InputError, match="must have the columns of fit, but lacks age, color"):
        model.predict(FRAMES[predicted](FRAME[["doors", "diesel"]]))


def test_all_numbers_in_polars() -> None:
    """Of numbers alone nothing else would tell that the order has changed."""
    rows = pl.DataFrame({name: source.normal(size=50) for name in "abc"})
    model = make_tabular(RFMRegressor(n_iter=1)).fit(rows, rows["a"] * 3)
    assert (model.predict(rows.select("c", "a", "b")) == model.predict(rows)).all()
    assert model["estimator"].feature_names() == ["a", "b", "c"]
    assert model.score(rows.select("b", "c", "a"), rows["a"] * 3) > 0.9


def test_files_keep_the_names(tmp_path: Any) -> None:
    rows = FRAMES["polars"](FRAME)
    model = make_tabular(RFMRegressor(n_iter=0)).fit(rows, pl.Series(PRICE.tolist()))
    save_tabular(tmp_path / "m", model)
    loaded, _ = load_tabular(tmp_path / "m")
    assert (loaded.predict(rows[:, ::-1]) == model.predict(rows)).all()


def test_dtypes_of_polars() -> None:
    frame = pl.DataFrame(
        {
            "int": [1, 2, None, 4],
            "float": [1.0, None, float("nan"), 2.0],
            "text": ["a", None, "b", "a"],
            "bool": [True, None, False, True],
            "category": pl.Series(["x", None, "y", "y"], dtype=pl.Categorical),
            "enum": pl.Series(["x", "y", "x", None], dtype=pl.Enum(["x", "y", "z"])),
            "large": pl.Series([1, 2, None, 3], dtype=pl.Int128),
            "small": pl.Series([1, 2, 3, 4], dtype=pl.UInt8),
            "nothing": [None] * 4,
        }
    )
    out = TableEncoder().fit_transform(frame)
    assert list(out) == [
        "int", "int missing", "float", "float missing", "text=a", "text=b", "text missing", "bool", "bool missing",
        "category=x", "category=y", "category missing", "enum=x", "enum=y", "enum missing", "large", "large missing",
        "small",
    ]  # fmt: skip
    assert out["int missing"].tolist() == [0, 0, 1, 0]
    assert out["float missing"].tolist() == [0, 1, 1, 0]
    assert out["enum missing"].tolist() == [0, 0, 0, 1]
    assert (out["large"] == TableEncoder().fit_transform(pl.DataFrame({"large": [1, 2, None, 3]}))["large"]).all()
    day = datetime.datetime(2026, 1, 1)
    times = pl.DataFrame(
        {"n": [1.0, 2.0], "at": [day, None], "on": [day.date()] * 2, "for": [datetime.timedelta(1)] * 2}
    )
    with pytest.warns(UserWarning, match="is left out"):
        assert list(TableEncoder().fit_transform(times)) == ["n"]
    for nested in ([[1], [2]], [{"a": 1}, {"a": 2}], [{"a": 1, "b": 2}, {"a": 2, "b": 3}]):
        with pytest.raises(InputError, match="'v' must hold numbers, texts or categories"):
            TableEncoder().fit(pl.DataFrame({"v": nested}))


def test_dtypes_that_change_between_fit_and_predict() -> None:
    encoder = TableEncoder().fit(pl.DataFrame({"n": [1, 2, 4], "c": ["x", "y", "x"]}))
    wanted = encoder.transform(pl.DataFrame({"n": [2], "c": ["y"]})).to_numpy()
    for n in (pl.Int8, pl.Float32, pl.UInt64):
        for c in (pl.String, pl.Categorical, pl.Enum(["z", "y"])):
            row = pl.DataFrame({"c": pl.Series(["y"], dtype=c), "n": pl.Series([2], dtype=n)})
            assert (encoder.transform(row).to_numpy() == wanted).all()
    row = pd.DataFrame({"c": pd.Categorical(["y"], ["y", "w"]), "n": [2.0]})
    assert (encoder.transform(row).to_numpy() == wanted).all()
    dictionary = pa.table({"c": pa.array(["y"]).dictionary_encode(), "n": [2]})
    assert (encoder.transform(dictionary).to_numpy() == wanted).all()
    unknown = encoder.transform(pl.DataFrame({"n": [None], "c": ["w"]}))
    assert (unknown.to_numpy() == 0).all()
    with pytest.raises(InputError, match="'n' must hold numbers or missing values as at fit, got 'two'"):
        encoder.transform(pl.DataFrame({"n": ["two"], "c": ["y"]}))


@pytest.mark.parametrize("kind", FRAMES)
def test_arrays_and_frames_in_turn(kind: str) -> None:
    """By position, and with a warning, as in scikit-learn."""
    numbers = FRAME[["age", "doors"]].astype(float)
    array, frame = numbers.to_numpy(), FRAMES[kind](numbers)
    named, unnamed = TableEncoder().fit(frame), TableEncoder().fit(array)
    with pytest.warns(UserWarning, match="X does not have valid feature names.*by position"):
        assert (named.transform(array).to_numpy() == named.transform(frame).to_numpy()).all()
    with pytest.warns(UserWarning, match="X has feature names, but.*by position"):
        assert (unnamed.transform(frame).to_numpy() == named.transform(frame).to_numpy()).all()
    with pytest.raises(InputError, match="X has 1 features, but TableEncoder is expecting 2"):
        named.transform(array[:, :1])
    # pandas numbers the columns of an array: these are not names that anyone gave.
    numbered = TableEncoder().fit(pd.DataFrame(array))
    assert (numbered.transform(array).to_numpy() == named.transform(frame).to_numpy()).all()
    assert (unnamed.transform(pd.DataFrame(array)).to_numpy() == named.transform(frame).to_numpy()).all()


def test_targets_of_polars() -> None:
    rows = FRAMES["polars"](FRAME)
    labels = np.where(PRICE.median() < PRICE, "dear", "cheap")
    for dtype in (pl.String, pl.Categorical, pl.Enum(["dear", "cheap"])):
        model = make_tabular(RFMClassifier(n_iter=0)).fit(rows, pl.Series(labels.tolist(), dtype=dtype))
        assert set(model.predict(rows[:, ::-1])) == {"cheap", "dear"}
        assert model.score(rows, labels) > 0.9
    both = pl.DataFrame({"price": PRICE.tolist(), "age": FRAME["age"].tolist()})
    assert make_tabular(RFMRegressor(n_iter=0)).fit(rows, both).predict(rows).shape == (N, 2)
    with pytest.raises(ValueError, match="y contains NaN"):
        make_tabular(RFMRegressor()).fit(rows, pl.Series([None, *PRICE.tolist()[1:]]))


def test_tables_that_are_refused() -> None:
    lazy = FRAMES["polars"](FRAME).lazy()
    with warnings.catch_warnings(action="error"), pytest.raises(InputError, match=r"in memory, got a polars LazyFrame"):
        make_tabular(Ridge()).fit(lazy, PRICE)
    model = make_tabular(Ridge()).fit(FRAME, PRICE)
    with pytest.raises(InputError, match=r"Pass X.collect\(\)"):
        model.predict(lazy)
    twice = pa.Table.from_arrays([pa.array([1.0, 2.0]), pa.array([3.0, 1.0])], names=["a", "a"])
    with pytest.raises(InputError, match="different names, got repeated names: a"):
        TableEncoder().fit(twice)
    with pytest.raises(InputError, match="Expected 2D array, got 1D"):
        TableEncoder().fit(pl.Series([1, 2, 3]))
    with pytest.raises(InputError, match="0 sample"):
        TableEncoder().fit(pl.DataFrame({"a": []}))
    with pytest.raises(InputError, match="0 sample"):
        TableEncoder().fit(pl.DataFrame())

    class Names:
        column_names = ("a", "b")

        def __array__(self, dtype: Any = None, copy: Any = None) -> Any:
            return np.zeros((3, 2))

    with pytest.raises(InputError, match=r"columns can be read by name, got a .* Names"):
        TableEncoder().fit(Names())

    class Broken:
        columns = ("a", "b")

        def __getitem__(self, name: str) -> Any:
            raise KeyError(name)

    with pytest.raises(InputError, match="Broken that cannot be read"):
        TableEncoder().fit(Broken())


def test_an_empty_part_of_a_frame() -> None:
    encoder = TableEncoder().fit(FRAMES["polars"](FRAME))
    assert encoder.transform(FRAMES["polars"](FRAME)[:0]).shape == (0, 6)


def test_values_come_over_unchanged() -> None:
    for kind, make in FRAMES.items():
        frame, named = as_frame(make(FRAME))
        assert named
        for name in FRAME:
            assert frame[name].tolist() == FRAME[name].tolist(), (kind, name)
