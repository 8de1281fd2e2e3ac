"""Signals against naive computations, in every order of a training loop, and without a trace in the model."""

from __future__ import annotations

import copy
import gc
import math
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from featlearn.capture import ModelSession
from featlearn.layers import find_layers
from featlearn.training import Monitor, _signals
from featlearn.training._activation_signals import look_at_activations
from featlearn.training._loss_history import LossHistory
from featlearn.training._probe_data import take_rows
from featlearn.training._signals import SHARE, Signals
from featlearn.training._weight_signals import WeightSignals

X = torch.randn(64, 6, generator=torch.Generator().manual_seed(0))
Y = torch.randint(3, (64,), generator=torch.Generator().manual_seed(1))


def net(*middle: nn.Module, seed: int = 0) -> nn.Sequential:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return nn.Sequential(nn.Linear(6, 8), *(middle or (nn.ReLU(),)), nn.Linear(8, 3))


def layers_of(model: nn.Module) -> dict[str, Any]:
    return {layer.name: layer for layer in find_layers(model)}


def look_at(model: nn.Module, x: Any = X, **options: Any) -> Any:
    session = ModelSession(model, train_mode="eval", operations=True, **options)
    return look_at_activations(session, layers_of(model), [x])


@pytest.fixture
def unlimited(monkeypatch: pytest.MonkeyPatch) -> None:
    """Looks at every step, whatever they cost."""
    monkeypatch.setattr(_signals, "SHARE", 1e9)


def watch(model: nn.Module, **options: Any) -> Monitor:
    return Monitor(model, (X, Y), measure="weights", every=options.pop("every", 1), **options)


def optimizer_of(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1)


# -- gradients ---------------------------------------------------------------------------------------------------------


def run_loop(order: str, model: nn.Module, monitor: Monitor | None, steps: int = 5) -> list[dict[str, Tensor]]:
    """Train with one order of the calls, and return the gradients of each step."""
    optimizer, gradients = optimizer_of(model), []

    def call(step: int) -> None:
        if monitor is not None:
            monitor.step(step, loss=1.0)

    for step in range(steps):
        x, y = X[8 * step : 8 * step + 16], Y[8 * step : 8 * step + 16]
        if order == "first":  # the gradients of the step before are there
            call(step)
        optimizer.zero_grad(set_to_none=order != "zeros")
        if order in ("after zero_grad", "zeros", "accumulated"):
            call(step)
        for part in (slice(8), slice(8, 16)) if order == "accumulated" else (slice(16),):
            F.cross_entropy(model(x[part]), y[part]).backward()
        gradients.append({n: p.grad.double().clone() for n, p in model.named_parameters()})
        if order == "before step":
            call(step)
        optimizer.step()
        if order == "after step":
            call(step)
        if order == "trainer":
            optimizer.zero_grad()
            call(step)
    return gradients


@pytest.mark.parametrize(
    ("order", "lag"),
    [
        ("first", 1), ("after zero_grad", 1), ("zeros", 1), ("accumulated", 1), ("before step", 0), ("after step", 0),
        ("trainer", 0),
    ],
)  # fmt: skip
@pytest.mark.usefixtures("unlimited")
def test_gradient_norms_in_every_order_of_the_loop(order: str, lag: int) -> None:
    model = net()
    monitor = watch(model)
    gradients = run_loop(order, model, monitor)
    for name, layer in (("0.weight", "0"), ("2.weight", "2")):
        series = monitor.series("signal.gradient_norm", layer)
        # float32 norms of 48 entries; the trainer's first call is prepared by no other one
        assert len(series) >= 4 - lag
        for step, value in series.items():
            assert value == pytest.approx(float(gradients[step - lag][name].norm()), rel=1e-5)
    total = monitor.series("signal.gradient_norm")
    expected = math.sqrt(sum(float(g.square().sum()) for g in gradients[total.index[-1] - lag].values()))
    assert total.iloc[-1] == pytest.approx(expected, rel=1e-5)


@pytest.mark.parametrize("order", ["first", "after zero_grad", "trainer", "accumulated"])
@pytest.mark.usefixtures("unlimited")
def test_training_is_the_same_to_the_bit_and_no_hook_is_left(order: str) -> None:
    plain, watched = net(nn.Dropout(0.5), nn.ReLU()), net(nn.Dropout(0.5), nn.ReLU())
    torch.manual_seed(0)
    run_loop(order, plain, None, 8)
    torch.manual_seed(0)
    monitor = watch(watched)
    run_loop(order, watched, monitor, 8)
    state = torch.get_rng_state()
    monitor.last(8)
    monitor.close()
    assert torch.equal(state, torch.get_rng_state())
    for name, value in plain.state_dict().items():
        assert torch.equal(value, watched.state_dict()[name])
    assert watched.training
    for module in watched.modules():
        assert not module._forward_hooks
        assert not module._forward_pre_hooks
    assert not any(p._post_accumulate_grad_hooks for p in watched.parameters())
    for mine, own in zip(plain.parameters(), watched.parameters(), strict=True):
        assert (mine.grad is None) == (own.grad is None)


def test_hooks_are_removed_when_a_monitor_is_deleted() -> None:
    model = net()
    monitor = watch(model)
    monitor.step(0)
    assert any(p._post_accumulate_grad_hooks for p in model.parameters())  # no gradients were there
    del monitor
    gc.collect()
    assert not any(p._post_accumulate_grad_hooks for p in model.parameters())


def test_hooks_are_removed_when_the_time_does_not_allow_the_look() -> None:
    model, clock = net(), Clock()
    layers = lambda: (layers_of(model), layers_of(model))  # noqa: E731
    signals = Signals(
        model, layers, take_rows((X, Y), 64, 8, None), None, due=lambda step: step == 4, clock=clock, free_seconds=0.5
    )
    clock.cost = 0.1  # more than 1% of what follows
    for step in range(4):
        signals.step(step)
    assert any(p._post_accumulate_grad_hooks for p in model.parameters())
    with signals.paying():
        clock.now += 1e6
    assert signals.step(4) is None
    assert not any(p._post_accumulate_grad_hooks for p in model.parameters())


def test_gradients_of_a_scaler_keep_their_ratios() -> None:
    norms = []
    for scale in (1.0, 65536.0):
        model = net()
        (scale * F.cross_entropy(model(X), Y)).backward()
        signals = WeightSignals(layers_of(model), layers_of(model), model)
        norms.append(signals.gradient_norms()[0])
    assert norms[1]["0"] / norms[1]["2"] == pytest.approx(norms[0]["0"] / norms[0]["2"], rel=1e-5)


def test_gradients_of_parts_tied_complex_and_sparse_parameters() -> None:
    attention = nn.MultiheadAttention(4, 2)
    x = torch.randn(5, 3, 4, generator=torch.Generator().manual_seed(2))
    attention(x, x, x)[0].square().sum().backward()
    norms, _ = WeightSignals(layers_of(attention), layers_of(attention), attention).gradient_norms()
    assert norms["q"] == pytest.approx(float(attention.in_proj_weight.grad[:4].norm()), rel=1e-5)
    assert norms["v"] == pytest.approx(float(attention.in_proj_weight.grad[8:].norm()), rel=1e-5)
    tied = nn.Sequential(nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 6))
    tied[2].weight = tied[0].weight
    tied(X).square().sum().backward()
    norms, total = WeightSignals(layers_of(tied), layers_of(tied), tied).gradient_norms()
    assert norms["0"] == norms["2"] == pytest.approx(float(tied[0].weight.grad.norm()), rel=1e-5)
    complex_ = nn.Sequential(nn.Linear(3, 2, dtype=torch.complex64))
    complex_(torch.ones(4, 3, dtype=torch.complex64)).abs().sum().backward()
    norms, _ = WeightSignals(layers_of(complex_), layers_of(complex_), complex_).gradient_norms()
    assert norms["0"] == pytest.approx(float(complex_[0].weight.grad.abs().square().sum().sqrt()), rel=1e-5)
    embedding = nn.Sequential(nn.Embedding(9, 4, sparse=True), nn.Linear(4, 2))
    embedding(torch.arange(5)).sum().backward()
    _, total = WeightSignals(layers_of(embedding), layers_of(embedding), embedding).gradient_norms()
    dense = [p.grad.to_dense() for p in embedding.parameters()]
    assert total == pytest.approx(math.sqrt(sum(float(g.square().sum()) for g in dense)), rel=1e-5)


# -- updates -----------------------------------------------------------------------------------------------------------


def test_updates_are_those_between_two_calls() -> None:
    model = net()
    first = copy.deepcopy(model)
    signals = WeightSignals(layers_of(model), layers_of(first), model)
    weights = [model[0].weight.detach().double().clone()]
    generator = torch.Generator().manual_seed(3)
    for call in range(3):
        signals.take_sample(call)
        if call < 2:
            with torch.no_grad():
                model[0].weight.add_(0.01 * torch.randn(8, 6, generator=generator))
            weights.append(model[0].weight.detach().double().clone())
    a, b = weights[1] - weights[0], weights[2] - weights[1]
    update = signals.updates()["0"]  # all 48 entries are in the sample
    assert update.ratio == pytest.approx(float(b.norm() / weights[1].norm()), rel=1e-6)
    assert update.cosine == pytest.approx(float((a * b).sum() / a.norm() / b.norm()), rel=1e-6)
    assert update.moved == pytest.approx(float((weights[2] - weights[0]).norm() / weights[0].norm()), rel=1e-6)
    assert signals.updates()["2"].ratio == 0.0
    signals.take_sample(7)  # not the call after the last one
    assert math.isnan(signals.updates()["0"].ratio)
    assert signals.updates()["0"].moved == update.moved


def test_a_call_without_an_update_has_no_ratio() -> None:
    model = net()
    signals = WeightSignals(layers_of(model), layers_of(model), model)
    for call in range(2):
        signals.take_sample(call)
    assert all(math.isnan(update.ratio) and update.moved == 0.0 for update in signals.updates().values())


def test_large_weights_are_sampled() -> None:
    model = nn.Sequential(nn.Linear(512, 1024, bias=False))
    first = copy.deepcopy(model)
    signals = WeightSignals(layers_of(model), layers_of(first), model)
    signals.take_sample(0)
    with torch.no_grad():
        model[0].weight.add_(1e-3 * torch.randn(1024, 512, generator=torch.Generator().manual_seed(0)))
    signals.take_sample(1)
    assert all(len(sample) < 9000 for _, of in signals._samples for sample in of.values())
    before = first[0].weight.detach()
    exact = float((model[0].weight.detach() - before).norm() / before.norm())
    # 4096 entries of a random matrix: the relative error of a norm is about 1 / sqrt(2 * 4096) = 1.1%
    assert signals.updates()["0"].ratio == pytest.approx(exact, rel=0.05)


# -- activations -------------------------------------------------------------------------------------------------------


class Custom(nn.Module):
    """Activations that are functions, of several kinds."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.a, self.b, self.kind = nn.Linear(6, 8), nn.Linear(8, 3), kind

    def forward(self, x: Tensor) -> Any:
        h = self.a(x)
        kinds = {
            "function": F.relu, "torch": torch.relu, "method": Tensor.relu, "in place": torch.relu_,
            "clamp": lambda h: h.clamp(min=0), "where": lambda h: torch.where(h > 0, h, 0.0),
            "product": lambda h: h * (h > 0),
        }  # fmt: skip
        out = self.b(kinds[self.kind](h) if self.kind in kinds else F.relu(h))
        return {"logits": out, "loss": out.sum()} if self.kind == "dict" else out


@pytest.mark.parametrize(
    "kind", ["function", "torch", "method", "in place", "clamp", "where", "product", "dict"]
)  # fmt: skip
def test_dead_units_of_functional_activations(kind: str) -> None:
    model = Custom(kind)
    with torch.no_grad():
        model.a.bias[:5] = -100.0
    look = look_at(model)
    h = F.linear(X.double(), model.a.weight.detach().double(), model.a.bias.detach().double())
    assert look.layers["a"].dead == int((F.relu(h).amax(0) == 0).sum()) >= 5
    assert look.layers["a"].scale == pytest.approx(float(h.square().mean().sqrt()), rel=1e-6)
    covariance = torch.cov(h.T)
    assert look.layers["a"].rank == pytest.approx(float(covariance.trace() ** 2 / covariance.square().sum()), rel=1e-4)
    assert look.outputs == {"b"}
    assert look.layers["b"].dead is None


@pytest.mark.parametrize(
    ("activation", "shift", "dead"),
    [
        (nn.ReLU(), -100.0, 8), (nn.GELU(), -100.0, 8), (nn.SiLU(), -200.0, 8), (nn.ReLU6(), -100.0, 8),
        (nn.LeakyReLU(), -100.0, 0), (nn.ELU(), -100.0, 0), (nn.Softplus(), 0.0, 0), (nn.GELU(), -1.0, 0),
        (nn.ReLU(inplace=True), -100.0, 8),
    ],
)  # fmt: skip
def test_units_with_a_small_slope_are_not_dead(activation: nn.Module, shift: float, dead: int) -> None:
    model = net(activation)
    with torch.no_grad():
        model[0].bias.fill_(shift)
    assert look_at(model).layers["0"].dead == dead


@pytest.mark.parametrize(("activation", "limit"), [(nn.Tanh(), 0.99), (nn.Sigmoid(), 0.98), (nn.Hardtanh(), 0.99)])
def test_saturated_units(activation: nn.Module, limit: float) -> None:
    for scale in (1.0, 4.0, 60.0):
        model = net(activation)
        with torch.no_grad():
            model[0].weight.mul_(scale)
        values = activation(model[0](X).double())
        values = 2 * values - 1 if isinstance(activation, nn.Sigmoid) else values
        expected = int(((values.abs() >= limit).double().mean(0) >= 0.5).sum())
        units = look_at(model).layers["0"]
        assert units.saturated == expected
        assert units.dead is None
    assert expected == 8


def test_units_of_convolutions_norms_and_layers_that_are_called_twice() -> None:
    conv = nn.Sequential(
        nn.Conv2d(2, 6, 3, padding=1), nn.BatchNorm2d(6), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(), nn.Linear(24, 3)
    )
    with torch.no_grad():
        conv[1].bias[:4] = -50.0
    x = torch.randn(16, 2, 4, 4, generator=torch.Generator().manual_seed(0))
    look = look_at(conv, x)
    assert look.layers["0"].units == 6
    assert look.layers["0"].dead == 4
    assert conv[1].training
    assert conv[1].num_batches_tracked == 0

    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a = nn.Linear(6, 6, bias=False)

        def forward(self, x: Tensor) -> Tensor:
            return F.relu(self.a(-F.relu(self.a(x))))

    model = Twice()
    units = look_at(model).layers["a"]
    inner = F.relu(model.a(X))
    both = torch.cat([inner, F.relu(model.a(-inner))])
    assert units.dead == int((both.amax(0) == 0).sum())


@pytest.mark.usefixtures("unlimited")
@pytest.mark.parametrize(
    "model",
    [
        nn.TransformerEncoderLayer(8, 2, 16, batch_first=True, dropout=0.0),
        nn.DataParallel(net()),
        nn.Sequential(nn.Linear(6, 8, dtype=torch.bfloat16), nn.ReLU(), nn.Linear(8, 1, dtype=torch.bfloat16)),
        nn.Sequential(nn.LSTM(6, 4)),
    ],
    ids=["transformer", "wrapped", "bfloat16", "recurrent"],
)
def test_hostile_models(model: nn.Module) -> None:
    x = torch.randn(40, 5, 8) if isinstance(model, nn.TransformerEncoderLayer) else X
    if isinstance(model, nn.Sequential) and isinstance(model[0], nn.LSTM):
        model.append(Last())
    monitor = Monitor(model, x.bfloat16() if next(model.parameters()).dtype == torch.bfloat16 else x, measure="weights")
    monitor.step(0, loss=1.0)
    inner = model.module if isinstance(model, nn.DataParallel) else model
    if not isinstance(inner[0] if isinstance(inner, nn.Sequential) else None, nn.LSTM):  # has no known outputs
        assert (monitor.metrics()["name"] == "signal.activation_scale").any()
    assert not any(m._forward_hooks for m in inner.modules())


class Last(nn.Module):
    """Output of a recurrent layer."""

    def forward(self, result: Any) -> Tensor:
        return result[0]


def test_a_model_without_layers_or_parameters() -> None:
    signals = Signals(nn.Sequential(nn.ReLU()), lambda: ({}, {}), take_rows((X, Y), 64, 8, None), None)
    look = signals.step(0)
    assert look is not None
    assert look.table() == {}


@pytest.mark.usefixtures("unlimited")
def test_a_model_that_raises_warns_once() -> None:
    model = net()
    monitor = watch(model)
    monitor.step(0)
    model[1].register_forward_hook(lambda *_: 1 / 0)
    monitor.step(1)
    monitor.step(2)  # memory may be short for once
    with pytest.warns(UserWarning, match="Activations are not looked at from step 3"):
        monitor.step(3)
    monitor.step(4)
    assert monitor.series("signal.activation_scale", "0").index.tolist() == [0]


# -- cost --------------------------------------------------------------------------------------------------------------


class Clock:
    """Clock that advances when it is asked, as if each look took one second."""

    def __init__(self) -> None:
        self.now, self.cost = 0.0, 0.0

    def __call__(self) -> float:
        self.now += self.cost
        return self.now


def test_looks_take_one_percent_of_the_training_time() -> None:
    model, clock = net(), Clock()
    rows = take_rows((X, Y), 64, 8, None)
    signals = Signals(model, lambda: (layers_of(model), layers_of(model)), rows, None, clock=clock)
    taken = []
    for step in range(3000):
        clock.now += 0.5  # a training step
        clock.cost = 0.01  # per look at the clock, of which there are two per call with work
        before = signals.spent
        if signals.step(step) is not None:
            taken.append(step)
        if signals.spent == before:
            clock.now -= clock.cost  # a call without work
    assert taken[:2] == [0, 2]  # before the cost is known
    assert len(taken) > 100
    assert signals.spent <= SHARE * clock.now + 0.06  # and the free looks
    assert signals.step(3000, last=True) is not None


def test_looks_are_charged_for_the_work_of_this_process_alone() -> None:
    """On a busy machine looks take long, as all does; what they work is the same."""
    taken: dict[bool, int] = {}
    for by_work in (False, True):
        model, clock, work = net(), Clock(), Clock()
        signals = Signals(
            model,
            lambda model=model: (layers_of(model), layers_of(model)),  # type: ignore[misc]
            take_rows((X, Y), 64, 8, None),
            None,
            due=lambda step: step % 10 == 0,
            clock=clock,
            work=work if by_work else None,
        )
        clock.cost, work.cost = 0.1, 0.001
        looks = [signals.step(step) for step in range(200)]
        taken[by_work] = sum(look is not None for look in looks)
        assert signals.spent > 0.1 * taken[by_work]  # what is reported is all of the time
    assert taken[True] >= 21
    assert taken[False] < 6


def test_expensive_looks_become_rare_and_the_last_is_made() -> None:
    model, clock = net(), Clock()
    rows = take_rows((X, Y), 64, 8, None)
    signals = Signals(model, lambda: (layers_of(model), layers_of(model)), rows, None, clock=clock)
    taken = []
    for step in range(1000):
        clock.now, clock.cost = clock.now + 1.0, 5.0
        before = signals.spent
        if signals.step(step) is not None:
            taken.append(step)
        if signals.spent == before:
            clock.now -= 5.0
    assert taken[:2] == [0, 2]
    assert len(taken) < 5
    assert signals.step(1000, last=True) is not None


# -- losses ------------------------------------------------------------------------------------------------------------


def test_a_jump_of_the_loss_is_one_and_noise_is_none() -> None:
    rng = np.random.default_rng(0)
    history = LossHistory()
    flags = [history.add(float(np.exp(-step / 300 + 0.2 * rng.standard_normal()))) for step in range(1000)]
    assert not any(flags)
    assert history.add(30.0)
    assert history.spikes == 1
    assert not history.add(float("nan"))
    assert not history.finite
    assert history.start == pytest.approx(1.0, abs=0.5)


def test_losses_below_zero_jump_too() -> None:
    history = LossHistory()
    assert not any(history.add(-5.0 - 0.01 * (step % 3)) for step in range(20))
    assert not history.add(-4.9)
    assert history.add(5.0)
