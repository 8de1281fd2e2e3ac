"""FSDP2: sharded trainings are measured as one process measures them."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from featlearn.runs import Run
from featlearn.training import Monitor
from processes import run_ranks

STEPS = 4


def net() -> nn.Sequential:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        parts = [nn.Linear(5, 8), nn.Tanh(), nn.LayerNorm(8), nn.Linear(8, 6), nn.ReLU(), nn.Linear(6, 3)]
        return nn.Sequential(*parts).double()


def data() -> tuple[Tensor, Tensor]:
    g = torch.Generator().manual_seed(3)
    return torch.randn(40, 5, generator=g, dtype=torch.float64), torch.randint(3, (40,), generator=g)


def train(model: nn.Module, rows: tuple[Tensor, Tensor], folder: Path, **options: Any) -> Monitor:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.2, weight_decay=0.01)
    options = {"every": 1, "budget": None, "loss": nn.CrossEntropyLoss(), "weight_decay": 0.01} | options
    monitor = Monitor(model, rows, run=folder, kernel_samples=40, matrices=["agop"], **options)
    for step in range(STEPS):
        loss = nn.functional.cross_entropy(model(rows[0]), rows[1])
        monitor.step(step, loss=loss)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    monitor.last(STEPS)
    monitor.close()
    return monitor


def worker(rank: int, folder: str) -> None:
    x, y = data()
    mine = x[20 * rank : 20 * rank + 20], y[20 * rank : 20 * rank + 20]
    mesh = init_device_mesh("cpu", (2,))
    for name, options in (("all", {}), ("budget", {"budget": 1e9})):
        model = net()
        for part in (model[0], model[3], model):
            fully_shard(part, mesh=mesh)
        hooks = [
            {k: len(v) for k, v in vars(m).items() if k.startswith("_forward") and k.endswith("hooks")}
            for m in model.modules()
        ]
        monitor = train(model, mine, Path(folder) / name, **options)
        assert hooks == [
            {k: len(v) for k, v in vars(m).items() if k.startswith("_forward") and k.endswith("hooks")}
            for m in model.modules()
        ]
        # Between measurements a process keeps its shards of the start, and no whole weights.
        initial = monitor._measured.initial
        assert sum(p.untyped_storage().nbytes() for p in initial.parameters()) == 0
        if name == "all":
            final = {key: value.full_tensor() for key, value in model.state_dict().items()}
            if rank == 0:
                torch.save(final, f"{folder}/final.pt")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("sharded")
    run_ranks(worker, str(path))
    return path


def test_a_sharded_training_is_measured_as_a_whole_one(folder: Path, tmp_path: Path) -> None:
    model = net()
    train(model, data(), tmp_path / "one")
    final = torch.load(folder / "final.pt", weights_only=True)
    for name, value in model.state_dict().items():  # the monitor changed nothing
        torch.testing.assert_close(final[name], value, rtol=1e-12, atol=1e-12)
    one, two = Run.open(tmp_path / "one"), Run.open(folder / "all")
    keys = ["step", "layer", "name"]
    a, b = (run.metrics().set_index(keys)["value"] for run in (one, two))
    # Signals of units are those of the first process, which has other rows; test_sharded_signals compares them.
    a, b = (of[[not key[2].startswith("signal.") for key in of.index]] for of in (a, b))
    assert set(a.index) == set(b.index)
    compared = [k for k in a.index if not k[2].startswith("monitor.") and k[2] != "relgrad_noise"]
    assert len(compared) > 300
    for key in compared:
        assert b[key] == pytest.approx(a[key], rel=1e-6, abs=1e-9, nan_ok=True), key
    torch.testing.assert_close(two.matrices(STEPS)["3/agop"], one.matrices(STEPS)["3/agop"], rtol=1e-9, atol=1e-12)
    initial = two.initial()
    assert initial is not None
    assert all(torch.equal(initial[name], value) for name, value in net().state_dict().items())


def test_the_recorded_loss_is_the_mean_over_the_processes(folder: Path) -> None:
    run, model = Run.open(folder / "all"), net()
    x, y = data()
    halves = [nn.functional.cross_entropy(model(x[i : i + 20]), y[i : i + 20]).item() for i in (0, 20)]
    assert abs(halves[0] - halves[1]) > 1e-3
    assert run.series("loss")[0] == pytest.approx(np.mean(halves), rel=1e-12)


def test_a_budget_sizes_sharded_measurements_too(folder: Path) -> None:
    run = Run.open(folder / "budget")
    assert run.series("monitor.feature_rows").index.tolist() == list(range(STEPS + 1))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert "monitor.feature_rows" in set(run.metrics()["name"])
