import functools
import math

import pytest
import torch
from torch import nn

from featlearn.datasets import chain_monomial_task
from featlearn.errors import InputError
from featlearn.linalg import activation_module
from featlearn.models import mlp


def linears(net):
    return {name: m for name, m in net.named_modules() if isinstance(m, nn.Linear)}


def test_layout():
    net = mlp([32, 128, 64, 1])
    assert {name: tuple(m.weight.shape) for name, m in linears(net).items()} == {
        "0": (128, 32),
        "2": (64, 128),
        "4": (1, 64),
    }
    assert all(m.bias is None for m in linears(net).values())
    assert len(net) == 5
    assert net(torch.ones(3, 32)).shape == (3, 1)
    assert len(mlp([4, 2])) == 1
    assert list(linears(mlp([4, 3, 2], activation="identity"))) == ["0", "2"]


@pytest.mark.parametrize("init", ["uniform", "normal"])
def test_initial_distribution(init):
    net = mlp([300, 400, 500], init=init, bias=True, generator=3, dtype=torch.float64)
    for k, layer in ((300, net[0]), (400, net[2])):
        w = layer.weight.detach() * math.sqrt(k)
        assert float(w.mean()) == pytest.approx(0, abs=0.01)
        kurtosis = float((w**4).mean() / (w**2).mean() ** 2)
        if init == "uniform":
            assert 0.99 < float(w.abs().max()) <= 1
            assert float(w.std()) == pytest.approx(1 / math.sqrt(3), rel=0.01)
            assert kurtosis == pytest.approx(1.8, rel=0.02)
            assert float(layer.bias.detach().std()) * math.sqrt(k) == pytest.approx(1 / math.sqrt(3), rel=0.1)
        else:
            assert float(w.std()) == pytest.approx(1, rel=0.01)
            assert kurtosis == pytest.approx(3, rel=0.05)
            assert float(layer.bias.detach().abs().max()) == 0


def test_uniform_has_the_statistics_of_torch_itself():
    theirs = nn.Linear(200, 3000).weight
    ours = mlp([200, 3000])[0].weight
    quantiles = torch.linspace(0, 1, 21)
    select_matching = [torch.quantile(w.detach().flatten()[:500_000], quantiles) for w in (ours, theirs)]
    torch.testing.assert_close(*select_matching, atol=5e-4, rtol=0)


def test_scales_and_their_two_readings():
    plain = mlp([6, 5, 4], generator=1, bias=True)
    for scales in ([0.01, 1.0], {"0": 0.01}, {"0": 0.01, "*": 1.0}):
        std = mlp([6, 5, 4], generator=1, bias=True, scales=scales)
        torch.testing.assert_close(std[0].weight, 0.01 * plain[0].weight)
        assert torch.equal(std[2].weight, plain[2].weight)
        assert torch.equal(std[0].bias, plain[0].bias)
    variance = mlp([6, 5, 4], generator=1, scales=[0.01, 4.0], scale_of="variance")
    bare = mlp([6, 5, 4], generator=1)
    torch.testing.assert_close(variance[0].weight, 0.1 * bare[0].weight)
    torch.testing.assert_close(variance[2].weight, 2 * bare[2].weight)


def test_seeds_leave_the_global_generator_alone():
    state = torch.get_rng_state()
    a, b, c = (mlp([5, 4, 3], generator=g) for g in (2, 2, 3))
    assert torch.equal(a[0].weight, b[0].weight)
    assert not torch.equal(a[0].weight, c[0].weight)
    assert torch.equal(mlp([5, 4, 3], generator=2, dtype=torch.float64)[2].weight.float(), a[2].weight)
    assert torch.equal(torch.get_rng_state(), state)


def test_one_seed_for_net_and_data_gives_independent_numbers():
    # Drawn from one stream, the first rows of W would be the first points up to a factor.
    W = mlp([8, 100], init="normal", generator=0, dtype=torch.float64)[0].weight.detach()
    X = chain_monomial_task(100, 8, generator=0, dtype=torch.float64).X
    correlation = float((W * X).sum() / (W.norm() * X.norm()))
    assert abs(correlation) < 0.15


def f_values(name):
    h = torch.linspace(-2, 2, 9, dtype=torch.float64)
    return activation_module(name)(h), h


def test_activations_by_name():
    expected = {
        "relu": lambda h: max(h, 0),
        "tanh": math.tanh,
        "gelu": lambda h: h * (1 + math.erf(h / math.sqrt(2))) / 2,
        "silu": lambda h: h / (1 + math.exp(-h)),
        "softplus": lambda h: math.log1p(math.exp(h)),
        "erf": math.erf,
        "sigmoid": lambda h: 1 / (1 + math.exp(-h)),
        "quadratic": lambda h: h * h,
        "identity": lambda h: h,
    }
    for name, function in expected.items():
        out, h = f_values(name)
        exact = torch.tensor([function(x) for x in h.tolist()], dtype=torch.float64)
        torch.testing.assert_close(out, exact, atol=1e-12, rtol=1e-12)


def test_activations_of_other_kinds():
    for given in (
        nn.LeakyReLU(0.3),
        functools.partial(nn.LeakyReLU, 0.3),
        lambda: nn.LeakyReLU(0.3),
        lambda h: torch.where(h > 0, h, 0.3 * h),
    ):
        out, h = f_values(given)
        torch.testing.assert_close(out, torch.where(h > 0, h, 0.3 * h))
    assert isinstance(activation_module(nn.Tanh), nn.Tanh)
    torch.testing.assert_close(f_values(torch.sin)[0], f_values(torch.sin)[1].sin())
    prelu = nn.PReLU()
    net = mlp([2, 2, 2, 2], activation=prelu)
    assert len({id(net[1]), id(net[3]), id(prelu)}) == 3  # copies, not one shared module
    assert "erf" in repr(activation_module("erf"))


@pytest.mark.parametrize(
    "call",
    [
        lambda: mlp([4]),
        lambda: mlp([4, 0]),
        lambda: mlp([4, 2.0]),
        lambda: mlp([4, 2], init="xavier"),
        lambda: mlp([4, 2, 2], activation="rellu"),
        lambda: mlp([4, 2, 2], activation=3),
        lambda: mlp([4, 2, 1], scales=[1.0]),
        lambda: mlp([4, 2, 1], scales={"1": 1.0}),
        lambda: mlp([4, 2, 1], scales=[1.0, -1.0]),
        lambda: mlp([4, 2, 1], scales=[1.0, 1.0], scale_of="sd"),
    ],
)
def test_bad_arguments(call):
    with pytest.raises(InputError):
        call()
