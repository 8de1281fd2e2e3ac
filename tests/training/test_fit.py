import copy
import functools
import math

import pytest
import torch
from torch import nn

from featlearn.errors import FeatlearnError, InputError
from featlearn.models import mlp
from featlearn.training import DivergenceError, fit, relative_gradient


def least_squares(n=40, d=5, outputs=2, seed=0):
    generator = torch.Generator().manual_seed(seed)
    X = torch.randn(n, d, generator=generator, dtype=torch.float64)
    y = torch.randn(n, outputs, generator=generator, dtype=torch.float64)
    return X, y, mlp([d, outputs], generator=seed, dtype=torch.float64)


def test_gradient_descent_reaches_the_least_squares_solution():
    X, y, net = least_squares()
    history = fit(net, (X, y), lr=0.5, steps=500)
    exact = torch.linalg.solve(X.mT @ X, X.mT @ y).mT
    torch.testing.assert_close(net[0].weight.detach(), exact, atol=1e-10, rtol=0)
    assert history.final_loss == pytest.approx(float(((X @ exact.mT - y) ** 2).mean()), rel=1e-12)
    assert history.stopped == "steps"
    assert history.step == list(range(500))
    assert history.seconds > 0


@pytest.mark.parametrize(("loss", "halves"), [("mse", 1.0), ("half_mse", 0.5)])
def test_weight_decay_reaches_the_ridge_solution_of_the_stated_loss(loss, halves):
    X, y, net = least_squares()
    decay, (n, outputs) = 0.3, y.shape
    history = fit(net, (X, y), loss=loss, lr=0.5, steps=2000, weight_decay=decay, stop_relgrad=1e-12)
    # Stationarity of halves * |XW^T - y|^2 / (n outputs) + decay/2 |W|^2.
    ridge = decay * n * outputs / (2 * halves)
    exact = torch.linalg.solve(X.mT @ X + ridge * torch.eye(5).double(), X.mT @ y).mT
    torch.testing.assert_close(net[0].weight.detach(), exact, atol=1e-10, rtol=0)
    assert history.stopped == "relgrad"
    assert history.relgrad < 1e-12
    assert len(history.loss) < 2000


def test_first_steps_by_hand():
    X, y, net = least_squares(outputs=1)
    w = net[0].weight.detach().clone()
    losses, velocity = [], torch.zeros_like(w)
    for _ in range(5):
        residual = X @ w.mT - y
        losses.append(float((residual**2).mean()))
        velocity = 0.9 * velocity + 2 / len(X) * residual.mT @ X + 0.1 * w
        w = w - 0.05 * velocity
    seen = []
    history = fit(
        net,
        (X, y),
        lr=0.05,
        steps=5,
        momentum=0.9,
        weight_decay=0.1,
        callback=lambda step, value: seen.append((step, value)),
    )
    torch.testing.assert_close(net[0].weight.detach(), w)
    assert history.loss == pytest.approx(losses)
    assert seen == list(zip(history.step, history.loss, strict=True))


def test_cosine_schedule_by_hand():
    X, y, net = least_squares(outputs=1)
    w = net[0].weight.detach().clone()
    for t in range(4):
        w = w - 0.1 * (1 + math.cos(math.pi * t / 4)) / 2 * 2 / len(X) * (X @ w.mT - y).mT @ X
    fit(net, (X, y), lr=0.1, steps=4, schedule="cosine")
    torch.testing.assert_close(net[0].weight.detach(), w)


@pytest.mark.parametrize("name", ["sgd", "gd", "adam", "adagrad"])
def test_named_optimizers_equal_their_factories(name):
    X, y, net = least_squares()
    twin = copy.deepcopy(net)
    kinds = {"adam": torch.optim.Adam, "adagrad": torch.optim.Adagrad}
    factory = functools.partial(kinds.get(name, torch.optim.SGD), lr=0.01, weight_decay=0.1)
    fit(net, (X, y), optimizer=name, lr=0.01, weight_decay=0.1, steps=7)
    fit(twin, (X, y), optimizer=factory, steps=7)
    assert torch.equal(net[0].weight, twin[0].weight)


def test_schedule_factory_is_stepped_every_update():
    X, y, net = least_squares()
    twin = copy.deepcopy(net)
    fit(net, (X, y), lr=0.1, steps=9, schedule=lambda o: torch.optim.lr_scheduler.StepLR(o, 3, 0.0))
    fit(twin, (X, y), lr=0.1, steps=3)
    assert torch.equal(net[0].weight, twin[0].weight)


def test_every_epoch_sees_every_sample_once_in_a_new_order():
    seen = []

    class Spy(nn.Module):
        def __init__(self):
            super().__init__()
            self.w = nn.Parameter(torch.ones(1, 1))

        def forward(self, x):
            seen.append(x.flatten().tolist())
            return x @ self.w

    X = torch.arange(10.0)[:, None]
    history = fit(Spy(), (X, X), lr=1e-6, epochs=3, batch_size=4, generator=1)
    assert len(history.loss) == 9
    # Three epochs, then one pass for the final loss.
    epochs = [[x for batch in seen[i : i + 3] for x in batch] for i in range(0, 12, 3)]
    assert [len(b) for b in seen[:3]] == [4, 4, 2]
    assert all(sorted(e) == list(range(10)) for e in epochs)
    assert len({tuple(e) for e in epochs}) == 4


def dropout_net():
    return nn.Sequential(*mlp([5, 30], dtype=torch.float64), nn.Dropout(0.5), *mlp([30, 2], dtype=torch.float64))


def test_runs_repeat_and_leave_the_global_generator_alone():
    X, y, _ = least_squares()
    state = torch.get_rng_state()
    losses = []
    for seed, noise in ((3, 0), (3, 11), (4, 0)):
        with torch.random.fork_rng(devices=[]):
            torch.default_generator.manual_seed(noise)
            before = torch.get_rng_state()
            losses.append(fit(dropout_net(), (X, y), lr=0.01, epochs=2, batch_size=8, generator=seed).loss)
            assert torch.equal(torch.get_rng_state(), before)
    assert losses[0] == losses[1]
    assert losses[0] != losses[2]
    assert torch.equal(torch.get_rng_state(), state)


def test_stop_loss_stops_at_the_first_loss_below():
    X, y, net = least_squares(n=5, outputs=1)
    twin = copy.deepcopy(net)
    history = fit(net, (X, y), lr=0.1, steps=20_000, stop_loss=0.1)
    assert history.stopped == "loss"
    assert history.loss[-1] < 0.1 <= history.loss[-2]
    assert history.final_loss == history.loss[-1]
    # No update follows the loss that stopped it.
    fit(twin, (X, y), lr=0.1, steps=len(history.loss) - 1)
    assert torch.equal(net[0].weight, twin[0].weight)


def test_stop_rules_with_batches_look_at_all_the_data():
    X, y, net = least_squares(n=7, d=7, outputs=1)
    history = fit(net, (X, y), lr=0.02, epochs=50_000, batch_size=3, stop_loss=0.05, generator=0)
    assert history.stopped == "loss"
    assert len(history.loss) % 3 == 0
    assert history.final_loss < 0.05
    assert history.final_loss == pytest.approx(float(((net(X) - y) ** 2).mean().detach()), rel=1e-12)

    X, y, net = least_squares(n=24, outputs=1)
    settings = {"lr": 0.01, "batch_size": 6, "weight_decay": 0.5}
    history = fit(net, (X, y), epochs=4000, stop_relgrad=0.05, **settings)
    assert history.stopped == "relgrad"
    w = net[0].weight.detach()
    pull = 2 / 24 * (X @ w.mT - y).mT @ X + 0.5 * w
    assert history.relgrad == pytest.approx(float(pull.norm() / (0.5 * w.norm())), rel=1e-9)


def test_relative_gradient_leaves_biases_out():
    layer = nn.Linear(3, 2)
    optimizer = torch.optim.SGD(layer.parameters(), lr=1.0, weight_decay=0.5)
    layer.weight.grad, layer.bias.grad = -0.5 * layer.weight.detach(), torch.full((2,), 100.0)
    assert relative_gradient(optimizer) == pytest.approx(0, abs=1e-7)
    layer.weight.grad = torch.zeros(2, 3)
    assert relative_gradient(optimizer) == pytest.approx(1)


def test_cross_entropy_and_callable_loss():
    generator = torch.Generator().manual_seed(0)
    X = torch.randn(60, 4, generator=generator)
    labels = (X[:, 0] > 0).long() + (X[:, 1] > 0).long()
    net = mlp([4, 32, 3], generator=0)
    twin = copy.deepcopy(net)
    history = fit(net, (X, labels), loss="cross_entropy", optimizer="adam", lr=0.02, steps=150)
    assert history.loss[0] == pytest.approx(math.log(3), abs=0.2)
    assert (net(X).argmax(1) == labels).float().mean() > 0.97
    fit(twin, (X, labels), loss=nn.CrossEntropyLoss(), optimizer="adam", lr=0.02, steps=150)
    assert torch.equal(net[0].weight, twin[0].weight)


def test_frozen_parameters_and_gradients_are_left_alone():
    X, y, _ = least_squares()
    net = mlp([5, 6, 2], dtype=torch.float64)
    net[0].requires_grad_(False)
    before = net[0].weight.clone()
    fit(net, (X, y), lr=0.1, steps=3, weight_decay=0.1)
    assert torch.equal(net[0].weight, before)
    assert all(p.grad is None for p in net.parameters())


def test_divergence_names_step_and_rate():
    X, y, net = least_squares()
    with pytest.raises(DivergenceError, match=r"at step \d+ with lr=50") as caught:
        fit(net, (X, y), lr=50.0, steps=5000)
    assert isinstance(caught.value, FeatlearnError)
    assert isinstance(caught.value, RuntimeError)
    X[0, 0] = math.nan
    with pytest.raises(DivergenceError, match="before any update"):
        fit(mlp([5, 2], dtype=torch.float64), (X, y), lr=0.1, steps=1)


def test_zero_steps_measure_and_change_nothing():
    X, y, net = least_squares()
    before = net[0].weight.clone()
    history = fit(net, (X, y), lr=0.1, steps=0)
    assert history.loss == []
    assert history.final_loss == pytest.approx(float(((net(X) - y) ** 2).mean().detach()))
    assert torch.equal(net[0].weight, before)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"steps": None}, "either steps or epochs"),
        ({"epochs": 3}, "either steps or epochs"),
        ({"steps": -1}, "steps must be an integer of at least 0, got -1"),
        ({"lr": None}, "lr must be"),
        ({"lr": -0.1}, "lr must be"),
        ({"weight_decay": -0.1}, "weight_decay"),
        ({"batch_size": 0}, "batch_size"),
        ({"loss": "mae"}, "loss must be .*, got 'mae'"),
        ({"optimizer": "lion"}, "optimizer must be .*, got 'lion'"),
        ({"optimizer": "adam", "momentum": 0.9}, "momentum"),
        ({"optimizer": torch.optim.Adam}, "factory"),
        ({"schedule": "linear"}, "schedule must be .*, got 'linear'"),
        ({"stop_relgrad": 0.1}, "weight_decay > 0"),
        (
            {
                "optimizer": functools.partial(torch.optim.AdamW, weight_decay=0.1),
                "lr": None,
                "stop_relgrad": 0.1,
            },
            "decoupled",
        ),
        ({"generator": "seed"}, "generator"),
    ],
)
def test_bad_arguments(changes, message):
    X, y, net = least_squares()
    with pytest.raises(InputError, match=message):
        fit(net, (X, y), **{"lr": 0.1, "steps": 2, **changes})


def test_bad_data():
    X, y, net = least_squares(outputs=1)
    for data in ([X, y], (X, y[:-1]), (X[:0], y[:0]), X):
        with pytest.raises(InputError):
            fit(net, data, lr=0.1, steps=2)
    with pytest.raises(InputError, match="the same shape"):
        fit(net, (X, y.squeeze(1)), lr=0.1, steps=2)
    with pytest.raises(InputError, match="nothing to train"):
        fit(net.requires_grad_(False), (X, y), lr=0.1, steps=2)
