"""A measurement is planned before it is made: what takes too much time or memory is made smaller, or left out."""

from __future__ import annotations

import itertools
import warnings
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import featlearn as fl
from featlearn.models import gpt
from featlearn.training._plan import MeasurementPlan, plan_measurement, sharing_of, sizes_of
from featlearn.training._probe_data import first_of, take_rows
from featlearn.training._work import Sharing, Work
from processes import run_code

FEATURES: dict[str, Any] = {"loss": None, "weight_decay": None, "layers": None, "outputs": "auto"}
ALL = frozenset({"features", "weights", "ck", "ntk"})


def planned(
    model: nn.Module, data: Any, memory: int = 2**31, samples: int = 512, kernel_samples: int = 128, **features: Any
) -> MeasurementPlan:
    rows = take_rows(data, samples, kernel_samples, None)
    layers = {layer.name: layer for layer in fl.layers.find_layers(model)}
    work = Work(model, layers, sizes_of(model, rows, None), rows.samples, FEATURES | features)
    return plan_measurement(work, rows, ALL, memory)


def mlp(*widths: int) -> nn.Sequential:
    parts: list[nn.Module] = []
    for k_in, k_out in itertools.pairwise(widths):
        parts += [nn.Linear(k_in, k_out), nn.ReLU()]
    return nn.Sequential(*parts[:-1])


def test_small_models_are_measured_whole() -> None:
    for model, x in (
        (mlp(10, 64, 64, 3), torch.randn(600, 10)),
        (nn.Sequential(nn.Conv2d(1, 8, 3), nn.ReLU(), nn.Flatten(), nn.Linear(8 * 36, 10)), torch.randn(600, 1, 8, 8)),
    ):
        plan = planned(model, x)
        assert not plan.notes
        assert plan.parts == ALL
        assert (plan.feature_rows, plan.ck_rows, plan.ntk_rows, plan.sketches) == (512, 128, 128, None)


def test_a_language_model_gets_random_output_vectors() -> None:
    plan = planned(gpt(60, 48, blocks=2, heads=4, width=48), torch.randint(0, 60, (64, 48)))
    assert plan.sketches == 16
    assert plan.ntk_rows == 64
    assert plan.parts == ALL
    assert "16 random output vectors" in plan.warning()


def test_pixels_as_outputs() -> None:
    """A picture of 48 x 48 pixels in, 21 classes a pixel out."""
    model = nn.Sequential(nn.Conv2d(3, 16, 3, padding=1), nn.ReLU(), nn.Conv2d(16, 21, 3, padding=1))
    plan = planned(model, torch.randn(128, 3, 48, 48), memory=2**28)
    assert plan.sketches is not None
    assert plan.batch_rows < 128
    assert plan.feature_rows >= 8


def test_matrices_that_are_too_large_have_no_spectrum() -> None:
    model = nn.Sequential(nn.Linear(4, 3000), nn.ReLU(), nn.Linear(3000, 3000), nn.ReLU(), nn.Linear(3000, 2))
    plan = planned(model, torch.randn(16, 4), kernel_samples=8)
    assert plan.spectra == {"0", "4"}
    assert any("no spectrum of the weights of '2'" in note for note in plan.notes)


def test_memory_takes_rows_off_and_then_parts() -> None:
    model, x = mlp(4000, 64, 64, 3), torch.randn(600, 4000)
    fewer = planned(model, x, memory=3_000_000)
    assert fewer.ck_rows < 128
    none = planned(model, x, memory=30_000)
    assert "ntk" not in none.parts
    assert "features" not in none.parts
    assert planned(model, x, memory=100).parts == {"weights"}


def test_outputs_that_were_asked_for_are_not_sketched() -> None:
    model, x = mlp(10, 200, 400), torch.randn(512, 10)
    assert planned(model, x, outputs="exact").outputs == "exact"
    assert planned(model, x, outputs="exact").feature_rows < 512
    assert planned(model, x).outputs == "auto"


def test_a_model_that_takes_whole_batches_only() -> None:
    class Fixed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.lin = nn.Linear(4, 3)
            self.mix = nn.Parameter(torch.eye(10))

        def forward(self, x: Tensor) -> Tensor:
            return self.lin(self.mix @ x)

    assert planned(Fixed(), torch.randn(10, 4)).parts == ALL


class RawParameters(nn.Module):
    """Weights that no layer owns: gradients in them are taken sample by sample."""

    def __init__(self, k: int) -> None:
        super().__init__()
        self.w, self.v = nn.Parameter(torch.randn(k, 64) / 8), nn.Parameter(torch.randn(64, k) / k**0.5)
        self.out = nn.Linear(64, 64)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(torch.tanh(x @ self.w.T) @ self.v.T)


class Tied(nn.Module):
    def __init__(self, tokens: int) -> None:
        super().__init__()
        self.embedding, self.head = nn.Embedding(tokens, 16), nn.Linear(16, tokens, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, ids: Tensor) -> Tensor:
        return self.head(torch.tanh(self.embedding(ids)).mean(1))


def test_parameters_that_no_layer_owns_are_priced() -> None:
    raw = planned(RawParameters(2048), torch.randn(512, 64))
    assert "ntk" not in raw.parts or raw.ntk_rows < 128
    tied = planned(Tied(8000), torch.randint(0, 8000, (64, 12)))
    assert tied.sketches is not None
    assert tied.ntk_rows < 64 or "ntk" not in tied.parts


class Nodes(nn.Module):
    """A graph network whose nodes are the samples: a backward pass per node and output."""

    def __init__(self, n: int) -> None:
        super().__init__()
        ring = torch.eye(n) + torch.eye(n).roll(1, 0)
        self.register_buffer("adjacency", ring / 2)
        self.first, self.second = nn.Linear(8, 16), nn.Linear(16, 7)

    def forward(self, x: Tensor) -> Tensor:
        return self.second(self.adjacency @ torch.relu(self.first(x)))


def test_layers_with_shared_rows_are_priced_sample_by_sample() -> None:
    data, forward = [torch.randn(2000, 8)], lambda model, x: model(x)
    model = Nodes(2000)
    rows = take_rows(data, None, 8, None)
    layers = {layer.name: layer for layer in fl.layers.find_layers(model)}
    sizes = sizes_of(model, rows, forward)

    def planned_at(sharing: Sharing) -> MeasurementPlan:
        return plan_measurement(Work(model, layers, sizes, rows.samples, FEATURES, sharing), rows, ALL, 2**31)

    sharing = sharing_of(model, rows, sizes, 2**31, forward, None)
    assert sharing is not None
    assert not sharing.alone
    few = Sharing(1e-9, 1.0, False)
    many = Sharing(1.0, 1.0, False)
    for given, parts in ((few, ALL), (many, ALL - {"features"})):
        assert planned_at(given).parts == parts
    alone = planned_at(Sharing(1e-3, 1.0, True))
    assert 8 <= alone.feature_rows < 2000  # rows that can be run by themselves are halved
    assert sharing_of(mlp(4, 3, 2), take_rows(torch.randn(20, 4), None, 8, None), sizes, 2**31, None, None) is None


def test_rows_in_smaller_batches() -> None:
    x, y = torch.arange(20.0).reshape(10, 2), torch.arange(10)
    parts = first_of([(x[:6], y[:6]), (x[6:], y[6:])], 8, 4)
    assert [len(part[0]) for part in parts] == [4, 2, 2]
    assert torch.equal(torch.cat([part[1] for part in parts]), y[:8])


def test_the_monitor_warns_once_and_measures_with_the_same_vectors() -> None:
    model = gpt(30, 24, blocks=1, heads=2, width=24)
    x = torch.randint(0, 30, (12, 24), generator=torch.Generator().manual_seed(0))
    monitor = fl.Monitor(model, (x, x), every=1, budget=None, kernel_samples=8)
    with pytest.warns(UserWarning, match="tangent kernel with 16 random output vectors") as caught:
        first = monitor.step()
    assert len(caught) == 1
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        second = monitor.step()
    assert first is not None
    assert second is not None
    costs = {"monitor.seconds", "monitor.share"}
    assert first.model.keys() - costs > {"ntk.top", "ntk.relative_se"}
    assert 0 < first.model["ntk.relative_se"] < 1
    assert all(second.model[name] == value for name, value in first.model.items() if name not in costs)


def test_an_alignment_from_random_vectors_has_a_standard_error() -> None:
    torch.manual_seed(0)
    model, x = mlp(10, 16, 600), torch.randn(24, 10)
    y = (x[:, 0] > 0).long()
    monitor = fl.Monitor(model, (x, y), measure="ntk", every=1, budget=None, max_memory="8 MB")
    with pytest.warns(UserWarning, match="tangent kernel with 16 random output vectors"):
        measured = monitor.step()
    assert measured is not None
    exact = fl.kernel_target_alignment(fl.ntk(model, x), y)
    error = measured.model["ntk.kta_se"]
    assert 0 < error < 0.05
    assert abs(measured.model["ntk.kta"] - exact) < 4 * error


def test_a_part_that_is_left_out_leaves_the_others() -> None:
    model, x = mlp(10, 32, 3), torch.randn(64, 10)
    monitor = fl.Monitor(model, x, max_memory=15_000, every=1, budget=None)
    with pytest.warns(UserWarning, match="is reduced"):
        result = monitor.step()
    assert result is not None
    assert "w.top" in result.layers["0"]
    assert "nfc" not in result.layers["0"]


SCRIPT = """
import resource, sys, time, warnings
import torch, featlearn as fl
from featlearn.models import gpt
warnings.simplefilter("ignore")
torch.set_num_threads(1)
model = gpt(60, 48, blocks=2, heads=4, width=48)
x, y = torch.randint(0, 60, (64, 48)), torch.randint(0, 60, (64, 48))
model(x).sum().backward()
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
monitor = fl.Monitor(model, (x, y))
assert monitor.step() is not None
print((resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 1024)
"""


def test_a_character_gpt_at_defaults_stays_within_a_gigabyte() -> None:
    """It grew to 20 GB, and the system ended the training."""
    done = run_code(SCRIPT)
    assert done.returncode == 0, done.stderr
    assert float(done.stdout) < 1200
