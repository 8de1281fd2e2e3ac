import math

import pytest
import torch
from torch import nn

import featlearn as fl
from featlearn.errors import InputError
from featlearn.models import Scale, small_cnn, vgg11


def images(n, *shape, seed=0):
    return torch.randn(n, *shape, generator=torch.Generator().manual_seed(seed))


def weights(net):
    return [p for p in net.parameters() if p.ndim > 1]


def test_small_cnn_is_in_the_ntk_parameterization():
    net = small_cnn((16, 32), 2, image_shape=(3, 9, 12), generator=0, dtype=torch.float64)
    assert [tuple(w.shape) for w in net.parameters()] == [(16, 3, 3, 3), (32, 16, 3, 3), (2, 32 * 2 * 3)]
    for w in weights(net)[:2]:
        assert float(w.detach().std()) == pytest.approx(1, rel=0.1)
    factors = [m.factor for m in net if isinstance(m, Scale)]
    assert factors == pytest.approx([1 / math.sqrt(k) for k in (27, 144, 192)])
    # Written out for one image.
    x = images(1, 3, 9, 12).double()
    h = x
    relu = small_cnn((1,)).get_submodule("2")
    for w in weights(net)[:2]:
        h = nn.functional.conv2d(h, w, padding=1) / math.sqrt(w[0].numel())
        h = nn.functional.max_pool2d((h.relu() - relu.mean) / relu.std, 2)
    torch.testing.assert_close(net(x), h.flatten(1) @ net[-1].weight.mT / math.sqrt(192))


def test_outputs_of_the_small_cnn_are_of_order_one_at_any_width():
    for channels in ((8, 8), (64, 64)):
        spread = torch.stack([small_cnn(channels, generator=seed)(images(4, 3, 32, 32)) for seed in range(10)])
        assert 0.3 < float(spread.detach().std()) < 3


@pytest.mark.parametrize("init", ["uniform", "he"])
@pytest.mark.parametrize("bias", [False, True])
def test_vgg11_is_the_known_stack(init, bias):
    net = vgg11(7, width=0.25, hidden=(20, 30), bias=bias, init=init, generator=0)
    convs = [m for m in net if isinstance(m, nn.Conv2d)]
    assert [m.out_channels for m in convs] == [16, 32, 64, 64, 128, 128, 128, 128]
    assert [m.out_features for m in net if isinstance(m, nn.Linear)] == [20, 30, 7]
    assert sum(isinstance(m, nn.MaxPool2d) for m in net) == 5
    assert sum(isinstance(m, nn.ReLU) for m in net) == 10
    assert not any(isinstance(m, (nn.BatchNorm2d, nn.Dropout)) for m in net.modules())
    assert net(images(2, 3, 32, 32)).shape == (2, 7)
    for m in convs[1:]:
        fan_in, fan_out = 9 * m.in_channels, 9 * m.out_channels
        std = math.sqrt(1 / (3 * fan_in) if init == "uniform" else 2 / fan_out)
        assert float(m.weight.detach().std()) == pytest.approx(std, rel=0.05)
        assert (m.bias is not None) == bias
        if bias:
            assert bool(m.bias.any()) == (init == "uniform")
        if init == "uniform":
            assert float(m.weight.detach().abs().max()) <= 1 / math.sqrt(fan_in)


def test_vgg11_at_full_width_has_the_published_number_of_parameters():
    # Torchvision's VGG-11 has 9,220,480 parameters in its features, biases included.
    net = vgg11(10, bias=True)
    assert sum(p.numel() for m in net if isinstance(m, nn.Conv2d) for p in m.parameters()) == 9_220_480


@pytest.mark.parametrize("make", [small_cnn, vgg11])
def test_seeds_and_types(make):
    state = torch.get_rng_state()
    sizes = {} if make is small_cnn else {"width": 0.1}
    a, b, double = (make(generator=1, dtype=t, **sizes) for t in (None, None, torch.float64))
    for p, q, r in zip(a.parameters(), b.parameters(), double.parameters(), strict=True):
        assert torch.equal(p, q)
        assert torch.equal(r.float(), p)
    assert not torch.equal(weights(make(generator=2, **sizes))[0], weights(a)[0])
    assert torch.equal(torch.get_rng_state(), state)


@pytest.mark.parametrize("net", [small_cnn((4, 6), 2), vgg11(3, width=0.05, hidden=(5,))], ids=["small_cnn", "vgg11"])
def test_probe_takes_every_weight(net):
    report = fl.probe(net, images(6, 3, 32, 32))
    assert report.coverage["taken"].all()
    assert len(report.coverage) == len(weights(net)) == len(report.table())


@pytest.mark.parametrize(
    "call",
    [
        lambda: small_cnn(()),
        lambda: small_cnn((4,) * 6),
        lambda: small_cnn((4, 0)),
        lambda: small_cnn(image_shape=(3, 32, 7)),
        lambda: vgg11(0),
        lambda: vgg11(width=0.0),
        lambda: vgg11(hidden=(0,)),
        lambda: vgg11(init="normal"),
    ],
)
def test_bad_arguments(call):
    with pytest.raises(InputError):
        call()
