"""A monitor over two gloo processes under DistributedDataParallel, against one process."""

from __future__ import annotations

import warnings
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from featlearn.errors import InputError
from featlearn.runs import Run
from featlearn.training import Monitor
from processes import run_ranks

STEPS = 4


def data() -> tuple[Tensor, Tensor]:
    g = torch.Generator().manual_seed(5)
    x = torch.randn(40, 5, generator=g, dtype=torch.float64)
    return x, (x[:, :1] * x[:, 1:2]).tanh()


def net() -> nn.Sequential:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 1)).double()


def train(model: nn.Module, rows: tuple[Tensor, Tensor], folder: Path, budget: float | None) -> Monitor:
    """Each process sees half the rows, so that the mean of its gradients is that of all."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.2, weight_decay=0.01)
    monitor = Monitor(model, rows, run=folder, every=1, budget=budget, loss=nn.MSELoss(), weight_decay=optimizer,
                      kernel_samples=40, matrices=["agop"])  # fmt: skip
    for step in range(STEPS):
        loss = nn.functional.mse_loss(model(rows[0]), rows[1])
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
    for name, budget in (("all", None), ("budget", 1e9), ("little", 1e-9)):
        model = DistributedDataParallel(net())
        monitor = train(model, mine, Path(folder) / name, budget)
        assert monitor.latest.step == STEPS  # the end is measured in any case
        save_file(dict(model.module.state_dict()), f"{folder}/{name}-{rank}.safetensors")
    # The run of the last one is taken up: only process 0 can read how it began.
    again = Monitor(model, mine, run=Path(folder) / "little", resume=True, measure="features")
    result = again.measure(STEPS)
    again.close()
    Path(f"{folder}/moved-{rank}.txt").write_text(str(result.layers["0"]["weight_change"]))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("processes")
    run_ranks(worker, str(path))
    return path


def test_two_processes_record_what_one_does(folder: Path, tmp_path: Path) -> None:
    model = net()
    train(model, data(), tmp_path / "one", None)
    for rank in range(2):
        for name, value in load_file(folder / f"all-{rank}.safetensors").items():
            torch.testing.assert_close(value, model.state_dict()[name], rtol=1e-12, atol=1e-14)
    one, two = Run.open(tmp_path / "one"), Run.open(folder / "all")
    assert two.status == "finished"
    keys = ["step", "layer", "name"]
    # Signals are those of the first process, which has other rows.
    a, b = (run.metrics().query("not name.str.startswith('signal.')").set_index(keys)["value"] for run in (one, two))
    assert set(a.index) == set(b.index)
    reported = [key for key in a.index if not key[2].startswith("monitor.") and key[2] != "loss"]
    assert len(reported) > 250
    for key in reported:
        if key[2] == "relgrad_noise":  # an estimate from halves, which are others for two shards
            assert 0.2 * a[key] < b[key] < 5 * a[key]
            continue
        assert b[key] == pytest.approx(a[key], rel=1e-7, abs=1e-9, nan_ok=True), key
    # Sentences about noise name its estimate.
    words = [
        run.texts()[lambda t: ~t["value"].str.contains("sampling noise") & (t["name"] != "findings")]
        for run in (one, two)
    ]
    assert len(words[0]) > 30
    assert words[0].reset_index(drop=True).equals(words[1].reset_index(drop=True))
    torch.testing.assert_close(two.matrices(STEPS)["0/agop"], one.matrices(STEPS)["0/agop"], rtol=1e-9, atol=1e-12)


def test_processes_measure_together_when_a_clock_decides(folder: Path) -> None:
    """Processes that decided by their own clocks would wait for each other for ever."""
    assert Run.open(folder / "budget").series("monitor.feature_rows").index.tolist() == [0, 1, 2, 3, 4]
    little = Run.open(folder / "little")  # measured at the start alone, and at the end when it was taken up
    assert little.series("monitor.feature_rows").index.tolist() == [0, STEPS]


def test_a_run_that_is_taken_up_has_one_start_in_all_processes(folder: Path, tmp_path: Path) -> None:
    model = net()
    monitor = train(model, data(), tmp_path / "one", None)
    moved = [float((folder / f"moved-{rank}.txt").read_text()) for rank in range(2)]
    assert moved[0] == moved[1]
    assert moved[0] == pytest.approx(monitor.series("weight_change", "0").iloc[-1], rel=1e-9)
    assert moved[0] > 0.01


def second_launch(rank: int, folder: str) -> None:
    x, y = data()
    mine = x[20 * rank : 20 * rank + 20], y[20 * rank : 20 * rank + 20]
    options = {"run": Path(folder) / "again", "measure": "features", "every": 1}
    for name in ("first", "second"):
        with warnings.catch_warnings(record=True) as reported:
            warnings.simplefilter("always")
            monitor = Monitor(DistributedDataParallel(net()), mine, config={"name": name}, **options)
        new = [str(w.message) for w in reported if "new run" in str(w.message)]
        assert len(new) == (rank == 0 and name == "second"), new
        monitor.step()
        monitor.close()
    try:
        Monitor(DistributedDataParallel(net()), mine, config={"name": "other"}, resume=True, **options)
    except InputError as error:
        Path(f"{folder}/refused-{rank}.txt").write_text(str(error))
    monitor = Monitor(DistributedDataParallel(net()), mine, resume=True, **options)
    result = monitor.step()
    monitor.close()
    Path(f"{folder}/counted-{rank}.txt").write_text(str(result.step))


def test_process_0_decides_where_a_launch_goes(tmp_path: Path) -> None:
    run_ranks(second_launch, str(tmp_path))
    assert Run.open(tmp_path / "again").config == {"name": "first"}
    assert Run.open(tmp_path / "again-2").config == {"name": "second"}
    assert not (tmp_path / "again-3").exists()
    for rank in range(2):
        assert "name was 'first' and is 'other'" in (tmp_path / f"refused-{rank}.txt").read_text()
        assert (tmp_path / f"counted-{rank}.txt").read_text() == "1"
