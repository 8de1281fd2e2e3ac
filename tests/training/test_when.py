from __future__ import annotations

import math
import warnings
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

import featlearn as fl
from featlearn.errors import InputError
from featlearn.training._schedule import Budget, Schedule, step_rule


def test_every_so_many_steps() -> None:
    due = step_rule(7)
    assert [s for s in range(30) if due(s)] == [0, 7, 14, 21, 28]


def test_chosen_steps_from_any_iterable() -> None:
    for steps in ([3, 0, 9], (3, 0, 9), {0, 3, 9}, np.array([0, 3, 9]), iter([0, 3, 9]), range(0, 10, 3)):
        due = step_rule(steps)
        assert [s for s in range(12) if due(s)][:2] == [0, 3]
        assert due(9)


def test_log_steps_are_the_rounded_powers() -> None:
    due = step_rule("log")
    wanted = {0, 1} | {round(10 ** (i / 8)) for i in range(8 * 5)}
    assert {s for s in range(10**5) if due(s)} == {s for s in wanted if s < 10**5}


@pytest.mark.parametrize("every", [0, -1, "often", True, [], [1.5], [-1], ["a"], None, 2.5])
def test_other_rules_are_refused(every) -> None:
    with pytest.raises(InputError, match="every must be a number of steps"):
        step_rule(every)


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


class Sizes:
    """Sizes of measurements that cost what they are priced at, times a factor that is not known."""

    def __init__(self, clock: Clock, smallest: float, wrong: list[float]) -> None:
        self.least, self.clock, self.wrong = smallest, clock, wrong
        self.excess = 0.0

    def first(self, complete: bool) -> float:
        return self.least

    def fitted(self, limit: float, income: float, complete: bool = False) -> float | None:
        return max(limit, self.least) if complete else limit if limit >= self.least else None

    def measure(self, seconds: float, budget: Budget) -> None:
        took = seconds * self.wrong[len(self.wrong) % 7]
        self.clock.now += took
        budget.pay(took)
        self.excess += max(0.0, took - seconds)


@given(
    st.floats(0.01, 0.5),
    st.lists(st.floats(0.001, 1.0), min_size=100, max_size=150),
    st.floats(0.001, 2.0),
    st.lists(st.floats(0.3, 2.0), min_size=7, max_size=7),
)
def test_the_budget_is_held_but_for_the_first_and_wrong_prices(share, steps, smallest, wrong) -> None:
    clock = Clock()
    schedule = Schedule("log", share)
    schedule.budget = Budget(share, clock)
    sizes, made = Sizes(clock, smallest, wrong), list[int]()
    for step, trained in enumerate(steps):
        if schedule.asks(step) and (plan := schedule.choose(sizes, last=False)) is not None:
            sizes.measure(plan, schedule.budget)
            schedule.measured(0.0)
            made.append(step)
        clock.now += trained
        allowed = share * schedule.budget.trained + sizes.excess
        assert schedule.budget.spent <= allowed + smallest + 1e-9
    assert made[0] == 0
    plan = schedule.choose(sizes, last=True)
    assert plan is not None  # the end is always measured
    assert plan <= max(schedule.budget.available, 1.3 * smallest)


def test_a_late_measurement_is_made_as_soon_as_there_is_time_for_it() -> None:
    clock = Clock()
    schedule = Schedule("log", 0.05)
    schedule.budget = Budget(0.05, clock)
    sizes, made = Sizes(clock, 0.2, [1.0] * 7), list[int]()
    for step in range(400):
        if schedule.asks(step) and (plan := schedule.choose(sizes, last=False)) is not None:
            sizes.measure(plan, schedule.budget)
            schedule.measured(0.0)
            made.append(step)
        clock.now += 0.1
    assert made[0] == 0
    # 0.2 + 0.2 seconds are 5% of 80 steps, and a part is kept for the end.
    assert made[1] in range(80, 90)
    assert len(made) >= 5
    assert schedule.budget.used <= 0.05


def test_other_times_count_for_two_fifths_of_the_budget_at_most() -> None:
    clock = Clock()
    schedule = Schedule("log", 0.05)
    schedule.budget = Budget(0.05, clock)
    schedule.budget.pay(1e-9)
    clock.now += 100.0
    sizes = Sizes(clock, 0.2, [1.0] * 7)
    plans = [schedule.choose(sizes, last=True, besides=seconds) for seconds in (0.0, 1.0, 1e9)]
    assert plans == pytest.approx([5.0, 4.0, 3.0], abs=1e-6)


def test_steps_that_were_asked_for_are_measured_whatever_they_cost() -> None:
    clock = Clock()
    schedule = Schedule([0, 3, 4], "auto")
    schedule.budget = Budget(0.05, clock)
    sizes = Sizes(clock, 5.0, [1.0] * 7)
    made = []
    for step in range(6):
        if schedule.asks(step) and (plan := schedule.choose(sizes, last=False)) is not None:
            sizes.measure(plan, schedule.budget)
            schedule.measured(0.0)
            made.append(step)
        clock.now += 0.1
    assert made == [0, 3, 4]


def test_a_number_as_budget_may_skip_steps_that_were_asked_for() -> None:
    clock = Clock()
    schedule = Schedule([0, 3, 4], 0.05)
    schedule.budget = Budget(0.05, clock)
    sizes = Sizes(clock, 5.0, [1.0] * 7)
    sizes.measure(5.0, schedule.budget)
    assert schedule.asks(3)
    assert schedule.choose(sizes, last=False) is None
    assert not schedule.asks(5)


def test_without_a_share_there_is_no_limit() -> None:
    budget = Budget(None)
    budget.pay(1e9)
    assert budget.available == math.inf


@pytest.mark.parametrize("budget", ["all", True, "0.1"])
def test_budgets_that_make_no_sense(budget) -> None:
    with pytest.raises(InputError, match="budget must be a share"):
        Schedule("log", budget)


@pytest.mark.parametrize("share", [0, -0.1, math.inf, math.nan])
def test_shares_that_make_no_sense(share) -> None:
    with pytest.raises(InputError, match="budget must be a share"):
        Budget(share)


def test_the_table_has_the_last_numbers_of_every_layer() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3))
    X = torch.randn(40, 6)
    monitor = fl.Monitor(model, (X, torch.randint(3, (40,))), budget=None, measure="weights")
    monitor.step(0)
    both = monitor.latest
    plan = replace(monitor._measured._plan, parts=frozenset({"features"}), omitted=frozenset({"0"}), sized=True)
    later = monitor._measure(1, plan)
    assert list(later.layers) == ["2"]
    table = monitor.table(["nfc", "weight_norm", "w.top"])
    assert list(table.index) == ["0", "2"]
    assert table.loc["2", "nfc"] == later.layers["2"]["nfc"]
    assert math.isnan(table.loc["0", "nfc"])
    assert table["w.top"].tolist() == [both.layers[name]["w.top"] for name in ("0", "2")]
    assert table["reading"].tolist() == ["untrained", "untrained"]


def test_a_model_that_was_not_ready_is_measured_within_the_budget() -> None:
    class Late(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer, self.ready = nn.Linear(64, 64), False

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            if not self.ready:
                raise RuntimeError("statistics are missing")
            return self.layer(x)

    model = Late()
    monitor = fl.Monitor(model, torch.randn(2000, 64), samples=2000, outputs=16, measure="features")
    assert monitor._measured.sizing is None
    model.ready = True
    snapshot = monitor.step(0)
    assert "of 2000 rows" in snapshot.reduced


def test_a_measurement_that_fails_is_not_repeated_at_every_step() -> None:
    model = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3))
    monitor = fl.Monitor(model, torch.randn(40, 6), measure="weights", budget=1e9)
    monitor.step(0)
    model[0].weight.data.fill_(math.nan)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for step in range(1, 101):
            monitor.step(step)
    # Eight steps per decade.
    assert 1 <= sum("could not be measured" in str(w.message) for w in caught) <= 17
