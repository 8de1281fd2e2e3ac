import math

import pytest
import torch
from torch import nn

import featlearn as fl
from featlearn.datasets import teacher_task
from featlearn.errors import InputError
from featlearn.linalg import activation_module, gaussian_mean, normalized_activation
from featlearn.models import mlp, ntk_mlp

NAMES = ("tanh", "softplus", "relu", "sigmoid", "erf", "gelu", "silu")


def points(n, d, seed=0):
    return torch.randn(n, d, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


@pytest.mark.parametrize(
    ("name", "mean", "std"),
    [
        ("tanh", 0, 0.627928730349),
        ("softplus", 0.806059183347, 0.521070534381),
        ("relu", 0.398942280401, 0.583819370104),
    ],
)
def test_constants_of_normalized_activations(name, mean, std):
    module = normalized_activation(name)
    assert module.mean == pytest.approx(mean, abs=1e-11)
    assert module.std == pytest.approx(std, abs=1e-11)
    z = torch.linspace(-3, 3, 13, dtype=torch.float64)
    torch.testing.assert_close(module(z), (activation_module(name)(z) - mean) / std, atol=1e-11, rtol=0)


@pytest.mark.parametrize("activation", [*NAMES, torch.sin, nn.LeakyReLU(0.3), lambda: nn.PReLU()])
def test_normalized_activations_have_mean_0_and_variance_1(activation):
    module = normalized_activation(activation).double()
    with torch.no_grad():
        assert gaussian_mean(module) == pytest.approx(0, abs=1e-10)
        assert gaussian_mean(lambda z: module(z).square()) == pytest.approx(1, abs=1e-10)


def test_kinks_between_the_panels_are_told():
    def kinked(z):
        return torch.relu(z - 0.3)

    # E relu(z - a) = phi(a) - a (1 - Phi(a))
    density, beyond = math.exp(-0.045) / math.sqrt(2 * math.pi), 0.5 * math.erfc(0.3 / math.sqrt(2))
    assert normalized_activation(kinked, kinks=[0.3]).mean == pytest.approx(density - 0.3 * beyond, abs=1e-12)
    assert normalized_activation(kinked).mean != pytest.approx(density - 0.3 * beyond, abs=1e-12)


def test_the_output_is_the_papers_formula():
    net = ntk_mlp([6, 20, 30, 1], activation="softplus", generator=1, dtype=torch.float64)
    X, sigma = points(9, 6), normalized_activation("softplus")
    h = X / math.sqrt(6)
    for layer, width in ((net[1], 20), (net[4], 30)):
        h = sigma(h @ layer.weight.mT) / math.sqrt(width)
    torch.testing.assert_close(net(X), h @ net[7].weight.mT)
    assert [name for name, m in net.named_modules() if isinstance(m, nn.Linear)] == ["1", "4", "7"]
    assert [tuple(p.shape) for p in net.parameters()] == [(20, 6), (30, 20), (1, 30)]
    plain = ntk_mlp([6, 20, 1], activation="softplus", normalized=False, generator=1, dtype=torch.float64)
    expected = nn.functional.softplus(X @ plain[1].weight.mT / math.sqrt(6)) @ plain[4].weight.mT / math.sqrt(20)
    torch.testing.assert_close(plain(X), expected)


def derivative(name, z):
    if name == "tanh":
        return (1 - z.tanh().square()) / 0.627928730349
    return z.sigmoid() / 0.521070534381


@pytest.mark.parametrize("name", ["tanh", "softplus"])
def test_kernels_are_equations_4_and_5(name):
    n, h, d = 14, 25, 10
    X = points(n, d)
    net = ntk_mlp([d, h, 1], activation=name, generator=2, dtype=torch.float64)
    W, v = net[1].weight.detach(), net[4].weight.detach()[0]
    H = X @ W.mT / math.sqrt(d)
    with torch.no_grad():
        features = normalized_activation(name)(H)
    conjugate = features @ features.mT / h
    slopes = derivative(name, H) * v
    explicit = (X @ X.mT / d) * (slopes @ slopes.mT / h) + conjugate
    torch.testing.assert_close(fl.ck(net, X), conjugate, atol=1e-10, rtol=0)
    torch.testing.assert_close(fl.ntk(net, X), explicit, atol=1e-10, rtol=0)
    shares = fl.ntk(net, X, by_layer=True)
    torch.testing.assert_close(shares["4"], conjugate, atol=1e-10, rtol=0)


def test_the_tangent_kernel_of_three_layers_against_autograd():
    X = points(8, 5)
    net = ntk_mlp([5, 12, 7, 1], activation="gelu", generator=3, dtype=torch.float64)
    rows = []
    for x in X:
        gradient = torch.autograd.grad(net(x[None])[0, 0], list(net.parameters()))
        rows.append(torch.cat([g.flatten() for g in gradient]))
    rows = torch.stack(rows)
    torch.testing.assert_close(fl.ntk(net, X), rows @ rows.mT, atol=1e-10, rtol=0)


@pytest.mark.parametrize("widths", [[40, 300, 1], [40, 300, 300, 1]])
def test_the_output_has_variance_one_over_networks(widths):
    # On inputs of length sqrt d, E f^2 is 1 by normalization at every width of the first layer.
    x = points(1, widths[0])
    x = x * math.sqrt(widths[0]) / x.norm()
    outputs = torch.stack([ntk_mlp(widths, generator=s, dtype=torch.float64)(x).detach()[0, 0] for s in range(400)])
    assert float(outputs.square().mean()) == pytest.approx(1, abs=4 * math.sqrt(2 / 400))
    assert float(outputs.mean()) == pytest.approx(0, abs=4 / math.sqrt(400))


@pytest.mark.parametrize("init", ["normal", "uniform", "rademacher"])
def test_weights_have_variance_1(init):
    w = ntk_mlp([300, 400], init=init, generator=0, dtype=torch.float64)[1].weight.detach()
    assert float(w.square().mean()) == pytest.approx(1, rel=0.02)
    assert float(w.mean()) == pytest.approx(0, abs=0.02)
    kurtosis = {"normal": 3.0, "uniform": 1.8, "rademacher": 1.0}[init]
    assert float((w**4).mean()) == pytest.approx(kurtosis, rel=0.04)


def test_cauchy_weights_in_one_layer():
    net = ntk_mlp([300, 400, 1], init=["cauchy", "normal"], generator=0, dtype=torch.float64)
    w = net[1].weight.detach().flatten()
    for share, quantile in ((0.25, -1.0), (0.5, 0.0), (0.75, 1.0), (0.95, math.tan(0.45 * math.pi))):
        assert float((w < quantile).double().mean()) == pytest.approx(share, abs=0.006)
    assert float(w.abs().max()) > 1e3
    assert float(net[4].weight.detach().abs().max()) < 5
    given = ntk_mlp([3, 4, 1], init=lambda shape, generator: torch.full(shape, 2.0))
    assert all(bool((p == 2).all()) for p in given.parameters())


def test_seeds():
    state = torch.get_rng_state()
    a, b, c = (ntk_mlp([5, 4, 1], generator=g) for g in (2, 2, 3))
    assert torch.equal(a[1].weight, b[1].weight)
    assert not torch.equal(a[1].weight, c[1].weight)
    double = ntk_mlp([5, 4, 1], generator=2, dtype=torch.float64)
    assert torch.equal(double[1].weight.float(), a[1].weight)
    assert torch.equal(torch.get_rng_state(), state)
    # One integer for network, teacher and a plain network gives independent numbers.
    w = ntk_mlp([8, 100], generator=0, dtype=torch.float64)[1].weight.detach()
    for other in (
        teacher_task(100, 8, generator=0, dtype=torch.float64).X,
        mlp([8, 100], init="normal", generator=0, dtype=torch.float64)[0].weight.detach(),
    ):
        assert abs(fl.cosine(w, other)) < 0.15


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda: ntk_mlp([4]), "widths"),
        (lambda: ntk_mlp([4, 3, 1], init="gauss"), "gauss"),
        (lambda: ntk_mlp([4, 3, 1], init=["normal"]), "2 distributions, one per layer, got"),
        (lambda: ntk_mlp([4, 3, 1], init=[1.0, 2.0]), "float"),
        (lambda: ntk_mlp([4, 3, 1], init=lambda shape, generator: torch.zeros(3)), "shape"),
        (lambda: normalized_activation(torch.ones_like), "constant"),
        (lambda: normalized_activation("tan"), "tan"),
    ],
)
def test_bad_arguments(call, words):
    with pytest.raises(InputError, match=words):
        call()
