"""Checks of arguments, and one rule for steps."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import featlearn as fl
from featlearn import InputError
from featlearn._utils.validation import as_step, check_int, check_number, check_option
from featlearn.runs import Run


@pytest.mark.parametrize("step", [0, np.int64(4), np.uint8(4), torch.tensor(4), torch.tensor([4]), 2**63 - 1])
def test_steps(step: Any, tmp_path: Path) -> None:
    assert as_step(step) == int(step)
    with Run.create(tmp_path / "run") as run:
        run.log(step, {"loss": 1.0})
    assert run.last_step == int(step)


@pytest.mark.parametrize(
    "step", [True, np.bool_(True), torch.tensor(True), 3.0, torch.tensor(3.0), -1, 2**63, "3", None, torch.ones(2)]
)
def test_runs_and_monitors_refuse_the_same_steps(step: Any, tmp_path: Path) -> None:
    with pytest.raises(InputError, match="step must be an integer"):
        as_step(step)
    with Run.create(tmp_path / "run") as run, pytest.raises(InputError, match="step must be an integer"):
        run.log(step, {"loss": 1.0})
    monitor = fl.Monitor(nn.Linear(2, 1), torch.ones(4, 2), measure="weights")
    if step is not None:  # a monitor counts by itself
        with pytest.raises(InputError, match="step must be an integer"):
            monitor.step(step)


@pytest.mark.parametrize("value", [1, 3, np.int32(2)])
def test_integers(value: Any) -> None:
    checked = check_int("k", value, 1, 3)
    assert checked == value
    assert type(checked) is int


@pytest.mark.parametrize("value", [0, 4, True, 1.0, "1", None, math.nan])
def test_what_is_not_an_integer_within_limits(value: Any) -> None:
    with pytest.raises(InputError, match=r"k must be an integer from 1 to 3, got"):
        check_int("k", value, 1, 3)


def test_messages_of_integers() -> None:
    with pytest.raises(InputError, match=r"^k must be an integer of at least 2, or None, got 1$"):
        check_int("k", 1, 2, optional=True)


@pytest.mark.parametrize("value", [0.5, np.float32(0.25), torch.tensor(0.5).item()])
def test_numbers(value: Any) -> None:
    assert check_number("p", value, 0, below=1) == float(value)


@pytest.mark.parametrize("value", [-0.1, 1, 1.0, math.nan, math.inf, True, "0.5", None])
def test_what_is_not_a_number_within_limits(value: Any) -> None:
    with pytest.raises(InputError, match=r"p must be a finite number of at least 0 and below 1, got"):
        check_number("p", value, 0, below=1)


def test_options() -> None:
    assert check_option("how", "a", ("a", "b")) == "a"
    assert check_option("center", False, ("auto", True, False)) is False
    with pytest.raises(InputError, match=r"^how must be 'a' or 'b', got 'c'$"):
        check_option("how", "c", ("a", "b"))
    with pytest.raises(InputError, match=r"^center must be one of 'auto', True, False, got 1$"):
        check_option("center", 1, ("auto", True, False))
