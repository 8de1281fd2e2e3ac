"""Values and slopes of every kernel against their definitions."""

from __future__ import annotations

import math

import pytest
import rfm_oracles as oracles
import torch

from featlearn import InputError
from featlearn.rfm.kernels import KERNELS, make_kernel, row_blocks

BANDWIDTH = 1.7
U, V = oracles.numbers(9, 4, seed=0), oracles.numbers(7, 4, seed=1)


@pytest.mark.parametrize("name", oracles.KERNELS)
def test_values_are_the_definition(name: str) -> None:
    kernel = oracles.KERNELS[name]
    expected = oracles.matrix_by_loops(kernel, U, V, BANDWIDTH)
    assert oracles.relative_error(kernel.matrix(U, V, BANDWIDTH), expected) < 1e-13
    assert oracles.relative_error(oracles.matrix(kernel, U, V, BANDWIDTH), expected) < 1e-13
    out = torch.full((9, 7), math.nan, dtype=torch.float64)
    assert kernel.matrix(U, V, BANDWIDTH, out=out) is out
    assert oracles.relative_error(out, expected) < 1e-13


@pytest.mark.parametrize("name", oracles.KERNELS)
def test_slopes_give_the_gradient(name: str) -> None:
    kernel = oracles.KERNELS[name]
    at = U.clone().requires_grad_(True)
    values = oracles.matrix(kernel, at, V, BANDWIDTH)
    slopes = kernel.slopes_(kernel.pairs(U, V), BANDWIDTH)
    for j, row in enumerate(V):
        (gradient,) = torch.autograd.grad(values[:, j].sum(), at, retain_graph=True)
        steps = U - row
        directions = steps.sign() * steps.abs() ** (kernel.norm - 1) if kernel.radial else row.expand_as(U)
        assert oracles.relative_error(slopes[:, j, None] * directions, gradient) < 1e-12


@pytest.mark.parametrize("name", [name for name in oracles.RADIAL if name not in ("gaussian", "lpq 1 1")])
def test_rows_that_coincide_have_value_one_and_slope_zero(name: str) -> None:
    kernel = oracles.KERNELS[name]
    x = oracles.numbers(6, 4, seed=2)
    x[4] = x[1]
    assert kernel.matrix(x, x, BANDWIDTH)[[1, 4, 4], [4, 1, 4]].tolist() == [1.0, 1.0, 1.0]
    slopes = kernel.slopes_(kernel.pairs(x, x), BANDWIDTH)
    assert torch.isfinite(slopes).all()
    assert (slopes == 0).sum() == 6 + 2


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_rows_that_coincide_under_a_metric_of_low_rank(dtype: torch.dtype) -> None:
    kernel = make_kernel("laplace")
    basis = torch.linalg.qr(oracles.numbers(6, 6, seed=3))[0]
    x = oracles.numbers(8, 6, seed=4)
    x[5] = x[2] + 30.0 * basis[:, 5]  # apart, but not for a metric that does not see the last direction
    u = (x @ basis[:, :2] @ basis[:, :2].T).to(dtype)
    slopes = kernel.slopes_(kernel.pairs(u, u), BANDWIDTH)
    assert slopes[2, 5] == slopes[5, 2] == 0
    assert (slopes == 0).sum() == 8 + 2
    assert slopes.abs().max() < 100


@pytest.mark.parametrize(("name", "slope"), [("gaussian", -2 / BANDWIDTH**2), ("lpq 1 1", -1 / BANDWIDTH)])
def test_an_exponent_equal_to_the_norm_has_a_slope_at_zero(name: str, slope: float) -> None:
    slopes = oracles.KERNELS[name].slopes_(torch.zeros(1, 1, dtype=torch.float64), BANDWIDTH)
    assert slopes.item() == pytest.approx(slope)  # harmless: it is multiplied by a difference of zero, or its sign


@pytest.mark.parametrize("name", ["laplace", "lpq 1.5 1.2", "polynomial 3"])
def test_many_rows_are_cut_into_blocks(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    kernel = oracles.KERNELS[name]
    whole = kernel.matrix(U, V, BANDWIDTH)
    monkeypatch.setattr("featlearn.rfm.kernels.row_blocks", lambda n, width: row_blocks(n, width, 20))
    assert torch.allclose(kernel.matrix(U, V, BANDWIDTH), whole, rtol=1e-14, atol=0)


def test_row_blocks_cover_all_rows() -> None:
    for n, width, entries in ((10, 3, 9), (10, 3, 1), (0, 3, 9), (7, 0, 100)):
        rows = [i for block in row_blocks(n, width, entries) for i in range(n)[block]]
        assert rows == list(range(n))


def test_an_empty_side_gives_an_empty_matrix() -> None:
    for name in KERNELS:
        assert make_kernel(name).matrix(U[:0], V, BANDWIDTH).shape == (0, 7)
        assert make_kernel(name).matrix(U, V[:0], BANDWIDTH).shape == (9, 0)


def test_arguments_without_a_positive_definite_kernel_are_refused() -> None:
    for arguments, words in (
        ({"name": "sigmoid"}, "must be one of"),
        ({"name": "laplace", "exponent": 0.7}, "exponential"),
        ({"name": "lpq", "norm": 3.0}, "from 1 to 2"),
        ({"name": "lpq", "norm": 1.0, "exponent": 1.2}, "at most 1 "),
        ({"name": "exponential", "exponent": 0.0}, "above 0"),
        ({"name": "polynomial", "degree": 1.5}, "degree"),
        ({"name": "polynomial", "offset": -1.0}, "offset"),
    ):
        with pytest.raises(InputError, match=words):
            make_kernel(**arguments)
