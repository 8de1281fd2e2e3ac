"""The neural tangent kernel of every case against autograd, one sample and one output at a time."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

import featlearn as fl
from cases import CASES, Case
from featlearn.kernels import ck, ntk
from oracles import parameter_gradients

EACH_CASE = pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)


def reference(case: Case, keep: Callable[[str], bool] = lambda name: True) -> Tensor:
    """(n, n, c, c) from the gradient of each output of each sample in every parameter."""
    gradients = parameter_gradients(case, case.make(), keep)
    return torch.einsum("nck,mdk->nmcd", gradients, gradients)


def close(value: Tensor, expected: Tensor, tolerance: float = 1e-10) -> bool:
    assert value.shape == expected.shape
    return bool((value - expected).abs().max() <= tolerance * expected.abs().max())


@EACH_CASE
def test_kernel_of_every_case(case: Case) -> None:
    expected = reference(case)
    full = ntk(case.make(), [case.batch()], outputs="full", forward=case.forward)
    assert close(full, expected)
    trace = torch.einsum("nmcc->nm", expected)
    assert close(ntk(case.make(), [case.batch()], forward=case.forward), trace)
    last = expected.shape[-1] - 1
    assert close(ntk(case.make(), [case.batch()], outputs=last, forward=case.forward), expected[:, :, last, last])
    shares = ntk(case.make(), [case.batch()], by_layer=True, forward=case.forward)
    assert close(sum(shares.values()), trace)


@EACH_CASE
def test_blocks_of_samples_do_not_matter(case: Case) -> None:
    data = case.batch()
    whole = ntk(case.make(), [data], outputs="full", forward=case.forward)
    small = ntk(case.make(), data, outputs="full", forward=case.forward, batch_size=2)
    assert close(small, whole)


def net() -> nn.Module:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(4, 6), nn.LayerNorm(6), nn.Tanh(), nn.Linear(6, 3)).double()


X = torch.randn(9, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(1))


def test_subsets_of_parameters_add_up() -> None:
    model = net()
    parts = [ntk(model, X, parameters=glob) for glob in ("0.weight", "0.bias", "1.*", "3.*")]
    assert close(sum(parts), ntk(model, X))
    assert set(ntk(model, X, by_layer=True)) == {"0", "1", "3"}
    assert set(ntk(model, X, by_layer=True, parameters="*.weight")) == {"0", "1", "3"}
    assert set(ntk(model, X, by_layer=True, parameters="0.*")) == {"0"}


def test_one_set_against_another_and_the_last_layer() -> None:
    model = net()
    whole = ntk(model, X)
    assert close(ntk(model, X[:4], X[4:]), whole[:4, 4:])
    # The kernel of the last layer's weight is the conjugate kernel, once for each output.
    assert close(ntk(model, X, parameters="3.weight"), 3 * ck(model, X))


def test_memory_bounds_the_blocks() -> None:
    model = net()
    assert close(ntk(model, X, max_memory=20_000), ntk(model, X))


def explicit(X: Tensor, W: Tensor, v: Tensor) -> Tensor:
    """Equation (5) of the spectral paper for tanh: X is (n, d), f = v . tanh(W x / sqrt d) / sqrt h."""
    (h, d) = W.shape
    a = torch.tanh(X @ W.T / d**0.5)
    slope = 1 - a**2
    return (X @ X.T / d) * ((slope * v**2) @ slope.T / h) + a @ a.T / h


class TwoLayers(nn.Module):
    def __init__(self, d: int, h: int) -> None:
        super().__init__()
        g = torch.Generator().manual_seed(2)
        self.first, self.last = nn.Linear(d, h, bias=False).double(), nn.Linear(h, 1, bias=False).double()
        with torch.no_grad():
            self.first.weight.copy_(torch.randn(h, d, generator=g, dtype=torch.float64))
            self.last.weight.copy_(torch.randn(1, h, generator=g, dtype=torch.float64))

    def forward(self, x: Tensor) -> Tensor:
        h, d = self.first.weight.shape
        return self.last(torch.tanh(self.first(x / d**0.5)) / h**0.5)


def test_explicit_two_layer_kernel() -> None:
    model = TwoLayers(4, 11)
    assert close(ntk(model, X), explicit(X, model.first.weight.detach(), model.last.weight.detach()[0]))


def test_the_model_is_left_as_found() -> None:
    model = net()
    model[0].weight.requires_grad_(False)
    ntk(model, X)
    assert not model[0].weight.requires_grad
    assert all(p.grad is None for p in model.parameters())
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in model.modules())


def test_bad_input() -> None:
    model = net()
    for bad in ("all", -1, True, 1.5):
        with pytest.raises(fl.InputError, match="outputs must be"):
            ntk(model, X, outputs=bad)
    with pytest.raises(fl.InputError, match=r"outputs must be below 3.*got 3"):
        ntk(model, X, outputs=3)
    with pytest.raises(fl.InputError, match="matches no parameter"):
        ntk(model, X, parameters="7.*")
    with pytest.raises(fl.InputError, match="empty"):
        ntk(model, X[:0])
