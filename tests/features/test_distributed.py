"""Sums over processes: two gloo processes against one."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import featlearn as fl
from processes import run_ranks


def model(seed: int = 0) -> nn.Module:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return nn.Sequential(nn.Conv1d(4, 6, 2, groups=2), nn.Tanh(), nn.Flatten(), nn.Linear(18, 3)).double()


def data() -> tuple[Tensor, Tensor]:
    g = torch.Generator().manual_seed(5)
    return torch.randn(11, 4, 4, generator=g, dtype=torch.float64), torch.randint(3, (11,), generator=g)


def accumulator(seed: int = 0, sharded: bool = False, **arguments: Any) -> fl.FeatureAccumulator:
    loss = nn.CrossEntropyLoss()
    subject = model(seed)
    if sharded:
        mesh = init_device_mesh("cpu", (2,))
        for part in (subject[0], subject[3], subject):
            fully_shard(part, mesh=mesh)
    return fl.FeatureAccumulator(subject, initial=model(9), loss=loss, weight_decay=0.1, **arguments)


def flat(report: fl.Report) -> dict[str, Tensor]:
    return {f"{name}/{key}": v.clone().contiguous() for name in report for key, v in report[name].sums.items()}


# What the two processes do, one after the other: rows of each, and how they disagree.
SCENARIOS: dict[str, tuple[list[tuple[int, int]], str]] = {
    "uneven": ([(0, 6), (6, 11)], ""),
    "sharded weights": ([(0, 6), (6, 11)], ""),
    "one sample": ([(0, 1), (1, 11)], ""),
    "second without data": ([(0, 11), (0, 0)], ""),
    "first without data": ([(0, 0), (0, 11)], ""),
    "parts": ([(0, 6), (6, 11)], ""),
    "parts, second without data": ([(0, 11), (0, 0)], ""),
    "parts of sharded weights": ([(0, 6), (6, 11)], ""),
    "other parts": ([(0, 6), (6, 11)], "different models"),
    "other weights": ([(0, 6), (6, 11)], "different models"),
    "other layers": ([(0, 6), (6, 11)], "different models"),
    "other outputs": ([(0, 6), (6, 11)], "different outputs"),
    "no data": ([(0, 0), (0, 0)], "no process has measured"),
}
PARTS = {"0": 2, "3": 3}
AGREE = [name for name, (_, words) in SCENARIOS.items() if not words]


def worker(rank: int, folder: str) -> None:
    for name, (shards, _) in SCENARIOS.items():
        message = scenario(name, rank, shards[rank], f"{folder}/{name}-{rank}.safetensors")
        Path(f"{folder}/{name}-{rank}.txt").write_text(message, encoding="utf-8")


def scenario(name: str, rank: int, shard: tuple[int, int], path: str) -> str:
    """What one process does; the message of the error it meets."""
    arguments: dict[str, Any] = {}
    if name == "other outputs":
        arguments["outputs"] = ("exact", 4)[rank]
    if name == "other layers":
        arguments["layers"] = ("0", "*")[rank]
    if name.startswith("parts"):
        arguments["split"] = PARTS
    if name == "other parts":
        arguments["split"] = (PARTS, {"0": 6, "3": 3})[rank]
    total = accumulator(rank if name == "other weights" else 0, name.endswith("sharded weights"), **arguments)
    x, y = data()
    start, stop = shard
    for i in range(start, stop, 3):
        total.update((x[i : min(i + 3, stop)], y[i : min(i + 3, stop)]))
    try:
        total.sync()
        total.sync()  # a second time adds nothing
        report = total.compute()
        save_file(flat(report) | {"samples": torch.tensor(report.samples)}, path)
        total.update((x, y))
    except fl.InputError as error:
        return str(error)
    return ""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Results of two processes, started once for all scenarios."""
    folder = tmp_path_factory.mktemp("processes")
    run_ranks(worker, str(folder))
    return folder


@pytest.mark.parametrize("name", AGREE)
def test_two_processes_give_the_report_of_one(name: str, folder: Path) -> None:
    whole = accumulator(split=PARTS if name.startswith("parts") else None)
    whole.update(data())
    expected = flat(whole.compute())
    results = [load_file(folder / f"{name}-{rank}.safetensors") for rank in range(2)]
    for rank, result in enumerate(results):
        assert int(result.pop("samples")) == 11
        assert result.keys() == expected.keys()
        for key, value in expected.items():
            assert (result[key] - value).abs().max() <= 1e-10 * value.abs().max(), key
        assert "new accumulator" in (folder / f"{name}-{rank}.txt").read_text(encoding="utf-8")
    assert all(torch.equal(results[0][key], results[1][key]) for key in expected)


@pytest.mark.parametrize("name", [name for name in SCENARIOS if name not in AGREE])
def test_processes_that_disagree_all_say_so(name: str, folder: Path) -> None:
    for rank in range(2):
        assert SCENARIOS[name][1] in (folder / f"{name}-{rank}.txt").read_text(encoding="utf-8")
        assert not (folder / f"{name}-{rank}.safetensors").exists()


def test_sync_in_a_single_process_does_nothing() -> None:
    total = accumulator()
    total.update(data())
    before = flat(total.compute())
    total.sync()
    after = flat(total.compute())
    assert all(torch.equal(before[key], after[key]) for key in before)
    total.update(data())
    assert total.compute().samples == 22
