import math

import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy

import featlearn as fl
from featlearn.datasets._text import CharacterTask
from featlearn.errors import InputError
from featlearn.models import gpt


def tokens(n, length, vocabulary, seed=0):
    return torch.randint(vocabulary, (n, length), generator=torch.Generator().manual_seed(seed))


def test_attention_written_out():
    attn = gpt(11, 6, heads=2, width=8, dtype=torch.float64).blocks[0].attn
    x = torch.randn(3, 6, 8, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    mixed = torch.zeros_like(x)
    for i in range(6):
        for head in (slice(0, 4), slice(4, 8)):
            q, k, v = (x @ layer.weight.mT for layer in (attn.q, attn.k, attn.v))
            scores = (q[:, i : i + 1, head] * k[:, : i + 1, head]).sum(-1) / math.sqrt(4)
            mixed[:, i, head] = (scores.softmax(-1)[..., None] * v[:, : i + 1, head]).sum(1)
    torch.testing.assert_close(attn(x), mixed @ attn.out.weight.mT)


def test_a_token_depends_on_none_after_it():
    net = gpt(11, 6, heads=2, width=8)
    a = tokens(4, 6, 11)
    b = a.clone()
    b[:, 4] = (b[:, 4] + 1) % 11
    difference = (net(a) - net(b)).abs().amax((0, 2))
    assert difference[:4].max() == 0
    assert difference[4:].min() > 0
    torch.testing.assert_close(net(a[:, :3]), net(a)[:, :3])


def test_the_papers_network():
    net = gpt(65)
    assert len(net.blocks) == 3
    # 3 blocks of 12 width^2, positions and tokens; gains of 7 normalizations.
    width = 384
    assert sum(p.numel() for p in net.parameters()) == 36 * width**2 + (256 + 65) * width + 7 * width
    assert not any(isinstance(m, nn.Dropout) for m in net.modules())
    assert not [name for name, _ in net.named_parameters() if "bias" in name]
    named = dict(net.named_modules())
    for i in range(3):
        for part in ("q", "k", "v"):
            layer = named[f"blocks.{i}.attn.{part}"]
            assert layer.weight.shape == (width, width)
            assert float(layer.weight.detach().std()) == pytest.approx(0.02, rel=0.02)
        for inner in (f"blocks.{i}.attn.out", f"blocks.{i}.mlp.2"):
            assert float(named[inner].weight.detach().std()) == pytest.approx(0.02 / math.sqrt(6), rel=0.02)
    assert net.head.weight is net.embedding.weight
    loss = cross_entropy(net(tokens(4, 64, 65)).flatten(0, 1), tokens(4, 64, 65, seed=1).flatten())
    assert float(loss.detach()) == pytest.approx(math.log(65), rel=0.03)


@pytest.mark.parametrize("tied", [True, False])
def test_probe_takes_every_weight_but_look_ups(tied):
    net = gpt(13, 6, blocks=2, heads=2, width=8, tied=tied)
    report = fl.probe(net, tokens(5, 6, 13))
    coverage = report.coverage.set_index("parameter")
    left_out = {"positions.weight"} if tied else {"positions.weight", "embedding.weight"}
    assert set(coverage.index[~coverage["taken"]]) == left_out
    assert set(coverage.index) == {name for name, p in net.named_parameters() if p.ndim > 1}
    names = list(report.table().index)
    assert all(f"blocks.{i}.attn.{part}" in names for i in range(2) for part in ("q", "k", "v"))


def test_it_learns_what_comes_next():
    text = CharacterTask(torch.arange(300) % 5, torch.arange(50) % 5, "abcde")
    net = gpt(5, 8, blocks=1, heads=2, width=16)
    optimizer = torch.optim.Adam(net.parameters(), lr=5e-3)
    generator = torch.Generator().manual_seed(0)
    for _ in range(60):
        inputs, targets = text.batch(16, 8, generator)
        optimizer.zero_grad()
        cross_entropy(net(inputs).flatten(0, 1), targets.flatten()).backward()
        optimizer.step()
    inputs, targets = text.blocks(8)
    assert torch.equal(net(inputs).argmax(-1), targets)


def test_seeds_and_types():
    state = torch.get_rng_state()
    a, double = (gpt(7, 4, heads=2, width=4, generator=1, dtype=t) for t in (None, torch.float64))
    for p, q in zip(a.parameters(), double.parameters(), strict=True):
        assert torch.equal(q.float(), p)
        assert q.dtype == torch.float64
    assert not torch.equal(gpt(7, 4, heads=2, width=4, generator=2).head.weight, a.head.weight)
    assert torch.equal(torch.get_rng_state(), state)


def test_bad_arguments():
    for call in (
        lambda: gpt(0),
        lambda: gpt(5, blocks=True),
        lambda: gpt(5, width=10, heads=4),
        lambda: gpt(5, 4, heads=1, width=4)(tokens(1, 5, 5)),
    ):
        with pytest.raises(InputError):
            call()
