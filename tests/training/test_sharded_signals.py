"""FSDP2 on four processes: measurements, signals and findings are those of one process."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

from featlearn.runs import Run
from featlearn.training import Monitor, _signals
from processes import run_ranks

RANKS, ROWS, STEPS = 4, 64, 6


class Block(nn.Module):
    """Block with a residual, whose parts are sharded inside of it."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(width, 2 * width + 1), nn.Linear(2 * width + 1, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.relu(self.up(x)))


def net() -> nn.Sequential:
    """Layers of 7, 15, 7, 2 and 3 rows, none of which four processes share evenly."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        parts = [nn.Linear(5, 7), nn.Tanh(), Block(7), nn.Linear(7, 2), nn.ReLU(), nn.Linear(2, 3)]
        return nn.Sequential(*parts).double()


def even(model: nn.Sequential, mesh: Any) -> nn.Module:
    for part in (model[0], model[2], model[3], model[5], model):
        fully_shard(part, mesh=mesh)
    return model


def nested(model: nn.Sequential, mesh: Any) -> nn.Module:
    for part in (model[2].up, model[2].down, model[2], model):
        fully_shard(part, mesh=mesh)
    return model


def copied_shards(model: nn.Sequential, mesh: Any) -> nn.Module:
    """Two copies of two shards (HSDP)."""
    both = init_device_mesh("cpu", (2, 2), mesh_dim_names=("copies", "shards"))
    for part in (model[0], model[2], model):
        fully_shard(part, mesh=both)
    return model


Wrap = Callable[[nn.Sequential, Any], nn.Module]
WRAPPINGS: dict[str, tuple[Wrap, bool]] = {
    "even": (even, False),
    "nested": (nested, True),
    "copied_shards": (copied_shards, True),
}
"""Function that shards a model, and whether gradients are removed early."""


def data() -> tuple[Tensor, Tensor]:
    g = torch.Generator().manual_seed(3)
    x = torch.randn(RANKS * ROWS, 5, generator=g, dtype=torch.float64)
    return x, (x @ torch.randn(5, 3, generator=g, dtype=torch.float64)).argmax(1)


def train(
    model: nn.Module, rows: tuple[Tensor, Tensor], steps: int = STEPS, early: bool = False, **options: Any
) -> Monitor:
    """Train; if ``early``, gradients are removed before the monitor could read them."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.3, momentum=0.5)
    monitor = Monitor(model, rows, **{"every": 1, "budget": None, "measure": ["features", "weights"]} | options)
    for step in range(steps):
        loss = nn.functional.cross_entropy(model(rows[0]), rows[1])
        monitor.step(step, loss=loss)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if early:
            optimizer.zero_grad()
    monitor.last(steps)
    monitor.close()
    return monitor


def mine(rank: int) -> tuple[Tensor, Tensor]:
    return tuple(t[ROWS * rank : ROWS * (rank + 1)] for t in data())  # type: ignore[return-value]


def numbers(run: Path) -> dict[tuple[Any, ...], float]:
    table = Run.open(run).metrics()
    table = table[~table["name"].str.startswith("monitor.") & (table["name"] != "relgrad_noise")]
    keys = [
        (step, None if layer != layer else layer, name) for step, layer, name in table[["step", "layer", "name"]].values
    ]
    return dict(zip(keys, table["value"], strict=True))


def assert_same(one: dict[Any, float], many: dict[Any, float], least: int) -> None:
    assert set(one) == set(many)
    assert len([key for key in one if key[2].startswith("signal.")]) >= least
    for key, value in one.items():
        # The ratio and the cosine of an update are differences of weights that nearly agree.
        assert many[key] == pytest.approx(value, rel=1e-6, abs=1e-9, nan_ok=True), key


def wrapped(rank: int, folder: str) -> None:
    _signals.SHARE = 1e9  # looks at every step, whatever they cost
    mesh = init_device_mesh("cpu", (RANKS,))
    for name, (wrap, early) in WRAPPINGS.items():
        monitor = train(wrap(net(), mesh), mine(rank), early=early, run=Path(folder) / name)
        initial = monitor._measured.initial
        assert sum(p.untyped_storage().nbytes() for p in initial.parameters()) == 0
    model = nn.Sequential(*net()).float()
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    start = {name: value.clone() for name, value in model.state_dict().items()}
    for part in (model[2], model):
        fully_shard(part, mesh=mesh, mp_policy=policy)
    x, y = mine(rank)
    train(model, (x.float(), y), run=Path(folder) / "mixed")
    final = {name: value.full_tensor() for name, value in model.state_dict().items()}
    if rank == 0:
        torch.save((start, final), f"{folder}/mixed.pt")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("sharded")
    run_ranks(wrapped, str(path), ranks=RANKS)
    return path


@pytest.mark.parametrize("name", WRAPPINGS)
def test_numbers_are_those_of_one_process(
    folder: Path, tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(_signals, "SHARE", 1e9)
    train(net(), data(), early=WRAPPINGS[name][1], run=tmp_path / "one")
    one, many = numbers(tmp_path / "one"), numbers(folder / name)
    assert len(one) > 700
    assert_same(one, many, STEPS * 5 * 4)
    assert [key for key in one if key[2] == "signal.dead_share"]
    gradients = [value for key, value in many.items() if key[1:] == ("0", "signal.gradient_norm")]
    assert len(gradients) >= STEPS - 1
    assert all(math.isfinite(value) and value > 0 for value in gradients)


def test_mixed_precision_is_measured_with_the_weights_that_are_trained(folder: Path, tmp_path: Path) -> None:
    start, final = torch.load(folder / "mixed.pt", weights_only=True)
    model = nn.Sequential(*net()).float()
    model.load_state_dict(final)
    x, y = data()
    monitor = Monitor(model, (x.float(), y), initial=start, run=tmp_path / "one", budget=None)
    monitor.measure(STEPS)
    monitor.close()
    one, many = numbers(tmp_path / "one"), numbers(folder / "mixed")
    nfcs = [key for key in one if key[2] == "nfc"]
    assert len(nfcs) == 5
    for key in nfcs:
        assert many[key] == pytest.approx(one[key], rel=1e-6), key


def clocks(rank: int, folder: str) -> None:
    """Each process would decide otherwise by its own clock."""
    _signals.SHARE = 0.0 if rank else 1e9
    mesh = init_device_mesh("cpu", (RANKS,))
    monitor = train(
        even(net(), mesh), mine(rank), 35, run=Path(folder) / "clocks", every=[0, 7, 30], budget=0.5, measure="weights"
    )
    Path(f"{folder}/looks-{rank}.txt").write_text(str(monitor._watch.signals._looks))
    # The first process gives up; the others do not wait for it.
    monitor = Monitor(even(net(), mesh), mine(rank), run=Path(folder) / "ended", every=[0], measure="weights")
    if rank == 0:
        monitor._watch._diagnostician.look = None  # type: ignore[assignment, method-assign]
    for step in range(25):
        monitor.step(step, loss=1.0)
    monitor.close()


@pytest.mark.filterwarnings("ignore:Signals are not taken")
def test_the_first_process_decides_for_all(tmp_path: Path) -> None:
    run_ranks(clocks, str(tmp_path), ranks=RANKS)
    looks = {(tmp_path / f"looks-{rank}.txt").read_text() for rank in range(RANKS)}
    assert len(looks) == 1
    signals = Run.open(tmp_path / "clocks").series("signal.gradient_norm", "0")
    assert {7, 30, 35} <= set(signals.index)
    assert len(signals) > 5
    assert Run.open(tmp_path / "ended").status == "finished"
    assert Run.open(tmp_path / "ended").series("loss").index.tolist() == list(range(25))


def dead_net() -> nn.Sequential:
    model = net()
    with torch.no_grad():
        model[3].bias.fill_(-100.0)
    return model


def dead(rank: int, folder: str) -> None:
    _signals.SHARE = 1e9
    mesh = init_device_mesh("cpu", (RANKS,))
    monitor = train(even(dead_net(), mesh), mine(rank), 20, run=Path(folder) / "dead", every=5)
    if rank == 0:
        Path(f"{folder}/dead.txt").write_text(str(monitor.findings()))


def test_a_dead_layer_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run_ranks(dead, str(tmp_path), ranks=RANKS)
    monkeypatch.setattr(_signals, "SHARE", 1e9)
    one = train(dead_net(), data(), 20, every=5)
    assert any(finding.fault == "dead layer" for finding in one.findings()["3"])
    assert (tmp_path / "dead.txt").read_text() == str(one.findings())
    assert "dead" in str(Run.open(tmp_path / "dead").texts()["value"].tolist())
