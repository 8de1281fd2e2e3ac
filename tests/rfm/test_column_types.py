"""What columns hold: numbers as text, marks of missing values, dates, identifiers, and kinds that the user gives."""

from __future__ import annotations

import warnings

import numpy as np
import pandas as pd
import polars as pl
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from featlearn import InputError, RFMClassifier, RFMRegressor, make_tabular
from featlearn.rfm import TableEncoder, column_kinds, load_tabular, save_tabular
from featlearn.rfm._column_types import column_type

rng = np.random.default_rng(0)
AGES = rng.integers(1, 90, 40)


def kind(values, given=None):
    return column_type("a", pd.Series(values), given)


# -- numbers as text ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("mark", ["?", "NA", "", "null", "-", "n/a", "unk"])
def test_numbers_as_text_are_numbers(mark: str) -> None:
    texts = [f" {age} " for age in AGES]
    texts[3] = texts[7] = mark
    with pytest.warns(UserWarning, match="column 'age' holds numbers as text") as given:
        encoder = TableEncoder().fit(pd.DataFrame({"age": texts}))
    assert len(given) == 1
    assert repr(mark) in str(given[0].message)
    numbers = AGES.astype(float)
    numbers[[3, 7]] = np.nan
    expected = TableEncoder().fit_transform(pd.DataFrame({"age": numbers}))
    pd.testing.assert_frame_equal(encoder.transform(pd.DataFrame({"age": texts})), expected)
    # New rows may have other marks, numbers, or no text at all.
    new = encoder.transform(pd.DataFrame({"age": ["?", 30, None, "30.0", mark]}))
    assert new["age missing"].tolist() == [1, 0, 1, 0, 1]
    assert new["age"][1] == new["age"][3]
    with pytest.raises(InputError, match="must hold numbers or missing values as at fit, got 'old'"):
        encoder.transform(pd.DataFrame({"age": ["old"]}))


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        (["1.5", "2e3", "-7"], "number"),
        (["1", "2", "x"], "category"),  # too few numbers to call x a mark
        (["02139", "10115", "00501"], "category"),  # postal codes
        (["0", "0.5", "1"], "number"),
        (["1_000", "2_000"], "category"),
        (["nan", "inf", "x"], "category"),
        (["?", "?"], "category"),
        (["yes", "no"], "category"),
        ([True, False], "number"),
        (pd.Categorical(["1", "2"]), "category"),  # asked for
        ([str(i % 12) for i in range(36)] + ["x", "y", "z"], "category"),  # three other texts
        ([str(i) for i in range(30)] + ["x"] * 10, "category"),  # a quarter
        ([None, None], ""),
    ],
)
def test_what_is_a_number(values, expected: str) -> None:
    assert kind(values).kind == expected


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.floats(-1e6, 1e6), min_size=3, max_size=40),
    st.sampled_from(["?", "NA", "", "none", "."]),
    st.sampled_from([repr, "{:.3f}".format, "{:e}".format]),
    st.data(),
)
def test_numbers_of_any_form_are_read_as_numbers(values, mark, form, data) -> None:
    texts = [form(value) for value in values]
    places = data.draw(st.lists(st.integers(0, len(texts) - 1), max_size=len(texts) // 3))
    for place in places:
        texts[place] = mark
    if all(text == mark for text in texts):
        return
    numbers = pd.Series([np.nan if text == mark else float(text) for text in texts])
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        left = TableEncoder().fit_transform(pd.DataFrame({"a": texts}))
    pd.testing.assert_frame_equal(left, TableEncoder().fit_transform(pd.DataFrame({"a": numbers})))


@settings(max_examples=40, deadline=None)
@given(st.permutations(["n", "t", "c", "b"]), st.sampled_from(["pandas", "polars", "arrow"]), st.integers(0, 10**6))
def test_frames_of_any_library_in_any_order(order, library, seed) -> None:
    draw = np.random.default_rng(seed)
    table = pd.DataFrame(
        {
            "n": draw.standard_normal(30),
            "t": [str(v) for v in draw.integers(0, 99, 30)],
            "c": draw.choice(["red", "blue"], 30),
            "b": draw.random(30) < 0.5,
        }
    )
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        encoder = TableEncoder().fit(table)
        expected = encoder.transform(table)
        turned = table[order]
        other = {"pandas": lambda: turned, "polars": lambda: pl.from_pandas(turned),
                 "arrow": lambda: pl.from_pandas(turned).to_arrow()}[library]()  # fmt: skip
        result = encoder.transform(other)
    np.testing.assert_array_equal(result.to_numpy(), expected.to_numpy())


# -- identifiers and dates ---------------------------------------------------------------------------------------------


def test_identifiers_are_left_out() -> None:
    names = [f"customer {i}" for i in range(80)]
    frame = pd.DataFrame({"id": names, "n": np.arange(80.0)})
    with pytest.warns(UserWarning, match="'id' has 80 different texts in 80 rows.*is left out.*'category'"):
        encoder = TableEncoder().fit(frame)
    assert list(encoder.get_feature_names_out()) == ["n"]
    assert set(encoder.notes_) == {"id"}
    forced = TableEncoder(columns={"id": "category"}).fit(frame)
    assert len(forced.get_feature_names_out()) == 51
    few = TableEncoder().fit(frame[:20])  # too few rows to tell
    assert len(few.get_feature_names_out()) == 21
    assert kind([f"city {i % 40}" for i in range(80)]).kind == "category"


@pytest.mark.parametrize("dates", [pd.date_range("2026-01-01", periods=40), None])
def test_dates_are_left_out_or_days(dates) -> None:
    texts = [f"2026-{1 + i % 12:02d}-{1 + i % 28:02d}" for i in range(40)]
    frame = pd.DataFrame({"when": texts if dates is None else dates, "n": np.arange(40.0)})
    with pytest.warns(UserWarning, match=r"'when' holds dates.*columns=\{'when': 'date'\}"):
        assert list(TableEncoder().fit_transform(frame)) == ["n"]
    encoder = TableEncoder(columns={"when": "date"}).fit(frame)
    out = encoder.transform(frame)["when"].to_numpy()
    days = pd.to_datetime(frame["when"]).astype("int64").to_numpy() / 1e9
    expected = TableEncoder().fit_transform(pd.DataFrame({"d": days}))["d"].to_numpy()
    np.testing.assert_allclose(out, expected, atol=1e-9)
    missing = frame.assign(when=[None, *frame["when"][1:]])
    assert np.isfinite(encoder.transform(missing).to_numpy()).all()
    with pytest.raises(InputError, match="must hold dates"):
        TableEncoder(columns={"n": "date"}).fit(pd.DataFrame({"n": ["a", "b"]}))


# -- kinds that the user gives -----------------------------------------------------------------------------------------


def test_kinds_of_the_user() -> None:
    frame = pd.DataFrame({"code": [1, 2, 1, 3], "text": ["1", "2", "?", "4"], "x": [1.0, 2.0, 3.0, 4.0]})
    encoder = TableEncoder(columns={"code": "category", "text": "number", "x": "drop"}).fit(frame)
    assert list(encoder.get_feature_names_out()) == ["code=1", "code=2", "code=3", "text", "text missing"]
    assert not encoder.notes_
    for columns, message in (
        ({"nope": "number"}, "must name columns of the table, got 'nope'"),
        ({"x": "float"}, r"columns\['x'\] must be one of"),
        (["x"], "columns must be a mapping"),
        ({"text": "number"}, "must hold numbers, got 'one'"),
    ):
        with pytest.raises(InputError, match=message):
            TableEncoder(columns=columns).fit(frame.assign(text=["one", "2", "3", "4"]))


def test_files_keep_how_columns_are_read(tmp_path) -> None:
    frame = pd.DataFrame({"age": [str(v) for v in AGES], "day": pd.date_range("2026", periods=40).astype(str)})
    pipeline = make_tabular(RFMRegressor(n_iter=1), columns={"day": "date"})
    with pytest.warns(UserWarning, match="numbers as text"):
        pipeline.fit(frame, AGES.astype(float))
    assert column_kinds(pipeline) == {"age": "number", "day": "number"}
    save_tabular(tmp_path / "m.safetensors", pipeline)
    loaded, _ = load_tabular(tmp_path / "m.safetensors")
    new = frame.assign(age=["?", *frame["age"][1:]])
    assert (loaded.predict(new) == pipeline.predict(new)).all()
    assert loaded["table"].notes_ == pipeline["table"].notes_
    assert loaded["table"].columns == {"day": "date"}


# -- probabilities of rare classes -------------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", [0, 1])
def test_rare_classes_are_as_probable_as_they_are_frequent(seed: int) -> None:
    draw = np.random.default_rng(seed)
    labels = draw.choice(5, 300, p=[0.5, 0.19, 0.15, 0.1, 0.06])
    machine = RFMClassifier(random_state=0, n_iter=1).fit(draw.standard_normal((300, 6)), labels)
    mean = machine.predict_proba(draw.standard_normal((1000, 6))).mean(0)
    assert mean == pytest.approx(np.bincount(labels) / 300, rel=0.1)
    assert machine.offsets_.sum() == pytest.approx(0, abs=1e-9)
    new = draw.standard_normal((50, 6))
    assert (machine.classes_[machine.predict_proba(new).argmax(1)] == machine.predict(new)).all()
    assert (machine.decision_function(new).argmax(1) == machine.predict_proba(new).argmax(1)).all()
