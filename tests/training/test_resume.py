"""A training that is taken up again ends with the same bits as one that never stopped."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from featlearn.errors import InputError
from featlearn.optim import SLO, AdaptiveSLO
from featlearn.runs import Run
from featlearn.training import Monitor, fit

X = torch.randn(50, 4, generator=torch.Generator().manual_seed(0))
Y = (X[:, :1] * X[:, 1:2]).tanh()


class Stopped(Exception):
    pass


def net(norm: bool = True) -> nn.Sequential:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        middle = nn.BatchNorm1d(8) if norm else nn.Identity()
        return nn.Sequential(
            nn.Linear(4, 8), middle, nn.ReLU(), nn.Dropout(0.2), nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 1)
        )


def stop_at(step: int) -> Callable[[int, float], None]:
    def callback(now: int, loss: float) -> None:
        if now == step:
            raise Stopped

    return callback


def cosine_restarts(optimizer: torch.optim.Optimizer) -> Any:
    return torch.optim.lr_scheduler.CosineAnnealingWarmRestarts(optimizer, T_0=5)


SETTINGS: dict[str, dict[str, Any]] = {
    "full batch": {"steps": 30, "lr": 0.1},
    "batches": {"epochs": 5, "batch_size": 8, "lr": 0.05, "momentum": 0.9, "weight_decay": 1e-3},
    "adam, cosine": {"steps": 30, "batch_size": 16, "optimizer": "adam", "lr": 0.01, "schedule": "cosine"},
    "adagrad": {"steps": 30, "batch_size": 16, "optimizer": "adagrad", "lr": 0.05},
    "slo": {"steps": 30, "batch_size": 16, "optimizer": "slo", "lr": 0.05, "momentum": 0.5},
    "a schedule of one's own": {"steps": 30, "batch_size": 16, "lr": 0.1, "schedule": cosine_restarts},
    "amsgrad": {"steps": 30, "batch_size": 16, "optimizer": lambda p: torch.optim.Adam(p, lr=0.01, amsgrad=True)},
    "speeds": {"steps": 30, "optimizer": lambda p: SLO(p, lr=0.01, speed=3.0, eps=0.1)},
    "stops early": {"steps": 400, "lr": 0.3, "stop_loss": 0.09},
}


def state(model: nn.Module) -> dict[str, Tensor]:
    return {k: v.clone() for k, v in model.state_dict().items()}


def assert_same(a: dict[str, Tensor], b: dict[str, Tensor]) -> None:
    for name in a:
        assert torch.equal(a[name], b[name]), name


@pytest.mark.parametrize("settings", SETTINGS.values(), ids=SETTINGS.keys())
def test_stopped_and_taken_up_twice(settings: dict[str, Any], tmp_path: Path) -> None:
    model = net()
    whole = fit(model, (X, Y), generator=1, **settings)
    assert len(whole.step) > 20
    options = dict(settings, generator=1, run=tmp_path / "run", checkpoint_every=4)
    for stop in (6, 17):
        with pytest.raises(Stopped):
            fit(net(), (X, Y), callback=stop_at(stop), **options)
        assert Run.open(tmp_path / "run").status == "failed"
    again = net()
    history = fit(again, (X, Y), **options)
    assert history.loss == whole.loss
    assert history.step == whole.step
    assert history.stopped == whole.stopped
    assert history.final_loss == whole.final_loss
    assert_same(state(model), state(again))
    run = Run.open(tmp_path / "run")
    assert run.status == "finished"
    # The loss before every update, and of the trained model after the last one.
    assert run.series("loss").to_list() == [*whole.loss, whole.final_loss][: len(run.series("loss"))]
    assert run.starts()["checkpoint"].to_list()[1:] == [4, 16]


def test_the_monitor_of_a_stopped_run_sees_what_it_would_have_seen(tmp_path: Path) -> None:
    def train(folder: Path, stops: list[int]) -> tuple[nn.Module, Run]:
        for stop in [*stops, -1]:
            model = net()
            with Run.open_or_create(folder) as run:
                monitor = Monitor(model, (X, Y), run=run, every=5, budget=None, kernel_samples=20, matrices=["nfm"])
                try:
                    fit(model, (X, Y), lr=0.05, steps=30, batch_size=8, generator=1, run=run, checkpoint_every=4,
                        monitor=monitor, callback=stop_at(stop))  # fmt: skip
                except Stopped:
                    continue
        return model, Run.open(folder)

    model, whole = train(tmp_path / "whole", [])
    again, stopped = train(tmp_path / "stopped", [7, 23])
    assert_same(state(model), state(again))
    # Signals, and so findings, are taken when their time allows.
    timed = "name.str.startswith('monitor.') or name.str.startswith('signal.')"
    wanted, result = (run.metrics().query(f"not ({timed})") for run in (whole, stopped))
    assert len(wanted) > 300
    assert wanted.reset_index(drop=True).equals(result.reset_index(drop=True))
    texts = [run.texts().query("name != 'findings'").reset_index(drop=True) for run in (whole, stopped)]
    assert texts[0].equals(texts[1])
    assert whole.matrix_steps() == stopped.matrix_steps() == [0, 5, 10, 15, 20, 25, 30]
    for name, matrix in whole.matrices(30).items():
        assert torch.equal(matrix, stopped.matrices(30)[name])


def test_speeds_that_adapt_are_taken_up(tmp_path: Path) -> None:
    def options(model: nn.Module) -> dict[str, Any]:
        return {"steps": 20, "optimizer": lambda _: AdaptiveSLO(model, X, lr=0.01, every=3), "generator": 1}

    model = net(norm=False)
    whole = fit(model, (X, Y), **options(model))
    where = {"run": tmp_path / "run", "checkpoint_every": 4}
    first = net(norm=False)
    with pytest.raises(Stopped):
        fit(first, (X, Y), callback=stop_at(10), **options(first), **where)
    again = net(norm=False)
    assert fit(again, (X, Y), **options(again), **where).loss == whole.loss
    assert_same(state(model), state(again))


def test_a_finished_run_stays_finished_and_can_be_made_longer(tmp_path: Path) -> None:
    settings = {"lr": 0.05, "batch_size": 8, "generator": 1, "run": tmp_path / "run", "checkpoint_every": 7}
    model = net()
    first = fit(model, (X, Y), steps=10, **settings)
    again = net()
    assert fit(again, (X, Y), steps=10, **settings).loss == first.loss
    assert_same(state(model), state(again))
    longer, whole = net(), net()
    history = fit(longer, (X, Y), steps=15, **settings)
    assert history.loss == fit(whole, (X, Y), lr=0.05, batch_size=8, generator=1, steps=15).loss
    assert_same(state(whole), state(longer))
    with pytest.raises(InputError, match="steps must be at least the 15 updates of the run, got 5"):
        fit(net(), (X, Y), steps=5, **settings)


@pytest.mark.parametrize(
    ("changed", "words"),
    [
        ({"lr": 0.2}, "'lr': 0.05"),
        ({"batch_size": 10}, "batch was 8 and is 10"),
        ({"optimizer": "adam"}, "optimizer was 'SGD' and is 'Adam'"),
        ({"loss": "half_mse"}, "loss was 'mse'"),
        ({"schedule": "cosine"}, "schedule was None"),
    ],
)
def test_other_settings_are_refused_and_the_run_is_left_alone(changed, words, tmp_path: Path) -> None:
    settings = {
        "lr": 0.05,
        "batch_size": 8,
        "generator": 1,
        "run": tmp_path / "run",
        "checkpoint_every": 5,
        "steps": 10,
    }
    fit(net(), (X, Y), **settings)
    kept = Run.open(tmp_path / "run").metrics()
    with pytest.raises(InputError, match=words):
        fit(net(), (X, Y), **(settings | changed))
    assert Run.open(tmp_path / "run").metrics().equals(kept)
    with pytest.raises(InputError, match="data was"):
        fit(net(), (X + 1, Y), **settings)


def test_checkpoints_need_a_run() -> None:
    with pytest.raises(InputError, match="requires run"):
        fit(net(), (X, Y), lr=0.1, steps=2, checkpoint_every=1)
