"""Pipelines of a table and a machine, on disk and back."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import safetensors
from safetensors.numpy import save_file

from featlearn import RFMClassifier, RFMRegressor, make_tabular
from featlearn.errors import InputError
from featlearn.rfm import column_kinds, load_tabular, save_tabular


def people(n: int = 90) -> pd.DataFrame:
    rng = np.random.default_rng(0)
    frame = pd.DataFrame(
        {
            "age": rng.normal(40, 12, n),
            "color": rng.choice(["red", 'blue, "light"', "grün"], n),
            "member": rng.random(n) < 0.5,
            "town": [f"town {i}" for i in rng.integers(0, 12, n)],
            "one": 1.0,
            "when": pd.date_range("2020", periods=n),
            "nothing": np.nan,
        }
    )
    frame.loc[::7, "age"] = np.nan
    frame.loc[::9, "color"] = None
    return frame


LABELS = {
    "text": np.array(["no", "perhaps", "yes, so"], dtype=object),
    "numbers": np.array([3, 7, 9]),
    "booleans": np.array([False, True, True]),
}


@pytest.mark.filterwarnings("ignore:column .* holds dates")
@pytest.mark.parametrize("labels", LABELS)
def test_a_classifier_predicts_the_same_bits(labels: str, tmp_path: Path) -> None:
    frame = people()
    y = LABELS[labels][np.random.default_rng(1).integers(0, 3, len(frame))]
    model = make_tabular(RFMClassifier(n_iter=1, random_state=0), max_categories=5).fit(frame, y)
    save_tabular(tmp_path / "model.safetensors", model, {"target": "answer"})
    again, about = load_tabular(tmp_path / "model.safetensors")
    assert about == {"target": "answer"}
    new = frame.assign(color="green", town="elsewhere")[::-1]
    for rows in (frame, new):
        np.testing.assert_array_equal(again.predict(rows), model.predict(rows))
        np.testing.assert_array_equal(again.predict_proba(rows), model.predict_proba(rows))
    assert again.predict(frame).dtype == model.predict(frame).dtype
    assert list(again["table"].get_feature_names_out()) == list(model["table"].get_feature_names_out())
    kinds = column_kinds(again)
    assert (kinds["age"], kinds["color"], kinds["member"], kinds["when"]) == ("number", "category", "number", "unused")
    with pytest.raises(InputError, match="must have the columns of fit, but lacks age"):
        again.predict(frame.drop(columns="age"))


def test_a_regressor_on_an_array_predicts_the_same_bits(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    X, y = rng.normal(size=(60, 3)), rng.normal(size=60)
    model = make_tabular(RFMRegressor(n_iter=1, centers=20)).fit(X, y)
    save_tabular(tmp_path / "model.safetensors", model)
    again = load_tabular(tmp_path / "model.safetensors")[0]
    np.testing.assert_array_equal(again.predict(X), model.predict(X))


@pytest.mark.parametrize("outputs", [1, 3])
def test_one_row_is_predicted_to_the_same_bits(outputs: int, tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    X, y = rng.normal(size=(90, 4)), rng.normal(size=(90, outputs))
    model = RFMRegressor(n_iter=1).fit(X, y)
    model.save(tmp_path / "model.safetensors")
    again = RFMRegressor.load(tmp_path / "model.safetensors")
    for row in X:
        np.testing.assert_array_equal(again.predict(row[None]), model.predict(row[None]))


def test_what_is_no_model_is_refused_in_a_sentence(tmp_path: Path) -> None:
    good = tmp_path / "good.safetensors"
    model = make_tabular(RFMRegressor(n_iter=0)).fit(people(30)[["age", "color"]], np.arange(30.0))
    save_tabular(good, model)
    with safetensors.safe_open(good, framework="np") as stored:
        tensors = {name: stored.get_tensor(name) for name in stored.keys()}  # noqa: SIM118
        header = json.loads(stored.metadata()["featlearn"])
    junk = tmp_path / "junk.safetensors"
    for change in (
        {"kind": "RFMRegressor"},
        {"schema_version": 99},
        {"table": None},
        {"machine": {"kind": "os.system"}},
        {"table": header["table"] | {"columns": header["table"]["columns"][:1]}},
        {
            "table": header["table"]
            | {"columns": [{"kind": "number", "name": "age", "mean": 0, "scale": 0, "marked": 1}]}
        },
        {"table": header["table"] | {"feature_names": ["a", "b"]}},
        {"table": header["table"] | {"n_features": 10**30}},
        {"table": header["table"] | {"n_features": 10**30, "feature_names": None}},
        {"machine": header["machine"] | {"n_features": 10**30}},
        {"machine": header["machine"] | {"fit": header["machine"]["fit"] | {"bandwidth": float("nan")}}},
    ):
        save_file(tensors, junk, {"featlearn": json.dumps(header | change)})
        with pytest.raises(InputError):
            load_tabular(junk)
    for name, tensor in tensors.items():
        for wrong in (np.full_like(tensor, np.nan), tensor[:-1], tensor.astype(np.int64), tensor.astype(np.float32)):
            save_file(tensors | {name: wrong.copy()}, junk, {"featlearn": json.dumps(header)})
            with pytest.raises(InputError, match=f"its (alpha|{name}|metric|mean|centers)"):
                load_tabular(junk)
    save_file(tensors, junk, {"featlearn": "[" * 100_000})
    with pytest.raises(InputError, match="is damaged, or was not written by featlearn"):
        load_tabular(junk)
    save_file({"x": np.zeros(2)}, junk)
    for path in (junk, tmp_path / "none"):
        with pytest.raises(InputError):
            load_tabular(path)
    junk.write_bytes(bytes(range(256)))
    with pytest.raises(InputError, match="is damaged, or was not written by featlearn"):
        load_tabular(junk)
    with pytest.raises(InputError, match="make_tabular"):
        save_tabular(junk, model["estimator"])
