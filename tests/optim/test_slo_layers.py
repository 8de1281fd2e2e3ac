"""Speeds given by the names of layers."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import featlearn as fl
from featlearn.models import mlp
from featlearn.optim import SLO
from featlearn.optim._param_groups import parameters_of_layers


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(7, 4)
        self.norm = nn.LayerNorm(4)
        self.attn = nn.MultiheadAttention(4, 2, batch_first=True)
        self.head = nn.Linear(4, 7)
        self.head.weight = self.table.weight

    def forward(self, ids: Tensor) -> Tensor:
        x = self.norm(self.table(ids))
        return self.head(self.attn(x, x, x)[0])


def names(model: nn.Module, optimizer: SLO) -> dict[str, list[str]]:
    called = {id(p): n for n, p in model.named_parameters()}
    return {group["name"]: [called[id(p)] for p in group["params"]] for group in optimizer.param_groups}


def test_the_first_glob_that_matches_counts() -> None:
    model = nn.Sequential()
    model.net = mlp([4, 5, 6, 1], bias=True, generator=0)
    optimizer = SLO.for_layers(model, 0.1, {"net.0": 500.0, "*": 0.002}, eps=0.1, momentum=0.5)
    assert names(model, optimizer) == {
        "net.0": ["net.0.weight", "net.0.bias"],
        "*": ["net.2.weight", "net.2.bias", "net.4.weight", "net.4.bias"],
    }
    assert [g["speed"] for g in optimizer.param_groups] == [500.0, 0.002]
    assert {(g["eps"], g["momentum"], g["lr"]) for g in optimizer.param_groups} == {(0.1, 0.5, 0.1)}


def test_parameters_may_be_named_too() -> None:
    model = mlp([4, 5, 1], bias=True, generator=0)
    optimizer = SLO.for_layers(model, 0.1, {"*.bias": 0.0, "0": 2.0, "2.*": 3.0})
    assert names(model, optimizer) == {"*.bias": ["0.bias", "2.bias"], "0": ["0.weight"], "2.*": ["2.weight"]}


def test_attention_norms_and_ties() -> None:
    model = Tied()
    optimizer = SLO.for_layers(model, 0.1, {"attn.out": 1.0, "attn.q": 2.0, "norm": 3.0, "head": 4.0})
    assert names(model, optimizer) == {
        "attn.out": ["attn.out_proj.weight", "attn.out_proj.bias"],
        "attn.q": ["attn.in_proj_weight", "attn.in_proj_bias"],  # packed with the keys and values
        "norm": ["norm.weight", "norm.bias"],
        "head": ["table.weight", "head.bias"],  # one parameter, two names
    }
    by_table = SLO.for_layers(model, 0.1, {"table": 1.0, "*": 4.0})
    assert names(model, by_table)["table"] == ["table.weight"]


def test_layers_of_every_parameter() -> None:
    apart = nn.MultiheadAttention(4, 2, kdim=3, vdim=5)
    model = nn.ModuleDict({"attn": apart, "conv": nn.Conv1d(2, 3, 2), "norm": nn.LayerNorm(3)})
    model["linear"] = nn.utils.parametrizations.weight_norm(nn.Linear(3, 2))
    result = {p.name: p.layers for p in parameters_of_layers(model)}
    assert result == {
        "attn.q_proj_weight": ("attn.q",),
        "attn.k_proj_weight": ("attn.k",),
        "attn.v_proj_weight": ("attn.v",),
        "attn.in_proj_bias": ("attn.q", "attn.k", "attn.v"),
        "attn.out_proj.weight": ("attn.out",),
        "attn.out_proj.bias": ("attn.out",),
        "conv.weight": ("conv",),
        "conv.bias": ("conv",),
        "norm.weight": (),
        "norm.bias": (),
        "linear.bias": ("linear",),
        "linear.parametrizations.weight.original0": ("linear",),
        "linear.parametrizations.weight.original1": ("linear",),
    }
    root = nn.utils.parametrizations.weight_norm(nn.Linear(3, 2))
    assert {p.layers for p in parameters_of_layers(root)} == {("model",)}


def test_wrappers_are_taken_off() -> None:
    inner = mlp([4, 5, 1], generator=0)
    model = nn.DataParallel(inner)
    assert names(inner, SLO.for_layers(model, 0.1, {"0": 2.0, "2": 1.0})) == {"0": ["0.weight"], "2": ["2.weight"]}


def test_a_step_has_the_speed_of_its_layer() -> None:
    model = mlp([4, 5, 6, 1], bias=True, generator=0, dtype=torch.float64)
    optimizer = SLO.for_layers(model, 0.1, {"0": 5.0, "*": 0.5})
    before = {n: p.detach().clone() for n, p in model.named_parameters()}
    model(torch.ones(3, 4, dtype=torch.float64)).square().sum().backward()
    optimizer.step()
    for n, p in model.named_parameters():
        expected = 0.5 if n.startswith("0.") else 0.05
        assert float((p - before[n]).detach().norm()) == pytest.approx(expected, rel=1e-12)


@pytest.mark.parametrize(
    ("speeds", "words"),
    [
        ({"0": 1.0}, r"2.weight, 4.weight match no pattern. Add a pattern"),
        ({"0": 1.0, "7": 1.0, "*": 1.0}, r"speeds='7' matches no layer and no parameter. .*0, 0.weight, 2, 2.weight"),
        ({"0.wieght": 1.0, "*": 1.0}, r"Did you mean 0.weight"),
        ({"*": 1.0, "0": 2.0}, r"'0' matches only parameters of earlier patterns"),
        ({}, r"speeds must be a mapping \{glob"),
        ({0: 1.0}, r"speeds must be a mapping \{glob"),
        (["0"], r"speeds must be a mapping \{glob"),
        ({"0": -1.0, "*": 1.0}, "speed must be a finite number"),
    ],
)
def test_what_does_not_fit_is_named(speeds: Any, words: str) -> None:
    with pytest.raises(fl.InputError, match=words):
        SLO.for_layers(mlp([4, 5, 6, 1], generator=0), 0.1, speeds)


def test_only_a_model_has_layers() -> None:
    with pytest.raises(fl.InputError, match=r"torch\.nn\.Module"):
        SLO.for_layers([nn.Parameter(torch.zeros(2))], 0.1, {"*": 1.0})  # type: ignore[arg-type]
