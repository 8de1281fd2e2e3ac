"""A launch into a folder that holds a run never mixes two trainings."""

from __future__ import annotations

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

from featlearn.errors import InputError, RunStoreError
from featlearn.runs import Run, list_runs
from featlearn.training import Monitor, fit

X = torch.randn(40, 4, generator=torch.Generator().manual_seed(0))
Y = (X[:, :1] * X[:, 1:2]).tanh()


def net(seed: int = 0, width: int = 6) -> nn.Sequential:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return nn.Sequential(nn.Linear(4, width), nn.ReLU(), nn.Linear(width, 1))


def train(monitor: Monitor, model: nn.Module, steps: Any, lr: float = 0.1) -> list[float]:
    optimizer = torch.optim.SGD(model.parameters(), lr=lr)
    losses = []
    for step in steps:
        loss = nn.functional.mse_loss(model(X), Y)
        losses.append(float(loss.detach()))
        monitor.step(step, loss=loss)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return losses


def launch(folder: Any, steps: int = 5, *, seed: int = 0, lr: float = 0.1, **options: Any) -> tuple[Path, list[float]]:
    """Train and return the folder that was written, and the losses."""
    model = net(seed)
    with Monitor(
        model, (X, Y), run=folder, config={"lr": lr, "seed": seed}, budget=None, measure="weights", **options
    ) as monitor:
        assert monitor.run is not None
        path = monitor.run.path
        return path, train(monitor, model, range(steps), lr)


def trained(steps: int) -> nn.Sequential:
    """Return the model of `launch` after some steps."""
    model = net()
    train(Monitor(model, (X, Y), budget=None, measure="weights", every=1000), model, range(steps))
    return model


def content(folder: Path) -> tuple[Any, ...]:
    run = Run.open(folder)
    return run.config, run.status, run.metrics().to_dict("list"), sorted(os.listdir(folder / "matrices"))


def test_a_second_launch_is_a_run_beside_the_first(tmp_path: Path) -> None:
    _, first = launch(tmp_path / "first", 10)
    before = content(tmp_path / "first")
    for number, (seed, lr) in enumerate([(7, 0.001), (0, 0.1), (1, 0.1)], start=2):
        words = rf"steps up to 9.*new run '{tmp_path}/first-{number}'.*resume=True"
        with pytest.warns(UserWarning, match=words) as reported:
            path, losses = launch(tmp_path / "first", 6, seed=seed, lr=lr)
        assert len(reported) == 1
        assert str(reported[0].message).count(". ") == 0
        assert reported[0].filename == __file__
        assert path == tmp_path / f"first-{number}"
        run = Run.open(path)
        assert (run.name, run.config, run.status) == (path.name, {"lr": lr, "seed": seed}, "finished")
        assert run.series("loss").to_list() == losses
        assert run.series("weight_change", "0").iloc[0] == 0.0
    assert content(tmp_path / "first") == before
    assert before[2]["value"][0] == first[0]


@pytest.mark.parametrize("form", ["{}/first/", "{}/first", "{}/./first", Path("{}/first"), "first", "./first/"])
def test_the_folder_may_be_written_in_any_way(form: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    folder = type(form)(str(form).replace("{}", str(tmp_path)))
    launch(folder)
    with pytest.warns(UserWarning, match="first-2'"):
        launch(folder)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["first", "first-2"]


def test_the_present_folder_is_a_run_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    launch(".")
    with pytest.warns(UserWarning, match="here-2'"):
        path, _ = launch(".")
    assert path.resolve() == tmp_path / "here-2"


def test_names_that_are_taken_are_passed_over(tmp_path: Path) -> None:
    launch(tmp_path / "first")
    (tmp_path / "first-2").write_text("a file")
    (tmp_path / "first-3").mkdir()
    (tmp_path / "first-3" / "notes.txt").write_text("of the user")
    with pytest.warns(UserWarning, match="first-4'"):
        launch(tmp_path / "first")
    assert [path.name for path in (tmp_path / "first-3").iterdir()] == ["notes.txt"]


def test_a_folder_with_other_files_takes_a_run(tmp_path: Path) -> None:
    (tmp_path / "first").mkdir()
    (tmp_path / "first" / "notes.txt").write_text("of the user")
    path, _ = launch(tmp_path / "first")
    assert path == tmp_path / "first"
    assert (path / "notes.txt").read_text() == "of the user"


@pytest.mark.parametrize("resume", [False, True])
def test_a_run_without_steps_is_taken_over(tmp_path: Path, resume: bool) -> None:
    Monitor(net(3), (X, Y), run=tmp_path / "first", config={"lr": 5.0}, budget=None, measure="weights").close()
    path, losses = launch(tmp_path / "first", resume=resume)
    run = Run.open(path)
    assert path == tmp_path / "first"
    assert run.config == {"lr": 0.1, "seed": 0}
    assert run.series("loss").to_list() == losses
    assert run.series("weight_change", "0").iloc[0] == 0.0  # not against the weights of the launch before


def test_a_run_without_steps_keeps_its_config_if_none_is_given(tmp_path: Path) -> None:
    Run.create(tmp_path / "first", {"lr": 0.3}, name="mine").close()
    with Monitor(net(), (X, Y), run=tmp_path / "first", budget=None, measure="weights") as monitor:
        monitor.step(0)
    run = Run.open(tmp_path / "first")
    assert (run.config, run.name, run.status) == ({"lr": 0.3}, "mine", "finished")


def test_a_checkpoint_counts_as_steps(tmp_path: Path) -> None:
    with Run.create(tmp_path / "first") as run:
        run.save_checkpoint(3, {"weight": torch.ones(2)})
    with pytest.warns(UserWarning, match="first-2'"):
        launch(tmp_path / "first")
    assert Run.open(tmp_path / "first").checkpoint_steps() == [3]


@pytest.mark.parametrize("damage", [b"", b"these are notes" * 200])
def test_a_corrupt_database_is_never_overwritten(tmp_path: Path, damage: bytes) -> None:
    launch(tmp_path / "first")
    (tmp_path / "first" / "run.db").write_bytes(damage)
    with pytest.warns(UserWarning, match="cannot be used.*first-2'"):
        path, losses = launch(tmp_path / "first")
    assert Run.open(path).series("loss").to_list() == losses
    with pytest.raises(RunStoreError, match=r"run\.db"):
        launch(tmp_path / "first", resume=True)
    assert (tmp_path / "first" / "run.db").read_bytes() == damage


# -- continuing --------------------------------------------------------------------------------------------------------


def test_resume_continues_and_counts_on(tmp_path: Path) -> None:
    model = net()
    start = {name: value.clone() for name, value in model.state_dict().items()}
    config = {"lr": 0.1, "net": {"widths": (6, 1)}, "nothing": float("nan")}
    losses = []
    for launched in range(3):
        options = {
            "run": tmp_path / "first",
            "config": config if launched < 2 else None,
            "budget": None,
            "measure": "weights",
        }
        with Monitor(model, (X, Y), resume=True, every=1, **options) as monitor:
            losses += train(monitor, model, [None] * 4)
    run = Run.open(tmp_path / "first")
    assert run.series("loss").to_list() == losses
    assert run.series("loss").index.tolist() == list(range(12))
    assert len(run.starts()) == 3
    moved = run.series("weight_change", "0")
    assert moved.iloc[0] == 0.0
    assert moved.iloc[4:].gt(0).all()  # against the first start
    assert all(torch.equal(value, run.initial()[name]) for name, value in start.items())
    assert len(list_runs(tmp_path)) == 1


@pytest.mark.parametrize(
    ("config", "words"),
    [
        ({"lr": 0.001, "seed": 7}, "lr was 0.1 and is 0.001; seed was 0 and is 7"),
        ({"lr": 0.1}, "seed was 0 and is not set"),
        ({"lr": 0.1, "seed": 0, "net": {"width": 8}}, "net.width was not set and is 8"),
        ({}, "lr was 0.1 and is not set"),
    ],
)
def test_resume_refuses_another_config(tmp_path: Path, config: dict[str, Any], words: str) -> None:
    launch(tmp_path / "first")
    before = content(tmp_path / "first")
    with pytest.raises(InputError, match=words) as refused:
        Monitor(net(), (X, Y), run=tmp_path / "first", config=config, resume=True, budget=None, measure="weights")
    assert "\n" not in str(refused.value)
    assert content(tmp_path / "first") == before
    Run.open(tmp_path / "first", write=True).close()  # no lock is left


@pytest.mark.parametrize(
    ("model", "words"),
    [
        (net(width=7), r"0\.weight was \(6, 4\) and is \(7, 4\)"),
        (nn.Linear(4, 1), r"0\.weight was \(6, 4\) and is missing"),
        (nn.Sequential(*net(), nn.Linear(1, 1)), r"3\.weight was missing and is \(1, 1\)"),
    ],
)
def test_resume_refuses_another_architecture(tmp_path: Path, model: nn.Module, words: str) -> None:
    launch(tmp_path / "first")
    before = content(tmp_path / "first")
    with pytest.raises(InputError, match=words) as refused:
        Monitor(model, (X, Y), run=tmp_path / "first", resume=True, budget=None, measure="weights")
    assert "\n" not in str(refused.value)
    assert content(tmp_path / "first") == before


def test_resume_below_the_last_step_is_said_once(tmp_path: Path) -> None:
    launch(tmp_path / "first", 10)
    model = trained(5)
    options = {"run": tmp_path / "first", "resume": True, "budget": None, "measure": "weights", "every": 100}
    with (
        pytest.warns(UserWarning, match=r"Step 5 goes back.*steps up to 9: segment 2.*are kept") as reported,
        Monitor(model, (X, Y), **options) as monitor,
    ):
        train(monitor, model, range(5, 8))
    assert len(reported) == 1
    # The last step again is what trainers do that begin where they ended.
    with Monitor(model, (X, Y), **options) as monitor:
        train(monitor, model, range(9, 12))
    assert Run.open(tmp_path / "first").last_step == 11


def test_an_open_run_continues_and_says_when_it_goes_back(tmp_path: Path) -> None:
    launch(tmp_path / "first", 10)
    model = trained(10)
    with Run.open(tmp_path / "first", write=True) as run, warnings.catch_warnings():
        warnings.simplefilter("error")
        monitor = Monitor(model, (X, Y), run=run, budget=None, measure="weights", every=1)
        train(monitor, model, [None, None])
    assert run.last_step == 11
    for write in (lambda run: run.log(3, {"loss": 1.0}), lambda run: run.save_matrices(2, {"a": torch.ones(1)})):
        with (
            Run.open(tmp_path / "first", write=True) as run,
            pytest.warns(UserWarning, match=r"Step (3|2) goes back.*steps up to (11|3)"),
        ):
            write(run)
    with Run.open(tmp_path / "first", write=True) as run:
        monitor = Monitor(model, (X, Y), run=run, budget=None, measure="weights")
        with pytest.warns(UserWarning, match=r"Step 0 goes back"):
            monitor.step(0, loss=0.5)


def test_resume_is_yes_or_no_and_needs_a_folder(tmp_path: Path) -> None:
    for wrong in ("yes", 1, None):
        with pytest.raises(InputError, match="resume must be True or False, got"):
            Monitor(net(), (X, Y), run=tmp_path / "run", resume=wrong)
    with pytest.raises(InputError, match="resume=True requires run"):
        Monitor(net(), (X, Y), resume=True)
    assert not (tmp_path / "run").exists()


# -- other processes ---------------------------------------------------------------------------------------------------


def _start(folder: Path, barrier: Any, reported: Any) -> None:
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    barrier.wait(60)
    model = net(os.getpid())
    monitor = Monitor(model, (X, Y), run=folder, config={"pid": os.getpid()}, budget=None, measure="weights")
    assert monitor.run is not None
    path = monitor.run.path
    losses = train(monitor, model, range(5))
    reported.put((os.getpid(), str(path), losses))
    barrier.wait(60)  # all are open at once
    monitor.close()


@pytest.mark.parametrize("before", ["nothing", "empty", "steps"])
def test_processes_that_start_at_once_have_runs_of_their_own(tmp_path: Path, before: str) -> None:
    if before == "empty":
        Run.create(tmp_path / "run").close()
    elif before == "steps":
        launch(tmp_path / "run")
    context = multiprocessing.get_context("fork")
    barrier, reported = context.Barrier(4), context.Queue()
    children = [context.Process(target=_start, args=(tmp_path / "run", barrier, reported)) for _ in range(4)]
    for child in children:
        child.start()
    result = [reported.get(timeout=60) for _ in children]
    for child in children:
        child.join(60)
        assert child.exitcode == 0
    first = 2 if before == "steps" else 1
    names = {"run" if number == 1 else f"run-{number}" for number in range(first, first + 4)}
    assert {Path(path).name for _, path, _ in result} == names
    for pid, path, losses in result:
        run = Run.open(path)
        assert run.config == {"pid": pid}
        assert run.status == "finished"
        assert run.series("loss").to_list() == losses


def _hang(folder: Path, pipe: Any) -> None:
    model = net()
    monitor = Monitor(model, (X, Y), run=folder, config={"lr": 0.1, "seed": 0}, budget=None, measure="weights")
    train(monitor, model, range(4))
    pipe.send("trained")
    time.sleep(600)


def test_a_killed_launch_is_left_alone_or_continued(tmp_path: Path) -> None:
    context = multiprocessing.get_context("fork")
    mine, theirs = context.Pipe()
    child = context.Process(target=_hang, args=(tmp_path / "run", theirs))
    child.start()
    assert mine.recv() == "trained"
    with pytest.warns(UserWarning, match="run-2'"):  # of one that lives
        launch(tmp_path / "run")
    with pytest.raises(RunStoreError, match=f"is being written by process {child.pid}"):
        launch(tmp_path / "run", resume=True)
    assert child.pid is not None
    os.kill(child.pid, signal.SIGKILL)
    child.join()
    before = content(tmp_path / "run")
    with pytest.warns(UserWarning, match="run-3'"):
        launch(tmp_path / "run")
    assert content(tmp_path / "run") == before
    assert before[1] == "interrupted"
    model = trained(4)
    config = {"lr": 0.1, "seed": 0}
    with Monitor(
        model, (X, Y), run=tmp_path / "run", config=config, resume=True, budget=None, measure="weights"
    ) as monitor:
        train(monitor, model, range(4, 6))
    run = Run.open(tmp_path / "run")
    assert (run.last_step, run.status) == (5, "finished")


# -- fit ---------------------------------------------------------------------------------------------------------------


def test_fit_without_checkpoints_starts_a_run_of_its_own(tmp_path: Path) -> None:
    settings = {"lr": 0.1, "steps": 6, "run": tmp_path / "run", "batch_size": 16}
    first = fit(net(), (X, Y), generator=0, **settings)
    before = Run.open(tmp_path / "run").series("loss").to_list()
    assert before == [*first.loss, first.final_loss]
    changes: list[dict[str, Any]] = [{"generator": 7}, {"lr": 0.01}, {"steps": 3}, {"model": net(5)}, {"data": (X, -Y)}]
    for number, changed in enumerate(changes, start=2):
        with pytest.warns(UserWarning, match=rf"new run '{tmp_path}/run-{number}'"):
            history = fit(**({"model": net(), "data": (X, Y), "generator": 0} | settings | changed))
        losses = [*history.loss, history.final_loss]
        assert Run.open(tmp_path / f"run-{number}").series("loss").to_list() == losses
    assert Run.open(tmp_path / "run").series("loss").to_list() == before


def test_fit_refuses_another_seed_where_it_would_continue(tmp_path: Path) -> None:
    settings = {"lr": 0.1, "steps": 6, "run": tmp_path / "run", "batch_size": 16, "checkpoint_every": 2}
    fit(net(), (X, Y), generator=0, **settings)
    with pytest.raises(InputError, match="generator was"):
        fit(net(), (X, Y), generator=7, **settings)
    fit(net(3), (X, Y), generator=0, **settings)  # the checkpoint's weights are taken


def test_fit_that_ended_before_its_first_checkpoint_starts_again_in_place(tmp_path: Path) -> None:
    def stop(step: int, loss: float) -> None:
        if step == 2:
            raise KeyboardInterrupt

    settings = {"lr": 0.1, "steps": 6, "run": tmp_path / "run", "generator": 0, "checkpoint_every": 4}
    with pytest.raises(KeyboardInterrupt):
        fit(net(), (X, Y), callback=stop, **settings)
    history = fit(net(), (X, Y), **settings)
    run = Run.open(tmp_path / "run")
    assert run.series("loss").to_list() == [*history.loss, history.final_loss]
    assert [path.name for path in tmp_path.iterdir()] == ["run"]


def test_at_says_that_the_stored_config_stays(tmp_path: Path) -> None:
    Run.open_or_create(tmp_path / "run", {"lr": 0.1}).close()
    with (
        pytest.warns(UserWarning, match=r"lr was 0\.1 and is 0\.2"),
        Run.open_or_create(tmp_path / "run", {"lr": 0.2}) as run,
    ):
        assert run.config == {"lr": 0.1}
