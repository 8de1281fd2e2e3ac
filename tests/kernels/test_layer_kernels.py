"""Conjugate and pre-activation tangent kernels of every case against per-sample loops."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import featlearn as fl
from cases import CASES, Case, call, samples
from featlearn.kernels import ck, ptk
from oracles import jacobians, plain

EACH_CASE = pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)


def inputs_of_layer(case: Case, name: str) -> Tensor:
    """The inputs of a layer, one sample at a time, calls side by side."""
    rows = []
    for sample in samples(case.batch()):
        model = plain(case.make())
        seen: list[Tensor] = []
        model.get_submodule(name).register_forward_pre_hook(lambda m, a, seen=seen: seen.append(a[0].detach().clone()))
        with torch.no_grad():
            call(case, model, sample)
        rows.append(torch.cat([x.reshape(-1) for x in seen]))
    return torch.stack(rows)


def data(case: Case) -> list[Any]:
    return [case.batch()]


def close(value: Tensor, expected: Tensor) -> bool:
    return bool((value - expected).abs().max() <= 1e-9 * expected.abs().max().clamp_min(1e-300))


@EACH_CASE
def test_conjugate_kernel_of_every_layer(case: Case) -> None:
    for name in case.layers:
        x = inputs_of_layer(case, name)
        assert close(ck(case.make(), data(case), layer=name, forward=case.forward), x @ x.T), name


@EACH_CASE
def test_pre_activation_tangent_kernel_of_every_layer(case: Case) -> None:
    result = jacobians(case, case.make())
    for name in case.layers:
        j = torch.stack([rows.flatten() for rows in result[name]])
        assert close(ptk(case.make(), data(case), layer=name, forward=case.forward), j @ j.T), name


def net() -> nn.Module:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 2)).double()


X = torch.randn(7, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(1))


def test_default_layer_is_the_last_linear() -> None:
    model = net()
    with torch.no_grad():
        hidden = model[:-1](X)
    assert torch.allclose(ck(model, X), hidden @ hidden.T, atol=1e-12)


def test_one_set_against_another_is_a_block_of_the_whole() -> None:
    model = net()
    for kernel in (lambda *a: ck(model, *a), lambda *a: ptk(model, *a, layer="2")):
        whole = kernel(X)
        assert torch.allclose(kernel(X[:3], X[3:]), whole[:3, 3:], atol=1e-12)
        assert torch.allclose(whole, whole.T, atol=1e-13)


def test_batches_do_not_matter() -> None:
    model = net()
    assert torch.allclose(ck(model, X, batch_size=2), ck(model, X), atol=1e-13)
    assert torch.allclose(ptk(model, X, layer="0", batch_size=3), ptk(model, X, layer="0"), atol=1e-13)


def test_the_trace_of_the_tangent_kernel_is_that_of_the_covariance() -> None:
    model = net()
    covariance = fl.probe(model, X, outputs="exact")["2"].ptk_covariance
    assert float(ptk(model, X, layer="2").trace()) / len(X) == pytest.approx(float(covariance.trace()), rel=1e-12)


def test_bad_input() -> None:
    model = net()
    with pytest.raises(fl.InputError, match="matches 3 layers"):
        ck(model, X, layer="*")
    with pytest.raises(fl.InputError, match="matches no layer"):
        ptk(model, X, layer="7")
    with pytest.raises(fl.InputError, match="no linear layer"):
        ck(nn.Sequential(nn.Conv1d(1, 2, 3)).double(), X.unsqueeze(1))
    with pytest.raises(fl.InputError, match="NaN"):
        ck(model, X.log())
    with pytest.raises(fl.InputError, match="training mode"):
        ck(nn.Sequential(nn.Linear(4, 3), nn.Dropout(0.5), nn.Linear(3, 1)).double(), X)
