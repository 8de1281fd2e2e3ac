"""The monitor: what it records is what a probe and the spectra say, and training does not notice it."""

from __future__ import annotations

import copy
import math
import random
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
from torch import Tensor, nn

import featlearn as fl
from cases import CASES, Case, call, target
from featlearn.errors import InputError
from featlearn.runs import Run
from featlearn.training import PARTS, Monitor

X = torch.randn(60, 6, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
Y = (X[:, :1] * X[:, 1:2]).sin()


def net(seed: int = 0, dropout: float = 0.0, norm: bool = False, width: int = 60) -> nn.Sequential:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        parts: list[nn.Module] = [nn.Linear(6, width), nn.BatchNorm1d(width) if norm else nn.Identity(), nn.ReLU()]
        return nn.Sequential(
            *parts, nn.Dropout(dropout), nn.Linear(width, width), nn.Tanh(), nn.Linear(width, 1)
        ).double()


def train(model: nn.Module, monitor: Monitor | None, steps: int = 6, forward: Any = None) -> list[float]:
    """A loop that uses every global generator."""
    torch.manual_seed(3), random.seed(3), np.random.seed(3)  # noqa: NPY002
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    losses = []
    for step in range(steps):
        rows = torch.randperm(len(X))[:40]
        noise = random.random() + np.random.rand()  # noqa: NPY002
        loss = ((model(X[rows]) - Y[rows]) ** 2).mean() * (1 + 0.01 * noise)
        if monitor is not None:
            monitor.step(step, loss=loss.detach())
        optimizer.zero_grad()
        loss.backward()
        if monitor is not None and step == 2:  # between backward and step: gradients must stay
            monitor.measure(step)
        optimizer.step()
        losses.append(float(loss.detach()))
    return losses


# -- training does not notice ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("options", [{}, {"dropout": 0.3}, {"norm": True}])
def test_the_trained_weights_are_the_same_to_the_bit(options: dict[str, Any]) -> None:
    plain, watched = net(**options), net(**options)
    losses = train(plain, None)
    loader = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(X, Y), batch_size=16, shuffle=True)
    monitor = Monitor(watched, loader, every=1, budget=None, matrices=["agop", "ck", "ntk"], kernel_samples=20)
    assert train(watched, monitor) == losses
    for name, value in plain.state_dict().items():
        assert torch.equal(value, watched.state_dict()[name]), name
    assert len(monitor.series("nfc", "0")) == 7
    assert watched.training
    assert not any(module._forward_hooks for module in watched.modules())


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_every_kind_of_model_trains_on_unchanged(case: Case) -> None:
    def trained(watch: bool) -> dict[str, Tensor]:
        model, batch = case.make(), case.batch()
        optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad] or [torch.zeros(1)], lr=0.01)
        monitor = Monitor(model, batch, every=1, budget=None, forward=case.forward, kernel_samples=4) if watch else None
        torch.manual_seed(0)
        for step in range(3):
            optimizer.zero_grad()
            loss = case.loss(call(case, model, batch), target(batch)).mean()
            if loss.requires_grad:
                loss.backward()
            if monitor is not None:
                monitor.step(step, loss=loss.detach())
            optimizer.step()
        if monitor is not None:
            assert monitor.latest is not None
            assert set(monitor.latest.layers) == set(case.layers)
            assert set(monitor.latest.readings) == set(case.layers)
        return {k: v.clone() for k, v in model.state_dict().items()}

    plain, watched = trained(False), trained(True)
    for name, value in plain.items():
        assert torch.equal(value, watched[name]), name


# -- what is recorded --------------------------------------------------------------------------------------------------


def test_numbers_are_those_of_a_probe_and_of_the_spectra() -> None:
    model = net(width=64)
    initial = copy.deepcopy(model)
    loss = nn.MSELoss()
    monitor = Monitor(
        model, (X, Y), every=[5], loss=loss, weight_decay=0.01, directions={"0": torch.eye(6, 2)}, kernel_samples=50
    )
    train(model, monitor, 5)
    result = monitor.measure(5)
    assert result is not None
    report = fl.probe(model, (X, Y), initial=initial, loss=loss, weight_decay=0.01, train_mode="eval")
    table = report.table("all")
    for layer in report:
        for column in table.columns.drop(["kind", "shape", "flags"]):
            assert result.layers[layer][column] == pytest.approx(table.loc[layer, column], rel=1e-9, nan_ok=True)
    w0, w = initial[4].weight.detach(), model[4].weight.detach()
    phase = fl.spectra.phase(torch.linalg.svdvals(w0) ** 2 / 64, torch.linalg.svdvals(w) ** 2 / 64)
    numbers = result.layers["4"]
    assert result.phases["4", "w"].name == phase.name
    assert numbers["w.top"] == pytest.approx(float(torch.linalg.matrix_norm(w, 2)) ** 2 / 64)
    assert numbers["w.edge"] == pytest.approx(phase.evidence.trained_edge.edge, rel=1e-6)
    assert numbers["w.spikes"] == len(phase.evidence.spikes)
    assert numbers["w.alpha"] == pytest.approx(phase.evidence.tail.fit.alpha, rel=1e-6)
    assert numbers["w.effective_rank"] == pytest.approx(phase.evidence.effective_ranks[1], rel=1e-6)
    change = fl.spectra.change_norms(w0, w)
    assert numbers["weight_change_operator"] == pytest.approx(change.relative_operator)
    ck, ntk = fl.ck(model, X[:50], layer="4"), fl.ntk(model, X[:50])
    assert numbers["ck.kta"] == pytest.approx(fl.kernel_target_alignment(ck, Y[:50]))
    assert numbers["ck.top"] == pytest.approx(float(torch.linalg.eigvalsh(ck)[-1]))
    assert result.model["ntk.kta"] == pytest.approx(fl.kernel_target_alignment(ntk, Y[:50]))
    assert result.model["ntk.stable_rank"] == pytest.approx(fl.spectra.stable_rank(torch.linalg.eigvalsh(ntk)))
    leading = fl.spectra.leading_alignment(model[0].weight.detach(), torch.eye(6, 2), k=2)
    assert result.layers["0"]["alignment"] == pytest.approx(float(leading.projections.min()), abs=1e-7)


def test_the_start_is_untrained_and_the_weights_kept_are_the_first_ones() -> None:
    model = net()
    monitor = Monitor(model, (X, Y), every=3, budget=None, kernel_samples=10)
    train(model, monitor, 4)
    assert monitor.series("weight_change", "0").to_list()[0] == 0.0
    assert monitor.series("weight_change", "0").to_list()[-1] > 0.01
    assert monitor._recorder.snapshots[0].readings["0"].word == "untrained"


@pytest.mark.parametrize("part", PARTS)
def test_parts_are_measured_alone(part: str) -> None:
    model = net()
    monitor = Monitor(model, (X, Y), budget=None, measure=part, kernel_samples=10)
    result = monitor.step(0)
    assert result is not None
    names = {name for numbers in result.layers.values() for name in numbers} | set(result.model)
    prefix = {"features": ("nfc", "centered_nfc"), "weights": ("w.top",), "ck": ("ck.top",), "ntk": ("ntk.top",)}
    for other, wanted in prefix.items():
        assert all((name in names) == (other == part) for name in wanted)


def test_a_run_holds_numbers_words_matrices_and_the_start(tmp_path) -> None:
    model = net()
    first = copy.deepcopy(model.state_dict())
    options = {"every": 2, "budget": None, "matrices": ["nfm", "ck"], "kernel_samples": 12}
    with Monitor(model, (X, Y), run=tmp_path / "run", **options) as monitor:
        train(model, monitor, 5)
        kept = monitor.latest
    run = Run.open(tmp_path / "run")
    assert run.status == "finished"
    assert run.series("nfc", "4").index.tolist() == [0, 2, 4]
    assert run.series("nfc", "4").iloc[-1] == kept.layers["4"]["nfc"]
    assert run.series("loss").index.tolist() == [0, 1, 2, 3, 4]
    words = run.texts("reading", layers="4")["value"].to_list()
    assert words[0] == "untrained"
    assert words[-1] == kept.readings["4"].word
    noted = {layer.name: [layer.kind, list(layer.shape[1:])] for layer in fl.layers.find_layers(model)}
    assert run.note("layers") == noted  # kinds and shapes, which the dashboard shows
    assert run.series("monitor.seconds").gt(0).all()
    assert run.matrix_steps() == [0, 2, 4]
    assert torch.equal(run.matrices(4)["4/nfm"], kept.matrices["4/nfm"])
    assert run.matrices(0)["0/ck"].shape == (12, 12)
    # Opened again, centered quantities are still measured against the first start.
    again = Monitor(model, (X, Y), run=tmp_path / "run", resume=True, every=1, budget=None, measure="features")
    result = again.step(5)
    again.close()
    wanted = fl.probe(model, (X, Y), initial=first, train_mode="eval")
    assert result.layers["4"]["centered_nfc"] == pytest.approx(wanted["4"].centered_nfc, rel=1e-9)
    assert result.layers["4"]["weight_change"] > 0


def test_settings_go_to_the_run_that_the_monitor_makes(tmp_path) -> None:
    with Monitor(net(), (X, Y), run=tmp_path / "run", config={"lr": 0.1}, budget=None, measure="weights"):
        pass
    run = Run.open(tmp_path / "run")
    assert (run.config, run.status) == ({"lr": 0.1}, "finished")
    with Run.create(tmp_path / "own", {"lr": 0.2}) as alone, pytest.raises(InputError, match="Pass a folder as run"):
        Monitor(net(), (X, Y), run=alone, config={"lr": 0.1})
    with pytest.raises(InputError, match="Pass a folder as run"):
        Monitor(net(), (X, Y), config={"lr": 0.1})


def test_spectra_are_kept_unless_they_are_not_wanted(tmp_path) -> None:
    model = net(width=16)
    with Monitor(model, (X, Y), run=tmp_path / "run", every=2, budget=None, kernel_samples=12) as monitor:
        train(model, monitor, 3)
    kept = Run.open(tmp_path / "run").matrices(2)
    layers = ("0", "4", "6")
    names = [f"{layer}/{kind}.eigenvalues" for kind in ("w", "ck") for layer in layers]
    assert sorted(kept) == sorted([*names, "ntk.eigenvalues"])
    weight = model[4].weight.detach()
    torch.testing.assert_close(monitor.latest.matrices["4/w.eigenvalues"], kept["4/w.eigenvalues"], rtol=0, atol=0)
    assert kept["4/w.eigenvalues"].max() == pytest.approx(monitor.latest.layers["4"]["w.top"])
    assert kept["4/w.eigenvalues"].shape == (min(weight.shape),)
    assert kept["ntk.eigenvalues"].shape == kept["0/ck.eigenvalues"].shape == (12,)
    assert Monitor(model, (X, Y), matrices=(), kernel_samples=12).measure(0).matrices == {}
    assert set(Monitor(model, (X, Y), matrices="ck", kernel_samples=12).measure(0).matrices) == {
        f"{layer}/ck" for layer in layers
    }


def test_a_run_in_the_place_of_one_that_was_removed_has_its_own_start(tmp_path) -> None:
    for seed in range(2):
        with Monitor(net(seed), (X, Y), run=tmp_path / "run", budget=None, measure="features") as monitor:
            monitor.step(0)
        assert monitor.series("weight_change", "0").to_list() == [0.0]
        fl.runs.remove(tmp_path / "run")
        assert not (tmp_path / "run").exists()


def test_frames_series_and_picture() -> None:
    model = net()
    monitor = Monitor(model, (X, Y), every=2, budget=None, kernel_samples=10)
    losses = train(model, monitor, 5)
    assert monitor.series("loss").to_list() == losses
    frame = monitor.metrics()
    assert list(frame.columns) == ["step", "layer", "name", "value"]
    assert frame["step"].is_monotonic_increasing
    table = monitor.latest.table(["nfc", "weight_change"])
    assert list(table.columns) == ["nfc", "weight_change", "reading"]
    assert isinstance(monitor.latest.table(), pd.DataFrame)
    assert sum(ax.axison for ax in monitor.plot().axes) == 6
    with pytest.raises(InputError, match="not recorded: beauty"):
        monitor.plot(["beauty"])
    with pytest.raises(InputError, match="nothing was recorded for"):
        monitor.series("nfc")
    with pytest.raises(InputError, match="not measured: beauty"):
        monitor.latest.table(["beauty"])


# -- when --------------------------------------------------------------------------------------------------------------


def test_steps_are_counted_or_told_and_measured_once() -> None:
    monitor = Monitor(net(), (X, Y), every=3, budget=None, measure="weights")
    made = [monitor.step() is not None for _ in range(7)]
    assert made == [True, False, False, True, False, False, True]
    assert monitor.step(9) is not None
    assert monitor.step(9) is None  # gradient accumulation: the same step again
    assert monitor.step(11) is None
    assert monitor.last() is not None
    assert monitor.latest.step == 12


def test_a_budget_that_is_used_up_measures_no_more() -> None:
    monitor = Monitor(net(), (X, Y), every=1, budget=1e-9, measure="weights")
    assert monitor.step(0) is not None
    assert all(monitor.step(step) is None for step in range(1, 20))
    assert monitor.budget.spent > 0
    generous = Monitor(net(), (X, Y), every=1, budget=1e9, measure="weights")
    assert all(generous.step(step) is not None for step in range(5))


# -- models and precisions ---------------------------------------------------------------------------------------------


def test_compiled_models_and_autocast() -> None:
    model = net().float()
    compiled = torch.compile(model, backend="eager")
    x, y = X.float(), Y.float()
    monitor = Monitor(compiled, (x, y), every=1, budget=None, kernel_samples=10)
    optimizer = torch.optim.SGD(compiled.parameters(), lr=0.1)
    for step in range(3):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            loss = ((compiled(x) - y) ** 2).mean()
            monitor.step(step, loss=loss)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    assert list(monitor.latest.layers) == ["0", "4", "6"]
    assert math.isfinite(monitor.latest.layers["0"]["nfc"])


# -- trouble -----------------------------------------------------------------------------------------------------------


def test_a_measurement_that_fails_does_not_end_the_training(tmp_path) -> None:
    model = net()
    monitor = Monitor(model, (X, Y), run=tmp_path / "run", every=1, budget=None, measure="features")
    monitor.step(0)
    weight = model[0].weight.detach().clone()
    with torch.no_grad():
        model[0].weight[0, 0] = math.nan
    with pytest.warns(UserWarning, match="Step 1 could not be measured; training continues: .*NaN"):
        assert monitor.step(1, loss=1.0) is None
    with torch.no_grad():
        model[0].weight.copy_(weight)
    assert monitor.step(2) is not None
    monitor.close()
    assert Run.open(tmp_path / "run").series("nfc", "0").index.tolist() == [0, 2]
    strict = Monitor(model, (X, Y), every=1, budget=None, measure="features", on_error="raise")
    strict.step(0)
    with torch.no_grad():
        model[0].weight[0, 0] = math.nan
    with pytest.raises(InputError, match="NaN"):
        strict.step(1)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"measure": "beauty"}, "measure must be one or more of features"),
        ({"measure": []}, "measure must be one or more of features"),
        ({"every": 0}, "every must be a number of steps of at least 1.*got 0"),
        ({"budget": 0}, "budget must be a share"),
        ({"samples": 0}, "samples must be at least 1"),
        ({"kernel_samples": 1}, "kernel_samples must be at least 2"),
        ({"directions": {"9": torch.ones(6)}}, "directions must name layers .*got '9'"),
        ({"directions": {"0": torch.ones(5)}}, r"must have shape \(6,\) or \(6, q\)"),
        ({"on_error": "ignore"}, "on_error must be"),
        ({"layers": "encoder.*"}, "matches no layer"),
        ({"initial": {"weight": torch.ones(1)}}, "another architecture"),
    ],
)
def test_bad_arguments(options: dict[str, Any], words: str) -> None:
    with pytest.raises(InputError, match=words):
        Monitor(net(), (X, Y), **options)


def test_bad_model_data_and_step() -> None:
    with pytest.raises(InputError, match=r"must be a torch\.nn\.Module"):
        Monitor("model", (X, Y))  # type: ignore[arg-type]
    with pytest.raises(InputError, match="empty"):
        Monitor(net(), [])
    monitor = Monitor(net(), (X, Y), budget=None, measure="weights")
    with pytest.raises(InputError, match="step must be an integer from 0"):
        monitor.step(-1)
    for wrong in ("much", torch.ones(2), None):
        with pytest.raises(InputError, match="loss must be a number"):
            monitor.step(0, loss=wrong)


def test_alignment_with_classes_is_centered_and_one_class_has_none() -> None:
    model = nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 3)).double()
    classes = torch.arange(len(X)) % 3
    result = Monitor(model, (X, classes), measure=["ck", "ntk"], kernel_samples=20, budget=None).step(0)
    kernel = fl.ntk(model, X[:20])
    assert result.model["ntk.kta"] == pytest.approx(fl.kernel_target_alignment(kernel, classes[:20], center=True))
    assert result.model["ntk.kta"] < fl.kernel_target_alignment(kernel, classes[:20], center=False) - 0.1
    assert "ck.kta" in result.layers["2"]
    for one in (torch.zeros_like(classes), torch.full_like(classes, 2), torch.ones(len(X), dtype=torch.bool)):
        result = Monitor(model, (X, one), measure=["ck", "ntk"], kernel_samples=20, budget=None).step(0)
        assert "ntk.kta" not in result.model
        assert "ntk.top" in result.model
        assert "ck.kta" not in result.layers["2"]
