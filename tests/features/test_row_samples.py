"""Rows that are a sample of a larger data set: no bias of few rows, and standard errors of the sampling."""

from __future__ import annotations

import math
from itertools import combinations
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import featlearn as fl
from featlearn.errors import InputError
from featlearn.features import Report


def conv_net() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Unflatten(1, (1, 4, 4)), nn.Conv2d(1, 3, 3), nn.Tanh(), nn.Flatten(), nn.Linear(12, 5), nn.Tanh(),
        nn.Linear(5, 3),
    ).double()  # fmt: skip


def rows_of(n: int, seed: int = 0) -> Tensor:
    return torch.randn(n, 16, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


class Queries(nn.Module):
    """Attention from learned queries, whose key and value rows are the samples' but whose query rows are shared."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.q, self.k, self.v = nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 2)
        self.learned = nn.Parameter(torch.randn(3, 4))
        self.double()

    def forward(self, x: Tensor) -> Tensor:
        x = x.unflatten(1, (4, 4))
        weights = (self.q(self.learned) @ self.k(x).mT).softmax(-1)
        return (weights @ self.v(x)).flatten(1)


def agop_of_rows(model: nn.Module, name: str, X: Tensor) -> Tensor:
    """Return ``W^T E[J J^T] W`` of a linear or convolutional layer, by one backward pass per row and output."""
    module = model.get_submodule(name)
    weight = module.weight.detach().flatten(1)
    total = torch.zeros(weight.shape[1], weight.shape[1], dtype=torch.float64)
    kept: list[Tensor] = []
    handle = module.register_forward_hook(lambda *call: kept.append(call[2]))
    for x in X:
        kept.clear()
        output = model(x[None])
        for value in output.flatten():
            (j,) = torch.autograd.grad(value, kept[0], retain_graph=True)
            rows = j.flatten(2).mT.reshape(-1, len(weight)) if j.ndim == 4 else j.reshape(-1, len(weight))
            total += (rows @ weight).mT @ (rows @ weight)
    handle.remove()
    return total / len(X)


@pytest.mark.parametrize("name", ["1", "4", "6"])
def test_the_correlation_is_that_of_products_of_different_groups_of_rows(name: str) -> None:
    model, X = conv_net(), rows_of(8)
    report = fl.probe(model, [X], rows="sample")
    groups = [agop_of_rows(model, name, part) for part in X.chunk(4)]
    W = model.get_submodule(name).weight.detach().flatten(1)
    nfm = W.T @ W

    def correlation(of: list[Tensor]) -> float:
        square = sum(float((a * b).sum()) for a, b in combinations(of, 2)) / math.comb(len(of), 2)
        return float((nfm * sum(of)).sum()) / len(of) / float(nfm.norm()) / math.sqrt(square)

    assert report[name].nfc == pytest.approx(min(correlation(groups), 1.0), rel=1e-12)
    torch.testing.assert_close(report[name].agop, agop_of_rows(model, name, X), rtol=1e-12, atol=1e-14)
    left_out = [correlation(groups[:j] + groups[j + 1 :]) for j in range(4)]
    mean = sum(left_out) / 4
    error = math.sqrt(3 / 4 * sum((value - mean) ** 2 for value in left_out))
    assert report[name].standard_error("nfc") == pytest.approx(error, rel=1e-10)
    assert report.table()["nfc_se"][name] == report[name].standard_error("nfc")


@pytest.mark.parametrize("sizes", [[8], [4, 4], [1] * 8, [5, 3], [2, 6]])
@pytest.mark.parametrize("model", [conv_net(), Queries()], ids=["conv", "shared rows"])
def test_the_mean_of_the_groups_is_that_of_all_rows_in_any_batches(model: nn.Module, sizes: list[int]) -> None:
    X = rows_of(8)
    whole, sampled = (fl.probe(model, list(X.split(sizes)), rows=rows) for rows in ("all", "sample"))
    for name in whole:
        torch.testing.assert_close(sampled[name].agop, whole[name].agop, rtol=1e-12, atol=1e-14)
        torch.testing.assert_close(sampled[name].ptk_covariance, whole[name].ptk_covariance, rtol=1e-12, atol=1e-14)
        assert not whole[name].sketched
        assert sampled[name].sketched


@pytest.mark.parametrize(("outputs", "left"), [("exact", 0.5), (1, 0.8)])
def test_few_rows_do_not_decrease_the_correlation(outputs: str | int, left: float) -> None:
    torch.manual_seed(2)
    model, population = nn.Sequential(nn.Linear(16, 24), nn.ReLU(), nn.Linear(24, 3)).double(), rows_of(512)
    truth = fl.probe(model, [population])["0"].nfc
    bias, error = {}, {}
    for rows in ("all", "sample"):
        found = []
        for seed in range(60):
            few = population[torch.randperm(512, generator=torch.Generator().manual_seed(seed))[:8]]
            found.append(fl.probe(model, [few], outputs=outputs, rows=rows, generator=seed)["0"].nfc - truth)
        bias[rows], error[rows] = float(torch.tensor(found).mean()), float(torch.tensor(found).std()) / math.sqrt(60)
    assert bias["all"] < -5 * error["all"]
    # A bias of the second order is left: the root of an unbiased square is not unbiased.
    assert abs(bias["sample"]) < left * abs(bias["all"])


def test_centered_quantities_and_random_vectors_of_a_sample() -> None:
    model, initial = conv_net(), conv_net()
    with torch.no_grad():
        for p in model.parameters():
            p.add_(0.1 * torch.randn(p.shape, generator=torch.Generator().manual_seed(3)))
    X = rows_of(8)
    exact = fl.probe(model, [X], initial=initial)
    sampled = fl.probe(model, [X], initial=initial, rows="sample")
    for name in exact:
        for quantity in ("centered_agop", "double_centered_agop", "ptk_centered_agop"):
            torch.testing.assert_close(
                sampled[name].matrix(quantity), exact[name].matrix(quantity), rtol=1e-10, atol=1e-14
            )
        assert 0 < sampled[name].centered_nfc <= 1
    several = fl.probe(model, [X], initial=initial, rows="sample", outputs=2)
    assert several.outputs.sketches == 2
    assert several.outputs.groups == 4


def test_accumulators_of_all_rows_and_of_a_sample_are_not_merged() -> None:
    model, X = conv_net(), rows_of(8)
    whole, sampled = (fl.FeatureAccumulator(model, rows=rows, outputs=16) for rows in ("all", "sample"))
    whole.update(X)
    sampled.update(X)
    with pytest.raises(InputError, match=r"Pass the same outputs= and rows= to all\."):
        whole.merge_state(sampled)


def test_a_report_of_a_sample_is_saved_with_its_groups(tmp_path: Path) -> None:
    report = fl.probe(conv_net(), [rows_of(8)], rows="sample")
    report.save(tmp_path / "report")
    loaded = Report.load(tmp_path / "report")
    assert loaded.outputs == report.outputs
    assert loaded["4"].nfc == report["4"].nfc
    assert "rows taken as a sample" in repr(loaded)


def test_rows_must_be_all_or_sample() -> None:
    with pytest.raises(InputError, match="rows must be 'all' or 'sample', got 'some'"):
        fl.probe(conv_net(), rows_of(8), rows="some")
