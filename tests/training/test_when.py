from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from featlearn.errors import InputError
from featlearn.training._schedule import Budget, step_rule


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


@given(
    st.floats(0.01, 0.5), st.lists(st.tuples(st.floats(0.001, 1.0), st.floats(0.001, 2.0)), min_size=1, max_size=300)
)
def test_the_budget_is_held_once_the_first_measurement_is_paid_for(share, steps) -> None:
    """Whatever training and measuring cost: beyond the first, spending never exceeds what the dearest one foretold."""
    clock = Clock()
    budget = Budget(share, clock)
    first = dearest = 0.0
    for trained, cost in steps:
        if budget.allows():
            before = budget.spent
            clock.now += cost
            budget.pay(cost)
            if before:
                # A measurement dearer than all before it may overdraw by the difference, never by more.
                assert budget.spent <= share * budget.trained + max(0.0, cost - dearest) + 1e-9
            else:
                first = cost
            dearest = max(dearest, cost)
        clock.now += trained
    assert first > 0


def test_equal_costs_keep_the_share() -> None:
    clock = Clock()
    budget = Budget(0.05, clock)
    made = 0
    for _ in range(1000):
        if budget.allows():
            clock.now += 0.3
            budget.pay(0.3)
            made += 1
        clock.now += 0.1
    assert budget.trained == pytest.approx(100.0)
    assert budget.used <= 0.05
    assert made == math.floor(100 * 0.05 / 0.3)  # and none less than there is room for


def test_without_a_share_all_is_allowed() -> None:
    budget = Budget(None)
    budget.pay(1e9)
    assert budget.allows()


@pytest.mark.parametrize("share", [0, -0.1, math.inf, math.nan])
def test_shares_that_make_no_sense(share) -> None:
    with pytest.raises(InputError, match="budget must be a share"):
        Budget(share)
