"""Tables and targets as commands read them: nothing is shifted, rounded or renamed on the way."""

from __future__ import annotations

import gzip
import sys
from decimal import Decimal
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
from torch import nn

from featlearn.cli._fit import splits_of
from featlearn.cli._input_data import LOSSES, load_data
from featlearn.cli._model_loader import load_weights
from featlearn.cli._predict import _aligned, _folder_for, predict
from featlearn.datasets.tables import parts_of, read_frugally, read_whole, target_values
from featlearn.errors import InputError
from featlearn.rfm import RFMRegressor, make_tabular, save_tabular


def test_the_targets_of_a_probe_are_those_of_the_table(tmp_path: Path) -> None:
    net = nn.Linear(1, 1)
    for values, wanted in (
        ([-1, 1] * 10, [-1, 1] * 10),
        ([3.0, 7.0] * 10, [3, 7] * 10),
        ([0.5, 1.5] * 10, [0.5, 1.5] * 10),
        (["b", "a"] * 10, [1, 0] * 10),
        ([True, False] * 10, [1, 0] * 10),
    ):
        pd.DataFrame({"x": np.arange(20.0), "y": values}).to_csv(tmp_path / "t.csv", index=False)
        _, y = load_data(str(tmp_path / "t.csv"), net, target="y", labeled=True).batch
        assert y.tolist() == wanted
    pd.DataFrame({"x": np.arange(4.0), "y": [0, 1.5, 2, 1]}).to_csv(tmp_path / "t.csv", index=False)
    with pytest.raises(InputError, match="non-integer"):
        load_data(str(tmp_path / "t.csv"), net, target="y", labeled=True, classes=True)
    outputs = torch.tensor([1.0, 3.0])
    assert LOSSES["mse"](outputs, torch.tensor([0, 1])).tolist() == [1, 4]  # outputs (n,) are legal
    assert LOSSES["mse"](outputs[:, None], torch.tensor([0, 1])).tolist() == [1, 4]


def test_columns_in_parts_are_rounded_only_where_that_is_small_beside_their_range(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    columns = {"usual": 1.0, "far": 0.01, "tiny": 1e-46, "huge": 1e40, "label": 1.0}
    frame = pd.DataFrame({name: scale * rng.normal(size=50) for name, scale in columns.items()})
    frame["far"] += 1e6
    frame.to_csv(tmp_path / "t.csv", index=False)
    read = read_frugally(tmp_path / "t.csv", rows=20, exact="label")
    assert {name: str(kind) for name, kind in read.dtypes.items() if kind != np.float64} == {"usual": "float32"}
    for name in ("far", "tiny", "huge", "label"):
        np.testing.assert_array_equal(read[name], frame[name])


def test_lines_with_more_fields_than_the_header_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "t.csv"
    for text, reported in (
        ("a,b\n1,2,\n3,4,\n", "separator at the end of each line"),
        ("a,b\n1,2,3\n3,4\n", "as many as the header"),
        ("a,b\n1,2,3,4\n3,4,5,6\n", "as many as the header"),
    ):
        path.write_text(text)
        for read in (read_whole, read_frugally, lambda p: list(parts_of(p, select=lambda _: ["a"]))):
            with pytest.raises(InputError, match=reported):
                read(path)
    path.write_text("a,b\n1,2\n3,4,5\n")
    with pytest.raises(InputError, match="Expected 2 fields"):
        list(parts_of(path, select=lambda _: ["a"]))
    path.write_text('a,b\n"first",1,2\n"second",3,\n')  # as R writes it
    for frame in (read_whole(path), next(parts_of(path))):
        assert frame["a"].tolist() == [1, 3]
        assert frame["b"].tolist()[0] == 2
    (tmp_path / "t.csv.gz").write_bytes(gzip.compress(b"a,b\n1,2\n" * 99)[:-20])
    for read in (read_whole, read_frugally):
        with pytest.raises(InputError, match="gz cannot be read"):
            read(tmp_path / "t.csv.gz")


def test_a_column_that_parquet_keeps_as_the_index_is_a_column(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    frame = pd.DataFrame(rng.normal(size=(20, 2)), columns=["a", "b"])
    frame["self"] = None
    pipeline = make_tabular(RFMRegressor(n_iter=0)).fit(frame, frame["a"])
    frame.drop(columns="self").set_index("a").to_parquet(tmp_path / "t.parquet")
    (part,) = _aligned(pipeline, tmp_path / "t.parquet", "y", 100)
    np.testing.assert_array_equal(part["a"], frame["a"])
    assert list(part.columns) == ["a", "b", "self"]


def test_labels_stay_what_they_are_and_what_is_no_target_is_refused() -> None:
    def labels(values: Any, task: str = "auto") -> tuple[list[Any], str]:
        result, kind, _ = target_values(pd.Series(values, name="y"), task)
        return result.tolist(), kind

    large = np.array([2**63 + 5, 1] * 10, dtype=np.uint64)
    assert labels(large) == (large.tolist(), "classification")
    assert labels([1e19, 2.0] * 10) == ([1e19, 2.0] * 10, "classification")
    assert labels([Decimal("1.25"), Decimal("2.5")]) == ([1.25, 2.5], "regression")
    for values, task, reported in (
        (pd.date_range("2020", periods=4), "auto", "moments"),
        ([[1], [2]], "auto", "several values in a row"),
        ([{"a": 1}, {"a": 2}], "auto", "several values in a row"),
        ([1.0, np.inf], "auto", "infinite"),
        ([1.0], "regression", "one row only"),
        ([0.5, 1.5] * 5, "classification", "must hold whole numbers or texts for classes, got"),
    ):
        with pytest.raises(InputError, match=reported):
            labels(values, task)


def test_data_and_weights_that_are_damaged_are_refused(tmp_path: Path) -> None:
    np.savez(tmp_path / "xy.NPZ", X=np.ones((3, 1)), y=np.ones(3))
    (tmp_path / "xy.NPZ.npz").rename(tmp_path / "xy.NPZ")
    assert load_data(str(tmp_path / "xy.NPZ"), nn.Linear(1, 1)).rows == 3
    whole = (tmp_path / "xy.NPZ").read_bytes()
    (tmp_path / "half.npz").write_bytes(whole[: len(whole) // 2])
    with pytest.raises(InputError, match="cannot be read"):
        load_data(str(tmp_path / "half.npz"), nn.Linear(1, 1))
    junk = tmp_path / "junk.pt"
    for text in (b"\x80\x02}q\x00(X\x01\x00", b"(lp0\n", b"\x80\x05u", bytes(range(256)), b"."):
        junk.write_bytes(text)
        with pytest.raises(InputError, match="must be a checkpoint of tensors only"):
            load_weights(junk)
    torch.save({}, junk)
    with pytest.raises(InputError, match="got an empty dict"):
        load_weights(junk)


@pytest.mark.filterwarnings("ignore:The least populated class")
def test_folds_that_leave_one_class_are_refused() -> None:
    labels = np.array(["usual"] * 9 + ["rare"], dtype=object)
    with pytest.raises(InputError, match=r"'rare' has 1 row only.*--cv 0"):
        splits_of(labels, 2, "classification", 0)
    assert len(splits_of(np.array([0, 1] * 5), 2, "classification", 0)) == 2


_opened: list[str] | None = None


def _count_opens(event: str, arguments: tuple[Any, ...]) -> None:
    if event == "open" and _opened is not None:
        _opened.append(str(arguments[0]))


def test_predict_opens_its_table_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rng = np.random.default_rng(0)
    frame = pd.DataFrame({"a": rng.normal(size=20), "b": rng.choice(["01", "02"], 20)})
    model = tmp_path / "model.safetensors"
    save_tabular(model, make_tabular(RFMRegressor(n_iter=0)).fit(frame, frame["a"]), {"target": "y"})
    frame.to_csv(tmp_path / "t.csv", index=False)
    frame.to_csv(tmp_path / "t.csv.gz", index=False)
    frame.to_parquet(tmp_path / "t.parquet")
    sys.addaudithook(_count_opens)  # stays for the process, and does nothing once the list is None again
    for name in ("t.csv", "t.csv.gz", "t.parquet"):
        with monkeypatch.context() as patched:
            patched.setattr(sys.modules[__name__], "_opened", [])
            predict(model, tmp_path / name, tmp_path / "out.csv", proba=False, chunk=7, as_json=True)
            assert _opened is not None
            assert _opened.count(str(tmp_path / name)) == 1
        assert len(pd.read_csv(tmp_path / "out.csv")) == 20


def test_a_parquet_table_without_rows_is_checked_for_its_columns(tmp_path: Path) -> None:
    frame = pd.DataFrame({"a": [1.0, 2.0, 3.0], "b": [3.0, 1.0, 2.0]})
    pipeline = make_tabular(RFMRegressor(n_iter=0)).fit(frame, [1.0, 2.0, 3.0])
    frame[["a"]].iloc[:0].to_parquet(tmp_path / "t.parquet")
    with pytest.raises(InputError, match="lacks 1 column of the training: 'b'; it has 'a'"):
        list(_aligned(pipeline, tmp_path / "t.parquet", "y", 100))
    frame.iloc[:0].to_parquet(tmp_path / "t.parquet")
    assert not list(_aligned(pipeline, tmp_path / "t.parquet", "y", 100))


def test_a_failed_prediction_leaves_no_folder_behind(tmp_path: Path) -> None:
    def failed() -> None:
        with _folder_for(tmp_path / "new" / "inner" / "out.csv"):
            raise InputError("no")

    with pytest.raises(InputError):
        failed()
    assert not list(tmp_path.iterdir())
    with _folder_for(tmp_path / "new" / "out.csv"):
        pass
    assert (tmp_path / "new").is_dir()
