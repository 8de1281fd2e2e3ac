"""Trackers, each read back from what it wrote: an event file, an SQLite store, an offline run."""

from __future__ import annotations

import json
import math
import struct
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from featlearn.training import Monitor
from featlearn.training.trackers import (
    MissingPackageError,
    MLflowTracker,
    TensorBoardTracker,
    Tracker,
    WandbTracker,
    needed,
)

pytestmark = [
    # What the packages themselves use of their dependencies is not ours to mend.
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
    pytest.mark.filterwarnings("ignore::FutureWarning"),
    pytest.mark.filterwarnings("ignore::PendingDeprecationWarning"),
    pytest.mark.filterwarnings("ignore::ResourceWarning"),
    pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning"),
]
X = torch.randn(30, 4, generator=torch.Generator().manual_seed(0))
Y = X[:, :1].sin()


def watched(tracker: Tracker) -> Monitor:
    """A short training that is measured at steps 0 and 2."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    monitor = Monitor(model, (X, Y), every=2, budget=None, kernel_samples=10, trackers=[tracker])
    for step in range(3):
        loss = nn.functional.mse_loss(model(X), Y)
        monitor.step(step, loss=loss)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    monitor.close()
    return monitor


def log_records(content: bytes) -> Iterator[bytes]:
    """Records of a W&B file: LevelDB's log format, blocks of 32 KiB, after a header of seven bytes."""
    place, record = 7, b""
    while place + 7 <= len(content):
        left = 32768 - place % 32768
        if left < 7:  # no room for a header: zeros up to the next block
            place += left
            continue
        _, length, kind = struct.unpack_from("<IHB", content, place)
        if kind == 0:
            place += left
            continue
        if place + 7 + length > len(content):  # W&B is still writing this one
            return
        record += content[place + 7 : place + 7 + length]
        place += 7 + length
        if kind in (1, 4):  # whole, or the last part
            yield record
            record = b""


def test_tensorboard(tmp_path: Path) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    tracker = TensorBoardTracker(tmp_path)
    assert isinstance(tracker, Tracker)
    monitor = watched(tracker)
    events = EventAccumulator(str(tmp_path))
    events.Reload()
    for name, layer in (("nfc", "0"), ("ck.kta", "2")):
        result = {event.step: event.value for event in events.Scalars(f"{layer}/{name}")}
        wanted = monitor.series(name, layer)
        assert result == pytest.approx(wanted.to_dict(), rel=1e-6)  # its numbers are float32
    assert [event.step for event in events.Scalars("loss")] == [0, 1, 2]
    assert {event.step for event in events.Scalars("ntk.kta")} == {0, 2}


def test_mlflow_in_a_store_on_disk(tmp_path: Path) -> None:
    import mlflow

    uri = f"sqlite:///{tmp_path}/mlflow.db"
    before = mlflow.get_tracking_uri()
    tracker = MLflowTracker(uri, experiment="test", run_name="first")
    monitor = watched(tracker)
    assert mlflow.get_tracking_uri() == before
    assert mlflow.active_run() is None
    client = mlflow.MlflowClient(tracking_uri=uri)
    run = client.get_run(tracker.run_id)
    assert run.info.status == "FINISHED"
    assert run.info.run_name == "first"
    result = {m.step: m.value for m in client.get_metric_history(tracker.run_id, "0/nfc")}
    assert result == monitor.series("nfc", "0").to_dict()
    assert len(client.get_metric_history(tracker.run_id, "loss")) == 3
    again = MLflowTracker(uri, experiment="test", run_id=tracker.run_id)
    again.log(3, {"loss": 0.25, "strange[name]": math.nan})
    again.close()
    assert client.get_metric_history(tracker.run_id, "loss")[-1].value == 0.25
    assert math.isnan(client.get_metric_history(tracker.run_id, "strange_name_")[0].value)


def test_wandb_offline(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from wandb.proto import wandb_internal_pb2

    def records(file: Path) -> list[Any]:
        return [wandb_internal_pb2.Record.FromString(data) for data in log_records(file.read_bytes())]

    monkeypatch.setenv("WANDB_SILENT", "true")
    tracker = WandbTracker("test", tmp_path, name="first")
    folder = Path(tracker.folder).parent
    monitor = watched(tracker)
    (file,) = folder.glob("*.wandb")
    end = time.monotonic() + 60  # W&B writes in a process of its own, which may be behind on a busy machine
    while "exit" not in (kinds := [record.WhichOneof("record_type") for record in records(file)]):
        assert time.monotonic() < end, kinds
        time.sleep(0.2)
    rows = [
        {i.key or "/".join(i.nested_key): json.loads(i.value_json) for i in record.history.item}
        for record in records(file)
        if record.WhichOneof("record_type") == "history"
    ]
    result = {row["step"]: row["0/nfc"] for row in rows if "0/nfc" in row}
    assert result == monitor.series("nfc", "0").to_dict()
    assert [row["step"] for row in rows if "loss" in row] == [0, 1, 2]


def test_a_package_that_is_missing_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "mlflow", None)
    with pytest.raises(MissingPackageError, match=r"mlflow cannot be imported.*pip install 'featlearn\[tracking\]'"):
        MLflowTracker()
    assert needed("json", "x") is json


def test_anything_with_two_methods_is_a_tracker() -> None:
    class Mine:
        def __init__(self) -> None:
            self.told: dict[int, dict[str, float]] = {}
            self.closed = False

        def log(self, step: int, values: dict[str, float]) -> None:
            self.told.setdefault(step, {}).update(values)

        def close(self) -> None:
            self.closed = True

    mine = Mine()
    monitor = watched(mine)
    assert mine.closed
    assert mine.told[2]["0/nfc"] == monitor.latest.layers["0"]["nfc"]
    assert "monitor.seconds" in mine.told[0]
