import copy

import pytest
import torch
from torch import nn

from featlearn.errors import InputError, UnsupportedModelError
from featlearn.models import mlp, scale_weights, subtract_initial
from featlearn.training import fit


class Tied(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(7, 4)
        self.body = nn.Sequential(nn.Linear(4, 4), nn.LayerNorm(4))
        self.head = nn.Linear(4, 7, bias=False)
        self.head.weight = self.embed.weight


def test_scale_weights_takes_matrices_only_and_first_glob_wins():
    model = nn.ModuleDict({"a": nn.Sequential(nn.Linear(3, 3), nn.LayerNorm(3)), "b": nn.Conv2d(2, 2, 3)})
    before = {k: v.clone() for k, v in model.state_dict().items()}
    scale_weights(model, {"a.*": 0.25, "*": 9.0}, scale_of="variance")
    after = model.state_dict()
    torch.testing.assert_close(after["a.0.weight"], 0.5 * before["a.0.weight"])
    torch.testing.assert_close(after["b.weight"], 3 * before["b.weight"])
    for name in ("a.0.bias", "a.1.weight", "a.1.bias", "b.bias"):
        assert torch.equal(after[name], before[name])


def test_scale_weights_scales_a_tied_weight_once():
    model = Tied()
    before = model.embed.weight.detach().clone()
    scale_weights(model, {"*": 0.5})
    torch.testing.assert_close(model.head.weight.detach(), 0.5 * before)
    with pytest.raises(InputError, match="share one weight"):
        scale_weights(model, {"head": 0.1, "embed": 0.2})


def test_a_glob_without_match_is_an_error_and_changes_nothing():
    net = mlp([3, 3, 3])
    before = copy.deepcopy(net.state_dict())
    for glob in ("1", "layer*"):
        with pytest.raises(InputError, match="0, 2"):
            scale_weights(net, {"0": 0.1, glob: 0.1})
    assert all(torch.equal(net.state_dict()[k], v) for k, v in before.items())


def test_subtract_initial_starts_at_exactly_zero_with_the_gradient_of_the_plain_model():
    X = torch.randn(20, 6, generator=torch.Generator().manual_seed(0))
    plain, wrapped = mlp([6, 9, 9, 2], generator=4), subtract_initial(mlp([6, 9, 9, 2], generator=4))
    out = wrapped(X)
    assert torch.equal(out, torch.zeros(20, 2))
    weights = torch.randn(20, 2, generator=torch.Generator().manual_seed(1))
    (out * weights).sum().backward()
    (plain(X) * weights).sum().backward()
    for p, q in zip(wrapped.model.parameters(), plain.parameters(), strict=True):
        assert torch.equal(p.grad, q.grad)
        assert p.grad.norm() > 0
    assert all(p.grad is None for p in wrapped.initial.parameters())


def test_subtract_initial_trains_the_model_and_never_the_copy():
    generator = torch.Generator().manual_seed(0)
    X, y = torch.randn(30, 4, generator=generator), torch.randn(30, 1, generator=generator)
    model = mlp([4, 16, 1], generator=0)
    start = copy.deepcopy(model)
    wrapped = subtract_initial(model)
    fit(wrapped, (X, y), lr=0.05, steps=20, weight_decay=1e-2)
    assert wrapped.model is model
    assert all(torch.equal(p, q) for p, q in zip(wrapped.initial.parameters(), start.parameters(), strict=True))
    assert not torch.equal(model[0].weight, start[0].weight)
    torch.testing.assert_close(wrapped(X), model(X) - start(X))


def test_the_copy_stays_frozen_and_in_eval_mode():
    wrapped = subtract_initial(nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3)))
    for thawed in (wrapped.train(), wrapped.requires_grad_(), wrapped.eval().train(True)):
        assert thawed.model.training
        assert not any(m.training for m in thawed.initial.modules())
        assert not any(p.requires_grad for p in thawed.initial.parameters())
        assert all(p.requires_grad for p in thawed.model.parameters())
    assert not wrapped.eval().model.training
    assert wrapped.initial.featlearn_skip == "frozen copy of the initial network"
    assert not hasattr(wrapped.model, "featlearn_skip")
    assert copy.deepcopy(wrapped).initial.featlearn_skip


def test_state_dict_round_trip():
    X = torch.ones(2, 3)
    one = subtract_initial(mlp([3, 4, 1], generator=0))
    with torch.no_grad():
        one.model[0].weight.add_(1.0)
    other = subtract_initial(mlp([3, 4, 1], generator=1))
    assert not torch.equal(one(X), other(X))
    other.load_state_dict(one.state_dict())
    assert torch.equal(one(X), other(X))


def test_a_model_that_returns_no_tensor_is_refused():
    class Pair(nn.Module):
        def forward(self, x):
            return x, x

    with pytest.raises(UnsupportedModelError, match="one tensor"):
        subtract_initial(Pair())(torch.ones(2))
