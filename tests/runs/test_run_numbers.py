from __future__ import annotations

import math
import struct
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from featlearn.errors import InputError, RunStoreError
from featlearn.runs import Run


def test_what_is_logged_is_read_in_order_of_steps(tmp_path: Path) -> None:
    with Run.create(tmp_path / "run") as run:
        run.ignore_order()
        run.log(3, {"loss": 0.25, "accuracy": 1})
        run.log(1, {"loss": 0.5})
        run.log_layers(1, {"net.0": {"nfc": 0.1}, "net.2": {"nfc": 0.2}})
        run.log(3, {"nfc": 0.3}, layer="net.0")
        rows = run.metrics().to_numpy().tolist()
        assert rows == [
            [1, None, "loss", 0.5],
            [1, "net.0", "nfc", 0.1],
            [1, "net.2", "nfc", 0.2],
            [3, None, "accuracy", 1.0],
            [3, None, "loss", 0.25],
            [3, "net.0", "nfc", 0.3],
        ]
        assert run.last_step == 3
        assert run.series("nfc", "net.0").to_dict() == {1: 0.1, 3: 0.3}
        assert run.metrics("loss")["value"].to_list() == [0.5, 0.25]
        assert run.metrics(["loss", "accuracy"])["name"].to_list() == ["loss", "accuracy", "loss"]
        assert run.metrics(layers="net.*")["value"].to_list() == [0.1, 0.2, 0.3]
        assert run.metrics("nfc", ["*.2"])["value"].to_list() == [0.2]
    again = Run.open(tmp_path / "run")
    assert again.metrics().to_numpy().tolist() == rows


def test_a_value_logged_again_replaces_the_first(tmp_path: Path) -> None:
    with Run.create(tmp_path / "run") as run:
        run.log(0, {"loss": 1.0, "other": 5.0})
        run.log(0, {"loss": 2.0})
        run.log(0, {"loss": 3.0}, layer="net.0")
        assert run.metrics()["value"].to_list() == [2.0, 5.0, 3.0]
        run.log(0, {"loss": "too large"})
        assert run.metrics()["value"].to_list() == [5.0, 3.0]
        assert run.texts()["value"].to_list() == ["too large"]
        run.log(0, {"loss": 4.0})
        assert run.texts().empty


def test_words_are_kept_beside_numbers(tmp_path: Path) -> None:
    with Run.create(tmp_path / "run") as run:
        run.log_layers(7, {"net.0": {"reading": "lazy", "nfc": 0.0}, "net.2": {"reading": "learns: λ ≠ 0", "nfc": 1.0}})
        run.log(8, {"note": ""})
    assert run.texts().to_numpy().tolist() == [
        [7, "net.0", "reading", "lazy"],
        [7, "net.2", "reading", "learns: λ ≠ 0"],
        [8, None, "note", ""],
    ]
    assert run.texts("reading", "net.2")["value"].to_list() == ["learns: λ ≠ 0"]
    assert run.metrics()["name"].to_list() == ["nfc", "nfc"]
    assert run.last_step == 8


@pytest.fixture(scope="module")
def one_run(tmp_path_factory: pytest.TempPathFactory) -> Run:
    return Run.create(tmp_path_factory.mktemp("numbers") / "run")


@given(st.floats())
@settings(max_examples=200, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_numbers_are_kept_to_the_bit(one_run: Run, value: float) -> None:
    one_run.log(0, {"x": value})
    back = float(one_run.series("x").iloc[0])
    assert math.isnan(back) if math.isnan(value) else struct.pack("d", back) == struct.pack("d", value)


@pytest.mark.parametrize(
    ("value", "kept"),
    [
        (True, 1.0),
        (7, 7.0),
        (-0.0, -0.0),
        (math.inf, math.inf),
        (-math.inf, -math.inf),
        (5e-324, 5e-324),
        (np.float32(0.1), float(np.float32(0.1))),
        (np.int64(3), 3.0),
        (np.bool_(True), 1.0),
        (np.array([2.5]), 2.5),
        (torch.tensor(0.5, requires_grad=True), 0.5),
        (torch.tensor([[3]]), 3.0),
        (torch.tensor(0.5, dtype=torch.bfloat16), 0.5),
    ],
)
def test_all_kinds_of_numbers_are_taken(one_run: Run, value: Any, kept: float) -> None:
    one_run.log(1, {"x": value})
    back = float(one_run.series("x").loc[1])
    assert struct.pack("d", back) == struct.pack("d", kept)


@pytest.mark.parametrize(
    "value",
    [None, 1j, [1.0], {}, torch.zeros(2), torch.zeros(0), torch.tensor(1j), np.zeros(3), 10**400, b"a", object()],
)
def test_what_is_no_number_is_refused_by_name_and_nothing_of_its_step_is_kept(one_run: Run, value: Any) -> None:
    with pytest.raises(InputError, match="'the bad one' must be a real number or a string"):
        one_run.log(99, {"good": 1.0, "the bad one": value})
    assert one_run.last_step != 99


@pytest.mark.parametrize("step", [-1, 1.0, "1", None, True, 2**63, torch.tensor(1.0)])
def test_a_step_is_an_integer_of_0_or_more(one_run: Run, step: Any) -> None:
    for write in (
        lambda: one_run.log(step, {"x": 1.0}),
        lambda: one_run.log_layers(step, {"net.0": {"x": 1.0}}),
        lambda: one_run.save_matrices(step, {"a": torch.zeros(1)}),
        lambda: one_run.save_checkpoint(step, {}),
        lambda: one_run.matrices(step),
    ):
        with pytest.raises(InputError, match="step must be an integer"):
            write()


def test_a_step_may_be_large_or_from_numpy(tmp_path: Path) -> None:
    with Run.create(tmp_path / "run") as run:
        run.log(np.int32(4), {"x": 2.0})
        run.log(2**63 - 1, {"x": 1.0})
        assert run.series("x").to_dict() == {4: 2.0, 2**63 - 1: 1.0}


@pytest.mark.parametrize("name", ["", 3, None, "\ud800"])
def test_names_and_layers_are_text(one_run: Run, name: Any) -> None:
    with pytest.raises(InputError, match="name must be"):
        one_run.log(0, {name: 1.0})
    if name is not None:
        with pytest.raises(InputError, match="layer must be"):
            one_run.log_layers(0, {name: {"x": 1.0}})
        with pytest.raises(InputError, match="layer must be"):
            one_run.log(0, {"x": 1.0}, layer=name)


def test_the_run_itself_is_the_layer_none(tmp_path: Path) -> None:
    with Run.create(tmp_path / "run") as run:
        run.log_layers(3, {None: {"loss": 0.5}, "net.0": {"nfc": 0.25}})
        assert run.series("loss").to_dict() == {3: 0.5}
        assert run.series("nfc", "net.0").to_dict() == {3: 0.25}


def test_the_run_of_a_folder_is_opened_or_made(tmp_path: Path) -> None:
    for step in range(2):
        with Run.open_or_create(tmp_path / "run", {"lr": 0.1}) as run:
            run.log(step, {"x": float(step)})
            assert run.config == {"lr": 0.1}
    assert run.series("x").to_dict() == {0: 0.0, 1: 1.0}


def test_values_must_be_a_mapping(one_run: Run) -> None:
    with pytest.raises(InputError, match="values must map names"):
        one_run.log(0, 3.0)  # type: ignore[arg-type]
    with pytest.raises(InputError, match="values must map names"):
        one_run.log_layers(0, {"net.0": 3.0})  # type: ignore[dict-item]
    with pytest.raises(InputError, match="table must map layers"):
        one_run.log_layers(0, [("net.0", {})])  # type: ignore[arg-type]


def test_a_name_that_was_never_logged_is_told_with_those_that_are_near(tmp_path: Path) -> None:
    with Run.create(tmp_path / "run") as run:
        assert run.metrics("loss").empty  # it may come yet
        assert run.series("loss").empty
        assert run.last_step is None
        assert run.metrics()["value"].dtype == np.float64
        run.log(0, {"val_loss": 1.0})
        run.log(0, {"nfc": 1.0}, layer="net.0")
        with pytest.raises(InputError, match="no metrics 'val_los'; it has 2, for instance val_loss"):
            run.metrics(["val_los"])
        with pytest.raises(InputError, match="no metrics 'val_los'"):
            run.series("val_los")
        with pytest.raises(InputError, match=r"for layers only. Pass layer=, for instance 'net\.0'"):
            run.series("nfc")
        with pytest.raises(InputError, match=r"not logged for layer='net\.1', but for layer='net\.0'"):
            run.series("nfc", "net.1")
        with pytest.raises(InputError, match=r"layers='net\.1' matches no layer of the run"):
            run.metrics(layers="net.1")
        with pytest.raises(InputError, match="must contain at least one pattern"):
            run.metrics([])


def test_a_table_of_layers_is_kept_whole_or_not_at_all(tmp_path: Path) -> None:
    with Run.create(tmp_path / "run") as run:
        with pytest.raises(InputError, match="'nfc'"):
            run.log_layers(0, {"net.0": {"nfc": 1.0}, "net.2": {"nfc": None}})  # type: ignore[dict-item]
        assert run.metrics().empty


def test_a_run_that_is_only_read_cannot_be_written(tmp_path: Path) -> None:
    with Run.create(tmp_path / "run") as run:
        run.log(0, {"loss": 1.0})
    reader = Run.open(tmp_path / "run")
    for closed in (run, reader):
        for write in (
            lambda closed=closed: closed.log(1, {"loss": 1.0}),
            lambda closed=closed: closed.save_matrices(1, {"a": torch.zeros(1)}),
            lambda closed=closed: closed.save_checkpoint(1, {}),
            lambda closed=closed: closed.finish(),
        ):
            with pytest.raises(RunStoreError, match="not open for writing"):
                write()
        assert closed.last_step == 0
    assert not (tmp_path / "run" / "matrices").exists()
