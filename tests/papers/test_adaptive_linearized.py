"""Sample complexity of linearized networks: the factor of samples, the networks, and a run at the smallest size."""

from __future__ import annotations

import matplotlib.pyplot as plt
import pytest
import torch
from torch import nn

from featlearn.papers.adaptive import linearized
from featlearn.papers.adaptive.linearized import METHODS, PROTOCOLS, Config, samples_factor
from featlearn.papers.experiment import registered

SIZES = [100, 1000, 10000]


@pytest.mark.parametrize(
    ("slow", "fast", "factor"),
    [
        ([0.2, 0.4, 0.6], [0.2, 0.4, 0.6], 1.0),
        ([0.2, 0.4, 0.6], [0.4, 0.6, 0.7], 10.0),
        ([0.2, 0.4, 0.6], [0.1, 0.2, 0.3], 10**-0.5),  # cut at the smallest size, and 0.1
        ([0.2, 0.4, 0.6], [0.9, 0.9, 0.9], 10**1.5),  # cut at the largest size: 100 and 10
        ([0.2, 0.1, 0.6], [0.2, 0.2, 0.6], 10**-0.5),  # a dip after 100 does not make 0.2 need more than 100
    ],
)
def test_the_factor_of_samples(slow: list[float], fast: list[float], factor: float) -> None:
    assert samples_factor(SIZES, slow, fast) == pytest.approx(factor, rel=1e-3)


def test_a_factor_from_sizes_that_are_close_is_that_of_the_smallest() -> None:
    assert samples_factor([100, 200], [0.2, 0.4], [0.4, 0.9]) == pytest.approx(2.0, rel=1e-3)


@pytest.mark.parametrize(
    ("shape", "kinds"), [((1, 28, 28), [nn.Linear] * 5), ((3, 32, 32), [nn.Conv2d] * 4 + [nn.Linear] * 3)]
)
def test_networks_are_those_of_the_authors_code(shape: tuple[int, int, int], kinds: list[type]) -> None:
    net = linearized._network(shape, 1, 0)
    layers = [m for m in net.modules() if isinstance(m, nn.Linear | nn.Conv2d)]
    assert [type(m) for m in layers] == kinds
    assert net(torch.zeros(2, *shape)).shape == (2, 10)
    for layer in layers[1:]:
        k_in = layer.weight[0].numel()
        assert float(layer.weight.detach().var()) == pytest.approx(1 / k_in, rel=0.2)
        assert not layer.bias.any()
    assert torch.equal(layers[0].weight, linearized._network(shape, 1, 0).get_parameter(_first(net)))
    narrow = linearized._network((shape[0], shape[1] // 2, shape[2] // 2), 2, 0)
    assert narrow(torch.zeros(2, shape[0], shape[1] // 2, shape[2] // 2)).shape == (2, 10)


def _first(net: nn.Module) -> str:
    return next(name for name, _ in net.named_parameters())


def test_points_and_a_run_at_the_smallest_size() -> None:
    experiment = registered(linearized.__name__)
    config = experiment.config("smoke")
    points = experiment.points(config)
    assert len(points) == 2 * len(PROTOCOLS) * len(METHODS)
    assert len({experiment.key(point) for point in points}) == len(points)
    result = experiment.run(config)
    assert [claim.where for claim in result.claims] == (["abstract of the first version"] * 2 + ["introduction"]) * 2
    (table, factors) = result.tables.values()
    assert set(table["method"]) == set(METHODS)
    assert (table["test"][table["protocol"] == PROTOCOLS[0]] > 0.3).all()  # ten classes
    assert list(factors["protocol"]) == list(PROTOCOLS)
    (figure,) = result.figures.values()
    assert [line.get_label() for line in figure.axes[0].lines] == list(METHODS)
    assert not plt.get_fignums()


def test_a_measurement_repeats_and_follows_its_seed() -> None:
    point = {"data": "digits", "protocol": "one rate", "n": 60, "method": "adaptive", "steps": 5, "shrink": 1}
    first = linearized._measure(seed=0, **point)
    assert first == linearized._measure(seed=0, **point)
    assert first != linearized._measure(seed=1, **point)


def test_the_sizes_of_a_scale_are_those_of_its_data() -> None:
    config = Config((("mnist", (100,)), ("cifar10", (100, 200))), seeds=(0, 1))
    points = linearized._points(config)
    assert [(p["data"], p["protocol"], p["n"]) for p in points[:: 2 * len(METHODS)]] == [
        ("mnist", "validated rates", 100), ("mnist", "one rate", 100),
        ("cifar10", "validated rates", 100), ("cifar10", "validated rates", 200),
    ]  # fmt: skip
