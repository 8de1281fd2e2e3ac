"""What a probe is foretold to cost, against what it holds and does."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

import featlearn as fl
from featlearn.features import probe_cost


def net() -> nn.Module:
    return nn.Sequential(nn.Linear(12, 30), nn.Tanh(), nn.Linear(30, 20), nn.Tanh(), nn.Linear(20, 8))


@pytest.mark.parametrize("measure", ["nfc", ("nfc", "enfa", "fact"), ("nfc", "double_centered_nfc"), "ptk_covariance"])
@pytest.mark.parametrize("outputs", ["exact", 8])
def test_bytes_are_those_that_an_accumulator_holds(measure, outputs) -> None:
    model, initial = net(), net()
    needs_loss, needs_initial = "fact" in measure, "double_centered_nfc" in measure
    total = fl.FeatureAccumulator(
        model, outputs=outputs, measure=measure, initial=initial if needs_initial else None,
        loss=nn.MSELoss() if needs_loss else None, weight_decay=0.1 if needs_loss else None,
    )  # fmt: skip
    total.update((torch.randn(9, 12), torch.randn(9, 8)))
    held = [t for sums in total._totals.sums.values() for t in sums.values()]
    held += [t for part in total._spare[1].values() for t in part.sums.values()]
    cost = probe_cost(
        model, 9, outputs=8, exact=outputs == "exact", measure=measure, initial=needs_initial, loss=needs_loss,
        weight_decay=needs_loss,
    )  # fmt: skip
    assert cost.bytes == sum(t.numel() * t.element_size() for t in held)


def test_operations_of_the_passes_are_those_that_torch_counts() -> None:
    """Products added in place, which make the sums, are not in torch's count."""
    model = net()
    with FlopCounterMode(display=False) as counter:
        total = fl.FeatureAccumulator(model, outputs="exact", measure="nfc")
        total.update(torch.randn(50, 12))
    cost = probe_cost(model, 50, outputs=8, exact=True)
    # Two forward passes of two samples (does the batch fit into memory? Are random numbers drawn?), one of eight by
    # themselves (do samples act on each other?), a
    # backward pass (which rows act on one sample alone?), and products of rows with four directions in two.
    profiles = 2 * 2 * 50 * 4 * sum(min(layer.weight.shape) for layer in model if isinstance(layer, nn.Linear))
    on_trial = 2 * (2 * 2 + 8) * cost.parameters + 2 * 50 * cost.parameters + profiles
    assert counter.get_total_flops() == cost.table["passes"].sum() + on_trial


def test_rounds_hold_every_layer_once_within_the_memory() -> None:
    cost = probe_cost(net(), 10)
    largest = int(cost.table["bytes"].max())
    rounds = cost.rounds(largest)
    assert [name for one in rounds for name in one] == list(cost.table.index)
    assert len(rounds) > 1
    assert all(cost.table.loc[one, "bytes"].sum() <= largest for one in rounds)
    with pytest.raises(fl.InputError, match="alone take"):
        cost.rounds(largest - 1)


def test_a_layer_without_rows_is_named() -> None:
    with pytest.raises(fl.InputError, match="no number for the layer '2'"):
        probe_cost(net(), {"0": 5})
