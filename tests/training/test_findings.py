"""Findings: each fault in a tiny training, their hysteresis, and how they are stored and shown."""

from __future__ import annotations

import copy
import json
import math
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from featlearn.runs import Run
from featlearn.spectra import phase
from featlearn.training import FAULTS, Finding, Findings, Monitor, _signals
from featlearn.training._diagnostician import Diagnostician, Hysteresis
from featlearn.training._label_test import label_p_value
from featlearn.training._layer_rules import Condition
from featlearn.training._loss_history import LossHistory
from featlearn.training._measurement import Snapshot
from featlearn.training._signals import Look
from featlearn.training._weight_signals import Updates

GENERATOR = torch.Generator().manual_seed(0)
X = torch.randn(256, 12, generator=GENERATOR)
Y = (X @ torch.randn(12, 4, generator=GENERATOR)).argmax(1)  # classes that a linear model separates


@pytest.fixture(autouse=True)
def _unlimited(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Looks at every step, whatever they cost."""
    monkeypatch.setattr(_signals, "SHARE", 1e9)


def net(activation: Callable[[], nn.Module] = nn.ReLU, depth: int = 2, width: int = 32) -> nn.Sequential:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        parts: list[nn.Module] = []
        for i in range(depth):
            parts += [nn.Linear(12 if i == 0 else width, width), activation()]
        return nn.Sequential(*parts, nn.Linear(width, 4))


def run(
    model: nn.Module,
    lr: float = 0.1,
    steps: int = 60,
    labels: Tensor = Y,
    skip: nn.Module | None = None,
    change: Callable[[int], None] = lambda step: None,
    loss_factor: float = 1.0,
) -> Monitor:
    left_out = set() if skip is None else {id(p) for p in skip.parameters()}
    trained = [p for p in model.parameters() if p.requires_grad and id(p) not in left_out]
    optimizer = torch.optim.SGD(trained, lr=lr)
    monitor = Monitor(model, (X, labels), measure="weights", every=20, budget=None, kernel_samples=128)
    generator = torch.Generator().manual_seed(1)
    for step in range(steps):
        change(step)
        rows = torch.randint(len(X), (64,), generator=generator)
        loss = F.cross_entropy(model(X[rows]), labels[rows])
        monitor.step(step, loss=loss)
        optimizer.zero_grad()
        (loss_factor * loss).backward()
        optimizer.step()
    monitor.last(steps)
    return monitor


def faults(monitor: Monitor) -> set[tuple[str | None, str]]:
    return {(layer, finding.fault) for layer, of in monitor.findings().items() for finding in of}


def scale(model: nn.Module, factor: float) -> nn.Module:
    with torch.no_grad():
        for module in model.modules():
            if isinstance(module, nn.Linear):
                module.weight.mul_(factor)
    return model


# -- each fault --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("activation", [nn.ReLU, nn.GELU, nn.Tanh])
def test_a_healthy_training_has_no_findings(activation: Callable[[], nn.Module]) -> None:
    monitor = run(net(activation), steps=150)
    assert monitor.series("loss").iloc[-5:].mean() < 0.5
    assert faults(monitor) == set()
    assert str(monitor.findings()) == "no findings"


def test_learning_few_features_is_no_rank_collapse() -> None:
    """A target of one direction makes the weights nearly rank one, beside the bulk of the initialization."""
    y = torch.tanh(2 * X[:, :1])
    model = nn.Sequential(nn.Linear(12, 64), nn.Tanh(), nn.Linear(64, 1))
    with torch.no_grad():
        model[0].weight.mul_(0.03)
    monitor = Monitor(model, (X, y), measure="weights", every=50)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(400):
        loss = F.mse_loss(model(X), y)
        monitor.step(step, loss=loss)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    monitor.last(400)
    assert monitor.latest is not None
    numbers = monitor.latest.layers["0"]
    assert numbers["w.effective_rank"] < 0.2 * numbers["w.initial_effective_rank"]
    assert float(loss.detach()) < 0.1  # of 0.6
    assert faults(monitor) == set()


def test_a_layer_of_rank_one_is_a_rank_collapse() -> None:
    model = net()

    def project(step: int) -> None:
        if step >= 30:
            with torch.no_grad():
                u, s, v = torch.linalg.svd(model[2].weight)
                model[2].weight.copy_(s[0] * u[:, :1] @ v[:1])

    monitor = run(model, steps=40, change=project)
    assert ("2", "rank collapse") in faults(monitor)
    assert ("0", "rank collapse") not in faults(monitor)


def test_dead_units_and_dead_layers() -> None:
    model = net()
    with torch.no_grad():
        model[0].bias[:29] = -100.0
    monitor = run(model, steps=3)
    (finding,) = monitor.findings()["0"]
    assert (finding.fault, finding.severity) == ("dead units", "problem")
    assert "29 of 32 units never fire" in finding.evidence
    with torch.no_grad():
        model[2].bias[:] = -100.0
    monitor = run(model, steps=1)  # certain: one look is enough
    assert ("2", "dead layer") in faults(monitor)
    assert ("0", "dead units") in faults(monitor)


class Scaled(nn.Module):
    """Residual branch with a gain that starts near zero."""

    def __init__(self, gain: float) -> None:
        super().__init__()
        self.branch = nn.Sequential(nn.Linear(12, 32), nn.ReLU(), nn.Linear(32, 12))
        self.gain, self.head = nn.Parameter(torch.full((12,), gain)), nn.Linear(12, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(x + self.gain * self.branch(x))


@pytest.mark.parametrize("gain", [0.0, 1e-6, 1e-5])
@pytest.mark.parametrize("adam", [False, True])
def test_branches_that_start_near_zero_do_not_vanish(gain: float, adam: bool) -> None:
    torch.manual_seed(0)
    model = Scaled(gain)
    optimizer = torch.optim.AdamW(model.parameters(), 1e-3) if adam else torch.optim.SGD(model.parameters(), 0.1)
    monitor = Monitor(model, (X, Y), measure="weights", every=1, budget=None)
    for step in range(20):
        loss = F.cross_entropy(model(X), Y)
        monitor.step(step, loss=loss)
        assert not any(fault == "vanishing gradients" for _, fault in faults(monitor)), step
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()


def test_vanishing_gradients_are_named_at_the_second_look() -> None:
    model = net(nn.Sigmoid, depth=8)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    monitor = Monitor(model, (X, Y), measure="weights", every="log")
    for step in range(4):
        loss = F.cross_entropy(model(X), Y)
        monitor.step(step, loss=loss)
        assert any(fault == "vanishing gradients" for _, fault in faults(monitor)) == (step >= 2), step
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()


def test_vanishing_gradients_begin_after_the_first_steps() -> None:
    monitor = run(net(nn.Sigmoid, depth=8), steps=12)
    assert ("0", "vanishing gradients") in faults(monitor)
    assert ("16", "vanishing gradients") not in faults(monitor)  # the last layer


def test_exploding_gradients_are_not_those_of_a_scaler() -> None:
    monitor = run(scale(net(depth=5), 10.0), lr=0.0, steps=6)
    assert (None, "exploding gradients") in faults(monitor)
    monitor = run(net(), steps=10, lr=0.1 / 65536, loss_factor=65536.0)
    assert (None, "exploding gradients") not in faults(monitor)


def test_a_model_whose_kernels_overflow_is_measured_and_exploding() -> None:
    model = scale(net(depth=6), 3e4)  # outputs of 1e28, whose products are beyond float32
    monitor = Monitor(model, (X, Y), every=1, kernel_samples=32, measure=("weights", "ck"))
    for step in range(2):
        monitor.step(step, loss=1e20)
    assert monitor.latest is not None
    assert "ck.top" in monitor.latest.layers["0"]
    assert "ck.top" not in monitor.latest.layers["12"]
    assert (None, "exploding gradients") in faults(monitor)


def test_divergence_and_a_learning_rate_that_is_too_high() -> None:
    assert (None, "learning rate too high") in faults(run(net(), lr=30.0, steps=24))
    monitor = run(net(), lr=0.3, steps=20, loss_factor=-1.0)
    assert monitor.series("loss").iloc[-1] > 10
    assert (None, "divergence") in faults(monitor)


@pytest.mark.filterwarnings("ignore:Step .* could not be measured")
def test_a_loss_of_nan_is_a_divergence_at_once() -> None:
    model = net()

    def spoil(step: int) -> None:
        if step == 5:
            with torch.no_grad():
                model[0].bias[0] = math.nan

    monitor = run(model, steps=7, change=spoil)
    assert monitor.findings()[None][0].fault == "divergence"
    assert monitor.findings()[None][0].confidence == 1.0


def test_a_learning_rate_that_is_too_low() -> None:
    assert (None, "learning rate too low") in faults(run(net(), lr=1e-5, steps=80))
    assert (None, "learning rate too low") not in faults(run(net(), lr=1e-5, steps=20))  # too early to say


def test_a_warm_up_is_no_learning_rate_that_is_too_low() -> None:
    """Updates that are tiny, and grow with the steps."""
    for rows in (64, 8):  # of each batch: little and much noise
        model = net()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
        monitor = Monitor(model, (X, Y), measure="weights", every="log")
        generator = torch.Generator().manual_seed(1)
        for step in range(200):
            optimizer.param_groups[0]["lr"] = 1e-7 * (step + 1)
            chosen = torch.randint(len(X), (rows,), generator=generator)
            loss = F.cross_entropy(model(X[chosen]), Y[chosen])
            monitor.step(step, loss=loss)
            assert faults(monitor) == set()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()


def test_a_decayed_learning_rate_is_not_too_low() -> None:
    model = net()
    monitor = run(model, steps=80)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-7)
    for step in range(81, 100):
        loss = F.cross_entropy(model(X), Y)
        monitor.step(step, loss=loss)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    assert faults(monitor) == set()


def test_lazy_layers_are_notes() -> None:
    class Scaled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net = net(width=128)
            self._start = [copy.deepcopy(self.net)]

        def forward(self, x: Tensor) -> Tensor:
            return 100.0 * (self.net(x) - self._start[0](x).detach())

    monitor = run(Scaled(), lr=1e-4, steps=150)
    found = [finding for finding in monitor.findings()["net.0"] if finding.fault == "lazy layer"]
    assert found[0].severity == "note"
    assert ("net.4", "lazy layer") not in faults(monitor)  # the output layer


def test_a_rank_collapse() -> None:
    model = net()

    def decay(step: int) -> None:
        with torch.no_grad():
            for p in model.parameters():
                p.mul_(0.9)

    assert ("2", "rank collapse") in faults(run(model, steps=90, change=decay))


def test_shuffled_labels() -> None:
    shuffled = Y[torch.randperm(len(Y), generator=torch.Generator().manual_seed(5))]
    monitor = run(net(), steps=80, labels=shuffled)
    assert (None, "shuffled labels") in faults(monitor)
    assert "p = " in next(f.evidence for f in monitor.findings()[None] if f.fault == "shuffled labels")


def test_a_problem_explains_a_loss_that_does_not_fall() -> None:
    shuffled = Y[torch.randperm(len(Y), generator=torch.Generator().manual_seed(5))]
    model = net()
    with torch.no_grad():
        model[0].bias[:30] = -100.0
    monitor = run(model, steps=80, labels=shuffled)
    assert ("0", "dead units") in faults(monitor)
    assert (None, "shuffled labels") not in faults(monitor)


def test_labels_that_depend_on_the_inputs() -> None:
    assert label_p_value(X[:128], Y[:128]) <= 0.01
    assert label_p_value(X[:128], X[:128, :2].sum(1)) <= 0.01  # real labels
    assert label_p_value(X[:10], Y[:10]) is None
    values = [label_p_value(X[:128], Y[:128][torch.randperm(128, generator=GENERATOR)]) for _ in range(40)]
    # p-values of independent labels are uniform: of 40, 9 or more below 0.1 have a probability of 1%
    assert sum(p <= 0.1 for p in values) <= 8
    assert sum(p > 0.5 for p in values) >= 10


def test_a_layer_that_the_optimizer_does_not_have() -> None:
    model = net()
    monitor = run(model, steps=8, skip=model[2])
    (finding,) = monitor.findings()["2"]
    assert (finding.fault, finding.severity) == ("frozen layer", "problem")
    assert "optimizer" in finding.advice


def test_layers_frozen_on_purpose_are_a_note_at_most() -> None:
    model = net(depth=3)
    model[2].requires_grad_(False)
    monitor = run(model, steps=8)
    (finding,) = monitor.findings()["2"]
    assert finding.severity == "note"
    model = net(depth=3)
    for i in (0, 2, 4):  # fine-tuning of the head
        model[i].requires_grad_(False)
    assert faults(run(model, steps=8)) == set()


def test_saturation() -> None:
    monitor = run(scale(net(nn.Tanh), 30.0), lr=0.0, steps=4)
    assert ("2", "saturation") in faults(monitor)


def test_a_loss_spike_is_noted_and_recorded() -> None:
    monitor = run(net(), steps=60)
    monitor.step(61, loss=100.0)
    assert monitor.series("signal.loss_spike").index.tolist() == [61]
    monitor.step(62, loss=0.3)
    assert (None, "loss spike") in faults(monitor)
    for step in range(63, 71):
        monitor.step(step, loss=0.3)
    assert (None, "loss spike") not in faults(monitor)


# -- hysteresis --------------------------------------------------------------------------------------------------------


def condition(holds: bool, ended: bool, certain: bool = False) -> Condition:
    return Condition("0", Finding("saturation", "warning", 0.8, "evidence", "advice"), holds, ended, certain)


def present_after(states: str) -> str:
    """Return whether a finding is present after each look: + holds, 0 is between the thresholds, - has ended."""
    hysteresis, result = Hysteresis(), ""
    for state in states:
        hysteresis.update([condition(state in "+!", state == "-", state == "!")])
        result += "x" if hysteresis.present() else "."
    return result


@pytest.mark.parametrize(
    ("states", "present"),
    [
        ("++", ".x"), ("+-+-+-", "......"), ("+0+0", "...."), ("!", "x"), ("++0000", ".xxxxx"), ("++-+-+-", ".xxxxxx"),
        ("++--", ".xx."), ("++-0-", ".xxx."), ("++--+", ".xx.."),
    ],
)  # fmt: skip
def test_findings_begin_and_end_after_two_looks(states: str, present: str) -> None:
    if states == "++-0-":  # between the thresholds, the count of ended looks starts anew
        present = ".xxxx"
    assert present_after(states) == present


def test_a_missing_condition_changes_nothing() -> None:
    hysteresis = Hysteresis()
    hysteresis.update([condition(True, False, True)])
    for _ in range(3):
        hysteresis.update([])
    assert hysteresis.present()["0"][0].fault == "saturation"


def test_phases_change_when_two_measurements_agree() -> None:
    generator = torch.Generator().manual_seed(0)
    start = torch.linalg.svdvals(torch.randn(300, 100, generator=generator)) ** 2 / 300
    spiked = start.clone()
    spiked[:2] = torch.tensor([20.0, 15.0])
    phases = {"bulk": phase(start, start), "spikes": phase(start, spiked)}
    assert (phases["bulk"].name, phases["spikes"].name) == ("invariant bulk", "bulk + spikes")
    diagnostician, names = Diagnostician(LossHistory()), []
    for step, kind in enumerate(["bulk", "spikes", "bulk", "spikes", "bulk", "spikes", "spikes", "bulk", "spikes"]):
        snapshot = diagnostician.measured(Snapshot(step, {}, {}, phases={(None, "ntk"): phases[kind]}))
        names.append(snapshot.phases[None, "ntk"].name)
    assert names == ["invariant bulk"] * 6 + ["bulk + spikes"] * 3
    assert "this one alone is invariant bulk" in snapshot.phases[None, "ntk"].reason or names[-1] == "bulk + spikes"


def test_looks_with_little_in_them() -> None:
    """Missing quantities are normal: no rule raises, none names a fault."""
    losses = LossHistory()
    diagnostician = Diagnostician(losses)
    for step in range(60):
        look = Look(step, step)
        if step % 2:
            look.updates = {"0": Updates(math.nan, math.nan, math.nan)}
            look.gradients = {"0": 0.0}
        if step % 3 == 0:
            losses.add(-1.0)  # a loss that can be negative
        diagnostician.look(look)
    assert diagnostician.findings() == {}


# -- stored and shown --------------------------------------------------------------------------------------------------


def test_findings_are_stored_when_they_begin_change_and_end(tmp_path: Path) -> None:
    model = net()
    with torch.no_grad():
        model[0].bias[:29] = -100.0
    with Monitor(model, (X, Y), run=tmp_path / "run", measure="weights", every=[0, 4, 8]) as monitor:
        for step in range(9):
            monitor.step(step)
            if step == 5:
                with torch.no_grad():
                    model[0].bias.zero_()
        assert monitor.latest is not None
        assert not any(monitor.latest.findings.values())
    texts = Run.open(tmp_path / "run").texts("findings", layers="0")
    stored = dict(zip(texts["step"], texts["value"].map(json.loads), strict=True))
    assert stored[0][0].keys() == {"fault", "severity", "confidence", "evidence", "advice"}
    assert stored[4][0]["fault"] == "dead units"
    ends = [step for step, value in stored.items() if value == []]
    assert len(ends) == 1  # not stored again
    assert max(stored) == ends[0] > 6  # at the second look without it


def test_findings_print_and_make_a_table() -> None:
    findings = Findings(
        {
            "net.0": [Finding("lazy layer", "note", 0.8, "it moved by 1%", "raise the learning rate")],
            None: [Finding("divergence", "problem", 1.0, "the loss is NaN", "stop")],
            "net.2": [],
        }
    )
    lines = str(findings).splitlines()
    assert lines[0] == "model  problem: divergence (100%): the loss is NaN"
    assert lines[1] == "       Advice: stop."
    assert lines[2].startswith("net.0  note: lazy layer (80%)")
    assert len(lines) == 4
    assert findings.table()["fault"].tolist() == ["lazy layer", "divergence"]
    assert json.loads(findings.texts()["net.2"]) == []
    assert all(name == name.lower() for name in FAULTS)


def test_a_monitor_does_not_warn_of_findings() -> None:
    """Warnings are errors in tests, so a training with findings that ends shows it."""
    model = net()
    with torch.no_grad():
        model[2].bias[:] = -100.0
    monitor = run(model, steps=10)
    assert ("2", "dead layer") in faults(monitor)
    assert monitor.latest is not None
    assert monitor.latest.readings["2"].word == "collapsed"
    assert monitor.latest.findings["2"][0].fault == "dead layer"
