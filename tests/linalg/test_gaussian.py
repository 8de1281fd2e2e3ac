"""Gaussian expectations against closed forms and the constants of the formula sheet."""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F

from featlearn.errors import InputError
from featlearn.linalg import activation_constants, gaussian_mean, hermite, hermite_coefficients


@pytest.mark.parametrize("k", range(0, 21, 2))
def test_even_moments_are_double_factorials(k: int) -> None:
    exact = math.prod(range(1, k, 2))
    assert gaussian_mean(lambda z: z**k) == pytest.approx(exact, rel=1e-13)


@pytest.mark.parametrize(
    ("function", "mean", "std", "slope"),
    [
        (torch.tanh, 0.0, 0.627928730349, 0.964608689374),
        (F.softplus, 0.806059183347, 0.521070534381, 0.959562990054),
        (torch.relu, 0.398942280401, 0.583819370104, 0.856429275225),
        # Closed forms: E[erf^2] = (2/pi) asin(2/3), E[erf'] = (2/sqrt pi)/sqrt 3.
        (torch.erf, 0.0, math.sqrt(2 / math.pi * math.asin(2 / 3)), None),
        (F.gelu, 1 / math.sqrt(4 * math.pi), None, None),
        (torch.sigmoid, 0.5, None, None),
    ],
)
def test_constants_of_activations(function, mean, std, slope) -> None:
    constants = activation_constants(function)
    for value, expected in ((constants.mean, mean), (constants.std, std), (constants.slope, slope)):
        if expected is not None:
            assert value == pytest.approx(expected, abs=1e-11)


def test_slope_is_the_mean_derivative_after_normalizing() -> None:
    for function in (torch.tanh, F.silu, F.softplus):
        constants = activation_constants(function)

        def derivative(z: torch.Tensor, function=function) -> torch.Tensor:
            z = z.clone().requires_grad_()
            return torch.autograd.grad(function(z).sum(), z)[0]

        assert constants.slope == pytest.approx(gaussian_mean(derivative) / constants.std, rel=1e-12)


def test_a_kink_off_the_grid_must_be_named() -> None:
    exact = 0.3 * math.erf(0.3 / math.sqrt(2)) + math.sqrt(2 / math.pi) * math.exp(-(0.3**2) / 2)
    errors = [abs(gaussian_mean(lambda z: (z - 0.3).abs(), kinks) - exact) for kinks in ((), (0.3,))]
    assert errors[1] < 1e-14 < errors[0]


def test_hermite_polynomials_are_orthonormal() -> None:
    for j in range(7):
        coefficients = hermite_coefficients(lambda z, j=j: hermite(z, j)[j], 7)
        assert torch.allclose(coefficients, torch.eye(8, dtype=torch.float64)[j], atol=1e-12)


def test_parseval() -> None:
    coefficients = hermite_coefficients(torch.tanh, 160)
    assert float(coefficients.square().sum()) == pytest.approx(gaussian_mean(lambda z: torch.tanh(z) ** 2), rel=1e-6)
    # Softplus and ReLU have a second coefficient, so that spikes are expected at initialization.
    assert activation_constants(F.softplus).second == pytest.approx(0.280, abs=5e-4)
    assert activation_constants(torch.relu).second == pytest.approx(0.483, abs=5e-4)
    assert activation_constants(torch.tanh).second == pytest.approx(0.0, abs=1e-14)


def test_bad_functions_are_refused() -> None:
    with pytest.raises(InputError, match="same shape"):
        gaussian_mean(lambda z: z.sum())
    with pytest.raises(InputError, match="NaN or infinity"):
        gaussian_mean(torch.log)
    with pytest.raises(InputError, match="constant"):
        activation_constants(torch.ones_like)
    with pytest.raises(InputError, match="degree"):
        hermite(torch.zeros(2), -1)
