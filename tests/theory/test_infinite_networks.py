"""Kernels of infinitely wide networks, and training with a fixed kernel."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from scipy.integrate import dblquad
from torch import nn

import featlearn as fl
from featlearn.linalg.activations import activation_module, normalized_activation
from featlearn.theory import infinite_kernels, kernel_dynamics

GENERATOR = torch.Generator().manual_seed(0)
X = torch.randn(9, 6, generator=GENERATOR, dtype=torch.float64)
Z = torch.randn(4, 6, generator=GENERATOR, dtype=torch.float64)


# -- kernels -----------------------------------------------------------------------------------------------------------


def by_hand(phi, slope, x, z, hidden, w, b):
    """The recursion for two points, with each expectation by adaptive quadrature."""
    d = len(x)
    q = {(i, j): w * float(p @ r) / d + b for i, p in enumerate((x, z)) for j, r in enumerate((x, z))}
    theta = q[0, 1]
    for _ in range(hidden):
        new = {}
        moved = 0.0
        for pair, covariance in q.items():
            i, j = pair
            s, t = math.sqrt(q[i, i]), math.sqrt(q[j, j])
            r = max(-1.0, min(1.0, covariance / (s * t)))

            def mean(f, s=s, t=t, r=r):
                def inner(v, u):
                    return f(s * u) * f(t * (r * u + math.sqrt(1 - r * r) * v)) * math.exp(-(u * u + v * v) / 2)

                return dblquad(inner, -8, 8, -8, 8, epsabs=1e-7)[0] / (2 * math.pi)

            new[pair] = w * mean(phi) + b
            if pair == (0, 1):
                moved = mean(slope)
        q = new
        theta = q[0, 1] + w * theta * moved
    return q[0, 1], theta


@pytest.mark.parametrize("name", ["erf", "gelu"])
def test_both_kernels_are_those_of_the_recursion_by_quadrature(name: str) -> None:
    module = activation_module(name)

    def phi(u: float) -> float:
        return float(module(torch.tensor(u, dtype=torch.float64)))

    def slope(u: float) -> float:
        u_ = torch.tensor(u, dtype=torch.float64, requires_grad=True)
        return float(torch.autograd.grad(module(u_), u_)[0])

    nngp, theta = by_hand(phi, slope, X[0], Z[1], 1, 1.7, 0.3)
    kernels = infinite_kernels(X, Z, 1, name, weight_variance=1.7, bias_variance=0.3)
    assert float(kernels.nngp[0, 1]) == pytest.approx(nngp, rel=1e-6)
    assert float(kernels.ntk[0, 1]) == pytest.approx(theta, rel=1e-6)


def test_relu_and_linear_networks_in_closed_form() -> None:
    linear = infinite_kernels(X, hidden=3, activation="identity")
    gram = X @ X.T / 6
    torch.testing.assert_close(linear.nngp, gram)
    torch.testing.assert_close(linear.ntk, 4 * gram)
    relu = infinite_kernels(X, hidden=1, weight_variance=2.0)
    size = gram.diagonal()
    torch.testing.assert_close(relu.nngp.diagonal(), 2 * size)  # 2 E[relu^2] = q_1 = 2 x.x / d
    torch.testing.assert_close(relu.ntk.diagonal(), 4 * size)


def test_cross_kernels_are_blocks_of_the_kernel_of_all_points() -> None:
    for activation, normalized in (("relu", False), ("tanh", True)):
        both = infinite_kernels(torch.cat([X, Z]), hidden=2, activation=activation, normalized=normalized)
        cross = infinite_kernels(X, Z, 2, activation, normalized=normalized)
        torch.testing.assert_close(cross.ntk, both.ntk[:9, 9:])
        torch.testing.assert_close(cross.nngp, both.nngp[:9, 9:])


@pytest.mark.parametrize(("activation", "normalized"), [("relu", False), ("tanh", True), ("softplus", True)])
def test_wide_networks_approach_the_limit(activation: str, normalized: bool) -> None:
    """The squared distance is the variance over networks, which falls as 1 / width."""
    limit = infinite_kernels(X, hidden=2, activation=activation, normalized=normalized)
    squares = []
    for width in (128, 1024):
        errors = []
        for seed in range(24):
            net = fl.models.ntk_mlp(
                [6, width, width, 1], activation=activation, normalized=normalized, generator=seed, dtype=torch.float64
            )
            kernel = fl.ntk(net, X)
            assert isinstance(kernel, torch.Tensor)
            errors.append(float((kernel - limit.ntk).norm() / limit.ntk.norm()) ** 2)
        squares.append(np.mean(errors))
    assert 4 < squares[0] / squares[1] < 16  # 8, and the error of a variance from 24 draws


@pytest.mark.slow
@pytest.mark.parametrize("width", [4096, 16384])
def test_very_wide_networks_are_as_far_from_the_limit_as_predicted(width: int) -> None:
    """One hidden layer: the variance of an entry of the kernel is that of one unit over the width."""
    limit = infinite_kernels(X, hidden=1, activation="tanh")
    net = fl.models.ntk_mlp([6, width, 1], normalized=False, generator=0, dtype=torch.float64)
    kernel = fl.ntk(net, X)
    assert isinstance(kernel, torch.Tensor)
    units = torch.randn(200_000, 6, generator=GENERATOR, dtype=torch.float64) @ X.T / math.sqrt(6)
    readout = torch.randn(200_000, 1, generator=GENERATOR, dtype=torch.float64)
    slopes = readout * (1 - units.tanh().square())
    variance = 0.0
    for i in range(len(X)):
        terms = units.tanh() * units[:, i : i + 1].tanh() + slopes * slopes[:, i : i + 1] * (X @ X[i] / 6)
        variance += float(terms.var(0).sum())
    expected = math.sqrt(variance / width)
    assert 0.4 < float((kernel - limit.ntk).norm()) / expected < 2.5


def test_normalized_activations_are_those_of_the_models() -> None:
    module = normalized_activation("softplus")
    u = 0.8 * torch.randn(2_000_000, generator=GENERATOR, dtype=torch.float64)
    with torch.no_grad():
        mean = float((module(u) ** 2).mean())
    x = torch.tensor([[0.8]], dtype=torch.float64)
    kernel = infinite_kernels(x, hidden=1, activation="softplus", normalized=True)
    assert float(kernel.nngp) == pytest.approx(mean, rel=5e-3)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"X": [1.0]}, "shape"),
        ({"Z": torch.ones(2, 5)}, "columns"),
        ({"hidden": -1}, "hidden"),
        ({"weight_variance": 0.0}, "weight_variance"),
        ({"X": [[math.nan]]}, "finite"),
        ({"activation": "sine"}, "activation"),
    ],
)
def test_bad_arguments_of_kernels(options: dict, message: str) -> None:
    with pytest.raises(fl.InputError, match=message):
        infinite_kernels(**({"X": X} | options))


# -- dynamics ----------------------------------------------------------------------------------------------------------


def test_gradient_descent_of_a_linear_model() -> None:
    """A linear model has a fixed kernel, so each step is as predicted."""
    model = nn.Linear(6, 2, dtype=torch.float64)
    y = torch.randn(9, 2, generator=GENERATOR, dtype=torch.float64)
    kernel, cross = fl.ntk(model, X, outputs=0), fl.ntk(model, Z, X, outputs=0)
    with torch.no_grad():
        start, cross_start = model(X), model(Z)
    rate, steps = 0.2, [0, 1, 7, 50]
    found = kernel_dynamics(
        kernel, y, steps, cross_kernel=cross, start=start, cross_start=cross_start, learning_rate=rate
    )
    full = kernel_dynamics(
        fl.ntk(model, X, outputs="full"), y, steps, cross_kernel=fl.ntk(model, Z, X, outputs="full"),
        start=start, cross_start=cross_start, learning_rate=rate,
    )  # fmt: skip
    optimizer = torch.optim.SGD(model.parameters(), lr=rate)
    for step in range(51):
        if step in steps:
            i = steps.index(step)
            with torch.no_grad():
                train, test = model(X), model(Z)
            assert found.test is not None
            assert full.test is not None
            for dynamics in (found, full):
                torch.testing.assert_close(dynamics.train[i], train)
                torch.testing.assert_close(dynamics.test[i], test)
            assert float(found.loss[i]) == pytest.approx(float((train - y).square().sum() / 18))
        optimizer.zero_grad()
        ((model(X) - y).square().sum() / 18).backward()
        optimizer.step()


def test_gradient_flow_is_the_limit_of_small_steps_and_ends_at_the_labels() -> None:
    kernel = infinite_kernels(X, hidden=2).ntk
    y = X[:, 0] * X[:, 1]
    flow = kernel_dynamics(kernel, y, [0.0, 3.0, math.inf], cross_kernel=kernel[:2])
    small = kernel_dynamics(kernel, y, [300_000], cross_kernel=kernel[:2], learning_rate=1e-5)
    assert flow.test is not None
    assert small.test is not None
    torch.testing.assert_close(flow.train[1], small.train[0], rtol=1e-4, atol=1e-6)
    torch.testing.assert_close(flow.test[1], small.test[0], rtol=1e-4, atol=1e-6)
    torch.testing.assert_close(flow.train[2], y)
    torch.testing.assert_close(flow.test, flow.train[:, :2])  # the same samples
    assert flow.train[0].abs().max() < 1e-12


def test_a_kernel_with_a_null_space() -> None:
    """What the kernel does not reach stays as it was, at any time."""
    kernel = torch.diag(torch.tensor([1.0, 0.0], dtype=torch.float64))
    cross = torch.tensor([[0.5, 0.0]], dtype=torch.float64)
    found = kernel_dynamics(kernel, [1.0, 1.0], [2.0, math.inf], cross_kernel=cross)
    assert found.train[:, 1].tolist() == [0.0, 0.0]
    assert found.test is not None
    assert found.test[1, 0] == pytest.approx(0.5)
    assert found.test[0, 0] == pytest.approx(0.5 * (1 - math.exp(-1.0)))


def test_a_wide_network_trains_as_predicted() -> None:
    """The distance between the network and the prediction falls with its width."""
    y = X[:, 0].tanh()
    gaps = []
    for width in (64, 4096):
        net = fl.models.ntk_mlp([6, width, 1], generator=0, dtype=torch.float64)
        with torch.no_grad():
            start, cross_start = net(X), net(Z)
        kernel, cross = fl.ntk(net, X), fl.ntk(net, Z, X)
        predicted = kernel_dynamics(
            kernel, y, 100, cross_kernel=cross, start=start, cross_start=cross_start, learning_rate=0.5
        )
        optimizer = torch.optim.SGD(net.parameters(), lr=0.5)
        for _ in range(100):
            optimizer.zero_grad()
            ((net(X)[:, 0] - y).square().sum() / 18).backward()
            optimizer.step()
        with torch.no_grad():
            assert predicted.test is not None
            gaps.append(float((net(Z)[:, 0] - predicted.test[0]).norm() / predicted.test[0].norm()))
    assert gaps[1] < 0.25 * gaps[0]
    assert gaps[1] < 0.02


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"kernel": torch.ones(3, 2)}, "kernel must have shape"),
        ({"times": -1.0}, "times"),
        ({"learning_rate": 100.0}, "diverges: learning_rate must be at most"),
        ({"learning_rate": 0.0}, "learning_rate"),
        ({"start": torch.ones(3)}, "start must have shape"),
        ({"cross_kernel": torch.ones(2, 3)}, "cross_kernel"),
        ({"kernel": -torch.eye(9)}, "negative"),
    ],
)
def test_bad_arguments_of_dynamics(options: dict, message: str) -> None:
    with pytest.raises(fl.InputError, match=message):
        kernel_dynamics(**({"kernel": X @ X.T, "y": X[:, 0], "times": 1.0} | options))
