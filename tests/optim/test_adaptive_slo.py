"""Adaptive SLO: who is fast, that nothing else is disturbed, and that it resumes."""

from __future__ import annotations

import copy
import json
import math
import pickle
import random
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.optim.lr_scheduler import CosineAnnealingLR
from torch.utils.data import DataLoader, TensorDataset

import featlearn as fl
from featlearn.datasets import chain_monomial_task
from featlearn.models import mlp
from featlearn.optim import SLO, AdaptiveSLO
from featlearn.training import fit


def net(bias: bool = True) -> nn.Sequential:
    return mlp([6, 8, 7, 9, 1], bias=bias, generator=0, dtype=torch.float64)


@pytest.fixture
def data() -> tuple[Tensor, Tensor]:
    g = torch.Generator().manual_seed(1)
    X = torch.randn(40, 6, generator=g, dtype=torch.float64)
    return X, X[:, :1] * X[:, 1:2]


def backward(model: nn.Module, optimizer: torch.optim.Optimizer, data: tuple[Tensor, Tensor]) -> Tensor:
    optimizer.zero_grad()
    loss = nn.functional.mse_loss(model(data[0]), data[1])
    loss.backward()
    return loss


def train(model: nn.Module, optimizer: torch.optim.Optimizer, data: tuple[Tensor, Tensor], steps: int) -> None:
    for _ in range(steps):
        backward(model, optimizer, data)
        optimizer.step()


def values(model: nn.Module) -> list[Tensor]:
    return [p.detach().clone() for p in model.parameters()]


def test_it_is_slo_with_the_speeds_of_a_probe(data: tuple[Tensor, Tensor]) -> None:
    """Appendix K by hand: probe, name the worst layer, one step of SLO."""
    model, twin = net(), net()
    optimizer = AdaptiveSLO(model, data, lr=0.01, fast=20.0, eps=0.01)
    plain = SLO.for_layers(twin, 0.01, dict.fromkeys(("0", "2", "4", "6"), 1.0), eps=0.01)
    seen = set()
    for _ in range(12):
        report = fl.probe(twin, data, measure="nfc")
        correlations = {name: report[name].nfc for name in ("0", "2", "4")}  # "6" has one output
        worst = min(correlations, key=lambda name: correlations[name])
        seen.add(worst)
        for group in plain.param_groups:
            group["speed"] = 20.0 if group["name"] == worst else 1 / 20
        train(twin, plain, data, 1)
        train(model, optimizer, data, 1)
        assert optimizer.nfc == correlations
        assert optimizer.speeds == {name: 20.0 if name == worst else 0.05 for name in ("0", "2", "4", "6")}
        assert all(torch.equal(p, q) for p, q in zip(model.parameters(), twin.parameters(), strict=True))
    assert len(seen) > 1  # the speeds have moved from layer to layer


def test_before_the_first_step(data: tuple[Tensor, Tensor]) -> None:
    optimizer = AdaptiveSLO(net(), data, lr=0.01, fast=4.0)
    assert optimizer.speeds == dict.fromkeys(("0", "2", "4", "6"), 0.25)
    assert optimizer.nfc == {}
    assert optimizer.steps == 0
    assert set(optimizer.measure()) == {"0", "2", "4"}
    assert sorted(optimizer.speeds.values()) == [0.25, 0.25, 0.25, 4.0]


def test_every_so_many_steps(data: tuple[Tensor, Tensor], monkeypatch: pytest.MonkeyPatch) -> None:
    at: list[int] = []
    measure = AdaptiveSLO.measure

    def counted(self: AdaptiveSLO) -> dict[str, float]:
        at.append(self.steps)
        return measure(self)

    monkeypatch.setattr(AdaptiveSLO, "measure", counted)
    model = net()
    optimizer = AdaptiveSLO(model, data, lr=0.01, every=3)
    train(model, optimizer, data, 8)
    assert at == [0, 3, 6]
    assert optimizer.steps == 8


def test_excluded_layers_are_slow(data: tuple[Tensor, Tensor]) -> None:
    model = net()
    optimizer = AdaptiveSLO(model, data, lr=0.01, exclude=("0", "2"))
    train(model, optimizer, data, 3)
    assert set(optimizer.nfc) == {"4"}
    assert optimizer.speeds == {"0": 0.05, "2": 0.05, "4": 20.0, "6": 0.05}


def test_frozen_and_undefined_layers_do_not_compete(data: tuple[Tensor, Tensor]) -> None:
    model = net()
    model[0].requires_grad_(False)
    with torch.no_grad():
        model[2].weight.zero_()
    optimizer = AdaptiveSLO(model, data, lr=0.01)
    backward(model, optimizer, data)
    optimizer.step()
    assert set(optimizer.nfc) == {"4"}  # the cosine with a weight of zero is no number
    assert optimizer.speeds["4"] == 20.0
    with torch.no_grad():
        for p in model.parameters():
            p.zero_()
    optimizer.measure()
    assert optimizer.nfc == {}
    assert set(optimizer.speeds.values()) == {0.05}


class Small(nn.Module):
    """Attention, norms, dropout and an embedding that is tied to the head."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(11, 8)
        self.norm = nn.LayerNorm(8)
        self.attn = nn.MultiheadAttention(8, 2, dropout=0.1, batch_first=True)
        self.drop = nn.Dropout(0.2)
        self.head = nn.Linear(8, 11, bias=False)
        self.head.weight = self.table.weight

    def forward(self, ids: Tensor) -> Tensor:
        x = self.norm(self.table(ids))
        return self.head(self.drop(self.attn(x, x, x, need_weights=False)[0])).mean(1)


def small() -> tuple[Small, Tensor]:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return Small(), torch.randint(11, (12, 5))


def test_packed_attention_and_parameters_of_no_layer() -> None:
    model, ids = small()
    optimizer = AdaptiveSLO(model, ids, lr=1e-3)
    groups = {group["name"]: group for group in optimizer.param_groups}
    assert list(groups) == ["head", "(no layer)", "attn.q, attn.k, attn.v", "attn.out"]
    assert sum(len(group["params"]) for group in groups.values()) == len(list(model.parameters()))
    for _ in range(3):
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(ids), ids[:, 0]).backward()
        optimizer.step()
        worst = min(optimizer.nfc, key=lambda name: optimizer.nfc[name])
        assert {name for name, g in groups.items() if g["speed"] == 20.0} == {
            next(name for name in groups if worst in name.split(", "))
        }
    assert list(optimizer.speeds) == ["attn.q", "attn.k", "attn.v", "attn.out", "head"]
    assert optimizer.speeds["attn.q"] == optimizer.speeds["attn.k"]


def test_measuring_leaves_everything_as_it_was() -> None:
    model, ids = small()
    model.train()
    model.drop.eval()  # flags may differ from module to module
    loader = DataLoader(
        TensorDataset(ids), batch_size=4, shuffle=True, collate_fn=lambda rows: torch.stack([r[0] for r in rows])
    )
    optimizer = AdaptiveSLO(model, loader, lr=1e-3)
    nn.functional.cross_entropy(model(ids), ids[:, 0]).backward()
    before, gradients = values(model), [p.grad for p in model.parameters()]
    copies = [g.clone() for g in gradients if g is not None]
    flags = [m.training for m in model.modules()]
    states = torch.get_rng_state(), random.getstate(), np.random.get_state()[1].copy()  # noqa: NPY002
    optimizer.measure()
    assert all(torch.equal(p, q) for p, q in zip(model.parameters(), before, strict=True))
    assert all(p.grad is g for p, g in zip(model.parameters(), gradients, strict=True))
    assert all(torch.equal(g, c) for g, c in zip(gradients, copies, strict=True))
    assert [m.training for m in model.modules()] == flags
    assert torch.equal(states[0], torch.get_rng_state())
    assert states[1] == random.getstate()
    assert (states[2] == np.random.get_state()[1]).all()  # noqa: NPY002
    assert not any(m._forward_hooks or m._forward_pre_hooks or m._backward_hooks for m in model.modules())
    assert all(p.requires_grad for p in model.parameters())


def test_batch_norms_keep_their_statistics() -> None:
    model = nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.ReLU(), nn.Linear(6, 2))
    X = torch.randn(16, 4, generator=torch.Generator().manual_seed(0))
    optimizer = AdaptiveSLO(model, X, lr=0.01)
    model(X).square().mean().backward()
    before = {name: b.clone() for name, b in model.named_buffers()}
    optimizer.step()
    assert all(torch.equal(b, before[name]) for name, b in model.named_buffers())
    assert model.training


def test_closures_and_schedules(data: tuple[Tensor, Tensor]) -> None:
    model, twin = net(), net()
    optimizer, other = AdaptiveSLO(model, data, lr=0.02), AdaptiveSLO(twin, data, lr=0.02)
    schedule, other_schedule = CosineAnnealingLR(optimizer, 5), CosineAnnealingLR(other, 5)
    for _ in range(4):
        loss = optimizer.step(lambda: backward(model, optimizer, data))
        assert isinstance(loss, Tensor)
        schedule.step()
        train(twin, other, data, 1)
        other_schedule.step()
    assert optimizer.param_groups[0]["lr"] < 0.02
    assert all(torch.equal(p, q) for p, q in zip(model.parameters(), twin.parameters(), strict=True))


@pytest.mark.parametrize("options", [{}, {"momentum": 0.9, "weight_decay": 0.01, "every": 3}], ids=["plain", "all"])
def test_a_training_resumes_to_the_same_bits(options: dict[str, Any], data: tuple[Tensor, Tensor]) -> None:
    whole, half, again = net(), net(), net()
    train(whole, AdaptiveSLO(whole, data, lr=0.01, **options), data, 10)
    first = AdaptiveSLO(half, data, lr=0.01, **options)
    train(half, first, data, 4)  # with every=3 in the middle between two measurements
    state = first.state_dict()
    saved = {"state": state["state"], "param_groups": json.loads(json.dumps(state["param_groups"]))}
    again.load_state_dict(half.state_dict())
    second = AdaptiveSLO(again, data, lr=0.5, **options)
    second.load_state_dict(saved)
    assert (second.steps, second.speeds, second.nfc) == (4, first.speeds, first.nfc)
    train(again, second, data, 6)
    assert all(torch.equal(p, q) for p, q in zip(whole.parameters(), again.parameters(), strict=True))


def test_a_saved_state_stays_as_it_was_saved(data: tuple[Tensor, Tensor]) -> None:
    model = net()
    optimizer = AdaptiveSLO(model, data, lr=0.05)
    train(model, optimizer, data, 1)
    state = optimizer.state_dict()
    kept = copy.deepcopy(state)
    train(model, optimizer, data, 3)
    assert state["param_groups"] == kept["param_groups"]


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda x: pickle.loads(pickle.dumps(x))], ids=["deepcopy", "pickle"])
def test_copies_go_on_by_themselves(copied: Callable[[Any], Any], data: tuple[Tensor, Tensor]) -> None:
    model = net()
    optimizer = AdaptiveSLO(model, data, lr=0.01, momentum=0.5)
    train(model, optimizer, data, 2)
    twin, twin_optimizer = copied((model, optimizer))
    kept = values(model)
    train(twin, twin_optimizer, data, 3)
    assert all(torch.equal(p, q) for p, q in zip(model.parameters(), kept, strict=True))
    train(model, optimizer, data, 3)
    assert all(torch.equal(p, q) for p, q in zip(model.parameters(), twin.parameters(), strict=True))


def test_a_group_that_is_added_is_slow(data: tuple[Tensor, Tensor]) -> None:
    model = net()
    optimizer = AdaptiveSLO(model, data, lr=0.1, eps=0.0)
    extra = nn.Parameter(torch.zeros(2, dtype=torch.float64))
    optimizer.add_param_group({"params": [extra]})
    backward(model, optimizer, data)
    extra.grad = torch.tensor([3.0, 4.0], dtype=torch.float64)
    optimizer.step()
    assert torch.allclose(extra, -0.1 / 20 * torch.tensor([0.6, 0.8], dtype=torch.float64))


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"fast": 0.5}, "fast must be a finite number of at least 1"),
        ({"fast": math.inf}, "fast must"),
        ({"every": 0}, "every must be an integer of at least 1"),
        ({"every": 1.5}, "every must"),
        ({"exclude": "7"}, "exclude='7' matches no layer"),
        ({"exclude": "*"}, "at least one layer to compare"),
        ({"lr": -1.0}, "lr must"),
        ({"data": iter([torch.zeros(2, 6)])}, "readable several times"),
        ({"model": nn.Sequential(nn.Linear(6, 1))}, "the NFC of a single output is always 1"),
        ({"model": nn.LayerNorm(6)}, "no layer that featlearn can measure"),
        ({"model": "net"}, r"torch\.nn\.Module"),
    ],
)
def test_bad_input(arguments: dict[str, Any], words: str, data: tuple[Tensor, Tensor]) -> None:
    with pytest.raises(fl.InputError, match=words):
        AdaptiveSLO(**({"model": net(), "data": data, "lr": 0.1} | arguments))


def test_data_that_does_not_fit_is_told_at_the_first_step() -> None:
    model = net()
    optimizer = AdaptiveSLO(model, torch.zeros(0, 6, dtype=torch.float64), lr=0.1)
    before = values(model)
    model(torch.ones(2, 6, dtype=torch.float64)).sum().backward()
    with pytest.raises(fl.InputError, match="empty"):
        optimizer.step()
    assert all(torch.equal(p, q) for p, q in zip(model.parameters(), before, strict=True))
    assert optimizer.steps == 0


@pytest.mark.slow
def test_figure_12_layers_end_alike() -> None:
    """NFA paper, appendix K: three hidden layers at scale .1, r = 3; standard training leaves them apart."""
    task = chain_monomial_task(256, 32, 3, generator=0)
    data = (task.X, task.y)
    result = {}
    for method in ("GD", "adaptive"):
        model = mlp([32, 256, 256, 256, 1], scales=[0.1] * 4, generator=0)

        def optimizer(parameters: Any, model: nn.Module = model, method: str = method) -> torch.optim.Optimizer:
            return torch.optim.SGD(parameters, lr=0.25) if method == "GD" else AdaptiveSLO(model, data, lr=0.05)

        fit(model, data, optimizer=optimizer, steps=500)
        report = fl.probe(model, data, measure="nfc")
        result[method] = [report[name].nfc for name in ("0", "2", "4")]
    spread = {method: max(v) - min(v) for method, v in result.items()}
    assert spread["adaptive"] < 0.1, result
    assert min(result["adaptive"]) > 0.8, result
