"""What a hostile but fair user does to SLO."""

from __future__ import annotations

import copy
import math

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from featlearn.optim import SLO, AdaptiveSLO

X = torch.randn(40, 6, generator=torch.Generator().manual_seed(0))
Y = X[:, :2].sin()


def net() -> nn.Sequential:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 2))


def backward(model: nn.Module) -> None:
    model.zero_grad()
    nn.functional.mse_loss(model(X), Y).backward()


def test_measuring_leaves_the_loader_that_trains_as_it_was() -> None:
    def order(measure: bool) -> list[float]:
        loader = DataLoader(TensorDataset(X, Y), 8, shuffle=True, generator=torch.Generator().manual_seed(0))
        optimizer = AdaptiveSLO(net(), loader, lr=0.1)
        if measure:
            optimizer.measure()
        return [float(x.sum()) for x, _ in loader]

    assert order(True) == order(False)


def test_measuring_leaves_normed_weights_as_they_were() -> None:
    model = net()
    nn.utils.parametrizations.spectral_norm(model[0])
    optimizer = AdaptiveSLO(model, X, lr=0.1)
    backward(model)
    before = [b.clone() for b in model.buffers()]
    optimizer.step()
    assert all(torch.equal(a, b) for a, b in zip(before, model.buffers(), strict=True))


def test_a_group_that_is_added_in_the_middle_resumes() -> None:
    model = net()
    optimizer = SLO(model[0].parameters(), lr=0.1, momentum=0.9)
    backward(model)
    optimizer.step()
    optimizer.add_param_group({"params": model[2].parameters(), "speed": 3.0})
    backward(model)
    optimizer.step()
    again = copy.deepcopy(model)
    groups = [{"params": again[0].parameters()}, {"params": again[2].parameters()}]
    resumed = SLO(groups, lr=0.5)
    resumed.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    for one, its in ((model, optimizer), (again, resumed)):
        backward(one)
        its.step()
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), again.parameters(), strict=True))


def test_a_scaled_step_that_overflows_is_left_out_and_does_not_count() -> None:
    model = net()
    optimizer, scaler = AdaptiveSLO(model, X, lr=0.1), torch.amp.GradScaler("cpu", init_scale=8.0)
    for factor in (1.0, math.inf, 1.0):
        before = [p.detach().clone() for p in model.parameters()]
        optimizer.zero_grad()
        scaler.scale(nn.functional.mse_loss(model(X), Y) * factor).backward()
        scaler.step(optimizer)
        scaler.update()
        moved = any(not torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))
        assert moved == math.isfinite(factor)
    assert optimizer.steps == 2
