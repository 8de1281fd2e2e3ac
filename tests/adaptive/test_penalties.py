"""Effective and joint penalties: closed forms against brute-force minimization, and what is refused."""

from __future__ import annotations

import itertools
import pickle
from dataclasses import replace

import numpy as np
import pytest
from scipy.optimize import minimize, minimize_scalar

import featlearn as fl
from featlearn.adaptive import effective_joint_penalty, effective_penalty, joint_penalty, penalty_curves, power
from featlearn.adaptive._effective_penalty import minimizers
from featlearn.adaptive._penalties import PENALTIES, as_pair, as_penalty

V = np.concatenate([[0.0, 1e-6, 1e-3], np.linspace(0.05, 3, 30), [10.0, 300.0]])


def square(z):
    return (z - 1) ** 2


def absolute(z):
    return np.abs(z - 1)


def naive_one(w, v: float, low: float = 1.0) -> float:
    """min over z >= low of w(z) + v^2/z^2 by scipy, from many brackets."""
    grid = np.concatenate([low + np.geomspace(1e-9, 1e3, 4000), [low]])
    values = w(grid) + v**2 / grid**2
    best = float(values.min())
    for place in np.argsort(values)[:3]:
        z = grid[place]
        bounds = (max(low, z - 0.02 * (z - low) - 1e-9), z + 0.02 * (z - low) + 1e-9)
        result = minimize_scalar(
            lambda z: float(w(np.float64(z)) + v**2 / z**2), bounds=bounds, options={"xatol": 1e-13}
        )
        best = min(best, float(result.fun))
    return best


def naive_two(w1, w2, v: float) -> float:
    """min over s1, s2 >= 1 by many Nelder-Mead starts, with s = 1 + e^u, and along both edges."""
    best = min(naive_one(w1, v), naive_one(w2, v))

    def cost(u):
        s1, s2 = 1 + np.exp(u)
        return float(w1(s1) + w2(s2) + (v / (s1 * s2)) ** 2)

    for start in itertools.product((-4.0, -1.0, 1.0), repeat=2):
        result = minimize(
            cost, start, method="Nelder-Mead", options={"xatol": 1e-12, "fatol": 1e-15, "maxiter": 4000, "maxfev": 4000}
        )
        best = min(best, float(result.fun))
    return best


@pytest.mark.parametrize(
    ("penalty", "w"),
    [
        ("square", square),
        ("absolute", absolute),
        ("power:1.5", lambda z: np.abs(z - 1) ** 1.5),
        ("power:3", lambda z: np.abs(z - 1) ** 3),
        ("power:0.5", lambda z: np.abs(z - 1) ** 0.5),
        (lambda z: np.log(z) ** 2, lambda z: np.log(z) ** 2),
        (lambda z: np.abs(z**2 - 1), lambda z: np.abs(z**2 - 1)),
    ],
)
def test_effective_penalty(penalty, w) -> None:
    v = V[:-1]
    expected = [naive_one(w, x) for x in v]
    assert effective_penalty(penalty, v) == pytest.approx(expected, rel=1e-8, abs=1e-15)


def test_closed_forms_of_the_formula_sheet() -> None:
    z = 1 + np.geomspace(1e-5, 10, 50)
    assert effective_penalty("square", np.sqrt(z**4 - z**3)) == pytest.approx((z - 1) * (2 * z - 1), rel=1e-10)
    v = np.linspace(0, 5, 60)
    expected = np.where(2 * v**2 <= 1, v**2, 1.5 * np.cbrt(2 * v**2) - 1)
    assert effective_penalty("absolute", v) == pytest.approx(expected, rel=1e-12)
    result = effective_joint_penalty("square", "square", np.sqrt(z**5 * (z - 1)))
    assert result == pytest.approx((z - 1) * (3 * z - 2), rel=1e-10)
    turn = (1 + np.sqrt(3)) / (2 * np.sqrt(2))
    s = z[2 * np.sqrt(z**5 * (z - 1) ** 3) > turn]
    result = effective_joint_penalty("square", "absolute", 2 * np.sqrt(s**5 * (s - 1) ** 3))
    assert result == pytest.approx(s * (4 * s - 5), rel=1e-10)
    low = np.linspace(0, turn, 20)
    assert effective_joint_penalty("absolute", "square", low) == pytest.approx(effective_penalty("square", low))
    assert effective_penalty("norm", v, allow_unanchored=True) == pytest.approx(2 * v, rel=1e-14)
    assert effective_joint_penalty("norm", "norm", v, allow_unanchored=True) == pytest.approx(3 * v ** (2 / 3))
    assert effective_penalty("indicator", v) == pytest.approx(v**2)


@pytest.mark.parametrize(
    ("first", "second", "w1", "w2"),
    [
        ("square", "square", square, square),
        ("square", "absolute", square, absolute),
        ("absolute", "absolute", absolute, absolute),
        ("power:1.5", "power:1.5", lambda z: np.abs(z - 1) ** 1.5, lambda z: np.abs(z - 1) ** 1.5),
        ("power:1.5", "square", lambda z: np.abs(z - 1) ** 1.5, square),
        ("power:3", "absolute", lambda z: np.abs(z - 1) ** 3, absolute),
        (lambda z: np.log(z) ** 2, "square", lambda z: np.log(z) ** 2, square),
    ],
)
def test_effective_joint_penalty(first, second, w1, w2) -> None:
    v = np.array([0.0, 0.05, 0.3, 0.7, 0.96, 0.97, 1.0, 1.5, 2.0, 4.0, 20.0])
    expected = [naive_two(w1, w2, x) for x in v]
    assert effective_joint_penalty(first, second, v) == pytest.approx(expected, rel=1e-8, abs=1e-14)
    assert effective_joint_penalty(second, first, v) == pytest.approx(expected, rel=1e-8, abs=1e-14)


@pytest.mark.parametrize(
    ("first", "second", "w1", "w2"),
    [
        ("square", "absolute", square, absolute),
        ("absolute", "square", absolute, square),
        ("square", "square", square, square),
        ("absolute", "absolute", absolute, absolute),
        ("power:3", "absolute", lambda z: np.abs(z - 1) ** 3, absolute),
        ("power:0.5", "square", lambda z: np.abs(z - 1) ** 0.5, square),
    ],
)
def test_joint_penalty(first, second, w1, w2) -> None:
    v = np.array([1.0, 1.1, 1.36, 1.37, 1.5, 2.0, 5.0, 40.0])
    expected = []
    for x in v:
        z = np.linspace(1, x, 400001)
        expected.append((w1(z) + w2(x / z)).min())
    assert joint_penalty(first, second, v) == pytest.approx(expected, rel=1e-8, abs=1e-9)


def test_the_searched_minimum_is_that_of_the_closed_form() -> None:
    v = V[V > 0]
    for first, second in (("square", "indicator"), ("square", "square"), ("square", "absolute"), ("norm", "indicator")):
        exact = [as_penalty(name, True) for name in (first, second)]
        hidden = [w if w.fixed else replace(w, exponent=None, name="hidden") for w in exact]
        closed, result = minimizers(*exact, v), minimizers(*hidden, v)
        for a, b in zip(closed, result, strict=True):
            assert b == pytest.approx(a, rel=2e-7, abs=2e-8)


def test_proposition_3() -> None:
    u = np.linspace(0, 30, 400)
    for first, second in itertools.product(("square", "absolute", "power:1.5", "indicator"), repeat=2):
        values = effective_joint_penalty(first, second, np.sqrt(u))
        assert (np.diff(values) > 0).all()
        assert (np.diff(values, 2) <= 1e-9).all()
        small = 1e-4
        assert effective_joint_penalty(first, second, small) == pytest.approx(small**2, rel=1e-3)


def test_figure_2() -> None:
    curves = penalty_curves(np.linspace(0, 3, 31))
    assert list(curves) == ["v^2", "square", "absolute", "square and absolute"]
    for name in list(curves)[1:]:
        assert (curves[name] <= curves["v^2"] + 1e-15).all()
    assert (curves["square and absolute"] <= np.minimum(curves["square"], curves["absolute"]) + 1e-12).all()


def test_shapes_and_pickles() -> None:
    assert effective_joint_penalty("square", "power:3", np.ones((2, 3))).shape == (2, 3)
    assert effective_penalty("square", -2.0) == effective_penalty("square", 2.0)
    again = pickle.loads(pickle.dumps(PENALTIES["square"]))
    assert again(3.0) == 4.0
    assert as_pair(["square", "indicator"])[1].fixed


def test_what_is_refused() -> None:
    for penalty, message in (
        ("cube", "penalty must be one of .* got 'cube'"),
        ("power", "must state the power"),
        ("power:x", "must have the form"),
        (3, "penalty must be a name"),
        ("norm", "minimum at 1, but .* has it at 0.*allow_unanchored"),
        (lambda z: (z - 2) ** 2, "has it at 2"),
        (lambda z: (z - 1) ** 2 + 1, "must be 0 at 1"),
        (lambda z: np.minimum((z - 1) ** 2, np.abs(z - 5) + 1e-3), "does not grow away from 1"),
        (lambda z: z[:2], "must keep the shape"),
        (lambda z: np.nan * z, "got NaN"),
        (lambda z: 1 / 0, "but raised"),
    ):
        with pytest.raises(fl.InputError, match=message):
            effective_penalty(penalty, 1.0)
    with pytest.raises(fl.InputError, match="finite number above 0"):
        power(-1)
    with pytest.raises(fl.InputError, match="v must be at least 1"):
        joint_penalty("square", "square", 0.5)
    with pytest.raises(fl.InputError, match="NaN"):
        effective_penalty("square", np.nan)
    with pytest.raises(fl.InputError, match="must grow without bound"):
        effective_penalty(lambda z: np.minimum(np.abs(z - 1), 3 + z * 1e-300), 10.0)
    with pytest.raises(fl.InputError, match="pair"):
        as_pair(("square",) * 3)
    assert effective_penalty(lambda z: z**2, 1.7, allow_unanchored=True) == pytest.approx(3.4, rel=1e-9)
    assert effective_penalty(lambda z: z**2, 0.0, allow_unanchored=True) == pytest.approx(0.0, abs=1e-12)
