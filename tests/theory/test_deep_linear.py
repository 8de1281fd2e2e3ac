from __future__ import annotations

import numpy as np
import pytest
import torch
from scipy.optimize import minimize

from featlearn.errors import InputError
from featlearn.theory import balance, balanced_layers, linear_alignment, shrunk_map


def matrix(rows: int, columns: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(rows, columns, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


@pytest.mark.parametrize("depth", [1, 2, 3, 5])
def test_balanced_layers_multiply_to_the_product_at_the_least_cost(depth: int) -> None:
    product = matrix(4, 6)
    layers = balanced_layers(product, depth, width=5)
    result = layers[0]
    for layer in layers[1:]:
        result = layer @ result
    torch.testing.assert_close(result, product)
    assert max(balance(layers), default=0.0) < 1e-12
    cost = sum(float(w.square().sum()) for w in layers)
    assert cost == pytest.approx(depth * float((torch.linalg.svdvals(product) ** (2 / depth)).sum()))
    alignment = linear_alignment(layers)
    assert alignment.agop_cosine == pytest.approx(1.0, abs=1e-10)
    assert alignment.power == 1 / depth


def test_layers_that_are_not_balanced_are_told() -> None:
    layers = balanced_layers(matrix(4, 6), 3)
    layers[1] = 2 * layers[1]
    assert balance(layers)[0] == pytest.approx(3.0)
    generic = [matrix(5, 6, 1), matrix(5, 5, 2), matrix(4, 5, 3)]
    assert linear_alignment(generic).agop_cosine < 0.95


@pytest.mark.parametrize("depth", [1, 2, 3, 4])
@pytest.mark.parametrize("weight_decay", [0.05, 0.6])
def test_the_minimum_for_white_inputs_against_descent(depth: int, weight_decay: float) -> None:
    target = torch.diag(torch.tensor([2.0, 0.7, 0.2], dtype=torch.float64)) @ torch.linalg.qr(matrix(3, 3))[0]
    predicted = shrunk_map(target, depth, weight_decay)
    cost = depth * float((torch.linalg.svdvals(predicted) ** (2 / depth)).sum())
    least = 0.5 * float((predicted - target).square().sum()) + weight_decay / 2 * cost

    def objective(theta: np.ndarray) -> tuple[float, np.ndarray]:
        t = torch.tensor(theta, requires_grad=True)
        layers = t.reshape(depth, 3, 3)
        product = layers[0]
        for layer in layers[1:]:
            product = layer @ product
        value = 0.5 * (product - target).square().sum() + weight_decay / 2 * t.square().sum()
        value.backward()
        return float(value.detach()), t.grad.numpy()

    rng = np.random.default_rng(0)
    options = {"maxiter": 5000, "ftol": 1e-15, "gtol": 1e-12}
    starts = [rng.standard_normal(9 * depth) for _ in range(12)]
    starts.append(torch.stack(balanced_layers(target, depth, 3)).flatten().numpy())
    result = [minimize(objective, start, jac=True, method="L-BFGS-B", options=options) for start in starts]
    best = min(result, key=lambda one: one.fun)
    assert best.fun == pytest.approx(least, rel=1e-7)
    layers = [torch.tensor(w) for w in best.x.reshape(depth, 3, 3)]
    assert max(balance(layers), default=0.0) < 1e-3
    assert linear_alignment(layers).agop_cosine > 0.9999


def test_no_decay_changes_nothing_and_much_leaves_nothing() -> None:
    target = matrix(3, 4)
    for depth in (1, 2, 3):
        torch.testing.assert_close(shrunk_map(target, depth, 0.0), target)
    assert not shrunk_map(target, 3, 100.0).any()


def test_bad_arguments() -> None:
    with pytest.raises(InputError, match="weights must match"):
        balance([matrix(3, 4), matrix(3, 4)])
    with pytest.raises(InputError, match="at least one"):
        linear_alignment([])
    with pytest.raises(InputError, match="depth must be an integer of at least 1"):
        balanced_layers(matrix(2, 2), 0)
    with pytest.raises(InputError, match="width must be at least the rank of product, 3"):
        balanced_layers(matrix(3, 3), 2, width=2)
