"""Registration, default points, and groups and tables of outcomes."""

from __future__ import annotations

import pickle
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import pytest

from featlearn.papers.experiment import Outcome, Outcomes, Result, experiment, registered


@dataclass(frozen=True)
class Config:
    n: int = 5
    widths: tuple[int, ...] = (2, 4)
    trials: int = 2
    size: tuple[int, int] = (3, 1)


def _measure(n: int, width: int, method: str, seed: int, size: tuple[int, int]) -> Mapping[str, Any]:
    return {"value": n * width + seed, "n": -n, "method": method}


@experiment(
    "nfa-test",
    "a test",
    covers=("nothing",),
    smoke=Config(),
    quick=Config(n=6),
    full=Config(widths=(8,)),
    measure=_measure,
    over={"method": ("a", "b"), "width": "widths", "seed": "trials"},
)
def _conclude(config: Config, outcomes: Outcomes) -> Result:
    return Result((), {"all": outcomes.table("width", "seed")})


def test_points_are_the_product_in_the_order_of_the_arguments() -> None:
    points = registered(__name__).points(Config())
    assert [(point["method"], point["width"], point["seed"]) for point in points] == [
        (method, width, seed) for method in ("a", "b") for width in (2, 4) for seed in (0, 1)
    ]
    assert all(point["n"] == 5 and point["size"] == (3, 1) for point in points)
    assert {name for point in points for name in point} == {"n", "size", "method", "width", "seed"}


def test_a_registered_experiment_runs_and_travels_to_workers() -> None:
    result = pickle.loads(pickle.dumps(registered(__name__)))
    assert result.config("quick") == Config(n=6)
    assert _conclude is result.conclude  # the decorator leaves the function as it is
    table = result.run(result.config("smoke")).tables["all"]
    assert list(table) == ["width", "seed", "value", "n", "method"]
    assert table["value"].tolist() == [10, 11, 20, 21] * 2


OUTCOMES = Outcomes(
    Outcome({"a": a, "b": b, "n": 1}, {"x": 10 * a + b, "n": 2, "list": [a, b]}) for b in (1, 0) for a in (2, 3)
)


def test_groups_keep_the_order_of_the_points() -> None:
    assert {key: [values["x"] for values in group] for key, group in OUTCOMES.values_by("a").items()} == {
        2: [21, 20],
        3: [31, 30],
    }
    assert list(OUTCOMES.by("b")) == [1, 0]
    assert list(OUTCOMES.by("b", "a")) == [(1, 2), (1, 3), (0, 2), (0, 3)]
    assert OUTCOMES.by("b")[0].values == OUTCOMES.values[2:]
    assert OUTCOMES.by("a")[2].by("b")[1] == (OUTCOMES[0],)


@pytest.mark.parametrize(
    ("chosen", "columns"),
    [(None, ["a", "x", "n", "list"]), (("x", "n"), ["a", "x", "n"]), ({"sum": lambda v: sum(v["list"])}, ["a", "sum"])],
    ids=["all", "names", "function"],
)
def test_tables_tell_arguments_and_values_apart(chosen: Any, columns: list[str]) -> None:
    table = OUTCOMES.table("a", values=chosen)
    assert list(table) == columns
    assert len(table) == 4
    if "n" in columns:
        assert set(table["n"]) == {2}
    assert OUTCOMES.table({"argument": "n"}, values={"value": "n"}).to_dict("list") == {
        "argument": [1] * 4,
        "value": [2] * 4,
    }
