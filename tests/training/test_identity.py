"""A continued run reports a model, data, settings or steps that are not its own, and nothing if they are."""

from __future__ import annotations

import copy
import multiprocessing
import os
import signal
import time
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from featlearn.errors import InputError
from featlearn.runs import Run
from featlearn.training import Monitor, fit

X = torch.randn(40, 4, generator=torch.Generator().manual_seed(0))
Y = (X[:, :1] * X[:, 1:2]).tanh()
CONFIG = {"lr": 0.1, "seed": 0}


def net(seed: int = 0, width: int = 6) -> nn.Sequential:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return nn.Sequential(nn.Linear(4, width), nn.ReLU(), nn.Linear(width, 1))


def train(monitor: Monitor, model: nn.Module, steps: Any, lr: float = 0.1) -> None:
    optimizer = torch.optim.SGD(model.parameters(), lr=lr)
    dtype = next(model.parameters()).dtype
    for step in steps:
        loss = nn.functional.mse_loss(model(X.to(dtype)), Y.to(dtype))
        monitor.step(step, loss=loss)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()


def first(folder: Path, steps: int = 20) -> nn.Sequential:
    model = net()
    with Monitor(model, (X, Y), run=folder, config=CONFIG, budget=None, measure="weights") as monitor:
        train(monitor, model, range(steps))
    return model


def resume(folder: Path, model: nn.Module, steps: Any = (None, None), **changed: Any) -> None:
    options = {"data": (X, Y), "config": CONFIG, "budget": None, "measure": "weights", "every": 1} | changed
    with Monitor(model, run=folder, resume=True, **options) as monitor:
        train(monitor, model, steps)


def old_part(folder: Path) -> list[float]:
    return Run.open(folder).series("loss", segment=1).to_list()[:20]


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"config": {"lr": 0.01, "seed": 0}}, "lr was 0.1 and is 0.01"),
        ({"config": {"lr": 0.1, "seed": 7}}, "seed was 0 and is 7"),
        ({"model": net(width=7)}, r"0\.weight was \(6, 4\) and is \(7, 4\)"),
        ({"model": net(5)}, r"weights differ from those at the end of step 19 \(0\.weight \(6, 4\) by 1\.\d"),
        ({"model": net(0)}, "the model has the initial weights"),
        ({"data": (X + 1, Y)}, "measured rows differ"),
        ({"data": (X, -Y)}, "measured rows differ"),
        ({"steps": range(5)}, "Step 0 goes back"),
        ({"steps": range(7, 9)}, "Step 7 goes back"),
    ],
)
def test_no_mix_is_silent(tmp_path: Path, change: dict[str, Any], words: str) -> None:
    model = first(tmp_path / "run")
    before = old_part(tmp_path / "run")
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            resume(tmp_path / "run", **({"model": model} | change))
        except InputError as error:
            said = [str(error)]
        else:
            said = [str(warning.message) for warning in caught]
    assert len(said) == 1
    assert "\n" not in said[0]
    with pytest.raises(AssertionError, match=words):
        raise AssertionError(said[0])
    assert old_part(tmp_path / "run") == before


def _wrapped(model: nn.Module) -> nn.Module:
    return nn.DataParallel(model)


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of torch.compile itself
@pytest.mark.parametrize("change", [copy.deepcopy, nn.Module.double, nn.Module.bfloat16, _wrapped, torch.compile])
def test_the_same_weights_are_no_alarm(tmp_path: Path, change: Any) -> None:
    model = change(first(tmp_path / "run"))
    options = {"run": tmp_path / "run", "resume": True, "budget": None, "measure": "weights", "every": 1000}
    with Monitor(model, (X, Y), **options) as monitor:
        monitor.step(19, loss=1.0)  # again the step at which it ended
        monitor.step(20, loss=1.0)
    assert len(Run.open(tmp_path / "run").segments()) == 1


def test_weights_may_be_loaded_after_the_monitor_is_made(tmp_path: Path) -> None:
    state = first(tmp_path / "run").state_dict()
    model = net()
    with Monitor(model, (X, Y), run=tmp_path / "run", resume=True, budget=None, measure="weights") as monitor:
        model.load_state_dict(state)
        train(monitor, model, [None])


def test_the_checkpoint_of_the_run_is_compared(tmp_path: Path) -> None:
    settings: dict[str, Any] = {"lr": 0.1, "generator": 0, "checkpoint_every": 10}
    model = net()
    with Monitor(model, (X, Y), run=tmp_path / "run", budget=None, measure="weights") as monitor:
        fit(model, (X, Y), steps=20, monitor=monitor, run=monitor.run, **settings)
    again = net()  # fit loads the checkpoint
    with Monitor(again, (X, Y), run=tmp_path / "run", resume=True, budget=None, measure="weights") as monitor:
        fit(again, (X, Y), steps=25, monitor=monitor, run=monitor.run, **settings)
    with pytest.warns(UserWarning, match=r"differ from those in the checkpoint of step 25|at the end of step 25"):
        resume(tmp_path / "run", net(3), config=None)


def _hang(folder: Path, pipe: Any) -> None:
    model = net()
    monitor = Monitor(model, (X, Y), run=folder, config=CONFIG, measure="weights", budget=None)
    train(monitor, model, range(20))
    pipe.send({name: value.clone() for name, value in model.state_dict().items()})
    time.sleep(600)


def test_after_a_kill(tmp_path: Path) -> None:
    context = multiprocessing.get_context("fork")
    for seed, words in ((None, None), (0, "initial weights"), (5, "in the record of step")):
        folder = tmp_path / f"run {seed}"
        mine, theirs = context.Pipe()
        child = context.Process(target=_hang, args=(folder, theirs))
        child.start()
        assert mine.poll(60)
        state = mine.recv()
        assert child.pid is not None
        os.kill(child.pid, signal.SIGKILL)
        child.join()
        model = net(seed or 0)
        if words is None:
            model.load_state_dict(state)
            resume(folder, model)
        else:
            with pytest.warns(UserWarning, match=words):
                resume(folder, model)


@pytest.mark.parametrize("stored", [False, True])
def test_a_loop_that_runs_again_begins_a_segment_of_the_monitor(tmp_path: Path, stored: bool) -> None:
    model = net()
    monitor = Monitor(model, (X, Y), run=tmp_path / "run" if stored else None, budget=None, measure="weights", every=2)
    train(monitor, model, range(6))
    before = monitor.series("loss").to_list()
    with pytest.warns(UserWarning, match="Step 0 goes back .* up to 5: segment 2") as reported:
        train(monitor, model, range(3))
    assert len(reported) == 1
    assert monitor.series("loss").index.tolist() == [0, 1, 2]
    assert monitor.series("w.top", "0").index.tolist() == [0, 2]
    assert monitor.series("loss", segment=1).to_list() == before
    assert monitor.series("w.top", "0", segment=1).index.tolist() == [0, 2, 4]
    monitor.close()
