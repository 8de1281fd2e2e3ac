"""One converter to strict JSON."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch

from featlearn import InputError
from featlearn._utils.json import encode_json, to_json


@pytest.mark.parametrize(
    "missing", [math.nan, math.inf, -math.inf, np.float32("nan"), pd.NA, pd.NaT, np.datetime64("NaT"), None]
)
def test_what_has_no_number_is_null(missing: Any) -> None:
    if isinstance(missing, np.datetime64):
        assert to_json({"a": [pd.Timestamp(missing)]}) == {"a": [None]}
    else:
        assert to_json({"a": [missing]}) == {"a": [None]}


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (np.float32(0.5), 0.5),
        (np.int64(3), 3),
        (np.bool_(True), True),
        (True, True),
        (np.array([1.0, math.nan]), [1.0, None]),
        (np.array([[1, 2]]), [[1, 2]]),
        (np.array([2**60]), [str(2**60)]),
        (np.array(["a"]), ["a"]),
        (torch.tensor([1.5]), [1.5]),
        (torch.tensor(2), 2),
        ((1, {"b": {3}}), [1, {"b": [3]}]),
        (2**53, 2**53),
        (2**53 + 1, str(2**53 + 1)),
        (Path("a") / "b", "a/b"),
        ({1: 2}, {"1": 2}),
        (1j, "1j"),
        (np.array([]), []),
        (range(2), [0, 1]),
    ],
)
def test_values(value: Any, expected: Any) -> None:
    converted = to_json(value)
    assert converted == expected
    assert type(converted) is type(expected)
    assert json.loads(encode_json(value)) == expected


def test_deep_nests_are_cut_off() -> None:
    nest: list[Any] = []
    nest.append(nest)
    assert '"..."' in encode_json(nest).decode()


def test_strict_keeps_what_can_be_restored() -> None:
    config = {"lr": math.inf, "sizes": (1, 2), "path": Path("a"), "width": np.int64(3), "on": np.bool_(False)}
    assert to_json(config, strict="config") == {"lr": math.inf, "sizes": [1, 2], "path": "a", "width": 3, "on": False}
    assert to_json({"n": 2**60}, strict="config") == {"n": 2**60}


@pytest.mark.parametrize("odd", [torch.tensor(1), np.zeros(2), {1, 2}, pd.NA, object(), {1: 2}, {"": 1}, "\ud800", 1j])
def test_strict_refuses_what_cannot_be_restored(odd: Any) -> None:
    with pytest.raises(InputError, match=r"config\.a|a name in config"):
        to_json({"a": odd}, strict="config")
