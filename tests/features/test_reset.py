"""An accumulator that is used again after a training step gives the numbers of a new one."""

from __future__ import annotations

import copy
import math

import pandas as pd
import pytest
import torch
from torch import nn

import featlearn as fl
from featlearn.errors import InputError

DTYPE = torch.float64


def _model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 7), nn.ReLU(), nn.Linear(7, 3)).to(DTYPE)


def _train(model: nn.Module, optimizer: torch.optim.Optimizer, X: torch.Tensor, y: torch.Tensor) -> None:
    optimizer.zero_grad()
    nn.functional.mse_loss(model(X), y).backward()
    optimizer.step()


@pytest.mark.parametrize("outputs", ["exact", 8])
def test_numbers_are_those_of_a_new_accumulator(outputs) -> None:
    X, y = torch.randn(24, 6, dtype=DTYPE), torch.randn(24, 3, dtype=DTYPE)
    model = _model()
    start = copy.deepcopy(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5, weight_decay=1e-2)
    options = {"initial": start, "loss": nn.MSELoss(), "weight_decay": optimizer, "outputs": outputs}
    total = fl.FeatureAccumulator(model, **options)
    for turn in range(3):
        if turn:
            total.reset()
            assert total.samples == 0
        fresh = fl.FeatureAccumulator(model, **options)
        for rows in (slice(0, 10), slice(10, 24)):
            total.update((X[rows], y[rows]))
            fresh.update((X[rows], y[rows]))
        pd.testing.assert_frame_equal(total.compute().table("all"), fresh.compute().table("all"), rtol=1e-12)
        _train(model, optimizer, X, y)
        optimizer.param_groups[0]["weight_decay"] *= 2  # a schedule of the weight decay is followed


def test_without_reset_changed_weights_are_refused() -> None:
    X = torch.randn(12, 6, dtype=DTYPE)
    model = _model()
    total = fl.FeatureAccumulator(model)
    total.update(X)
    model[0].weight.data.mul_(1.5)
    with pytest.raises(InputError, match="weights changed"):
        total.update(X)
    total.reset()
    total.update(X)
    assert total.compute()["0"].nfc == fl.probe(model, X)["0"].nfc


def test_a_copy_follows_the_model() -> None:
    X = torch.randn(12, 6)
    model = _model().float()
    total = fl.FeatureAccumulator(model, dtype=torch.float64)
    total.update(X.double())
    before = total.compute()["0"].nfc
    model[2].weight.data[0] *= 3
    total.reset()
    total.update(X.double())
    after = total.compute()["0"].nfc
    assert after != before
    assert math.isclose(after, fl.probe(model, X.double(), dtype=torch.float64)["0"].nfc, rel_tol=1e-12)


def test_weights_that_are_not_finite_are_refused() -> None:
    model = _model()
    total = fl.FeatureAccumulator(model)
    total.update(torch.randn(4, 6, dtype=DTYPE))
    model[2].weight.data[0, 0] = math.nan
    with pytest.raises(InputError, match=r"2\.weight"):
        total.reset()


def test_before_the_first_batch() -> None:
    X = torch.randn(12, 6, dtype=DTYPE)
    model = _model()
    total = fl.FeatureAccumulator(model)
    total.reset()
    total.update(X)
    assert total.compute()["4"].nfc == fl.probe(model, X)["4"].nfc


def test_a_generator_goes_on() -> None:
    X = torch.randn(12, 6, dtype=DTYPE)
    model = _model()
    total = fl.FeatureAccumulator(model, outputs=2, generator=torch.Generator().manual_seed(1))
    values = set()
    for _ in range(3):
        total.update(X)
        values.add(total.compute()["0"].nfc)
        total.reset()
    assert len(values) == 3
