"""Random output vectors: unbiased, with an honest standard error, and reproducible."""

from __future__ import annotations

import math
from functools import cache

import pytest
import torch
from torch import Tensor, nn

import featlearn as fl

SEEDS = 150


def net(outputs: int = 20) -> nn.Module:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 6), nn.Tanh(), nn.Linear(6, outputs)).double()


def inputs(n: int = 12) -> Tensor:
    return torch.randn(n, 5, generator=torch.Generator().manual_seed(1), dtype=torch.float64)


@cache
def sketches(count: int) -> list[fl.Report]:
    model, x = net(), inputs()
    return [fl.probe(model, [x], outputs=count, generator=seed) for seed in range(SEEDS)]


@pytest.mark.parametrize("layer", ["0", "2", "4"])
@pytest.mark.parametrize("matrix", ["ptk_covariance", "agop"])
def test_the_mean_over_seeds_is_the_exact_matrix(layer: str, matrix: str) -> None:
    exact = getattr(fl.probe(net(), [inputs()], outputs="exact")[layer], matrix)
    drawn = torch.stack([getattr(report[layer], matrix) for report in sketches(4)])
    error = drawn.std(0) / math.sqrt(SEEDS)
    z = (drawn.mean(0) - exact) / error.clamp_min(1e-12)
    # as many z values as entries: their mean square is about 1, none is far out
    assert z.square().mean() < 2.5
    assert z.abs().max() < 4.5
    assert error.max() < 0.1 * exact.abs().max(), "the test would pass for anything"


@pytest.mark.parametrize("layer", ["0", "2"])
@pytest.mark.parametrize("count", [4, 16])
def test_the_standard_error_is_the_spread_over_seeds(layer: str, count: int) -> None:
    reports = sketches(count)
    spread = torch.tensor([report[layer].nfc for report in reports]).std()
    reported = torch.tensor([report[layer].standard_error("nfc") for report in reports])
    typical = reported.square().mean().sqrt()
    assert 0.5 < float(typical / spread) < 2.0


def test_more_vectors_are_more_precise() -> None:
    exact = fl.probe(net(), [inputs()], outputs="exact")["0"].nfc
    errors = [
        torch.tensor([report["0"].nfc - exact for report in sketches(count)]).square().mean().sqrt()
        for count in (4, 16)
    ]
    assert 1.4 < float(errors[0] / errors[1]) < 2.9  # a factor of 2 is expected


def test_exact_outputs_have_no_standard_error() -> None:
    report = fl.probe(net(), [inputs()], outputs="exact")
    assert report["0"].standard_error("nfc") == 0.0
    assert not report["0"].sketched
    assert "nfc_se" not in report.table().columns


@pytest.mark.parametrize("count", [1, 2, 3, 5, 7, 16])
def test_any_number_of_vectors(count: int) -> None:
    report = fl.probe(net(), [inputs()], outputs=count)
    assert report.outputs.sketches == {5: 8, 7: 8}.get(count, count)  # beyond four a multiple of four
    assert report.outputs.sketches % report.outputs.groups == 0
    error = report["0"].standard_error("nfc")
    if report.outputs.groups == 1:
        assert math.isnan(error)
        assert "sketched in one group" in report["0"].flags
    else:
        assert error > 0
    scale = report["4"].ptk_covariance.diagonal()  # J is v itself: the diagonal of K is exactly 1
    assert torch.allclose(scale, torch.ones_like(scale), rtol=1e-12)


def test_auto_is_exact_up_to_64_outputs_and_16_vectors_beyond() -> None:
    x = inputs()
    for outputs, expected in ((1, 0), (64, 0), (65, 16)):
        report = fl.probe(net(outputs), [x])
        assert (report.outputs.count, report.outputs.sketches) == (outputs, expected)
    report = fl.probe(net(65), [x])
    table = report.table()
    assert table["nfc_se"]["0"] == report["0"].standard_error("nfc") > 0
    assert "16 random vectors for 65 outputs" in repr(report)
    exact = fl.probe(net(65), [x], outputs="exact")
    for name in exact:
        gap = abs(report[name].nfc - exact[name].nfc)
        assert gap <= 6 * report[name].standard_error("nfc") + 1e-12


class LanguageModel(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.mix, self.head = nn.Embedding(40, 6), nn.Linear(6, 6), nn.Linear(6, 40, bias=False)

    def forward(self, ids: Tensor) -> Tensor:
        h = torch.tanh(self.mix(self.embed(ids)))
        return self.head(h.cumsum(1))  # causal: later positions see earlier ones


def test_outputs_of_a_language_model() -> None:
    """(batch, tokens, vocabulary) and batches of different lengths."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = LanguageModel().double()
    g = torch.Generator().manual_seed(0)
    batches = [torch.randint(40, (4, length), generator=g) for length in (5, 3)]
    exact = fl.probe(model, batches, outputs="exact")
    drawn = [fl.probe(model, batches, generator=seed) for seed in range(30)]
    assert drawn[0].outputs.sketches == 16
    assert drawn[0].outputs.count == 200
    for name in ("mix", "head"):
        mean = torch.stack([report[name].agop for report in drawn]).mean(0)
        assert (mean - exact[name].agop).norm() < 0.1 * exact[name].agop.norm()


def test_the_sketch_is_a_function_of_the_seed() -> None:
    x = inputs()
    state = torch.get_rng_state()
    first, again, other = (fl.probe(net(), [x], outputs=4, generator=seed) for seed in (3, 3, 4))
    assert torch.equal(first["0"].agop, again["0"].agop)
    assert not torch.equal(first["0"].agop, other["0"].agop)
    assert torch.equal(fl.probe(net(), [x], outputs=4)["0"].agop, fl.probe(net(), [x], outputs=4)["0"].agop)
    assert torch.equal(state, torch.get_rng_state())


def test_a_change_is_measured_with_the_same_vectors() -> None:
    """J - J0 of an unchanged model is zero only if both are multiplied with the same vectors."""
    report = fl.probe(net(), [inputs()], initial=net(), outputs=4)
    assert not report["0"].sums["Kb"].any()


def test_the_standard_error_of_a_number_that_does_not_exist() -> None:
    with pytest.raises(fl.InputError, match=r"name must be one of.* got 'nothing'"):
        fl.probe(net(), [inputs()], outputs=4)["0"].standard_error("nothing")
