from __future__ import annotations

import importlib
import os
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from featlearn import runs
from featlearn.errors import DataNotPresent, FeatlearnError, InputError
from featlearn.papers import registry
from featlearn.papers import runner as module
from featlearn.papers.claim import about
from featlearn.papers.experiment import Experiment, Outcome, Result, _code_of
from featlearn.papers.runner import reproduce
from featlearn.plots import new_figure
from processes import running


@dataclass(frozen=True)
class Config:
    seeds: tuple[int, ...] = (0, 1, 2)


def _points(config: Config) -> list[dict[str, Any]]:
    return [{"seed": seed} for seed in config.seeds]


def _measure(seed: int) -> Mapping[str, Any]:
    generator = torch.Generator().manual_seed(seed)
    matrix = torch.randn(3, 3, generator=generator, dtype=torch.float64)
    if log := os.environ.get("FEATLEARN_TEST_LOG"):
        with Path(log).open("a") as file:
            file.write(f"{seed}\n")
    time.sleep(float(os.environ.get("FEATLEARN_TEST_PAUSE", "0")))
    return {"trace": float(matrix.trace()), "matrix": matrix, "list": [1.5, 2.5], "array": np.arange(3)}


def _conclude(config: Config, outcomes: Sequence[Outcome]) -> Result:
    values = [result["trace"] for _, result in outcomes]
    assert [point["seed"] for point, _ in outcomes] == list(config.seeds)
    return Result((about("trace", "nowhere", 0.0, values, 10.0, "a test"),), figures={"empty": new_figure(1, 1)})


def experiment(**changes: Any) -> Experiment:
    given = {
        "name": "nfa-test",
        "title": "a test",
        "covers": ("nothing",),
        "scales": {"smoke": Config((0,)), "quick": Config(), "full": Config((0, 1, 2, 3))},
        "points": _points,
        "measure": _measure,
        "conclude": _conclude,
    } | changes
    return Experiment(**given)


@pytest.fixture
def registered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "find_experiments", lambda names, paper: [experiment()])


@pytest.mark.parametrize("jobs", [1, 2])
@pytest.mark.usefixtures("registered")
def test_points_come_back_as_they_were_measured(jobs: int, tmp_path: Path) -> None:
    (result,) = reproduce(folder=tmp_path, n_jobs=jobs, backend="threading")
    assert result.claims[0].measured == tuple(_measure(seed)["trace"] for seed in range(3))
    assert result.points == (3, 3)
    (again,) = reproduce(folder=tmp_path)
    assert again.claims == result.claims
    assert again.seconds == pytest.approx(result.seconds)
    table = runs.open(tmp_path / "nfa-test" / "quick").metrics("trace")
    assert sorted(table["value"]) == sorted(result.claims[0].measured)


@pytest.mark.usefixtures("registered")
def test_results_do_not_depend_on_the_number_of_processes(tmp_path: Path) -> None:
    one, two = (reproduce(folder=tmp_path / str(jobs), n_jobs=jobs)[0] for jobs in (1, 2))
    assert one.claims == two.claims


@pytest.mark.slow  # half a minute to start a cluster
@pytest.mark.usefixtures("registered")
def test_a_cluster_gives_the_same(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import ray

    here = Path(__file__).parent
    source = Path(module.__file__).parents[2]
    paths = os.pathsep.join([str(here), str(here.parent), str(source)])
    ray.init(num_cpus=2, include_dashboard=False, log_to_driver=False, runtime_env={"env_vars": {"PYTHONPATH": paths}})
    try:
        (result,) = reproduce(folder=tmp_path / "out", n_jobs=2, backend="ray")
        monkeypatch.setattr(module, "find_experiments", lambda names, paper: [experiment(measure=_no_files)])
        (nothing,) = reproduce(folder=tmp_path / "none", n_jobs=2, backend="ray")
    finally:
        ray.shutdown()
    assert nothing.missing_data  # a worker's trouble is told as one's own
    assert result.claims[0].measured == tuple(_measure(seed)["trace"] for seed in range(3))


def test_the_key_tells_arguments_and_code_apart() -> None:
    one = experiment()
    assert one.key({"seed": 0}) != one.key({"seed": 1})
    assert one.key({"seed": 0}) == experiment().key({"seed": 0})
    assert one.key({"seed": 0}) != experiment(name="nfa-other").key({"seed": 0})
    assert one.key({"a": 1, "b": 2}) == one.key({"b": 2, "a": 1})
    with pytest.raises(InputError, match="plain values"):
        one.key({"seed": torch.zeros(1)})


_MODULE = '''
ADDED = {{"term": {c}}}

def helper(x):
    return x + {a} + ADDED["term"]

def measure(seed):
    """{words}"""  # {words}
    inner = lambda: helper(seed)
    return {{"value": inner()}}

def conclude():
    return {b}
'''


def test_the_key_follows_what_measures_and_nothing_else(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(tmp_path)
    keys = {}
    cases = {"one": (1, 1, 0, ""), "two": (2, 1, 0, ""), "three": (1, 2, 0, ""), "four": (1, 1, 5, "")}
    for name, (a, b, c, words) in (cases | {"five": (1, 1, 0, "better words")}).items():
        (tmp_path / f"measured_{name}.py").write_text(_MODULE.format(a=a, b=b, c=c, words=words))
        keys[name] = experiment(measure=importlib.import_module(f"measured_{name}").measure).key({"seed": 0})
    assert keys["one"] == keys["three"] == keys["five"]  # only the conclusion differs; only words do
    assert keys["one"] != keys["two"]  # a helper
    assert keys["one"] != keys["four"]  # a constant


def test_the_key_follows_functions_of_imported_modules() -> None:
    (result,) = registry.find_experiments(["nfa-fig5"])  # its measure calls gaussian_training.watch_training
    assert any("def watch_training" in code for code in _code_of(result.measure))
    assert repr(("0", "2")) in _code_of(result.measure)  # a constant of that module


_KILLED = """
import sys
sys.path[:0] = {paths!r}
from featlearn.papers import runner as module
import test_reproduce
module.find_experiments = lambda names, paper: [test_reproduce.experiment()]
module.reproduce(folder={folder!r})
"""


def test_a_killed_sweep_goes_on_where_it_was(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    log, folder = tmp_path / "log", tmp_path / "out"
    paths = [str(Path(__file__).parent), str(Path(__file__).parents[1])]
    store = folder / "nfa-test" / "quick" / "points"
    deadline = time.monotonic() + 60
    environment = {"FEATLEARN_TEST_LOG": str(log), "FEATLEARN_TEST_PAUSE": "1.0"}
    with running(_KILLED.format(paths=paths, folder=str(folder)), env=environment):  # killed when the block ends
        while not (store.exists() and list(store.glob("*.safetensors"))) and time.monotonic() < deadline:
            time.sleep(0.02)
    done = len(list(store.glob("*.safetensors")))
    assert 1 <= done < 3
    before = log.read_text().split()
    monkeypatch.setattr(module, "find_experiments", lambda names, paper: [experiment()])
    monkeypatch.setenv("FEATLEARN_TEST_LOG", str(log))
    (result,) = reproduce(folder=folder)
    after = log.read_text().split()[len(before) :]
    assert after == ["0", "1", "2"][done:]
    assert result.claims[0].measured == tuple(_measure(seed)["trace"] for seed in range(3))


def test_more_seeds_measure_only_those(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    log = tmp_path / "log"
    monkeypatch.setenv("FEATLEARN_TEST_LOG", str(log))
    scales = {"quick": Config((0, 1))}
    for seeds in ((0, 1), (0, 1, 5)):
        scales = {"quick": Config(seeds)}
        monkeypatch.setattr(module, "find_experiments", lambda names, paper, s=scales: [experiment(scales=s)])
        reproduce(folder=tmp_path / "out")
    assert log.read_text().split() == ["0", "1", "5"]


def _no_files(seed: int) -> Mapping[str, Any]:
    raise DataNotPresent("put mnist.gz into the folder")


def test_missing_data_are_told_and_the_others_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    both = [experiment(name="nfa-files", measure=_no_files, data=("mnist",)), experiment()]
    monkeypatch.setattr(module, "find_experiments", lambda names, paper: both)
    first, second = reproduce(folder=tmp_path)
    assert first.missing_data
    assert first.claims[0].verdict == "data not present"
    assert "put mnist.gz" in first.claims[0].note
    assert second.claims[0].verdict == "reproduced"


def _full(seed: int) -> Mapping[str, Any]:
    raise OSError(28, "No space left on device")


def test_a_full_disk_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "find_experiments", lambda names, paper: [experiment(measure=_full)])
    with pytest.raises(FeatlearnError, match="no space left for nfa-test"):
        reproduce(folder=tmp_path)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"names": ["nfa-fgi1"]}, "got .nfa-fgi1.. Did you mean nfa-fig1"),
        ({"names": ["zzz"]}, "got .zzz.. Choose from nfa-fig1"),
        ({"paper": "bert"}, "paper must be one of .nfa., .fact., .*got .bert."),
        ({"scale": "huge"}, "scale must be one of .smoke., .quick., .full., got .huge."),
        ({"n_jobs": 0}, "n_jobs must be"),
        ({"backend": "dask"}, "backend must be one of"),
        ({"device": "cuda:7"}, "device must be .cpu., got .cuda:7., which is not available"),
        ({"device": "meta"}, "device must be .cpu., got .meta.. The sizes"),
    ],
    ids=["typo", "unknown", "paper", "scale", "jobs", "backend", "gpu", "device"],
)
def test_bad_input(given: dict[str, Any], message: str, tmp_path: Path) -> None:
    with pytest.raises(InputError, match=message):
        reproduce(**given, folder=tmp_path)
    assert not list(tmp_path.iterdir())


def test_all_is_all() -> None:
    known = registry.all_experiments()
    assert [e.name for e in registry.find_experiments()] == list(known)
    assert [e.name for e in registry.find_experiments(["all"])] == list(known)
    assert [e.name for e in registry.find_experiments(["nfa-fig1", "nfa-fig1"])] == ["nfa-fig1"]
    assert all(e.paper == "nfa" for e in registry.find_experiments(paper="nfa"))
