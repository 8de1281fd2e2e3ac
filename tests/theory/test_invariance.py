from __future__ import annotations

import math

import pytest
import torch

from featlearn.errors import InputError
from featlearn.theory import global_convergence, ntk_floor


def step(x: torch.Tensor) -> torch.Tensor:
    return (x > 0).to(x.dtype)


def test_the_floor_of_relu_in_closed_form() -> None:
    """sigma' is a step: a = 1/2, eta_0 = 1/2, eta_1 = 1/sqrt(2 pi), eta_2 = 0."""
    floor = ntk_floor(step, kinks=[0.0])
    assert floor.second_moment == pytest.approx(0.5)
    assert floor.coefficients == pytest.approx((0.5, 1 / math.sqrt(2 * math.pi), 0.0), abs=1e-10)
    assert floor.bound == pytest.approx(0.25 - 1 / (2 * math.pi), abs=1e-10)
    assert floor.alpha == pytest.approx(math.sqrt(floor.bound) / 2)


def test_polynomials_of_degree_three_have_no_floor() -> None:
    assert ntk_floor(lambda x: 3 * x.square()).bound < 1e-10
    assert ntk_floor(lambda x: 4 * x.pow(3)).bound == pytest.approx(96.0)  # 4 x^3 = 4 sqrt(6) h_3 + 12 h_1


def test_global_convergence_tells_rates_and_assumptions() -> None:
    result = global_convergence(step, n=200, d=100, width=400, readout=torch.ones(400), kinks=[0.0])
    alpha = result.alpha
    assert result.largest_rate == pytest.approx(min(alpha**2 * 100, 200 / (4 * (1 + math.sqrt(2)) ** 2)))
    assert result.decay(result.largest_rate / 2) == pytest.approx(1 - result.largest_rate * alpha**2 / 800)
    assert result.path_length(3.0) == pytest.approx(12 / alpha)
    # Where the width is the least, the proof's inequality is an equation: 2 alpha - (2 beta / sqrt h) R = alpha.
    width = result.least_width(3.0)
    assert 2 * alpha - 2 * result.beta / math.sqrt(width) * result.path_length(3.0) == pytest.approx(alpha)
    reported = {one.text.split(" ")[0]: one.holds for one in result.assumptions}
    assert reported["second-layer"] is True
    assert result.assumptions[0].holds
    assert global_convergence(step, 10, 10, 10, readout=torch.full((10,), 2.0)).assumptions[2].holds is False
    assert global_convergence(lambda x: 3 * x.square(), 10, 10, 10).assumptions[0].holds is False
    assert math.isinf(global_convergence(torch.ones_like, 10, 10, 10).least_width(1.0))  # linear
    with pytest.raises(InputError, match="constant"):
        global_convergence(torch.zeros_like, 10, 10, 10)
    with pytest.raises(InputError, match="rate must be a finite number above 0 and below"):
        result.decay(1e9)
    with pytest.raises(InputError, match="at least 1"):
        global_convergence(step, 0, 10, 10)
