"""Networks that are trained, against the predictions of a fixed kernel at several steps."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import featlearn as fl
from featlearn.theory import infinite_kernels, kernel_dynamics

GENERATOR = torch.Generator().manual_seed(0)
X = torch.randn(9, 6, generator=GENERATOR, dtype=torch.float64)
Z = torch.randn(4, 6, generator=GENERATOR, dtype=torch.float64)
Y = X[:, 0].tanh()
STEPS, RATE = (10, 50, 200), 0.5


def network(width: int, hidden: int, seed: int, outputs: int = 1) -> nn.Module:
    sizes = [6, *[width] * hidden, outputs]
    return fl.models.ntk_mlp(sizes, normalized=False, generator=seed, dtype=torch.float64)


def outputs_of(net: nn.Module) -> Tensor:
    """Outputs for the training samples, then the other ones."""
    with torch.no_grad():
        return net(torch.cat([X, Z]))


def trained(net: nn.Module, y: Tensor, steps: Sequence[int], rate: float) -> Tensor:
    """Outputs after numbers of steps of gradient descent on ``|f - y|^2 / (2 n)``, shape (steps, samples, outputs)."""
    parameters, found = list(net.parameters()), []
    for step in range(max(steps) + 1):
        if step in steps:
            found.append(outputs_of(net))
        loss = (net(X).reshape(y.shape) - y).square().sum() / (2 * len(X))
        with torch.no_grad():
            for p, g in zip(parameters, torch.autograd.grad(loss, parameters), strict=True):
                p -= rate * g
    return torch.stack(found)


def distances(width: int, hidden: int, seed: int, steps: Sequence[int] = STEPS) -> tuple[Tensor, Tensor]:
    """Distances to the predictions of the network's own kernel and of the infinite one, and outputs, by step."""
    net = network(width, hidden, seed)
    start = outputs_of(net)
    both = torch.cat([X, Z])
    own = fl.ntk(net, both, X)
    infinite = infinite_kernels(both, X, hidden, "tanh").ntk
    assert isinstance(own, Tensor)
    predictions = []
    for kernel in (own, infinite):
        predicted = kernel_dynamics(
            kernel[:9], Y, steps, cross_kernel=kernel[9:], start=start[:9], cross_start=start[9:], learning_rate=RATE
        )
        assert predicted.test is not None
        predictions.append(torch.cat([predicted.train, predicted.test], dim=1))
    outputs = trained(net, Y, steps, RATE)[..., 0]
    return torch.stack([(outputs - predicted).norm(dim=1) for predicted in predictions]), outputs.norm(dim=1)


def test_a_network_of_width_4096_is_trained_as_predicted() -> None:
    """At each step, for training samples and others: closely by its own kernel, roughly by the infinite one."""
    gaps, sizes = distances(4096, 1, seed=0)
    assert (gaps[0] < 5e-3 * sizes).all(), gaps
    assert (gaps[1] < 0.1 * sizes).all(), gaps
    untrained = outputs_of(network(4096, 1, 0))[:, 0]
    moved = (trained(network(4096, 1, 0), Y, STEPS, RATE)[..., 0] - untrained).norm(dim=1)
    assert (moved > 20 * gaps[0]).all()  # the prediction is not that nothing happens


def test_the_mean_over_networks_is_predicted_without_a_start() -> None:
    infinite = infinite_kernels(torch.cat([X, Z]), X, 1, "tanh").ntk
    predicted = kernel_dynamics(infinite[:9], Y, STEPS, cross_kernel=infinite[9:], learning_rate=RATE)
    assert predicted.test is not None
    runs = torch.stack([trained(network(1024, 1, seed), Y, STEPS, RATE)[..., 0] for seed in range(40)])
    error = runs.std(0) / math.sqrt(40)
    gap = runs.mean(0) - torch.cat([predicted.train, predicted.test], dim=1)
    assert (gap.abs() < 4.5 * error + 0.01).all()


def test_several_outputs_by_the_loss_of_torch() -> None:
    """``nn.MSELoss`` is 2 / c times the loss of the prediction."""
    y = torch.stack([Y, X[:, 1] * X[:, 2], X[:, 3].sin()], dim=1)
    net = network(4096, 1, 3, outputs=3)
    start = outputs_of(net)
    kernel = fl.ntk(net, torch.cat([X, Z]), X, outputs="full")
    assert isinstance(kernel, Tensor)
    predicted = kernel_dynamics(
        kernel[:9], y, 60, cross_kernel=kernel[9:], start=start[:9], cross_start=start[9:], learning_rate=0.6 * 2 / 3
    )
    optimizer = torch.optim.SGD(net.parameters(), lr=0.6)
    for _ in range(60):
        optimizer.zero_grad()
        nn.functional.mse_loss(net(X), y).backward()
        optimizer.step()
    outputs = outputs_of(net)
    assert predicted.test is not None
    gap = outputs - torch.cat([predicted.train[0], predicted.test[0]])
    assert float(gap.norm() / (outputs - start).norm()) < 0.02


@pytest.mark.slow
@pytest.mark.parametrize(("hidden", "widths"), [(1, (64, 256, 1024, 4096, 16384)), (2, (64, 256, 1024, 4096))])
def test_the_distance_falls_with_the_root_of_the_width(hidden: int, widths: tuple[int, ...]) -> None:
    """Lee et al. (2019), theorem 2.1: at most as 1 / sqrt(width), which a kernel of infinite width attains."""
    rows = []
    for width in widths:
        gaps = [distances(width, hidden, seed, (20, 60))[0].norm(dim=1) for seed in range(12 if width < 4096 else 3)]
        rows.append(torch.stack(gaps).square().mean(0).sqrt().numpy())
    of_own, of_infinite = (np.polyfit(np.log(widths), np.log(column), 1)[0] for column in np.array(rows).T)
    assert -0.65 < of_infinite < -0.35
    assert -1.4 < of_own < -0.5  # its own kernel has the fluctuations of order 1 / sqrt(width)


# -- kernels without full rank, and times ------------------------------------------------------------------------------


@pytest.mark.parametrize("learning_rate", [None, 0.5])
@pytest.mark.parametrize("time", [1e3, 1e12, math.inf])
@pytest.mark.parametrize("precision", [torch.float64, torch.float32])
def test_repeated_samples_end_at_the_least_squares_solution(
    learning_rate: float | None, time: float, precision: torch.dtype
) -> None:
    x = X.repeat(2, 1)[:, :4]
    y = torch.randn(18, generator=torch.Generator().manual_seed(5), dtype=torch.float64)
    kernel, cross = ((rows.to(precision) @ x.to(precision).T).double() for rows in (x, Z[:, :4]))
    found = kernel_dynamics(kernel, y, time, cross_kernel=cross, learning_rate=learning_rate)
    w = torch.from_numpy(np.linalg.lstsq(x.numpy(), y.numpy(), rcond=None)[0])
    tolerance = 1e-9 if precision == torch.float64 else 1e-4
    assert found.test is not None
    torch.testing.assert_close(found.train[0], x @ w, rtol=0, atol=tolerance)
    torch.testing.assert_close(found.test[0], Z[:, :4] @ w, rtol=0, atol=tolerance)


def test_steps_are_whole_numbers() -> None:
    kernel = X @ X.T
    with pytest.raises(fl.InputError, match=r"whole numbers of steps with a learning rate, got 1\.5"):
        kernel_dynamics(kernel, Y, 1.5, learning_rate=0.1)
    assert torch.isfinite(kernel_dynamics(kernel, Y, [0, 3, math.inf], learning_rate=0.1).train).all()
    assert torch.isfinite(kernel_dynamics(kernel, Y, 1.5).train).all()


@pytest.mark.parametrize("activation", ["relu", "softplus"])
def test_normalized_kernels_by_simulation(activation: str) -> None:
    """Two points of other sizes than those that the activation is normalized for."""
    points = torch.stack([0.6 * X[0], 1.5 * X[1]])
    limit = infinite_kernels(points, hidden=1, activation=activation, normalized=True)
    sizes = [6, 300_000, 1]
    net = fl.models.ntk_mlp(sizes, activation=activation, normalized=True, generator=0, dtype=torch.float64)
    kernel = fl.ntk(net, points)
    assert isinstance(kernel, Tensor)
    assert float((kernel - limit.ntk).norm() / limit.ntk.norm()) < 0.02
    assert float((fl.ck(net, points) - limit.nngp).norm() / limit.nngp.norm()) < 0.02
