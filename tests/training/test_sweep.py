"""Sweeps: every trial is a run with its settings, and a second call resumes what is not finished."""

from __future__ import annotations

import json
import os
import time
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import scipy.stats
import torch

import featlearn as fl
from featlearn.errors import InputError
from featlearn.runs import Run
from featlearn.training import fit, sweep
from processes import run_code, running

SPACE = {"lr": [0.1, 0.5, 0.9], "seed": [0, 1]}


def count(settings: dict[str, Any], run: Run) -> dict[str, float]:
    for step in range(5):
        run.log(step, {"loss": settings["lr"] ** step})
    return {"final": settings["lr"] ** 4 + settings["seed"]}


def test_every_combination_is_a_run_with_its_settings(tmp_path: Path) -> None:
    table = sweep(count, SPACE, folder=tmp_path / "sweep", n_jobs=2)
    assert len(table) == 6
    assert table["status"].tolist() == ["finished"] * 6
    for row in table.itertuples():
        run = Run.open(row.run)
        assert run.config == {"lr": row.lr, "seed": row.seed}
        assert run.status == "finished"
        assert run.series("loss").to_list() == [row.lr**step for step in range(5)]
        assert run.series("final").to_dict() == {4: row.final}
        assert row.final == row.lr**4 + row.seed
    listed = fl.runs.list(tmp_path / "sweep")
    assert sorted(listed["name"]) == table["trial"].tolist() == [f"trial-{n:04d}" for n in range(6)]


def test_one_number_is_the_result_and_none_is_no_metric(tmp_path: Path) -> None:
    table = sweep(lambda settings, run: torch.tensor(settings["a"] + 1.0), {"a": [1]}, folder=tmp_path / "one")
    assert table["result"].tolist() == [2.0]
    assert Run.open(tmp_path / "one" / "trial-0000").series("result").to_dict() == {0: 2.0}
    none = sweep(lambda settings, run: None, {"a": [1]}, folder=tmp_path / "none")
    assert list(none.columns) == ["trial", "a", "status", "seconds", "message", "run"]


def test_random_samples_are_those_of_the_seed(tmp_path: Path) -> None:
    space = {"lr": scipy.stats.loguniform(1e-4, 1.0), "width": [8, 16, 32]}
    tables = [
        sweep(lambda settings, run: settings["lr"], space, folder=tmp_path / str(n), trials=4, seed=seed)
        for n, seed in enumerate((0, 0, 1))
    ]
    assert tables[0]["lr"].tolist() == tables[1]["lr"].tolist() != tables[2]["lr"].tolist()
    assert tables[0]["lr"].between(1e-4, 1.0).all()
    assert tables[0]["result"].tolist() == tables[0]["lr"].tolist()


def test_a_second_call_trains_what_is_not_finished(tmp_path: Path) -> None:
    called: list[float] = []

    def train(settings: dict[str, Any], run: Run) -> float:
        called.append(settings["lr"])
        run.log(0, {"loss": 1.0})
        if settings["lr"] == 0.5 and len(called) < 4:
            raise RuntimeError("the disk\nof node 3 is full")
        return float("nan") if settings["lr"] == 0.1 else settings["lr"]

    with pytest.warns(UserWarning, match=r"1 of 3 trials failed; 'trial-0001': of node 3 is full"):
        table = sweep(train, {"lr": [0.1, 0.5, 0.9]}, folder=tmp_path)
    assert table["status"].tolist() == ["finished", "failed", "finished"]
    assert Run.open(tmp_path / "trial-0001").status == "failed"
    again = sweep(train, {"lr": [0.9, 0.1, 0.5, 0.7]}, folder=tmp_path)
    assert called == [0.1, 0.5, 0.9, 0.5, 0.7]
    assert again["lr"].tolist() == [0.1, 0.5, 0.9, 0.7]
    assert again["result"].fillna(-1).tolist() == [-1, 0.5, 0.9, 0.7]
    assert set(again["status"]) == {"finished"}


def test_errors_can_be_raised(tmp_path: Path) -> None:
    def train(settings: dict[str, Any], run: Run) -> None:
        raise ValueError("no such width")

    with pytest.raises(ValueError, match="no such width"):
        sweep(train, {"width": [1, 2]}, folder=tmp_path, on_error="raise")
    assert Run.open(tmp_path / "trial-0000").status == "failed"
    assert not Run.exists(tmp_path / "trial-0001")


class Halving:
    """Search that moves toward the better of its results."""

    def __init__(self) -> None:
        self.told: list[tuple[str, Any, bool]] = []

    def suggest(self, trial_id: str) -> dict[str, Any] | None:
        return {"x": 8 / 2 ** len(self.told)} if len(self.told) < 3 else None

    def on_trial_complete(self, trial_id: str, result: dict[str, Any] | None = None, error: bool = False) -> None:
        self.told.append((trial_id, result, error))


def test_a_search_has_the_results_before_it_suggests(tmp_path: Path) -> None:
    def train(settings: dict[str, Any], run: Run) -> float:
        if settings["x"] == 4:
            raise RuntimeError("failed")
        return settings["x"] ** 2

    search = Halving()
    with pytest.warns(UserWarning, match="1 of 3 trials failed"):
        table = sweep(train, searcher=search, trials=10, folder=tmp_path)
    assert table["x"].tolist() == [8.0, 4.0, 2.0]
    names = [f"trial-{n:04d}" for n in range(3)]
    assert search.told == [
        (names[0], {"result": 64.0}, False),
        (names[1], None, True),
        (names[2], {"result": 4.0}, False),
    ]


@pytest.mark.parametrize(
    ("options", "match"),
    [
        ({"space": None}, "Pass either space"),
        ({"space": {"a": [1]}, "searcher": Halving()}, "Pass either space"),
        ({"space": None, "searcher": Halving()}, "searcher requires trials"),
        ({"space": {"a": scipy.stats.norm()}}, "space must map each setting"),
        ({"space": {"a": 3}}, "space must map each setting"),
        ({"space": {"a": [1]}, "trials": 0}, "trials must be an integer of at least 1"),
        ({"space": {"a": [1]}, "backend": "slurm"}, "backend must be"),
        ({"space": {"a": [1]}, "n_jobs": 0}, "n_jobs must be"),
        ({"space": {"a": [{1}]}, "function": "train"}, "function must be callable"),
    ],
)
def test_arguments_that_make_no_sense(tmp_path: Path, options: dict[str, Any], match: str) -> None:
    with pytest.raises(InputError, match=match):
        sweep(**{"function": count, "folder": tmp_path / "sweep", **options})
    assert not (tmp_path / "sweep").exists()


SCRIPT = """
import sys, time
from featlearn.training import sweep

def train(settings, run):
    for step in range(20):
        run.log(step, {"loss": settings["seed"] + 1 / (step + 1)})
        time.sleep(float(sys.argv[2]))
    return 1.0

sweep(train, {"seed": list(range(4))}, folder=sys.argv[1])
"""


def test_a_sweep_that_is_killed_is_resumed(tmp_path: Path) -> None:
    first = tmp_path / "sweep" / "trial-0002"
    with running(SCRIPT, tmp_path / "sweep", 0.02) as (child, _):
        end = time.monotonic() + 60
        while not (Run.exists(first) and (Run.open(first).last_step or 0) >= 5):
            assert time.monotonic() < end
            time.sleep(0.01)
        child.kill()
        child.join()
    statuses = {path.name: Run.open(path).status for path in sorted((tmp_path / "sweep").glob("trial-*"))}
    assert statuses == {"trial-0000": "finished", "trial-0001": "finished", "trial-0002": "interrupted"}
    kept = Run.open(first).series("loss").to_dict()
    assert len(kept) >= 6
    done = run_code(SCRIPT, tmp_path / "sweep", 0.0)
    assert (done.returncode, done.stderr) == (0, "")
    for seed in range(4):
        run = Run.open(tmp_path / "sweep" / f"trial-{seed:04d}")
        assert run.status == "finished"
        assert run.config == {"seed": seed}
        assert run.series("loss").to_dict() == {step: seed + 1 / (step + 1) for step in range(20)}
        assert len(run.segments()) == (2 if run.path == first else 1)
    assert Run.open(first).series("loss", segment=1).to_dict() == kept  # nothing is lost


def test_a_trial_continues_from_its_checkpoint(tmp_path: Path) -> None:
    x = torch.randn(32, 4, generator=torch.Generator().manual_seed(0))
    stop = [12]

    def train(settings: dict[str, Any], run: Run) -> float:
        model = fl.models.mlp([4, 8, 1], generator=0)
        options = {"lr": settings["lr"], "batch_size": 8, "generator": 0, "run": run, "checkpoint_every": 5}

        def look(step: int, loss: float) -> None:
            if step == stop[0]:
                raise RuntimeError("preempted")

        return fit(model, (x, x[:, :1]), steps=20, callback=look, **options).final_loss

    with pytest.warns(UserWarning, match="preempted"):
        sweep(train, {"lr": [0.1]}, folder=tmp_path / "stopped")
    stop[0] = -1
    stopped = sweep(train, {"lr": [0.1]}, folder=tmp_path / "stopped")
    whole = sweep(train, {"lr": [0.1]}, folder=tmp_path / "whole")
    assert stopped["result"].tolist() == whole["result"].tolist()
    assert len(Run.open(tmp_path / "stopped" / "trial-0000").segments()) == 1


WRITER = """
import sys
from featlearn.runs import Run
from pathlib import Path
root, number = Path(sys.argv[1]), int(sys.argv[2])
for part in range(3):
    with Run.create(root / f"run-{number}-{part}", {"number": number, "part": part}) as run:
        for step in range(100):
            run.log(step, {"loss": number + step / 100, "part": part})
"""


def test_eight_processes_write_runs_into_one_folder(tmp_path: Path) -> None:
    seen = set()
    with ExitStack() as stack:
        started = [stack.enter_context(running(WRITER, tmp_path / "runs", number)) for number in range(8)]
        while any(child.exitcode is None for child, _ in started):
            if (tmp_path / "runs").is_dir():
                seen |= set(fl.runs.list(tmp_path / "runs")["status"])  # reading meanwhile does not disturb
            time.sleep(0.1)
        assert [(child.exitcode, (folder / "stderr").read_text()) for child, folder in started] == [(0, "")] * 8
    table = fl.runs.list(tmp_path / "runs")
    assert len(table) == 24
    assert set(table["status"]) == {"finished"}
    assert seen <= {"running", "finished"}
    for number in range(8):
        for part in range(3):
            run = Run.open(tmp_path / "runs" / f"run-{number}-{part}")
            assert run.series("loss").to_list() == [number + step / 100 for step in range(100)]


_BUSY_STEPS = 120  # of a tenth of a second: the second node starts its worker while the first one trains


def _busy(settings: dict[str, Any], run: Run) -> float:
    """Train for a while; a marker says on which node, so that the test can kill one that is known to be busy."""
    import ray

    marker = run.path.parent / "busy" / f"{settings['seed']}-{ray.get_runtime_context().get_node_id()}"
    marker.parent.mkdir(exist_ok=True)
    marker.write_text(json.dumps({"pid": os.getpid()}))
    for step in range(_BUSY_STEPS):
        run.log(step, {"loss": settings["seed"] + step})
        time.sleep(0.1)
    return settings["seed"] ** 2


@pytest.mark.slow  # a cluster of two nodes takes half a minute to start
@pytest.mark.filterwarnings("ignore")  # of Ray
def test_a_node_that_dies_while_it_is_busy_loses_nothing(tmp_path: Path) -> None:
    import threading

    import ray
    from ray.cluster_utils import Cluster

    here = Path(__file__).parent
    paths = os.pathsep.join([str(here), str(here.parent), *filter(None, [os.environ.get("PYTHONPATH")])])
    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 1, "include_dashboard": False})
    doomed = cluster.add_node(num_cpus=1)
    cluster.wait_for_nodes()
    environment = {"env_vars": {"PYTHONPATH": paths}}
    ray.init(address=cluster.address, log_to_driver=False, runtime_env=environment)
    killed: list[str] = []

    def kill() -> None:
        end = time.monotonic() + 120
        while time.monotonic() < end:
            for path in (tmp_path / "busy").glob(f"*-{doomed.node_id}"):
                run = Run.open(
                    next(p for p in tmp_path.glob("trial-*") if Run.open(p).config["seed"] == int(path.name[0]))
                )
                if run.status == "running" and 3 <= (run.last_step or 0) < _BUSY_STEPS - 10:
                    cluster.remove_node(doomed, allow_graceful=False)
                    killed.append(run.name)
                    return
            time.sleep(0.05)

    killer = threading.Thread(target=kill)
    killer.start()
    try:
        table = sweep(_busy, {"seed": [0, 1, 2, 3]}, folder=tmp_path, n_jobs=-1, backend="ray")
    finally:
        killer.join()
        ray.shutdown()
        cluster.shutdown()
    assert len(killed) == 1
    assert table["status"].tolist() == ["finished"] * 4
    assert table["result"].tolist() == [0, 1, 4, 9]
    for seed in range(4):
        run = Run.open(tmp_path / f"trial-{seed:04d}")
        assert run.series("loss").to_list() == [seed + step for step in range(_BUSY_STEPS)]
    again = Run.open(tmp_path / killed[0])
    assert len(again.segments()) == 2  # what was recorded before the node died is kept
