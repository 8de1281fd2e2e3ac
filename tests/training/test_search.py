"""Searchers of Ray Tune choose the settings of a sweep, and go on where a killed one was."""

from __future__ import annotations

import json
import re
import time
import warnings
from pathlib import Path
from typing import Any

import pytest

from featlearn.errors import InputError, RunStoreError
from featlearn.runs import Run
from featlearn.training import sweep
from processes import run_code, running

pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::DeprecationWarning")  # of Ray

TRIALS = 14
"""More than the ten random ones with which the searchers start."""


def optuna_search(seed: int | None = 0) -> Any:
    optuna = pytest.importorskip("optuna")
    from ray.tune.search.optuna import OptunaSearch

    optuna.logging.set_verbosity(optuna.logging.ERROR)
    log, whole = optuna.distributions.FloatDistribution(1e-3, 1.0, log=True), optuna.distributions.IntDistribution(1, 3)
    return OptunaSearch({"lr": log, "net/depth": whole}, metric="final", mode="min", seed=seed)


def hyperopt_search(seed: int | None = 0) -> Any:
    hyperopt = pytest.importorskip("hyperopt")
    from ray.tune.search.hyperopt import HyperOptSearch

    space = {"lr": hyperopt.hp.loguniform("lr", -7, 0), "net": {"depth": hyperopt.hp.choice("depth", [1, 2, 3])}}
    return HyperOptSearch(space, metric="final", mode="min", random_state_seed=seed, n_initial_points=5)


SEARCHES = {"optuna": optuna_search, "hyperopt": hyperopt_search}


def loss(settings: dict[str, Any]) -> float:
    return abs(settings["lr"] - 0.1) + settings["net"]["depth"]


def train(settings: dict[str, Any], run: Run) -> dict[str, float]:
    run.log(0, {"loss": loss(settings)})
    return {"final": loss(settings)}


def results(searcher: Any) -> list[float]:
    """Return the results that a searcher knows."""
    if hasattr(searcher, "_ot_study"):
        return sorted(trial.value for trial in searcher._ot_study.trials if trial.value is not None)
    return sorted(r["loss"] for r in searcher._hpopt_trials.results if "loss" in r)


@pytest.mark.parametrize("name", SEARCHES)
def test_a_search_learns_from_every_trial(tmp_path: Path, name: str) -> None:
    searcher = SEARCHES[name]()
    table = sweep(train, searcher=searcher, trials=TRIALS, folder=tmp_path)
    assert table["status"].tolist() == ["finished"] * TRIALS
    assert table["trial"].tolist() == [f"trial-{n:04d}" for n in range(TRIALS)]
    assert results(searcher) == pytest.approx(sorted(table["final"]))
    for row in table.itertuples():
        assert Run.open(row.run).config["lr"] == row.lr


def test_a_suggestion_has_the_results_of_all_that_are_done(tmp_path: Path) -> None:
    """`joblib.Parallel` would draw two trials ahead of each result."""
    known = []

    class Search:
        def suggest(self, trial_id: str) -> dict[str, Any]:
            known.append(len(done))
            return {"n": int(trial_id[-4:])}

        def on_trial_complete(self, trial_id: str, result: Any = None, error: bool = False) -> None:
            done.append(trial_id)

    done: list[str] = []
    sweep(lambda settings, run: settings["n"], searcher=Search(), trials=6, n_jobs=2, folder=tmp_path)
    assert known == [0, 0, 1, 2, 3, 4]


@pytest.mark.parametrize(("most", "n_jobs"), [(1, 1), (2, 3)])
def test_a_searcher_may_wait_for_results(tmp_path: Path, most: int, n_jobs: int) -> None:
    from ray.tune.search import ConcurrencyLimiter

    searcher = optuna_search()
    table = sweep(train, searcher=ConcurrencyLimiter(searcher, most), trials=5, n_jobs=n_jobs, folder=tmp_path)
    assert len(table) == 5
    assert len(results(searcher)) == 5


class Ending:
    """Searcher that ends as those of Ray Tune do."""

    metric = "final"

    def __init__(self) -> None:
        self.told: list[Any] = []

    def suggest(self, trial_id: str) -> Any:
        number = int(trial_id[-4:])
        return {"lr": 0.1 * number, "net": {"depth": 1}} if number < 3 else "FINISHED"

    def on_trial_complete(self, trial_id: str, result: Any = None, error: bool = False) -> None:
        self.told.append((trial_id, result, error))


def test_a_search_that_ends(tmp_path: Path) -> None:
    assert len(sweep(train, searcher=Ending(), trials=10, folder=tmp_path)) == 3


def test_a_metric_that_is_not_returned(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="must return the metric 'final', which searcher optimizes; got loss"):
        sweep(lambda settings, run: {"loss": 1.0}, searcher=Ending(), trials=3, folder=tmp_path)
    assert not Run.exists(tmp_path / "trial-0001")


def test_a_nan_is_a_failure_for_the_searcher_alone(tmp_path: Path) -> None:
    searcher = Ending()
    value = {"trial-0001": float("nan"), "trial-0002": float("inf")}
    table = sweep(
        lambda settings, run: {"final": value.get(run.name, 1.0)}, searcher=searcher, trials=3, folder=tmp_path
    )
    assert table["status"].tolist() == ["finished"] * 3
    told = [("trial-0000", {"final": 1.0}, False), ("trial-0001", None, True)]
    assert searcher.told == [*told, ("trial-0002", {"final": float("inf")}, False)]
    again = Ending()
    sweep(train, searcher=again, trials=3, folder=tmp_path)
    assert again.told == searcher.told


def _half(searcher: Any, folder: Path, number: int, n_jobs: int = 1) -> None:
    sweep(train, searcher=searcher, trials=number, n_jobs=n_jobs, folder=folder)


@pytest.mark.parametrize("name", SEARCHES)
def test_a_seeded_search_goes_on_as_if_it_had_not_stopped(tmp_path: Path, name: str) -> None:
    make = SEARCHES[name]
    _half(make(), tmp_path / "whole", TRIALS)
    for number in (3, 8, TRIALS):
        _half(make(), tmp_path / "parts", number)
    settings = [[Run.open(f).config for f in sorted((tmp_path / n).glob("trial-*"))] for n in ("whole", "parts")]
    assert len(settings[0]) == TRIALS
    assert settings[0] == settings[1]


def test_an_unseeded_search_receives_earlier_results(tmp_path: Path) -> None:
    _half(optuna_search(None), tmp_path, 5)
    searcher = optuna_search(None)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        table = sweep(train, searcher=searcher, trials=8, folder=tmp_path)
    assert len(table) == 8
    assert results(searcher) == pytest.approx(sorted(table["final"]))


def test_a_search_that_cannot_take_earlier_results_says_so(tmp_path: Path) -> None:
    _half(hyperopt_search(1), tmp_path, 3)
    with pytest.warns(UserWarning, match="cannot take 3 earlier results") as reported:
        table = sweep(train, searcher=hyperopt_search(2), trials=5, folder=tmp_path)
    assert len(table) == 5
    assert reported[0].filename == __file__


def test_a_failed_trial_is_repeated_and_its_result_told(tmp_path: Path) -> None:
    failing = {"trial-0001"}

    def sometimes(settings: dict[str, Any], run: Run) -> dict[str, float]:
        if run.name in failing:
            raise RuntimeError("no memory")
        return {"final": loss(settings)}

    with pytest.warns(UserWarning, match="1 of 3 trials failed"):
        sweep(sometimes, searcher=optuna_search(), trials=3, folder=tmp_path)
    failing.clear()
    for _ in range(2):
        searcher = optuna_search()
        table = sweep(sometimes, searcher=searcher, trials=4, folder=tmp_path)
        assert table["status"].tolist() == ["finished"] * 4
        assert results(searcher) == pytest.approx(sorted(table["final"]))


def test_an_incomplete_line_of_a_killed_process_is_removed(tmp_path: Path) -> None:
    _half(Ending(), tmp_path, 2)
    log = tmp_path / "search.jsonl"
    whole = log.read_text()
    log.write_text(whole + '{"trial": "trial-00')
    table = sweep(train, searcher=Ending(), trials=3, folder=tmp_path)
    assert len(table) == 3
    assert log.read_text().startswith(whole)
    assert len([json.loads(line) for line in log.read_text().splitlines()]) == 6


@pytest.mark.parametrize("damage", ["[1]\n", '{"trial": "a", "metrics": {}}\n', "\x00\n", '{"trial": {}}\n'])
def test_a_damaged_file_is_an_error(tmp_path: Path, damage: str) -> None:
    (tmp_path / "search.jsonl").write_text(damage)
    with pytest.raises(RunStoreError, match=r"search\.jsonl.* is damaged"):
        sweep(train, searcher=Ending(), trials=3, folder=tmp_path)


SCRIPT = """
import sys, time, warnings
from featlearn.training import sweep
sys.path[:0] = [sys.argv[1]]
pause = float(sys.argv[5])
warnings.simplefilter("ignore", FutureWarning)
from test_search import SEARCHES

def loss(settings):  # sent to the workers of Ray, which do not find the tests
    return abs(settings["lr"] - 0.1) + settings["net"]["depth"]

def train(settings, run):
    for step in range(10):
        run.log(step, {"loss": loss(settings) + step})
        time.sleep(pause)
    return {"final": loss(settings)}

options = {"n_jobs": int(sys.argv[4]), "backend": sys.argv[6]}
table = sweep(train, searcher=SEARCHES[sys.argv[3]](), trials=8, folder=sys.argv[2], **options)
"""


def _killed_and_resumed(folder: Path, name: str, n_jobs: int, backend: str, pause: float = 0.03) -> None:
    arguments = [SCRIPT, Path(__file__).parent, folder, name, n_jobs]
    third = folder / "trial-0003"
    with running(*arguments, pause, backend) as (child, files):
        end = time.monotonic() + 120
        while not (Run.exists(third) and (Run.open(third).last_step or 0) >= 3):
            assert child.is_alive(), (files / "stderr").read_text()
            assert time.monotonic() < end
            time.sleep(0.01)
        child.kill()
        child.join()
    finished = {p.name: Run.open(p) for p in folder.glob("trial-*") if Run.open(p).status == "finished"}
    assert len(finished) >= 2
    if backend == "joblib" and n_jobs > 1:  # its workers end too, after the trials that they had begun
        workers = {int(pid) for run in finished.values() for pid in run.starts()["pid"]}
        assert workers
        while any(_lives(pid) for pid in workers):
            assert time.monotonic() < end
            time.sleep(0.05)
    done = run_code(*arguments[:-1], 1, 0.0, backend)  # with fewer jobs, as on another machine
    assert done.returncode == 0, done.stderr
    runs = [Run.open(path) for path in sorted(folder.glob("trial-*"))]
    assert [run.name for run in runs] == [f"trial-{n:04d}" for n in range(8)]
    for run in runs:
        assert run.status == "finished"
        assert run.series("loss").to_list() == [loss(run.config) + step for step in range(10)]
        if run.name in finished:  # not trained again
            assert len(run.starts()) == 1
    known = [json.loads(line) for line in (folder / "search.jsonl").read_text().splitlines()]
    assert sorted(line["trial"] for line in known if line.get("metrics")) == [run.name for run in runs]


def _lives(pid: int) -> bool:
    command = Path(f"/proc/{pid}/cmdline")
    return command.exists() and bool(command.read_bytes())  # that of a zombie is empty


@pytest.mark.parametrize(("name", "n_jobs"), [("optuna", 2), ("hyperopt", 1)])
def test_a_search_that_is_killed_is_resumed(tmp_path: Path, name: str, n_jobs: int) -> None:
    _killed_and_resumed(tmp_path / "sweep", name, n_jobs, "joblib")


def test_the_search_of_the_guide(tmp_path: Path) -> None:
    page = (Path(__file__).parents[2] / "docs/guides/clusters.md").read_text(encoding="utf-8")
    for name in ("train.py", "search.py"):
        script = re.search(rf"```python\n(# file: {name}\n.*?)```", page, re.DOTALL)
        assert script is not None
        (tmp_path / name).write_text(script[1], encoding="utf-8")
    code = "import runpy, sys; sys.path.insert(0, '.'); runpy.run_path('search.py', run_name='__main__')"
    done = run_code(code, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    lines = done.stdout.split("\n")
    assert lines[0].split() == ["lr", "seed", "final", "status"]
    assert [line.split()[-1] for line in lines[1:7]] == ["finished"] * 6


@pytest.mark.slow  # starts Ray twice
@pytest.mark.parametrize("name", SEARCHES)
def test_a_search_on_ray_that_is_killed_is_resumed(tmp_path: Path, name: str) -> None:
    _killed_and_resumed(tmp_path / "sweep", name, 2, "ray", 0.2)
